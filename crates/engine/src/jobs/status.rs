//! An extent in the terms of `qemu-img map` and `compare -s`.

use crate::{Extent, ExtentKind, Format, Image, Result};

/// The facts of a range. The fields have the meaning of the JSON keys of `qemu-img map`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Status {
    pub(super) present: bool,
    pub(super) zero: bool,
    pub(super) data: bool,
    pub(super) compressed: bool,
    pub(super) offset: Option<u64>,
}

/// An image of a chain, as far as it matters for how its extents are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layer {
    format: Format,
    /// Bytes of the virtual disk.
    size: u64,
    /// Whether a hole in the file is told as zero. In a qcow2 file only if it seems to be preallocated, so that large
    /// parts of its allocated clusters are holes; elsewhere the odd hole inside of a cluster would only cut the
    /// output to pieces. (QEMU draws the same line.)
    tells_holes: bool,
}

impl Layer {
    fn of(image: &Image) -> Result<Self> {
        let info = image.info()?;
        let tells_holes = match info.qcow2 {
            None => true,
            Some(qcow2) => {
                let occupied = info.actual_size / qcow2.cluster_size;
                let threshold = (occupied * 10 / 9).max(occupied + 2);
                info.file_length / qcow2.cluster_size >= threshold
            }
        };
        Ok(Self { format: image.format(), size: image.virtual_size(), tells_holes })
    }

    /// The images of a chain, by depth.
    pub(super) fn chain(image: &Image) -> Result<Vec<Self>> {
        let mut layers = vec![Self::of(image)?];
        let mut next = image.backing();
        while let Some(image) = next {
            layers.push(Self::of(&image)?);
            next = image.backing();
        }
        Ok(layers)
    }
}

/// The depth that is told for an extent. What no image holds is decided by the lowest image that is asked for it: the
/// one whose backing file ends before it, or the last one.
pub(super) fn depth_of(extent: &Extent, chain: &[Layer]) -> u32 {
    if extent.kind != ExtentKind::Unallocated {
        return extent.depth;
    }
    let below = chain.iter().skip(1).position(|layer| extent.offset >= layer.size);
    below.map_or(chain.len().saturating_sub(1), |depth| depth) as u32
}

impl Status {
    /// The status of an extent of a chain. A hole in a raw file is no data; a hole under an allocated qcow2 cluster is
    /// data that happens to be zero.
    pub(super) fn of(extent: &Extent, chain: &[Layer]) -> Self {
        let unknown = Layer { format: Format::Raw, size: 0, tells_holes: true };
        let Layer { format, tells_holes, .. } = chain.get(extent.depth as usize).copied().unwrap_or(unknown);
        let (present, data, compressed, offset) = match extent.kind {
            ExtentKind::Data { host } => (true, !extent.hole || format == Format::Qcow2, false, Some(host)),
            ExtentKind::Elsewhere { host, .. } => (true, !extent.hole, false, Some(host)),
            ExtentKind::Compressed => (true, true, true, None),
            ExtentKind::Encrypted => (true, true, false, None),
            ExtentKind::Zero { host } => (true, false, false, host),
            ExtentKind::Unallocated => (false, false, false, None),
        };
        let hole = extent.hole && tells_holes;
        let zero = hole || Extent { hole: false, ..*extent }.is_zero();
        Self { present, zero, data, compressed, offset }
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
            let chain = [Layer { format, size: 1 << 20, tells_holes: true }];
            assert_eq!(Status::of(&extent(kind, hole), &chain), expected, "{format:?} {kind:?} {hole}");
        }
    }

    #[test]
    fn ranges_merge_only_where_the_file_offsets_do() {
        let chain = [Layer { format: Format::Qcow2, size: 1 << 20, tells_holes: false }];
        let at = |host, hole| Status::of(&extent(ExtentKind::Data { host }, hole), &chain);
        assert!(at(65536, false).continues_with(4096, &at(69632, true)));
        assert!(!at(65536, false).continues_with(4096, &at(65536, false)));
        let zero = Status::of(&extent(ExtentKind::Zero { host: None }, false), &chain);
        assert!(zero.continues_with(4096, &zero));
        assert!(!zero.continues_with(4096, &at(0, false)));
    }

    #[test]
    fn what_nobody_holds_is_told_of_the_image_that_was_asked_last() {
        let layer = |size| Layer { format: Format::Qcow2, size, tells_holes: false };
        let chain = [layer(400), layer(300), layer(100), layer(200)];
        let depth = |offset, kind, depth| depth_of(&Extent { offset, depth, ..extent(kind, false) }, &chain);
        assert_eq!(depth(350, ExtentKind::Unallocated, 3), 0);
        assert_eq!(depth(250, ExtentKind::Unallocated, 3), 1);
        assert_eq!(depth(150, ExtentKind::Unallocated, 3), 1);
        assert_eq!(depth(50, ExtentKind::Unallocated, 3), 3);
        assert_eq!(depth(50, ExtentKind::Data { host: 0 }, 2), 2);
    }
}
