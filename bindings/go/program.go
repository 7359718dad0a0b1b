package zebu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
)

// ErrNotFound says that there is no program zebu.
var ErrNotFound = errors.New("no program zebu in PATH, and the variable ZEBU names none")

// Error is what zebu said when it failed.
type Error struct {
	// Command is the command that failed, such as convert.
	Command string
	// Code is the exit code, or -1 if a signal ended it.
	Code int
	// Message is its last words on standard error.
	Message string
}

func (e *Error) Error() string {
	if e.Message == "" {
		return fmt.Sprintf("zebu %s: exit code %d", e.Command, e.Code)
	}
	return e.Message
}

// find returns the path of the program.
func find(given string) (string, error) {
	if given != "" {
		return given, nil
	}
	if path, err := exec.LookPath("zebu"); err == nil {
		return path, nil
	}
	if path := os.Getenv("ZEBU"); path != "" {
		return path, nil
	}
	return "", ErrNotFound
}

// process is a running program.
type process struct {
	command string
	cmd     *exec.Cmd
	stderr  lastWords
	// ended is closed when the process is gone; err is set before.
	ended chan struct{}
	err   error
}

// start starts the program with a command. Its standard output goes to out.
func start(path string, out io.Writer, args []string) (*process, error) {
	p := &process{command: args[0], cmd: exec.Command(path, args...), ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, &p.stderr
	p.cmd.SysProcAttr = diesWithParent()
	started := make(chan error, 1)
	go func() {
		// Linux signals the child when the thread that started it ends: it is kept as long as the child.
		runtime.LockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
			close(p.ended)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// wait waits for the end. If ctx ends first, it asks the process to end in good order, and still waits: files that are not whole are
// removed meanwhile.
func (p *process) wait(ctx context.Context) error {
	select {
	case <-p.ended:
	case <-ctx.Done():
		p.terminate()
		<-p.ended
		if p.err != nil {
			return ctx.Err()
		}
	}
	return p.failure()
}

// terminate asks for an end in good order.
func (p *process) terminate() {
	// It may have ended: then there is nothing to do.
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
}

// failure is the error of a process that has ended.
func (p *process) failure() error {
	if p.err == nil {
		return nil
	}
	return &Error{Command: p.command, Code: p.cmd.ProcessState.ExitCode(), Message: p.stderr.String()}
}

// run runs a command to its end; what it printed.
func run(ctx context.Context, path string, args []string) ([]byte, error) {
	var out bytes.Buffer
	p, err := start(path, &out, args)
	if err != nil {
		return nil, err
	}
	if err := p.wait(ctx); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// lastWords keeps the end of what is written to it.
type lastWords struct {
	mu   sync.Mutex
	text []byte
}

const mostWords = 16 << 10

func (w *lastWords) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = append(w.text, p...)
	if over := len(w.text) - mostWords; over > 0 {
		w.text = append(w.text[:0], w.text[over:]...)
	}
	return len(p), nil
}

func (w *lastWords) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.TrimSpace(string(w.text))
}
