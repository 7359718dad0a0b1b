//! Arguments of `zebu convert`.

use crate::arguments::{BackingKeyArgs, EngineArgs, ForceShareArg, ImageArgs};
use crate::compression::CompressionArgs;
use crate::new_file::ForceArg;
use crate::packed::PackedArgs;
use crate::values::{NamedFormat, OutputFormat, Rate, Words, caches, formats, rate_argument, target_formats};
use crate::watch::ProgressArg;
use std::ffi::OsString;
use zebu_disks::Program;
use zebu_disks::size::size_argument;
use zebu_engine::{CacheMode, Format};

/// Arguments of `zebu convert`.
#[derive(Debug, clap::Args)]
pub(crate) struct ConvertArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    pub(super) quiet: bool,

    #[command(flatten)]
    pub(super) progress: ProgressArg,

    /// Format of the sources [default: probed]
    #[arg(short = 'f', long, value_name = "FMT", value_parser = formats())]
    pub(super) source_format: Option<NamedFormat>,

    /// Format of the target [default: by the name's suffix]
    #[arg(short = 'O', long, value_name = "FMT", value_parser = target_formats())]
    pub(super) target_format: Option<NamedFormat>,

    /// Options of the new image, as key=value,... (-o help lists them)
    #[arg(short = 'o', long, value_name = "OPTIONS")]
    pub(super) target_options: Vec<String>,

    /// Cache mode of the sources [default: O_DIRECT on ext4 and XFS where at most half of a source is in the page cache and none needs a key; else through it, and it keeps no more of them than it had]
    #[arg(short = 'T', long, value_name = "CACHE", value_parser = caches())]
    pub(super) source_cache: Option<CacheMode>,

    /// Cache mode of the target [default: none where its file system can, else one write at a time]
    #[arg(short = 't', long, value_name = "CACHE", value_parser = caches())]
    pub(super) target_cache: Option<CacheMode>,

    /// Convert this internal snapshot, given by its id or name
    #[arg(short = 'l', long, value_name = "SNAPSHOT")]
    pub(super) source_snapshot: Option<String>,

    /// Make the target an overlay of this image, which holds what the backing file of the source holds
    #[arg(short = 'B', long, value_name = "FILENAME")]
    pub(super) backing: Option<String>,

    /// Format of the backing file of the target
    #[arg(short = 'F', long, value_name = "FMT", value_parser = formats())]
    pub(super) backing_format: Option<NamedFormat>,

    /// Write into a target that exists; everything in it is overwritten
    #[arg(short = 'n', long)]
    pub(super) no_create: bool,

    /// The target reads as zero everywhere: zeroes need not be written (with -n)
    #[arg(hide_short_help = true, long, requires = "no_create")]
    pub(super) target_is_zero: bool,

    /// The target's name is a list of options (with -n)
    #[arg(hide_short_help = true, long, requires = "no_create")]
    pub(super) target_image_opts: bool,

    /// Compress the clusters of the target (-o compression_type chooses how)
    #[arg(short = 'c', long)]
    pub(super) compress: bool,

    #[command(flatten)]
    pub(super) compression: CompressionArgs,

    /// Runs of zeroes of at least so many bytes become holes; 0 writes everything [default: 4k]
    #[arg(hide_short_help = true, short = 'S', long, value_name = "SIZE", value_parser = sparse_argument)]
    pub(super) sparse_size: Option<u64>,

    /// How data gets to the target
    #[arg(long, value_enum, default_value_t = Copy::Auto, value_name = "WAY")]
    pub(super) copy: Copy,

    /// The same as --copy range
    #[arg(hide_short_help = true, short = 'C', long, conflicts_with = "copy")]
    pub(super) copy_range_offloading: bool,

    /// Pieces of work in flight [default: 8; 1 if the target is written through the page cache unasked]
    #[arg(hide_short_help = true, short = 'm', long, value_name = "NUM", value_parser = pieces())]
    pub(super) parallel: Option<u16>,

    /// Threads that copy
    #[arg(hide_short_help = true, long, value_name = "NUM", value_parser = clap::value_parser!(u16).range(1..=64), default_value = "1")]
    pub(super) workers: u16,

    /// Memory for copy buffers, at least 64k
    #[arg(hide_short_help = true, long, value_name = "SIZE", value_parser = buffer_argument, default_value = "64M")]
    pub(super) buffer_memory: usize,

    /// Let clusters lie in the order in which they come, not in that of the disk: the same disk makes another file each time
    #[arg(hide_short_help = true, short = 'W', long)]
    pub(super) oob_writes: bool,

    /// Derive the identities of the target from this number, in formats that have such (vmdk, vhdx, vpc, vdi) [default: from the identity of the source, else random]
    #[arg(hide_short_help = true, long, value_name = "NUM", conflicts_with = "no_create")]
    pub(super) seed: Option<u64>,

    /// Copy at most so many bytes a second; 0: no limit
    #[arg(short = 'r', long, value_name = "RATE", value_parser = rate_argument)]
    pub(super) rate: Option<Rate>,

    /// Copy the persistent dirty bitmaps of the source too
    #[arg(long)]
    pub(super) bitmaps: bool,

    /// Leave out bitmaps that are inconsistent
    #[arg(hide_short_help = true, long, requires = "bitmaps")]
    pub(super) skip_broken_bitmaps: bool,

    /// Go on where the source can't be read: such ranges become zero, and are listed
    #[arg(long)]
    pub(super) salvage: bool,

    /// Say what would be read, and write nothing
    #[arg(long)]
    pub(super) dry_run: bool,

    #[command(flatten)]
    pub(super) packed: PackedArgs,

    #[command(flatten)]
    pub(super) force: ForceArg,

    #[command(flatten)]
    pub(super) force_share: ForceShareArg,

    /// Print what was done, in this format
    #[arg(long, value_enum, value_name = "human|json", hide_possible_values = true)]
    pub(super) output: Option<OutputFormat>,

    #[command(flatten)]
    pub(super) backing_keys: BackingKeyArgs,

    #[command(flatten)]
    pub(super) image: ImageArgs,

    #[command(flatten)]
    pub(super) engine: EngineArgs,

    /// The sources, copied one behind the other, and the target; '-' is standard input or output
    #[arg(value_name = "FILES", num_args = 1..)]
    pub(super) files: Vec<OsString>,
}

/// `--copy`.
#[derive(Debug, Clone, std::marker::Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Copy {
    /// A reflink where file system and offsets allow it, else through buffers.
    Auto,
    /// A reflink or an error.
    Reflink,
    /// By the kernel (copy_file_range).
    Range,
    /// Through buffers.
    Buffers,
}

impl ConvertArgs {
    /// The format of the target, asked for or not.
    pub(super) fn target_format(&self) -> Format {
        self.target_format.as_ref().map_or(Format::Raw, |named| named.format)
    }
}

fn sparse_argument(text: &str) -> Result<u64, String> {
    let bytes =
        size_argument(text).map_err(|error| format!("Invalid buffer size for sparse output: {error}"))?;
    if bytes % 512 != 0 {
        return Err("Invalid buffer size for sparse output: it must be 0 or a multiple of 512".to_owned());
    }
    Ok(bytes)
}

fn pieces() -> Words<u16> {
    Words::unlisted(parallel_argument)
}

fn parallel_argument(dialect: Program, text: &str) -> Result<u16, String> {
    let most = if dialect.is_qemu() { 16 } else { 256 };
    let what = if dialect.is_qemu() { "number of coroutines" } else { "number of pieces" };
    match text.parse() {
        Ok(number) if (1..=most).contains(&number) => Ok(number),
        Ok(_) => Err(format!("Invalid {what} specified. Must be between 1 and {most}.")),
        Err(_) => Err(format!("Invalid {what} specified: '{text}'.")),
    }
}

fn buffer_argument(text: &str) -> Result<usize, String> {
    let bytes = size_argument(text).map_err(|error| error.to_string())?;
    match usize::try_from(bytes) {
        Ok(bytes) if bytes >= 64 << 10 => Ok(bytes),
        _ => Err("at least 64k are needed".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_options_are_checked() {
        use std::num::NonZeroU64;
        assert_eq!(sparse_argument("0"), Ok(0));
        assert_eq!(sparse_argument("64k"), Ok(65536));
        assert!(sparse_argument("1000").is_err());
        assert!(sparse_argument("1x").is_err());
        assert_eq!(buffer_argument("1M"), Ok(1 << 20));
        assert!(buffer_argument("4k").is_err());
        assert_eq!(rate_argument("0"), Ok(Rate(None)));
        assert_eq!(rate_argument("1k"), Ok(Rate(NonZeroU64::new(1024))));
        assert!(rate_argument("-1").is_err() && rate_argument("").is_err());
    }
}
