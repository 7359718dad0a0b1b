"""Open disks."""

import asyncio
import io
import os

from zebu import _zebu
from zebu._types import Bitmap, Extent, Info, Snapshot

_MODES = {"r": False, "rb": False, "r+": True, "rb+": True, "r+b": True}


def open(name, mode="r", format=None, **options):
    """Open a disk: for reading, or with mode "r+" for writing, too."""
    writable = _MODES.get(mode)
    if writable is None:
        raise ValueError(f"mode is 'r' or 'r+', not {mode!r}; zebu.create() makes images")
    name = os.fsdecode(name)
    return Disk(_zebu.open(name, writable, format, _plain(options)), name, writable)


async def aopen(name, mode="r", format=None, **options):
    """Open a disk, as open() does."""
    return await asyncio.to_thread(open, name, mode, format, **options)


def _plain(options):
    """The options with what the native part takes: names as text, passphrases as bytes."""
    passphrase = options.get("passphrase")
    if isinstance(passphrase, str):
        options = {**options, "passphrase": passphrase.encode()}
    return options


class Disk(io.RawIOBase):
    """An open disk, as a binary file that does not grow.

    Any number of threads may use it at once; the position of read() and seek() is one for all of them. Requests release the
    GIL. A method whose name begins with an a gives an awaitable: a thread of the event loop's executor does the work. If the
    task that awaits it is cancelled, the request goes on, with the buffer.
    """

    def __init__(self, native, name, writable):
        self._native = native
        self._position = 0
        self._writable = writable
        self.mode = "rb+" if writable else "rb"
        self.name = name

    def __repr__(self):
        state = "closed" if self.closed else self.mode
        return f"<zebu.Disk {self.name!r} {state}>"

    def _open(self):
        if self.closed:
            raise ValueError("I/O operation on a closed disk")
        return self._native

    # A binary file.

    def readable(self):
        self._open()
        return True

    def seekable(self):
        self._open()
        return True

    def writable(self):
        self._open()
        return self._writable

    def tell(self):
        self._open()
        return self._position

    def seek(self, offset, whence=os.SEEK_SET, /):
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence)
        if whence == os.SEEK_END:
            start = self._open().size
        if start is None:
            raise ValueError(f"whence is 0, 1 or 2, not {whence!r}")
        self._open()
        position = start + offset
        if position < 0:
            raise ValueError(f"negative seek position {position}")
        self._position = position
        return position

    def readinto(self, buffer):
        count = self._open().pread(buffer, self._position)
        self._position += count
        return count

    def read(self, size=-1):
        native = self._open()
        if size is None or size < 0:
            size = max(native.size - self._position, 0)
        data = native.read_at(self._position, size)
        self._position += len(data)
        return data

    def readall(self):
        return self.read(-1)

    def write(self, buffer):
        native = self._writing()
        left = native.size - self._position
        view = memoryview(buffer).cast("B")
        # As for a device: what fits. With nothing that does, the error says so.
        if 0 < left < len(view):
            view = view[:left]
        count = native.pwrite(view, self._position) if len(view) else 0
        self._position += count
        return count

    def truncate(self, size=None, /):
        raise io.UnsupportedOperation("a disk is not truncated; resize() changes its size")

    def flush(self):
        if self.closed:
            raise ValueError("I/O operation on a closed disk")
        # close() has flushed already when it comes here.
        if self._writable and not self._native.closed:
            self._native.flush()

    def close(self):
        native = getattr(self, "_native", None)
        if native is None or self.closed:
            return
        try:
            native.close()
        finally:
            # After an error that leaves it open, it can be closed again.
            if native.closed:
                super().close()

    # A disk.

    @property
    def size(self):
        """Bytes of the disk."""
        return self._open().size

    @property
    def format(self):
        """The format of the image."""
        return self._open().format

    def _writing(self):
        native = self._open()
        if not self._writable:
            raise io.UnsupportedOperation("the disk was opened for reading")
        return native

    def pread(self, buffer, offset):
        """Fill a buffer from an offset on, as far as the disk goes. Return the number of bytes."""
        return self._open().pread(buffer, offset)

    def pwrite(self, buffer, offset):
        """Write all of a buffer at an offset. Return the number of bytes."""
        return self._writing().pwrite(buffer, offset)

    def read_at(self, offset, length):
        """Read bytes at an offset, as far as the disk goes."""
        return self._open().read_at(offset, length)

    def discard(self, offset, length):
        """Give a range up: whole clusters in it read as zero afterwards."""
        self._writing().discard(offset, length)

    def write_zeroes(self, offset, length, *, keep=False):
        """Make a range read as zero. With keep, its space stays allocated."""
        self._writing().write_zeroes(offset, length, keep)

    def resize(self, size, *, shrink=False):
        """Change the size of the disk. With shrink it may become smaller."""
        self._writing().resize(size, shrink)

    def extents(self, offset=0, length=None):
        """Iterate over the extents of a range, through the whole chain."""
        batches = self._open().extents(offset, length)

        def walk():
            while batch := batches.next_batch():
                yield from map(Extent._make, batch)

        return walk()

    def info(self):
        """Tell what is known without data of the disk."""
        return Info(**self._open().info())

    @property
    def snapshots(self):
        """The internal snapshots, oldest first."""
        return [Snapshot(**snapshot) for snapshot in self._open().snapshots()]

    def create_snapshot(self, name):
        """Take a snapshot."""
        return Snapshot(**self._writing().create_snapshot(name))

    def apply_snapshot(self, which):
        """Make the disk hold what it held at a snapshot, given by its id or name."""
        self._writing().apply_snapshot(which)

    def delete_snapshot(self, which):
        """Delete a snapshot, given by its id or name."""
        self._writing().delete_snapshot(which)

    @property
    def bitmaps(self):
        """The persistent dirty bitmaps."""
        return [Bitmap(**bitmap) for bitmap in self._open().bitmaps()]

    def dirty(self, name):
        """Offsets and lengths of the ranges that are dirty in a bitmap."""
        return self._open().dirty(name)

    def add_bitmap(self, name, *, granularity=None, recording=True):
        """Add an empty bitmap."""
        self._writing().add_bitmap(name, granularity, recording)

    def remove_bitmap(self, name):
        """Remove a bitmap, whatever its state."""
        self._writing().remove_bitmap(name)

    def clear_bitmap(self, name):
        """Clear all bits of a bitmap."""
        self._writing().clear_bitmap(name)

    # For event loops.

    async def aread(self, offset, length):
        """As read_at()."""
        return await asyncio.to_thread(self.read_at, offset, length)

    async def apread(self, buffer, offset):
        """As pread()."""
        return await asyncio.to_thread(self.pread, buffer, offset)

    async def apwrite(self, buffer, offset):
        """As pwrite()."""
        return await asyncio.to_thread(self.pwrite, buffer, offset)

    async def aflush(self):
        """As flush()."""
        await asyncio.to_thread(self.flush)

    async def adiscard(self, offset, length):
        """As discard()."""
        await asyncio.to_thread(self.discard, offset, length)

    async def awrite_zeroes(self, offset, length, *, keep=False):
        """As write_zeroes()."""
        await asyncio.to_thread(self.write_zeroes, offset, length, keep=keep)

    async def aclose(self):
        """As close()."""
        await asyncio.to_thread(self.close)

