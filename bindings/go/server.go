package zebu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// ControlVersion is the version of the control socket that this package speaks.
const ControlVersion = 1

// Server is a process that serves disks over NBD.
type Server struct {
	process *process
	dir     string
	nbd     string
	control string
	closed  sync.Once
	err     error

	mu   sync.Mutex
	conn net.Conn
	in   *bufio.Reader
}

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
// directory of this user alone.
func Serve(ctx context.Context, names []string, with ...Option) (*Server, error) {
	o := gather(with)
	path, err := find(o.program)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "zebu-")
	if err != nil {
		return nil, err
	}
	s := &Server{dir: dir, nbd: filepath.Join(dir, "nbd"), control: filepath.Join(dir, "control")}
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
		os.RemoveAll(dir)
		return nil, err
	}
	select {
	case <-ready:
		err = s.agree(ctx)
	case <-s.process.ended:
		if err = s.process.failure(); err == nil {
			err = errors.New("zebu serve ended before it was ready")
		}
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		// What it said is in err, if it said something.
		_ = s.Close()
		return nil, err
	}
	context.AfterFunc(ctx, s.process.terminate)
	return s, nil
}

// agree makes sure that the program speaks the same version of the control socket.
func (s *Server) agree(ctx context.Context) error {
	var told struct {
		Version string `json:"version"`
		Control int    `json:"control"`
	}
	if err := s.Do(ctx, "version", nil, &told); err != nil {
		return fmt.Errorf("zebu does not tell its version: %w", err)
	}
	if told.Control != ControlVersion {
		return fmt.Errorf("zebu %s speaks version %d of the control socket, this package %d", told.Version, told.Control, ControlVersion)
	}
	return nil
}

// dial connects to a socket of the server.
func (s *Server) dial(ctx context.Context, path string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "unix", path)
}

// URI returns the name under which NBD clients open an export.
func (s *Server) URI(export string) string {
	return "nbd+unix:///" + export + "?socket=" + s.nbd
}

// Do sends a command to the control socket (zebu's guide has a list), with its arguments, and stores the answer in result, unless that
// is nil.
func (s *Server) Do(ctx context.Context, command string, arguments map[string]any, result any) error {
	line := map[string]any{"command": command}
	for name, value := range arguments {
		line[name] = value
	}
	text, err := json.Marshal(line)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil {
		conn, err := s.dial(ctx, s.control)
		if err != nil {
			return err
		}
		s.conn, s.in = conn, bufio.NewReader(conn)
	}
	stop := context.AfterFunc(ctx, func() { s.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	answer, err := s.ask(text)
	if err != nil {
		// What comes later would be the answer to another question.
		s.conn.Close()
		s.conn = nil
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return err
	}
	var told struct {
		Result json.RawMessage `json:"result"`
		Error  *struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	if err := json.Unmarshal(answer, &told); err != nil {
		return err
	}
	if told.Error != nil {
		return &Error{Command: command, Code: 1, Message: told.Error.Message}
	}
	if result == nil {
		return nil
	}
	return json.Unmarshal(told.Result, result)
}

func (s *Server) ask(line []byte) ([]byte, error) {
	if _, err := s.conn.Write(append(line, '\n')); err != nil {
		return nil, err
	}
	return s.in.ReadBytes('\n')
}

// Resize makes a disk larger.
func (s *Server) Resize(ctx context.Context, export string, size int64) error {
	return s.Do(ctx, "resize", map[string]any{"export": export, "size": size}, nil)
}

// Flush makes durable what clients have written to an export.
func (s *Server) Flush(ctx context.Context, export string) error {
	return s.Do(ctx, "flush", map[string]any{"export": export}, nil)
}

// CreateSnapshot makes an internal snapshot of a disk in use.
func (s *Server) CreateSnapshot(ctx context.Context, export, name string) error {
	return s.Do(ctx, "snapshot-create", map[string]any{"export": export, "name": name}, nil)
}

// AddBitmap adds a persistent dirty bitmap that records writes from now on.
func (s *Server) AddBitmap(ctx context.Context, export, name string) error {
	return s.Do(ctx, "bitmap-add", map[string]any{"export": export, "name": name}, nil)
}

// Wait waits until the server has ended by itself.
func (s *Server) Wait() error {
	<-s.process.ended
	return s.process.failure()
}

// Close ends the server in good order: requests under way are answered, and everything is durable.
func (s *Server) Close() error {
	s.closed.Do(func() {
		s.process.terminate()
		<-s.process.ended
		s.err = s.process.failure()
		s.mu.Lock()
		if s.conn != nil {
			s.conn.Close()
			s.conn = nil
		}
		s.mu.Unlock()
		s.err = errors.Join(s.err, os.RemoveAll(s.dir))
	})
	return s.err
}
