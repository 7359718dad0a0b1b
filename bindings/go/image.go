package zebu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
)

// ImageInfo is what zebu tells of an image. Raw has everything, as JSON.
type ImageInfo struct {
	Filename        string         `json:"filename"`
	Format          string         `json:"format"`
	VirtualSize     int64          `json:"virtual-size"`
	ActualSize      int64          `json:"actual-size"`
	ClusterSize     int64          `json:"cluster-size"`
	Encrypted       bool           `json:"encrypted"`
	BackingFilename string         `json:"backing-filename"`
	BackingFormat   string         `json:"backing-filename-format"`
	Snapshots       []SnapshotInfo `json:"snapshots"`

	Raw json.RawMessage `json:"-"`
}

// SnapshotInfo is an internal snapshot.
type SnapshotInfo struct {
	ID          string `json:"id"`
	Name        string `json:"name"`
	DateSeconds int64  `json:"date-sec"`
}

// ImageVerdict says whether an image from a stranger is safe to open.
type ImageVerdict struct {
	Filename string    `json:"filename"`
	Format   string    `json:"format"`
	Safe     bool      `json:"safe"`
	Concerns []Concern `json:"concerns"`
}

// Concern is a reason for a verdict.
type Concern struct {
	Code     string `json:"code"`
	Severity string `json:"severity"`
	Message  string `json:"message"`
}

// CheckReport is what a check of an image has found.
type CheckReport struct {
	Filename string `json:"filename"`
	Format   string `json:"format"`
	// Corruptions and Leaks are those that are still there.
	Corruptions      int64 `json:"corruptions"`
	Leaks            int64 `json:"leaks"`
	CorruptionsFixed int64 `json:"corruptions-fixed"`
	LeaksFixed       int64 `json:"leaks-fixed"`
	// Findings are the first ones, in words.
	Findings []string `json:"findings"`

	Raw json.RawMessage `json:"-"`
}

// Clean tells whether nothing is wrong with the image (any more).
func (r *CheckReport) Clean() bool { return r.Corruptions == 0 && r.Leaks == 0 }

// Info tells what an image is. Files that it names are not opened. It takes the options Format, ImageOpts and AllowRefs.
func Info(ctx context.Context, name string, with ...Option) (*ImageInfo, error) {
	o, err := gather("Info", with, "Format", "ImageOpts", "AllowRefs")
	if err != nil {
		return nil, err
	}
	return o.imageInfo(ctx, name)
}

func (o options) imageInfo(ctx context.Context, name string) (*ImageInfo, error) {
	info := &ImageInfo{}
	text, err := o.json(ctx, info, append([]string{"info"}, o.source()...), name)
	if err != nil {
		return nil, err
	}
	info.Raw = text
	return info, nil
}

// Verdict tells whether an image of a stranger is safe to open. One that is not is no error. It takes the options Format and ImageOpts.
func Verdict(ctx context.Context, name string, with ...Option) (*ImageVerdict, error) {
	o, err := gather("Verdict", with, "Format", "ImageOpts")
	if err != nil {
		return nil, err
	}
	verdict := &ImageVerdict{}
	if _, err := o.json(ctx, verdict, append([]string{"info", "--verdict"}, o.source()...), name); err != nil {
		return nil, err
	}
	return verdict, nil
}

// Check looks for inconsistencies in the metadata of a qcow2 image. An image that has some is no error. It takes the options Format,
// ImageOpts and WithRepair.
func Check(ctx context.Context, name string, with ...Option) (*CheckReport, error) {
	o, err := gather("Check", with, "Format", "ImageOpts", "WithRepair")
	if err != nil {
		return nil, err
	}
	args := append([]string{"check"}, o.source()...)
	if o.repair != "" {
		args = append(args, "-r", string(o.repair))
	}
	report := &CheckReport{}
	text, err := o.json(ctx, report, args, name)
	if err != nil {
		return nil, err
	}
	report.Raw = text
	return report, nil
}

// json runs a command that reports in JSON. What is found bad has another exit code than 0, and is reported all the same.
func (o options) json(ctx context.Context, into any, args []string, name string) (json.RawMessage, error) {
	path, err := o.find()
	if err != nil {
		return nil, err
	}
	args = append(append(args, "--output", "json"), o.args...)
	out, failure := run(ctx, path, append(args, "--", name))
	var said *Error
	if failure != nil && (!errors.As(failure, &said) || len(out) == 0) {
		return nil, failure
	}
	if err := json.Unmarshal(out, into); err != nil {
		return nil, errors.Join(failure, fmt.Errorf("'%s' does not answer as zebu does: %w", path, err))
	}
	return out, nil
}

// Create makes an empty disk of size bytes. A file that holds something is replaced only with Force. It takes the options TargetFormat and
// Force.
func Create(ctx context.Context, name string, size int64, with ...Option) error {
	o, err := gather("Create", with, "TargetFormat", "Force")
	if err != nil {
		return err
	}
	path, err := o.find()
	if err != nil {
		return err
	}
	args := append(append([]string{"create", "-q"}, o.made("-f")...), o.args...)
	_, err = run(ctx, path, append(args, "--", name, strconv.FormatInt(size, 10)))
	return err
}

// Convert copies a disk into a new image. When ctx ends, what was made so far is removed. A file that holds something is replaced only with
// Force. It takes the options Format, ImageOpts, AllowRefs, Snapshot, TargetFormat, Force, Compress and Progress.
func Convert(ctx context.Context, source, target string, with ...Option) error {
	return copied(ctx, "convert", "-O", source, target, with, "Format", "ImageOpts", "AllowRefs", "Snapshot", "TargetFormat", "Force", "Compress",
		"Progress")
}

// Backup copies a disk into a new compressed qcow2 image, or adds a point in time to a store (store:DIR/NAME). When ctx ends, so does
// the copy. It takes the options Format, ImageOpts, AllowRefs, Snapshot and Progress. Server.Backup is for disks in use.
func Backup(ctx context.Context, source, target string, with ...Option) error {
	return copied(ctx, "backup", "", source, target, with, "Format", "ImageOpts", "AllowRefs", "Snapshot", "Progress")
}

func copied(ctx context.Context, command, formatOption, source, target string, with []Option, takes ...string) error {
	o, err := gather(command, with, takes...)
	if o.progress != nil {
		defer close(o.progress)
	}
	if err != nil {
		return err
	}
	path, err := o.find()
	if err != nil {
		return err
	}
	args := append(append([]string{command, "-p"}, o.source()...), o.made(formatOption)...)
	if o.snapshot != "" {
		args = append(args, "-l", o.snapshot)
	}
	return follow(ctx, path, o.progress, append(append(args, o.args...), "--", source, target))
}
