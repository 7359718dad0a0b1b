//! The worker of a command, and its images.

use crate::arguments::EngineArgs;
use crate::damage_notice::DamageNotice;
use crate::failure::Failure;
use crate::image_failure::image_failure;
use crate::output::stderr;
use crate::suggestion::meant;
use crate::values::Aio;
use crate::watch::{ProgressMode, Watch};
use std::future::Future;
use std::os::unix::fs::FileExt;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;
use zebu_disks::graph::{Filtered, filtered};
use zebu_disks::{Context, ImageSpec, Program, printable};
use zebu_engine::jobs::Cancel;
use zebu_engine::storage::{Worker, WorkerConfig, WorkerKind};
use zebu_engine::{Access, Chain, DamageMark, ErrorKind, Format, Image, OpenOptions, Purpose, Sharing};
use zebu_qcow2::Autoclear;

/// Bytes of a cache that is enough for any image's tables.
const AMPLE_CACHE: u64 = 1 << 30;

/// How often work that can't look at a switch itself is asked whether it was cancelled.
const CANCEL_POLL: Duration = Duration::from_millis(50);

/// One worker on the thread of the command.
pub(crate) struct Session {
    context: Context,
    damage: DamageNotice,
    worker: Worker,
    config: WorkerConfig,
    /// Whether the way of the I/O is told on standard error.
    pub(crate) verbose: bool,
}

impl Session {
    /// A worker as the command line asks for it; `image_aio`, which image options name, counts where it doesn't.
    pub(crate) fn start(
        context: &Context,
        args: &EngineArgs,
        image_aio: Option<Aio>,
    ) -> Result<Self, Failure> {
        Self::start_with_depth(context, args, image_aio, 0)
    }

    /// The same, with room for at least `depth` requests in flight.
    pub(crate) fn start_with_depth(
        context: &Context,
        args: &EngineArgs,
        image_aio: Option<Aio>,
        depth: u32,
    ) -> Result<Self, Failure> {
        let mut config = worker_config(args, image_aio);
        config.depth = config.depth.max(depth.next_power_of_two());
        config.threads = config.threads.max(depth.min(64) as usize);
        let worker = Worker::new(&config)?;
        if args.verbose {
            stderr::tell(context.dialect, &describe_worker(&worker));
        }
        Ok(Self {
            context: context.clone(),
            damage: DamageNotice::of(context.dialect),
            worker,
            config,
            verbose: args.verbose,
        })
    }

    /// Has reads leave no page in the page cache that was not there before.
    pub(crate) fn read_uncached(&mut self) {
        self.worker = self.worker.reading_uncached();
    }

    /// The command line that this is the worker of.
    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// The program whose grammar, defaults and messages are asked for.
    pub(crate) fn dialect(&self) -> Program {
        self.context.dialect
    }

    /// The message of an image that was marked as corrupt.
    pub(crate) fn damage(&self) -> &DamageNotice {
        &self.damage
    }

    /// The worker.
    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }

    /// How further workers are made.
    pub(crate) fn config(&self) -> &WorkerConfig {
        &self.config
    }

    /// Opens an image, with its filters if it has some; the failure names it.
    pub(crate) fn open(&self, spec: &ImageSpec) -> Result<Image, Failure> {
        Ok(self.open_filtered(spec)?.top)
    }

    /// Opens an image with its filters; the failure names it.
    pub(crate) fn open_filtered(&self, spec: &ImageSpec) -> Result<Filtered, Failure> {
        let image = self.open_unfiltered(spec)?;
        if spec.filters.is_empty() {
            return Ok(Filtered { top: image.clone(), image });
        }
        Ok(filtered(&self.context.disks, &self.worker, spec, image)?)
    }

    /// Opens an image as if it had no filters, which show nothing of what it is made of; the failure names it.
    pub(crate) fn open_unfiltered(&self, spec: &ImageSpec) -> Result<Image, Failure> {
        if spec.detect_zeroes.is_some() && spec.options.access == Access::ReadWrite {
            return Err(Failure::opening_name(
                spec.path.as_os_str(),
                "Parameter 'detect-zeroes' is not supported by this command",
            ));
        }
        let mut options = spec.options.clone();
        if self.context.dialect.is_qemu() {
            self.guess_raw(spec, &mut options);
            options.damage = DamageMark::Set;
        }
        // QEMU raises a cache that is too small for its image; one that is too large is refused.
        let may_be_small = |bytes: &u64| self.context.dialect.is_qemu() && *bytes < AMPLE_CACHE;
        let asked = options.cache_size.filter(may_be_small);
        if asked.is_some() {
            options.cache_size = None;
        }
        self.worker
            .block_on(async {
                let mut image = Image::open(&self.worker, &spec.path, &options).await;
                // A format that can't be written is read all the same; a write fails.
                if self.context.dialect == Program::QemuIo
                    && matches!(&image, Err(error) if error.kind() == ErrorKind::Unsupported)
                    && let Ok(read) =
                        Image::open(&self.worker, &spec.path, &options.access(Access::ReadOnly)).await
                    && matches!(read.format(), Format::Foreign(_))
                {
                    image = Ok(read);
                }
                let image = image?;
                if let Some(bytes) = asked {
                    image.set_cache_size(bytes.max(image.min_cache_size()))?;
                }
                // QEMU marks bitmaps as in use when it opens an image; who looks meanwhile, or after a crash, finds them so.
                let is_served = matches!(self.context.dialect, Program::QemuIo | Program::QemuNbd);
                let is_written = is_served && spec.options.access == Access::ReadWrite;
                // The same goes for features that are no longer kept.
                if is_written && (!image.bitmaps().is_empty() || has_unknown_autoclear(&image)) {
                    image.take_bitmaps_into_use(&self.worker).await?;
                }
                Ok(image)
            })
            .map_err(|error| {
                image_failure(spec, &self.context, &error).adding(&self.snapshot_meant(spec, &error))
            })
    }

    /// The snapshot that was probably meant, where there is none of the name.
    fn snapshot_meant(&self, spec: &ImageSpec, error: &zebu_engine::Error) -> String {
        let Some(name) = spec.options.snapshot.as_deref().filter(|_| !self.context.dialect.is_qemu()) else {
            return String::new();
        };
        if !error.message().starts_with("there is no snapshot") {
            return String::new();
        }
        let mut looking =
            spec.options.clone().sharing(Sharing::Unlocked).chain(Chain::TopOnly).purpose(Purpose::Inspect);
        looking.snapshot = None;
        let found = self.worker.block_on(async {
            let image = Image::open(&self.worker, &spec.path, &looking).await.ok()?;
            let snapshots = image.snapshots();
            let _ = image.close(&self.worker).await;
            Some(snapshots)
        });
        let found = found.unwrap_or_default();
        meant(name, "snapshots", found.iter().map(|snapshot| snapshot.name.as_str()))
    }

    /// Takes a file that looks like no image for raw where nobody named the format, and warns, as QEMU's programs do. Not
    /// for qemu-nbd: its clients could write a header that is taken for another format the next time.
    fn guess_raw(&self, spec: &ImageSpec, options: &mut OpenOptions) {
        let is_asked = options.format.is_none() && options.access == Access::ReadWrite;
        if !is_asked || self.context.dialect == Program::QemuNbd {
            return;
        }
        let reading = options
            .clone()
            .access(Access::ReadOnly)
            .sharing(Sharing::Unlocked)
            .chain(Chain::TopOnly)
            .purpose(Purpose::Inspect);
        let guessed = self.worker.block_on(async {
            let image = Image::open(&self.worker, &spec.path, &reading).await.ok()?;
            let format = image.format();
            let _ = image.close(&self.worker).await;
            Some(format)
        });
        if guessed == Some(Format::Raw) {
            stderr::warn(&format!(
                "WARNING: Image format was not specified for '{}' and probing guessed raw.\n         Specify the 'raw' \
                 format explicitly (-f raw): it may be taken for another one next time.",
                printable(&spec.path.to_string_lossy())
            ));
            options.format = Some(Format::Raw);
        }
    }

    /// Runs `work` with an open image and closes it, whether or not `work` succeeded. Of two failures the first is
    /// told.
    pub(crate) fn with_image<T>(
        &self,
        spec: &ImageSpec,
        work: impl FnOnce(&Image) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        // A signal that came between would leave an image that is written without its last tables and bitmaps.
        let _watch = match spec.options.access {
            Access::ReadWrite => Some(Watch::start(ProgressMode::None)?),
            Access::ReadOnly => None,
        };
        self.with(spec, self.open(spec)?, work)
    }

    /// The same, of the image below its filters.
    pub(crate) fn with_unfiltered<T>(
        &self,
        spec: &ImageSpec,
        work: impl FnOnce(&Image) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.with(spec, self.open_unfiltered(spec)?, work)
    }

    fn with<T>(
        &self,
        spec: &ImageSpec,
        image: Image,
        work: impl FnOnce(&Image) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let result = work(&image);
        let closed = self.close(&image, spec.options.access);
        let value = result?;
        closed?;
        Ok(value)
    }

    /// Closes an image. For one that was only read, nothing can be lost any more, so a failure is none.
    pub(crate) fn close(&self, image: &Image, access: Access) -> Result<(), Failure> {
        let result = self.worker.block_on(image.close(&self.worker));
        match access {
            // Whoever was told that the image is corrupt knows.
            Access::ReadWrite if self.damage.is_told() => Ok(()),
            Access::ReadWrite => result.map_err(|error| Failure::during("could not finish writing", &error)),
            Access::ReadOnly => Ok(()),
        }
    }

    /// Runs `future` until it is done or `cancel` is thrown; `None` then. What it had in flight is left to the worker.
    pub(crate) fn run_until_cancelled<T>(
        &self,
        cancel: &Cancel,
        future: impl Future<Output = T>,
    ) -> Option<T> {
        let worker = &self.worker;
        worker.block_on(async {
            let mut work = pin!(future);
            let mut stop = pin!(async {
                while !cancel.is_cancelled() {
                    worker.sleep(CANCEL_POLL).await;
                }
            });
            std::future::poll_fn(|context| {
                if let Poll::Ready(value) = work.as_mut().poll(context) {
                    return Poll::Ready(Some(value));
                }
                stop.as_mut().poll(context).map(|()| None)
            })
            .await
        })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let disks = &self.context.disks;
        disks.remote.finish_cache();
        disks.remote.tell_given_up();
        if self.verbose {
            disks.remote.tell_transfers(&disks.uploads);
        }
    }
}

/// How workers are made for this command line.
pub(crate) fn worker_config(args: &EngineArgs, image_aio: Option<Aio>) -> WorkerConfig {
    WorkerConfig::default().engine(args.aio.or(image_aio).unwrap_or(Aio::IoUring).engine())
}

/// The engine of the I/O, and why it is not io_uring.
fn describe_worker(worker: &Worker) -> String {
    let kind = match worker.kind() {
        WorkerKind::IoUring => "I/O runs on io_uring",
        WorkerKind::Threads => "I/O runs on threads",
        _ => "I/O runs on a simulated disk",
    };
    match worker.fallback_reason() {
        Some(reason) => format!("{kind}; io_uring is not used: {reason}"),
        None => kind.to_owned(),
    }
}

/// Whether the header of a qcow2 image in a local file has autoclear features that nobody here knows.
fn has_unknown_autoclear(image: &Image) -> bool {
    /// Where the version and the features are.
    const FIELDS: [u64; 2] = [4, 88];
    let (mut version, mut features) = ([0; 4], [0; 8]);
    let read = std::fs::File::open(image.path()).and_then(|file| {
        file.read_exact_at(&mut version, FIELDS[0])?;
        file.read_exact_at(&mut features, FIELDS[1])
    });
    let features = Autoclear::from_bits_retain(u64::from_be_bytes(features));
    image.format() == Format::Qcow2
        && read.is_ok()
        && u32::from_be_bytes(version) >= 3
        && !features.difference(Autoclear::KNOWN).is_empty()
}
