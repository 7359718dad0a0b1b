package zebu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
)

// Disk is an open disk. Its methods may be called by several goroutines at a time.
type Disk struct {
	server *Server
	// isAlone tells that the server is there for this disk alone.
	isAlone bool
	client  *client
	info    func(context.Context) (*ImageInfo, error)
	// stop ends the watch over the context.
	stop   func() bool
	closed sync.Once
	err    error
}

var (
	_ io.ReaderAt = (*Disk)(nil)
	_ io.WriterAt = (*Disk)(nil)
	_ io.Closer   = (*Disk)(nil)
)

// Open opens a disk by any name that zebu takes. It is read only, unless Writable is given. When ctx ends, so does the disk: requests
// under way return its error. It takes the options Format, Writable, ImageOpts, AllowRefs and Snapshot.
func Open(ctx context.Context, name string, with ...Option) (*Disk, error) {
	o, err := gather("Open", with, opening...)
	if err != nil {
		return nil, err
	}
	info := func(ctx context.Context) (*ImageInfo, error) {
		shown := o
		shown.snapshot = ""
		if o.writable {
			// The server has the lock.
			shown.args = append(slices.Clone(o.args), "-U")
		}
		return shown.imageInfo(ctx, name)
	}
	served := o
	served.args = append(slices.Clone(o.args), "--until-last-client")
	server, err := serve(ctx, []string{name}, served)
	if err != nil {
		return nil, err
	}
	disk, err := server.open(ctx, "", info)
	if err != nil {
		return nil, errors.Join(err, server.Close())
	}
	disk.isAlone = true
	return disk, nil
}

// Size returns the size of the disk in bytes.
func (d *Disk) Size() int64 { return int64(d.client.size) }

// Info tells what the image is.
func (d *Disk) Info(ctx context.Context) (*ImageInfo, error) { return d.info(ctx) }

// BlockSize returns the bytes that offsets and lengths of writes are multiples of: 1, but for disks with encrypted or larger sectors.
func (d *Disk) BlockSize() int64 { return int64(d.client.least) }

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
	if err := d.checkChange(offset, int64(len(p))); err != nil {
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

// checkChange refuses changes that are not possible.
func (d *Disk) checkChange(offset, length int64) error {
	if d.client.readOnly {
		return fmt.Errorf("%w: it was opened without Writable", ErrReadOnly)
	}
	if least := d.BlockSize(); offset%least != 0 || length%least != 0 {
		return fmt.Errorf("zebu: %d bytes at %d: both must be multiples of %d on this disk", length, offset, least)
	}
	return d.check(offset, length)
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

// longestRange is the longest range of a request without data, in bytes: its length has 32 bits.
const longestRange = 1 << 30

func (d *Disk) ranged(kind uint16, offset, length int64) error {
	if err := d.checkChange(offset, length); err != nil {
		return err
	}
	for length > 0 {
		part := min(length, longestRange)
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
		if err := d.client.call(cmdBlockStatus, uint64(from), uint32(min(d.Size()-from, longestRange)), nil, r); err != nil {
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
	if err == nil || errors.Is(err, ErrClosed) {
		return err
	}
	select {
	case <-d.server.process.ended:
		return errors.Join(err, d.server.process.failure())
	default:
		return err
	}
}

// Close makes everything durable, and ends the process, if it is there for this disk alone. Its error is that of the last writes, if they
// failed, and of the context, if that has ended before.
func (d *Disk) Close() error {
	d.closed.Do(func() {
		if !d.client.readOnly {
			d.err = d.Flush()
		}
		d.stop()
		// The server answers nothing to it, and ends when its last client is gone.
		_ = d.client.begin(cmdDisc, 0, 0, 0, nil, &request{})
		d.client.breakOff(ErrClosed)
		<-d.client.over
		if d.isAlone {
			d.err = errors.Join(d.err, d.server.Close())
		}
	})
	return d.err
}
