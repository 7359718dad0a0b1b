"""Jobs on whole images: what they make, how they are watched and stopped."""

import asyncio
import errno
import os
import signal
import threading

import pytest
import zebu
from conftest import MIB, noise, same, tool


@pytest.mark.parametrize("format", ["qcow2", "raw", "vmdk", "vhdx", "vpc", "vdi"])
def test_a_copy_is_what_qemu_reads(tmp_path, raw, image, content, format):
    target = tmp_path / f"copy.{format}"
    reports = []
    report = zebu.convert(image, target, format, progress=lambda *told: reports.append(told))
    assert isinstance(report, zebu.ConvertReport)
    assert report.total == len(content)
    same(raw, "raw", target, format)
    phases = [phase for phase, _, _ in reports]
    assert phases[0] == "copying" and phases[-1] == "finishing"
    copying = [done for phase, done, _ in reports if phase == "copying"]
    assert copying == sorted(copying) and copying[-1] == len(content)
    assert {total for _, _, total in reports} == {len(content)}


def test_a_copy_is_made_as_asked(tmp_path, raw, image):
    target = tmp_path / "copy.qcow2"
    zebu.convert(image, target, compress=True, compression="zstd", cluster_size=131072, workers=2, requests=4)
    same(raw, "raw", target, "qcow2")
    with zebu.open(target) as disk:
        assert (disk.info().compression, disk.info().cluster_size) == ("zstd", 131072)
        assert "compressed" in {extent.kind for extent in disk.extents()}


def test_an_open_disk_is_copied_as_it_is_open(tmp_path, raw, image):
    with zebu.open(image, "r+") as disk:
        disk.create_snapshot("before")
        disk.pwrite(b"after", 0)
    with zebu.open(image, snapshot="before") as disk:
        zebu.convert(disk, tmp_path / "before.qcow2")
        assert not disk.closed and disk.read(1)
    same(raw, "raw", tmp_path / "before.qcow2", "qcow2")


def test_a_function_that_raises_cancels(tmp_path, image):
    target = tmp_path / "copy.qcow2"

    class Enough(BaseException):
        pass

    calls = []

    def progress(phase, done, total):
        calls.append(phase)
        raise Enough(phase)

    with pytest.raises(Enough) as raised:
        zebu.convert(image, target, progress=progress)
    assert raised.value.args == ("copying",)
    assert calls == ["copying"]
    # Nothing of it is left, and nobody has the source.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk.qcow2", "disk.raw"]
    zebu.open(image, "r+").close()


def test_something_that_can_not_be_called_is_an_error(tmp_path, image):
    with pytest.raises(TypeError):
        zebu.convert(image, tmp_path / "copy.qcow2", progress=7)
    assert not (tmp_path / "copy.qcow2").exists()


def test_an_interrupt_stops_a_job(tmp_path, image):
    """SIGINT comes while the thread waits without the GIL: at so slow a rate the job would take days."""
    target = tmp_path / "copy.qcow2"
    told = threading.Event()

    def interrupts():
        told.wait()
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupts)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        zebu.convert(image, target, compress=True, rate_limit=1, progress=lambda *_: told.set())
    sender.join()
    assert not target.exists()


def test_an_interrupt_without_a_function_stops_a_job(tmp_path, image):
    target = tmp_path / "copy.qcow2"

    def interrupts():
        # Image, raw file, and what is being made.
        while len(list(tmp_path.iterdir())) < 3:
            pass
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=interrupts)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        zebu.convert(image, target, compress=True, rate_limit=1)
    sender.join()
    assert not target.exists()


def test_a_function_may_use_the_disk(tmp_path, image, content):
    with zebu.open(image) as disk:
        seen = []
        zebu.convert(disk, tmp_path / "copy.qcow2", progress=lambda *_: seen.append(disk.read_at(0, 4)))
    assert set(seen) == {content[:4]}


def test_a_failed_job_says_why(tmp_path, image):
    with pytest.raises(zebu.Error) as failed:
        zebu.convert(tmp_path / "none", tmp_path / "copy.qcow2")
    assert failed.value.errno == errno.ENOENT
    with pytest.raises(zebu.Error) as failed:
        zebu.convert(image, image)
    assert failed.value.kind == "invalid-argument"
    with pytest.raises(zebu.Error):
        zebu.convert(image, tmp_path / "no-directory" / "copy.qcow2")


def leaky(image):
    """Count a cluster that nothing uses: one more, at the end of the file."""
    with open(image, "r+b") as file:
        header = file.read(72)
        table = int.from_bytes(header[48:56], "big")
        file.seek(table)
        block = int.from_bytes(file.read(8), "big")
        end = file.seek(0, os.SEEK_END)
        cluster = (end + 65535) // 65536
        file.truncate((cluster + 1) * 65536)
        file.seek(block + 2 * cluster)
        file.write((1).to_bytes(2, "big"))


def test_a_check_finds_and_repairs(image):
    leaky(image)
    report = zebu.check(image)
    assert (report.clean, report.leaks, report.corruptions) == (False, 1, 0)
    assert len(report.findings) == 1
    reports = []
    report = zebu.check(image, repair="leaks", progress=lambda *told: reports.append(told))
    assert (report.clean, report.leaks_fixed) == (True, 1)
    assert reports[0][0] == "counting-references"
    assert zebu.check(image).clean
    tool("qemu-img", "check", image)


def test_backups_are_restored(tmp_path, image, content):
    """A full backup and an increment by a bitmap, each restored and compared."""
    full, increment = tmp_path / "monday.qcow2", tmp_path / "tuesday.qcow2"
    report = zebu.backup(image, full, bitmap="backup", manifest=tmp_path / "monday.manifest")
    assert report.total == len(content) and report.disk_hash
    changed = bytearray(content)
    with zebu.open(image, "r+") as disk:
        disk.pwrite(noise(99, 100_000), 2 * MIB)
        changed[2 * MIB : 2 * MIB + 100_000] = noise(99, 100_000)
    report = zebu.backup(image, increment, bitmap="backup", previous=full)
    assert report.written < MIB
    zebu.restore(full, tmp_path / "a.raw", "raw", manifest=tmp_path / "monday.manifest")
    assert (tmp_path / "a.raw").read_bytes() == content
    zebu.restore(increment, tmp_path / "b.qcow2")
    with zebu.open(tmp_path / "b.qcow2") as disk:
        assert disk.read() == changed
    tool("qemu-img", "compare", image, tmp_path / "b.qcow2")


def test_a_backup_that_was_changed_is_not_restored(tmp_path, image):
    full, manifest = tmp_path / "full.qcow2", tmp_path / "full.manifest"
    zebu.backup(image, full, manifest=manifest)
    with zebu.open(full, "r+") as disk:
        disk.pwrite(b"not what it was", 3 * MIB)
    with pytest.raises(zebu.Error) as failed:
        zebu.restore(full, tmp_path / "restored.qcow2", manifest=manifest)
    assert (failed.value.kind, failed.value.offset) == ("corrupt", 3 * MIB)
    assert not (tmp_path / "restored.qcow2").exists()
    with pytest.raises(zebu.Error) as failed:
        zebu.backup(image, full)
    assert failed.value.kind == "invalid-argument" and "exists already" in str(failed.value)


def test_a_verdict_tells_what_an_image_names(tmp_path, image):
    verdict = zebu.verdict(image, "qcow2")
    assert (verdict.safe, verdict.format, verdict.concerns) == (True, "qcow2", [])
    evil = tmp_path / "evil.qcow2"
    tool("qemu-img", "create", "-f", "qcow2", "-u", "-b", "/etc/passwd", "-F", "raw", evil, "1M")
    verdict = zebu.verdict(evil, "qcow2")
    assert not verdict.safe
    concern = verdict.concerns[0]
    assert (concern.code, concern.unsafe, concern.name) == ("backing-file", True, "/etc/passwd")
    assert "absolute" in concern.traits


def test_tasks_read_and_write(image, content):
    async def main():
        disk = await zebu.aopen(image, "r+")
        parts = await asyncio.gather(*(disk.aread(part * MIB, MIB) for part in range(8)))
        assert b"".join(parts) == content
        into = bytearray(4096)
        assert await disk.apread(into, 4096) == 4096
        assert into == content[4096:8192]
        assert await disk.apwrite(into, 0) == 4096
        await disk.awrite_zeroes(4096, 4096)
        await disk.adiscard(MIB, MIB)
        await disk.aflush()
        assert await disk.aread(0, 8192) == bytes(into) + bytes(4096)
        await disk.aclose()
        with pytest.raises(ValueError):
            await disk.aread(0, 1)

    asyncio.run(main())
    tool("qemu-img", "check", image)


def test_tasks_run_jobs(tmp_path, raw, image):
    reports = []

    async def main():
        loop_thread = threading.get_ident()

        def progress(*told):
            assert threading.get_ident() == loop_thread
            reports.append(told)

        await zebu.aconvert(image, tmp_path / "copy.qcow2", progress=progress)
        assert (await zebu.acheck(tmp_path / "copy.qcow2")).clean
        assert (await zebu.averdict(image, "qcow2")).safe
        await zebu.abackup(image, tmp_path / "backup.qcow2")
        await zebu.arestore(tmp_path / "backup.qcow2", tmp_path / "restored.qcow2")
        await zebu.acreate(tmp_path / "new.qcow2", MIB)

    asyncio.run(main())
    assert reports[-1][0] == "finishing"
    same(raw, "raw", tmp_path / "copy.qcow2", "qcow2")
    same(raw, "raw", tmp_path / "restored.qcow2", "qcow2")


def test_a_cancelled_task_cancels_its_job(tmp_path, image):
    target = tmp_path / "copy.qcow2"

    async def main():
        begun = asyncio.Event()
        copy = zebu.aconvert(image, target, compress=True, rate_limit=1, progress=lambda *_: begun.set())
        task = asyncio.create_task(copy)
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The job has ended by then.
        assert not target.exists()
        zebu.open(image, "r+").close()

    asyncio.run(main())


def test_a_function_that_raises_in_a_loop_cancels(tmp_path, image):
    async def main():
        def progress(*_):
            raise KeyError("enough")

        with pytest.raises(KeyError, match="enough"):
            await zebu.aconvert(image, tmp_path / "copy.qcow2", progress=progress)

    asyncio.run(main())
    assert not (tmp_path / "copy.qcow2").exists()
