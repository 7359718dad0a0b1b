//! New qcow2 images that are written in the order of the disk, each byte of the file once ([`zebu_qcow2::stream`]): into a file
//! that can't be changed, as an upload.

use crate::compress::{Bursts, CodecPool, Method, Outcome, Work};
use crate::new_foreign::{FileAppender, WritesUnderWay};
use crate::options::CreateOptions;
use crate::qcow2::life::create::new_header;
use crate::{Error, ErrorKind, Preallocation, Result};
use zebu_qcow2::stream::{ImageStream, StreamError};
use zebu_storage::{File, IoBufs, Worker};

/// A guest cluster.
#[derive(Debug)]
pub(crate) enum ClusterBytes {
    Packed(Vec<u8>),
    Plain(IoBufs),
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
    /// Begins an image for a disk of `size` bytes.
    ///
    /// # Errors
    /// Options contradict each other, or need what can't be written in order.
    pub(crate) fn new(file: File, create: &CreateOptions, size: u64) -> Result<Self> {
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
        let size = size.checked_next_multiple_of(512).ok_or_else(|| {
            Error::new(ErrorKind::InvalidArgument, "the image size is too large").on(file.path())
        })?;
        let header = new_header(create, size).map_err(|e| e.on(file.path()))?;
        let stream = ImageStream::new(header).map_err(|e| stream_error(&file, &e))?;
        Ok(Self { file: FileAppender::new(file, create.cluster_size), stream, size })
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
        file.write_bytes(worker, 0, &first).await?;
        file.flush(worker).await?;
        Ok(self.file.len())
    }
}

fn stream_error(file: &File, error: &StreamError) -> Error {
    Error::new(ErrorKind::InvalidArgument, error.to_string()).on(file.path())
}
