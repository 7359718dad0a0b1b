package zebu

import (
	"fmt"
	"slices"
)

// Option says how an image is opened, made or served. A function refuses options that it has no use for.
type Option func(*options)

type options struct {
	program  func() (string, error)
	format   string
	writable bool
	isOpts   bool
	snapshot string
	exports  []string
	progress chan<- float64
	target   string
	force    bool
	compress bool
	repair   Repair
	refs     []string
	args     []string
	// given are the names of the options that only some functions take.
	given []string
}

// gather puts options together. Those that what is done has no use for are refused.
func gather(done string, given []Option, takes ...string) (options, error) {
	var o options
	for _, option := range given {
		option(&o)
	}
	for _, name := range o.given {
		if !slices.Contains(takes, name) {
			return o, fmt.Errorf("zebu: %s has no use for the option %s", done, name)
		}
	}
	return o, nil
}

// named is an option that only some functions take.
func named(name string, set func(*options)) Option {
	return func(o *options) {
		o.given = append(o.given, name)
		set(o)
	}
}

// source is the part of a command line that names an image to read.
func (o options) source() []string {
	var args []string
	if o.format != "" {
		args = append(args, "-f", o.format)
	}
	if o.isOpts {
		args = append(args, "--image-opts")
	}
	for _, rule := range o.refs {
		args = append(args, "--allow-refs", rule)
	}
	return args
}

// made is the part of a command line that says what is made.
func (o options) made(formatOption string) []string {
	var args []string
	if o.target != "" {
		args = append(args, formatOption, o.target)
	}
	if o.force {
		args = append(args, "--force")
	}
	if o.compress {
		args = append(args, "-c")
	}
	return args
}

// Program names the program, instead of the one of the variable ZEBU or in PATH.
func Program(path string) Option {
	return ProgramFrom(func() (string, error) { return path, nil })
}

// ProgramFrom has a function name the program each time that one is started.
func ProgramFrom(find func() (string, error)) Option { return func(o *options) { o.program = find } }

// Format names the format of the image. Without it, the format is probed, and what looks raw is read-only.
func Format(name string) Option {
	return named("Format", func(o *options) { o.format = name })
}

// Writable opens an image for writing.
func Writable() Option {
	return named("Writable", func(o *options) { o.writable = true })
}

// ImageOpts says that names are lists of key=value, as of zebu's --image-opts.
func ImageOpts() Option {
	return named("ImageOpts", func(o *options) { o.isOpts = true })
}

// AllowRefs says which files an image may name: "none", "local" (those of its folder, the default), "dir=PATH", "prefix=URL" or
// "all". It may be given more than once.
func AllowRefs(rule string) Option {
	return named("AllowRefs", func(o *options) { o.refs = append(o.refs, rule) })
}

// Snapshot opens the disk as an internal snapshot has it. It can't be written.
func Snapshot(name string) Option {
	return named("Snapshot", func(o *options) { o.snapshot = name })
}

// Exports names the exports of a server, one for each image.
func Exports(names ...string) Option {
	return named("Exports", func(o *options) { o.exports = names })
}

// Progress has the share of a job that is done, from 0 to 1, sent to a channel. Values that are not received in time are left out. The
// channel is closed at the end.
func Progress(to chan<- float64) Option {
	return named("Progress", func(o *options) { o.progress = to })
}

// TargetFormat names the format of what is made. Default: by the suffix of its name (.qcow2, .raw, .img, .vmdk and others).
func TargetFormat(name string) Option {
	return named("TargetFormat", func(o *options) { o.target = name })
}

// Force lets a file that holds something be replaced.
func Force() Option {
	return named("Force", func(o *options) { o.force = true })
}

// Compress has the target of Convert compressed.
func Compress() Option {
	return named("Compress", func(o *options) { o.compress = true })
}

// Repair says what Check mends.
type Repair string

// Kinds of repair.
const (
	// RepairLeaks gives space back that nothing uses.
	RepairLeaks Repair = "leaks"
	// RepairAll repairs everything that can be.
	RepairAll Repair = "all"
)

// WithRepair has Check mend what it finds.
func WithRepair(what Repair) Option {
	return named("WithRepair", func(o *options) { o.repair = what })
}

// Args adds arguments of zebu's command line, such as "--object", "secret,...".
func Args(args ...string) Option { return func(o *options) { o.args = append(o.args, args...) } }
