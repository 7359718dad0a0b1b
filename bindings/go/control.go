package zebu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// Do sends a command to the control socket (zebu's guide has a list), with its arguments, and stores the answer in result, unless that
// is nil. When ctx ends first, it is not known whether the command was done.
func (s *Server) Do(ctx context.Context, command string, arguments map[string]any, result any) error {
	line := map[string]any{"command": command}
	for name, value := range arguments {
		line[name] = value
	}
	text, err := json.Marshal(line)
	if err != nil {
		return err
	}
	select {
	case s.turns <- struct{}{}:
		defer func() { <-s.turns }()
	case <-ctx.Done():
		return ctx.Err()
	}
	answer, err := s.ask(ctx, append(text, '\n'))
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
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
		return fmt.Errorf("'%s' does not answer as zebu does: %w", s.control, err)
	}
	if told.Error != nil {
		return newError(command, 1, told.Error.Message)
	}
	if result == nil {
		return nil
	}
	return json.Unmarshal(told.Result, result)
}

// ask sends a line on a connection of its own, and returns the answer. A connection that is kept would be closed by the server when it
// is silent for a minute.
func (s *Server) ask(ctx context.Context, line []byte) ([]byte, error) {
	conn, err := s.dial(ctx, s.control)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := conn.Write(line); err != nil {
		return nil, err
	}
	answer, err := bufio.NewReader(conn).ReadBytes('\n')
	if err != nil && ctx.Err() == nil {
		select {
		case <-s.process.ended:
			return nil, errors.Join(ErrClosed, s.process.failure())
		default:
		}
	}
	return answer, err
}

// ExportStats is an export of a server.
type ExportStats struct {
	// Name is its name for clients.
	Name string `json:"name"`
	// Filename is the name of the image that it is, now.
	Filename string `json:"filename"`
	// VirtualSize is in bytes.
	VirtualSize int64 `json:"virtual-size"`
	ReadOnly    bool  `json:"read-only"`
	// Clients are the connections to it.
	Clients int `json:"clients"`
}

// Stats returns the exports of a server, in their order. Checkpoints are not among them.
func (s *Server) Stats(ctx context.Context) ([]ExportStats, error) {
	var told struct {
		Exports []ExportStats `json:"exports"`
	}
	err := s.Do(ctx, "stats", nil, &told)
	return told.Exports, err
}

// Resize makes a disk larger: size is in bytes, and not less than now.
func (s *Server) Resize(ctx context.Context, export string, size int64) error {
	return s.Do(ctx, "resize", map[string]any{"export": export, "size": size}, nil)
}

// Flush makes durable what clients have written to an export.
func (s *Server) Flush(ctx context.Context, export string) error {
	return s.Do(ctx, "flush", map[string]any{"export": export}, nil)
}

// CreateSnapshot makes an internal snapshot of a disk in use. It is durable.
func (s *Server) CreateSnapshot(ctx context.Context, export, name string) error {
	return s.Do(ctx, "snapshot-create", map[string]any{"export": export, "name": name}, nil)
}

// DeleteSnapshot deletes the first internal snapshot of a name.
func (s *Server) DeleteSnapshot(ctx context.Context, export, name string) error {
	return s.Do(ctx, "snapshot-delete", map[string]any{"export": export, "name": name}, nil)
}

// AddBitmap adds a persistent dirty bitmap that records writes from now on.
func (s *Server) AddBitmap(ctx context.Context, export, name string) error {
	return s.Do(ctx, "bitmap-add", map[string]any{"export": export, "name": name}, nil)
}

// RemoveExport flushes and closes an export. While clients use it, or a job, that is refused.
func (s *Server) RemoveExport(ctx context.Context, export string) error {
	return s.Do(ctx, "export-remove", map[string]any{"export": export}, nil)
}

// Reset throws away what a disk holds since its last fork. It is refused while clients are connected.
func (s *Server) Reset(ctx context.Context, export string) error {
	return s.Do(ctx, "reset", map[string]any{"export": export}, nil)
}
