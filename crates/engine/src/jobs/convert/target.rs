//! A target that the job makes.

use super::disk_order::Making;
use super::job::Part;
use super::options::{
    ConvertOptions, Identities, NewTarget, StreamedTarget, TablePlaces, TargetClusters, TargetContent,
};
use super::sink::{DiskOrder, Sink};
use super::source_conflict::{check_open_file, check_target};
use crate::create::new_file;
use crate::image_stream::{ImageWriter, Packer, PipedWriter, PlacedImage};
use crate::jobs::staging::{
    directory_of, from_io, publish_with, reserve_temporary_name, sync_directory_of, sync_files,
};
use crate::new_files::NewFiles;
use crate::new_foreign::{self, BlockWriter, NewFiles as ForeignFiles, StreamWriter};
use crate::node::Driver;
use crate::qcow2::life::create::new_header;
use crate::same_file::{self, FilePlace};
use crate::{
    Access, Chain, CreateOptions, Error, ErrorKind, Format, Image, NewForeign, OpenOptions, Preallocation,
    Purpose, Result,
};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use zebu_foreign::Identity;
use zebu_foreign::write::Birth;
use zebu_qcow2::cluster_set::ClusterSet;
use zebu_storage::sync::Mutex;
use zebu_storage::{File, FileKind, LockMode, OpenFlags, Worker};

/// A target that was made, up to its end.
pub(super) struct Made {
    /// Removed when this value is dropped before the end.
    files: NewFiles,
    /// The temporary name and the final one, if there are two.
    names: Option<(PathBuf, PathBuf)>,
    /// The target under the name that it has until the end.
    path: PathBuf,
    /// The external data file, if it has one.
    data_file: Option<PathBuf>,
    /// Its storage, if it is no local file.
    elsewhere: Option<File>,
    /// Its file and how it is opened, if it is made without that.
    unopened: Option<(File, OpenOptions)>,
}

/// Makes the target for the `total` bytes of `sources` and opens it for writing.
pub(super) async fn make(
    worker: &Worker,
    sources: &[Image],
    target: NewTarget,
    total: u64,
    making: Making<'_>,
) -> Result<(Sink, TargetContent, Made)> {
    let NewTarget { path, mut create, open } = target;
    match create.size {
        Some(size) if size < total => {
            return Err(
                Error::new(ErrorKind::InvalidArgument, "output file is smaller than input file").on(&path)
            );
        }
        Some(_) => {}
        None => create.size = Some(total),
    }
    let foreign = new_foreign::wanted(&create, &path)?;
    let flat = new_foreign::flat_path(foreign.as_ref(), &path);
    let data_file = create.data_file.as_ref().map(|name| directory_of(&path).join(name)).or(flat);
    // Before anything is made: a target that exists is cut to nothing, and locks are not taken by all.
    let elsewhere = open_elsewhere(&path, &create)?;
    if let Some(file) = &elsewhere {
        check_open_file(sources, file)?;
        if foreign.is_some() {
            new_foreign::check_regular(file)?;
        }
    }
    same_file::check_new(&path, &create)?;
    for file in std::iter::once(&path).chain(&data_file) {
        check_target(sources, file, &FilePlace::of(file))?;
    }
    let storage = data_file.as_ref().unwrap_or(&path).clone();
    let content = if create.backing.is_some() {
        TargetContent::SharedBacking
    } else if shows_ciphertext(&create)
        || (elsewhere.as_ref().is_some_and(|file| !is_new(file)) || is_device(&storage))
            && shows_its_storage(&create)
    {
        TargetContent::Unknown
    } else {
        TargetContent::Zero
    };

    let mut files = NewFiles::default();
    let sector = logical_sector(sources);
    let holds_sectors = create.size.is_some_and(|size| size.is_multiple_of(u64::from(sector.max(1))));
    let foreign = foreign.map(|new| if holds_sectors { new.for_sectors(sector) } else { new });
    let final_name = new_foreign::last_part(&path);
    let place = if elsewhere.is_some() { None } else { same_file::new_file_place(&path) };
    let (work_path, names) = match place {
        None => (path, None),
        Some(place)
            if (create.backing.is_some() || data_file.is_some()) && !same_directory(&path, &place) =>
        {
            files.add(&place);
            (path, None)
        }
        Some(place) => {
            let temporary = reserve_temporary_name(&place, 0o644)
                .map_err(|error| from_io(&place, "can't make a file in the target's directory", &error))?;
            files.add(&temporary);
            (temporary.clone(), Some((temporary, place)))
        }
    };
    let new_data_file = data_file.as_deref().and_then(same_file::new_file_place);

    if let Some(new) = foreign {
        let birth = identities(sources, making.options.identities);
        let flat = data_file.as_deref().map(|path| new_file(path, &create)).transpose()?;
        // Made just now: if this fails, it is gone again.
        if let Some(place) = &new_data_file {
            files.add(place);
        }
        let image = new_file(&work_path, &create)?;
        let new_files = ForeignFiles { image, flat };
        let sink = begin_foreign(worker, new_files, &create, &open, &new, (&final_name, birth)).await?;
        let made = Made { files, names, path: work_path, data_file, elsewhere, unopened: None };
        return Ok((sink, TargetContent::Zero, made));
    }
    let format = create.format;
    let in_order = elsewhere.is_none() && making.can_place(&create, &work_path);
    if in_order && create.backing.is_none() {
        // Before a file that exists is cut to nothing.
        new_header(&create, create.size.unwrap_or(0)).map_err(|e| e.on(&work_path))?;
        let file = new_file(&work_path, &create)?;
        let (sink, open) = begin_qcow2(worker, &file, &create, open, 0, &making).await?;
        let unopened = Some((file, open));
        return Ok((sink, content, Made { files, names, path: work_path, data_file, elsewhere, unopened }));
    }
    // If it fails, what it made is gone again; somebody else's file of that name is not ours to remove.
    Image::create_controlled(worker, &work_path, &create, &making.options.control).await?;
    if let Some(data_file) = new_data_file {
        files.add(&data_file);
    }
    let options = OpenOptions {
        format: Some(format),
        access: Access::ReadWrite,
        chain: Chain::Follow,
        purpose: Purpose::Io,
        snapshot: None,
        keys: match create.encryption.as_ref().and_then(|encryption| encryption.passphrase.clone()) {
            Some(passphrase) => open.keys.with(0, passphrase),
            None => open.keys,
        },
        ..open
    };
    let image = Image::open(worker, &work_path, &options).await?;
    let mut made = Made { files, names, path: work_path, data_file, elsewhere, unopened: None };
    if in_order && let Some(backing) = image.backing() {
        let shown = backing.virtual_size();
        image.close(worker).await?;
        drop(image);
        // The empty image has shown that its backing file can be read. It goes, so that there is none before the end.
        let file = new_file(&made.path, &create)?;
        let (sink, open) = begin_qcow2(worker, &file, &create, options, shown, &making).await?;
        made.unopened = Some((file, open));
        return Ok((sink, content, made));
    }
    Ok((Sink::Image(image), content, made))
}

/// Begins a qcow2 image, whose clusters get their places in the order of the disk, in an empty file. `shown`: bytes of its backing
/// file's disk.
async fn begin_qcow2(
    worker: &Worker,
    file: &File,
    create: &CreateOptions,
    open: OpenOptions,
    shown: u64,
    making: &Making<'_>,
) -> Result<(Sink, OpenOptions)> {
    let size = create.size.unwrap_or(0);
    let sink = match making.options.clusters {
        TargetClusters::Plain => {
            let moves = making.try_moves(worker, file).await?;
            let writer = Box::new(PlacedImage::new(file.clone(), create, size, shown)?);
            Sink::Clusters { writer, moves }
        }
        TargetClusters::Compressed => {
            let method = open.compress.method(create.compression).map_err(|e| e.on(file.path()))?;
            let packing = Packer::new(Some(method), &open.compress.pool, create.cluster_size);
            let writer = ImageWriter::new(file.clone(), create, size)?;
            let (path, size) = (file.path().to_owned(), writer.virtual_size());
            let writer = Mutex::new(Some(DiskOrder::Qcow2(Box::new(writer))));
            Sink::Stream { path, size, shown, packing, writer }
        }
    };
    let open = OpenOptions { format: Some(create.format), access: Access::ReadWrite, snapshot: None, ..open };
    Ok((sink, open))
}

/// Begins a new image in a file that can't be changed, for the `total` bytes of the sources.
pub(super) async fn begin_stream(
    worker: &Worker,
    parts: &[Part],
    new: StreamedTarget,
    total: u64,
    options: &ConvertOptions,
) -> Result<Sink> {
    let StreamedTarget { file, create, compress, tables } = new;
    let path = file.path().to_owned();
    let size = create.size.unwrap_or(total);
    if size < total {
        let message = "output file is smaller than input file";
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(&path));
    }
    if create.format != Format::Qcow2 {
        let message = "only a qcow2 image is written in the order of its disk";
        return Err(Error::new(ErrorKind::Unsupported, message).on(&path));
    }
    let method = match (options.clusters, tables) {
        (TargetClusters::Plain, _) => None,
        (TargetClusters::Compressed, TablePlaces::Behind) => {
            Some(compress.method(create.compression).map_err(|e| e.on(&path))?)
        }
        (TargetClusters::Compressed, TablePlaces::InFront) => {
            let message = "tables in front of compressed clusters: their sizes are not known before";
            return Err(Error::new(ErrorKind::Unsupported, message).on(&path));
        }
    };
    let packing = Packer::new(method, &compress.pool, create.cluster_size);
    let (size, writer) = match tables {
        TablePlaces::Behind => {
            let writer = ImageWriter::unchangeable(file, &create, size)?;
            (writer.virtual_size(), DiskOrder::Qcow2(Box::new(writer)))
        }
        TablePlaces::InFront => {
            // What is too large for its format is refused before the mappings are walked.
            let header = PipedWriter::header(&file, &create, size)?;
            let held = clusters_with_data(worker, parts, create.cluster_size, options).await?;
            let writer = PipedWriter::new(file, header, held)?;
            (writer.virtual_size(), DiskOrder::Piped(Box::new(writer)))
        }
    };
    let writer = Mutex::new(Some(writer));
    Ok(Sink::Stream { path, size, shown: 0, packing, writer })
}

/// The clusters in which the sources' mappings have data, or all of them if zeroes are written, too.
async fn clusters_with_data(
    worker: &Worker,
    parts: &[Part],
    cluster: u64,
    options: &ConvertOptions,
) -> Result<ClusterSet> {
    let mut held = ClusterSet::default();
    let cluster = cluster.max(1);
    if options.sparse_size == 0 {
        held.insert(0..parts.last().map_or(0, Part::end).div_ceil(cluster));
        return Ok(held);
    }
    for part in parts {
        let mut position = part.start;
        while position < part.end() {
            options.control.cancel.check()?;
            let rest = part.end() - position;
            let extent = part.image.source_extent(worker, part.in_source(position), rest).await?;
            let until = position.saturating_add(extent.len).min(part.end());
            if !extent.is_zero() {
                held.insert(position / cluster..until.div_ceil(cluster));
            }
            position = until;
        }
    }
    Ok(held)
}

/// The identities of a new image of another program.
fn identities(sources: &[Image], wanted: Identities) -> Birth {
    match (wanted, sources) {
        (Identities::Seed(seed), _) => new_foreign::birth_from(&seed.to_le_bytes()),
        (Identities::OfSource, [source]) => match &source.0.driver {
            Driver::Foreign(foreign) => match foreign.disk().identity() {
                Some(Identity::Cid(cid)) => new_foreign::birth_from(&cid.to_le_bytes()),
                Some(Identity::Uuid(uuid) | Identity::Uuids { image: uuid, .. }) => {
                    new_foreign::birth_from(&uuid)
                }
                _ => new_foreign::birth(),
            },
            Driver::Qcow2(_) | Driver::Raw(_) => new_foreign::birth(),
        },
        (Identities::OfSource, _) => new_foreign::birth(),
    }
}

/// Begins a new image of another program, with the name that it will have at last, and its identities.
async fn begin_foreign(
    worker: &Worker,
    files: ForeignFiles,
    create: &CreateOptions,
    open: &OpenOptions,
    new: &NewForeign,
    (name, birth): (&str, Birth),
) -> Result<Sink> {
    let size = create.size.unwrap_or(0);
    match new {
        NewForeign::Vmdk(vmdk) if new.is_stream() => {
            let path = files.image.path().to_owned();
            let method = open.compress.zlib().map_err(|e| e.on(&path))?;
            let packing = Packer::new(Some(method), &open.compress.pool, StreamWriter::BLOCK);
            let writer = StreamWriter::new(files.image, vmdk, size, name, &birth)?;
            let size = writer.virtual_size();
            let writer = Mutex::new(Some(DiskOrder::Foreign(Box::new(writer))));
            Ok(Sink::Stream { path, size, shown: 0, packing, writer })
        }
        _ => Ok(Sink::Blocks(BlockWriter::new(worker, files, new, size, name, &birth).await?)),
    }
}

impl Made {
    /// Opens a target that is complete, and was not open before.
    pub(super) async fn open(&self, worker: &Worker) -> Result<Image> {
        let Some((_, options)) = &self.unopened else {
            return Err(Error::new(ErrorKind::Unsupported, "the target is open").on(&self.path));
        };
        self.unlock()?;
        Image::open(worker, &self.path, options).await
    }

    fn unlock(&self) -> Result<()> {
        let unlocked = self.unopened.as_ref().map_or(Ok(()), |(file, _)| file.unlock());
        unlocked.map_err(|e| Error::from(e).on(&self.path))
    }

    /// Ends the job: a target that is complete is closed, made durable and given its name; of one that is not, nothing
    /// stays but what was there before. Gives the job's own error back, if it had one.
    pub(super) async fn finish(mut self, worker: &Worker, target: &Sink, copied: Result<()>) -> Result<()> {
        if let Err(error) = copied {
            if let (None, Some(image)) = (&self.names, target.image()) {
                // A file or device that was there before stays, so its tables are left in order as far as they go.
                // That this fails, too, adds nothing to the error there is.
                let _ = image.close(worker).await;
            }
            return Err(error);
        }
        target.finish(worker).await?;
        self.unlock()?;
        if let Some((temporary, path)) = self.names.take() {
            let (data_file, files) = (self.data_file.take(), std::mem::take(&mut self.files));
            worker.run_blocking(move || publish_with(files, &temporary, &path, data_file.as_deref())).await?;
        } else if let Some(file) = self.elsewhere {
            worker.flush(&file).await.map_err(|e| Error::from(e).on(file.path()))?;
        } else {
            let (path, data_file, mut files) = (self.path, self.data_file, std::mem::take(&mut self.files));
            let sync = move || {
                sync_files(&path, data_file.as_deref())?;
                let synced = files.names().try_for_each(sync_directory_of);
                files.keep();
                synced
            };
            worker.run_blocking(sync).await?;
        }
        self.files.keep();
        Ok(())
    }
}

/// Bytes of the largest logical sector of the sources.
pub(super) fn logical_sector(sources: &[Image]) -> u32 {
    sources.iter().map(Image::logical_sector_size).max().unwrap_or_default()
}

fn same_directory(a: &Path, b: &Path) -> bool {
    FilePlace::of(directory_of(a)) == FilePlace::of(directory_of(b))
}

/// The storage at `path`, if it is no local file.
fn open_elsewhere(path: &Path, create: &CreateOptions) -> Result<Option<File>> {
    let flags = OpenFlags::default().access(zebu_storage::Access::ReadWrite).lock(LockMode::None);
    let opened = create.remote.open_elsewhere(path, &flags).transpose();
    opened.map_err(|e| Error::from(e).on(path))
}

/// Whether what lies in the target's storage before the job shows in ranges that the job does not write.
fn shows_its_storage(create: &CreateOptions) -> bool {
    match create.preallocation {
        // All of it was overwritten with zeroes, and is not to be given back for them.
        Preallocation::Full => false,
        Preallocation::Off => create.format == Format::Raw || create.data_file_raw,
        Preallocation::Metadata | Preallocation::Falloc => true,
    }
}

/// Whether a storage has nothing yet: what it gets by growing is zero.
fn is_new(file: &File) -> bool {
    file.kind() == FileKind::Foreign && file.is_empty()
}

/// Whether what was never written shows as noise: encrypted space that was set aside before.
fn shows_ciphertext(create: &CreateOptions) -> bool {
    create.format == Format::Luks || create.encryption.is_some() && create.preallocation != Preallocation::Off
}

pub(super) fn is_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device())
}
