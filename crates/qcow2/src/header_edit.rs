//! Changing the extensions about bitmaps, backups and seals of a header in place, step by step.
//!
//! A disk may write a block torn: any of its sectors of 512 bytes may hold the new bytes while others hold the old
//! ones. So a change is a list of whole blocks, each to be written and durable before the next is written. Whichever
//! sectors of a step are on disk, the header is sound, all that is not about bitmaps is as it was, and the bitmaps are
//! the old ones, the new ones, or none (the autoclear bit is clear then).

use crate::backup_id::{BackupMark, BitmapBases, Seal};
use crate::bytes::{self, ZeroExtended};
use crate::error::{FormatError, Version3Field};
use crate::extension::{BACKUP_MARK, BITMAP_BASES, BITMAPS, BitmapsExtension, PREAMBLE, SEAL, Walk};
use crate::features::Autoclear;
use crate::header::Header;
use crate::limits;
use crate::seal::{ForkSeal, SealState};
use crate::version::Version;

/// Offset of the autoclear bits.
const AUTOCLEAR_AT: usize = 88;
/// Offsets of where the backing file name is, and of its length.
const NAME_PLACE_AT: usize = 8;
const NAME_LEN_AT: usize = 16;
/// Bytes of the bitmaps extension with its preamble.
const BITMAPS_WHOLE: usize = PREAMBLE + BitmapsExtension::SIZE;
const SECTOR: usize = limits::SECTOR_SIZE as usize;

/// The blocks to write one after the other so that the header in `block` (the first cluster, or its beginning) names
/// `new` as its bitmaps, or none.
///
/// # Errors
/// [`FormatError::NeedsVersion3`]; [`FormatError::HeaderDoesNotFit`] if there is no room for the extension within the block; what makes the header
/// unreadable.
pub fn set_bitmaps(block: &[u8], new: Option<BitmapsExtension>) -> Result<Vec<Vec<u8>>, FormatError> {
    if Header::prefix(block)?.version == Version::V2 {
        let refusal = FormatError::NeedsVersion3 { field: Version3Field::Features };
        return if new.is_some() { Err(refusal) } else { Ok(Vec::new()) };
    }
    let area = Area::find(block, BITMAPS)?;
    let place = match *area.found.as_slice() {
        [] => None,
        [(at, BitmapsExtension::SIZE)] => Some(at),
        [(_, len)] => return Err(FormatError::BitmapsLength { len: len as u32 }),
        _ => return Err(FormatError::BitmapsTwice),
    };
    let mut edit = Edit::of(block);
    match (new, place) {
        (Some(new), Some(at)) => edit.replace_bitmaps(at, &new.encode()),
        (Some(new), None) => {
            edit.insert(&area, BITMAPS, &new.encode(), &[])?;
            edit.set_bit(true);
        }
        (None, Some(at)) => {
            edit.set_bit(false);
            edit.remove(&area, at, BITMAPS_WHOLE);
        }
        (None, None) => edit.set_bit(false),
    }
    Ok(edit.steps)
}

/// The blocks to write one after the other so that the header says which backups its bitmaps go on from, under a seal, or
/// nothing of it. A step that is torn leaves a seal that does not fit.
///
/// # Errors
/// As of [`set_bitmaps`].
pub fn set_bitmap_bases(
    block: &[u8],
    new: Option<(&BitmapBases, Seal)>,
) -> Result<Vec<Vec<u8>>, FormatError> {
    let new = new.map(|(bases, seal)| (bases.encode(), seal));
    set_own(block, BITMAP_BASES, BitmapBases::SIZE, new.as_ref().map(|(data, seal)| (&data[..], &seal[..])))
}

/// The blocks to write one after the other so that the header says which backup the image is, or that it is none.
///
/// # Errors
/// As of [`set_bitmaps`].
pub fn set_backup_mark(block: &[u8], new: Option<BackupMark>) -> Result<Vec<Vec<u8>>, FormatError> {
    let data = new.map(|mark| mark.encode());
    set_own(block, BACKUP_MARK, BackupMark::SIZE, data.as_ref().map(|data| (&data[..], &[][..])))
}

/// The blocks to write one after the other so that the header seals the image, or so that it may be written again. A step
/// that is torn leaves the image as it was, or as it is to be.
///
/// # Errors
/// As of [`set_bitmaps`]; [`FormatError::HeaderDoesNotFit`] also where the header holds a seal that is not as zebu writes it.
pub fn set_seal(block: &[u8], new: Option<&ForkSeal>) -> Result<Vec<Vec<u8>>, FormatError> {
    let area = Area::find(block, SEAL)?;
    let is_ours = matches!(area.found.as_slice(), [] | [(_, ForkSeal::SIZE)]);
    if !is_ours {
        let needed = block.len().saturating_add(ForkSeal::SIZE) as u64;
        return Err(FormatError::HeaderDoesNotFit { needed, cluster_size: block.len() as u64 });
    }
    let mut edit = Edit::of(block);
    match (new, area.found.first()) {
        (Some(seal), None) => edit.insert(&area, SEAL, &seal.encode(), &[])?,
        (Some(seal), Some((at, _))) => {
            let (data, at) = (seal.encode(), at.saturating_add(PREAMBLE));
            let (layout, rest) = data.split_at(1);
            // The byte that says that it is whole comes last.
            edit.put(at, &[0]);
            edit.put(at.saturating_add(1), rest);
            edit.put(at, layout);
        }
        (None, Some((at, _))) => {
            edit.put(at.saturating_add(PREAMBLE), &[0]);
            edit.remove(&area, *at, PREAMBLE.saturating_add(ForkSeal::SIZE));
        }
        (None, None) => {}
    }
    Ok(edit.steps)
}

/// Whether the image may only be read, as the header in `block` says.
pub fn seal(block: &[u8]) -> SealState {
    let Ok(area) = Area::find(block, SEAL) else { return SealState::Open };
    let mut states = area
        .found
        .iter()
        .map(|(at, len)| SealState::parse(&ZeroExtended(block).vec(at.saturating_add(PREAMBLE), *len)));
    states.rfind(SealState::is_sealed).unwrap_or(SealState::Open)
}

/// The same for an extension that only zebu knows. Where it is not as zebu writes it, nobody believes it, and it stays.
fn set_own(
    block: &[u8],
    kind: u32,
    len: usize,
    new: Option<(&[u8], &[u8])>,
) -> Result<Vec<Vec<u8>>, FormatError> {
    let area = Area::find(block, kind)?;
    let mut edit = Edit::of(block);
    match (new, area.found.as_slice()) {
        (Some((data, padding)), &[(at, found)]) if found == len => {
            edit.put(at.saturating_add(PREAMBLE), &[data, padding].concat());
        }
        (Some((data, padding)), []) => edit.insert(&area, kind, data, padding)?,
        (None, &[(at, found)]) if found == len => {
            let body = len.next_multiple_of(8);
            // Where it can't be taken out, it says nothing any more.
            edit.put(at.saturating_add(PREAMBLE), &vec![0; body]);
            edit.remove(&area, at, PREAMBLE.saturating_add(body));
        }
        _ => {}
    }
    Ok(edit.steps)
}

/// The backups that bitmaps go on from, as the header in `block` says, the bytes that say so, and their seal.
pub fn bitmap_bases(block: &[u8]) -> Option<(BitmapBases, Vec<u8>, Seal)> {
    let at = the_only(block, BITMAP_BASES, BitmapBases::SIZE)?;
    let bytes = ZeroExtended(block);
    let data = bytes.vec(at, BitmapBases::SIZE);
    Some((BitmapBases::parse(&data)?, data, bytes.array(at.saturating_add(BitmapBases::SIZE))))
}

/// The backup that the image is, as the header in `block` says.
pub fn backup_mark(block: &[u8]) -> Option<BackupMark> {
    let at = the_only(block, BACKUP_MARK, BackupMark::SIZE)?;
    BackupMark::parse(&ZeroExtended(block).vec(at, BackupMark::SIZE))
}

/// Where the data of the one extension of a kind is, if it is as long as that.
fn the_only(block: &[u8], kind: u32, len: usize) -> Option<usize> {
    match *Area::find(block, kind).ok()?.found.as_slice() {
        [(at, found)] if found == len => Some(at.saturating_add(PREAMBLE)),
        _ => None,
    }
}

/// Where things lie in the header.
struct Area {
    /// The extensions of one kind: where each is, and the bytes of its data.
    found: Vec<(usize, usize)>,
    /// The end marker, if there is one.
    end: Option<usize>,
    /// Offset and bytes of the backing file name; offset 0: none.
    name: (usize, usize),
}

impl Area {
    fn find(block: &[u8], kind: u32) -> Result<Self, FormatError> {
        let prefix = Header::prefix(block)?;
        let bytes = ZeroExtended(block);
        let place = usize::try_from(bytes.u64(NAME_PLACE_AT)).unwrap_or(usize::MAX);
        let name = (place, bytes.u32(NAME_LEN_AT) as usize);
        let cluster = prefix.cluster_size() as usize;
        let limit = if place == 0 { cluster } else { place.min(cluster) };
        let mut walk = Walk { area: bytes, at: prefix.header_length as usize, end: limit };
        let (mut found, mut at) = (Vec::new(), walk.at);
        while let Some(item) = walk.next() {
            let (next, data) = item?;
            if next == kind {
                found.push((at, data.len()));
            }
            at = walk.at;
        }
        let has_marker = at.checked_add(PREAMBLE).is_some_and(|after| after <= limit);
        Ok(Self { found, end: has_marker.then_some(at), name })
    }
}

struct Edit {
    /// The block after the last step.
    block: Vec<u8>,
    steps: Vec<Vec<u8>>,
}

impl Edit {
    fn of(block: &[u8]) -> Self {
        Self { block: block.to_vec(), steps: Vec::new() }
    }

    /// Ends a step, if it changes anything.
    fn step(&mut self, next: Vec<u8>) {
        if next != self.block {
            self.steps.push(next.clone());
            self.block = next;
        }
    }

    fn with_bit(&self, set: bool) -> Vec<u8> {
        let mut next = self.block.clone();
        let old = ZeroExtended(&next).u64(AUTOCLEAR_AT);
        let bit = Autoclear::BITMAPS.bits();
        let bits = if set { old | bit } else { old & !bit };
        let _ = bytes::put(&mut next, AUTOCLEAR_AT, &bits.to_be_bytes());
        next
    }

    fn set_bit(&mut self, set: bool) {
        let next = self.with_bit(set);
        self.step(next);
    }

    /// Overwrites bytes as one step.
    fn put(&mut self, at: usize, value: &[u8]) {
        let mut next = self.block.clone();
        if bytes::put(&mut next, at, value).is_ok() {
            self.step(next);
        }
    }

    fn replace_bitmaps(&mut self, at: usize, data: &[u8]) {
        let data_at = at.saturating_add(PREAMBLE);
        if !in_one_sector(data_at, data.len()) {
            self.set_bit(false);
        }
        self.put(data_at, data);
        self.set_bit(true);
    }

    /// Puts an extension behind the others, with bytes in its padding.
    fn insert(&mut self, area: &Area, kind: u32, data: &[u8], padding: &[u8]) -> Result<(), FormatError> {
        let room = self.block.len();
        let full = |needed: usize| FormatError::HeaderDoesNotFit {
            needed: needed as u64,
            cluster_size: room as u64,
        };
        let mut body = [data, padding].concat();
        body.resize(body.len().next_multiple_of(8), 0);
        let whole = PREAMBLE.saturating_add(body.len());
        // Without a marker the name is what ends the extensions: rare, and not worth a way of its own.
        let Some(end) = area.end else { return Err(full(room.saturating_add(whole))) };
        if !in_one_sector(end, PREAMBLE) {
            return Err(full(room.saturating_add(whole)));
        }
        let new_end = end.saturating_add(whole);
        let after = new_end.saturating_add(PREAMBLE);
        if after > room {
            return Err(full(after));
        }
        if kind == BITMAPS {
            self.set_bit(false);
        }
        let (name_at, name_len) = area.name;
        if name_at != 0 && name_at < after {
            // A new place for the name, past everything; only then is its old place free.
            let old_end = name_at.saturating_add(name_len);
            let place = old_end.max(after).next_multiple_of(8);
            let needed = place.saturating_add(name_len);
            let Some(name) = self.block.get(name_at..old_end).map(<[u8]>::to_vec) else {
                return Err(full(needed));
            };
            if needed > room {
                return Err(full(needed));
            }
            self.put(place, &name);
            self.put(NAME_PLACE_AT, &(place as u64).to_be_bytes());
        }
        // Behind the marker nobody looks.
        body.extend_from_slice(&[0; PREAMBLE]);
        self.put(end.saturating_add(PREAMBLE), &body);
        let preamble = [kind.to_be_bytes(), (data.len() as u32).to_be_bytes()].concat();
        self.put(end, &preamble);
        Ok(())
    }

    /// Takes the extension at `at`, of `whole` bytes, out, if that can't be torn. Else it stays.
    fn remove(&mut self, area: &Area, at: usize, whole: usize) {
        let next = at.saturating_add(whole);
        let is_last = area.end.is_none_or(|end| end <= next);
        if is_last && in_one_sector(at, PREAMBLE) {
            self.put(at, &[0; PREAMBLE]);
            return;
        }
        let end = area.end.unwrap_or(next).saturating_add(PREAMBLE);
        if in_one_sector(at, end.saturating_sub(at))
            && let Some(rest) = self.block.get(next..end).map(<[u8]>::to_vec)
        {
            self.put(at, &rest);
        }
    }
}

fn in_one_sector(at: usize, len: usize) -> bool {
    let last = at.saturating_add(len).saturating_sub(1);
    at.checked_div(SECTOR) == last.checked_div(SECTOR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backup_id::BackupId;
    use crate::extension::Extension;
    use crate::header::{NewHeader, Purpose};
    use crate::offsets::HostOffset;
    use proptest::prelude::*;

    fn bitmaps(n: u64) -> BitmapsExtension {
        BitmapsExtension {
            bitmap_count: n as u32 + 1,
            directory_size: 32 * (n + 1),
            directory_offset: HostOffset((n + 5) << 16),
        }
    }

    fn block(header: &Header) -> Vec<u8> {
        let mut block = header.encode().unwrap();
        block.resize((header.geometry().cluster_size() as usize).min(4096), 0);
        block
    }

    fn parse(block: &[u8]) -> Header {
        Header::parse(block, Purpose::Inspect).unwrap().0
    }

    /// The content of a header beside bitmaps.
    fn rest(header: &Header) -> (Vec<Extension>, Option<Vec<u8>>, Autoclear, u64) {
        let mut extensions = header.extensions().to_vec();
        extensions.retain(|e| e.kind() != BITMAPS);
        let name = header.backing_file().map(<[u8]>::to_vec);
        (extensions, name, header.autoclear - Autoclear::BITMAPS, header.size)
    }

    /// Goes through all steps, each torn in every way, and returns the last block.
    fn apply(before: &[u8], new: Option<BitmapsExtension>) -> Vec<u8> {
        let old = parse(before);
        let steps = set_bitmaps(before, new).unwrap();
        let mut block = before.to_vec();
        for step in steps {
            let sectors: Vec<usize> = (0..block.len() / 512)
                .filter(|s| block[s * 512..(s + 1) * 512] != step[s * 512..(s + 1) * 512])
                .collect();
            for landed in 0..1 << sectors.len() {
                let mut torn = block.clone();
                for (i, s) in sectors.iter().enumerate() {
                    if landed >> i & 1 == 1 {
                        torn[s * 512..(s + 1) * 512].copy_from_slice(&step[s * 512..(s + 1) * 512]);
                    }
                }
                let found = parse(&torn);
                assert_eq!(rest(&found), rest(&old));
                let found = found.bitmaps();
                assert!(found.is_none() || found == new || found == old.bitmaps(), "{found:?}");
            }
            block = step;
        }
        assert_eq!(parse(&block).bitmaps(), new);
        block
    }

    fn header(cluster_bits: u32, name: &[u8], more: &[(u32, usize)]) -> Header {
        let mut header = Header::new(&NewHeader { cluster_bits, ..NewHeader::default() }).unwrap();
        header.refcount_table_offset = HostOffset(1 << cluster_bits);
        header.refcount_table_clusters = 1;
        header.set_backing_file((!name.is_empty()).then_some(name)).unwrap();
        for (kind, len) in more {
            header.extensions.push(Extension::Unknown { kind: *kind, data: vec![0x5a; *len] });
        }
        header
    }

    #[test]
    fn a_name_that_does_not_fit_twice_is_left_where_it_is() {
        let full = block(&header(9, &[b'n'; 350], &[]));
        assert!(matches!(set_bitmaps(&full, Some(bitmaps(0))), Err(FormatError::HeaderDoesNotFit { .. })));
    }

    #[test]
    fn an_extension_that_was_removed_leaves_no_trace() {
        let before = block(&header(16, b"base.img", &[]));
        let with = apply(&before, Some(bitmaps(3)));
        let without = parse(&apply(&with, None));
        assert!(without.extensions().iter().all(|e| e.kind() != BITMAPS));
    }

    #[test]
    fn a_second_extension_is_an_error() {
        let mut twice = header(16, b"", &[]);
        twice.autoclear |= Autoclear::BITMAPS;
        twice.extensions.push(Extension::Bitmaps(bitmaps(0)));
        twice.extensions.push(Extension::Bitmaps(bitmaps(1)));
        assert_eq!(set_bitmaps(&block(&twice), None), Err(FormatError::BitmapsTwice));
    }

    /// Goes through the steps of an extension of zebu's own, each torn in every way.
    fn apply_own(before: &[u8], steps: Vec<Vec<u8>>, is_known: impl Fn(&[u8]) -> bool) -> Vec<u8> {
        let old = parse(before);
        let others = |header: &Header| {
            let (mut extensions, name, autoclear, size) = rest(header);
            extensions.retain(|e| ![BACKUP_MARK, BITMAP_BASES, SEAL].contains(&e.kind()));
            (extensions, name, autoclear, size, header.bitmaps())
        };
        let mut block = before.to_vec();
        for step in steps {
            let sectors: Vec<usize> = (0..block.len() / 512)
                .filter(|s| block[s * 512..(s + 1) * 512] != step[s * 512..(s + 1) * 512])
                .collect();
            for landed in 0..1 << sectors.len() {
                let mut torn = block.clone();
                for (i, s) in sectors.iter().enumerate() {
                    if landed >> i & 1 == 1 {
                        torn[s * 512..(s + 1) * 512].copy_from_slice(&step[s * 512..(s + 1) * 512]);
                    }
                }
                assert_eq!(others(&parse(&torn)), others(&old));
                assert!(is_known(&torn), "{torn:x?}");
            }
            block = step;
        }
        block
    }

    /// A seal that fits the data, as far as a test needs.
    fn sealed(bases: &BitmapBases) -> (&BitmapBases, Seal) {
        let sum =
            bases.encode().iter().fold(1u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(*byte)));
        let mut seal = Seal::default();
        seal.copy_from_slice(&sum.to_be_bytes()[..BitmapBases::SEAL]);
        (bases, seal)
    }

    proptest! {
        #[test]
        fn a_seal_is_there_or_not_whatever_is_torn(
            cluster_bits in prop_oneof![Just(9u32), Just(11), Just(12), Just(16)],
            name in proptest::collection::vec(b'a'..=b'z', 0..60),
            more in proptest::collection::vec((1u32..9, 0usize..50), 0..5),
            overlay in proptest::collection::vec(b'a'..=b'z', 1..1000),
            other in proptest::collection::vec(b'a'..=b'z', 1..1000),
        ) {
            let before = block(&header(cluster_bits, &name, &more));
            let seals = [overlay, other].map(|name| ForkSeal::new(&name).unwrap());
            let is_known = |block: &[u8]| match seal(block) {
                SealState::Open => true,
                SealState::Sealed(found) => seals.contains(&found),
                SealState::Unreadable => false,
            };
            let Ok(steps) = set_seal(&before, Some(&seals[0])) else { return Ok(()) };
            let sealed = apply_own(&before, steps, is_known);
            prop_assert_eq!(seal(&sealed), SealState::Sealed(seals[0].clone()));
            prop_assert_eq!(parse(&sealed).seal(), seal(&sealed));
            let again = apply_own(&sealed, set_seal(&sealed, Some(&seals[1])).unwrap(), is_known);
            prop_assert_eq!(seal(&again), SealState::Sealed(seals[1].clone()));
            let open = apply_own(&again, set_seal(&again, None).unwrap(), is_known);
            prop_assert_eq!(seal(&open), SealState::Open);
            // Behind another extension it can't be taken out.
            let mark = BackupMark { id: BackupId([1; 16]), stands_on: None };
            let Ok(marked) = set_backup_mark(&again, Some(mark)) else { return Ok(()) };
            let marked = marked.last().unwrap().clone();
            let left = apply_own(&marked, set_seal(&marked, None).unwrap(), is_known);
            prop_assert_eq!(seal(&left), SealState::Open);
            let anew = apply_own(&left, set_seal(&left, Some(&seals[0])).unwrap(), is_known);
            prop_assert_eq!(seal(&anew), SealState::Sealed(seals[0].clone()));
        }

        #[test]
        fn own_extensions_are_sound_whatever_is_torn(
            cluster_bits in prop_oneof![Just(9u32), Just(12), Just(16)],
            name in proptest::collection::vec(b'a'..=b'z', 0..60),
            more in proptest::collection::vec((1u32..9, 0usize..50), 0..5),
            ids in proptest::collection::vec(1u8..255, 0..6),
        ) {
            let header = header(cluster_bits, &name, &more);
            let bases = |from: u8| BitmapBases::new(ids.iter().map(|id| ([*id; 16], BackupId([id ^ from; 16]))));
            let (old, new) = (bases(0), bases(255));
            let known = |block: &[u8]| {
                // A torn one has a seal that does not fit.
                bitmap_bases(block).is_none_or(|(found, data, seal)| {
                    sealed(&found).1 != seal || data != found.encode() || found == old || found == new
                })
            };
            let Ok(with_bitmaps) = set_bitmaps(&block(&header), Some(bitmaps(0))) else { return Ok(()) };
            let before = with_bitmaps.last().unwrap().clone();
            let Ok(steps) = set_bitmap_bases(&before, Some(sealed(&old))) else { return Ok(()) };
            let first = apply_own(&before, steps, known);
            prop_assert_eq!(bitmap_bases(&first).unwrap().0, old.clone());
            prop_assert_eq!(bitmap_bases(&first).unwrap().2, sealed(&old).1);
            let changed = apply(&first, Some(bitmaps(1)));
            let second = set_bitmap_bases(&changed, Some(sealed(&new))).unwrap();
            let second = apply_own(&changed, second, known);
            prop_assert_eq!(bitmap_bases(&second).unwrap().0, new.clone());
            let none = set_bitmap_bases(&second, None).unwrap();
            let none = apply_own(&second, none, known);
            prop_assert!(bitmap_bases(&none).is_none_or(|(found, ..)| found.is_empty()));

            let id = |n: u8| BackupId([n; 16]);
            let mark = Some(BackupMark { id: id(1), stands_on: ids.first().map(|n| id(*n)) });
            let is_mark = |block: &[u8]| [None, mark].contains(&backup_mark(block));
            let Ok(steps) = set_backup_mark(&before, mark) else { return Ok(()) };
            let marked = apply_own(&before, steps, is_mark);
            prop_assert_eq!(backup_mark(&marked), mark);
            let unmarked = apply_own(&marked, set_backup_mark(&marked, None).unwrap(), |block| {
                // Half an id is none of a backup that there is, and nothing is written before the mark is gone.
                backup_mark(block).is_none_or(|found| found.id == id(1) || found.id.0.contains(&0))
            });
            prop_assert_eq!(backup_mark(&unmarked), None);
        }

        #[test]
        fn every_torn_step_is_sound(
            cluster_bits in prop_oneof![Just(9u32), Just(12), Just(16)],
            name in proptest::collection::vec(b'a'..=b'z', 0..60),
            more in proptest::collection::vec((1u32..9, 0usize..50), 0..5),
            bit_alone in any::<bool>(),
            stale in any::<bool>(),
        ) {
            let mut header = header(cluster_bits, &name, &more);
            if stale {
                header.extensions.insert(0, Extension::StaleBitmaps(bitmaps(7).encode()));
            } else if bit_alone {
                header.autoclear |= Autoclear::BITMAPS;
            }
            if header.encode().is_ok() && set_bitmaps(&block(&header), Some(bitmaps(0))).is_ok() {
                let first = apply(&block(&header), Some(bitmaps(0)));
                let second = apply(&first, Some(bitmaps(1)));
                let none = apply(&second, None);
                apply(&none, Some(bitmaps(2)));
            }
        }

        #[test]
        fn any_bytes_give_a_verdict(mut bytes in proptest::collection::vec(any::<u8>(), 512)) {
            let _ = set_bitmaps(&bytes, Some(bitmaps(0)));
            bytes[..8].copy_from_slice(&[0x51, 0x46, 0x49, 0xfb, 0, 0, 0, 3]);
            bytes[20..24].copy_from_slice(&9u32.to_be_bytes());
            bytes[100..104].copy_from_slice(&104u32.to_be_bytes());
            let _ = set_bitmaps(&bytes, Some(bitmaps(0)));
            let _ = set_bitmaps(&bytes, None);
            let mark = BackupMark { id: BackupId([1; 16]), stands_on: None };
            let _ = (set_backup_mark(&bytes, Some(mark)), set_backup_mark(&bytes, None));
            let seal_of = ForkSeal::new(b"/a").unwrap();
            let _ = (set_seal(&bytes, Some(&seal_of)), set_seal(&bytes, None), seal(&bytes));
            let bases = BitmapBases::default();
            let _ = (set_bitmap_bases(&bytes, Some(sealed(&bases))), set_bitmap_bases(&bytes, None));
            let _ = (backup_mark(&bytes), bitmap_bases(&bytes));
        }
    }
}
