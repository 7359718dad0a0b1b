"""Requests of an open disk."""

import array
import errno
import io
import pickle
import sys
import threading

import pytest
import zebu
from conftest import MIB, noise, same, tool


@pytest.mark.parametrize("format", ["qcow2", "raw", "vmdk", "vhdx", "vpc", "vdi", "qed"])
def test_a_disk_reads_as_a_file(tmp_path, raw, content, format):
    path = tmp_path / f"copy.{format}"
    more = ["-o", "force_size=on"] if format == "vpc" else []
    tool("qemu-img", "convert", "-f", "raw", "-O", format, *more, raw, path)
    with zebu.open(path, format=format) as disk:
        assert isinstance(disk, io.RawIOBase)
        assert (disk.readable(), disk.seekable(), disk.writable()) == (True, True, False)
        assert (disk.size, disk.format, disk.mode) == (len(content), format, "rb")
        assert disk.read() == content
        assert (disk.read(), disk.read(5), disk.tell()) == (b"", b"", len(content))
        assert disk.seek(-10, io.SEEK_END) == len(content) - 10
        assert disk.read(100) == content[-10:]
        assert disk.seek(1000) == 1000
        assert disk.seek(24, io.SEEK_CUR) == 1024
        assert disk.read(512) == content[1024:1536]
    assert disk.closed


def test_buffered_readers_work(image, content):
    with io.BufferedReader(zebu.open(image), 4096) as reader:
        assert reader.read(10) == content[:10]
        assert reader.peek(1)[:1] == content[10:11]
        reader.seek(5 * MIB - 3)
        assert reader.read(9) == content[5 * MIB - 3 : 5 * MIB + 6]
    assert reader.raw.closed


def test_buffered_writers_work(image, content):
    changed = bytearray(content)
    with io.BufferedRandom(zebu.open(image, "r+")) as file:
        for at in (5, 2 * MIB - 7, 7 * MIB):
            file.seek(at)
            file.write(noise(at, 9000))
            changed[at : at + 9000] = noise(at, 9000)
        file.seek(0)
        assert file.read() == changed
    check = zebu.check(image)
    assert check.clean and check.findings == []
    with zebu.open(image) as disk:
        assert disk.read() == changed


def test_buffers_are_used_in_place(image, content):
    with zebu.open(image, "r+") as disk:
        into = bytearray(MIB)
        assert disk.pread(into, 2 * MIB) == MIB
        assert into == content[2 * MIB : 3 * MIB]
        # A part, words of 8 bytes, and what reaches past the end.
        assert disk.pread(memoryview(into)[100:200], 5) == 100
        assert into[100:200] == content[5:105]
        words = array.array("Q", bytes(4096))
        assert disk.pread(words, 4096) == 4096
        assert words.tobytes() == content[4096:8192]
        assert disk.pread(into, len(content) - 3) == 3
        assert into[:3] == content[-3:]
        assert disk.pread(into, len(content)) == 0
        assert disk.pread(into, 1 << 60) == 0
        assert disk.pread(bytearray(), 0) == 0
        assert disk.pwrite(words, 0) == 4096
        assert disk.pwrite(b"", 0) == 0
        assert disk.read_at(0, 4096) == content[4096:8192]
        assert disk.read_at(1 << 60, 10) == b""


@pytest.mark.parametrize(
    ("buffer", "error"),
    [
        (bytes(10), BufferError),
        (memoryview(bytes(10)), BufferError),
        (memoryview(bytearray(10))[::2], BufferError),
        ("text", TypeError),
        (None, TypeError),
    ],
)
def test_a_buffer_that_can_not_be_filled_is_an_error(image, buffer, error):
    with zebu.open(image) as disk:
        with pytest.raises(error):
            disk.pread(buffer, 0)
        with pytest.raises(error):
            disk.readinto(buffer)
        assert disk.tell() == 0


def test_numbers_that_are_no_offsets_are_errors(image):
    with zebu.open(image, "r+") as disk:
        for offset in (-1, 1 << 64):
            with pytest.raises(OverflowError):
                disk.pread(bytearray(1), offset)
            with pytest.raises(OverflowError):
                disk.discard(offset, 1)
        with pytest.raises(ValueError):
            disk.seek(-1)
        with pytest.raises(ValueError):
            disk.seek(0, 7)
        with pytest.raises(ValueError):
            disk.extents(disk.size, 1)
        with pytest.raises(OSError):
            disk.discard(disk.size, 512)
        with pytest.raises(zebu.Error) as failed:
            disk.pwrite(bytes(2), disk.size - 1)
        assert (failed.value.kind, failed.value.filename) == ("out-of-range", str(image))
        # A file writes what fits, then fails.
        disk.seek(disk.size - 1)
        assert disk.write(b"ab") == 1
        with pytest.raises(zebu.Error):
            disk.write(b"b")


def test_writes_are_what_qemu_reads(tmp_path, image, raw, content):
    changed = bytearray(content)
    with zebu.open(image, "r+") as disk:
        for at, length in ((0, 512), (MIB + 1, 70_000), (3 * MIB, MIB)):
            assert disk.pwrite(noise(at, length), at) == length
            changed[at : at + length] = noise(at, length)
        disk.write_zeroes(5 * MIB + 10, 100_000)
        changed[5 * MIB + 10 : 5 * MIB + 100_010] = bytes(100_000)
        disk.write_zeroes(6 * MIB, 65536, keep=True)
        changed[6 * MIB : 6 * MIB + 65536] = bytes(65536)
        disk.discard(2 * MIB, MIB)
        changed[2 * MIB : 3 * MIB] = bytes(MIB)
        disk.flush()
        assert disk.read() == changed
    raw.write_bytes(changed)
    same(raw, "raw", image, "qcow2")


def test_extents_are_those_that_qemu_tells(image, content):
    with zebu.open(image) as disk:
        extents = list(disk.extents())
        assert sum(extent.length for extent in extents) == len(content)
        at = 0
        for extent in extents:
            assert extent.offset == at
            at += extent.length
            if extent.zero:
                assert not any(content[extent.offset : at])
        assert {extent.kind for extent in extents} == {"data", "unallocated"}
        part = list(disk.extents(MIB, 2 * MIB))
        assert (part[0].offset, sum(extent.length for extent in part)) == (MIB, 2 * MIB)
        assert list(disk.extents(disk.size)) == []


def test_many_extents_come_in_batches(tmp_path):
    path = tmp_path / "disk.qcow2"
    zebu.create(path, 64 * MIB, cluster_size=4096)
    with zebu.open(path, "r+") as disk:
        for at in range(0, 8 * MIB, 8192):
            disk.pwrite(b"x" * 4096, at)
        extents = list(disk.extents())
    assert len(extents) >= 2048
    assert [extent.offset for extent in extents if extent.kind == "data"] == list(range(0, 8 * MIB, 8192))
    ends = [extent.offset + extent.length for extent in extents]
    assert [extent.offset for extent in extents] == [0, *ends[:-1]] and ends[-1] == 64 * MIB


def test_snapshots_are_those_of_qemu(image, content):
    tool("qemu-img", "snapshot", "-c", "by-qemu", image)
    with zebu.open(image, "r+") as disk:
        disk.pwrite(b"changed", 0)
        made = disk.create_snapshot("by-zebu")
        assert [snapshot.name for snapshot in disk.snapshots] == ["by-qemu", "by-zebu"]
        assert disk.snapshots[1] == made
        assert made.disk_size == disk.size
        disk.apply_snapshot("by-qemu")
        assert disk.read() == content
        disk.delete_snapshot(made.id)
        with pytest.raises(zebu.Error) as failed:
            disk.delete_snapshot("none")
        assert (failed.value.kind, failed.value.errno) == ("not-found", errno.ENOENT)
    assert "by-qemu" in tool("qemu-img", "snapshot", "-l", image)
    with zebu.open(image, snapshot="by-qemu") as disk:
        assert disk.read() == content
    tool("qemu-img", "check", image)


def test_bitmaps_tell_what_was_written(image):
    with zebu.open(image, "r+") as disk:
        disk.add_bitmap("changes", granularity=65536)
        disk.pwrite(b"x", 3 * MIB)
        disk.pwrite(bytes(65537), 5 * MIB)
        assert disk.dirty("changes") == [(3 * MIB, 65536), (5 * MIB, 131072)]
        assert disk.bitmaps == [zebu.Bitmap("changes", 65536, True, True)]
        disk.clear_bitmap("changes")
        assert disk.dirty("changes") == []
        with pytest.raises(zebu.Error) as failed:
            disk.dirty("none")
        assert failed.value.kind == "not-found"
    with zebu.open(image) as disk:
        assert [bitmap.name for bitmap in disk.bitmaps] == ["changes"]
    with zebu.open(image, "r+") as disk:
        disk.remove_bitmap("changes")
    assert "changes" not in tool("qemu-img", "info", image)


def test_info_tells_of_the_chain(tmp_path, image):
    top = tmp_path / "top.qcow2"
    zebu.create(top, backing="disk.qcow2", backing_format="qcow2", cluster_size=32768, compression="zstd")
    with zebu.open(top) as disk:
        info = disk.info()
    assert (info.format, info.virtual_size, info.cluster_size) == ("qcow2", 8 * MIB, 32768)
    assert (info.backing_file, info.backing_format, info.backing_path) == ("disk.qcow2", "qcow2", str(image))
    assert (info.version, info.compression, info.encryption) == (3, "zstd", None)
    with pytest.raises(zebu.Error) as refused:
        zebu.open(top, refs="none")
    assert refused.value.kind == "reference-refused"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    zebu.create(elsewhere / "top.qcow2", backing=image, backing_format="qcow2")
    with pytest.raises(zebu.Error):
        zebu.open(elsewhere / "top.qcow2")
    zebu.open(elsewhere / "top.qcow2", refs=[tmp_path]).close()


def test_a_disk_may_change_its_size(image, content):
    with zebu.open(image, "r+") as disk:
        disk.resize(16 * MIB)
        assert disk.size == 16 * MIB
        assert disk.read() == content + bytes(8 * MIB)
        with pytest.raises(zebu.Error):
            disk.resize(MIB)
        disk.resize(MIB, shrink=True)
        disk.seek(0)
        assert disk.read() == content[:MIB]
        with pytest.raises(io.UnsupportedOperation):
            disk.truncate(0)


def test_an_encrypted_disk_wants_its_passphrase(tmp_path, raw, content):
    path, secret = tmp_path / "luks.qcow2", tmp_path / "secret"
    secret.write_text("open sesame")
    tool(
        "qemu-img", "convert", "--object", f"secret,id=s,file={secret}", "-f", "raw", "-O", "qcow2",
        "-o", "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10", raw, path,
    )  # fmt: skip
    with pytest.raises(zebu.Error) as failed:
        zebu.open(path)
    assert failed.value.kind == "key-missing"
    with pytest.raises(zebu.Error) as failed:
        zebu.open(path, passphrase="wrong")
    assert failed.value.kind == "wrong-key"
    for passphrase in ("open sesame", b"open sesame", bytearray(b"open sesame")):
        with zebu.open(path, passphrase=passphrase) as disk:
            assert disk.read() == content


def test_errors_have_errno_and_file(tmp_path, image):
    missing = tmp_path / "missing"
    with pytest.raises(zebu.Error) as failed:
        zebu.open(missing)
    error = failed.value
    assert isinstance(error, OSError)
    assert (error.errno, error.filename, error.kind) == (errno.ENOENT, str(missing), "io")
    assert (error.offset, error.file_offset, error.retryable) == (None, None, False)
    assert str(missing) in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (again.errno, again.filename, again.kind) == (error.errno, error.filename, error.kind)
    with zebu.open(image, "r+"):
        with pytest.raises(zebu.Error) as failed:
            zebu.open(image, "r+")
    assert (failed.value.kind, failed.value.retryable) == ("locked", True)
    at = zebu.Error(5, "bad", "name", offset=7, file_offset=9)
    assert str(at) == "[Errno 5] bad: 'name' (disk offset 7) (file offset 9)"


def test_a_damaged_table_is_an_error_with_its_place(image):
    with zebu.open(image) as disk:
        data = next(extent for extent in disk.extents() if extent.kind == "data")
    with open(image, "r+b") as file:
        header = file.read(48)
        l1 = int.from_bytes(header[40:48], "big")
        file.seek(l1)
        table = int.from_bytes(file.read(8), "big") & 0x00FF_FFFF_FFFF_FE00
        file.seek(table + data.offset // 65536 * 8)
        file.write(((1 << 63) | 0x1_0200).to_bytes(8, "big"))
    with zebu.open(image) as disk, pytest.raises(zebu.Error) as failed:
        disk.read_at(data.offset, 512)
    assert failed.value.kind == "corrupt"
    assert failed.value.errno == errno.EIO
    assert failed.value.offset is not None or failed.value.file_offset is not None


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda path: zebu.open(path, "w"), ValueError),
        (lambda path: zebu.open(path, format="tiff"), ValueError),
        (lambda path: zebu.open(path, cache="sometimes"), ValueError),
        (lambda path: zebu.open(path, colour="red"), TypeError),
        (lambda path: zebu.open(path, lock="no"), TypeError),
        (lambda path: zebu.open(7), TypeError),
        (lambda path: zebu.create(path, 1 << 20, backing="x"), ValueError),
        (lambda path: zebu.convert(path, f"{path}2", rate_limit=0), ValueError),
        (lambda path: zebu.backup(path, f"{path}2", previous_manifest="x"), ValueError),
    ],
)
def test_options_that_there_are_not_are_errors(image, call, error):
    with pytest.raises(error):
        call(image)


def test_a_name_with_a_protocol_is_refused():
    with pytest.raises(zebu.Error) as failed:
        zebu.open("s3://bucket/disk.qcow2")
    assert (failed.value.kind, failed.value.errno) == ("unsupported", errno.ENOTSUP)
    assert "s3" in str(failed.value)


def test_a_closed_disk_does_nothing(image):
    disk = zebu.open(image, "r+")
    extents = disk.extents()
    disk.close()
    disk.close()
    calls = [
        lambda: disk.read(1),
        lambda: disk.readinto(bytearray(1)),
        lambda: disk.pread(bytearray(1), 0),
        lambda: disk.pwrite(b"x", 0),
        lambda: disk.write(b"x"),
        lambda: disk.seek(0),
        lambda: disk.tell(),
        lambda: disk.flush(),
        lambda: disk.discard(0, 1),
        lambda: disk.write_zeroes(0, 1),
        lambda: disk.extents(),
        lambda: disk.info(),
        lambda: disk.snapshots,
        lambda: disk.bitmaps,
        lambda: disk.size,
        lambda: disk.readable(),
        lambda: zebu.convert(disk, f"{image}2"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()
    with pytest.raises(zebu.Error):
        next(extents)
    assert "closed" in repr(disk)


def test_a_disk_for_reading_is_not_written(image):
    with zebu.open(image) as disk:
        for call in (
            lambda: disk.write(b"x"),
            lambda: disk.pwrite(b"x", 0),
            lambda: disk.discard(0, 512),
            lambda: disk.create_snapshot("x"),
            lambda: disk.resize(16 * MIB),
        ):
            with pytest.raises(io.UnsupportedOperation):
                call()
        disk.flush()


def test_a_disk_that_nobody_closes_is_closed(image):
    disk = zebu.open(image, "r+")
    disk.pwrite(b"kept", 0)
    del disk
    with zebu.open(image, "r+") as disk:
        assert disk.read(4) == b"kept"
    tool("qemu-img", "check", image)


def test_threads_share_a_disk(image, content):
    """Each thread has a part of the disk, which it writes and reads back, large and small."""
    failures = []

    def work(number):
        try:
            base = number * MIB
            for turn in range(50):
                data = noise(number * 1000 + turn, 65536 * (1 + turn % 4))
                at = base + (turn * 4096) % (MIB // 2)
                disk.pwrite(data, at)
                back = bytearray(len(data))
                assert disk.pread(back, at) == len(data)
                assert back == data
        except BaseException as error:
            failures.append(error)

    with zebu.open(image, "r+") as disk:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    tool("qemu-img", "check", image)


def test_a_request_releases_the_gil(image):
    """With so long an interval no thread gets the GIL from one that does not give it up."""
    go, ran = threading.Event(), threading.Event()

    def work():
        go.wait()
        ran.set()

    other = threading.Thread(target=work)
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        with zebu.open(image) as disk:
            into = bytearray(MIB)
            go.set()
            for _ in range(1000):
                disk.pread(into, 0)
                if ran.is_set():
                    break
            assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
    other.join()
