package zebu

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
)

// Numbers of the NBD protocol.
const (
	nbdMagic        = 0x4e42444d41474943
	optionMagic     = 0x49484156454f5054
	optionReply     = 0x0003e889045565a9
	requestMagic    = 0x25609513
	simpleMagic     = 0x67446698
	structuredMagic = 0x668e33ef

	optGo         = 7
	optStructured = 8
	optMeta       = 10

	repAck  = 1
	repInfo = 3
	repMeta = 4
	repErr  = 1 << 31

	infoExport    = 0
	infoBlockSize = 3

	cmdRead        = 0
	cmdWrite       = 1
	cmdDisc        = 2
	cmdFlush       = 3
	cmdTrim        = 4
	cmdWriteZeroes = 6
	cmdBlockStatus = 7

	flagReadOnly = 1 << 1
	chunkDone    = 1

	chunkNone        = 0
	chunkData        = 1
	chunkHole        = 2
	chunkBlockStatus = 5
	chunkError       = 1 << 15

	// mostReply is the longest chunk that is not data, in bytes.
	mostReply = 1 << 20
)

var errLies = errors.New("the server breaks the NBD protocol")

// request is one that the server has not answered.
type request struct {
	into   []byte
	offset uint64
	left   int
	extent []byte
	err    error
	done   chan struct{}
}

// client is a connection to an export.
type client struct {
	conn     net.Conn
	size     uint64
	readOnly bool
	least    uint32
	most     uint32
	context  uint32
	hasMap   bool

	writing sync.Mutex

	mu      sync.Mutex
	next    uint64
	pending map[uint64]*request
	broken  error
	// over is closed when nothing is read from the connection any more.
	over chan struct{}
}

// connect opens an export at a connection.
func connect(conn net.Conn, export string) (*client, error) {
	c := &client{conn: conn, least: 1, most: 32 << 20, pending: map[uint64]*request{}, over: make(chan struct{})}
	in := bufio.NewReaderSize(conn, 64<<10)
	if err := c.negotiate(in, export); err != nil {
		conn.Close()
		return nil, err
	}
	go c.receive(in)
	return c, nil
}

func (c *client) negotiate(in *bufio.Reader, export string) error {
	var hello struct {
		Magic, Option uint64
		Flags         uint16
	}
	if err := binary.Read(in, binary.BigEndian, &hello); err != nil {
		return err
	}
	if hello.Magic != nbdMagic || hello.Option != optionMagic || hello.Flags&3 != 3 {
		return errLies
	}
	if err := binary.Write(c.conn, binary.BigEndian, uint32(3)); err != nil {
		return err
	}
	if _, err := c.option(in, optStructured, nil, nil); err != nil {
		return err
	}
	name := binary.BigEndian.AppendUint32(nil, uint32(len(export)))
	name = append(name, export...)
	query := "base:allocation"
	meta := binary.BigEndian.AppendUint32(append([]byte{}, name...), 1)
	meta = binary.BigEndian.AppendUint32(meta, uint32(len(query)))
	has, err := c.option(in, optMeta, append(meta, query...), func(kind uint32, data []byte) error {
		if kind == repMeta && len(data) >= 4 {
			c.context, c.hasMap = binary.BigEndian.Uint32(data), true
		}
		return nil
	})
	if err != nil {
		return err
	}
	c.hasMap = c.hasMap && has
	choose := binary.BigEndian.AppendUint16(append([]byte{}, name...), 1)
	choose = binary.BigEndian.AppendUint16(choose, infoBlockSize)
	known := false
	_, err = c.option(in, optGo, choose, func(kind uint32, data []byte) error {
		if kind != repInfo || len(data) < 2 {
			return nil
		}
		switch info := binary.BigEndian.Uint16(data); {
		case info == infoExport && len(data) == 12:
			c.size = binary.BigEndian.Uint64(data[2:])
			c.readOnly = binary.BigEndian.Uint16(data[10:])&flagReadOnly != 0
			known = true
		case info == infoBlockSize && len(data) == 14:
			c.least = binary.BigEndian.Uint32(data[2:])
			c.most = min(c.most, binary.BigEndian.Uint32(data[10:]))
		}
		return nil
	})
	if err == nil && (!known || c.least == 0 || c.least > c.most || c.size > 1<<63-1) {
		err = errLies
	}
	return err
}

// option negotiates one. each gets every reply before the last one. False if the server does not know the option.
func (c *client) option(in io.Reader, option uint32, data []byte, each func(uint32, []byte) error) (bool, error) {
	head := binary.BigEndian.AppendUint64(nil, optionMagic)
	head = binary.BigEndian.AppendUint32(head, option)
	head = binary.BigEndian.AppendUint32(head, uint32(len(data)))
	if _, err := c.conn.Write(append(head, data...)); err != nil {
		return false, err
	}
	for {
		var reply struct {
			Magic             uint64
			Option, Kind, Len uint32
		}
		if err := binary.Read(in, binary.BigEndian, &reply); err != nil {
			return false, err
		}
		if reply.Magic != optionReply || reply.Option != option || reply.Len > mostReply {
			return false, errLies
		}
		data := make([]byte, reply.Len)
		if _, err := io.ReadFull(in, data); err != nil {
			return false, err
		}
		switch {
		case reply.Kind == repAck:
			return true, nil
		case reply.Kind&repErr != 0 && option != optGo:
			return false, nil
		case reply.Kind&repErr != 0:
			return false, fmt.Errorf("the export can't be opened: %s", data)
		case each != nil:
			if err := each(reply.Kind, data); err != nil {
				return false, err
			}
		}
	}
}

// begin sends a request.
func (c *client) begin(kind uint16, flags uint16, offset uint64, length uint32, data []byte, r *request) error {
	r.done = make(chan struct{})
	c.mu.Lock()
	if c.broken != nil {
		c.mu.Unlock()
		return c.broken
	}
	c.next++
	cookie := c.next
	c.pending[cookie] = r
	c.mu.Unlock()
	head := binary.BigEndian.AppendUint32(make([]byte, 0, 28), requestMagic)
	head = binary.BigEndian.AppendUint16(head, flags)
	head = binary.BigEndian.AppendUint16(head, kind)
	head = binary.BigEndian.AppendUint64(head, cookie)
	head = binary.BigEndian.AppendUint64(head, offset)
	head = binary.BigEndian.AppendUint32(head, length)
	c.writing.Lock()
	parts := net.Buffers{head}
	if len(data) > 0 {
		parts = append(parts, data)
	}
	_, err := parts.WriteTo(c.conn)
	c.writing.Unlock()
	if err != nil {
		// The receiver finds out as well, and ends all requests, this one included.
		c.conn.Close()
	}
	return nil
}

// call sends a request and waits for its answer.
func (c *client) call(kind uint16, offset uint64, length uint32, data []byte, r *request) error {
	if err := c.begin(kind, 0, offset, length, data, r); err != nil {
		return err
	}
	<-r.done
	return r.err
}

// receive takes answers until the connection ends.
func (c *client) receive(in *bufio.Reader) {
	var err error
	for err == nil {
		err = c.answer(in)
	}
	c.conn.Close()
	c.mu.Lock()
	if c.broken == nil {
		c.broken = fmt.Errorf("the connection to zebu is gone: %w", err)
	}
	for _, r := range c.pending {
		r.err = c.broken
		close(r.done)
	}
	c.pending = map[uint64]*request{}
	c.mu.Unlock()
	close(c.over)
}

// breakOff ends the connection for a reason that all requests get.
func (c *client) breakOff(reason error) {
	c.mu.Lock()
	if c.broken == nil {
		c.broken = reason
	}
	c.mu.Unlock()
	c.conn.Close()
}

func (c *client) find(cookie uint64) (*request, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r := c.pending[cookie]; r != nil {
		return r, nil
	}
	return nil, errLies
}

func (c *client) finish(cookie uint64, r *request) {
	c.mu.Lock()
	delete(c.pending, cookie)
	c.mu.Unlock()
	close(r.done)
}

func (c *client) answer(in *bufio.Reader) error {
	var head [20]byte
	if _, err := io.ReadFull(in, head[:16]); err != nil {
		return err
	}
	switch binary.BigEndian.Uint32(head[:]) {
	case simpleMagic:
		cookie := binary.BigEndian.Uint64(head[8:])
		r, err := c.find(cookie)
		if err != nil {
			return err
		}
		// Reads have structured replies.
		if r.into != nil {
			return errLies
		}
		if code := binary.BigEndian.Uint32(head[4:]); code != 0 {
			r.err = errnoOf(code)
		}
		c.finish(cookie, r)
		return nil
	case structuredMagic:
		if _, err := io.ReadFull(in, head[16:]); err != nil {
			return err
		}
		flags, kind := binary.BigEndian.Uint16(head[4:]), binary.BigEndian.Uint16(head[6:])
		cookie, length := binary.BigEndian.Uint64(head[8:]), binary.BigEndian.Uint32(head[16:])
		r, err := c.find(cookie)
		if err != nil {
			return err
		}
		if err := r.chunk(in, kind, length, c.context); err != nil {
			return err
		}
		if flags&chunkDone != 0 {
			if r.err == nil && r.left != 0 {
				return errLies
			}
			c.finish(cookie, r)
		}
		return nil
	}
	return errLies
}

// chunk takes a part of an answer.
func (r *request) chunk(in *bufio.Reader, kind uint16, length uint32, context uint32) error {
	if kind == chunkData {
		var offset [8]byte
		if length < 8 {
			return errLies
		}
		if _, err := io.ReadFull(in, offset[:]); err != nil {
			return err
		}
		part, err := r.part(binary.BigEndian.Uint64(offset[:]), uint64(length-8))
		if err == nil {
			_, err = io.ReadFull(in, part)
		}
		return err
	}
	if length > mostReply {
		return errLies
	}
	data := make([]byte, length)
	if _, err := io.ReadFull(in, data); err != nil {
		return err
	}
	switch {
	case kind == chunkNone && length == 0:
	case kind == chunkHole && length == 12:
		part, err := r.part(binary.BigEndian.Uint64(data), uint64(binary.BigEndian.Uint32(data[8:])))
		clear(part)
		return err
	case kind == chunkBlockStatus && length >= 12 && (length-4)%8 == 0:
		if binary.BigEndian.Uint32(data) != context {
			return errLies
		}
		r.extent = data[4:]
	case kind&chunkError != 0 && length >= 6:
		code, text := binary.BigEndian.Uint32(data), data[6:]
		if size := int(binary.BigEndian.Uint16(data[4:])); size <= len(text) {
			text = text[:size]
		}
		if r.err == nil {
			r.err = errnoOf(code)
			if len(text) > 0 {
				r.err = fmt.Errorf("%s: %w", text, r.err)
			}
		}
	default:
		return errLies
	}
	return nil
}

// part is the place in the buffer for bytes of the disk.
func (r *request) part(offset, length uint64) ([]byte, error) {
	from := offset - r.offset
	if r.into == nil || offset < r.offset || from > uint64(len(r.into)) || length > uint64(len(r.into))-from || length > uint64(r.left) {
		return nil, errLies
	}
	r.left -= int(length)
	return r.into[from : from+length], nil
}
