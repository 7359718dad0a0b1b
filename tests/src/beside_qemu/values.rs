//! Values that options are given, and the rest of a command line.

use super::help::CliOption;

/// The word that stands for the file whose state matters.
pub const FILE: &str = "FILE";
/// Options in place of a file's name.
pub const FILE_OPTIONS: &str = "driver=qcow2,file.driver=file,file.filename=FILE";

const FORMATS: &[&str] = &["qcow2", "raw", "nosuch"];
const CACHES: &[&str] = &["none", "writethrough", "unsafe", "nosuch"];
const OBJECTS: &[&str] = &["secret,id=s,data=x", "nosuch,id=s"];
const ENGINES: &[&str] = &["threads", "io_uring", "nosuch"];
const SNAPSHOTS: &[&str] = &["one", "nosuch", "snapshot.name=one"];

/// The values that an option of a command is tried with; one empty text for an option without a value.
///
/// # Errors
/// The option is not known here: QEMU has a new one, and its values have to be written down.
pub fn of(command: &str, option: &CliOption) -> Result<&'static [&'static str], String> {
    if !option.has_value {
        return Ok(&[""]);
    }
    Ok(match (command, option.name()) {
        (_, "target-format" | "output-format") => &["qcow2", "raw", "vmdk", "nosuch"],
        ("rebase" | "convert" | "create", "backing-format") => &["raw", "qcow2", "nosuch"],
        (_, "format" | "a-format" | "b-format" | "source-format") => FORMATS,
        (_, "cache" | "source-cache" | "target-cache" | "backing-cache") => CACHES,
        (_, "output") => &["human", "json", "nosuch"],
        (_, "object") => OBJECTS,
        ("check", "repair") => &["leaks", "all", "nosuch"],
        (_, "source-snapshot") | ("measure", "snapshot") => SNAPSHOTS,
        (_, "options" | "target-options") => {
            &["cluster_size=4k", "help", "nosuch=1", "size=64k", "compat=0.10"]
        }
        (_, "sparse-size") => &["0", "4k", "nosuch"],
        (_, "parallel") => &["1", "16", "0", "17", "nosuch"],
        (_, "rate") => &["1G", "nosuch"],
        (_, "backing" | "base") => &["base.raw", "nosuch.raw", "a.qcow2"],
        (_, "granularity") => &["64k", "1000", "nosuch"],
        (_, "merge") => &["b0", "nosuch"],
        (_, "source-file") => &["a.qcow2", "nosuch.qcow2"],
        (_, "start-offset" | "max-length") => &["64k", "0", "nosuch"],
        ("measure", "size") => &["1M", "nosuch"],
        (_, "preallocation") => &["off", "metadata", "full", "nosuch"],
        ("snapshot", "create") => &["new"],
        ("snapshot", "apply" | "delete") => &["one", "nosuch"],
        ("bench", "count" | "depth") => &["2", "0", "nosuch"],
        ("bench", "buffer-size" | "step-size" | "offset") => &["4k", "nosuch"],
        (_, "aio") => ENGINES,
        ("bench", "pattern") => &["7", "256"],
        ("bench", "flush-interval") => &["1", "nosuch"],
        (_, "trace") => &["nosuch*"],
        ("qemu-io", "cmd") => &["length", "nosuch"],
        (_, "discard") => &["unmap", "ignore", "nosuch"],
        (command, name) => {
            return Err(format!("{command} has the option --{name}, for which values.rs has no values"));
        }
    })
}

/// A command line of `qemu-img` without the option that is tried: words before it and behind it.
///
/// # Errors
/// The command is not known here.
pub fn rest_of(
    command: &str,
    option: &CliOption,
) -> Result<(&'static [&'static str], &'static [&'static str]), String> {
    Ok(match (command, option.name()) {
        ("amend", _) => (&[], &["-o", "compat=1.1", FILE]),
        ("bench", _) => (&["-c", "4"], &[FILE]),
        ("bitmap", "remove" | "clear" | "enable" | "disable" | "merge") => (&[], &[FILE, "b0"]),
        ("bitmap", "source-file" | "source-format") => (&["--merge", "b0"], &[FILE, "b0"]),
        ("bitmap", "add") => (&[], &[FILE, "b9"]),
        ("bitmap", _) => (&["--add"], &[FILE, "b9"]),
        ("compare", _) => (&[], &[FILE, "a.qcow2"]),
        ("convert", _) => (&["-O", "qcow2"], &[FILE, "out.img"]),
        ("create", "backing-format") => (&["-f", "qcow2", "-b", "base.raw"], &[FILE]),
        ("create", _) => (&["-f", "qcow2"], &[FILE, "1M"]),
        ("dd", _) => (&["-O", "raw", "bs=64k"], &["if=FILE", "of=out.img"]),
        ("map", _) => (&["--output=json"], &[FILE]),
        ("measure", "size") => (&["-O", "qcow2"], &[]),
        ("measure", _) => (&["-O", "qcow2"], &[FILE]),
        ("rebase", "backing" | "backing-format") => (&["-u", "-F", "raw", "-b", "other.raw"], &[FILE]),
        ("rebase", _) => (&["-F", "raw", "-b", "other.raw"], &[FILE]),
        ("resize", "shrink") => (&[], &[FILE, "512k"]),
        ("resize", _) => (&[], &[FILE, "2M"]),
        ("check" | "commit" | "info" | "snapshot", _) => (&[], &[FILE]),
        _ => return Err(format!("qemu-img has the command {command}, for which values.rs has no line")),
    })
}

/// The arguments of a command of `qemu-io`; none for one that is left out.
///
/// # Errors
/// The command is not known here.
pub fn io_arguments(command: &str) -> Result<Option<&'static str>, String> {
    Ok(Some(match command {
        "read" | "readv" | "aio_read" | "discard" | "alloc" | "zone_append" | "zone_close"
        | "zone_finish" | "zone_open" | "zone_report" | "zone_reset" => "0 64k",
        "write" | "writev" | "aio_write" => "256k 64k",
        "map" | "info" | "length" | "flush" | "aio_flush" | "close" | "quit" | "help" => "",
        "truncate" => "2M",
        "open" => "a.qcow2",
        "reopen" => "-r",
        "sleep" => "1",
        // Without an end of their own, or the program's.
        "abort" | "sigraise" | "break" | "remove_break" | "resume" | "wait_break" => return Ok(None),
        _ => return Err(format!("qemu-io has the command {command}, for which values.rs has no arguments")),
    }))
}
