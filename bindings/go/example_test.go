package zebu_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"

	"example.org/zebu/bindings/go"
)

// fill makes a disk of 1 MiB that begins with a text.
func fill(name, text string, with ...zebu.Option) {
	ctx := context.Background()
	if err := zebu.Create(ctx, name, 1<<20, with...); err != nil {
		log.Fatal(err)
	}
	disk, err := zebu.Open(ctx, name, zebu.Writable())
	if err != nil {
		log.Fatal(err)
	}
	_, err = disk.WriteAt([]byte(text), 0)
	if err := errors.Join(err, disk.Close()); err != nil {
		log.Fatal(err)
	}
}

// folder makes a directory, and returns what removes it.
func folder() (string, func()) {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	return dir, func() { os.RemoveAll(dir) }
}

// A VMDK on a web server is read as any file.
func ExampleOpen() {
	dir, remove := folder()
	defer remove()
	fill(filepath.Join(dir, "disk.qcow2"), "hello")
	if err := zebu.Convert(context.Background(), filepath.Join(dir, "disk.qcow2"), filepath.Join(dir, "disk.vmdk")); err != nil {
		log.Fatal(err)
	}
	web := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer web.Close()

	disk, err := zebu.Open(context.Background(), web.URL+"/disk.vmdk")
	if err != nil {
		log.Fatal(err)
	}
	defer disk.Close()
	text, err := io.ReadAll(io.NewSectionReader(disk, 0, 5))
	fmt.Println(disk.Size(), string(text), err)
	// Output: 1048576 hello <nil>
}

func ExampleDisk_Extents() {
	dir, remove := folder()
	defer remove()
	name := filepath.Join(dir, "disk.qcow2")
	fill(name, "hello")

	disk, err := zebu.Open(context.Background(), name)
	if err != nil {
		log.Fatal(err)
	}
	defer disk.Close()
	extents, err := disk.Extents(context.Background(), 0, disk.Size())
	if err != nil {
		log.Fatal(err)
	}
	for _, extent := range extents {
		fmt.Println(extent.Hole)
	}
	// Output:
	// false
	// true
}

func ExampleConvert() {
	dir, remove := folder()
	defer remove()
	from, to := filepath.Join(dir, "disk.qcow2"), filepath.Join(dir, "disk.vhdx")
	fill(from, "hello")

	progress := make(chan float64, 10)
	done := make(chan error, 1)
	go func() { done <- zebu.Convert(context.Background(), from, to, zebu.Progress(progress)) }()
	last := 0.0
	for share := range progress {
		last = share
	}
	fmt.Println(<-done, last)
	// A file that is there is replaced only with Force.
	fmt.Println(errors.Is(zebu.Convert(context.Background(), from, to), zebu.ErrExists))
	// Output:
	// <nil> 1
	// true
}

func ExampleVerdict() {
	dir, remove := folder()
	defer remove()
	name := filepath.Join(dir, "disk.qcow2")
	fill(name, "hello")

	verdict, err := zebu.Verdict(context.Background(), name)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(verdict.Format, verdict.Safe)
	// Output: qcow2 true
}

func ExampleServe() {
	dir, remove := folder()
	defer remove()
	name := filepath.Join(dir, "disk.qcow2")
	fill(name, "monday")

	ctx := context.Background()
	server, err := zebu.Serve(ctx, []string{name}, zebu.Writable(), zebu.Exports("disk"))
	if err != nil {
		log.Fatal(err)
	}
	defer server.Close()
	fmt.Println(strings.HasPrefix(server.URI("disk"), "nbd+unix:///disk?socket="))
	// Clients of the disk go on to write, while others read it as it was.
	checkpoint, err := server.Checkpoint(ctx, "pull", zebu.CheckpointOptions{})
	if err != nil {
		log.Fatal(err)
	}
	now, err := server.Open(ctx, "disk")
	if err != nil {
		log.Fatal(err)
	}
	defer now.Close()
	if _, err := now.WriteAt([]byte("friday"), 0); err != nil {
		log.Fatal(err)
	}
	then, err := checkpoint.Open(ctx, "disk")
	if err != nil {
		log.Fatal(err)
	}
	defer then.Close()
	text := make([]byte, 6)
	_, err = then.ReadAt(text, 0)
	fmt.Println(string(text), err)
	// Output:
	// true
	// monday <nil>
}
