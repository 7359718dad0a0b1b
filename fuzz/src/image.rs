//! Images: an intact one with fields, entries and stretches of bytes replaced, used through the whole engine on a
//! simulated disk.

use crate::base;
use crate::limits::within;
use arbitrary::{Result, Unstructured};
use zebu::check::{self, CheckOptions, FindingKind};
use zebu::storage::sim::{Content, SimFileConfig, SimWorld};
use zebu::storage::{File, IoBuf, Worker};
use zebu::{Access, Durability, ExtentKind, Format, Image, OpenOptions, OpenedFile, ZeroMode};

/// The most extents, and pieces of the disk, that are looked at: a hostile disk is as large as it likes.
const MOST: usize = 256;
/// The most bytes of a request.
const REQUEST: u64 = 256 << 10;

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
fn on_simulated_disk(image: &[u8], access: zebu::storage::Access, work: impl AsyncFnOnce(&Worker, File)) {
    within(image.len(), || on_a_world(image, access, work));
}

fn on_a_world(image: &[u8], access: zebu::storage::Access, work: impl AsyncFnOnce(&Worker, File)) {
    let world = SimWorld::new(1);
    // More space than the image has, but not without end: a hostile image must not fill a disk either.
    let config = SimFileConfig { access, space: Some(64 << 20), ..SimFileConfig::default() };
    let file = world.disk().file("image", Content::from_bytes(image), config);
    let worker = world.worker();
    if let Err(stuck) = world.block_on(work(&worker, file)) {
        panic!("{stuck:?}");
    }
}

async fn open(worker: &Worker, file: File, access: Access) -> zebu::Result<Image> {
    let given = OpenedFile { file, data_file: None, format: Format::Qcow2 };
    Image::open_files(worker, vec![given], &OpenOptions { access, ..OpenOptions::default() }).await
}

/// Opens, checks, maps and reads an image.
///
/// # Errors
/// The input is used up.
pub fn read(u: &mut Unstructured<'_>) -> Result<()> {
    let bytes = hostile(u)?;
    let piece = *u.choose(&[512, 4096, 65536, REQUEST])?;
    on_simulated_disk(&bytes, zebu::storage::Access::ReadOnly, async |worker, file| {
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

/// Host clusters of the image that have fewer counts than references once it is opened for writing (a dirty one is
/// repaired then): they are free by what the image says, or when the first of those that use them gives them up.
fn counted_too_low(bytes: &[u8]) -> Vec<u64> {
    let mut found = Vec::new();
    on_a_world(bytes, zebu::storage::Access::ReadWrite, async |worker, file| {
        let Ok(_image) = open(worker, file.clone(), Access::ReadWrite).await else { return };
        let Ok(report) = check::check_file(worker, &file, &CheckOptions::default()).await else { return };
        found.extend(report.findings.iter().filter_map(|finding| match finding.kind {
            FindingKind::RefcountTooLow { cluster, .. } => Some(cluster),
            _ => None,
        }));
    });
    found
}

/// An accepted write that was not read back.
struct Lost {
    what: String,
    /// Host clusters of the first byte that differs, all of which the write found there.
    in_place: Vec<u64>,
}

/// Host clusters where a range of the disk lies.
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

/// Opens an image for writing (a dirty one is repaired on the way), changes it, and reads back what was accepted.
///
/// # Errors
/// The input is used up.
pub fn write(u: &mut Unstructured<'_>) -> Result<()> {
    let bytes = hostile(u)?;
    let mut requests = Vec::new();
    for _ in 0..u.int_in_range(1..=12)? {
        let at = u.int_in_range(0..=base::SIZE + 4096)?;
        let at = if u.arbitrary()? { at & !0xffff } else { at };
        requests.push((u.int_in_range(0..=4u8)?, at, *u.choose(&[1, 512, 4096, 65536, 100_000])?));
    }
    if is_shown() {
        eprintln!("requests (0 and 1 write, 2 zeroes, 3 discards, 4 flushes; offset; length): {requests:?}");
    }
    let mut lost = None;
    on_simulated_disk(&bytes, zebu::storage::Access::ReadWrite, async |worker, file| {
        let Ok(image) = open(worker, file.clone(), Access::ReadWrite).await else { return };
        for (kind, at, len) in requests {
            match kind {
                0 | 1 => {
                    lost = write_and_read(worker, &image, at, len).await;
                    if lost.is_some() {
                        return;
                    }
                }
                2 => drop(image.write_zeroes(worker, at, len as u64, ZeroMode::Unmap).await),
                3 => drop(image.discard(worker, at, len as u64).await),
                _ => drop(image.flush(worker).await),
            }
        }
        let _ = image.close(worker).await;
        let _ = check::check_file(worker, &file, &CheckOptions::default()).await;
    });
    if let Some(Lost { what, in_place }) = lost {
        // It was written in place, into a cluster that is free by what the image says, or was once a request had given up
        // another cluster that lies there: another cluster of the same request may have got it. Only a check can know.
        let too_low = counted_too_low(&bytes);
        let is_excused = !in_place.is_empty() && in_place.iter().all(|at| too_low.contains(at));
        assert!(is_excused, "{what}");
    }
    Ok(())
}

async fn write_and_read(worker: &Worker, image: &Image, at: u64, len: usize) -> Option<Lost> {
    let before = places(worker, image, at, len as u64).await;
    let sent = IoBuf::copy_of(&vec![0xa5; len]).into();
    let (written, _) = image.write(worker, at, sent, Durability::Volatile).await;
    let (read, bufs) = image.read(worker, at, IoBuf::zeroed(len).into()).await;
    if is_shown() {
        let place = image.extent(worker, at, 1).await;
        eprintln!("write at {at}: {written:?}; read: {read:?}; it lies at {place:?}");
    }
    if written.is_err() || read.is_err() {
        return None;
    }
    let mut back = vec![0; len];
    bufs.copy_to(0, &mut back);
    let lost = at + back.iter().position(|byte| *byte != 0xa5)? as u64;
    let mut in_place = places(worker, image, lost, 1).await;
    if !in_place.iter().all(|at| before.contains(at)) {
        in_place.clear();
    }
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
    on_simulated_disk(&image, zebu::storage::Access::ReadOnly, async |worker, file| {
        let Ok(image) = open(worker, file, Access::ReadOnly).await else { return };
        for (at, len) in [(base::CLUSTER, 65536), (base::CLUSTER + 1000, 10), (0, 200_000)] {
            let _ = image.read(worker, at, IoBuf::zeroed(len).into()).await;
        }
        let _ = image.close(worker).await;
    });
    Ok(())
}
