//! An image that is made in a file of the caller's: whatever a crash leaves is no image, or the whole one.

use crate::crash::judge::read_all;
use crate::crash::setup::TOP;
use zebu_engine::check::{CheckOptions, check_file};
use zebu_engine::jobs::UnfinishedImage;
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{CreateOptions, Durability, Format, Image, OpenOptions, OpenedFile};
use zebu_sim::{Content, CrashOptions, SimFileConfig, SimRng, SimWorld, Tear};

const SIZE: u64 = 256 << 10;
const CLUSTER: u64 = 4096;

#[test]
pub(crate) fn an_image_is_none_before_it_is_whole() {
    for seed in 0..4 {
        let mut rng = SimRng::new(seed);
        let world = SimWorld::new(seed);
        let worker = world.worker();
        let file = world.file(TOP, Content::new(), SimFileConfig::default());
        let (made, disk) = world
            .block_on(async {
                let create = CreateOptions::default().size(Some(SIZE)).cluster_size(CLUSTER);
                let open = OpenOptions::default();
                let made = UnfinishedImage::create(&worker, file, &create, &open).await.unwrap();
                let disk = fill(&worker, made.image(), &mut rng).await;
                (made, disk)
            })
            .unwrap();
        let mut whole = 0;
        let finished = world.block_on_watched(made.finish(&worker), |_| {
            whole += judge_states(&world, rng.next_u64(), &disk);
        });
        finished.unwrap().unwrap();
        whole += judge_states(&world, rng.next_u64(), &disk);
        assert!(whole > 0, "no state with the magic number was judged: the test shows nothing");
    }
}

/// Writes plain and compressed clusters; what the disk holds then.
async fn fill(worker: &Worker, image: &Image, rng: &mut SimRng) -> Vec<u8> {
    let mut disk = vec![0; SIZE as usize];
    for byte in 1..30 {
        let at = (rng.below(SIZE / CLUSTER) * CLUSTER) as usize;
        let place = &mut disk[at..at + CLUSTER as usize];
        place.fill(byte);
        let bufs = IoBuf::copy_of(place).into();
        let (result, _) = if rng.chance(1, 2) {
            image.write(worker, at as u64, bufs, Durability::Volatile).await
        } else {
            image.write_compressed(worker, at as u64, bufs, Durability::Volatile).await
        };
        result.unwrap();
    }
    disk
}

/// Judges what a crash may leave now; how many of the states have the magic number.
fn judge_states(world: &SimWorld, seed: u64, disk: &[u8]) -> u64 {
    let mut whole = 0;
    for state in world.crash_states(&CrashOptions { max_states: 12, tear: Tear::Sector, seed }) {
        let content = state.file(TOP).unwrap().clone();
        if content.len() < 4 || content.bytes(0..4) != *b"QFI\xfb" {
            continue;
        }
        whole += 1;
        let left = SimWorld::new(0);
        let worker = left.worker();
        let file = left.file(TOP, content, SimFileConfig::default());
        left.block_on(async {
            let report = check_file(&worker, &file, &CheckOptions::default()).await;
            let report = report.unwrap_or_else(|e| panic!("{state}: check: {e}"));
            let bad = report.counts.corruptions + report.counts.check_errors;
            assert_eq!(bad, 0, "{state}: check: {:?}", report.counts);
            let chain = vec![OpenedFile::new(file, Format::Qcow2)];
            let image = Image::open_files(&worker, chain, &OpenOptions::default()).await;
            let image = image.unwrap_or_else(|e| panic!("{state}: open: {e}"));
            let found = read_all(&worker, &image, SIZE).await.unwrap_or_else(|e| panic!("{state}: {e}"));
            let differs = found.iter().zip(disk).position(|(found, wanted)| found != wanted);
            assert_eq!(
                differs, None,
                "{state}: with the magic number, the disk is not the one that was made"
            );
        })
        .unwrap();
    }
    whole
}
