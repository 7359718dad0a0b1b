"""Packages that take a binary file take a disk."""

import io
import struct
import tarfile

import pytest
import zebu
from conftest import MIB, noise, tool


@pytest.fixture
def partitioned(tmp_path):
    """An image of a disk with a table of two partitions, and what is in them."""
    disk = bytearray(8 * MIB)
    parts = [(2048, 2048), (4096, 8192)]
    for number, (start, sectors) in enumerate(parts):
        entry = struct.pack("<B3sB3sII", 0, b"\0\2\0", 0x83, b"\0\2\0", start, sectors)
        disk[446 + 16 * number : 462 + 16 * number] = entry
        disk[start * 512 : start * 512 + 4096] = noise(number, 4096)
    disk[510:512] = b"\x55\xaa"
    raw, path = tmp_path / "parts.raw", tmp_path / "parts.qcow2"
    raw.write_bytes(disk)
    tool("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, path)
    return path, parts


def test_dissect_finds_partitions(partitioned):
    from dissect.volume import disk as volumes

    path, parts = partitioned
    with zebu.open(path) as disk:
        found = volumes.Disk(disk).partitions
        assert [(part.offset // 512, part.size // 512) for part in found] == parts
        for number, part in enumerate(found):
            assert part.open().read(4096) == noise(number, 4096)


def test_dissect_target_takes_a_disk(partitioned):
    from dissect.target.containers.raw import RawContainer

    path, _ = partitioned
    with zebu.open(path) as disk:
        container = RawContainer(disk)
        assert container.size == 8 * MIB
        container.seek(2048 * 512)
        assert container.read(4096) == noise(0, 4096)


def test_fsspec_reads_an_archive_on_a_disk(tmp_path):
    from fsspec.implementations.tar import TarFileSystem

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        member = tarfile.TarInfo("folder/file")
        member.size = 100_000
        tar.addfile(member, io.BytesIO(noise(1, 100_000)))
    path = tmp_path / "disk.qcow2"
    zebu.create(path, 8 * MIB)
    with zebu.open(path, "r+") as disk:
        disk.write(archive.getvalue())
    with zebu.open(path) as disk:
        files = TarFileSystem(fo=io.BufferedReader(disk))
        assert files.ls("folder", detail=False) == ["folder/file"]
        assert files.cat("folder/file") == noise(1, 100_000)


def test_a_map_is_read_into(partitioned):
    """Memory of another kind than bytearray: a map that programs share."""
    import mmap

    path, _ = partitioned
    with zebu.open(path) as disk, mmap.mmap(-1, MIB) as memory:
        assert disk.pread(memory, 2048 * 512) == MIB
        assert memory[:4096] == noise(0, 4096)
