//! Images of other programs: their tables are looked up through a cache of pages, and their packed units are inflated.

use crate::compress::{CodecPool, Outcome, Packing, Work};
use crate::file_pages::{FilePages, Pages};
use crate::image_worker::ImageWorker;
use crate::options::{Format, OpenOptions};
use crate::qcow2::cache::inflated_clusters::{ClusterCache, Inflated, Inflation};
use crate::qcow2::map::mapping::Run;
use crate::refs;
use crate::status::{VmdkExtent, VmdkInfo};
use crate::sync::AsyncMutex;
use crate::{Error, ErrorKind, Result};
use std::path::Path;
use std::sync::Arc;
use zebu_foreign::vmdk::facts::Facts;
use zebu_foreign::{Disk, FileIndex, Kind, Packed};
use zebu_qcow2::{CompressedRange, HostOffset};
use zebu_storage::{File, Worker};

/// Units larger than this are inflated one at a time, so that memory stays bounded.
const LARGE_UNIT: u64 = 1 << 20;
/// The unit of work where an image has none, or a small one, in bytes.
const LEAST_WORK: u64 = 65536;
/// And where it has a very large one.
const MOST_WORK: u64 = 2 << 20;

/// An open image of a format of another program.
#[derive(Debug)]
pub(crate) struct ForeignImage {
    disk: Disk,
    /// The image file, and those that it names.
    files: Vec<File>,
    pages: FilePages,
    /// Inflated units of each file.
    inflated: Vec<ClusterCache>,
    pool: CodecPool,
    one_large: AsyncMutex,
    own_worker: ImageWorker,
}

/// The refusal to change an image of a format that is only read.
pub(crate) fn convert_first(format: Format) -> Error {
    let message = format!(
        "images in the format {} can be read, not written: convert the image to qcow2 or raw first",
        format.name()
    );
    Error::new(ErrorKind::Unsupported, message)
}

/// Facts of a VMDK at `image`, with the paths of its extents.
pub(crate) fn vmdk_info(facts: &Facts, image: &Path) -> VmdkInfo {
    let extents = facts.extents.iter().map(|extent| {
        let name = extent.name.and_then(|name| facts.names.get(name as usize));
        VmdkExtent {
            len: extent.len,
            path: match name {
                Some(name) if image.parent() == Some(Path::new("")) => Some(name.into()),
                Some(name) => Some(refs::resolve(image, name)),
                None => extent.kind.is_empty().then(|| image.to_owned()),
            },
            kind: extent.kind,
            grain: extent.grain.filter(|grain| *grain > 0),
            is_compressed: extent.is_compressed,
        }
    });
    VmdkInfo {
        cid: facts.cid,
        parent_cid: facts.parent_cid,
        create_type: facts.create_type.clone(),
        extents: extents.collect(),
    }
}

/// The engine's error for one of a parser. Its place is named if it has one.
pub(crate) fn foreign_error(files: &[File], error: zebu_foreign::Error) -> Error {
    let image = |file: FileIndex| files.get(file.0 as usize).or(files.first()).map(File::path);
    let error = match error {
        zebu_foreign::Error::Damaged { message, file, offset } => {
            let mut error = Error::new(ErrorKind::Corrupt, message);
            if let Some(offset) = offset {
                error = error.at_host(offset);
            }
            match image(file) {
                Some(path) => error.on(path),
                None => error,
            }
        }
        other => Error::new(ErrorKind::Unsupported, other.to_string()),
    };
    match image(FileIndex::IMAGE) {
        Some(path) => error.on(path),
        None => error,
    }
}

/// Asks a parser again and again until it has all the bytes that it needs.
pub(crate) async fn parse_from<T>(
    worker: &Worker,
    files: &[File],
    shared: Option<&FilePages>,
    mut parse: impl FnMut(&Pages<'_>) -> zebu_foreign::Result<T>,
) -> Result<T> {
    let mut pages = Pages::new(files, shared);
    loop {
        match parse(&pages) {
            Ok(parsed) => return Ok(parsed),
            Err(zebu_foreign::Error::Missing(missing)) => pages.load(worker, missing).await?,
            Err(error) => return Err(foreign_error(files, error)),
        }
    }
}

/// The damage of a stream that is shorter than its unit.
const TOO_FEW: &str = "it holds too few bytes";

impl ForeignImage {
    /// Gives up pages of tables and inflated units.
    pub(crate) fn forget_what_was_read(&self) {
        self.pages.clear();
        self.inflated.iter().for_each(ClusterCache::forget_all);
    }

    pub(crate) fn new(disk: Disk, files: Vec<File>, options: &OpenOptions) -> Self {
        Self {
            disk,
            inflated: files.iter().map(|_| ClusterCache::new(Arc::default())).collect(),
            files,
            pages: FilePages::default(),
            pool: options.compress.pool.clone(),
            one_large: AsyncMutex::default(),
            own_worker: ImageWorker::default(),
        }
    }

    pub(crate) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// The image file (0) or one that it names.
    pub(crate) fn file(&self, number: u32) -> &File {
        self.files.get(number as usize).unwrap_or(&self.files[0])
    }

    /// The files that it names.
    pub(crate) fn other_files(&self) -> &[File] {
        self.files.get(1..).unwrap_or_default()
    }

    pub(crate) fn own_worker(&self) -> &ImageWorker {
        &self.own_worker
    }

    /// Bytes that are worth asking for at once: a power of two.
    pub(crate) fn unit_of_work(&self) -> u64 {
        self.disk.unit().clamp(LEAST_WORK, MOST_WORK).next_power_of_two()
    }

    /// The place of `guest`, and for how many bytes it holds.
    pub(crate) async fn map(&self, worker: &Worker, guest: u64, max_len: u64) -> Result<(Run, u64)> {
        let found =
            parse_from(worker, &self.files, Some(&self.pages), |pages| self.disk.map(pages, guest, max_len));
        let found = found.await.map_err(|e| e.at_guest(guest))?;
        let run = match found.kind {
            Kind::Hole => Run::Unallocated,
            Kind::Zero => Run::Zero { host: None },
            Kind::Data { file: FileIndex::IMAGE, offset } => Run::Data { host: offset },
            Kind::Data { file, offset } => Run::Elsewhere { file: file.0, host: offset },
            Kind::Packed(packed) => Run::Packed(packed),
        };
        Ok((run, found.len))
    }

    /// The inflated bytes of a unit, as far as the disk reaches at least.
    pub(crate) async fn read_packed(&self, worker: &Worker, packed: Packed) -> Result<Inflated> {
        let stream = CompressedRange { offset: HostOffset(packed.offset), len: packed.len };
        let packing = Packing::try_from(packed.packing).map_err(|e| e.on(self.file(packed.file.0).path()))?;
        let cache = &self.inflated[packed.file.0 as usize];
        // The last unit may end with the disk.
        let least = packed.unit.min(self.disk.virtual_size() - packed.start);
        let damaged = |why: &str| {
            let message = format!("compressed data can't be decompressed: {why}");
            let error = Error::new(ErrorKind::Corrupt, message).on(self.file(packed.file.0).path());
            error.at_host(packed.offset)
        };
        let ticket = match cache.lookup(worker, stream).await {
            // Another unit may have the same stream, and be shorter.
            Inflation::Ready(bytes) if (bytes.len() as u64) < least => return Err(damaged(TOO_FEW)),
            Inflation::Ready(bytes) => return Ok(bytes),
            Inflation::Mine(ticket) => ticket,
        };
        let _one = if packed.unit > LARGE_UNIT { Some(self.one_large.lock().await) } else { None };
        let file = self.file(packed.file.0);
        // Whole blocks of the file, so that O_DIRECT needs no second buffer.
        let block = u64::from(file.alignment().offset.max(file.alignment().length)).max(1);
        let start = packed.offset / block * block;
        let end = (packed.offset + packed.len).next_multiple_of(block);
        let buffer = worker.buffer((end - start) as usize);
        let (result, input) = worker.read(file, start, buffer.into()).await;
        result.map_err(|e| Error::from(e).on(file.path()))?;
        let work = Work::Inflate {
            packing,
            input,
            skip: (packed.offset - start) as usize,
            cluster: packed.unit as usize,
            output: cache.buffer(),
        };
        let mut done = self.pool.run(worker, work).await;
        match done.outcome {
            Outcome::Damaged(why) => return Err(damaged(why)),
            Outcome::Bytes(len) if (len as u64) < least => return Err(damaged(TOO_FEW)),
            Outcome::Bytes(_) | Outcome::Incompressible => {}
        }
        let bytes = Arc::new(done.take_output());
        cache.insert(stream, bytes.clone());
        drop(ticket);
        Ok(bytes)
    }
}
