package zebu

import (
	"bytes"
	"context"
	"io"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// patience is how long a job that was asked to end may take before it is asked to end at once, and then killed.
const patience = 10 * time.Second

// process is a running program.
type process struct {
	command string
	path    string
	cmd     *exec.Cmd
	stderr  lastWords
	// ended is closed when the process is gone; err is set before.
	ended chan struct{}
	err   error
}

// start starts the program with a command. Its standard output goes to out.
func start(path string, out io.Writer, args []string) (*process, error) {
	p := &process{command: args[0], path: path, cmd: exec.Command(path, args...), ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, &p.stderr
	p.cmd.SysProcAttr = ofThisProgram()
	started := make(chan error, 1)
	go func() {
		// Linux signals the child when the thread that started it ends. This one does not end before the child: nobody else has it.
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

// wait waits for the end of a job. If ctx ends first, it asks the process to end in good order, and still waits: files that are not
// whole are removed meanwhile.
func (p *process) wait(ctx context.Context) error {
	select {
	case <-p.ended:
		return p.failure()
	case <-ctx.Done():
	}
	p.terminate()
	for _, next := range []func(){p.terminate, p.kill} {
		select {
		case <-p.ended:
		case <-time.After(patience):
			next()
		}
	}
	<-p.ended
	if p.err != nil {
		return ctx.Err()
	}
	return nil
}

// terminate asks for an end in good order. The second time, a second later or more, it asks for an end at once.
func (p *process) terminate() {
	// It may have ended: then there is nothing to do.
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
}

// failure is the error of a process that has ended.
func (p *process) failure() error {
	if p.err == nil {
		return nil
	}
	return newError(p.command, p.cmd.ProcessState.ExitCode(), p.stderr.String())
}

// run runs a command to its end, and returns what it printed, also with an error.
func run(ctx context.Context, path string, args []string) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, ctx.Err()
	}
	var out bytes.Buffer
	p, err := start(path, &out, args)
	if err != nil {
		return nil, err
	}
	err = p.wait(ctx)
	return out.Bytes(), err
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
