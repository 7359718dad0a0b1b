"""Facts and reports."""

from dataclasses import dataclass
from typing import NamedTuple


class Extent(NamedTuple):
    """A run of the disk of one kind, from one image of the chain.

    ``kind`` is data, compressed, encrypted, zero, unallocated or other. ``zero`` says that the run is known to read as zero.
    ``depth`` is 0 for the image itself, 1 for its backing file. ``file`` is 0 for the image file, more for a further one, and
    ``host`` is the offset in it.
    """

    offset: int
    length: int
    kind: str
    zero: bool
    depth: int
    file: int
    host: int | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An internal snapshot. ``date`` is in seconds since 1970."""

    id: str
    name: str
    date: float
    disk_size: int
    vm_state_size: int
    vm_clock_nsec: int


@dataclass(frozen=True, slots=True)
class Bitmap:
    """A persistent dirty bitmap. One that is not consistent can only be removed."""

    name: str
    granularity: int
    recording: bool
    consistent: bool
    recovered: int | None = None


@dataclass(frozen=True, slots=True)
class Info:
    """Facts about an open image that need no data of the disk. Sizes are in bytes."""

    filename: str
    format: str
    variant: str | None
    virtual_size: int
    file_length: int
    actual_size: int
    sector_size: int
    cluster_size: int
    backing_file: str | None
    backing_path: str | None
    backing_format: str | None
    data_file: str | None
    encryption: str | None
    version: int | None
    compression: str | None
    extended_l2: bool
    dirty: bool
    corrupt: bool
    limitations: list[str]


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of a conversion, in bytes of the disk."""

    total: int
    read: int
    written: int
    reflinked: int
    range_copied: int
    skipped: int
    zeroed: int
    unreadable: int
    unreadable_ranges: list[tuple[int, int, str]]
    unreadable_range_count: int
    lost_sector_size: int | None


@dataclass(frozen=True, slots=True)
class BackupReport:
    """The result of a backup, in bytes of the disk."""

    total: int
    resumed_at: int
    read: int
    written: int
    zero: int
    unchanged: int
    compared: int
    unreadable: int
    unreadable_ranges: list[tuple[int, int, str]]
    unreadable_range_count: int
    kept_bitmap: str | None
    file_length: int
    disk_hash: str | None
    decrypted: bool


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The result of a check: numbers, and the first findings in words."""

    check_errors: int
    corruptions: int
    leaks: int
    corruptions_fixed: int
    leaks_fixed: int
    image_end_offset: int
    total_clusters: int
    allocated_clusters: int
    fragmented_clusters: int
    compressed_clusters: int
    findings: list[str]
    findings_left_out: int

    @property
    def clean(self) -> bool:
        """Whether nothing at all is wrong."""
        return self.check_errors == 0 and self.corruptions == 0 and self.leaks == 0


@dataclass(frozen=True, slots=True)
class Concern:
    """A thing to know before an image is handed on."""

    code: str
    unsafe: bool
    text: str
    name: str | None
    traits: list[str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an image may be handed to a tool that believes what it says."""

    filename: str
    format: str
    safe: bool
    concerns: list[Concern]
