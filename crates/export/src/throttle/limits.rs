//! Limits, as users set them.

use std::num::NonZeroU64;

/// Most requests and bytes per second. `None` is no limit.
///
/// A request must keep to all that apply to it. Reads count for `iops`, `iops_read`, `bps` and `bps_read`; writes, discards and
/// zeroing for `iops`, `iops_write`, `bps` and `bps_write`. Discards and zeroing count as requests and as no bytes. Flushes are not
/// limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Limits {
    /// Requests per second.
    pub iops: Option<NonZeroU64>,
    /// Reads per second.
    pub iops_read: Option<NonZeroU64>,
    /// Changes per second.
    pub iops_write: Option<NonZeroU64>,
    /// Bytes per second.
    pub bps: Option<NonZeroU64>,
    /// Bytes read per second.
    pub bps_read: Option<NonZeroU64>,
    /// Bytes written per second.
    pub bps_write: Option<NonZeroU64>,
    /// Requests that go at once after a pause, for each limit of requests. `None`: those of a tenth of a second, at least one.
    pub burst: Option<NonZeroU64>,
    /// Bytes that go at once after a pause, for each limit of bytes. `None`: those of a tenth of a second, at least one.
    pub bps_burst: Option<NonZeroU64>,
}

zebu_storage::option_setters!(Limits {
    iops: impl Into<Option<NonZeroU64>>,
    iops_read: impl Into<Option<NonZeroU64>>,
    iops_write: impl Into<Option<NonZeroU64>>,
    bps: impl Into<Option<NonZeroU64>>,
    bps_read: impl Into<Option<NonZeroU64>>,
    bps_write: impl Into<Option<NonZeroU64>>,
    burst: impl Into<Option<NonZeroU64>>,
    bps_burst: impl Into<Option<NonZeroU64>>,
});

impl Limits {
    /// Whether requests per second are limited.
    pub fn has_iops(&self) -> bool {
        self.iops.or(self.iops_read).or(self.iops_write).is_some()
    }

    /// Whether bytes per second are limited.
    pub fn has_bps(&self) -> bool {
        self.bps.or(self.bps_read).or(self.bps_write).is_some()
    }

    /// All of them with their names, those of QEMU's throttling but for `-total`.
    pub fn named(&self) -> [(&'static str, Option<NonZeroU64>); 8] {
        [
            ("iops", self.iops),
            ("iops-read", self.iops_read),
            ("iops-write", self.iops_write),
            ("bps", self.bps),
            ("bps-read", self.bps_read),
            ("bps-write", self.bps_write),
            ("burst", self.burst),
            ("bps-burst", self.bps_burst),
        ]
    }

    /// The limit of a name; `None` if there is none of that name.
    pub fn by_name_mut(&mut self, name: &str) -> Option<&mut Option<NonZeroU64>> {
        Some(match name {
            "iops" | "iops-total" => &mut self.iops,
            "iops-read" => &mut self.iops_read,
            "iops-write" => &mut self.iops_write,
            "bps" | "bps-total" => &mut self.bps,
            "bps-read" => &mut self.bps_read,
            "bps-write" => &mut self.bps_write,
            "burst" => &mut self.burst,
            "bps-burst" => &mut self.bps_burst,
            _ => return None,
        })
    }

    /// Whether nothing is limited.
    pub fn is_empty(&self) -> bool {
        !self.has_iops() && !self.has_bps()
    }
}

/// The side of a request: limits of reading and writing are apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Read,
    Write,
}

impl Direction {
    pub(crate) const BOTH: [Self; 2] = [Self::Read, Self::Write];
}
