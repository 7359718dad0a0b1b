package zebu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// ctl runs a command of `zebu ctl`, which opens files that the server in its sandbox can't open, and returns what it printed.
func (s *Server) ctl(ctx context.Context, command string, args ...string) ([]byte, error) {
	out, err := run(ctx, s.process.path, append([]string{"ctl", s.control, command}, args...))
	return out, ofCommand(err, command)
}

// ofCommand names the command of an error.
func ofCommand(err error, command string) error {
	var said *Error
	if errors.As(err, &said) {
		said.Command = command
	}
	return err
}

// AddExport has a server export another image, on its NBD socket. The file is opened here, and has no backing file. It takes the options
// Format and Writable.
func (s *Server) AddExport(ctx context.Context, name, file string, with ...Option) error {
	o, err := gather("AddExport", with, "Format", "Writable")
	if err != nil {
		return err
	}
	var args []string
	if o.format != "" {
		args = append(args, "-f", o.format)
	}
	if !o.writable {
		args = append(args, "--read-only")
	}
	_, err = s.ctl(ctx, "export-add", append(append(args, o.args...), "--", name, file)...)
	return err
}

// ForkedDisk is a disk that goes on in an overlay.
type ForkedDisk struct {
	// Export is the name of the disk for clients.
	Export string `json:"export"`
	// Overlay is the name of the overlay, a file that must not exist before.
	Overlay string `json:"overlay"`
}

// Forked is what a fork has done.
type Forked struct {
	// Disks are those that were forked, with the absolute paths of their overlays.
	Disks []ForkedDisk
	// Gap is how long writes have waited.
	Gap time.Duration
}

// Fork has disks go on in new overlays, all from one moment on, while clients use them. The images are then whole, durable and sealed:
// others may read them and stand on them. If ctx ends meanwhile, the disks may be forked or not; Stats tells their files.
func (s *Server) Fork(ctx context.Context, disk ForkedDisk, also ...ForkedDisk) (*Forked, error) {
	args := []string{"--output", "json", "--to", disk.Overlay}
	for _, other := range also {
		args = append(args, "--also", other.Export+"="+other.Overlay)
	}
	out, err := s.ctl(ctx, "fork", append(args, "--", disk.Export)...)
	if err != nil {
		return nil, err
	}
	var told struct {
		Disks []ForkedDisk `json:"disks"`
		Gap   int64        `json:"gap-us"`
	}
	if err := json.Unmarshal(out, &told); err != nil {
		return nil, fmt.Errorf("zebu ctl fork: %w", err)
	}
	return &Forked{Disks: told.Disks, Gap: time.Duration(told.Gap) * time.Microsecond}, nil
}

// BackupOptions say how a disk in use is backed up. The zero value makes a full backup without compression.
type BackupOptions struct {
	// Bitmap records what is written from the copied moment on. It is added if there is none.
	Bitmap string
	// Previous is the file of the last backup with Bitmap: only what the bitmap marks is copied, on top of it.
	Previous string
	// Compression is "zlib", "zstd" or nothing.
	Compression string
	// Rate is the most bytes per second, 0 for as many as go.
	Rate int64
	// Progress gets the share that is done, from 0 to 1. Values that are not received in time are left out. It is closed at the end.
	Progress chan<- float64
}

// Backup copies a disk of a running server, as it is at the moment of the call, into a new qcow2 image, while clients go on to write.
// When ctx ends, the backup ends, and its file is removed.
func (s *Server) Backup(ctx context.Context, export, target string, o BackupOptions) error {
	if o.Progress != nil {
		defer close(o.Progress)
	}
	args := []string{"ctl", s.control, "backup-start", "--wait", "-p"}
	for option, value := range map[string]string{"--bitmap": o.Bitmap, "--previous": o.Previous, "--compression-type": o.Compression} {
		if value != "" {
			args = append(args, option, value)
		}
	}
	if o.Rate > 0 {
		args = append(args, "--rate", strconv.FormatInt(o.Rate, 10))
	}
	// Behind a "--", it would take both words for the target.
	if strings.HasPrefix(target, "-") {
		target = "./" + target
	}
	return ofCommand(follow(ctx, s.process.path, o.Progress, append(args, export, target)), "backup-start")
}

// CheckpointOptions say what a checkpoint has. The zero value is of the only disk, in memory.
type CheckpointOptions struct {
	// Exports are the disks. If there is one, it need not be named.
	Exports []string
	// Bitmap records what is written from that moment on. It is added if there is none, and else begun anew.
	Bitmap string
	// From is a bitmap that clients of the checkpoint see, as qemu:dirty-bitmap:NAME: what changed since it was begun.
	From string
	// Spill is a new file for what is overwritten meanwhile, once memory for it is full.
	Spill string
	// Limit is the most bytes that are kept of what is overwritten, 0 for the default. Beyond it, the checkpoint ends with an error.
	Limit int64
	// Timeout ends it, rounded up to a second; 0 for none.
	Timeout time.Duration
	// UntilIdle ends it when each of its exports was used and no client is left.
	UntilIdle bool
}

// Checkpoint is disks of a server as they were at one moment, for clients that read them.
type Checkpoint struct {
	// Exports are its disks.
	Exports []CheckpointExport

	server *Server
	name   string
}

// CheckpointStatus tells how a checkpoint is.
type CheckpointStatus struct {
	// Status is running, ended or failed.
	Status string `json:"status"`
	// EndedBy is command, timeout, idle or server.
	EndedBy string `json:"ended-by"`
	// Error is why it failed.
	Error   string             `json:"error"`
	Exports []CheckpointExport `json:"exports"`
}

// CheckpointExport is a disk of a checkpoint.
type CheckpointExport struct {
	// Export is the name of the disk itself.
	Export string `json:"export"`
	// Serve is the name under which clients find it as it was.
	Serve       string `json:"serve"`
	VirtualSize int64  `json:"virtual-size"`
	Clients     int    `json:"clients"`
}

// Checkpoint exports disks as they are now, read-only, while clients of the disks go on to write. One disk is exported as name, several
// as name.EXPORT.
func (s *Server) Checkpoint(ctx context.Context, name string, o CheckpointOptions) (*Checkpoint, error) {
	args := []string{"--serve", name}
	for option, value := range map[string]string{"--bitmap": o.Bitmap, "--from": o.From, "--spill": o.Spill} {
		if value != "" {
			args = append(args, option, value)
		}
	}
	if o.Limit != 0 {
		args = append(args, "--limit", strconv.FormatInt(o.Limit, 10))
	}
	if o.Timeout > 0 {
		args = append(args, "--timeout", strconv.FormatInt(int64((o.Timeout+time.Second-1)/time.Second), 10))
	}
	if o.UntilIdle {
		args = append(args, "--until-idle")
	}
	if _, err := s.ctl(ctx, "checkpoint", append(append(args, "--"), o.Exports...)...); err != nil {
		return nil, err
	}
	c := &Checkpoint{server: s, name: name}
	status, err := c.Status(ctx)
	c.Exports = status.Exports
	return c, err
}

// Status tells how the checkpoint is.
func (c *Checkpoint) Status(ctx context.Context) (*CheckpointStatus, error) {
	status := &CheckpointStatus{}
	err := c.server.Do(ctx, "checkpoint-query", map[string]any{"name": c.name}, status)
	return status, err
}

// Open connects to a disk of the checkpoint, by the name of its export. The name may be empty if there is one.
func (c *Checkpoint) Open(ctx context.Context, export string) (*Disk, error) {
	served, err := c.served(export)
	if err != nil {
		return nil, err
	}
	return c.server.Open(ctx, served)
}

// URI returns the name under which NBD clients open a disk of the checkpoint.
func (c *Checkpoint) URI(export string) (string, error) {
	served, err := c.served(export)
	return c.server.URI(served), err
}

func (c *Checkpoint) served(export string) (string, error) {
	for _, one := range c.Exports {
		if one.Export == export || export == "" && len(c.Exports) == 1 {
			return one.Serve, nil
		}
	}
	return "", fmt.Errorf("checkpoint '%s' has no disk '%s': %w", c.name, export, ErrNotFound)
}

// End ends the checkpoint. What was to be read of it was read.
func (c *Checkpoint) End(ctx context.Context) error {
	return c.server.Do(ctx, "checkpoint-end", map[string]any{"name": c.name}, nil)
}

// Fail ends the checkpoint, and says that it was not read as a whole: a bitmap that was both From and Bitmap gets its earlier bits back.
func (c *Checkpoint) Fail(ctx context.Context) error {
	return c.server.Do(ctx, "checkpoint-end", map[string]any{"name": c.name, "failed": true}, nil)
}
