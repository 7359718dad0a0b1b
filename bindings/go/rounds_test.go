package zebu_test

import (
	"bytes"
	"context"
	"os"
	"strconv"
	"sync"
	"testing"

	"example.org/zebu/bindings/go"
)

// rounds are those of each test here: ZEBU_ROUNDS, or a few.
func rounds(few int) int {
	if given, err := strconv.Atoi(os.Getenv("ZEBU_ROUNDS")); err == nil {
		return given
	}
	return few
}

// each runs rounds on some goroutines.
func each(goroutines, rounds int, work func(round int)) {
	var wait sync.WaitGroup
	for first := range goroutines {
		wait.Add(1)
		go func() {
			defer wait.Done()
			for round := first; round < rounds; round += goroutines {
				work(round)
			}
		}()
	}
	wait.Wait()
}

// reads compares some reads at a time with what a disk holds.
func reads(t *testing.T, disk *zebu.Disk, raw []byte, round int) {
	each(8, 16, func(part int) {
		at := (round*7919 + part*500_009) % (len(raw) - 4096)
		p := make([]byte, 1+(round*31+part*257)%4096)
		if n, err := disk.ReadAt(p, int64(at)); err != nil || !bytes.Equal(p, raw[at:at+n]) {
			t.Error("other bytes", at, err)
		}
	})
}

func TestManyDisksAreOpenedReadAndClosed(t *testing.T) {
	raw, path := image(t, "qcow2")
	each(4, rounds(100), func(round int) {
		disk, err := zebu.Open(context.Background(), path)
		if err != nil {
			t.Error(err)
			return
		}
		reads(t, disk, raw, round)
		if err := disk.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestManyClientsOfOneServerReadSideBySide(t *testing.T) {
	raw, path := image(t, "qcow2")
	server, err := zebu.Serve(context.Background(), []string{path})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	shared, err := server.Open(context.Background(), "")
	if err != nil {
		t.Fatal(err)
	}
	each(8, rounds(1000), func(round int) {
		own, err := server.Open(context.Background(), "")
		if err != nil {
			t.Error(err)
			return
		}
		reads(t, own, raw, round)
		reads(t, shared, raw, round)
		if err := own.Close(); err != nil {
			t.Error(err)
		}
		if _, err := server.Stats(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := shared.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestDisksAreCancelledAtAnyMoment(t *testing.T) {
	_, path := image(t, "qcow2")
	each(4, rounds(40), func(round int) {
		ctx, cancel := context.WithCancel(context.Background())
		var wait sync.WaitGroup
		wait.Add(1)
		go func() {
			defer wait.Done()
			for range round % 13 * 1000 {
				_ = ctx.Err()
			}
			cancel()
		}()
		if disk, err := zebu.Open(ctx, path); err == nil {
			_, _ = disk.ReadAt(make([]byte, 100_000), 0)
			_ = disk.Close()
		}
		wait.Wait()
	})
}
