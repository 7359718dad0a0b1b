//! A write that a crash undid stays undone when the disk grows.

use crate::crash::judge::read_all;
use crate::crash::setup::{DATA, Files, NAMES, Setup};
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{Durability, Image, Preallocation, Shrink};
use zebu_sim::{CrashOptions, SimWorld, Tear};

/// Where the last cluster of the disk begins; the disk ends within it.
const LAST: u64 = 3 * 4096;
/// The bytes written there, as the disk knew them for a moment.
const WRITTEN: [u8; 512] = [0xa5; 512];

fn setup() -> Setup {
    Setup { external_data: true, raw_data: true, size: LAST + 1024, ..Setup::plain() }
}

fn on<T>(world: &SimWorld, work: impl AsyncFnOnce(&Worker, Image) -> T) -> T {
    let worker = world.worker();
    let image = setup().open(world, &worker).unwrap();
    world.block_on(work(&worker, image)).unwrap()
}

/// Files in which the bytes of a write have reached the raw data file, and its link has not reached the image.
fn undone() -> Files {
    let setup = setup();
    let world = setup.world(&setup.make(0), 0);
    on(&world, async |worker, image| {
        image.write(worker, LAST, IoBuf::copy_of(&WRITTEN).into(), Durability::Volatile).await.0.unwrap();
        let options = CrashOptions { max_states: 64, tear: Tear::Sector, seed: 0 };
        world.crash_states(&options).find_map(|state| {
            let has_bytes = state.file(DATA)?.bytes(LAST..LAST + 512) == WRITTEN;
            (has_bytes && disk(state.files()).iter().all(|byte| *byte == 0)).then(|| state.files().to_vec())
        })
    })
    .expect("a crash that undoes the write and leaves its bytes")
}

/// The content of the disk of these files.
fn disk(files: &[(String, zebu_sim::Content)]) -> Vec<u8> {
    let world = setup().world(&files.to_vec(), 0);
    on(&world, async |worker, image| read_all(worker, &image, image.virtual_size()).await.unwrap())
}

#[test]
pub(crate) fn a_growing_disk_does_not_show_a_write_that_a_crash_undid() {
    for preallocation in
        [Preallocation::Off, Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full]
    {
        let world = setup().world(&undone(), 0);
        on(&world, async |worker, image| {
            image.resize(worker, LAST + 8192, Shrink::Refuse, preallocation).await.unwrap();
            image.close(worker).await.unwrap();
        });
        let files: Files =
            NAMES.iter().filter_map(|name| Some(((*name).to_owned(), world.content(name)?))).collect();
        let grown = disk(&files);
        assert_eq!(grown.len() as u64, LAST + 8192);
        let shown = grown.iter().position(|byte| *byte != 0);
        assert_eq!(shown, None, "{preallocation:?}: the disk shows what it did not hold");
    }
}
