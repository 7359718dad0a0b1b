//! The files of a case: made by the process that runs it, and known to the one that judges it.

use super::plan::{Base, Case, Data};
use super::sector::{SECTOR, Values, ZERO, fill};
use crate::qemu::Qemu;
use crate::random::Random;
use std::path::Path;
use std::time::Duration;
use zebu_engine::storage::{IoBuf, Worker};
use zebu_engine::{
    Access, CacheMode, CreateOptions, Disk, Durability, Error, Format, Image, Keys, NewEncryption,
    OpenOptions, Passphrase, RefPolicy, Result,
};

/// Name of the image.
pub const IMAGE: &str = "disk.qcow2";
/// Name of what lies below it.
pub const BASE: &str = "base";
/// Name of its external data file.
pub const DATA: &str = "data";
/// The passphrase of an encrypted image.
const PASSPHRASE: &str = "a phrase";
/// The writer of what lies below.
const BASE_WRITER: u64 = 200;

/// The content of the base: runs of sectors with a value each, in order, and nothing between.
fn base_runs(case: &Case) -> Vec<(u64, u64, u64)> {
    let Some((_, len)) = case.base else { return Vec::new() };
    let mut random = Random::new(case.seed ^ 0x6261_7365);
    let mut values = Values::new(case.seed, BASE_WRITER);
    let mut runs = Vec::new();
    let mut at = random.below(64);
    while at < len {
        let count = random.between(1, 200).min(len - at);
        runs.push((at, count, values.next_value()));
        at += count;
        if random.chance(40) {
            at += random.below(300);
        }
    }
    runs
}

/// The value of each sector of the disk at the start, up to its largest size. The base's content beyond the end of
/// the disk never shows.
pub fn initial(case: &Case) -> Vec<u64> {
    let mut values = vec![ZERO; case.most_sectors as usize];
    for (first, count, value) in base_runs(case) {
        for sector in first..(first + count).min(case.sectors) {
            values[sector as usize] = value;
        }
    }
    values
}

fn passphrase() -> Passphrase {
    Passphrase::new(PASSPHRASE.as_bytes()).expect("a few bytes of memory")
}

/// QEMU, which is told the passphrase of an encrypted image.
pub fn for_image(qemu: &Qemu, case: &Case) -> Qemu {
    if case.encrypted { qemu.with_passphrase(PASSPHRASE) } else { qemu.clone() }
}

/// How the image is opened.
pub fn options(case: &Case) -> OpenOptions {
    let keys = if case.encrypted { Keys::of_top(passphrase()) } else { Keys::default() };
    OpenOptions::default()
        .keys(keys)
        .format(Some(Format::Qcow2))
        .access(Access::ReadWrite)
        .cache(case.cache)
        .refs(RefPolicy::All)
        .queues(case.threads.len() as u32 + 1)
        .slice_size(case.slice_size)
}

/// Makes the files of a case in a directory.
///
/// # Errors
/// Whatever the engine says.
pub async fn make(worker: &Worker, dir: &Path, case: &Case) -> Result<()> {
    let mut backing = None;
    if let Some((base, len)) = case.base {
        let path = dir.join(BASE);
        let (format, cluster_size) = match base {
            Base::Raw => (Format::Raw, 65536),
            Base::Qcow2(cluster) => (Format::Qcow2, cluster),
        };
        let size = Some(len * SECTOR as u64);
        let options = CreateOptions::default().format(format).size(size).cluster_size(cluster_size);
        Image::create(worker, &path, &options).await?;
        let open = OpenOptions::default().format(Some(format)).access(Access::ReadWrite);
        let image = Image::open(worker, &path, &open).await?;
        for (first, count, value) in base_runs(case) {
            let mut buffer = IoBuf::zeroed(count as usize * SECTOR);
            fill(buffer.as_mut_slice(), value, first);
            let offset = first * SECTOR as u64;
            image.write(worker, offset, buffer.into(), Durability::Volatile).await.0?;
        }
        image.close(worker).await?;
        backing = Some((BASE.to_owned(), format));
    }
    let encryption = case.encrypted.then(|| NewEncryption::new(passphrase()).iteration_time(Duration::ZERO));
    let options = CreateOptions::default()
        .encryption(encryption)
        .size(Some(case.sectors * SECTOR as u64))
        .cluster_size(case.cluster)
        .extended_l2(case.extended_l2)
        .refcount_bits(case.refcount_bits)
        .backing(backing)
        .data_file((case.data != Data::Inside).then(|| DATA.to_owned()))
        .data_file_raw(case.data == Data::ExternalRaw)
        .preallocation(case.preallocation)
        .cache(if case.cache.is_direct() { CacheMode::None } else { CacheMode::Writeback });
    Image::create(worker, &dir.join(IMAGE), &options).await
}

/// Opens the image, with the cache that the case wants.
///
/// # Errors
/// Whatever the engine says.
pub async fn open(worker: &Worker, dir: &Path, case: &Case) -> Result<Image, Error> {
    let image = Image::open(worker, &dir.join(IMAGE), &options(case)).await?;
    limit_cache(&image, case)?;
    Ok(image)
}

/// As [`open`], for calls that wait.
///
/// # Errors
/// Whatever the engine says.
pub fn open_disk(dir: &Path, case: &Case) -> Result<Disk> {
    let disk = Disk::open(&dir.join(IMAGE), &options(case))?;
    limit_cache(disk.image(), case)?;
    Ok(disk)
}

fn limit_cache(image: &Image, case: &Case) -> Result<()> {
    case.cache_above_least.map_or(Ok(()), |above| image.set_cache_size(image.min_cache_size() + above))
}
