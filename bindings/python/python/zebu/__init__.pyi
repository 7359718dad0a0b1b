import io
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from types import TracebackType
from typing import Literal, Self, TypeAlias, TypedDict, Unpack

from _typeshed import ReadableBuffer, WriteableBuffer

from zebu._types import BackupReport as BackupReport
from zebu._types import Bitmap as Bitmap
from zebu._types import CheckReport as CheckReport
from zebu._types import Concern as Concern
from zebu._types import ConvertReport as ConvertReport
from zebu._types import Extent as Extent
from zebu._types import Info as Info
from zebu._types import Snapshot as Snapshot
from zebu._types import Verdict as Verdict

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

__version__: str

_Name: TypeAlias = str | bytes | PathLike[str] | PathLike[bytes]
_Mode: TypeAlias = Literal["r", "rb", "r+", "rb+", "r+b"]
_Format: TypeAlias = Literal[
    "qcow2", "raw", "luks", "vmdk", "vhdx", "vpc", "vdi", "qed", "parallels", "qcow", "cloop", "dmg"
]
_Cache: TypeAlias = Literal["none", "writeback", "writethrough", "directsync", "unsafe"]
_Compression: TypeAlias = Literal["zlib", "zstd"]
_References: TypeAlias = Literal["none", "local", "all"] | Iterable[str | PathLike[str]]
_Progress: TypeAlias = Callable[[str, int, int], object]

class _OpenOptions(TypedDict, total=False):
    cache: _Cache | None
    refs: _References | None
    lock: bool | None
    snapshot: str | None
    cache_size: int | None
    data_file: str | PathLike[str] | None
    backing: str | PathLike[str] | None
    backing_format: _Format | None
    passphrase: str | ReadableBuffer | None

class _CreateOptions(TypedDict, total=False):
    cluster_size: int | None
    extended_l2: bool | None
    refcount_bits: int | None
    compression: _Compression | None
    preallocation: Literal["off", "metadata", "falloc", "full"] | None
    cache: _Cache | None
    backing: _Name | None
    backing_format: _Format | None

class _CopyOptions(_CreateOptions, total=False):
    workers: int | None
    requests: int | None
    buffer_memory: int | None
    sparse_size: int | None
    bitmaps: Literal["none", "all", "sound"] | None
    compress: bool | None
    salvage: bool | None
    seed: int | None
    rate_limit: int | None

class _CheckOptions(TypedDict, total=False):
    repair: Literal["none", "leaks", "all"] | None
    cache: _Cache | None
    memory: int | None
    max_findings: int | None
    lock: bool | None
    rate_limit: int | None

class _BackupOptions(TypedDict, total=False):
    cache: _Cache | None
    cluster_size: int | None
    compression: _Compression | None
    buffer_memory: int | None
    manifest: _Name | None
    bitmap: str | None
    previous: _Name | None
    previous_manifest: _Name | None
    refs: _References | None
    resume: bool | None
    allow_decryption: bool | None
    skip_errors: bool | None
    rate_limit: int | None

class Error(OSError):
    kind: str
    offset: int | None
    file_offset: int | None
    retryable: bool
    def __init__(
        self,
        errno: int,
        message: str,
        filename: str | None = None,
        *,
        kind: str = "io",
        offset: int | None = None,
        file_offset: int | None = None,
        retryable: bool = False,
    ) -> None: ...

class Disk(io.RawIOBase):
    mode: str
    name: str
    def __init__(self, native: object, name: str, writable: bool) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None: ...
    @property
    def size(self) -> int: ...
    @property
    def format(self) -> str: ...
    def readinto(self, buffer: WriteableBuffer) -> int: ...
    def read(self, size: int | None = -1) -> bytes: ...
    def readall(self) -> bytes: ...
    def write(self, buffer: ReadableBuffer) -> int: ...
    def pread(self, buffer: WriteableBuffer, offset: int) -> int: ...
    def pwrite(self, buffer: ReadableBuffer, offset: int) -> int: ...
    def read_at(self, offset: int, length: int) -> bytes: ...
    def discard(self, offset: int, length: int) -> None: ...
    def write_zeroes(self, offset: int, length: int, *, keep: bool = False) -> None: ...
    def resize(self, size: int, *, shrink: bool = False) -> None: ...
    def extents(self, offset: int = 0, length: int | None = None) -> Iterator[Extent]: ...
    def info(self) -> Info: ...
    @property
    def snapshots(self) -> list[Snapshot]: ...
    def create_snapshot(self, name: str) -> Snapshot: ...
    def apply_snapshot(self, which: str) -> None: ...
    def delete_snapshot(self, which: str) -> None: ...
    @property
    def bitmaps(self) -> list[Bitmap]: ...
    def dirty(self, name: str) -> list[tuple[int, int]]: ...
    def add_bitmap(self, name: str, *, granularity: int | None = None, recording: bool = True) -> None: ...
    def remove_bitmap(self, name: str) -> None: ...
    def clear_bitmap(self, name: str) -> None: ...
    async def aread(self, offset: int, length: int) -> bytes: ...
    async def apread(self, buffer: WriteableBuffer, offset: int) -> int: ...
    async def apwrite(self, buffer: ReadableBuffer, offset: int) -> int: ...
    async def aflush(self) -> None: ...
    async def adiscard(self, offset: int, length: int) -> None: ...
    async def awrite_zeroes(self, offset: int, length: int, *, keep: bool = False) -> None: ...
    async def aclose(self) -> None: ...

def open(
    name: _Name, mode: _Mode = "r", format: _Format | None = None, **options: Unpack[_OpenOptions]
) -> Disk: ...
def create(
    name: _Name, size: int | None = None, format: _Format = "qcow2", **options: Unpack[_CreateOptions]
) -> None: ...
def convert(
    source: _Name | Disk,
    target: _Name,
    format: _Format = "qcow2",
    *,
    source_format: _Format | None = None,
    progress: _Progress | None = None,
    **options: Unpack[_CopyOptions],
) -> ConvertReport: ...
def check(name: _Name, *, progress: _Progress | None = None, **options: Unpack[_CheckOptions]) -> CheckReport: ...
def backup(
    source: _Name | Disk,
    target: _Name,
    *,
    source_format: _Format | None = None,
    progress: _Progress | None = None,
    **options: Unpack[_BackupOptions],
) -> BackupReport: ...
def restore(
    backup: _Name,
    target: _Name,
    format: _Format = "qcow2",
    *,
    manifest: _Name | None = None,
    progress: _Progress | None = None,
    **options: Unpack[_CopyOptions],
) -> ConvertReport: ...
def verdict(name: _Name, format: _Format | None = None, *, lock: bool = True) -> Verdict: ...
async def aopen(
    name: _Name, mode: _Mode = "r", format: _Format | None = None, **options: Unpack[_OpenOptions]
) -> Disk: ...
async def acreate(
    name: _Name, size: int | None = None, format: _Format = "qcow2", **options: Unpack[_CreateOptions]
) -> None: ...
async def aconvert(
    source: _Name | Disk,
    target: _Name,
    format: _Format = "qcow2",
    *,
    source_format: _Format | None = None,
    progress: _Progress | None = None,
    **options: Unpack[_CopyOptions],
) -> ConvertReport: ...
async def acheck(
    name: _Name, *, progress: _Progress | None = None, **options: Unpack[_CheckOptions]
) -> CheckReport: ...
async def abackup(
    source: _Name | Disk,
    target: _Name,
    *,
    source_format: _Format | None = None,
    progress: _Progress | None = None,
    **options: Unpack[_BackupOptions],
) -> BackupReport: ...
async def arestore(
    backup: _Name,
    target: _Name,
    format: _Format = "qcow2",
    *,
    manifest: _Name | None = None,
    progress: _Progress | None = None,
    **options: Unpack[_CopyOptions],
) -> ConvertReport: ...
async def averdict(name: _Name, format: _Format | None = None, *, lock: bool = True) -> Verdict: ...
