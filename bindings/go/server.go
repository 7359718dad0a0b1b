package zebu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
)

// Server is a process that serves disks over NBD.
type Server struct {
	process *process
	dir     string
	nbd     string
	control string
	// turns bounds the connections to the control socket.
	turns chan struct{}
	// stop ends the watch over the context.
	stop   func() bool
	closed sync.Once
	err    error
}

// mostTurns is how many commands are sent at a time. The control socket has 16 connections, also for others.
const mostTurns = 8

// lines calls ready when the first whole line was written.
type lines struct {
	once  sync.Once
	ready func()
}

func (l *lines) Write(p []byte) (int, error) {
	if strings.ContainsRune(string(p), '\n') {
		l.once.Do(l.ready)
	}
	return len(p), nil
}

// Serve serves images over NBD until the server is closed or ctx ends. It returns when clients can connect. The socket is in a
// directory of this user alone. It takes the options Format, Writable, ImageOpts, AllowRefs, Snapshot and Exports.
//
// Names are those of files and of everything else that zebu opens. Without Exports, one image has the empty name for clients, and
// several have those of their files.
func Serve(ctx context.Context, names []string, with ...Option) (*Server, error) {
	o, err := gather("Serve", with, append(opening, "Exports")...)
	if err != nil {
		return nil, err
	}
	return serve(ctx, names, o)
}

// opening are the options that say how an image is opened.
var opening = []string{"Format", "Writable", "ImageOpts", "AllowRefs", "Snapshot"}

func serve(ctx context.Context, names []string, o options) (*Server, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	path, err := o.find()
	if err != nil {
		return nil, err
	}
	dir, err := socketDir()
	if err != nil {
		return nil, err
	}
	s := &Server{dir: dir, nbd: filepath.Join(dir, "nbd"), control: filepath.Join(dir, "control"), turns: make(chan struct{}, mostTurns)}
	args := append([]string{"serve", "--nbd", "unix:" + s.nbd, "--control", s.control}, o.source()...)
	if !o.writable {
		args = append(args, "--read-only")
	}
	if o.snapshot != "" {
		args = append(args, "--snapshot", o.snapshot)
	}
	for _, export := range o.exports {
		args = append(args, "--export-name", export)
	}
	args = append(append(append(args, o.args...), "--"), names...)
	ready := make(chan struct{})
	s.process, err = start(path, &lines{ready: func() { close(ready) }}, args)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	select {
	case <-ready:
		err = s.agree(ctx)
	case <-s.process.ended:
		if err = s.process.failure(); err == nil {
			err = fmt.Errorf("'%s' ended before it served anything", path)
		}
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		// What it said is in err, if it said something.
		_ = s.Close()
		return nil, err
	}
	s.stop = context.AfterFunc(ctx, func() { _ = s.end() })
	return s, nil
}

// longestDir is the longest directory whose sockets have names that every system takes (104 bytes with the end of the text).
const longestDir = 90

// socketDir makes a directory of this user alone for sockets.
func socketDir() (string, error) {
	parent := os.TempDir()
	if len(parent)+len("/zebu-0123456789") > longestDir {
		parent = "/tmp"
	}
	return os.MkdirTemp(parent, "zebu-")
}

// agree makes sure that the program speaks the same version of the control socket.
func (s *Server) agree(ctx context.Context) error {
	var told struct {
		Version string `json:"version"`
		Control int    `json:"control"`
	}
	err := s.Do(ctx, "version", nil, &told)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return &VersionError{Program: s.process.path, Reason: err}
	case told.Control != ControlVersion:
		return &VersionError{Program: s.process.path, Version: told.Version, Control: told.Control}
	}
	return nil
}

// dial connects to a socket of the server.
func (s *Server) dial(ctx context.Context, path string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	if err != nil && ctx.Err() == nil {
		select {
		case <-s.process.ended:
			return nil, errors.Join(ErrClosed, s.process.failure())
		default:
		}
	}
	return conn, err
}

// URI returns the name under which NBD clients open an export: qemu-img, nbdcopy, and zebu itself.
func (s *Server) URI(export string) string {
	return "nbd+unix:///" + url.PathEscape(export) + "?socket=" + url.QueryEscape(s.nbd)
}

// Control returns the path of the control socket, for the commands of `zebu ctl` that this package has no functions for.
func (s *Server) Control() string { return s.control }

// Open connects to an export as a client. The disk can be written if the server was started so. Closing it leaves the server as it is.
// When ctx ends, so does the disk.
func (s *Server) Open(ctx context.Context, export string) (*Disk, error) {
	return s.open(ctx, export, func(ctx context.Context) (*ImageInfo, error) {
		stats, err := s.Stats(ctx)
		if err != nil {
			return nil, err
		}
		for number, one := range stats {
			if one.Name == export || export == "" && number == 0 {
				return Info(ctx, one.Filename, Program(s.process.path), Args("-U"))
			}
		}
		return nil, fmt.Errorf("there is no image behind export '%s': %w", export, ErrNotFound)
	})
}

func (s *Server) open(ctx context.Context, export string, info func(context.Context) (*ImageInfo, error)) (*Disk, error) {
	conn, err := s.dial(ctx, s.nbd)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	c, err := connect(conn, export)
	if !stop() {
		err = ctx.Err()
		if c != nil {
			c.breakOff(err)
		}
	}
	if err != nil {
		return nil, err
	}
	disk := &Disk{server: s, client: c, info: info}
	disk.stop = context.AfterFunc(ctx, func() { c.breakOff(ctx.Err()) })
	return disk, nil
}

// Wait waits until the server has ended by itself, or was closed.
func (s *Server) Wait() error {
	<-s.process.ended
	return s.process.failure()
}

// Close ends the server in good order: requests under way are answered, and everything is durable.
func (s *Server) Close() error {
	if s.stop != nil {
		s.stop()
	}
	return s.end()
}

func (s *Server) end() error {
	s.closed.Do(func() {
		s.process.terminate()
		<-s.process.ended
		s.err = errors.Join(s.process.failure(), os.RemoveAll(s.dir))
	})
	return s.err
}
