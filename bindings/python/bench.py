"""Reads of a disk beside those of the raw file, in turn: python bench.py [FOLDER]

The package is to be a release (cargo xtask wheel). Each side reads the same places of a file that is in the page cache.
"""

import os
import random
import statistics
import sys
import tempfile
import time

import zebu

MIB = 1 << 20
DISK = 256 * MIB
ROUNDS = 7


def measure(read, places):
    begin = time.perf_counter()
    for place in places:
        read(place)
    return len(places) / (time.perf_counter() - begin)


def main():
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        raw, image = os.path.join(folder, "disk.raw"), os.path.join(folder, "disk.qcow2")
        with open(raw, "wb") as file:
            for _ in range(DISK // MIB):
                file.write(random.randbytes(MIB))
        zebu.convert(raw, image, source_format="raw")
        descriptor = os.open(raw, os.O_RDONLY)
        print(f"{'bytes':>8} {'os.pread/s':>12} {'os.preadv/s':>12} {'raw/s':>12} {'qcow2/s':>12}")
        with zebu.open(raw, format="raw") as of_raw, zebu.open(image) as of_image:
            for size in (4096, 65536, MIB):
                into = bytearray(size)
                places = [random.randrange(DISK // size) * size for _ in range(200 * MIB // size // 4 + 200)]
                sides = [
                    lambda place: os.pread(descriptor, size, place),
                    lambda place: os.preadv(descriptor, [into], place),
                    lambda place: of_raw.pread(into, place),
                    lambda place: of_image.pread(into, place),
                ]
                rates = [[measure(side, places) for side in sides] for _ in range(ROUNDS)]
                medians = [statistics.median(side) for side in zip(*rates, strict=True)]
                print(f"{size:>8} " + " ".join(f"{median:>12.0f}" for median in medians))
        os.close(descriptor)


main()
