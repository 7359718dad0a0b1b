//! A conversion within the kernel of an image that is written meanwhile.

use crate::crash::judge::read_all;
use crate::crash::setup::{Origin, Setup};
use crate::faults::bench::Bench;
use std::cell::RefCell;
use std::rc::Rc;
use zebu_engine::jobs::{ConvertOptions, ConvertReport, ConvertTarget, CopyMode, TargetContent, convert};
use zebu_engine::{Access, Durability, Format, Image, OpenOptions, OpenedFile};
use zebu_sim::{Content, OpClass, OpFilter, SimFileConfig};

const CLUSTER: u64 = 4096;
const TARGET: &str = "target";
/// Clusters of the source that are discarded while they are copied.
const DISCARDED: u64 = 16;

/// A raw target as long as the disk.
fn target(bench: &Bench) -> Image {
    let len = bench.guest.image.virtual_size();
    bench.world.file(TARGET, Content::hole(len), SimFileConfig::default());
    let file = bench.world.open(TARGET, SimFileConfig::default()).unwrap();
    let options = OpenOptions::default().access(Access::ReadWrite);
    let opened = Image::open_files(&bench.workers[0], vec![OpenedFile::new(file, Format::Raw)], &options);
    bench.world.block_on(opened).unwrap().unwrap()
}

/// Ranges are looked up and queued, one of them is under way, and their clusters are given up and written for others.
#[test]
pub(crate) fn what_the_kernel_moves_is_the_sources_own() {
    let pattern = 2 * DISCARDED * CLUSTER;
    let bench = Bench::new(&Setup { origin: Origin::Own, pattern, ..Setup::plain() }, 21);
    let (guest, worker) = (bench.guest.clone(), bench.workers[1].clone());
    let size = guest.image.virtual_size();
    let before = bench.world.block_on(read_all(&worker, &guest.image, size)).unwrap().unwrap();
    let (source, target, on) = (guest.image.clone(), target(&bench), bench.workers[0].clone());
    let report: Rc<RefCell<Option<ConvertReport>>> = Rc::default();
    let seen = report.clone();
    let hold = bench.world.hold(OpFilter::of(OpClass::CopyRange).on_file(TARGET));
    drop(bench.workers[0].spawn(async move {
        let options = ConvertOptions::default().copy(CopyMode::Range).requests(1);
        let target = ConvertTarget::Existing { image: target, content: TargetContent::Unknown };
        *seen.borrow_mut() = Some(convert(&on, &[source], target, &options).await.unwrap());
    }));
    bench.world.run_until_idle().unwrap();
    assert_eq!(bench.world.held(hold).len(), 1, "one range is under way");
    let changes = bench.workers[1].spawn(async move {
        guest.discard(&worker, 0, DISCARDED * CLUSTER).await;
        guest.flush(&worker).await;
        for cluster in 0..2 * DISCARDED {
            guest.write(&worker, pattern + cluster * CLUSTER, CLUSTER, Durability::Volatile).await;
        }
        guest.flush(&worker).await;
    });
    bench.world.block_on(changes).unwrap();
    bench.world.release(hold);
    bench.world.run_until_idle().unwrap();
    let report = report.borrow_mut().take().expect("the conversion is over");
    assert!(report.range_copied > 0, "the kernel copied something: {report:?}");

    let copied = bench.world.content(TARGET).unwrap().bytes(0..pattern);
    for (index, (found, was)) in copied.chunks(512).zip(before.chunks(512)).enumerate() {
        let is_discarded = index as u64 * 512 < DISCARDED * CLUSTER;
        assert!(
            found == was || is_discarded && found.iter().all(|byte| *byte == 0),
            "sector {index} is neither what the disk showed before nor what it showed later"
        );
    }
    bench.read_whole().unwrap();
    assert_eq!(bench.guest.violation.borrow().as_deref(), None);
    bench.close().unwrap();
}
