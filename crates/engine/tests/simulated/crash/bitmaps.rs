//! Dirty bitmaps under power failures: one that is not marked in use, or that is recovered, knows everything that has
//! changed since it was added or cleared.

use crate::crash::guest::Guest;
use crate::crash::judge::read_all;
use crate::crash::setup::{Files, Setup};
use std::collections::BTreeMap;
use zebu_engine::storage::Worker;
use zebu_engine::{Access, BitmapRecording, Image, NewBitmap};
use zebu_sim::SimRng;

/// The duty of a bitmap: each sector in which the disk differs from what it held at first. Up to what the disk held
/// when recording ended, or up to now. What had been cut off when recording ended was not there to differ; that the disk
/// grew again is a change that nobody was to record.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    from: Vec<u8>,
    to: Option<Vec<u8>>,
}

/// By name, what a bitmap may be about: one of the alternatives, all of its segments.
pub(crate) type Known = BTreeMap<String, Vec<Vec<Segment>>>;

/// The disk is about to have `len` bytes: what bitmaps say of changes that are over goes with what is cut off, and does not
/// come back when the disk grows again.
pub(crate) fn cut_off(known: &mut Known, len: u64) {
    let segments = known.values_mut().flatten().flatten();
    for to in segments.filter_map(|segment| segment.to.as_mut()) {
        to.truncate(usize::try_from(len).unwrap_or(usize::MAX));
    }
}

fn differs(from: &[u8], to: &[u8], at: usize) -> bool {
    let sector = |bytes: &[u8]| {
        let mut sector = bytes.get(at..bytes.len().min(at + 512)).unwrap_or_default().to_vec();
        sector.resize(512, 0);
        sector
    };
    sector(from) != sector(to)
}

/// Judges the bitmaps in files that a crash left; `disk` is what the disk holds.
pub(crate) fn judge_bitmaps(setup: &Setup, files: &Files, known: &Known, disk: &[u8]) -> Result<(), String> {
    if known.is_empty() {
        return Ok(());
    }
    let world = setup.world(files, 0);
    let worker = world.worker();
    let judged = world.block_on(async {
        let options = setup.options().access(Access::ReadOnly);
        let image =
            Image::open_files(&worker, setup.chain(&world), &options).await.map_err(|e| e.to_string())?;
        for info in image.bitmaps().iter().filter(|info| !info.in_use) {
            let alternatives = known.get(&info.name).ok_or(format!("bitmap {} was not made", info.name))?;
            let bits = image.bitmap_bits(&worker, &info.name).await.map_err(|e| e.to_string())?;
            let missing = |segments: &[Segment]| {
                let sectors = (0..disk.len()).step_by(512);
                sectors.into_iter().find(|at| {
                    let changed = |s: &Segment| {
                        let to = s.to.as_deref().unwrap_or(disk);
                        *at < to.len() && differs(&s.from, to, *at)
                    };
                    segments.iter().any(changed) && !bits.run_at(*at as u64).0
                })
            };
            let missing: Vec<_> = alternatives.iter().filter_map(|segments| missing(segments)).collect();
            if missing.len() == alternatives.len() {
                return Err(format!("bitmap {} does not know of changes at {missing:x?}", info.name));
            }
        }
        Ok(())
    });
    judged.map_err(|stuck| stuck.to_string())?
}

/// Removes what a crash made useless, and forgets what is gone.
pub(crate) async fn tidy(worker: &Worker, guest: &Guest) -> Result<(), String> {
    for info in guest.image.bitmaps().iter().filter(|info| info.in_use) {
        guest.image.remove_bitmap(worker, &info.name).await.map_err(|e| format!("remove: {e}"))?;
    }
    let left = guest.image.bitmaps();
    guest.bitmaps.borrow_mut().retain(|name, _| left.iter().any(|info| info.name == *name));
    for info in left {
        let name = info.name;
        let is_known = guest.bitmaps.borrow().get(&name).is_some_and(|alternatives| alternatives.len() == 1);
        if info.recovered.is_some() && is_known {
            // It goes on from what it was.
            continue;
        }
        // Whichever it was before the crash, it is one of the alternatives still: all of them together are too much.
        guest.image.clear_bitmap(worker, &name).await.map_err(|e| format!("clear: {e}"))?;
        guest
            .image
            .set_bitmap_recording(worker, &name, BitmapRecording::On)
            .await
            .map_err(|e| e.to_string())?;
        let now = read_all(worker, &guest.image, guest.image.virtual_size()).await?;
        guest.bitmaps.borrow_mut().insert(name, vec![vec![Segment { from: now, to: None }]]);
    }
    Ok(())
}

/// One random operation; no other request is under way. While it runs, both what was and what is to be may be found.
pub(crate) async fn operation(worker: &Worker, guest: &Guest, mut rng: SimRng) -> Result<(), String> {
    let image = &guest.image;
    let now = read_all(worker, image, image.virtual_size()).await?;
    let infos = image.bitmaps();
    let choice = if infos.is_empty() { 0 } else { rng.below(6) };
    let set = |name: &str, alternatives: Vec<Vec<Segment>>| {
        guest.bitmaps.borrow_mut().insert(name.to_owned(), alternatives);
    };
    let fresh = || vec![Segment { from: now.clone(), to: None }];
    if choice == 0 {
        let name = format!("b{}", rng.next_u64());
        let granularity = Some(512 << rng.below(8));
        let recording = *rng.pick(&[BitmapRecording::On, BitmapRecording::Off]);
        let to = (recording == BitmapRecording::Off).then(|| now.clone());
        set(&name, vec![vec![Segment { from: now.clone(), to }]]);
        let new = NewBitmap::named(name).granularity(granularity).recording(recording);
        return image.add_bitmap(worker, &new).await.map_err(|e| format!("add: {e}"));
    }
    let info = rng.pick(&infos).clone();
    let old = guest.bitmaps.borrow().get(&info.name).and_then(|a| a.first().cloned()).unwrap_or_default();
    let mut new = old.clone();
    let done = match choice {
        1 | 2 => {
            let to = (!info.auto).then(|| now.clone());
            new = vec![Segment { from: now.clone(), to }];
            set(&info.name, vec![new.clone(), old]);
            image.clear_bitmap(worker, &info.name).await
        }
        3 if info.auto => {
            if let Some(last) = new.last_mut() {
                last.to = Some(now.clone());
            }
            set(&info.name, vec![new.clone(), old]);
            image.set_bitmap_recording(worker, &info.name, BitmapRecording::Off).await
        }
        3 => {
            new.extend(fresh());
            set(&info.name, vec![new.clone(), old]);
            image.set_bitmap_recording(worker, &info.name, BitmapRecording::On).await
        }
        4 => {
            let other = rng.pick(&infos).clone();
            let bits = image.bitmap_bits(worker, &other.name).await.map_err(|e| format!("bits: {e}"))?;
            image.merge_bitmap(worker, &info.name, &bits).await
        }
        _ => {
            let gone = image.remove_bitmap(worker, &info.name).await;
            guest.bitmaps.borrow_mut().remove(&info.name);
            return gone.map_err(|e| format!("remove: {e}"));
        }
    };
    set(&info.name, vec![new]);
    done.map_err(|e| format!("operation {choice} on a bitmap: {e}"))
}

/// After a close all bitmaps can be used.
pub(crate) fn none_in_use(setup: &Setup, files: &Files) -> Result<(), String> {
    let world = setup.world(files, 0);
    let worker = world.worker();
    let options = setup.options().access(Access::ReadOnly);
    let image = world.block_on(Image::open_files(&worker, setup.chain(&world), &options)).unwrap();
    let image = image.map_err(|e| e.to_string())?;
    match image.bitmaps().iter().find(|info| info.in_use) {
        Some(info) => Err(format!("bitmap {} is in use after a close", info.name)),
        None => Ok(()),
    }
}
