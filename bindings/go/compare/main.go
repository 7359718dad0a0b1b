// Command compare asks zebu and go-qcow2reader to read images that QEMU has made, compares what they read with what QEMU reads, and measures
// ReadAt of both. It prints the tables of docs/guide/go.md.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand"
	"os"
	"sync"
	"time"

	"example.org/zebu/bindings/go"
	"github.com/lima-vm/go-qcow2reader"
)

// reader is an open disk.
type reader interface {
	io.ReaderAt
	io.Closer
	Size() int64
}

// theirs is a disk that go-qcow2reader reads.
type theirs struct {
	io.ReaderAt
	file *os.File
	size int64
}

func (t theirs) Size() int64  { return t.size }
func (t theirs) Close() error { return t.file.Close() }

// openTheirs opens an image by go-qcow2reader.
func openTheirs(path string) (opened reader, err error) {
	defer func() {
		if said := recover(); said != nil {
			err = fmt.Errorf("panic: %v", said)
		}
	}()
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	image, err := qcow2reader.Open(file)
	if err == nil {
		err = image.Readable()
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return theirs{image, file, image.Size()}, nil
}

// openOurs opens an image by zebu.
func openOurs(path, title string) (reader, error) {
	name, with := path, []zebu.Option{zebu.AllowRefs("local")}
	switch title {
	case "raw":
		with = append(with, zebu.Format("raw"))
	case "qcow2, LUKS", "qcow2, AES":
		secret := path + ".key"
		if err := os.WriteFile(secret, []byte("zebra"), 0o600); err != nil {
			return nil, err
		}
		name = "driver=qcow2,encrypt.key-secret=key,file.filename=" + path
		with = append(with, zebu.ImageOpts(), zebu.Args("--object", "secret,id=key,file="+secret))
	}
	return zebu.Open(context.Background(), name, with...)
}

// judge compares a disk with what QEMU reads of it, whole and in pieces of odd lengths.
func judge(opened reader, err error, raw []byte) (said string) {
	defer func() {
		if panicked := recover(); panicked != nil {
			said = fmt.Sprint("panic: ", panicked)
		}
	}()
	if err != nil {
		return "refused"
	}
	defer opened.Close()
	if opened.Size() != int64(len(raw)) {
		return fmt.Sprintf("wrong size: %d", opened.Size())
	}
	whole, err := io.ReadAll(io.NewSectionReader(opened, 0, opened.Size()))
	if err != nil {
		return "fails: " + err.Error()
	}
	if !bytes.Equal(whole, raw) {
		return "**wrong bytes, no error**"
	}
	random := rand.New(rand.NewSource(1))
	for range 500 {
		at := random.Intn(len(raw) - 1)
		piece := make([]byte, 1+random.Intn(min(200_000, len(raw)-at)))
		n, err := opened.ReadAt(piece, int64(at))
		if err != nil && err != io.EOF {
			return "fails: " + err.Error()
		}
		if n != len(piece) || !bytes.Equal(piece, raw[at:at+n]) {
			return "**wrong bytes, no error**"
		}
	}
	return "right"
}

// rate measures reads of a length for a time, and returns MiB and requests per second.
func rate(disk reader, length, readers int, inOrder bool, lasting time.Duration) (mib, requests float64, err error) {
	var mu sync.Mutex
	var wait sync.WaitGroup
	var done int
	begun := time.Now()
	blocks := disk.Size() / int64(length)
	for number := range readers {
		wait.Add(1)
		go func() {
			defer wait.Done()
			random := rand.New(rand.NewSource(int64(number)))
			piece := make([]byte, length)
			count := 0
			var failed error
			for ; failed == nil && time.Since(begun) < lasting; count++ {
				block := random.Int63n(blocks)
				if inOrder {
					block = (int64(count)*int64(readers) + int64(number)) % blocks
				}
				n, err := disk.ReadAt(piece, block*int64(length))
				if n < length {
					failed = err
				}
			}
			mu.Lock()
			defer mu.Unlock()
			done += count
			if failed != nil {
				err = failed
			}
		}()
	}
	wait.Wait()
	requests = float64(done) / time.Since(begun).Seconds()
	return requests * float64(length) / (1 << 20), requests, err
}

func main() {
	seconds := flag.Float64("seconds", 2, "how long each measurement takes")
	bytesOfDisk := flag.Int64("size", 256<<20, "bytes of the disk that is measured")
	flag.Parse()
	if err := compare(time.Duration(*seconds*float64(time.Second)), *bytesOfDisk); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func compare(lasting time.Duration, length int64) error {
	dir, err := os.MkdirTemp("", "compare-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	l := lab{dir}
	if err := l.guest("guest"); err != nil {
		return err
	}
	if err := read(l); err != nil {
		return err
	}
	return measure(l, lasting, length)
}

// read prints which images each reads right.
func read(l lab) error {
	fmt.Print("| image by QEMU | zebu | go-qcow2reader |\n|---|---|---|\n")
	var right [2]int
	for number, recipe := range recipes {
		image, err := recipe.make(l, number)
		if err != nil {
			return err
		}
		raw, err := os.ReadFile(image.raw)
		if err != nil {
			return err
		}
		ours, err := openOurs(image.path, image.title)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		said := [2]string{judge(ours, err, raw)}
		other, err := openTheirs(image.path)
		said[1] = judge(other, err, raw)
		for who, words := range said {
			if words == "right" {
				right[who]++
			}
		}
		fmt.Printf("| %s | %s | %s |\n", image.title, said[0], said[1])
	}
	fmt.Printf("| **right, of %d** | **%d** | **%d** |\n\n", len(recipes), right[0], right[1])
	return nil
}

// measure prints how fast each reads.
func measure(l lab, lasting time.Duration, length int64) error {
	source := l.file("large")
	file, err := os.Create(source)
	if err != nil {
		return err
	}
	// Half of each cluster is noise, the other half is packed into little.
	random := rand.New(rand.NewSource(7))
	for cluster := make([]byte, 64<<10); length > 0; length -= int64(len(cluster)) {
		random.Read(cluster[:len(cluster)/2])
		if _, err := file.Write(cluster); err != nil {
			return errors.Join(err, file.Close())
		}
	}
	if err := file.Close(); err != nil {
		return err
	}
	fmt.Print("| `ReadAt` | zebu | go-qcow2reader |\n|---|---|---|\n")
	for _, kind := range []struct {
		title string
		more  []string
	}{{"qcow2", nil}, {"qcow2, zlib", []string{"-c"}}} {
		path := l.file("large.qcow2")
		if err := tool("qemu-img", append(append([]string{"convert", "-f", "raw", "-O", "qcow2"}, kind.more...), source, path)...); err != nil {
			return err
		}
		for _, load := range []struct {
			title   string
			length  int
			readers int
			inOrder bool
		}{{"1 MiB in order", 1 << 20, 1, true}, {"4 KiB anywhere", 4096, 1, false}, {"4 KiB anywhere, 8 goroutines", 4096, 8, false}} {
			var cells [2]string
			for who, open := range []func() (reader, error){
				func() (reader, error) { return openOurs(path, kind.title) },
				func() (reader, error) { return openTheirs(path) },
			} {
				disk, err := open()
				if err != nil {
					return err
				}
				mib, requests, err := rate(disk, load.length, load.readers, load.inOrder, lasting)
				if err := disk.Close(); err != nil {
					return err
				}
				if err != nil {
					return err
				}
				cells[who] = fmt.Sprintf("%.0f/s", requests)
				if load.inOrder {
					cells[who] = fmt.Sprintf("%.0f MiB/s", mib)
				}
			}
			fmt.Printf("| %s: %s | %s | %s |\n", kind.title, load.title, cells[0], cells[1])
		}
	}
	return nil
}
