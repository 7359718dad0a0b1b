//! A disk that lies: a bit turns, a write is lost, or lands elsewhere. Who notices: the check, a read, or nobody. The table in
//! docs/promises.md is what this test counts.

use crate::support::{Random, TestImage, on_worker, qemu_img, skipped};
use std::collections::BTreeMap;
use std::fmt::Write;
use zebu::check::{CheckOptions, check};
use zebu::storage::IoBufs;
use zebu::{Format, Image, OpenOptions};

const SECTOR: u64 = 512;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Lies of one kind in one region.
const TRIES: u32 = 40;

/// Who notices a lie.
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

/// What the disk does instead of what it said.
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
    /// Offsets of sectors by what they hold.
    regions: Vec<(&'static str, Vec<u64>)>,
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

    let sectors =
        |start: u64, len: u64| (start / SECTOR..(start + len).div_ceil(SECTOR)).map(|sector| sector * SECTOR);
    let cluster = image.cluster_size();
    let l1_entries = u64::from(image.u32(36));
    let tables: Vec<u64> = (0..l1_entries).map(|index| image.l2(index)).filter(|at| *at != 0).collect();
    let (mut data, mut packed) = (Vec::new(), Vec::new());
    for table in &tables {
        for index in 0..cluster / 8 {
            let entry = image.word(table + index * 8);
            let at = entry & OFFSET;
            if entry & 1 << 62 != 0 {
                packed.extend(sectors(entry % (1 << 58) / SECTOR * SECTOR, SECTOR));
            } else if at != 0 {
                data.extend(sectors(at, cluster));
            }
        }
    }
    packed.dedup();
    let blocks = (0..cluster / 8).map(|index| image.refblock(index)).take_while(|at| *at != 0);
    // A table that holds less is unused behind its entries.
    let counts = (after.len() as u64 / cluster).next_multiple_of(SECTOR / 2) * 2;
    let regions = vec![
        ("header", sectors(0, 112).collect()),
        ("L1 table", sectors(image.l1(), l1_entries * 8).collect()),
        ("L2 tables", tables.iter().flat_map(|at| sectors(*at, cluster)).collect()),
        ("refcount table", sectors(image.reftable(), 8).collect()),
        ("refcount blocks", blocks.flat_map(|at| sectors(at, counts.min(cluster))).collect()),
        ("snapshot table", sectors(image.snapshots(), 100).collect()),
        ("guest data", data),
        ("packed guest data", packed),
    ];
    Written { before, after, shown, regions }
}

impl Written {
    /// The file when the disk has lied once about a sector; `None` if that write changed nothing.
    fn with(&self, lie: Lie, at: u64, random: &mut Random) -> Option<Vec<u8>> {
        let mut bytes = self.after.clone();
        let sector = at as usize..(at + SECTOR) as usize;
        if matches!(lie, Lie::FlippedBit) {
            bytes[sector.start + random.below(SECTOR) as usize] ^= 1 << random.below(8);
            return Some(bytes);
        }
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
                Ok::<_, zebu::Error>(bytes)
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
    let mut table = String::new();
    let mut random = Random(47);
    for (region, sectors) in &written.regions {
        for lie in [Lie::FlippedBit, Lie::LostWrite, Lie::MisdirectedWrite] {
            let mut counts = BTreeMap::<Noticed, u32>::new();
            let mut tried = 0;
            // Where nothing changed, no write could be lost.
            for _ in 0..TRIES * 4 {
                let at = sectors[random.below(sectors.len() as u64) as usize];
                if let Some(bytes) = written.with(lie, at, &mut random) {
                    *counts.entry(written.judge(&bytes)).or_default() += 1;
                    tried += 1;
                }
                if tried == TRIES {
                    break;
                }
            }
            let count = |noticed| counts.get(&noticed).copied().unwrap_or(0);
            writeln!(
                table,
                "| {} | {region} | {} | {} | {} | {} |",
                lie.name(),
                count(Noticed::ByCheck),
                count(Noticed::ByRead),
                count(Noticed::ByNobody),
                count(Noticed::Harmless)
            )
            .unwrap();
        }
    }
    let page =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/promises.md")).unwrap();
    assert!(page.contains(&table), "docs/promises.md has another table than:\n{table}");
}
