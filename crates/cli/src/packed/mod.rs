//! Packed sources: files in gzip, xz, zstd, bzip2 and lz4, and members of tar files such as OVAs, found by their first bytes.
//!
//! A packed file is unpacked into one without a name, because most images are read at any place. A member of a tar file
//! is read where it lies.

mod decode;
mod ovf;
pub(crate) mod registry;
mod spill;
mod tar;
mod window;

use crate::failure::Failure;
use crate::image_spec::ImageSpec;
use crate::named_disks::is_remote;
use crate::output::printable::printable;
use crate::program;
use crate::size::size_argument;
use crate::watch::Watch;
use decode::Packing;
use registry::Unpacked;
use spill::Stopped;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tar::{Member, Range};
use window::Window;
use zebu::{Access, Format, PackedFormat};

/// Packings around each other that are taken away: a disk in xz in an OVA in gzip has three.
const MOST_LAYERS: usize = 4;
/// Bytes that packings are known by.
const SNIFFED: u64 = 4096;
/// Bytes of an OVF descriptor.
const MOST_DESCRIPTOR: u64 = 1 << 20;
/// Names that an error lists.
const MOST_LISTED: usize = 20;

/// Options of commands whose sources may be packed.
#[derive(Debug, clap::Args)]
pub(crate) struct PackedArgs {
    /// The disk in a tar file or OVA [default: the one that its OVF names]
    #[arg(long, value_name = "NAME")]
    member: Option<String>,

    /// Unpack at most so many bytes of a packed source
    #[arg(long, value_name = "SIZE", value_parser = size_argument, default_value = "256G")]
    max_size: u64,
}

impl PackedArgs {
    /// Whether a part of a tar file is named.
    pub(crate) fn has_member(&self) -> bool {
        self.member.is_some()
    }
}

/// Where unpacked bytes come to lie: in `TMPDIR` if that is set, else beside the target.
fn spill_directory(target: &Path) -> PathBuf {
    match std::env::var_os("TMPDIR").filter(|directory| !directory.is_empty()) {
        Some(directory) => PathBuf::from(directory),
        None => match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        },
    }
}

/// Unpacks a source, if it is packed: the name in `spec` leads to what it holds from then on. `target` is what will be
/// written.
pub(crate) fn prepare(
    args: &PackedArgs,
    spec: &ImageSpec,
    target: &Path,
    watch: &Watch,
) -> Result<(), Failure> {
    let path = &spec.path;
    let fail = |reason: &str| Failure::opening_name(path.as_os_str(), reason);
    let no_member = |why: &str| match &args.member {
        Some(_) => Err(fail(&format!("--member names a part of a tar file, {why}"))),
        None => Ok(()),
    };
    if spec.options.format == Some(Format::Raw) {
        return no_member("and with the format raw the very bytes of the file are the disk");
    }
    // QEMU's programs unpack nothing; and what is to be changed can't be.
    if program::called().is_qemu() || spec.options.access == Access::ReadWrite || is_remote(path) {
        return no_member("which this is not read as");
    }
    // Not opened if it is none: a pipe would block.
    if !std::fs::metadata(path).is_ok_and(|found| found.is_file()) {
        return no_member("and this is no regular file");
    }
    let Ok(file) = File::open(path) else { return Ok(()) };
    let original = file.metadata().map_err(|e| fail(&e.to_string()))?;
    let mut layer = Layer { range: Range { start: 0, len: original.len() }, file, is_whole: false };
    let (mut layers, mut member_found) = (0, false);
    loop {
        let first = layer.first_bytes().map_err(|e| fail(&e.to_string()))?;
        if let Some(packing) = Packing::of(&first) {
            let directory = spill_directory(target);
            layer =
                layer.unpack(packing, &directory, args.max_size, watch).map_err(|reason| match reason {
                    Some(reason) => fail(&reason),
                    None => Failure::interrupted(),
                })?;
        } else if PackedFormat::of(&first) == Some(PackedFormat::Tar) {
            let member = choose(&layer, args.member.as_deref()).map_err(|reason| fail(&reason))?;
            member_found = true;
            layer.range = member.range;
            layer.is_whole = false;
        } else {
            break;
        }
        layers += 1;
        if layers > MOST_LAYERS {
            return Err(fail(&format!("it is packed more than {MOST_LAYERS} times: unpack it first")));
        }
    }
    if !member_found {
        no_member("and this is none")?;
    }
    if layers == 0 {
        return Ok(());
    }
    let is_target = std::fs::metadata(target)
        .is_ok_and(|found| (found.dev(), found.ino()) == (original.dev(), original.ino()));
    if is_target {
        return Err(fail("it is the target, too, and writing it would destroy it: give another target"));
    }
    let unpacked = if layer.is_whole {
        Unpacked::Whole(layer.file)
    } else {
        Unpacked::Window(Window::new(layer.file, layer.range).map_err(|e| fail(&e.to_string()))?)
    };
    registry::note(path, unpacked);
    Ok(())
}

/// A file without the packings that were taken away around it.
struct Layer {
    file: File,
    range: Range,
    /// Whether it is all of the file, which has no name.
    is_whole: bool,
}

impl Layer {
    fn first_bytes(&self) -> io::Result<Vec<u8>> {
        let mut first = Vec::new();
        spill::RangeReader::new(&self.file, self.range).take(SNIFFED).read_to_end(&mut first)?;
        Ok(first)
    }

    /// Unpacks it. The error has a reason unless it was cancelled.
    fn unpack(
        &self,
        packing: Packing,
        directory: &Path,
        limit: u64,
        watch: &Watch,
    ) -> Result<Self, Option<String>> {
        let beside = format!("the unpacked bytes need a file in '{}' (or TMPDIR)", directory.display());
        let out = spill::unnamed_file(directory).map_err(|e| Some(format!("{beside}: {e}")))?;
        let on = |done: u64| {
            watch.note("unpacking", done, limit.max(done));
            !watch.cancel().is_cancelled()
        };
        let unpacked = spill::unpack(&self.file, self.range, packing, &out, limit, on);
        let len = unpacked.map_err(|stopped| match stopped {
            Stopped::Cancelled => None,
            Stopped::TooLarge => Some(format!(
                "the {} file holds more than {limit} bytes: allow more with --max-size",
                packing.name()
            )),
            Stopped::Source(error) => Some(format!("can't unpack the {} file: {error}", packing.name())),
            Stopped::Target(error) => Some(format!("{beside}: {error}")),
        })?;
        Ok(Self { file: out, range: Range { start: 0, len }, is_whole: true })
    }
}

/// The member of a tar file that is asked for, or else the one disk in it.
fn choose(layer: &Layer, asked: Option<&str>) -> Result<Member, String> {
    let members = tar::members(&layer.file, layer.range).map_err(|e| e.to_string())?;
    let named = |name: &str| {
        let plain = |name: &str| name.strip_prefix("./").unwrap_or(name).to_owned();
        members.iter().find(|member| plain(&member.name) == plain(name)).cloned()
    };
    let list = |names: &mut dyn Iterator<Item = &str>| {
        let names: Vec<String> = names.take(MOST_LISTED).map(printable_name).collect();
        names.join(", ")
    };
    let all = || list(&mut members.iter().map(|member| member.name.as_str()));
    if let Some(name) = asked {
        return named(name).ok_or_else(|| format!("the tar file has no member '{name}': it has {}", all()));
    }
    let descriptor = members.iter().find(|member| member.name.to_ascii_lowercase().ends_with(".ovf"));
    let Some(descriptor) = descriptor else {
        return match &members[..] {
            [only] => Ok(only.clone()),
            [] => Err("the tar file is empty".to_owned()),
            _ => Err(format!("choose one of the members of the tar file with --member: {}", all())),
        };
    };
    if descriptor.range.len > MOST_DESCRIPTOR {
        return Err(format!("the OVF descriptor has {} bytes", descriptor.range.len));
    }
    let mut text = Vec::new();
    let read = spill::RangeReader::new(&layer.file, descriptor.range).read_to_end(&mut text);
    read.map_err(|e| e.to_string())?;
    let disks = ovf::disk_files(&String::from_utf8_lossy(&text));
    match &disks[..] {
        [only] => named(only).ok_or_else(|| {
            format!(
                "the OVF names the disk '{}', which is not in the file: it has {}",
                printable(only),
                all()
            )
        }),
        [] => Err(format!("the OVF names no disk: choose a member with --member: {}", all())),
        _ => {
            let names = list(&mut disks.iter().map(String::as_str));
            Err(format!("the OVF names several disks: choose one with --member: {names}"))
        }
    }
}

fn printable_name(name: &str) -> String {
    format!("'{}'", printable(name))
}
