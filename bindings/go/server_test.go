package zebu_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"example.org/zebu/bindings/go"
)

// served is a server of a writable image, with the export "disk".
func served(t *testing.T) (raw []byte, path string, server *zebu.Server) {
	t.Helper()
	raw, path = image(t, "qcow2")
	server, err := zebu.Serve(context.Background(), []string{path}, zebu.Writable(), zebu.Exports("disk"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	return raw, path, server
}

// client opens an export.
func client(t *testing.T, server *zebu.Server, export string) *zebu.Disk {
	t.Helper()
	disk, err := server.Open(context.Background(), export)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { disk.Close() })
	return disk
}

// holds compares a disk with bytes.
func holds(t *testing.T, disk *zebu.Disk, raw []byte) {
	t.Helper()
	found := make([]byte, len(raw))
	if _, err := disk.ReadAt(found, 0); err != nil || !bytes.Equal(found, raw) {
		t.Fatal("other bytes", err)
	}
}

func write(t *testing.T, disk *zebu.Disk, at int64, with byte) {
	t.Helper()
	if _, err := disk.WriteAt(bytes.Repeat([]byte{with}, 10_000), at); err != nil {
		t.Fatal(err)
	}
}

// eventually waits until something succeeds that a client who leaves is in the way of.
func eventually(t *testing.T, work func() error) {
	t.Helper()
	for end := time.Now().Add(10 * time.Minute); ; time.Sleep(time.Millisecond) {
		err := work()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

func TestAServerTakesCommands(t *testing.T) {
	_, path, server := served(t)
	ctx := context.Background()
	err := errors.Join(
		server.Resize(ctx, "disk", 16*mib),
		server.CreateSnapshot(ctx, "disk", "before"),
		server.CreateSnapshot(ctx, "disk", "after"),
		server.DeleteSnapshot(ctx, "disk", "after"),
		server.AddBitmap(ctx, "disk", "changes"),
		server.Flush(ctx, "disk"),
	)
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Resize(ctx, "none", 1); !errors.Is(err, zebu.ErrNotFound) {
		t.Fatal(err)
	}
	tool(t, "qemu-io", "-f", "raw", "-c", "write -P 7 9M 64k", server.URI("disk"))
	stats, err := server.Stats(ctx)
	if err != nil || len(stats) != 1 || stats[0].Name != "disk" || stats[0].VirtualSize != 16*mib || stats[0].ReadOnly {
		t.Fatal(stats, err)
	}
	info, err := client(t, server, "disk").Info(ctx)
	if err != nil || info.Format != "qcow2" {
		t.Fatal(info, err)
	}
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	if err := server.Flush(ctx, "disk"); !errors.Is(err, zebu.ErrClosed) {
		t.Fatal(err)
	}
	info, err = zebu.Info(ctx, path)
	if err != nil || len(info.Snapshots) != 1 || info.VirtualSize != 16*mib || !bytes.Contains(info.Raw, []byte("changes")) {
		t.Fatal(info, err)
	}
}

func TestExportsComeAndGo(t *testing.T) {
	_, _, server := served(t)
	ctx := context.Background()
	raw, path := image(t, "qcow2")
	if err := server.AddExport(ctx, "second", path); err != nil {
		t.Fatal(err)
	}
	disk := client(t, server, "second")
	holds(t, disk, raw)
	if _, err := disk.WriteAt([]byte{1}, 0); !errors.Is(err, zebu.ErrReadOnly) {
		t.Fatal(err)
	}
	if err := server.RemoveExport(ctx, "second"); err == nil {
		t.Fatal("removed beside a client")
	}
	if err := disk.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error { return server.RemoveExport(ctx, "second") })
	if _, err := server.Open(ctx, "second"); err == nil {
		t.Fatal("a removed export")
	}
}

func TestADiskIsForkedInUse(t *testing.T) {
	raw, path, server := served(t)
	ctx := context.Background()
	disk := client(t, server, "disk")
	overlay := filepath.Join(filepath.Dir(path), "overlay.qcow2")
	forked, err := server.Fork(ctx, zebu.ForkedDisk{Export: "disk", Overlay: overlay})
	if err != nil || len(forked.Disks) != 1 || forked.Disks[0].Overlay != overlay || forked.Gap <= 0 {
		t.Fatal(forked, err)
	}
	write(t, disk, 12345, 7)
	holds(t, open(t, path), raw)
	if _, err := server.Fork(ctx, zebu.ForkedDisk{Export: "disk", Overlay: overlay}); !errors.Is(err, zebu.ErrExists) {
		t.Fatal(err)
	}
	stats, err := server.Stats(ctx)
	if err != nil || stats[0].Filename != overlay {
		t.Fatal(stats, err)
	}
	if err := disk.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error { return server.Reset(ctx, "disk") })
	holds(t, client(t, server, "disk"), raw)
}

func TestACheckpointStaysAsItWas(t *testing.T) {
	raw, _, server := served(t)
	ctx := context.Background()
	disk := client(t, server, "disk")
	spill := filepath.Join(t.TempDir(), "spill")
	checkpoint, err := server.Checkpoint(ctx, "pull", zebu.CheckpointOptions{Bitmap: "monday", Spill: spill})
	if err != nil {
		t.Fatal(err)
	}
	write(t, disk, 3*mib, 9)
	for _, export := range []string{"", "disk"} {
		then, err := checkpoint.Open(ctx, export)
		if err != nil {
			t.Fatal(err)
		}
		holds(t, then, raw)
		if err := then.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := checkpoint.Open(ctx, "none"); !errors.Is(err, zebu.ErrNotFound) {
		t.Fatal(err)
	}
	uri, err := checkpoint.URI("disk")
	if err != nil {
		t.Fatal(err)
	}
	tool(t, "qemu-img", "info", uri)
	if err := checkpoint.End(ctx); err != nil {
		t.Fatal(err)
	}
	status, err := checkpoint.Status(ctx)
	if err != nil || status.Status != "ended" || status.EndedBy != "command" {
		t.Fatal(status, err)
	}
	if _, err := server.Checkpoint(ctx, "next", zebu.CheckpointOptions{From: "none"}); !errors.Is(err, zebu.ErrNotFound) {
		t.Fatal(err)
	}
}

func TestADiskInUseIsBackedUp(t *testing.T) {
	raw, _, server := served(t)
	ctx := context.Background()
	dir := t.TempDir()
	progress := make(chan float64, 1000)
	full, next := filepath.Join(dir, "full.qcow2"), filepath.Join(dir, "next.qcow2")
	err := server.Backup(ctx, "disk", full, zebu.BackupOptions{Bitmap: "days", Compression: "zstd", Progress: progress})
	if err != nil {
		t.Fatal(err)
	}
	last := 0.0
	for share := range progress {
		last = share
	}
	if last != 1 {
		t.Fatal(last)
	}
	holds(t, open(t, full), raw)
	write(t, client(t, server, "disk"), 5*mib, 3)
	copy(raw[5*mib:], bytes.Repeat([]byte{3}, 10_000))
	if err := server.Backup(ctx, "disk", next, zebu.BackupOptions{Bitmap: "days", Previous: full}); err != nil {
		t.Fatal(err)
	}
	holds(t, open(t, next), raw)
	slow, cancel := context.WithCancel(ctx)
	progress = make(chan float64, 1)
	go func() { <-progress; cancel() }()
	err = server.Backup(slow, "disk", filepath.Join(dir, "slow.qcow2"), zebu.BackupOptions{Rate: 1 << 20, Progress: progress})
	if !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 2 {
		t.Fatal(left)
	}
}

func TestADiskAtRestIsBackedUp(t *testing.T) {
	raw, path := image(t, "qcow2")
	to := filepath.Join(t.TempDir(), "backup.qcow2")
	if err := zebu.Backup(context.Background(), path, to); err != nil {
		t.Fatal(err)
	}
	holds(t, open(t, to), raw)
}
