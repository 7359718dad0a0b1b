"""Images by QEMU, and the bytes that are in them."""

import random
import subprocess
import time

import pytest

MIB = 1 << 20


def tool(*words):
    """Run a program; what it says is in the failure."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def left_sound(path):
    """Have QEMU check an image of a process that has ended. The kernel frees its locks a moment later, with its rings."""
    until = time.monotonic() + 600
    while True:
        done = subprocess.run(["qemu-img", "check", str(path)], capture_output=True, text=True)
        if "lock" not in done.stderr or time.monotonic() > until:
            break
        time.sleep(0.01)
    assert done.returncode == 0, f"{path}: {done.stdout}{done.stderr}"


def noise(seed, length):
    return random.Random(seed).randbytes(length)


@pytest.fixture
def content():
    """8 MiB of noise and holes."""
    data = bytearray(8 * MIB)
    for part in range(8):
        if part % 3 != 1:
            data[part * MIB : part * MIB + 700_000] = noise(part, 700_000)
    return bytes(data)


@pytest.fixture
def raw(tmp_path, content):
    """The content in a raw file."""
    path = tmp_path / "disk.raw"
    path.write_bytes(content)
    return path


@pytest.fixture
def image(tmp_path, raw):
    """The content in an image by QEMU."""
    path = tmp_path / "disk.qcow2"
    tool("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, path)
    return path


def same(one, format_of_one, other, format_of_other):
    """Have QEMU compare two images, and check those that it can check."""
    tool("qemu-img", "compare", "-f", format_of_one, "-F", format_of_other, one, other)
    for path, format in ((one, format_of_one), (other, format_of_other)):
        if format == "qcow2":
            tool("qemu-img", "check", "-f", format, path)
