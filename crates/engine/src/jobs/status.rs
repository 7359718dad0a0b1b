//! An extent in the terms of `qemu-img map` and `compare -s`.

use crate::{Extent, ExtentKind, Format, Image};

/// What is said of a range. The fields have the meaning of the JSON keys of `qemu-img map`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Status {
    pub(super) present: bool,
    pub(super) zero: bool,
    pub(super) data: bool,
    pub(super) compressed: bool,
    pub(super) offset: Option<u64>,
}

impl Status {
    /// The status of an extent that lies in an image of `format`. A hole in a raw file is no data; a hole under an
    /// allocated qcow2 cluster is data that happens to be zero.
    pub(super) fn of(extent: &Extent, format: Format) -> Self {
        let (present, data, compressed, offset) = match extent.kind {
            ExtentKind::Data { host } => (true, !extent.hole || format == Format::Qcow2, false, Some(host)),
            ExtentKind::Compressed => (true, true, true, None),
            ExtentKind::Zero { host } => (true, false, false, host),
            ExtentKind::Unallocated => (false, false, false, None),
        };
        Self { present, zero: extent.is_zero(), data, compressed, offset }
    }

    /// Whether two ranges are allocated alike, wherever in their files they lie. Which part of an allocated qcow2
    /// cluster the file system keeps as a hole is not the image's affair, so zero does not count where there is data.
    pub(super) fn is_allocated_like(&self, other: &Self) -> bool {
        let kind = |s: &Self| (s.present, s.data, s.zero && !s.data, s.compressed, s.offset.is_some());
        kind(self) == kind(other)
    }

    /// Whether `next`, which follows `len` bytes of `self`, continues it.
    pub(super) fn continues_with(&self, len: u64, next: &Self) -> bool {
        let offset = self.offset.map(|offset| offset.saturating_add(len));
        *next == Self { offset, ..*self }
    }
}

/// The formats of the images of a chain, by depth.
pub(super) fn chain_formats(image: &Image) -> Vec<Format> {
    std::iter::successors(Some(image.clone()), Image::backing).map(|image| image.format()).collect()
}

/// The format of the image at `depth` of a chain of such formats.
pub(super) fn format_at(formats: &[Format], depth: u32) -> Format {
    formats.get(depth as usize).copied().unwrap_or(Format::Raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(kind: ExtentKind, hole: bool) -> Extent {
        Extent { offset: 0, len: 4096, depth: 0, kind, hole }
    }

    /// Rows seen in the output of `qemu-img map --output json` of QEMU 10.0.
    #[test]
    fn statuses_are_those_of_qemu_img_map() {
        let all =
            |present, zero, data, compressed, offset| Status { present, zero, data, compressed, offset };
        let data = ExtentKind::Data { host: 327680 };
        let cases = [
            (Format::Raw, data, false, all(true, false, true, false, Some(327680))),
            (Format::Raw, data, true, all(true, true, false, false, Some(327680))),
            (Format::Qcow2, data, false, all(true, false, true, false, Some(327680))),
            (Format::Qcow2, data, true, all(true, true, true, false, Some(327680))),
            (Format::Qcow2, ExtentKind::Compressed, false, all(true, false, true, true, None)),
            (Format::Qcow2, ExtentKind::Zero { host: None }, false, all(true, true, false, false, None)),
            (
                Format::Qcow2,
                ExtentKind::Zero { host: Some(327680) },
                false,
                all(true, true, false, false, Some(327680)),
            ),
            (Format::Qcow2, ExtentKind::Unallocated, false, all(false, true, false, false, None)),
        ];
        for (format, kind, hole, expected) in cases {
            assert_eq!(Status::of(&extent(kind, hole), format), expected, "{format:?} {kind:?} {hole}");
        }
    }

    #[test]
    fn ranges_merge_only_where_the_file_offsets_do() {
        let at = |host| Status::of(&extent(ExtentKind::Data { host }, false), Format::Qcow2);
        assert!(at(65536).continues_with(4096, &at(69632)));
        assert!(!at(65536).continues_with(4096, &at(65536)));
        let zero = Status::of(&extent(ExtentKind::Zero { host: None }, false), Format::Qcow2);
        assert!(zero.continues_with(4096, &zero));
        assert!(!zero.continues_with(4096, &at(0)));
    }
}
