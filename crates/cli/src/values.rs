//! Words on the command line, and what they stand for.

use crate::program::Program;
use crate::size::size_argument;
use clap::builder::{PossibleValue, TypedValueParser};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use zebu::jobs::Speed;
use zebu::{CacheMode, Format, Preallocation, RefPolicy, ZeroPolicy};
use zebu_remote::nbd::NbdAddress;

/// `--output`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum OutputFormat {
    /// For people.
    #[default]
    Human,
    /// For programs.
    Json,
}

/// The engine of the I/O, as the user asks for it.
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

/// The treatment of discards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Discard {
    /// Nothing is done.
    Ignore,
    /// The space is given back.
    Unmap,
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
    /// `prefix=URL`.
    Prefix(String),
    /// `all`.
    All,
}

/// Policy that all `--allow-refs` make together.
pub(crate) fn reference_policy(rules: &[ReferenceRule]) -> Result<RefPolicy, &'static str> {
    if rules.contains(&ReferenceRule::None) {
        if rules.iter().any(|rule| *rule != ReferenceRule::None) {
            return Err("--allow-refs none contradicts the other values of --allow-refs");
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

/// A parser of words, by the grammar that they are in; completions can offer some.
#[derive(Clone)]
pub(crate) struct Words<T> {
    parse: fn(Program, &str) -> Result<T, String>,
    words: &'static [&'static str],
}

impl<T> Words<T> {
    /// A parser without a list.
    pub(crate) fn unlisted(parse: fn(Program, &str) -> Result<T, String>) -> Self {
        Self { parse, words: &[] }
    }
}

impl<T: Clone + Send + Sync + 'static> TypedValueParser for Words<T> {
    type Value = T;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<T, clap::Error> {
        let (parse, dialect) = (self.parse, Program::of_grammar(command));
        (move |text: &str| parse(dialect, text)).parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        (!self.words.is_empty()).then(|| Box::new(self.words.iter().map(PossibleValue::new)) as Box<_>)
    }
}

/// Names of formats, those that guests write first.
pub(crate) const FORMATS: &[&str] =
    &["qcow2", "raw", "luks", "vmdk", "vhdx", "vpc", "vdi", "qed", "parallels", "qcow", "cloop", "dmg"];

/// Formats that are read, for an option.
pub(crate) fn formats() -> Words<NamedFormat> {
    Words { parse: NamedFormat::parse, words: FORMATS }
}

/// A format as an option names it. For QEMU, the driver of a file or of a disk stands for raw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedFormat {
    /// The format.
    pub(crate) format: Format,
    /// Its name.
    pub(crate) name: String,
}

impl NamedFormat {
    /// Reads a name.
    pub(crate) fn parse(dialect: Program, text: &str) -> Result<Self, String> {
        let is_driver = ["file", "host_device", "null-co", "null-aio", "blkdebug", "nbd"].contains(&text);
        let format = match Format::from_name(text) {
            Some(format) => format,
            None if is_driver && dialect.is_qemu() => Format::Raw,
            None => return Err(format!("Unknown file format '{text}' (there are {})", FORMATS.join(", "))),
        };
        Ok(Self { format, name: text.to_owned() })
    }

    /// Refuses the name of an image that does not lead to the driver which stands for the format.
    pub(crate) fn check(&self, image: &OsStr) -> Result<(), String> {
        let image = image.to_str().unwrap_or_default();
        let prefix = format!("{}:", self.name);
        match self.name.as_str() {
            _ if image.starts_with("json:") || image.starts_with(&prefix) => Ok(()),
            "nbd" if NbdAddress::is_name(image) => Ok(()),
            "nbd" => Err("File name string for NBD must start with 'nbd:'".to_owned()),
            "null-co" | "null-aio" => {
                Err(format!("The only allowed filename for this driver is '{prefix}//'"))
            }
            "blkdebug" => Err(format!("Driver 'blkdebug' needs a name that begins with {prefix} or json:")),
            _ => Ok(()),
        }
    }

    /// Refuses the name of an image that can't be made by the driver which stands for the format.
    pub(crate) fn check_new(&self, image: &OsStr) -> Result<(), String> {
        match self.name.as_str() {
            name @ ("null-co" | "null-aio" | "blkdebug") => Err(no_creation(name)),
            _ => self.check(image),
        }
    }
}

impl From<Format> for NamedFormat {
    fn from(format: Format) -> Self {
        Self { format, name: format.name().to_owned() }
    }
}

/// Formats in which images are made, for an option.
pub(crate) fn target_formats() -> Words<NamedFormat> {
    Words { parse: target_format_argument, words: &["qcow2", "raw", "luks", "vmdk", "vhdx", "vpc", "vdi"] }
}

/// `--speed`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SpeedName {
    /// As the latency of the disk allows, so that others who use it are not held up.
    #[default]
    Adaptive,
    /// Without regard to others.
    Full,
}

impl SpeedName {
    /// As the library calls it.
    pub(crate) fn speed(self) -> Speed {
        match self {
            Self::Adaptive => Speed::Adaptive,
            Self::Full => Speed::Full,
        }
    }
}

/// Formats whose images' size can be told beforehand, for an option.
pub(crate) fn measured_formats() -> Words<Format> {
    Words { parse: measured_format_argument, words: &["qcow2", "raw", "luks"] }
}

/// Cache modes, for an option.
pub(crate) fn caches() -> Words<CacheMode> {
    Words {
        parse: |_, text| cache_argument(text),
        words: &["none", "writeback", "writethrough", "directsync", "unsafe"],
    }
}

/// A format by its name.
pub(crate) fn format_argument(dialect: Program, text: &str) -> Result<Format, String> {
    NamedFormat::parse(dialect, text).map(|named| named.format)
}

/// Formats and drivers of QEMU that zebu does not know and QEMU makes no images with.
const READ_BY_QEMU: [&str; 2] = ["bochs", "vvfat"];

/// Formats whose images may be changed, for an option.
pub(crate) fn amended_formats() -> Words<NamedFormat> {
    let parse = |dialect: Program, text: &str| {
        if dialect.is_qemu() && READ_BY_QEMU.contains(&text) {
            return Err(format!("Format driver '{text}' does not support option amendment"));
        }
        NamedFormat::parse(dialect, text)
    };
    Words { parse, words: FORMATS }
}

/// A format in which images can be made, by its name.
fn target_format_argument(dialect: Program, text: &str) -> Result<NamedFormat, String> {
    let is_only_read = |text: &str| matches!(text, "cloop" | "dmg") || READ_BY_QEMU.contains(&text);
    if dialect.is_qemu() && is_only_read(text) {
        return Err(no_creation(text));
    }
    let named = NamedFormat::parse(dialect, text)?;
    if named.format.can_be_made() {
        return Ok(named);
    }
    Err(format!(
        "images in the format {text} can be read, not written (qcow2, raw, luks, vmdk, vhdx, vpc and vdi can be)"
    ))
}

/// The refusal to make an image, in QEMU's words.
fn no_creation(name: &str) -> String {
    format!("Format driver '{name}' does not support image creation")
}

/// A format whose images' size can be told beforehand, by its name.
fn measured_format_argument(dialect: Program, text: &str) -> Result<Format, String> {
    let named = NamedFormat::parse(dialect, text)?;
    if named.format.is_writable() && named == named.format.into() {
        return Ok(named.format);
    }
    Err(format!("Format driver '{text}' does not support size measurement (qcow2, raw and luks do)"))
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
        _ => match text.split_once('=') {
            Some(("dir", path)) if !path.is_empty() => Ok(ReferenceRule::Directory(PathBuf::from(path))),
            Some(("prefix", url)) if url.contains(':') => Ok(ReferenceRule::Prefix(url.to_owned())),
            _ => Err("expected none, local, dir=PATH, prefix=URL or all".to_owned()),
        },
    }
}

/// A rate in bytes per second, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rate(pub(crate) Option<NonZeroU64>);

/// A rate in bytes per second. 0 is no limit, as with qemu-img.
pub(crate) fn rate_argument(text: &str) -> Result<Rate, String> {
    let bytes = size_argument(text).map_err(|error| error.to_string())?;
    Ok(Rate(NonZeroU64::new(bytes)))
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
        assert!(
            format_argument(Program::Zebu, "nosuch").unwrap_err().starts_with("Unknown file format 'nosuch'")
        );
        assert!(
            FORMATS
                .iter()
                .all(|name| format_argument(Program::Zebu, name).is_ok_and(|format| format.name() == *name))
        );
        let written: Vec<&str> = FORMATS
            .iter()
            .copied()
            .filter(|name| target_format_argument(Program::Zebu, name).is_ok())
            .collect();
        assert_eq!(written, ["qcow2", "raw", "luks", "vmdk", "vhdx", "vpc", "vdi"]);
        assert!(target_format_argument(Program::Zebu, "qed").unwrap_err().contains("not written"));
    }
}
