//! Power failures while an image is put onto another backing file, or committed to its own.
//!
//! In every state that a crash leaves, the image shows what it showed before, on the backing file that its header
//! names; it and its backing file are free of errors but leaks.

use crate::crash::judge::read_all;
use crate::crash::setup::Files;
use zebu_engine::check::{CheckOptions, Severity, check_file};
use zebu_engine::jobs::{CommitOptions, RebaseOptions, TargetClusters, commit_images, rebase};
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{
    Access, BackingReference, CreateOptions, Durability, Format, Image, OpenOptions, OpenedFile, ZeroMode,
};
use zebu_sim::{Content, CrashOptions, Seeds, SimFileConfig, SimRng, SimWorld, Tear};

const TOP: &str = "top";
const OLD: &str = "old";
const NEW: &str = "a-directory/a-longer-name-than-the-old-one-had.qcow2";

/// The operation on the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Rebase(TargetClusters),
    Flatten,
    Commit,
}

#[derive(Debug)]
struct Case {
    operation: Operation,
    top: CreateOptions,
    /// Formats and sizes of the old and the new backing file.
    below: [(Format, u64); 2],
    direct: u32,
}

impl Case {
    fn random(rng: &mut SimRng) -> Self {
        let version = if rng.chance(1, 3) { 2 } else { 3 };
        let extended_l2 = version == 3 && rng.chance(1, 4);
        let cluster_size = if extended_l2 { 16384 } else { *rng.pick(&[512, 1024, 4096, 4096]) };
        let mut size = || rng.between(3 * cluster_size, 40 * cluster_size.max(2048)) & !511;
        let (top_size, sizes) = (size(), [size(), size()]);
        let mut format = || *rng.pick(&[Format::Raw, Format::Qcow2]);
        let below = [(format(), sizes[0]), (format(), sizes[1])];
        let operation = *rng.pick(&[
            Operation::Rebase(TargetClusters::Plain),
            Operation::Rebase(TargetClusters::Compressed),
            Operation::Flatten,
            Operation::Commit,
            Operation::Commit,
        ]);
        let top = CreateOptions::default()
            .size(Some(top_size))
            .version(version)
            .cluster_size(cluster_size)
            .extended_l2(extended_l2)
            .backing(Some((OLD.to_owned(), below[0].0)));
        Self { operation, top, below, direct: *rng.pick(&[0, 0, 512]) }
    }

    fn config(&self, name: &str) -> SimFileConfig {
        if name == TOP && self.direct > 0 {
            SimFileConfig::direct(self.direct)
        } else {
            SimFileConfig::default()
        }
    }

    fn world(&self, files: &Files, seed: u64) -> SimWorld {
        let world = SimWorld::new(seed);
        for (name, content) in files {
            world.file(name, content.clone(), self.config(name));
        }
        world
    }

    fn file(&self, world: &SimWorld, name: &str) -> OpenedFile {
        let format = match name {
            OLD => self.below[0].0,
            NEW => self.below[1].0,
            _ => Format::Qcow2,
        };
        OpenedFile::new(world.open(name, self.config(name)).unwrap(), format)
    }

    async fn open(&self, world: &SimWorld, worker: &Worker, names: &[&str], access: Access) -> Image {
        let chain = names.iter().map(|name| self.file(world, name)).collect();
        let options = OpenOptions::default().access(access).slice_size(Some(512));
        Image::open_files(worker, chain, &options).await.unwrap()
    }

    /// The files at first.
    fn make(&self, rng: &mut SimRng) -> Files {
        let world = SimWorld::new(0);
        let worker = world.worker();
        for (name, (format, size)) in [OLD, NEW].into_iter().zip(self.below) {
            let content = if format == Format::Raw { Content::hole(size) } else { Content::new() };
            let file = world.file(name, content, SimFileConfig::default());
            if format == Format::Qcow2 {
                let options = CreateOptions::default().size(Some(size)).cluster_size(1024);
                world.block_on(Image::create_in(&worker, &file, &options)).unwrap().unwrap();
            }
            world.block_on(async { self.fill(&world, &worker, &[name], rng).await }).unwrap();
        }
        let top = world.file(TOP, Content::new(), SimFileConfig::default());
        world.block_on(Image::create_in(&worker, &top, &self.top)).unwrap().unwrap();
        world.block_on(async { self.fill(&world, &worker, &[TOP, OLD], rng).await }).unwrap();
        [TOP, OLD, NEW].map(|name| (name.to_owned(), world.content(name).unwrap())).to_vec()
    }

    async fn fill(&self, world: &SimWorld, worker: &Worker, names: &[&str], rng: &mut SimRng) {
        let image = self.open(world, worker, names, Access::ReadWrite).await;
        let size = image.virtual_size();
        for _ in 0..rng.between(2, 10) {
            let start = rng.below(size) & !511;
            let len = rng.between(512, 12 * 1024).min(size - start);
            if rng.chance(1, 4) {
                image.write_zeroes(worker, start, len, ZeroMode::Unmap).await.unwrap();
            } else {
                let bytes = vec![rng.between(1, 4) as u8; len as usize];
                let (result, _) =
                    image.write(worker, start, IoBuf::copy_of(&bytes).into(), Durability::Volatile).await;
                result.unwrap();
            }
        }
        image.close(worker).await.unwrap();
    }

    async fn operate(&self, world: &SimWorld, worker: &Worker) -> zebu_engine::Result<()> {
        if self.operation == Operation::Commit {
            let top = self.open(world, worker, &[TOP], Access::ReadWrite).await;
            let base = self.open(world, worker, &[OLD], Access::ReadWrite).await;
            commit_images(worker, &top, &base, &CommitOptions::default()).await?;
            top.close(worker).await?;
            return base.close(worker).await;
        }
        let top = self.open(world, worker, &[TOP, OLD], Access::ReadWrite).await;
        let new = self.open(world, worker, &[NEW], Access::ReadOnly).await;
        let reference = BackingReference::new(NEW, self.below[1].0.name());
        let (onto, clusters) = match self.operation {
            Operation::Rebase(clusters) => (Some((&new, reference)), clusters),
            _ => (None, TargetClusters::Plain),
        };
        rebase(worker, &top, onto, &RebaseOptions::default().clusters(clusters)).await?;
        top.close(worker).await
    }

    /// Judges a state; gives the name of the backing file.
    async fn judge(&self, world: &SimWorld, before: &[u8]) -> Result<Option<String>, String> {
        let worker = world.worker();
        for name in [TOP, OLD, NEW] {
            let opened = self.file(world, name);
            if opened.format == Format::Raw {
                continue;
            }
            let report = check_file(&worker, &opened.file, &CheckOptions::default())
                .await
                .map_err(|e| format!("check {name}: {e}"))?;
            if let Some(bad) = report.findings.iter().find(|f| f.kind.severity() != Severity::Leak) {
                return Err(format!("check {name}: {bad}"));
            }
        }
        let alone = self.open(world, &worker, &[TOP], Access::ReadOnly).await;
        let backing = alone.info().unwrap().backing_file;
        let chain: Vec<&str> = std::iter::once(TOP).chain(backing.as_deref()).collect();
        if chain.len() > 1 && ![OLD, NEW].contains(&chain[1]) {
            return Err(format!("the backing file is {backing:?}"));
        }
        let image = self.open(world, &worker, &chain, Access::ReadOnly).await;
        let shown = read_all(&worker, &image, image.virtual_size()).await?;
        if shown != before {
            let at = shown.iter().zip(before).position(|(a, b)| a != b);
            return Err(format!("on {backing:?} the disk differs at {at:?}"));
        }
        Ok(backing)
    }
}

fn live(seed: u64) -> Result<u64, String> {
    let mut rng = SimRng::new(seed ^ 0x6368_6169);
    let case = Case::random(&mut rng);
    let files = case.make(&mut rng);
    let before = {
        let world = case.world(&files, 0);
        world
            .block_on(async {
                let worker = world.worker();
                let image = case.open(&world, &worker, &[TOP, OLD], Access::ReadOnly).await;
                read_all(&worker, &image, image.virtual_size()).await
            })
            .map_err(|s| s.to_string())??
    };
    let world = case.world(&files, rng.next_u64());
    let worker = world.worker();
    let (mut states, mut blame) = (0, None);
    let ended = world.block_on_watched(case.operate(&world, &worker), |_| {
        if blame.is_none() && rng.chance(1, 4) {
            let tear = if case.direct == 4096 { Tear::Block } else { Tear::Sector };
            let options = CrashOptions { max_states: 4, tear, seed: rng.next_u64() };
            for state in world.crash_states(&options) {
                states += 1;
                let left = case.world(&state.files().to_vec(), 0);
                let verdict = left.block_on(case.judge(&left, &before)).map_err(|s| s.to_string());
                if let Err(what) = verdict.and_then(|verdict| verdict) {
                    blame = Some(format!("crash at {:?}, {state}: {what}", world.now()));
                    return;
                }
            }
        }
    });
    if let Some(what) = blame {
        return Err(format!("{what}\n{case:?}"));
    }
    ended.map_err(|stuck| stuck.to_string())?.map_err(|e| format!("{e}\n{case:?}"))?;
    let end: Files = files.iter().map(|(name, _)| (name.clone(), world.content(name).unwrap())).collect();
    let left = case.world(&end, 0);
    let backing = left
        .block_on(case.judge(&left, &before))
        .map_err(|s| s.to_string())?
        .map_err(|e| format!("at the end: {e}\n{case:?}"))?;
    let wanted = match case.operation {
        Operation::Rebase(_) => Some(NEW),
        Operation::Flatten => None,
        Operation::Commit => Some(OLD),
    };
    if backing.as_deref() != wanted {
        return Err(format!("the backing file is {backing:?} in the end\n{case:?}"));
    }
    Ok(states)
}

#[test]
fn an_image_shows_the_same_whenever_rebase_and_commit_are_cut_off() {
    let mut states = 0;
    Seeds::new(60).run(|seed| states += live(seed).unwrap_or_else(|e| panic!("seed {seed}: {e}")));
    eprintln!("{states} states");
}
