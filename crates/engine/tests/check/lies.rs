//! A disk that lies: a bit turns, a write is lost, or lands elsewhere. Who notices: the check, a read, or nobody. The table in
//! docs/promises.md says it in words.

use crate::support::{Random, TestImage, on_worker, qemu_img, skipped};
use std::collections::BTreeMap;
use std::ops::Range;
use zebu_engine::check::{CheckOptions, check};
use zebu_engine::storage::IoBufs;
use zebu_engine::{Format, Image, OpenOptions};

const SECTOR: u64 = 512;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Lies of one kind in one region.
const TRIES: u32 = 40;

/// An observer of a lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Noticed {
    /// `check`, or whoever opens the image.
    ByCheck,
    /// A read, which fails, where the check finds nothing.
    ByRead,
    /// Nobody, and the disk shows other bytes.
    ByNobody,
    /// Nobody, and the disk shows what it should.
    Harmless,
}

/// The deed of a disk instead of what it said.
#[derive(Debug, Clone, Copy)]
enum Lie {
    FlippedBit,
    LostWrite,
    MisdirectedWrite,
}

impl Lie {
    fn name(self) -> &'static str {
        match self {
            Self::FlippedBit => "a bit turns",
            Self::LostWrite => "a write is lost",
            Self::MisdirectedWrite => "a write lands elsewhere",
        }
    }
}

/// An image before and after its last changes, and what its disk shows then.
struct Written {
    before: Vec<u8>,
    after: Vec<u8>,
    shown: Vec<u8>,
    /// Ranges of the file that hold something, by what it is.
    regions: Vec<(&'static str, Vec<Range<u64>>)>,
}

fn written() -> Written {
    let image = TestImage::new(
        &["-o", "cluster_size=4096"],
        "4M",
        &["write -P 1 0 1M", "write -P 2 2M 300k", "write -c -P 3 3M 64k"],
    );
    image.snapshot(&["-c", "one"]);
    image.io(&["write -P 4 100k 200k"]);
    let before = std::fs::read(image.path()).unwrap();
    image.io(&[
        "write -P 5 200k 900k",
        "write -P 6 2100k 500k",
        "write -c -P 7 3500k 64k",
        "discard 500k 64k",
    ]);
    image.snapshot(&["-c", "two"]);
    let mut after = std::fs::read(image.path()).unwrap();
    // Packed data may end within a sector.
    after.resize(after.len().next_multiple_of(SECTOR as usize), 0);
    image.assert_clean("before any lie");
    let raw = image.sibling("shown.raw");
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", image.path().to_str().unwrap(), raw.to_str().unwrap()]);
    let shown = std::fs::read(raw).unwrap();

    let cluster = image.cluster_size();
    let l1_entries = u64::from(image.u32(36));
    let tables: Vec<u64> = (0..l1_entries).map(|index| image.l2(index)).filter(|at| *at != 0).collect();
    let (mut data, mut packed) = (Vec::new(), Vec::new());
    for table in &tables {
        for index in 0..cluster / 8 {
            let entry = image.word(table + index * 8);
            let at = entry & OFFSET;
            if entry & 1 << 62 != 0 {
                let at = entry % (1 << 58);
                packed.push(at..at + 8);
            } else if at != 0 {
                data.push(at..at + cluster);
            }
        }
    }
    let blocks = (0..cluster / 8).map(|index| image.refblock(index)).take_while(|at| *at != 0);
    let counts = (after.len() as u64 / cluster * 2).min(cluster);
    let only = |start: u64, len: u64| std::iter::once(start..start + len).collect();
    let regions = vec![
        ("header", only(0, 112)),
        ("L1 table", only(image.l1(), l1_entries * 8)),
        ("L2 tables", tables.iter().map(|at| *at..at + cluster).collect()),
        ("refcount table", only(image.reftable(), 8)),
        ("refcount blocks", blocks.map(|at| at..at + counts).collect()),
        ("snapshot table", only(image.snapshots(), 100)),
        ("guest data", data),
        ("packed guest data", packed),
    ];
    Written { before, after, shown, regions }
}

impl Written {
    /// The file when the disk has lied once about a byte, or about the sector that it is in; `None` if that write changed nothing.
    fn with(&self, lie: Lie, at: u64, random: &mut Random) -> Option<Vec<u8>> {
        let mut bytes = self.after.clone();
        if matches!(lie, Lie::FlippedBit) {
            bytes[at as usize] ^= 1 << random.below(8);
            return Some(bytes);
        }
        let start = (at / SECTOR * SECTOR) as usize;
        let sector = start..start + SECTOR as usize;
        let mut old = vec![0; SECTOR as usize];
        let there = self.before.get(sector.clone()).unwrap_or_default();
        old[..there.len()].copy_from_slice(there);
        if old == self.after[sector.clone()] {
            return None;
        }
        if matches!(lie, Lie::MisdirectedWrite) {
            let other = (random.below(bytes.len() as u64 / SECTOR) * SECTOR) as usize;
            bytes.copy_within(sector.clone(), other);
        }
        bytes[sector].copy_from_slice(&old);
        Some(bytes)
    }

    fn judge(&self, bytes: &[u8]) -> Noticed {
        let image = TestImage::from_bytes(bytes);
        let (is_clean, read) = on_worker(async |worker| {
            let report = check(worker, &image.path(), &CheckOptions::default()).await;
            let is_clean = report.is_ok_and(|report| report.is_clean());
            let read = async {
                let options = OpenOptions::default().format(Some(Format::Qcow2));
                let image = Image::open(worker, &image.path(), &options).await?;
                let mut bytes = vec![0; image.virtual_size().min(64 << 20) as usize];
                let (done, buffers) = image.read(worker, 0, IoBufs::from(worker.buffer(bytes.len()))).await;
                done?;
                buffers.copy_to(0, &mut bytes);
                Ok::<_, zebu_engine::Error>(bytes)
            };
            (is_clean, read.await)
        });
        match (is_clean, read) {
            (false, _) => Noticed::ByCheck,
            (true, Err(_)) => Noticed::ByRead,
            (true, Ok(bytes)) if bytes != self.shown => Noticed::ByNobody,
            (true, Ok(_)) => Noticed::Harmless,
        }
    }
}

#[test]
fn who_notices_a_lie() {
    if skipped() {
        return;
    }
    let written = written();
    let mut random = Random(47);
    for (region, ranges) in &written.regions {
        for lie in [Lie::FlippedBit, Lie::LostWrite, Lie::MisdirectedWrite] {
            let mut counts = BTreeMap::<Noticed, u32>::new();
            let mut tried = 0;
            // Where nothing changed, no write could be lost.
            for _ in 0..TRIES * 4 {
                let range = &ranges[random.below(ranges.len() as u64) as usize];
                let at = range.start + random.below(range.end - range.start);
                if let Some(bytes) = written.with(lie, at, &mut random) {
                    *counts.entry(written.judge(&bytes)).or_default() += 1;
                    tried += 1;
                }
                if tried == TRIES {
                    break;
                }
            }
            if tried == 0 {
                continue;
            }
            let count = |noticed| counts.get(&noticed).copied().unwrap_or(0);
            let (by_check, by_read) = (count(Noticed::ByCheck), count(Noticed::ByRead));
            let (by_nobody, harmless) = (count(Noticed::ByNobody), count(Noticed::Harmless));
            let what = format!(
                "{}, {region}: {by_check} noticed by the check, {by_read} by a read, {by_nobody} by nobody, {harmless} harmless",
                lie.name()
            );
            println!("{what}");
            // A write that lands elsewhere may hit something else.
            let is_as_promised = match *region {
                "guest data" => by_nobody >= tried - 4,
                "packed guest data" => by_check + by_read >= tried - 4,
                _ => by_nobody <= 4 && by_check + harmless >= tried - 4,
            };
            assert!(is_as_promised, "{what}");
        }
    }
}
