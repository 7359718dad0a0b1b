//! New qcow2 images whose clusters get their places in the order of the disk ([`zebu_qcow2::stream`]), so that a disk makes the
//! same file every time. Those that [`ImageWriter`] makes are written in that order, too, each byte of the file once: packed ones, and
//! those in a file that can't be changed, as an upload. [`PlacedImage`] has the bytes of clusters written in any order.

use crate::compress::{Bursts, CodecPool, Method, Outcome, Work};
use crate::new_foreign::{FileAppender, FilePlace, GrowingFile, WritesUnderWay};
use crate::options::CreateOptions;
use crate::qcow2::life::create::new_header;
use crate::sync::Mutex;
use crate::{Error, ErrorKind, Preallocation, Result};
use std::ops::Range;
use std::path::Path;
use zebu_qcow2::Header;
use zebu_qcow2::cluster_set::ClusterSet;
use zebu_qcow2::piped::PipedImage;
use zebu_qcow2::stream::{ImageStream, StreamError};
use zebu_storage::{File, FileKind, IoBufs, Worker};

/// A guest cluster.
#[derive(Debug)]
pub(crate) enum ClusterBytes {
    Packed(Vec<u8>),
    Plain(IoBufs),
    /// Zeroes, where nothing would show something else.
    Zero,
}

/// The way in which blocks are packed.
#[derive(Debug, Clone)]
pub(crate) struct Packer {
    /// `None`: they are left as they are.
    method: Option<Method>,
    bursts: Bursts,
    pool: CodecPool,
    /// Bytes of a block.
    block: u64,
}

impl Packer {
    /// Blocks of `block` bytes, packed by `method`.
    pub(crate) fn new(method: Option<Method>, pool: &CodecPool, block: u64) -> Self {
        Self { method, bursts: Bursts::Whole, pool: pool.clone(), block }
    }

    /// The same, by threads that compress for so long at a time.
    pub(crate) fn in_bursts(mut self, bursts: Bursts) -> Self {
        self.bursts = bursts;
        self
    }

    /// Bytes of a block.
    pub(crate) fn block(&self) -> u64 {
        self.block
    }

    /// Packs the block of this number. One that does not become shorter stays as it is.
    pub(crate) async fn pack(
        &self,
        worker: &Worker,
        index: u64,
        input: IoBufs,
    ) -> Result<(u64, ClusterBytes)> {
        let Some(method) = self.method else { return Ok((index, ClusterBytes::Plain(input))) };
        let work = Work::Compress { method, bursts: self.bursts, input, cluster: self.block as usize };
        let mut done = self.pool.run(worker, work).await;
        match done.outcome {
            Outcome::Bytes(_) => Ok((index, ClusterBytes::Packed(done.output().to_vec()))),
            Outcome::Incompressible => Ok((index, ClusterBytes::Plain(std::mem::take(&mut done.input)))),
            Outcome::Damaged(why) => {
                Err(Error::new(ErrorKind::Io, format!("a block could not be packed: {why}")))
            }
        }
    }
}

/// An image that is being made in an empty file.
#[derive(Debug)]
pub(crate) struct ImageWriter {
    file: FileAppender,
    stream: ImageStream,
    size: u64,
}

impl ImageWriter {
    /// Begins an image for a disk of `size` bytes in a file that can't be changed.
    ///
    /// # Errors
    /// Options contradict each other, or need what can't be written in order.
    pub(crate) fn unchangeable(file: File, create: &CreateOptions, size: u64) -> Result<Self> {
        refuse_changes(&file, create)?;
        Self::new(file, create, size)
    }

    /// Begins an image for a disk of `size` bytes, which holds all its data itself.
    ///
    /// # Errors
    /// Options contradict each other.
    pub(crate) fn new(file: File, create: &CreateOptions, size: u64) -> Result<Self> {
        let (stream, size) = begin(&file, create, size, ImageStream::new)?;
        Ok(Self { file: FileAppender::new(file, create.cluster_size), stream, size })
    }

    /// Makes the disk smaller; nothing past that end was added.
    pub(crate) fn cut(&mut self, size: u64) -> Result<()> {
        self.stream.cut(size).map_err(|e| stream_error(self.file.file(), &e))
    }

    /// Bytes of the disk.
    pub(crate) fn virtual_size(&self) -> u64 {
        self.size
    }

    /// Appends guest clusters, which come in ascending order.
    pub(crate) async fn append(
        &mut self,
        worker: &Worker,
        clusters: &[(u64, ClusterBytes)],
        writes: &mut WritesUnderWay,
    ) -> Result<()> {
        for (index, bytes) in clusters {
            let added = match bytes {
                ClusterBytes::Packed(bytes) => self.stream.packed(*index, bytes),
                ClusterBytes::Zero => self.stream.zero(*index),
                ClusterBytes::Plain(bufs) => {
                    if let [buf] = bufs.parts() {
                        self.stream.plain(*index, buf.as_slice())
                    } else {
                        let mut bytes = vec![0; bufs.len()];
                        bufs.copy_to(0, &mut bytes);
                        self.stream.plain(*index, &bytes)
                    }
                }
            };
            added.map_err(|e| stream_error(self.file.file(), &e))?;
        }
        let (_, bytes) = self.stream.take();
        self.file.gathered().extend_from_slice(&bytes);
        self.file.write_whole(worker, writes).await
    }

    /// Writes what is left, then the first cluster, which makes an image of the file; bytes of the file.
    ///
    /// # Errors
    /// The file's.
    pub(crate) async fn finish(mut self, worker: &Worker) -> Result<u64> {
        let (_, bytes, first) = self.stream.finish().map_err(|e| stream_error(self.file.file(), &e))?;
        self.file.gathered().extend_from_slice(&bytes);
        drop(bytes);
        let file = self.file.write_rest(worker).await?;
        end(worker, file, &first, first.len() as u64).await?;
        Ok(self.file.len())
    }
}

/// An image that is being written from its first byte to its last ([`zebu_qcow2::piped`]).
#[derive(Debug)]
pub(crate) struct PipedWriter {
    file: FileAppender,
    image: PipedImage,
    size: u64,
    /// Bytes of a cluster.
    cluster: u64,
}

impl PipedWriter {
    /// The header of an image for a disk of `size` bytes, whose tables have no places yet.
    ///
    /// # Errors
    /// Options contradict each other, or need what can't be written in order.
    pub(crate) fn header(file: &File, create: &CreateOptions, size: u64) -> Result<Header> {
        refuse_changes(file, create)?;
        let (header, _) = header_of(file, create, size)?;
        PipedImage::l1_entries(&header).map_err(|e| stream_error(file, &e))?;
        Ok(header)
    }

    /// Begins an image with this header and data in the clusters of `held`.
    ///
    /// # Errors
    /// The file would be too long for its format.
    pub(crate) fn new(file: File, header: Header, held: ClusterSet) -> Result<Self> {
        let (size, cluster) = (header.virtual_size(), header.geometry().cluster_size());
        let image = PipedImage::new(header, held).map_err(|e| stream_error(&file, &e))?;
        Ok(Self { file: FileAppender::new(file, 0), image, size, cluster })
    }

    /// Bytes of the disk.
    pub(crate) fn virtual_size(&self) -> u64 {
        self.size
    }

    /// The disk's size is in the header, which is gone already.
    pub(crate) fn cut(&self) -> Result<()> {
        let message = "the length of the source must be known before";
        Err(Error::new(ErrorKind::Unsupported, message).on(self.file.file().path()))
    }

    /// Appends clusters, in ascending order of their numbers.
    pub(crate) async fn append(
        &mut self,
        worker: &Worker,
        clusters: Vec<(u64, ClusterBytes)>,
        writes: &mut WritesUnderWay,
    ) -> Result<()> {
        self.write_tables(worker, writes).await?;
        for (index, bytes) in clusters {
            let ClusterBytes::Plain(bufs) = bytes else { continue };
            self.write_zeroes(worker, index, writes).await?;
            let is_held = self.image.begin(index).map_err(|e| stream_error(self.file.file(), &e))?;
            if is_held {
                let missing = self.cluster.saturating_sub(bufs.len() as u64);
                self.file.push(worker, bufs);
                self.file.gathered().extend(std::iter::repeat_n(0, missing as usize));
                self.file.write_whole(worker, writes).await?;
            } else if !bufs.parts().iter().all(|part| part.as_slice().iter().all(|byte| *byte == 0)) {
                let error = StreamError::Unexpected { cluster: index };
                return Err(stream_error(self.file.file(), &error));
            }
        }
        Ok(())
    }

    /// Writes what is left.
    pub(crate) async fn finish(mut self, worker: &Worker) -> Result<()> {
        let mut writes = WritesUnderWay::default();
        self.write_tables(worker, &mut writes).await?;
        self.write_zeroes(worker, u64::MAX, &mut writes).await?;
        writes.wait(0).await?;
        self.file.write_rest(worker).await?.flush(worker).await
    }

    async fn write_tables(&mut self, worker: &Worker, writes: &mut WritesUnderWay) -> Result<()> {
        loop {
            let tables = self.image.tables().map_err(|e| stream_error(self.file.file(), &e))?;
            let Some(bytes) = tables else { return Ok(()) };
            self.file.gathered().extend_from_slice(&bytes);
            self.file.write_whole(worker, writes).await?;
        }
    }

    /// Writes zeroes for clusters before `until` that did not come.
    async fn write_zeroes(&mut self, worker: &Worker, until: u64, writes: &mut WritesUnderWay) -> Result<()> {
        while !self.image.zeroes(until, self.file.gathered()) {
            self.file.write_whole(worker, writes).await?;
        }
        self.file.write_whole(worker, writes).await
    }
}

/// An image that is being made in an empty regular file, which reads as zero where nothing is written.
#[derive(Debug)]
pub(crate) struct PlacedImage {
    file: GrowingFile,
    size: u64,
    cluster: u64,
    /// Bytes of the backing file's disk, which show where nothing is written.
    shown: u64,
    zeroes: Zeroes,
    layout: Mutex<PlacedClusters>,
}

/// How a cluster hides the backing file.
#[derive(Debug, Clone, Copy)]
enum Zeroes {
    /// Its entry says that it reads as zero.
    Marked,
    /// It has a place in which nothing is written: version 2 has no such entries.
    Holes,
}

#[derive(Debug)]
struct PlacedClusters {
    stream: ImageStream,
    /// The cluster that was placed last, and its offset in the file.
    last: Option<(u64, u64)>,
    is_finished: bool,
}

impl PlacedImage {
    /// Begins an image for a disk of `size` bytes, which holds all its data itself. `shown`: bytes of its backing file's disk.
    ///
    /// # Errors
    /// Options contradict each other.
    pub(crate) fn new(file: File, create: &CreateOptions, size: u64, shown: u64) -> Result<Self> {
        let (stream, size) = begin(&file, create, size, ImageStream::placed)?;
        let file = GrowingFile::new(file, u64::MAX);
        let zeroes = if create.version < 3 { Zeroes::Holes } else { Zeroes::Marked };
        let layout = Mutex::new(PlacedClusters { stream, last: None, is_finished: false });
        Ok(Self { file, size, cluster: create.cluster_size, shown, zeroes, layout })
    }

    pub(crate) fn virtual_size(&self) -> u64 {
        self.size
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.file().path()
    }

    /// The file, in which places are written.
    pub(crate) fn file(&self) -> &GrowingFile {
        &self.file
    }

    /// Bytes of a cluster.
    pub(crate) fn cluster_size(&self) -> u64 {
        self.cluster
    }

    /// Bytes of the backing file's disk.
    pub(crate) fn shown(&self) -> u64 {
        self.shown
    }

    /// Adds places for the bytes in `filled` (ranges of a buffer, in order) of a range of the disk that begins at `offset`. Callers come in
    /// the order of the disk.
    ///
    /// # Errors
    /// The file would be too long for its format.
    pub(crate) fn place(
        &self,
        offset: u64,
        filled: &[Range<usize>],
        places: &mut Vec<FilePlace>,
    ) -> Result<()> {
        let mut layout = self.layout.lock();
        for range in filled {
            let mut at = range.start;
            while at < range.end {
                let guest = offset + at as u64;
                let (index, within) = (guest / self.cluster, guest % self.cluster);
                let len = (range.end - at).min((self.cluster - within) as usize);
                let host = layout.host_of(index, places).map_err(|e| self.error(&e))?;
                let bytes = within..within + len as u64;
                layout.stream.fill(index, bytes).map_err(|e| self.error(&e))?;
                FilePlace::add_part(places, host + within, at, len);
                at += len;
            }
        }
        Ok(())
    }

    /// Hides the backing file in whole clusters, and adds the places of tables. Callers come in the order of the disk.
    ///
    /// # Errors
    /// The file would be too long for its format.
    pub(crate) fn zero(&self, range: Range<u64>, places: &mut Vec<FilePlace>) -> Result<()> {
        let mut layout = self.layout.lock();
        for index in range.start / self.cluster..range.end.div_ceil(self.cluster) {
            let done = match self.zeroes {
                Zeroes::Marked => layout.stream.zero(index),
                Zeroes::Holes => layout.host_of(index, places).map(drop),
            };
            done.map_err(|e| self.error(&e))?;
        }
        layout.add_tables(places);
        Ok(())
    }

    /// Makes the disk smaller; nothing past that end was placed.
    pub(crate) fn cut(&self, size: u64) -> Result<()> {
        self.layout.lock().stream.cut(size).map_err(|e| self.error(&e))
    }

    /// Writes the last tables, then the first cluster, which makes an image of the file, once. No write is under way.
    ///
    /// # Errors
    /// The file's.
    pub(crate) async fn finish(&self, worker: &Worker) -> Result<()> {
        let (finished, tables) = {
            let mut layout = self.layout.lock();
            if std::mem::replace(&mut layout.is_finished, true) {
                return Ok(());
            }
            (layout.stream.finish(), layout.stream.take_tables())
        };
        let (at, bytes, first) = finished.map_err(|e| self.error(&e))?;
        for (at, table) in tables {
            self.file.write_bytes(worker, at, &table).await?;
        }
        let whole = at.saturating_add(bytes.len() as u64);
        self.file.write_bytes(worker, at, &bytes).await?;
        drop(bytes);
        self.file.set_len(worker, whole).await?;
        end(worker, &self.file, &first, self.cluster).await
    }

    fn error(&self, error: &StreamError) -> Error {
        stream_error(self.file.file(), error)
    }
}

impl PlacedClusters {
    /// The offset in the file of a cluster, which gets a place if it is not the last that got one.
    fn host_of(&mut self, index: u64, places: &mut Vec<FilePlace>) -> std::result::Result<u64, StreamError> {
        if let Some((_, host)) = self.last.filter(|(last, _)| *last == index) {
            return Ok(host);
        }
        let host = self.stream.place(index)?;
        self.add_tables(places);
        self.last = Some((index, host));
        Ok(host)
    }

    fn add_tables(&mut self, places: &mut Vec<FilePlace>) {
        let tables = self.stream.take_tables().into_iter();
        places.extend(tables.map(|(host, bytes)| FilePlace::Table { host, bytes }));
    }
}

/// Refuses what is written into a file again after its place was passed.
fn refuse_changes(file: &File, create: &CreateOptions) -> Result<()> {
    let refused = [
        (create.backing.is_some(), "a backing file"),
        (create.data_file.is_some(), "an external data file"),
        (create.encryption.is_some(), "encryption"),
        (create.preallocation != Preallocation::Off, "preallocation"),
        (create.lazy_refcounts, "lazy refcounts"),
    ];
    if let Some((_, what)) = refused.iter().find(|(is_wanted, _)| *is_wanted) {
        let message = format!("{what} can't be had in an image that is written in the order of its disk");
        return Err(Error::new(ErrorKind::Unsupported, message).on(file.path()));
    }
    Ok(())
}

/// The header of a new image and the bytes of its disk.
fn header_of(file: &File, create: &CreateOptions, size: u64) -> Result<(Header, u64)> {
    let size = size.checked_next_multiple_of(512).ok_or_else(|| {
        Error::new(ErrorKind::InvalidArgument, "the image size is too large").on(file.path())
    })?;
    Ok((new_header(create, size).map_err(|e| e.on(file.path()))?, size))
}

/// The layout of a new image and the bytes of its disk.
fn begin(
    file: &File,
    create: &CreateOptions,
    size: u64,
    layout: fn(Header) -> std::result::Result<ImageStream, StreamError>,
) -> Result<(ImageStream, u64)> {
    let (header, size) = header_of(file, create, size)?;
    let stream = layout(header).map_err(|e| stream_error(file, &e))?;
    Ok((stream, size))
}

/// Writes the first bytes of a file: last of all those of the header, `header` bytes, which make an image of it when all else is
/// durable.
async fn end(worker: &Worker, file: &GrowingFile, first: &[u8], header: u64) -> Result<()> {
    let (first, tables) = first.split_at((header as usize).min(first.len()));
    if !tables.is_empty() {
        file.write_bytes(worker, header, tables).await?;
    }
    if file.file().kind() == FileKind::Regular {
        file.flush(worker).await?;
    }
    file.write_bytes(worker, 0, first).await?;
    file.flush(worker).await
}

fn stream_error(file: &File, error: &StreamError) -> Error {
    Error::new(ErrorKind::InvalidArgument, error.to_string()).on(file.path())
}
