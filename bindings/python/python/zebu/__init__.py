"""Disk images of virtual machines as files."""

import atexit as _atexit
import os as _os

from zebu import _zebu
from zebu._disk import Disk, aopen, open
from zebu._error import Error
from zebu._jobs import (
    abackup,
    acheck,
    aconvert,
    acreate,
    arestore,
    averdict,
    backup,
    check,
    convert,
    create,
    restore,
    verdict,
)
from zebu._types import (
    BackupReport,
    Bitmap,
    CheckReport,
    Concern,
    ConvertReport,
    Extent,
    Info,
    Snapshot,
    Verdict,
)

__version__ = _zebu.__version__

__all__ = [
    "BackupReport",
    "Bitmap",
    "CheckReport",
    "Concern",
    "ConvertReport",
    "Disk",
    "Error",
    "Extent",
    "Info",
    "Snapshot",
    "Verdict",
    "abackup",
    "acheck",
    "aconvert",
    "acreate",
    "aopen",
    "arestore",
    "averdict",
    "backup",
    "check",
    "convert",
    "create",
    "open",
    "restore",
    "verdict",
]

# A thread that comes back from a request after the end of the interpreter has begun could not go on.
_atexit.register(_zebu.end)
_os.register_at_fork(after_in_child=_zebu.forked)
