//! `zebu restore`: a point in time of a disk, copied out of a store as `zebu convert` copies images.

use super::shared::parse_store;
use crate::commands::convert::{self, ConvertArgs};
use crate::failure::Failure;
use crate::new_file::format_by_suffix;
use clap::Parser;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use zebu_disks::{Context, is_on_server};
use zebu_store::points::{PointName, PointsPlace};

/// Arguments of `zebu restore`.
#[derive(Debug, clap::Args)]
pub(crate) struct RestoreArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    /// Show progress, as convert does
    #[arg(short, long)]
    progress: bool,

    /// Format of the target [default: by the suffix of a new file; raw for devices and disks on servers]
    #[arg(short = 'O', long, value_name = "FMT")]
    target_format: Option<String>,

    /// Options of the new image, as of convert
    #[arg(short = 'o', long, value_name = "OPTIONS")]
    target_options: Vec<String>,

    /// Compress the clusters of the target
    #[arg(short = 'c', long)]
    compress: bool,

    /// Replace a file that is there
    #[arg(long)]
    force: bool,

    /// Pieces of work in flight
    #[arg(short = 'm', long, value_name = "NUM")]
    parallel: Option<u16>,

    /// Copy at most so many bytes a second
    #[arg(short = 'r', long, value_name = "RATE")]
    rate: Option<String>,

    /// Format of the report, if there is to be one
    #[arg(long, value_name = "human|json")]
    output: Option<String>,

    /// Certificates of the authorities by which servers of https:// names must be signed, a PEM file
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<OsString>,

    /// Keep what is read of objects in this directory, for this command and others
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<OsString>,

    /// The store and its point; without @POINT the newest
    #[arg(value_name = "STORE[@POINT]", value_parser = parse_store)]
    store: PointName,

    /// A new file, a device, or a disk on an NBD server
    #[arg(value_name = "TARGET")]
    target: OsString,
}

/// The command line of the conversion.
#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    convert: ConvertArgs,
}

/// The kind of place that the name of the target leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    New,
    File,
    Device,
    Server,
}

impl Target {
    fn of(name: &OsStr) -> Self {
        if name.to_str().is_some_and(is_on_server) {
            return Self::Server;
        }
        match std::fs::metadata(Path::new(name)) {
            Ok(found) if found.is_file() && found.len() > 0 => Self::File,
            Ok(found) if !found.is_file() => Self::Device,
            _ => Self::New,
        }
    }
}

/// Runs the command.
pub(crate) fn run(args: &RestoreArgs, context: &Context) -> Result<u8, Failure> {
    let target = Target::of(&args.target);
    if target == Target::File && !args.force {
        return Err(Failure::creating_name(&args.target, "it exists already: --force replaces it"));
    }
    let format = match (&args.target_format, target) {
        (Some(format), _) => format.clone(),
        (None, Target::Device | Target::Server) => "raw".to_owned(),
        (None, Target::New | Target::File) => format_by_suffix(&args.target).map(str::to_owned).ok_or_else(|| {
            Failure::usage(format!(
                "the name '{}' does not show its format: give -O raw for the bytes of the disk, or -O qcow2 for an image",
                Path::new(&args.target).display()
            ))
        })?,
    };
    let mut words: Vec<OsString> = ["restore", "-f", "raw", "-O", &format].map(OsString::from).to_vec();
    let flags =
        [(args.quiet, "-q"), (args.progress, "-p"), (args.compress, "-c"), (target == Target::Device, "-n")];
    words.extend(flags.iter().filter(|(given, _)| *given).map(|(_, flag)| OsString::from(flag)));
    let numbers = args.parallel.map(|number| number.to_string());
    let values = [("-m", &numbers), ("-r", &args.rate), ("--output", &args.output)];
    for (option, value) in values {
        if let Some(value) = value {
            words.extend([option.into(), value.into()]);
        }
    }
    for (option, value) in [("--tls-ca", &args.tls_ca), ("--cache-dir", &args.cache_dir)] {
        if let Some(value) = value {
            words.extend([option.into(), value.clone()]);
        }
    }
    for options in &args.target_options {
        words.extend(["-o".into(), options.into()]);
    }
    if let PointsPlace::Folder(folder) = args.store.place()
        && let (Ok(folder), Ok(made)) = (folder.canonicalize(), Path::new(&args.target).canonicalize())
        && made.starts_with(folder)
    {
        return Err(Failure::creating_name(&args.target, "it is a part of the store that is restored from"));
    }
    // What is replaced stays until all of the point is there.
    let replacement =
        (target == Target::File).then(|| Replacement::of(Path::new(&args.target))).transpose()?;
    let made = replacement.as_ref().map_or_else(|| args.target.clone(), |new| new.path.clone().into());
    words.extend(["--".into(), args.store.to_string().into(), made]);
    let mut line = Line::try_parse_from(words).map_err(|error| {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default();
        Failure::usage(first.strip_prefix("error: ").unwrap_or(first).to_owned())
    })?;
    let code = convert::run(&mut line.convert, context)?;
    match replacement {
        Some(new) if code == 0 => new.rename().map(|()| code),
        _ => Ok(code),
    }
}

/// A file that takes the place of another one when it is complete. Dropped before, it is removed.
struct Replacement {
    path: PathBuf,
    place: PathBuf,
}

impl Replacement {
    /// A new name beside `place`.
    fn of(place: &Path) -> Result<Self, Failure> {
        // A link stays one.
        let fail = |error: std::io::Error| Failure::creating_name(place.as_os_str(), &error.to_string());
        let place = std::fs::canonicalize(place).map_err(fail)?;
        let mut name = OsString::from(".");
        name.push(place.file_name().unwrap_or_default());
        name.push(format!(".{}.restored", std::process::id()));
        Ok(Self { path: place.with_file_name(name), place })
    }

    fn rename(self) -> Result<(), Failure> {
        let fail = |error: std::io::Error| Failure::creating_name(self.place.as_os_str(), &error.to_string());
        // As the file before, for those who may use it.
        let before = std::fs::metadata(&self.place).map_err(fail)?;
        std::fs::set_permissions(&self.path, before.permissions()).map_err(fail)?;
        std::fs::File::open(&self.path).and_then(|file| file.sync_all()).map_err(fail)?;
        std::fs::rename(&self.path, &self.place).map_err(fail)?;
        let directory = self.place.parent().unwrap_or(Path::new("/"));
        std::fs::File::open(directory).and_then(|directory| directory.sync_all()).map_err(fail)
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        // After a rename there is nothing of that name.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn convert_knows_all_words() {
        let words = [
            "restore", "-f", "raw", "-O", "qcow2", "-q", "-p", "-c", "-m", "4", "-r", "1M", "--output",
            "json",
        ];
        let more = ["--tls-ca", "x", "--cache-dir", "y", "-o", "compat=1.1", "--", "store:a/b", "c"];
        Line::try_parse_from(words.iter().chain(&more)).unwrap();
        Line::try_parse_from(["restore", "-n", "--", "store:a/b", "c"]).unwrap();
    }
}
