//! The images on which threads meet: made once, and opened anew in each execution.

use crate::crash::limits::Limits;
use crate::crash::setup::{BASE, Files, NAMES, Origin, SNAPSHOT, Setup};
use crate::schedules::explore;
use std::cell::RefCell;
use std::sync::Mutex;
use zebu_engine::{Image, ZeroMode};
use zebu_sim::{Content, GuestModel, GuestRequest, Space};
use zebu_storage::sabotage::{self, Limit};

/// An image.
#[derive(Debug, Clone)]
pub(crate) struct Ground {
    pub(crate) name: &'static str,
    pub(crate) setup: Setup,
    /// Guest clusters that were given back before: their space is used again.
    discarded: &'static [u64],
    /// Bytes at the end of the disk where the backing file has a hole, though it goes on behind the disk's end.
    hole: u64,
    /// A refcount block does not lie before what it counts, and the second last cluster before that is free.
    has_border: bool,
}

/// Clusters that one refcount block counts, where a refcount has 64 bits and a cluster 512 bytes.
const COUNTED: u64 = 64;
/// Blocks among which one is looked for that has data on both sides.
const BLOCKS: std::ops::Range<u64> = 1..4;

impl Ground {
    /// Small enough for thousands of executions.
    pub(crate) fn is_small(&self) -> bool {
        self.setup.size < 1 << 20
    }

    pub(crate) fn has_snapshot(&self) -> bool {
        self.setup.origin == Origin::Snapshot
    }

    /// Internal snapshots can be taken and deleted.
    pub(crate) fn takes_snapshots(&self) -> bool {
        !self.setup.external_data && self.setup.refcount_bits > 1
    }

    /// The model of what a guest may find at first.
    pub(crate) fn model(&self) -> GuestModel {
        let mut model = self.setup.model();
        let cluster = self.setup.cluster_size;
        for number in self.discarded {
            model.apply(GuestRequest::Discard { offset: number * cluster, len: cluster });
        }
        if self.has_border {
            // A discarded cluster may hold its old content or zeroes.
            model.apply(GuestRequest::Discard { offset: 0, len: self.setup.pattern });
        }
        if self.hole > 0 {
            model.apply(GuestRequest::Zero { offset: self.setup.size - self.hole, len: self.hole });
            model.apply(GuestRequest::Flush);
        }
        model
    }

    pub(crate) fn compresses(&self) -> bool {
        self.setup.gather_memory.is_some()
    }

    /// Name of the snapshot that is there at first.
    pub(crate) fn snapshot(&self) -> Option<&'static str> {
        self.has_snapshot().then_some(SNAPSHOT)
    }
}

/// All of them.
pub(crate) fn all() -> Vec<Ground> {
    let tight = Setup {
        cluster_size: 512,
        cache_size: Some(0),
        slice_size: Some(512),
        gather_memory: Some(4 << 10),
        size: 68 << 10,
        ..Setup::plain()
    };
    let ground = |name, setup: Setup| Ground { name, setup, discarded: &[], hole: 0, has_border: false };
    let used = &[0, 2, 3, 5, 6, 9, 10, 11, 12, 20, 21, 22, 23, 24, 40, 41, 42, 63, 64, 66];
    vec![
        ground("empty", tight.clone()),
        Ground {
            discarded: used,
            ..ground(
                "recycled",
                Setup { origin: Origin::Own, pattern: 48 << 10, direct: 512, ..tight.clone() },
            )
        },
        ground("shared", Setup { origin: Origin::Snapshot, pattern: 40 << 10, ..tight.clone() }),
        Ground {
            discarded: &[1, 2, 3, 4],
            ..ground(
                "shared, 4 KiB",
                Setup {
                    origin: Origin::Snapshot,
                    cluster_size: 4096,
                    size: (4096 * 66) + 512,
                    pattern: 4096 * 65,
                    ..tight.clone()
                },
            )
        },
        ground(
            "overlay of raw",
            Setup {
                origin: Origin::RawBase,
                cluster_size: 4096,
                size: 4096 * 5 + 512,
                pattern: 4096 * 9,
                ..tight.clone()
            },
        ),
        Ground {
            hole: 1536,
            ..ground(
                "overlay of a hole",
                Setup {
                    origin: Origin::RawBase,
                    cluster_size: 4096,
                    size: 4096 * 2 + 1536,
                    pattern: 4096 * 5,
                    ..tight.clone()
                },
            )
        },
        Ground {
            hole: 1536,
            ..ground(
                "overlay of small clusters",
                Setup {
                    origin: Origin::Qcow2Base,
                    cluster_size: 4096,
                    base_cluster: 512,
                    // Room for what is derived from both.
                    cache_size: None,
                    size: 4096 * 2 + 1536,
                    pattern: 4096 * 5,
                    ..tight.clone()
                },
            )
        },
        ground(
            "overlay of qcow2",
            Setup { origin: Origin::Qcow2Base, size: 165 << 10, pattern: 170 << 10, ..tight.clone() },
        ),
        ground(
            "subclusters",
            Setup {
                origin: Origin::RawBase,
                cluster_size: 16384,
                extended_l2: true,
                size: 16384 * 2 + 1536,
                pattern: 16384 * 3,
                ..tight.clone()
            },
        ),
        Ground {
            has_border: true,
            ..ground(
                "before a border",
                Setup {
                    origin: Origin::Own,
                    refcount_bits: 64,
                    // The L1 table takes two clusters.
                    size: (2 << 20) + (64 << 10),
                    pattern: 120 << 10,
                    ..tight.clone()
                },
            )
        },
        ground(
            "preallocated",
            Setup { origin: Origin::Preallocated, refcount_bits: 1, direct: 512, ..tight.clone() },
        ),
        ground(
            "external data",
            Setup {
                origin: Origin::RawBase,
                external_data: true,
                gather_memory: None,
                pattern: 30 << 10,
                ..tight
            },
        ),
    ]
}

/// The files of each image that was made, by its name. Content is shared, not copied.
static MADE: Mutex<Vec<(&'static str, Files)>> = Mutex::new(Vec::new());

/// Makes all images that are not there yet.
pub(crate) fn make(grounds: &[Ground]) {
    let mut made = MADE.lock().unwrap();
    for ground in grounds {
        if made.iter().any(|(name, _)| *name == ground.name) {
            continue;
        }
        let files = std::sync::Arc::new(Mutex::new(Vec::new()));
        let (result, ground) = (files.clone(), ground.clone());
        let name = ground.name;
        explore::once(move || *result.lock().unwrap() = made_of(&ground));
        let files = std::mem::take(&mut *files.lock().unwrap());
        made.push((name, files));
    }
}

fn made_of(ground: &Ground) -> Files {
    sabotage::limit(Limit::WindowBytes, u64::MAX);
    Limits::ORDINARY.set();
    let setup = &ground.setup;
    let mut files = setup.make(1);
    if ground.hole > 0 && setup.origin == Origin::Qcow2Base {
        files = clear_base(setup, &files, ground.hole);
    } else if ground.hole > 0 {
        let (_, base) = files.iter_mut().find(|(name, _)| name == BASE).expect("there is a backing file");
        base.clear(setup.size - ground.hole..setup.size, Space::Hole);
    }
    if ground.has_border {
        let has_data = |border: &u64| {
            (border - 2..border + 4).all(|host| host == *border || guest_at(&files, host).is_some())
        };
        let border = BLOCKS.map(|block| block * COUNTED).find(has_data).expect("a block with data around it");
        let given_back = [guest_at(&files, border - 2).expect("data")];
        files = discard(setup, &files, &given_back);
        move_block(&mut files[0].1, border);
        return files;
    }
    if ground.discarded.is_empty() {
        return files;
    }
    discard(setup, &files, ground.discarded)
}

/// Has the backing file, which goes on behind the end of the disk, read as zero in the last bytes of it.
fn clear_base(setup: &Setup, files: &Files, hole: u64) -> Files {
    let world = setup.world(files, 1);
    let worker = world.worker();
    let base = setup.chain(&world).pop().expect("there is a backing file");
    let cleared = async {
        let image = Image::open_files(&worker, vec![base], &setup.options()).await?;
        image.write_zeroes(&worker, setup.size - hole, hole, ZeroMode::Unmap).await?;
        image.close(&worker).await
    };
    world.block_on(cleared).unwrap().unwrap();
    NAMES.iter().filter_map(|name| Some(((*name).to_owned(), world.content(name)?))).collect()
}

/// The first cluster that is counted by the refcount block that was moved, of the image that has a border.
pub(crate) fn border(files: &Files) -> u64 {
    let top = &files[0].1;
    let is_moved = |block: &u64| word(top, word(top, 48) + block * 8) != block * COUNTED * 512;
    BLOCKS.into_iter().find(is_moved).expect("a block was moved") * COUNTED
}

/// Which guest cluster lies in a host cluster of an image with the smallest clusters.
pub(crate) fn guest_at(files: &Files, host: u64) -> Option<u64> {
    place_of(&files[0].1, host * 512).map(|(guest, _)| guest)
}

/// The guest cluster whose data lies at `offset`, and where its entry is.
fn place_of(top: &Content, offset: u64) -> Option<(u64, u64)> {
    let l1 = word(top, 40);
    let mut entries = (0..4 * 64).filter_map(|guest| {
        let table = word(top, l1 + guest / 64 * 8) & OFFSET;
        let place = table + guest % 64 * 8;
        (table > 0 && word(top, place) & OFFSET == offset).then_some((guest, place))
    });
    entries.next()
}

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

fn word(file: &Content, offset: u64) -> u64 {
    u64::from_be_bytes(file.bytes(offset..offset + 8).try_into().expect("eight bytes"))
}

/// Has a refcount block and the data of a cluster behind it change places.
fn move_block(top: &mut Content, border: u64) {
    let table = word(top, 48) + border / COUNTED * 8;
    let (block, other) = (word(top, table), (border + 2) * 512);
    assert_eq!(block, border * 512, "a refcount block lies before what it counts");
    let (_, place) = place_of(top, other).expect("there is data behind it");
    let (counts, data) = (top.bytes(block..block + 512), top.bytes(other..other + 512));
    let entry = word(top, place) & !OFFSET | block;
    top.write(other, &counts);
    top.write(block, &data);
    top.write(place, &entry.to_be_bytes());
    top.write(table, &other.to_be_bytes());
}

fn discard(setup: &Setup, files: &Files, clusters: &[u64]) -> Files {
    let world = setup.world(files, 1);
    let worker = world.worker();
    let image = setup.open(&world, &worker).unwrap();
    let given_back = async {
        for cluster in clusters {
            image.discard(&worker, cluster * setup.cluster_size, setup.cluster_size).await?;
        }
        image.close(&worker).await
    };
    world.block_on(given_back).unwrap().unwrap();
    NAMES.iter().filter_map(|name| Some(((*name).to_owned(), world.content(name)?))).collect()
}

thread_local! {
    static NEAR: RefCell<Vec<(&'static str, Files)>> = const { RefCell::new(Vec::new()) };
}

/// The files of an image that was made.
pub(crate) fn files(ground: &Ground) -> Files {
    NEAR.with_borrow_mut(|near| {
        if near.is_empty() {
            near.clone_from(&MADE.lock().unwrap());
        }
        near.iter().find(|(name, _)| *name == ground.name).expect("the image was made").1.clone()
    })
}
