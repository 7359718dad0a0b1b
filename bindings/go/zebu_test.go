package zebu_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"example.org/zebu/bindings/go"
)

const mib = 1 << 20

// image makes a raw file of noise and holes, and an image of it by QEMU.
func image(t *testing.T, format string, more ...string) (raw []byte, path string) {
	t.Helper()
	dir := t.TempDir()
	raw = make([]byte, 8*mib)
	random := rand.New(rand.NewSource(1))
	for at := 0; at < len(raw); at += mib {
		if at/mib%3 != 1 {
			random.Read(raw[at : at+700_000])
		}
	}
	from, to := filepath.Join(dir, "raw"), filepath.Join(dir, "image."+format)
	if err := os.WriteFile(from, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	tool(t, "qemu-img", append(append([]string{"convert", "-f", "raw", "-O", format}, more...), from, to)...)
	return raw, to
}

func tool(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
}

func open(t *testing.T, name string, with ...zebu.Option) *zebu.Disk {
	t.Helper()
	disk, err := zebu.Open(context.Background(), name, with...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { disk.Close() })
	return disk
}

func TestADiskOfEachFormatReadsAsItIs(t *testing.T) {
	for _, format := range []string{"qcow2", "vmdk", "vdi", "vpc", "vhdx"} {
		raw, path := image(t, format)
		disk := open(t, path)
		if disk.Size() < int64(len(raw)) || !disk.ReadOnly() {
			t.Fatalf("%s: %d bytes, read-only: %v", format, disk.Size(), disk.ReadOnly())
		}
		whole, err := io.ReadAll(io.NewSectionReader(disk, 0, int64(len(raw))))
		if err != nil || !bytes.Equal(whole, raw) {
			t.Fatalf("%s: other bytes: %v", format, err)
		}
		if err := disk.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestReadsEndWhereTheDiskEnds(t *testing.T) {
	raw, path := image(t, "qcow2")
	disk := open(t, path)
	p := make([]byte, 1000)
	n, err := disk.ReadAt(p, disk.Size()-10)
	if n != 10 || err != io.EOF || !bytes.Equal(p[:10], raw[len(raw)-10:]) {
		t.Fatal(n, err)
	}
	if n, err := disk.ReadAt(p, disk.Size()); n != 0 || err != io.EOF {
		t.Fatal(n, err)
	}
	if _, err := disk.ReadAt(p, -1); err == nil {
		t.Fatal("a negative offset")
	}
	if _, err := disk.WriteAt(p, 0); err == nil {
		t.Fatal("a write to a disk that is read only")
	}
}

func TestWhatIsWrittenIsThereForQemu(t *testing.T) {
	raw, path := image(t, "qcow2")
	disk := open(t, path, zebu.Writable())
	random := rand.New(rand.NewSource(2))
	var wait sync.WaitGroup
	for part := range 8 {
		piece := make([]byte, 5000)
		random.Read(piece)
		at := part*mib + 333
		copy(raw[at:], piece)
		wait.Add(1)
		go func() {
			defer wait.Done()
			if n, err := disk.WriteAt(piece, int64(at)); n != len(piece) || err != nil {
				t.Error(n, err)
			}
		}()
	}
	wait.Wait()
	clear(raw[2*mib : 2*mib+100_000])
	if err := errors.Join(disk.WriteZeroes(2*mib, 100_000), disk.Flush(), disk.Close()); err != nil {
		t.Fatal(err)
	}
	back := filepath.Join(t.TempDir(), "back")
	tool(t, "qemu-img", "convert", "-O", "raw", path, back)
	if found, err := os.ReadFile(back); err != nil || !bytes.Equal(found, raw) {
		t.Fatal("QEMU reads other bytes", err)
	}
	tool(t, "qemu-img", "check", path)
}

func TestExtentsTellHoles(t *testing.T) {
	raw, path := image(t, "qcow2")
	disk := open(t, path)
	extents, err := disk.Extents(context.Background(), 0, disk.Size())
	if err != nil {
		t.Fatal(err)
	}
	var at int64
	for _, extent := range extents {
		if extent.Offset != at {
			t.Fatal("a gap", extents)
		}
		at += extent.Length
		if extent.Zero && !bytes.Equal(raw[extent.Offset:at], make([]byte, extent.Length)) {
			t.Fatal("data reads as zero", extent)
		}
	}
	if at != disk.Size() || len(extents) < 3 {
		t.Fatal(extents)
	}
}

func TestConvertTellsItsProgress(t *testing.T) {
	raw, path := image(t, "qcow2")
	to := filepath.Join(t.TempDir(), "copy.raw")
	progress := make(chan float64, 1000)
	if err := zebu.Convert(context.Background(), path, to, zebu.Progress(progress)); err != nil {
		t.Fatal(err)
	}
	last, told := 0.0, 0
	for share := range progress {
		if share < last || share > 1 {
			t.Fatal("backwards", last, share)
		}
		last, told = share, told+1
	}
	if found, err := os.ReadFile(to); err != nil || !bytes.Equal(found, raw) || told == 0 || last != 1 {
		t.Fatal(err, told, last)
	}
}

func TestInfoAndVerdict(t *testing.T) {
	_, path := image(t, "qcow2")
	info, err := zebu.Info(context.Background(), path)
	if err != nil || info.Format != "qcow2" || info.VirtualSize != 8*mib || !bytes.Contains(info.Raw, []byte("refcount-bits")) {
		t.Fatal(info, err)
	}
	verdict, err := zebu.Verdict(context.Background(), path)
	if err != nil || !verdict.Safe {
		t.Fatal(verdict, err)
	}
	tool(t, "qemu-img", "rebase", "-u", "-b", "/etc/passwd", "-F", "raw", path)
	verdict, err = zebu.Verdict(context.Background(), path)
	if err != nil || verdict.Safe || len(verdict.Concerns) == 0 {
		t.Fatal(verdict, err)
	}
}
