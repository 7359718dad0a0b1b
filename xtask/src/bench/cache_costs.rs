//! What the mapping cache costs: larger caches, smaller slices, long chains, several queues, and the memory that it
//! really takes.
//!
//! These use `bench` and its regular steps: `bench` of QEMU has no random mode. Where every read should miss, that is
//! what is wanted: each slice is needed once before any is needed again.

use super::lab::{Lab, remove};
use super::load::{Load, Program, SMALL, scattering_step};
use super::mapping_images::{Data, Layout, allocated, chain, copy_sparse, raw, remove_chain};
use super::opened::Opened;
use super::peers::{ENGINES, Peer, row};
use crate::Outcome;
use crate::ab::Side;
use crate::mount::Kind;
use std::path::{Path, PathBuf};

const DEPTH: u64 = 32;

fn reads(size: u64, count: u64, depth: u64) -> Load {
    Load { block: SMALL, step: scattering_step(size, SMALL), count, depth, write: false }
}

fn compare<'a>(lab: &'a Lab, name: &str, load: Load, a: Opened<'a>, b: Opened<'a>) -> Outcome {
    lab.compare(name, [a.benched(lab, load), b.benched(lab, load)])
}

/// Larger caches, and smaller slices.
pub(super) fn caches(lab: &Lab) -> Outcome {
    larger_caches(lab)?;
    smaller_slices(lab)
}

/// What a miss costs does not depend on the size of the cache: the slices of a disk of 4 TiB with 64 KiB clusters don't
/// fit into any of these.
fn larger_caches(lab: &Lab) -> Outcome {
    let (size, budgets) = (1 << 42, [1u64, 32, 256]);
    let image = allocated(lab, &lab.dir, size, 64 << 10, Layout::Shuffled, Data::Holes)?;
    // Each slice is asked for once, or again so late that none of the caches has it.
    let load = reads(size, 120_000, DEPTH);
    for mib in &budgets[1..] {
        let slices = |label, mib: u64| {
            // The tables above the slices are part of the budget.
            Opened::zebu(label, &image, (mib << 20) + size / (512 << 20) * 8 + (64 << 10)).without_index()
        };
        let name = format!("every read misses: {mib} MiB beside 1 MiB");
        compare(lab, &name, load, slices("larger", *mib), slices("1 MiB", 1))?;
    }
    remove(&image)
}

/// Everything fits: slices of 4 KiB beside whole tables.
fn smaller_slices(lab: &Lab) -> Outcome {
    let size = 16 << 30;
    let image = allocated(lab, &lab.dir, size, 64 << 10, Layout::Shuffled, Data::Holes)?;
    let load = reads(size, 1_000_000, DEPTH);
    let of = |label, slice| Opened::zebu(label, &image, 64 << 20).with_slices_of(slice).without_index();
    compare(
        lab,
        "all cached: 4 KiB slices beside whole tables",
        load,
        of("4 KiB", 4096),
        of("64 KiB", 65536),
    )?;
    remove(&image)
}

/// A chain, and how often it is read beside an engine that may look into every image for each read.
struct Chain {
    images: u64,
    label: &'static str,
    /// By both sides; their first reads, which load tables of every image, are among them.
    reads: u64,
    /// Whether the other Rust engines read it, too.
    is_short: bool,
}

const CHAINS: [Chain; 3] = [
    Chain { images: 10, label: "zebu, 10 images", reads: 300_000, is_short: true },
    Chain { images: 100, label: "zebu, 100 images", reads: 60_000, is_short: false },
    Chain { images: 500, label: "zebu, 500 images", reads: 3_000, is_short: false },
];

/// Chains of images that each hold a random part of the data.
pub(super) fn chains(lab: &Lab) -> Outcome {
    let (size, many) = lab.sized((1 << 30, 200_000), (4 << 30, 300_000));
    let cluster = 64 << 10;
    let side = |program, label: &'static str, file: &PathBuf, count: u64| {
        let (file, load) = (file.clone(), reads(size, count, DEPTH));
        let run = move || {
            let mut opened = Opened::zebu(label, &file, 32 << 20);
            opened.program = program;
            let more: &[&str] = if program == Program::Zebu { &["--allow-refs", "all"] } else { &[] };
            load.timed(opened.with(more).bench(lab, load))
        };
        Side { label: format!("{label}, {count} reads"), run: Box::new(run) }
    };
    let one = chain(lab, &lab.dir, size, cluster, 1)?;
    for Chain { images, label, reads: few, is_short } in &CHAINS[..lab.sized(1, CHAINS.len())] {
        let top = chain(lab, &lab.dir, size, cluster, *images)?;
        let name = format!("reads through a chain of {images}");
        let few = lab.sized(many / 10, *few);
        let sides =
            [side(Program::Zebu, label, &top, many), side(Program::Zebu, "zebu, 1 image", &one, many)];
        lab.compare(&format!("{name}, beside one image"), sides)?;
        let mut others = vec![(row(&name, Peer::Qemu), side(Program::Qemu, "QEMU", &top, few))];
        if *is_short {
            others.extend(ENGINES.map(|peer| {
                let side = lab.peers.side(peer, reads(size, few, DEPTH), &top);
                (row(&name, peer), Side { label: format!("{}, {few} reads", side.label), ..side })
            }));
        }
        lab.compare_each(side(Program::Zebu, label, &top, few), others)?;
        remove_chain(&lab.dir, *images)?;
    }
    remove_chain(&lab.dir, 1)
}

/// Two queues on one image in memory, everything cached; and on a raw file, which says what the machine's two cores and
/// its kernel can do.
pub(super) fn queues(lab: &Lab) -> Outcome {
    let size = 1 << 30;
    let file = Path::new("/dev/shm").join(format!("zebu-bench-{}", std::process::id()));
    let load = reads(size, lab.sized(400_000, 2_000_000), DEPTH);
    for (layout, format, name) in [
        (Layout::Sequential, "qcow2", "all cached (extents)"),
        (Layout::Shuffled, "qcow2", "all cached (slices)"),
        (Layout::Sequential, "raw", "a raw file"),
    ] {
        let made = match format {
            "raw" => raw(lab, size, Data::Holes)?,
            _ => allocated(lab, &lab.dir, size, 64 << 10, layout, Data::Holes)?,
        };
        copy_sparse(&made, &file)?;
        let of = |label: &'static str, queues: &'static str| {
            let file = &file;
            let run = move || {
                let mut command = lab.zebu();
                command.args(["bench", "-f", format, "-d", "32", "-s", "4k", "--random", "--queues", queues]);
                command.args(["-c", &load.count.to_string()]).arg(file);
                load.timed(command)
            };
            Side { label: label.to_owned(), run: Box::new(run) }
        };
        let sides = [of("zebu, 2 queues", "2"), of("zebu, 1 queue", "1")];
        let outcome = lab.compare(&format!("in memory, {name}: two queues beside one"), sides);
        remove(&file)?;
        remove(&made)?;
        outcome?;
    }
    Ok(())
}

/// Memory of the process beside that for a small disk with the least cache: what the mapping really takes.
pub(super) fn memory(lab: &Lab) -> Outcome {
    let xfs = lab.file_system(Kind::Xfs, 8 << 30)?;
    let small = allocated(lab, &xfs.path(), 64 << 20, 64 << 10, Layout::Sequential, Data::Holes)?;
    let count = lab.sized(60_000, 400_000);
    for (size, cluster, budget, name) in [
        (16u64 << 30, 64u64 << 10, 1u64 << 20, "16 GiB, 1 MiB of cache"),
        (2 << 40, 2 << 20, 4 << 20, "2 TiB, 4 MiB of cache"),
        (64 << 40, 2 << 20, 32 << 20, "64 TiB, 32 MiB of cache"),
    ] {
        let image = allocated(lab, &xfs.path(), size, cluster, Layout::Sequential, Data::Holes)?;
        let bare = Opened::zebu("64 MiB disk", &small, 64 << 10);
        let large = Opened::zebu("large disk", &image, budget);
        // Without extents slices fill the budget; with them a disk in order hardly needs any.
        let slices = large.clone().without_index();
        for (opened, write, row) in
            [(&slices, false, ""), (&slices, true, ", writes"), (&large, true, ", writes, with extents")]
        {
            // A write sets an extent of 1 MiB aside, of which the file system has so many.
            let count = if write { count.min(6_000) } else { count };
            let of = |size| Load { write, ..reads(size, count, DEPTH) };
            let sides = [opened.clone().benched(lab, of(size)), bare.clone().benched(lab, of(64 << 20))];
            lab.compare(&format!("memory: {name}{row}, beside a disk of 64 MiB"), sides)?;
        }
        remove(&image)?;
    }
    remove(&small)
}
