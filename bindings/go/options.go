package zebu

// Option says how an image is opened, made or served.
type Option func(*options)

type options struct {
	program  string
	format   string
	writable bool
	isOpts   bool
	snapshot string
	exports  []string
	progress chan<- float64
	target   string
	args     []string
}

func gather(given []Option) options {
	var o options
	for _, option := range given {
		option(&o)
	}
	return o
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
	return args
}

// Program names the program, instead of the one in PATH or in the variable ZEBU.
func Program(path string) Option { return func(o *options) { o.program = path } }

// Format names the format of the image. Without it, the format is probed, and what looks raw is read-only.
func Format(name string) Option { return func(o *options) { o.format = name } }

// Writable opens an image for writing.
func Writable() Option { return func(o *options) { o.writable = true } }

// ImageOpts says that names are lists of key=value, as of zebu's --image-opts.
func ImageOpts() Option { return func(o *options) { o.isOpts = true } }

// Snapshot opens the disk as an internal snapshot has it. It can't be written.
func Snapshot(name string) Option { return func(o *options) { o.snapshot = name } }

// Exports names the exports of a server, one for each image.
func Exports(names ...string) Option { return func(o *options) { o.exports = names } }

// Progress has the share of a job that is done, from 0 to 1, sent to a channel. Values that are not received in time are left out. The
// channel is closed at the end.
func Progress(to chan<- float64) Option { return func(o *options) { o.progress = to } }

// TargetFormat names the format of what Convert makes. Default: by the suffix of its name (.qcow2, .raw, .img and others).
func TargetFormat(name string) Option { return func(o *options) { o.target = name } }

// Args adds arguments of zebu's command line, such as "-c" or "--object", "secret,...".
func Args(args ...string) Option { return func(o *options) { o.args = append(o.args, args...) } }
