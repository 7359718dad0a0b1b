//! Reads whose I/O takes effect late, beside snapshots that are taken, applied and deleted: no sector shows what its cluster
//! has not held since the read began.

use crate::crash::setup::Setup;
use crate::faults::bench::{Bench, Outcome, begin};
use zebu_engine::storage::IoBuf;
use zebu_engine::{Durability, ErrorKind, NewSnapshot, SnapshotRef, ZeroMode};
use zebu_sim::{HoldId, OpClass, OpFilter, Seeds, SimRng};
use zebu_storage::sabotage::{Fault, under};

const CLUSTER: u64 = 4096;
const CLUSTERS: u64 = 24;

fn bytes(tag: u32, len: u64) -> Vec<u8> {
    tag.to_le_bytes().repeat(len as usize / 4)
}

struct Read {
    first: u64,
    count: u64,
    since: Vec<usize>,
    outcome: Outcome<Vec<u8>>,
}

fn tags(history: &[Vec<u32>], read: &Read, content: &[u8]) -> Result<(), String> {
    for (at, sector) in content.chunks(512).enumerate() {
        let index = at as u64 * 512 / CLUSTER;
        let cluster = (read.first + index) as usize;
        let allowed = &history[cluster][read.since[index as usize]..];
        let tag = u32::from_le_bytes(sector[..4].try_into().unwrap());
        if !allowed.contains(&tag) || sector != bytes(tag, 512) {
            return Err(format!("cluster {cluster} sector {at} shows {tag}, allowed {allowed:?}"));
        }
    }
    Ok(())
}

fn start_read(bench: &Bench, image: &zebu_engine::Image, rng: &mut SimRng, since: &[usize]) -> Read {
    let first = rng.below(CLUSTERS);
    let count = 1 + rng.below((CLUSTERS - first).min(6));
    let since = since[first as usize..(first + count) as usize].to_vec();
    let (image, on) = (image.clone(), bench.workers[0].clone());
    let outcome = begin(&bench.workers[0], async move {
        let buf = IoBuf::zeroed((count * CLUSTER) as usize);
        let (result, bufs) = image.read(&on, first * CLUSTER, buf.into()).await;
        result.unwrap();
        let mut content = vec![0; bufs.len()];
        bufs.copy_to(0, &mut content);
        content
    });
    Read { first, count, since, outcome }
}

fn run(seed: u64) -> Result<(u64, u64), String> {
    zebu_storage::sabotage::limit(zebu_storage::sabotage::Limit::WindowBytes, CLUSTER);
    let mut rng = SimRng::new(seed);
    let setup = Setup {
        size: CLUSTERS * CLUSTER,
        workers: 3,
        slice_size: Some(512),
        gather_memory: Some(8 << 10),
        ..Setup::plain()
    };
    let bench = Bench::new(&setup, seed);
    let image = bench.guest.image.clone();
    let mut history: Vec<Vec<u32>> = vec![vec![0]; CLUSTERS as usize];
    let mut snapshots: Vec<(String, Vec<u32>)> = Vec::new();
    let mut reads: Vec<Read> = Vec::new();
    let mut hold: Option<HoldId> = None;
    let (mut tag, mut busy, mut done) = (0u32, 0, 0);
    for round in 0..100u64 {
        for _ in 0..rng.below(3) {
            if reads.len() < 4 {
                let since: Vec<usize> = history.iter().map(|tags| tags.len() - 1).collect();
                reads.push(start_read(&bench, &image, &mut rng, &since));
            }
            for _ in 0..rng.below(8) {
                bench.world.step();
            }
        }
        if hold.is_none() && rng.chance(1, 2) {
            hold = Some(bench.world.hold(OpFilter::of(OpClass::Read).by_worker(bench.workers[0].id())));
        } else if rng.chance(1, 3)
            && let Some(held) = hold.take()
        {
            bench.world.release(held);
        }
        let before: Vec<usize> = history.iter().map(|tags| tags.len() - 1).collect();
        let by = bench.workers[1 + rng.below(2) as usize].clone();
        let on = by.clone();
        let (first, theirs) = (rng.below(CLUSTERS), image.clone());
        let count = 1 + rng.below((CLUSTERS - first).min(4));
        let (offset, len) = (first * CLUSTER, count * CLUSTER);
        let what = rng.below(10);
        tag += 1;
        let value = if what == 3 { 0 } else { tag };
        let picked = (!snapshots.is_empty()).then(|| rng.below(snapshots.len() as u64) as usize);
        let named = picked.map(|picked| snapshots[picked].0.clone());
        if what <= 3 {
            for c in first..first + count {
                history[c as usize].push(value);
            }
        }
        if let (6 | 7, Some(picked)) = (what, picked) {
            for (c, tag) in snapshots[picked].1.iter().enumerate() {
                history[c].push(*tag);
            }
        }
        let name = format!("s{round}");
        let new = NewSnapshot::named(name.clone());
        let operation = begin(&by, async move {
            let data = IoBuf::copy_of(&bytes(value, len)).into();
            let one = named.map(SnapshotRef::Name);
            match (what, one) {
                (0 | 1, _) => theirs.write(&on, offset, data, Durability::Volatile).await.0,
                (2, _) => theirs.write_compressed(&on, offset, data, Durability::Volatile).await.0,
                (3, _) => theirs.write_zeroes(&on, offset, len, ZeroMode::Unmap).await,
                (4, _) => theirs.flush(&on).await,
                (5, _) => theirs.create_snapshot(&on, new).await.map(drop),
                (6 | 7, Some(one)) => theirs.apply_snapshot(&on, &one).await,
                (8 | 9, Some(one)) => theirs.delete_snapshot(&on, &one).await,
                _ => Ok(()),
            }
        });
        for _ in 0..rng.below(4) {
            for _ in 0..rng.below(100) {
                if operation.borrow().is_none() {
                    bench.world.step();
                }
            }
            if reads.len() < 6 && operation.borrow().is_none() {
                reads.push(start_read(&bench, &image, &mut rng, &before));
            }
        }
        if bench.world.run_until(|| operation.borrow().is_some()).is_err() {
            if let Some(held) = hold.take() {
                bench.world.release(held);
            }
            bench
                .world
                .run_until(|| operation.borrow().is_some())
                .map_err(|e| format!("round {round} {what}: {e}"))?;
        }
        match operation.borrow_mut().take().unwrap() {
            Ok(()) if what == 5 => {
                let now = history.iter().map(|tags| *tags.last().unwrap()).collect();
                snapshots.push((name, now));
            }
            Ok(()) => {
                done += u64::from(what > 5 && picked.is_some());
                if let (8 | 9, Some(picked)) = (what, picked) {
                    snapshots.remove(picked);
                }
            }
            Err(error) if error.kind() == ErrorKind::Busy && what >= 4 => {
                busy += 1;
                if let (6 | 7, Some(_)) = (what, picked) {
                    for tags in &mut history {
                        let before = tags[tags.len() - 2];
                        tags.push(before);
                    }
                }
            }
            Err(error) => return Err(format!("round {round} {what}: {error}")),
        }
        let mut left = Vec::new();
        for read in reads {
            match read.outcome.borrow_mut().take() {
                Some(content) => {
                    tags(&history, &read, &content).map_err(|e| format!("round {round}: {e}"))?;
                }
                None => {
                    left.push(Read {
                        outcome: read.outcome.clone(),
                        first: read.first,
                        count: read.count,
                        since: read.since.clone(),
                    });
                }
            }
        }
        reads = left;
        if rng.chance(1, 4) {
            let whole = crate::crash::judge::read_all(&bench.workers[2], &image, CLUSTERS * CLUSTER);
            let content = bench.world.block_on(whole).map_err(|e| e.to_string())??;
            let now = history.iter().map(|tags| tags.len() - 1).collect();
            let read = Read { first: 0, count: CLUSTERS, since: now, outcome: Outcome::default() };
            tags(&history, &read, &content).map_err(|e| format!("round {round}, the whole: {e}"))?;
        }
    }
    if let Some(held) = hold.take() {
        bench.world.release(held);
    }
    bench
        .world
        .run_until(|| reads.iter().all(|read| read.outcome.borrow().is_some()))
        .map_err(|e| e.to_string())?;
    for read in &reads {
        let content = read.outcome.borrow_mut().take().unwrap();
        tags(&history, read, &content).map_err(|e| format!("at the end: {e}"))?;
    }
    bench.world.block_on(image.close(&bench.workers[1])).unwrap().map_err(|e| format!("close: {e}"))?;
    let files = bench.files();
    let world = setup.world(&files, 0);
    let worker = world.worker();
    let top = world.open(crate::crash::setup::TOP, zebu_sim::SimFileConfig::default()).unwrap();
    let options = zebu_engine::check::CheckOptions::default();
    let report = world
        .block_on(zebu_engine::check::check_file(&worker, &top, &options))
        .unwrap()
        .map_err(|e| e.to_string())?;
    if report.counts.corruptions + report.counts.check_errors > 0 {
        return Err(format!("{:?} {:?}", report.counts, report.findings.first().map(ToString::to_string)));
    }
    Ok((busy, done))
}

#[test]
fn late_reads_show_what_was_there() {
    Seeds::new(40).run(|seed| {
        if let Err(error) = run(seed) {
            panic!("seed {seed}: {error}");
        }
    });
}

#[test]
fn late_reads_find_what_is_wrong() {
    for (fault, most) in
        [(Fault::KeepMapping, 4), (Fault::KeepInflated, 20), (Fault::ReleaseWithoutGrace, 100)]
    {
        let is_caught = |seed| {
            let run = || under(Some(fault), || run(seed));
            std::panic::catch_unwind(run).map_or(true, |result| result.0.is_err())
        };
        assert!((0..most).any(is_caught), "{fault:?} is not seen within {most} seeds");
    }
}
