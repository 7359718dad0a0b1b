//! The options that several commands share, and the words that their values are.

use crate::failure::Failure;
use crate::image_opts::ImageOpts;
use crate::size::size_argument;
use clap::Args;
use std::ffi::OsStr;
use std::path::PathBuf;
use zebu::{Access, CacheMode, Format, OpenOptions, Preallocation, RefPolicy, Sharing, ZeroPolicy};

/// What opens an image: how the name is read, how the mapping is cached, what the image may refer to.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Opening images")]
pub(crate) struct ImageArgs {
    /// The file name is a list of options, such as `driver=qcow2,file.filename=disk.qcow2,l2-cache-size=1M`
    #[arg(long)]
    pub(crate) image_opts: bool,

    /// Memory for cached metadata of the image and its whole backing chain [default: by the disk's size]
    #[arg(long, value_name = "SIZE", value_parser = size_argument)]
    pub(crate) cache_size: Option<u64>,

    /// Bytes of one piece of an L2 table in the cache: a power of two from 512 to the cluster size
    #[arg(long, value_name = "SIZE", value_parser = slice_size_argument)]
    pub(crate) slice_size: Option<u32>,

    /// How the rest of a recycled cluster is zeroed, of which a request writes a part
    #[arg(long, value_name = "auto|write|fallocate", value_parser = zero_policy_argument)]
    pub(crate) zero_policy: Option<ZeroPolicy>,

    /// Which files that an image names (backing file, data file) may be opened; may be given more than once.
    ///
    /// `local`, the default: plain paths within the directory of the image that names them. `dir=PATH`: within that
    /// directory too. `all`: any plain path. `none`: no file.
    #[arg(long, value_name = "none|local|dir=PATH|all", value_parser = reference_argument)]
    pub(crate) allow_refs: Vec<ReferenceRule>,
}

/// What runs the I/O.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Running I/O")]
pub(crate) struct EngineArgs {
    /// What runs the I/O; io_uring falls back to threads where the kernel refuses it (`native`: the same as io_uring)
    #[arg(short = 'i', long, value_name = "io_uring|threads|native", value_parser = aio_argument)]
    pub(crate) aio: Option<Aio>,

    /// Say on standard error what runs the I/O, and why it is not io_uring
    #[arg(short, long)]
    pub(crate) verbose: bool,
}

/// `-U`.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = "Opening images")]
pub(crate) struct ForceShareArg {
    /// Open without locks, to look at an image that another program is writing; what is read may be inconsistent
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,
}

impl ForceShareArg {
    /// As the engine's word.
    pub(crate) fn sharing(self) -> Sharing {
        if self.force_share { Sharing::Unlocked } else { Sharing::Locked }
    }
}

/// `--output`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum OutputFormat {
    /// For people.
    #[default]
    Human,
    /// For programs.
    Json,
}

/// What runs the I/O, as the user asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Aio {
    /// io_uring, or threads where it is refused.
    IoUring,
    /// Threads.
    Threads,
}

impl Aio {
    /// As the worker's word.
    pub(crate) fn engine(self) -> zebu::storage::Engine {
        match self {
            Aio::IoUring => zebu::storage::Engine::Auto,
            Aio::Threads => zebu::storage::Engine::Threads,
        }
    }
}

/// One `--allow-refs`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ReferenceRule {
    /// `none`.
    None,
    /// `local`.
    Local,
    /// `dir=PATH`.
    Directory(PathBuf),
    /// `all`.
    All,
}

/// All `--allow-refs` together.
pub(crate) fn reference_policy(rules: &[ReferenceRule]) -> Result<RefPolicy, Failure> {
    if rules.contains(&ReferenceRule::None) {
        if rules.iter().any(|rule| *rule != ReferenceRule::None) {
            return Err(Failure::usage("--allow-refs none contradicts the other values of --allow-refs"));
        }
        return Ok(RefPolicy::None);
    }
    if rules.contains(&ReferenceRule::All) {
        return Ok(RefPolicy::All);
    }
    let directories: Vec<PathBuf> = rules
        .iter()
        .filter_map(|rule| match rule {
            ReferenceRule::Directory(path) => Some(path.clone()),
            _ => None,
        })
        .collect();
    if directories.is_empty() { Ok(RefPolicy::Local) } else { Ok(RefPolicy::Within(directories)) }
}

/// How a command opens one image, once everything on the command line has been looked at.
#[derive(Debug, Clone)]
pub(crate) struct ImageSpec {
    /// The file.
    pub(crate) path: PathBuf,
    /// How it is opened.
    pub(crate) options: OpenOptions,
    /// What the image options say about the engine of the I/O.
    pub(crate) aio: Option<Aio>,
    /// What the image options say about discards.
    pub(crate) discard: Option<Discard>,
}

/// What becomes of discards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Discard {
    /// Nothing is done.
    Ignore,
    /// The space is given back.
    Unmap,
}

impl ImageArgs {
    /// Reads `name` as a file name or, with `--image-opts`, as a list of options, and joins it with the rest of the
    /// command line.
    pub(crate) fn resolve(
        &self,
        name: &OsStr,
        format: Option<Format>,
        cache: CacheMode,
        access: Access,
    ) -> Result<ImageSpec, Failure> {
        let mut spec = ImageSpec {
            path: PathBuf::from(name),
            options: OpenOptions {
                format,
                access,
                cache,
                refs: reference_policy(&self.allow_refs)?,
                ..OpenOptions::default()
            },
            aio: None,
            discard: None,
        };
        if self.image_opts {
            if format.is_some() {
                return Err(Failure::usage("--image-opts and --format are mutually exclusive"));
            }
            name.to_str()
                .ok_or_else(|| "image options must be valid UTF-8".to_owned())
                .and_then(ImageOpts::parse)
                .and_then(|opts| opts.apply(&mut spec))
                .map_err(|reason| Failure::new(format!("Could not open '{}': {reason}", name.display())))?;
        }
        if let Some(bytes) = self.cache_size {
            spec.options.cache_size = Some(bytes);
        }
        if let Some(bytes) = self.slice_size {
            spec.options.slice_size = Some(bytes);
        }
        if let Some(policy) = self.zero_policy {
            spec.options.zero_policy = policy;
        }
        Ok(spec)
    }
}

/// A format by its name.
pub(crate) fn format_argument(text: &str) -> Result<Format, String> {
    match text {
        "qcow2" => Ok(Format::Qcow2),
        "raw" => Ok(Format::Raw),
        _ => Err(format!("Unknown file format '{text}' (there are qcow2 and raw)")),
    }
}

/// A cache mode by its name.
pub(crate) fn cache_argument(text: &str) -> Result<CacheMode, String> {
    match text {
        "none" | "off" => Ok(CacheMode::None),
        "writeback" => Ok(CacheMode::Writeback),
        "writethrough" => Ok(CacheMode::Writethrough),
        "directsync" => Ok(CacheMode::Directsync),
        "unsafe" => Ok(CacheMode::Unsafe),
        _ => Err(format!(
            "Invalid cache option: {text} (there are none, writeback, writethrough, directsync, unsafe)"
        )),
    }
}

/// An engine of I/O by its name.
pub(crate) fn aio_argument(text: &str) -> Result<Aio, String> {
    match text {
        "io_uring" | "native" => Ok(Aio::IoUring),
        "threads" => Ok(Aio::Threads),
        _ => Err(format!("Invalid aio option: {text} (there are io_uring, threads, native)")),
    }
}

/// A treatment of discards by its name.
pub(crate) fn discard_argument(text: &str) -> Result<Discard, String> {
    match text {
        "ignore" | "off" => Ok(Discard::Ignore),
        "unmap" | "on" => Ok(Discard::Unmap),
        _ => Err(format!("Invalid discard option: {text} (there are ignore and unmap)")),
    }
}

/// A way of zeroing by its name.
pub(crate) fn zero_policy_argument(text: &str) -> Result<ZeroPolicy, String> {
    match text {
        "auto" => Ok(ZeroPolicy::Auto),
        "write" => Ok(ZeroPolicy::Write),
        "fallocate" => Ok(ZeroPolicy::Fallocate),
        _ => Err(format!("Invalid zero policy: {text} (there are auto, write, fallocate)")),
    }
}

/// A kind of preallocation by its name.
pub(crate) fn preallocation_argument(text: &str) -> Result<Preallocation, String> {
    match text {
        "off" => Ok(Preallocation::Off),
        "metadata" => Ok(Preallocation::Metadata),
        "falloc" => Ok(Preallocation::Falloc),
        "full" => Ok(Preallocation::Full),
        _ => Err(format!("Invalid preallocation mode '{text}' (there are off, metadata, falloc, full)")),
    }
}

/// A slice size; how large a cluster is, is known when the image is open.
pub(crate) fn slice_size_argument(text: &str) -> Result<u32, String> {
    let bytes = size_argument(text).map_err(|error| error.to_string())?;
    if !bytes.is_power_of_two() || !(512..=2 << 20).contains(&bytes) {
        return Err("L2 cache entry size must be a power of two between 512 and the cluster size".to_owned());
    }
    Ok(bytes as u32)
}

/// One value of `--allow-refs`.
pub(crate) fn reference_argument(text: &str) -> Result<ReferenceRule, String> {
    match text {
        "none" => Ok(ReferenceRule::None),
        "local" => Ok(ReferenceRule::Local),
        "all" => Ok(ReferenceRule::All),
        _ => match text.strip_prefix("dir=") {
            Some("") | None => Err("expected none, local, dir=PATH or all".to_owned()),
            Some(path) => Ok(ReferenceRule::Directory(PathBuf::from(path))),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_default_to_the_directory_of_the_image() {
        assert_eq!(reference_policy(&[]).unwrap(), RefPolicy::Local);
        assert_eq!(reference_policy(&[ReferenceRule::Local]).unwrap(), RefPolicy::Local);
    }

    #[test]
    fn directories_add_up_and_all_includes_them() {
        let directory = |name: &str| reference_argument(&format!("dir={name}")).unwrap();
        assert_eq!(
            reference_policy(&[directory("/a"), ReferenceRule::Local, directory("b=c")]).unwrap(),
            RefPolicy::Within(vec!["/a".into(), "b=c".into()])
        );
        assert_eq!(reference_policy(&[directory("/a"), ReferenceRule::All]).unwrap(), RefPolicy::All);
    }

    #[test]
    fn no_references_and_some_references_contradict() {
        assert_eq!(reference_policy(&[ReferenceRule::None, ReferenceRule::None]).unwrap(), RefPolicy::None);
        assert!(reference_policy(&[ReferenceRule::None, ReferenceRule::Local]).is_err());
        assert!(reference_argument("dir=").is_err());
        assert!(reference_argument("everything").is_err());
    }

    #[test]
    fn slices_are_powers_of_two_within_the_largest_cluster() {
        assert_eq!(slice_size_argument("4k"), Ok(4096));
        assert_eq!(slice_size_argument("2M"), Ok(2 << 20));
        for text in ["256", "3k", "4M", "x"] {
            assert!(slice_size_argument(text).is_err(), "{text}");
        }
    }

    #[test]
    fn names_of_values() {
        assert_eq!(cache_argument("off"), Ok(CacheMode::None));
        assert_eq!(cache_argument("directsync"), Ok(CacheMode::Directsync));
        assert!(cache_argument("foo").unwrap_err().starts_with("Invalid cache option: foo"));
        assert_eq!(aio_argument("native"), Ok(Aio::IoUring));
        assert!(format_argument("vmdk").unwrap_err().starts_with("Unknown file format 'vmdk'"));
    }
}
