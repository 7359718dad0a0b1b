//! Images: an intact one with fields, entries and stretches of bytes replaced, used through the whole engine on a
//! simulated disk.

use crate::base;
use crate::limits::within;
use arbitrary::{Result, Unstructured};
use std::collections::BTreeSet;
use std::ops::Range;
use zebu_engine::check::{self, CheckOptions, FindingKind};
use zebu_engine::storage::{File, IoBuf, Worker};
use zebu_engine::{Access, Durability, Extent, ExtentKind, Format, Image, OpenOptions, OpenedFile, ZeroMode};
use zebu_sim::{Content, SimFileConfig, SimWorld};

/// The most extents, and pieces of the disk, that are looked at: a hostile disk is as large as it likes.
const MOST: usize = 256;
/// The most bytes of a request.
const REQUEST: u64 = 256 << 10;
/// The byte that requests write.
const WRITTEN: u8 = 0xa5;

/// Where damage hurts: header, extensions, tables, the stream.
const PLACES: [(u64, u64); 9] = [
    (0, 112),
    (base::EXTENSIONS, 40),
    (base::REFTABLE, 64),
    (base::REFBLOCK, 32),
    (base::L1, 16),
    (base::L2, 64),
    (base::SNAPSHOTS, 66),
    (base::BITMAPS, 30),
    (base::STREAM, 64),
];

/// The values that are special to some field.
const VALUES: [u64; 18] = [
    0,
    1,
    2,
    0x1ff,
    0x200,
    base::REFTABLE,
    base::REFBLOCK,
    base::L1,
    base::L2,
    base::DATA | 1 << 63,
    base::L2 | 1 << 63,
    1 << 31,
    (1 << 32) - 1,
    1 << 55,
    1 << 62,
    1 << 63,
    u64::MAX - 0xffff,
    u64::MAX,
];

/// An image with up to 16 things changed in it.
///
/// # Errors
/// The input is used up.
pub fn hostile(u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut image = base::image();
    for _ in 0..u.int_in_range(0..=16)? {
        let (start, len) = *u.choose(&PLACES)?;
        let at = (start + u.int_in_range(0..=len - 1)?) as usize;
        match u.int_in_range(0..=5)? {
            0 => image[at] = u.arbitrary()?,
            1 => image[at] ^= 1 << u.int_in_range(0..=7)?,
            2 => {
                let at = at & !3;
                let value = if u.arbitrary()? { *u.choose(&VALUES)? as u32 } else { u.arbitrary()? };
                image[at..at + 4].copy_from_slice(&value.to_be_bytes());
            }
            3 | 4 => {
                let at = at & !7;
                let value = if u.arbitrary()? { *u.choose(&VALUES)? } else { u.arbitrary()? };
                image[at..at + 8].copy_from_slice(&value.to_be_bytes());
            }
            _ => {
                let bytes = u.bytes(u.len().min(32))?;
                image[at..at + bytes.len()].copy_from_slice(bytes);
            }
        }
    }
    if u.ratio(1, 16)? {
        image.truncate(u.int_in_range(0..=image.len())?);
    }
    if is_shown() {
        show(&image);
    }
    Ok(image)
}

/// Whether what an input means is to be printed, to make a test of it.
fn is_shown() -> bool {
    std::env::var_os("ZEBU_FUZZ_SHOW").is_some()
}

/// Prints what was changed in the intact image, in words of 8 bytes.
fn show(image: &[u8]) {
    eprintln!("{} bytes", image.len());
    let pairs = base::image();
    for (number, (was, is)) in
        pairs.chunks(8).zip(image.chunks(8)).enumerate().filter(|(_, (was, is))| was != is)
    {
        eprintln!("{:#x}: {was:02x?} is now {is:02x?}", number * 8);
    }
}

/// Runs `work` with a worker and the image as a file. That it gets stuck, or costs more than such a file may, is a fault.
fn on_simulated_disk(image: &[u8], access: zebu_engine::storage::Access, work: impl AsyncFnOnce(&Worker, File)) {
    within(image.len(), || on_a_world(image, access, work));
}

fn on_a_world(image: &[u8], access: zebu_engine::storage::Access, work: impl AsyncFnOnce(&Worker, File)) {
    let world = SimWorld::new(1);
    // More space than the image has, but not without end: a hostile image must not fill a disk either.
    let config = SimFileConfig { access, space: Some(64 << 20), ..SimFileConfig::default() };
    let file = world.disk().file("image", Content::from_bytes(image), config);
    let worker = world.worker();
    if let Err(stuck) = world.block_on(work(&worker, file)) {
        panic!("{stuck:?}");
    }
}

async fn open(worker: &Worker, file: File, access: Access) -> zebu_engine::Result<Image> {
    let given = OpenedFile::new(file, Format::Qcow2);
    Image::open_files(worker, vec![given], &OpenOptions::default().access(access)).await
}

/// Opens, checks, maps and reads an image.
///
/// # Errors
/// The input is used up.
pub fn read(u: &mut Unstructured<'_>) -> Result<()> {
    let bytes = hostile(u)?;
    let piece = *u.choose(&[512, 4096, 65536, REQUEST])?;
    on_simulated_disk(&bytes, zebu_engine::storage::Access::ReadOnly, async |worker, file| {
        let _ = check::check_file(worker, &file, &CheckOptions::default()).await;
        let Ok(image) = open(worker, file, Access::ReadOnly).await else { return };
        let size = image.virtual_size();
        let mut at = 0;
        for _ in 0..MOST {
            let Ok(extent) = image.extent(worker, at, size - at).await else { break };
            assert!(extent.offset == at && extent.end() <= size, "{extent:?} at {at} of {size}");
            if extent.len == 0 {
                break;
            }
            at = extent.end();
        }
        for number in 0..MOST as u64 {
            let Some(at) = number.checked_mul(piece).filter(|at| *at < size) else { break };
            let len = piece.min(size - at) as usize;
            let (_, bufs) = image.read(worker, at, IoBuf::zeroed(len).into()).await;
            assert_eq!(bufs.len(), len);
        }
        let _ = image.close(worker).await;
    });
    Ok(())
}

/// References to a host cluster that has fewer counts than references.
struct Sharers {
    /// Offsets of the guest clusters that lie there.
    guests: BTreeSet<u64>,
    cluster_size: u64,
    /// Other references: metadata, tables of snapshots.
    others: u64,
}

/// The references to `cluster` after `requests`, if it has fewer counts than references then.
fn sharers(bytes: &[u8], requests: &[Request], cluster: u64) -> Option<Sharers> {
    let mut found = None;
    on_a_world(bytes, zebu_engine::storage::Access::ReadWrite, async |worker, file| {
        let Ok(image) = open(worker, file.clone(), Access::ReadWrite).await else { return };
        for request in requests {
            request.send(worker, &image).await;
        }
        let (size, cluster_size) = (image.virtual_size(), image.cluster_size());
        let (mut at, mut guests) = (0, BTreeSet::new());
        for number in 0.. {
            let Ok(extent) = image.extent(worker, at, size - at).await else { break };
            if extent.len == 0 {
                break;
            }
            // Who else lies there is not known.
            if number == MOST {
                return;
            }
            if let ExtentKind::Data { host } = extent.kind {
                let clusters = host / cluster_size..=(host + extent.len - 1) / cluster_size;
                if clusters.contains(&cluster) {
                    guests.insert(
                        at / cluster_size * cluster_size + (cluster - clusters.start()) * cluster_size,
                    );
                }
            }
            at = extent.end();
        }
        let _ = image.close(worker).await;
        let Ok(report) = check::check_file(worker, &file, &CheckOptions::default()).await else { return };
        found = report.findings.iter().find_map(|finding| match finding.kind {
            FindingKind::RefcountTooLow { cluster: at, references, .. } if at == cluster => {
                let others = references.saturating_sub(guests.len() as u64);
                Some(Sharers { guests: guests.clone(), cluster_size, others })
            }
            _ => None,
        });
    });
    found
}

/// Whether nothing is wrong with an image once it has been opened for writing: what is wrong later was made by us.
fn is_sound(bytes: &[u8]) -> bool {
    let mut is_sound = false;
    on_a_world(bytes, zebu_engine::storage::Access::ReadWrite, async |worker, file| {
        let Ok(image) = open(worker, file.clone(), Access::ReadWrite).await else { return };
        let _ = image.close(worker).await;
        let report = check::check_file(worker, &file, &CheckOptions::default()).await;
        is_sound = report.is_ok_and(|report| report.counts.corruptions + report.counts.check_errors == 0);
    });
    is_sound
}

/// Whether the last of `requests` may have lost what it wrote to `cluster` in place. It has fewer counts than references:
/// by what the image says it is free, or is once one of those that share it gives it up, and only a check that reads
/// all tables can know. So another cluster of the same request, or metadata, may have got it, or lay there before.
fn is_excused(bytes: &[u8], requests: &[Request], cluster: u64) -> bool {
    let Some((last, earlier)) = requests.split_last() else { return false };
    if is_sound(bytes) {
        return false;
    }
    let (Some(before), Some(after)) = (sharers(bytes, earlier, cluster), sharers(bytes, requests, cluster))
    else {
        return false;
    };
    let of_request =
        after.guests.iter().filter(|start| last.writes(**start..**start + after.cluster_size)).count();
    of_request > 1 || after.guests.difference(&before.guests).next().is_some() || after.others > before.others
}

/// An accepted write that was not read back.
struct Lost {
    what: String,
    /// The host cluster of the first byte that differs, if it is data that the write found there.
    in_place: Option<u64>,
}

/// Host clusters where a range of the disk lies: also those that read as zeroes, into which a write goes in place.
async fn places(worker: &Worker, image: &Image, start: u64, len: u64) -> Vec<u64> {
    let (mut at, mut found) = (start, Vec::new());
    while at < start + len {
        let Ok(extent) = image.extent(worker, at, start + len - at).await else { break };
        if let ExtentKind::Data { host } | ExtentKind::Zero { host: Some(host) } = extent.kind {
            let cluster = image.cluster_size();
            found.extend(host / cluster..=(host + extent.len.max(1) - 1) / cluster);
        }
        at += extent.len.max(1);
    }
    found
}

/// A write of one byte again and again, another one in each request.
#[derive(Debug, Clone, Copy)]
struct Write {
    at: u64,
    len: usize,
    byte: u8,
}

/// A request to the disk.
#[derive(Debug, Clone, Copy)]
enum Request {
    Write(Write),
    Zero { at: u64, len: u64 },
    Discard { at: u64, len: u64 },
    Flush,
}

impl Request {
    fn of(u: &mut Unstructured<'_>, number: u8) -> Result<Self> {
        let at = u.int_in_range(0..=base::SIZE + 4096)?;
        let at = if u.arbitrary()? { at & !0xffff } else { at };
        let (kind, len) = (u.int_in_range(0..=4u8)?, *u.choose(&[1, 512, 4096, 65536, 100_000])?);
        Ok(match kind {
            0 | 1 => Self::Write(Write { at, len, byte: WRITTEN ^ number }),
            2 => Self::Zero { at, len: len as u64 },
            3 => Self::Discard { at, len: len as u64 },
            _ => Self::Flush,
        })
    }

    /// Sends it; whether it was accepted.
    async fn send(&self, worker: &Worker, image: &Image) -> bool {
        match *self {
            Self::Write(Write { at, len, byte }) => {
                let sent = IoBuf::copy_of(&vec![byte; len]).into();
                image.write(worker, at, sent, Durability::Volatile).await.0.is_ok()
            }
            Self::Zero { at, len } => image.write_zeroes(worker, at, len, ZeroMode::Unmap).await.is_ok(),
            Self::Discard { at, len } => image.discard(worker, at, len).await.is_ok(),
            Self::Flush => image.flush(worker).await.is_ok(),
        }
    }

    /// Whether it writes into a range of the disk.
    fn writes(&self, range: Range<u64>) -> bool {
        matches!(*self, Self::Write(Write { at, len, .. }) if at < range.end && range.start < at + len as u64)
    }
}

/// Opens an image for writing (a dirty one is repaired on the way), changes it, and reads back what was accepted.
///
/// # Errors
/// The input is used up.
pub fn write(u: &mut Unstructured<'_>) -> Result<()> {
    let bytes = hostile(u)?;
    let requests =
        (0..u.int_in_range(1..=12)?).map(|number| Request::of(u, number)).collect::<Result<Vec<_>>>()?;
    if is_shown() {
        eprintln!("{requests:?}");
    }
    let mut lost = None;
    on_simulated_disk(&bytes, zebu_engine::storage::Access::ReadWrite, async |worker, file| {
        let Ok(image) = open(worker, file.clone(), Access::ReadWrite).await else { return };
        for (number, request) in requests.iter().enumerate() {
            if let Request::Write(write) = *request {
                if let Some(found) = write_and_read(worker, &image, write).await {
                    lost = Some((number, found));
                    return;
                }
            } else {
                request.send(worker, &image).await;
            }
        }
        let _ = image.close(worker).await;
        let _ = check::check_file(worker, &file, &CheckOptions::default()).await;
    });
    if let Some((number, Lost { what, in_place })) = lost {
        let is_excused = in_place.is_some_and(|cluster| is_excused(&bytes, &requests[..=number], cluster));
        assert!(is_excused, "{what}");
    }
    Ok(())
}

async fn write_and_read(worker: &Worker, image: &Image, write: Write) -> Option<Lost> {
    let Write { at, len, byte } = write;
    let before = places(worker, image, at, len as u64).await;
    let written = Request::Write(write).send(worker, image).await;
    let (read, bufs) = image.read(worker, at, IoBuf::zeroed(len).into()).await;
    if is_shown() {
        let place = image.extent(worker, at, 1).await;
        eprintln!("write at {at}: {written:?}; read: {read:?}; it lies at {place:?}");
    }
    if !written || read.is_err() {
        return None;
    }
    let mut back = vec![0; len];
    bufs.copy_to(0, &mut back);
    let lost = at + back.iter().position(|back| *back != byte)? as u64;
    let in_place = match image.extent(worker, lost, 1).await {
        Ok(Extent { kind: ExtentKind::Data { host }, .. }) => Some(host / image.cluster_size()),
        _ => None,
    };
    let in_place = in_place.filter(|cluster| before.contains(cluster));
    Some(Lost { what: format!("a write of {len} at {at} is not read back at {lost}"), in_place })
}

/// Reads the compressed cluster with a stream and an entry of the input's.
///
/// # Errors
/// The input is used up.
pub fn compressed(u: &mut Unstructured<'_>) -> Result<()> {
    let mut image = base::image();
    let sectors = u.int_in_range(0..=255)?;
    let skew = u.int_in_range(0..=511)?;
    let entry = base::compressed(base::STREAM + skew, sectors).to_be_bytes();
    image[base::L2 as usize + 8..][..8].copy_from_slice(&entry);
    let zstd: bool = u.arbitrary()?;
    if zstd {
        image[79] = 8;
        image[104] = 1;
    }
    let stream = u.bytes(u.len().min(32 << 10))?;
    let start = (base::STREAM + skew) as usize;
    image[start..start + stream.len()].copy_from_slice(stream);
    on_simulated_disk(&image, zebu_engine::storage::Access::ReadOnly, async |worker, file| {
        let Ok(image) = open(worker, file, Access::ReadOnly).await else { return };
        for (at, len) in [(base::CLUSTER, 65536), (base::CLUSTER + 1000, 10), (0, 200_000)] {
            let _ = image.read(worker, at, IoBuf::zeroed(len).into()).await;
        }
        let _ = image.close(worker).await;
    });
    Ok(())
}
