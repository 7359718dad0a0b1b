//! How a recycled cluster gets zeroes around a small write.

use crate::options::ZeroPolicy;
use zebu_storage::{File, FsKind};

/// How the bytes around a write become zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Padding {
    /// There is nothing to zero.
    None,
    /// Zeroes are part of the write.
    Write,
    /// The range is zeroed by the file system first.
    ZeroRange,
}

/// Bytes of padding up to which one padded write is cheaper than zero-range and a small write: the largest cluster for
/// which writing was faster in `cargo xtask bench recycled` (docs/design/space-and-commit.md), or what lies between it and the next.
/// A busy host misleads measuring them at run time.
fn threshold(fs: FsKind) -> u64 {
    match fs {
        FsKind::Xfs => 128 << 10,
        FsKind::Ext4 => 64 << 10,
        // Writing in place is as dear there: it is done elsewhere.
        FsKind::Btrfs => 8 << 10,
        _ => 32 << 10,
    }
}

/// Chooses for `bytes` of padding in `file`.
pub(crate) fn padding(policy: ZeroPolicy, file: &File, bytes: u64) -> Padding {
    if bytes == 0 {
        return Padding::None;
    }
    let prefers_zero_range = match policy {
        ZeroPolicy::Write => false,
        ZeroPolicy::Fallocate => true,
        ZeroPolicy::Auto => bytes > threshold(file.fs()),
    };
    if prefers_zero_range && file.can_zero_range() { Padding::ZeroRange } else { Padding::Write }
}
