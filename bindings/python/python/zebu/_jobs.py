"""Jobs on whole images."""

import asyncio
import os

from zebu import _zebu
from zebu._disk import Disk
from zebu._types import BackupReport, CheckReport, Concern, ConvertReport, Verdict


def _source(source):
    return source._open() if isinstance(source, Disk) else os.fsdecode(source)


def create(name, size=None, format="qcow2", **options):
    """Make an image. Without a size it is as large as its backing file."""
    _zebu.create(os.fsdecode(name), size, format, _named(options))


def convert(source, target, format="qcow2", *, source_format=None, progress=None, **options):
    """Copy a disk into a new image. An image that exists is made anew."""
    return _convert(None, source, target, format, source_format, progress, options)


def check(name, *, progress=None, **options):
    """Check an image, and repair it if asked to."""
    return _check(None, name, progress, options)


def backup(source, target, *, source_format=None, progress=None, **options):
    """Copy a disk into a new compressed image, with hashes if asked for."""
    return _backup(None, source, target, source_format, progress, options)


def restore(backup, target, format="qcow2", *, manifest=None, progress=None, **options):
    """Compare a backup with its manifest, if one is given, and copy it into a new image."""
    return _restore(None, backup, target, format, manifest, progress, options)


def verdict(name, format=None, *, lock=True):
    """Judge whether an image may be handed to a tool that believes what it says. Nothing but the file is opened."""
    facts = _zebu.verdict(os.fsdecode(name), format, lock)
    concerns = [Concern(**concern) for concern in facts.pop("concerns")]
    return Verdict(concerns=concerns, **facts)


async def acreate(name, size=None, format="qcow2", **options):
    """Make an image, as create() does."""
    await asyncio.to_thread(create, name, size, format, **options)


async def aconvert(source, target, format="qcow2", *, source_format=None, progress=None, **options):
    """Copy a disk, as convert() does."""
    return await _awaited(_convert, source, target, format, source_format, _in_loop(progress), options)


async def acheck(name, *, progress=None, **options):
    """Check an image, as check() does."""
    return await _awaited(_check, name, _in_loop(progress), options)


async def abackup(source, target, *, source_format=None, progress=None, **options):
    """Back a disk up, as backup() does."""
    return await _awaited(_backup, source, target, source_format, _in_loop(progress), options)


async def arestore(backup, target, format="qcow2", *, manifest=None, progress=None, **options):
    """Restore a backup, as restore() does."""
    return await _awaited(_restore, backup, target, format, manifest, _in_loop(progress), options)


async def averdict(name, format=None, *, lock=True):
    """Judge an image, as verdict() does."""
    return await asyncio.to_thread(verdict, name, format, lock=lock)


def _named(options):
    """The options with names of files as text."""
    names = ("backing", "data_file", "manifest", "previous", "previous_manifest")
    return {key: os.fsdecode(value) if key in names and value is not None else value for key, value in options.items()}


def _convert(switch, source, target, format, source_format, progress, options):
    target, options = os.fsdecode(target), _named(options)
    return ConvertReport(
        **_zebu.convert(_source(source), target, source_format, format, progress, switch, options)
    )


def _check(switch, name, progress, options):
    return CheckReport(**_zebu.check(os.fsdecode(name), progress, switch, options))


def _backup(switch, source, target, source_format, progress, options):
    target, options = os.fsdecode(target), _named(options)
    return BackupReport(**_zebu.backup(_source(source), target, source_format, progress, switch, options))


def _restore(switch, backup, target, format, manifest, progress, options):
    backup, target, options = os.fsdecode(backup), os.fsdecode(target), _named(options)
    manifest = None if manifest is None else os.fsdecode(manifest)
    return ConvertReport(
        **_zebu.restore(backup, target, manifest, format, progress, switch, options)
    )


def _in_loop(progress):
    """A function that has the running loop's thread call progress(), and raises here what it raises there."""
    if progress is None:
        return None
    loop = asyncio.get_running_loop()

    async def told(*report):
        progress(*report)

    def tell(*report):
        asyncio.run_coroutine_threadsafe(told(*report), loop).result()

    return tell


async def _awaited(job, *arguments):
    """Have a thread do a job. If the task is cancelled, the job is, and its end is waited for."""
    switch = _zebu.CancelSwitch()
    running = asyncio.ensure_future(asyncio.to_thread(job, switch, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        switch.cancel()
        # Until it has ended, its files are in use.
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue
        if not running.cancelled():
            running.exception()
        raise
