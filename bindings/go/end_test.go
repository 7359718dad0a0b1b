package zebu_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"example.org/zebu/bindings/go"
)

func TestAContextEndsItsDisk(t *testing.T) {
	_, path := image(t, "qcow2")
	ctx, cancel := context.WithCancel(context.Background())
	disk, err := zebu.Open(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	for {
		if _, err := disk.ReadAt(make([]byte, 512), 0); err != nil {
			if !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			break
		}
	}
	disk.Close()
	if left := servers(path); len(left) > 0 {
		t.Fatal("processes are left", left)
	}
	if _, err := zebu.Open(ctx, path); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

// silent is a web server that answers the first requests, and then none until the test ends.
func silent(t *testing.T, path string, answers int64) (url string, asked chan struct{}) {
	asked, end := make(chan struct{}, 100), make(chan struct{})
	left := make(chan struct{}, answers)
	for range answers {
		left <- struct{}{}
	}
	files := http.FileServer(http.Dir(filepath.Dir(path)))
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-left:
			files.ServeHTTP(w, r)
		default:
			asked <- struct{}{}
			<-end
		}
	}))
	t.Cleanup(func() { close(end); web.Close() })
	return web.URL + "/" + filepath.Base(path), asked
}

func TestAnOpeningThatHangsIsCancelled(t *testing.T) {
	_, path := image(t, "qcow2")
	url, asked := silent(t, path, 0)
	ctx, cancel := context.WithCancel(context.Background())
	go func() { <-asked; cancel() }()
	if _, err := zebu.Open(ctx, url); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	ctx, cancel = context.WithCancel(context.Background())
	go func() { <-asked; cancel() }()
	if _, err := zebu.Info(ctx, url); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

func TestAConversionThatIsCancelledLeavesNothing(t *testing.T) {
	_, path := image(t, "qcow2")
	dir := t.TempDir()
	ctx, cancel := context.WithCancel(context.Background())
	progress := make(chan float64, 1)
	go func() {
		<-progress
		cancel()
	}()
	err := zebu.Convert(ctx, path, filepath.Join(dir, "new"), zebu.TargetFormat("qcow2"), zebu.Progress(progress),
		zebu.Args("-r", "1M"))
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(dir); len(left) > 0 {
		t.Fatal(left)
	}
}

func TestAServerThatDiesIsAnError(t *testing.T) {
	_, path := image(t, "qcow2")
	disk := open(t, path, zebu.Writable())
	for _, number := range servers(path) {
		syscall.Kill(number, syscall.SIGKILL)
	}
	for {
		if err := disk.Flush(); err != nil {
			break
		}
	}
	if err := disk.Close(); err == nil {
		t.Fatal("closed as if all were well")
	}
}

func TestAClosedDiskIsAnError(t *testing.T) {
	_, path := image(t, "qcow2")
	disk := open(t, path)
	if err := errors.Join(disk.Close(), disk.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := disk.ReadAt(make([]byte, 1), 0); !errors.Is(err, zebu.ErrClosed) || !errors.Is(err, os.ErrClosed) {
		t.Fatal(err)
	}
}

// servers are the processes whose command line has this word.
func servers(word string) []int {
	var found []int
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, name := range all {
		text, err := os.ReadFile(name)
		if err == nil && bytes.Contains(text, []byte(word)) && bytes.Contains(text, []byte("\x00serve\x00")) {
			number, _ := strconv.Atoi(strings.Split(name, "/")[2])
			found = append(found, number)
		}
	}
	return found
}

func TestAKilledProgramLeavesNoProcess(t *testing.T) {
	if path := os.Getenv("ZEBU_TEST_OPENS"); path != "" {
		open(t, path, zebu.Writable())
		if _, err := zebu.Serve(context.Background(), []string{path + ".raw"}, zebu.Format("raw"), zebu.Writable()); err != nil {
			t.Fatal(err)
		}
		fmt.Println("open")
		select {}
	}
	_, path := image(t, "qcow2")
	if err := os.WriteFile(path+".raw", make([]byte, mib), 0o600); err != nil {
		t.Fatal(err)
	}
	child := exec.Command(os.Args[0], "-test.run=^TestAKilledProgramLeavesNoProcess$")
	child.Env = append(os.Environ(), "ZEBU_TEST_OPENS="+path)
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	for said := ""; !strings.Contains(said, "open"); {
		p := make([]byte, 100)
		n, err := out.Read(p)
		if err != nil {
			t.Fatal(said, err)
		}
		said += string(p[:n])
	}
	if len(servers(path)) < 2 {
		t.Fatal("no processes serve the disks")
	}
	child.Process.Signal(syscall.SIGKILL)
	child.Wait()
	// A guard against hanging.
	for end := time.Now().Add(10 * time.Minute); len(servers(path)) > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("processes are left", servers(path))
		}
	}
	// What it had locked is free, and whole.
	report, err := zebu.Check(context.Background(), path)
	if err != nil || report.Corruptions != 0 {
		t.Fatal(report, err)
	}
	// Its directories of sockets stay.
	stale, _ := filepath.Glob(filepath.Join(os.TempDir(), "zebu-*"))
	for _, dir := range stale {
		os.RemoveAll(dir)
	}
}

func TestThreadsThatEndTakeNoDiskWithThem(t *testing.T) {
	raw, path := image(t, "qcow2")
	var disk *zebu.Disk
	opened := make(chan struct{})
	go func() {
		// The thread of this goroutine ends with it.
		runtime.LockOSThread()
		disk = open(t, path)
		close(opened)
	}()
	<-opened
	var wait sync.WaitGroup
	for range 64 {
		wait.Add(1)
		go func() {
			defer wait.Done()
			runtime.LockOSThread()
		}()
	}
	wait.Wait()
	p := make([]byte, 4096)
	if _, err := disk.ReadAt(p, 0); err != nil || !bytes.Equal(p, raw[:4096]) {
		t.Fatal(err)
	}
}
