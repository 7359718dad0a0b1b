package zebu

import (
	"context"
	"encoding/json"
	"strconv"
	"strings"
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
	Snapshots       []SnapshotInfo `json:"snapshots"`

	Raw json.RawMessage `json:"-"`
}

// SnapshotInfo is an internal snapshot.
type SnapshotInfo struct {
	ID          string `json:"id"`
	Name        string `json:"name"`
	DateSeconds int64  `json:"date-sec"`
}

// Verdict says whether an image from a stranger is safe to open.
type Verdict struct {
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

// Info tells of an image.
func Info(ctx context.Context, name string, with ...Option) (*ImageInfo, error) {
	o := gather(with)
	info := &ImageInfo{}
	text, err := o.json(ctx, info, append([]string{"info"}, o.source()...), name)
	info.Raw = text
	return info, err
}

// JudgeImage tells whether an image is safe to open. One that is not is no error.
func JudgeImage(ctx context.Context, name string, with ...Option) (*Verdict, error) {
	o := gather(with)
	verdict := &Verdict{}
	_, err := o.json(ctx, verdict, append([]string{"info", "--verdict"}, o.source()...), name)
	return verdict, err
}

func (o options) json(ctx context.Context, into any, args []string, name string) (json.RawMessage, error) {
	path, err := find(o.program)
	if err != nil {
		return nil, err
	}
	args = append(append(args, "--output", "json"), o.args...)
	var out strings.Builder
	p, err := start(path, &out, append(args, "--", name))
	if err != nil {
		return nil, err
	}
	// A verdict of unsafe has another exit code than 0, and is printed all the same.
	failure := p.wait(ctx)
	text := json.RawMessage(out.String())
	if failure != nil && len(text) == 0 {
		return nil, failure
	}
	if err := json.Unmarshal(text, into); err != nil {
		if failure != nil {
			return nil, failure
		}
		return nil, err
	}
	return text, nil
}

// Convert copies a disk into a new image. When ctx ends, what was made so far is removed. A file that holds something is
// replaced only with Args("--force").
func Convert(ctx context.Context, source, target string, with ...Option) error {
	o := gather(with)
	if o.progress != nil {
		defer close(o.progress)
	}
	path, err := find(o.program)
	if err != nil {
		return err
	}
	args := append([]string{"convert", "-p"}, o.source()...)
	if o.target != "" {
		args = append(args, "-O", o.target)
	}
	args = append(append(args, o.args...), "--", source, target)
	p, err := start(path, &percents{to: o.progress}, args)
	if err != nil {
		return err
	}
	return p.wait(ctx)
}

// percents reads lines such as "    (12.34/100%)\r".
type percents struct {
	to   chan<- float64
	rest string
}

func (p *percents) Write(text []byte) (int, error) {
	p.rest += string(text)
	for {
		begin := strings.IndexByte(p.rest, '(')
		end := strings.IndexByte(p.rest, '%')
		if end < 0 {
			break
		}
		if begin >= 0 && begin < end {
			number, _, _ := strings.Cut(p.rest[begin+1:end], "/")
			if value, err := strconv.ParseFloat(strings.TrimSpace(number), 64); err == nil && p.to != nil {
				select {
				case p.to <- value / 100:
				default:
				}
			}
		}
		p.rest = p.rest[end+1:]
	}
	if len(p.rest) > 256 {
		p.rest = p.rest[len(p.rest)-256:]
	}
	return len(text), nil
}
