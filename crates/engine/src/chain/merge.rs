//! Making merged slices. A slice is made in one go, image by image from the top down: each image's tables are asked only
//! for what no image above it has. So it costs one lookup per image and run, once, and afterwards every read one lookup.

use crate::chain::map::{self, MERGED_BYTES, MERGED_UNITS};
use crate::chain::place::{ClusterPlace, Lookup, PlaceKind};
use crate::node::{ChainView, Driver, Node};
use crate::qcow2::cache::slice_cache::{SliceCache, Slot};
use crate::qcow2::map::mapping::Run;
use crate::{ErrorKind, Result};
use futures_util::future::join_all;
use std::ops::Range;
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault, Limit};

/// Images whose slices are loaded at once.
const IMAGES_AT_ONCE: usize = 32;

fn at_once() -> usize {
    sabotage::at_most(Limit::ImagesAtOnce, IMAGES_AT_ONCE as u64) as usize
}

/// Makes the merged slice `key`, unless somebody does already. False: it can't be made now.
pub(super) async fn merge(
    top: &Node,
    view: &ChainView,
    merged: &SliceCache,
    worker: &Worker,
    key: u64,
) -> bool {
    let Slot::Vacant(ticket) = merged.want(worker, key).await else { return true };
    let Some(room) = merged.store().derived_room(merged.slice_cost()) else { return false };
    let generation = merged.lock(key).generation();
    let units = key * MERGED_UNITS..(key + 1) * MERGED_UNITS;
    let Ok(words) = words_of(top, view, worker, units).await else { return false };
    let mut bytes = vec![0; MERGED_BYTES];
    for (at, word) in words.into_iter().enumerate() {
        map::set_word(&mut bytes, at, word);
    }
    ticket.finish_derived(bytes.into(), room, generation);
    true
}

/// The words of `units`, as far as the disk reaches.
pub(super) async fn words_of(
    top: &Node,
    view: &ChainView,
    worker: &Worker,
    units: Range<u64>,
) -> Result<Vec<u64>> {
    let bits = view.map.unit_bits();
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
        if (depth as usize).is_multiple_of(at_once()) {
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
                        words.set(at..next, depth, Lookup::Below(depth));
                        at = next;
                        continue;
                    }
                    Err(error) => return Err(error),
                };
                // What a shorter image does not reach reads as zero, whatever lies below it.
                let past_end = at >= node.virtual_size() && !sabotage::is(Fault::ShowBelowShortImage);
                match run {
                    Run::Unallocated if past_end => {
                        words.set(
                            at..at + len,
                            depth,
                            Lookup::Hit(ClusterPlace { kind: PlaceKind::Zero, depth }),
                        );
                    }
                    Run::Unallocated => match left.last_mut() {
                        Some(last) if last.end == at => last.end = at + len,
                        _ => left.push(at..at + len),
                    },
                    Run::Zero { .. } => {
                        words.set(
                            at..at + len,
                            depth,
                            Lookup::Hit(ClusterPlace { kind: PlaceKind::Zero, depth }),
                        );
                    }
                    Run::Data { host } => {
                        let kind = PlaceKind::Data { host, copied: false };
                        words.set(at..at + len, depth, Lookup::Hit(ClusterPlace { kind, depth }));
                    }
                    Run::Compressed { .. } | Run::Elsewhere { .. } | Run::Packed(_) => {
                        words.set(at..at + len, depth, Lookup::Below(depth));
                    }
                }
                at += len;
            }
        }
        open = left;
        depth += 1;
    }
    let last = depth.saturating_sub(1);
    for range in open {
        words.set(range, last, Lookup::Hit(ClusterPlace { kind: PlaceKind::Zero, depth: last }));
    }
    Ok(words.words)
}

/// Has the slices that map `guest` loaded in the images from `depth` on, several at once.
async fn load_ahead(top: &Node, view: &ChainView, worker: &Worker, depth: usize, guest: u64) {
    let images = std::iter::once(top).chain(view.members.iter().map(|node| &**node));
    let loads = images.skip(depth).take(at_once()).filter_map(|node| match &node.driver {
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
    fn set(&mut self, bytes: Range<u64>, depth: u16, known: Lookup) {
        let mut at = bytes.start;
        while at < bytes.end {
            let unit = at >> self.bits;
            let (unit_start, unit_end) = (unit << self.bits, ((unit + 1) << self.bits).min(self.end));
            let whole = at == unit_start && bytes.end >= unit_end;
            let Some(word) = self.words.get_mut((unit - self.start) as usize) else { return };
            if *word == 0 {
                let known = match known {
                    Lookup::Hit(place) if whole => Lookup::Hit(place.advanced(at - bytes.start)),
                    _ => Lookup::Below(depth),
                };
                *word = match known.word() {
                    0 => Lookup::Below(depth).word(),
                    said => said,
                };
            }
            at = unit_end;
        }
    }
}
