package zebu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
)

// Disk is an open disk. Its methods may be called by several goroutines at a time.
type Disk struct {
	server *Server
	client *client
	closed sync.Once
	err    error
	// watched is closed when nothing waits for the context any more.
	watched chan struct{}
}

var (
	_ io.ReaderAt = (*Disk)(nil)
	_ io.WriterAt = (*Disk)(nil)
	_ io.Closer   = (*Disk)(nil)
)

// ErrClosed says that a disk is closed.
var ErrClosed = fmt.Errorf("the disk is closed: %w", os.ErrClosed)

// Open opens a disk by any name that zebu takes. It can be read only, unless the options say otherwise. When ctx ends, so does the disk:
// requests under way return its error.
func Open(ctx context.Context, name string, with ...Option) (*Disk, error) {
	with = append(with[:len(with):len(with)], Args("--until-last-client"))
	server, err := Serve(ctx, []string{name}, with...)
	if err != nil {
		return nil, err
	}
	conn, err := server.dial(ctx, server.nbd)
	if err == nil {
		var c *client
		if c, err = connect(conn, ""); err == nil {
			disk := &Disk{server: server, client: c, watched: make(chan struct{})}
			go disk.watch(ctx)
			return disk, nil
		}
	}
	return nil, errors.Join(err, server.Close())
}

// watch ends the disk with its context.
func (d *Disk) watch(ctx context.Context) {
	defer close(d.watched)
	select {
	case <-ctx.Done():
		d.client.breakOff(ctx.Err())
	case <-d.client.over:
	}
}

// Size returns the size of the disk in bytes.
func (d *Disk) Size() int64 { return int64(d.client.size) }

// ReadOnly tells whether the disk can be read only.
func (d *Disk) ReadOnly() bool { return d.client.readOnly }

// ReadAt reads len(p) bytes from offset on. At the end of the disk it reads fewer, and returns io.EOF.
func (d *Disk) ReadAt(p []byte, offset int64) (int, error) {
	if offset < 0 {
		return 0, errors.New("zebu: a negative offset")
	}
	size := d.Size()
	if offset >= size {
		return 0, io.EOF
	}
	var end error
	if int64(len(p)) > size-offset {
		p, end = p[:size-offset], io.EOF
	}
	least := int64(d.client.least)
	if offset%least != 0 || int64(len(p))%least != 0 {
		n, err := d.readAround(p, offset, least)
		return n, errors.Join(err, end)
	}
	n, err := d.pieces(p, offset, func(piece []byte, at int64) error {
		r := &request{into: piece, offset: uint64(at), left: len(piece)}
		return d.client.call(cmdRead, uint64(at), uint32(len(piece)), nil, r)
	})
	if err == nil {
		err = end
	}
	return n, err
}

// readAround reads whole blocks, and gives what is wanted of them.
func (d *Disk) readAround(p []byte, offset, least int64) (int, error) {
	from := offset / least * least
	to := min((offset+int64(len(p))+least-1)/least*least, d.Size())
	whole := make([]byte, to-from)
	n, err := d.ReadAt(whole, from)
	if int64(n) < offset-from {
		return 0, err
	}
	if n == len(whole) && errors.Is(err, io.EOF) {
		err = nil
	}
	return copy(p, whole[offset-from:n]), err
}

// WriteAt writes p at offset. It is durable after Flush.
func (d *Disk) WriteAt(p []byte, offset int64) (int, error) {
	if err := d.check(offset, int64(len(p))); err != nil {
		return 0, err
	}
	return d.pieces(p, offset, func(piece []byte, at int64) error {
		return d.client.call(cmdWrite, uint64(at), uint32(len(piece)), piece, &request{})
	})
}

// pieces does a long request in parts that the server takes.
func (d *Disk) pieces(p []byte, offset int64, each func([]byte, int64) error) (int, error) {
	done := 0
	for done < len(p) {
		piece := p[done:min(len(p), done+int(d.client.most))]
		if err := each(piece, offset+int64(done)); err != nil {
			return done, d.explain(err)
		}
		done += len(piece)
	}
	return done, nil
}

// check refuses what lies outside of the disk.
func (d *Disk) check(offset, length int64) error {
	if offset < 0 || length < 0 || offset > d.Size() || length > d.Size()-offset {
		return fmt.Errorf("zebu: %d bytes at %d are not within the disk of %d bytes", length, offset, d.Size())
	}
	return nil
}

// Flush makes everything durable whose writing has returned.
func (d *Disk) Flush() error {
	return d.explain(d.client.call(cmdFlush, 0, 0, nil, &request{}))
}

// Discard gives a range up: whole clusters of it read as zero, or as the backing file, if there is one.
func (d *Disk) Discard(offset, length int64) error { return d.ranged(cmdTrim, offset, length) }

// WriteZeroes makes a range read as zero.
func (d *Disk) WriteZeroes(offset, length int64) error {
	return d.ranged(cmdWriteZeroes, offset, length)
}

func (d *Disk) ranged(kind uint16, offset, length int64) error {
	if err := d.check(offset, length); err != nil {
		return err
	}
	for length > 0 {
		part := min(length, 1<<30)
		if err := d.client.call(kind, uint64(offset), uint32(part), nil, &request{}); err != nil {
			return d.explain(err)
		}
		offset, length = offset+part, length-part
	}
	return nil
}

// Extent is a part of a disk of one kind.
type Extent struct {
	// Offset and Length are in bytes.
	Offset, Length int64
	// Hole tells that it takes no space in the image.
	Hole bool
	// Zero tells that it reads as zero.
	Zero bool
}

// Extents returns the extents of a range of the disk, through all backing files.
func (d *Disk) Extents(ctx context.Context, offset, length int64) ([]Extent, error) {
	if err := d.check(offset, length); err != nil {
		return nil, err
	}
	if !d.client.hasMap {
		return []Extent{{Offset: offset, Length: length}}, nil
	}
	var found []Extent
	end := offset + length
	for at := offset; at < end; {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		from := at / int64(d.client.least) * int64(d.client.least)
		r := &request{}
		if err := d.client.call(cmdBlockStatus, uint64(from), uint32(min(d.Size()-from, 1<<30)), nil, r); err != nil {
			return nil, d.explain(err)
		}
		if len(r.extent) == 0 {
			return nil, errLies
		}
		for told := r.extent; len(told) >= 8 && at < end; told = told[8:] {
			until := min(from+int64(binary.BigEndian.Uint32(told)), end)
			if until <= from {
				return nil, errLies
			}
			from = until
			if until <= at {
				continue
			}
			flags := binary.BigEndian.Uint32(told[4:])
			next := Extent{Offset: at, Length: until - at, Hole: flags&1 != 0, Zero: flags&2 != 0}
			if last := len(found) - 1; last >= 0 && found[last].Hole == next.Hole && found[last].Zero == next.Zero {
				found[last].Length += next.Length
			} else {
				found = append(found, next)
			}
			at = until
		}
	}
	return found, nil
}

// explain adds what zebu said to an error of the connection.
func (d *Disk) explain(err error) error {
	if err == nil {
		return nil
	}
	select {
	case <-d.server.process.ended:
		return errors.Join(err, d.server.process.failure())
	default:
		return err
	}
}

// Close makes everything durable, and ends the process. Its error is that of the last writes, if they failed.
func (d *Disk) Close() error {
	d.closed.Do(func() {
		if !d.client.readOnly {
			d.err = d.Flush()
		}
		// The server answers nothing to it, and ends when its last client is gone.
		_ = d.client.begin(cmdDisc, 0, 0, 0, nil, &request{})
		d.client.breakOff(ErrClosed)
		<-d.client.over
		<-d.watched
		d.err = errors.Join(d.err, d.server.Close())
	})
	return d.err
}
