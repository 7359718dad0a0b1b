//! Asking the map of a chain, and adding to it what it does not know yet.

use crate::chain::extents::MIN_UNITS;
use crate::chain::map::{self, MERGED_UNITS};
use crate::chain::merge::{merge, words_of};
use crate::chain::place::{ClusterPlace, Lookup, PlaceKind};
use crate::node::{ChainView, Driver, Node};
use crate::qcow2::cache::slice_cache::SliceCache;
use zebu_storage::Worker;

/// The place of `guest` in `top`'s chain, and for how many bytes it holds (at most `max_len`).
#[inline]
pub(crate) async fn find(top: &Node, worker: &Worker, guest: u64, max_len: u64) -> (Lookup, u64) {
    let Some(view) = &top.view else { return (Lookup::Miss, max_len) };
    if let Driver::Qcow2(qcow2) = &top.driver
        && qcow2.has_packed(guest, max_len)
    {
        return (Lookup::Miss, max_len);
    }
    if let Some((place, len)) = view.map.find(guest, max_len) {
        return (Lookup::Hit(place), len);
    }
    view.map.extents().top_up();
    let Some(merged) = &view.merged else { return (Lookup::Miss, max_len) };
    let looked = look_at_slice(view, merged, guest, max_len);
    if let Some(Looked { found: found @ (Lookup::Hit(_) | Lookup::Below(_)), len, .. }) = looked {
        return (found, len);
    }
    // Boxed, as what is long and rare: the task of a read that hits stays small.
    Box::pin(find_out(top, view, merged, worker, guest, max_len, looked)).await
}

/// A look at a merged slice that is there. [`Lookup::Miss`]: the cluster was written since the slice was made.
#[derive(Debug, Clone, Copy)]
struct Looked {
    found: Lookup,
    len: u64,
    generation: u64,
}

fn look_at_slice(view: &ChainView, merged: &SliceCache, guest: u64, max_len: u64) -> Option<Looked> {
    let key = (guest >> view.map.unit_bits()) / MERGED_UNITS;
    let mut shard = merged.lock(key);
    let generation = shard.generation();
    let slice = merged.get(&mut shard, key)?;
    let (found, len) = find_in_slice(view, slice.bytes(), guest, max_len);
    Some(Looked { found, len, generation })
}

/// Finds out what a look did not tell.
async fn find_out(
    top: &Node,
    view: &ChainView,
    merged: &SliceCache,
    worker: &Worker,
    guest: u64,
    max_len: u64,
    mut looked: Option<Looked>,
) -> (Lookup, u64) {
    let unit = guest >> view.map.unit_bits();
    let key = unit / MERGED_UNITS;
    if looked.is_none() && merge(top, view, merged, worker, key).await {
        looked = look_at_slice(view, merged, guest, max_len);
    }
    let Some(Looked { found, len, generation }) = looked else { return (Lookup::Miss, max_len) };
    if found != Lookup::Miss {
        return (found, len);
    }
    let words = words_of(top, view, worker, unit..unit + 1).await;
    let Some(word) = words.ok().and_then(|words| words.first().copied()) else {
        return (Lookup::Miss, max_len);
    };
    let mut shard = merged.lock(key);
    if shard.generation() == generation
        && let Some(slice) = merged.peek(&mut shard, key)
    {
        map::set_word(slice.derived_bytes(), (unit % MERGED_UNITS) as usize, word);
    }
    drop(shard);
    in_unit_of(view, Lookup::from_word(word), guest, max_len)
}

/// The part of what is known of a whole cluster that begins at `guest`.
fn in_unit_of(view: &ChainView, known: Lookup, guest: u64, max_len: u64) -> (Lookup, u64) {
    let unit_size = 1 << view.map.unit_bits();
    let in_unit = guest & (unit_size - 1);
    let len = (unit_size - in_unit).min(max_len);
    match known {
        Lookup::Hit(place) => (Lookup::Hit(place.advanced(in_unit)), len),
        Lookup::Below(_) => (known, len),
        Lookup::Miss => (known, max_len),
    }
}

/// The place of `guest` by a merged slice; a long run goes into the index of extents. The slice's lock is held.
fn find_in_slice(view: &ChainView, bytes: &[u8], guest: u64, max_len: u64) -> (Lookup, u64) {
    let bits = view.map.unit_bits();
    let unit = guest >> bits;
    let at = (unit % MERGED_UNITS) as usize;
    let known = |at: usize| Lookup::from_word(map::word(bytes, at));
    let place = match known(at) {
        Lookup::Hit(place) => place,
        other => return in_unit_of(view, other, guest, max_len),
    };
    let has_place = |at: usize, place: ClusterPlace| known(at) == Lookup::Hit(place);
    let mut before = 0;
    while before < at
        && matches!(known(at - before - 1), Lookup::Hit(p) if p.advanced((before as u64 + 1) << bits) == place)
    {
        before += 1;
    }
    let mut after = 1;
    while at + after < MERGED_UNITS as usize && has_place(at + after, place.advanced((after as u64) << bits))
    {
        after += 1;
    }
    if (before + after) as u64 >= MIN_UNITS {
        let first = match place.kind {
            PlaceKind::Zero => place,
            PlaceKind::Data { host, copied } => ClusterPlace {
                kind: PlaceKind::Data { host: host - ((before as u64) << bits), copied },
                ..place
            },
        };
        view.map.extents().insert(unit - before as u64..unit + after as u64, first);
    }
    let in_unit = guest & ((1 << bits) - 1);
    (Lookup::Hit(place.advanced(in_unit)), (((after as u64) << bits) - in_unit).min(max_len))
}
