//! The quantities that are measured.

use serde::{Deserialize, Serialize};

/// A quantity, with its unit in its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Metric {
    #[serde(rename = "time (s)")]
    WallSeconds,
    #[serde(rename = "CPU (s)")]
    CpuSeconds,
    #[serde(rename = "time (ms)")]
    WallMillis,
    #[serde(rename = "CPU (ms)")]
    CpuMillis,
    #[serde(rename = "memory (MiB)")]
    MaxRssMib,
    #[serde(rename = "MiB/s")]
    MibPerSecond,
    #[serde(rename = "IOPS")]
    RequestsPerSecond,
    #[serde(rename = "CPU per request (µs)")]
    CpuMicrosPerRequest,
    /// Switches to another thread because one has to wait, for the disk or for another.
    #[serde(rename = "waits per request")]
    WaitsPerRequest,
    #[serde(rename = "p50 (µs)")]
    LatencyP50Micros,
    #[serde(rename = "p99 (µs)")]
    LatencyP99Micros,
    #[serde(rename = "device reads")]
    DeviceReads,
    #[serde(rename = "device writes")]
    DeviceWrites,
    /// System calls on the target, seen by strace; so are the next five.
    #[serde(rename = "reads of the target")]
    TargetReads,
    #[serde(rename = "writes to the target")]
    TargetWrites,
    /// Writes that do not begin and end where 4 KiB blocks do.
    #[serde(rename = "unaligned writes")]
    UnalignedWrites,
    /// Writes that do not begin where the one before ended: for each, a disk that rotates has to seek.
    #[serde(rename = "writes out of order")]
    OutOfOrderWrites,
    /// fdatasync and fsync.
    #[serde(rename = "syncs of the target")]
    TargetSyncs,
    /// fallocate and ftruncate.
    #[serde(rename = "other calls on the target")]
    TargetOthers,
    /// Lookups of a slice of the mapping that was not there.
    #[serde(rename = "misses of the mapping cache")]
    MappingMisses,
    #[serde(rename = "source left in the page cache (MiB)")]
    SourceCachedMib,
    #[serde(rename = "target left in the page cache (MiB)")]
    TargetCachedMib,
    /// Extents of a file on its file system, for each GiB of the disk.
    #[serde(rename = "extents per GiB")]
    ExtentsPerGib,
    #[serde(rename = "image (MiB)")]
    ImageMib,
    /// Milliseconds more than the program needs to start and end.
    #[serde(rename = "over a bare start (ms)")]
    OverBareMillis,
}

/// The question that a metric answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Throughput,
    Latency,
    ProcessorTime,
    Memory,
    /// Calls, requests, sizes: a count says how a speed comes about.
    Count,
}

impl Metric {
    /// Its name in tables and files.
    pub(crate) fn name(self) -> String {
        serde_json::to_value(self).ok().and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
    }

    pub(crate) fn kind(self) -> Kind {
        match self {
            Self::WallSeconds | Self::WallMillis | Self::MibPerSecond | Self::RequestsPerSecond => {
                Kind::Throughput
            }
            Self::LatencyP50Micros | Self::LatencyP99Micros => Kind::Latency,
            Self::CpuSeconds | Self::CpuMillis | Self::CpuMicrosPerRequest => Kind::ProcessorTime,
            Self::MaxRssMib => Kind::Memory,
            _ => Kind::Count,
        }
    }

    /// Rates are better when larger; times, counts and memory when smaller.
    pub(crate) fn is_rate(self) -> bool {
        matches!(self, Self::MibPerSecond | Self::RequestsPerSecond)
    }
}

/// The figures of one run, always in the same order.
pub(crate) type Sample = Vec<(Metric, f64)>;
