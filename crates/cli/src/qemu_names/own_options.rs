//! Options of zebu's own, which QEMU's programs refuse as unknown.

use crate::deferred::described;
use clap::{Arg, Args, Command};

/// Options of QEMU's program `command` by the names of their fields. Beside those of its manual: `-p` of check, dd and resize, and
/// `bitmap --remove-all` of QEMU 11.
fn of_qemu(command: &str) -> &'static [&'static str] {
    match command {
        "amend" => &["quiet", "progress", "format", "cache", "force", "options"],
        "bench" => &[
            "quiet",
            "format",
            "cache",
            "count",
            "depth",
            "buffer_size",
            "step_size",
            "offset",
            "write",
            "pattern",
            "flush_interval",
            "no_drain",
            "native",
            "aio",
            "force_share",
        ],
        "bitmap" => &[
            "add",
            "remove",
            "remove-all",
            "clear",
            "enable",
            "disable",
            "merge",
            "granularity",
            "source_file",
            "source_format",
            "format",
        ],
        "check" => &["quiet", "progress", "format", "cache", "repair", "output", "force_share"],
        "commit" => &["quiet", "progress", "format", "cache", "base", "drop", "rate"],
        "compare" => &["quiet", "progress", "a_format", "b_format", "strict", "cache", "force_share"],
        "convert" => &[
            "quiet",
            "progress",
            "source_format",
            "target_format",
            "target_options",
            "source_cache",
            "target_cache",
            "source_snapshot",
            "backing",
            "backing_format",
            "no_create",
            "target_is_zero",
            "target_image_opts",
            "compress",
            "sparse_size",
            "copy_range_offloading",
            "parallel",
            "oob_writes",
            "rate",
            "bitmaps",
            "skip_broken_bitmaps",
            "salvage",
            "force_share",
        ],
        "create" => &["quiet", "format", "options", "backing", "backing_format", "backing_unsafe"],
        "dd" => &["progress", "format", "output_format", "force_share"],
        "info" => &["format", "backing_chain", "output", "force_share"],
        "map" => &["format", "start_offset", "max_length", "output", "force_share"],
        "measure" => &["target_format", "options", "size", "format", "snapshot", "output", "force_share"],
        "rebase" => &[
            "quiet",
            "progress",
            "format",
            "cache",
            "backing",
            "backing_format",
            "backing_cache",
            "backing_unsafe",
            "compress",
            "force_share",
        ],
        "resize" => &["quiet", "progress", "format", "shrink", "preallocation"],
        "snapshot" => &["list", "create", "apply", "delete", "quiet", "format", "force_share"],
        "qemu-io" => &[
            "cmd",
            "format",
            "read_only",
            "snapshot",
            "copy_on_read",
            "nocache",
            "cache",
            "discard",
            "misalign",
            "native_aio",
            "aio",
            "force_share",
        ],
        _ => &[],
    }
}

/// Options of every command.
const OF_ALL: [&str; 5] = ["image_opts", "object", "help", "version", "trace"];

/// Names that no command line can hold: their first characters stand for options that can't be given.
const UNTYPABLE: &str =
    "\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

/// Describes a command of zebu's with the options that QEMU's program has.
pub(super) fn with_options_of_qemu<T: Args>(command: Command) -> Command {
    let known = of_qemu(command.get_name());
    let mut own = 0;
    described::<T>(command).mut_args(|option| {
        let id = option.get_id().as_str();
        if option.is_positional() || known.contains(&id) || OF_ALL.contains(&id) {
            return option;
        }
        own += 1;
        untypable(option, own)
    })
}

/// An option that is left at its default, and told of nowhere.
fn untypable(option: Arg, number: usize) -> Arg {
    let name = UNTYPABLE.get(..number).unwrap_or(UNTYPABLE);
    option.short(None::<char>).long(name).alias(None::<&'static str>).hide(true)
}
