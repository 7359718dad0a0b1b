//! Who owns what in a chain: reading the index of a chain, and deriving it.
//!
//! A merged slice is made in one go, image by image from the top down: each image's tables are asked only for what no
//! image above it has. So a slice costs one lookup per image and run, once, and afterwards every read one lookup.

use crate::node::{ChainView, Driver, Node};
use crate::qcow2::extents::{MIN_UNITS, Place, PlaceKind};
use crate::qcow2::index::{self, Known, MERGED_BYTES, MERGED_UNITS};
use crate::qcow2::mapping::Run;
use crate::qcow2::slices::SliceCache;
use crate::{ErrorKind, Result};
use futures_util::future::join_all;
use std::ops::Range;
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

/// Images whose slices are loaded at once.
const IMAGES_AT_ONCE: usize = 32;

/// What the index knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Found {
    /// Where the bytes are, and how many of them follow each other there.
    At(Place, u64),
    /// No image above this depth has anything to say of so many bytes.
    From(u16, u64),
}

/// What the index of `top`'s chain knows of `guest`, at most `max_len` bytes; `None`: ask the images.
#[inline]
pub(crate) async fn find(top: &Node, worker: &Worker, guest: u64, max_len: u64) -> Option<Found> {
    let view = top.view.as_ref()?;
    if let Driver::Qcow2(qcow2) = &top.driver
        && qcow2.has_gathered(guest, max_len)
    {
        return None;
    }
    if let Some((place, len)) = view.index.find(guest, max_len) {
        return Some(Found::At(place, len));
    }
    view.index.extents().top_up();
    let merged = view.merged.as_ref()?;
    let looked = look_at_slice(view, merged, guest, max_len);
    if let Looked::Known(found) = looked {
        return Some(found);
    }
    // Boxed, as what is long and rare: the task of a read that hits stays small.
    Box::pin(find_out(top, view, merged, worker, guest, max_len, looked)).await
}

/// A look at a merged slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Looked {
    Known(Found),
    /// The slice is there, but the cluster was written since it was made.
    Outdated {
        generation: u64,
    },
    Absent,
}

fn look_at_slice(view: &ChainView, merged: &SliceCache, guest: u64, max_len: u64) -> Looked {
    let key = (guest >> view.index.unit_bits()) / MERGED_UNITS;
    let mut shard = merged.lock(key);
    let generation = shard.generation;
    match merged.get(&mut shard, key).map(|slice| find_in_slice(view, &slice.bytes, guest, max_len)) {
        Some(Some(found)) => Looked::Known(found),
        Some(None) => Looked::Outdated { generation },
        None => Looked::Absent,
    }
}

/// Finds out what a look did not tell.
async fn find_out(
    top: &Node,
    view: &ChainView,
    merged: &SliceCache,
    worker: &Worker,
    guest: u64,
    max_len: u64,
    mut looked: Looked,
) -> Option<Found> {
    let unit = guest >> view.index.unit_bits();
    let key = unit / MERGED_UNITS;
    if looked == Looked::Absent {
        if !merge(top, view, merged, worker, key).await {
            return None;
        }
        looked = look_at_slice(view, merged, guest, max_len);
    }
    let generation = match looked {
        Looked::Known(found) => return Some(found),
        Looked::Outdated { generation } => generation,
        Looked::Absent => return None,
    };
    let words = words_of(top, view, worker, unit..unit + 1).await.ok()?;
    let word = *words.first()?;
    let mut shard = merged.lock(key);
    if shard.generation == generation
        && let Some(slice) = merged.peek(&mut shard, key)
    {
        index::set_word(&mut slice.bytes, (unit % MERGED_UNITS) as usize, word);
    }
    drop(shard);
    found_of(view, word, guest, max_len)
}

/// What one word says of `guest`.
fn found_of(view: &ChainView, word: u64, guest: u64, max_len: u64) -> Option<Found> {
    let unit_size = 1 << view.index.unit_bits();
    let in_unit = guest & (unit_size - 1);
    match index::decode(word) {
        Known::Nothing => None,
        Known::At(place) => Some(Found::At(place.advanced(in_unit), (unit_size - in_unit).min(max_len))),
        Known::From(depth) => Some(Found::From(depth, (unit_size - in_unit).min(max_len))),
    }
}

/// What a merged slice says of `guest`; a long run goes into the index of extents. The slice's lock is held.
fn find_in_slice(view: &ChainView, bytes: &[u8], guest: u64, max_len: u64) -> Option<Found> {
    let bits = view.index.unit_bits();
    let unit = guest >> bits;
    let at = (unit % MERGED_UNITS) as usize;
    let place = match index::decode(index::word(bytes, at)) {
        Known::Nothing => return None,
        known @ Known::From(_) => return found_of(view, index::encode(known), guest, max_len),
        Known::At(place) => place,
    };
    let place_at = |at: usize| match index::decode(index::word(bytes, at)) {
        Known::At(place) => Some(place),
        Known::Nothing | Known::From(_) => None,
    };
    let mut before = 0;
    while before < at
        && place_at(at - before - 1).is_some_and(|p| p.advanced((before as u64 + 1) << bits) == place)
    {
        before += 1;
    }
    let mut after = 1;
    while at + after < MERGED_UNITS as usize
        && place_at(at + after).is_some_and(|p| place.advanced((after as u64) << bits) == p)
    {
        after += 1;
    }
    if (before + after) as u64 >= MIN_UNITS {
        let first = match place.kind {
            PlaceKind::Zero => place,
            PlaceKind::Data { host, copied } => {
                Place { kind: PlaceKind::Data { host: host - ((before as u64) << bits), copied }, ..place }
            }
        };
        view.index.extents().insert(unit - before as u64..unit + after as u64, first);
    }
    let in_unit = guest & ((1 << bits) - 1);
    Some(Found::At(place.advanced(in_unit), (((after as u64) << bits) - in_unit).min(max_len)))
}

/// Makes the merged slice `key`, unless somebody does already. False: it can't be made now.
async fn merge(top: &Node, view: &ChainView, merged: &SliceCache, worker: &Worker, key: u64) -> bool {
    let Some(ticket) = merged.want(key).await else { return true };
    let Some(room) = merged.store.derived_room(merged.slice_cost()) else { return false };
    let generation = merged.lock(key).generation;
    let units = key * MERGED_UNITS..(key + 1) * MERGED_UNITS;
    let Ok(words) = words_of(top, view, worker, units).await else { return false };
    let mut bytes = vec![0; MERGED_BYTES];
    for (at, word) in words.into_iter().enumerate() {
        index::set_word(&mut bytes, at, word);
    }
    ticket.finish_derived(bytes.into(), room, generation);
    true
}

/// The words of `units`, as far as the disk reaches.
async fn words_of(top: &Node, view: &ChainView, worker: &Worker, units: Range<u64>) -> Result<Vec<u64>> {
    let bits = view.index.unit_bits();
    let start = units.start << bits;
    let end = (units.end << bits).min(top.virtual_size());
    let mut words =
        Words { start: units.start, bits, end, words: vec![0; (units.end - units.start) as usize] };
    let mut open: Vec<Range<u64>> = Vec::new();
    open.extend((start < end).then_some(start..end));
    let mut depth = 0;
    let images = std::iter::once(top).chain(view.members.iter().map(|node| &**node));
    for node in images {
        if open.is_empty() {
            return Ok(words.words);
        }
        if (depth as usize).is_multiple_of(IMAGES_AT_ONCE) {
            load_ahead(top, view, worker, depth as usize, start).await;
        }
        let mut left: Vec<Range<u64>> = Vec::new();
        for range in open {
            let mut at = range.start;
            while at < range.end {
                let (run, len) = match node.map(worker, at, range.end - at).await {
                    Ok(found) => found,
                    // A damaged entry is an error of whoever reads there: that one asks the images.
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        let next = (((at >> bits) + 1) << bits).min(range.end);
                        words.set(at..next, depth, Known::From(depth));
                        at = next;
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                // What a shorter image does not reach reads as zero, whatever lies below it.
                let past_end = at >= node.virtual_size() && !sabotage::is(Fault::ShowBelowShortImage);
                match run {
                    Run::Unallocated if past_end => {
                        words.set(at..at + len, depth, Known::At(Place { kind: PlaceKind::Zero, depth }));
                    }
                    Run::Unallocated => match left.last_mut() {
                        Some(last) if last.end == at => last.end = at + len,
                        _ => left.push(at..at + len),
                    },
                    Run::Zero { .. } => {
                        words.set(at..at + len, depth, Known::At(Place { kind: PlaceKind::Zero, depth }));
                    }
                    Run::Data { host } => {
                        let kind = PlaceKind::Data { host, copied: false };
                        words.set(at..at + len, depth, Known::At(Place { kind, depth }));
                    }
                    Run::Compressed { .. } => words.set(at..at + len, depth, Known::From(depth)),
                }
                at += len;
            }
        }
        open = left;
        depth += 1;
    }
    let last = depth.saturating_sub(1);
    for range in open {
        words.set(range, last, Known::At(Place { kind: PlaceKind::Zero, depth: last }));
    }
    Ok(words.words)
}

/// Has the slices that map `guest` loaded in the images from `depth` on, several at once.
async fn load_ahead(top: &Node, view: &ChainView, worker: &Worker, depth: usize, guest: u64) {
    let images = std::iter::once(top).chain(view.members.iter().map(|node| &**node));
    let loads = images.skip(depth).take(IMAGES_AT_ONCE).filter_map(|node| match &node.driver {
        Driver::Qcow2(qcow2) if guest < node.virtual_size() => Some(qcow2.warm_up(worker, guest)),
        _ => None,
    });
    join_all(loads).await;
}

/// Words that are being found out.
struct Words {
    /// The first unit.
    start: u64,
    bits: u32,
    /// The end of the disk or of the units, in bytes.
    end: u64,
    words: Vec<u64>,
}

impl Words {
    /// Notes what `bytes` are. A unit that is not of one kind is known from the first image on that has a part of it.
    fn set(&mut self, bytes: Range<u64>, depth: u16, known: Known) {
        let mut at = bytes.start;
        while at < bytes.end {
            let unit = at >> self.bits;
            let (unit_start, unit_end) = (unit << self.bits, ((unit + 1) << self.bits).min(self.end));
            let whole = at == unit_start && bytes.end >= unit_end;
            let Some(word) = self.words.get_mut((unit - self.start) as usize) else { return };
            if *word == 0 {
                let mut word_of = index::encode(match known {
                    Known::At(place) if whole => Known::At(place.advanced(at - bytes.start)),
                    _ => Known::From(depth),
                });
                if word_of == 0 {
                    word_of = index::encode(Known::From(depth));
                }
                *word = word_of;
            }
            at = unit_end;
        }
    }
}
