//! Words on the command line, and what they stand for.

use clap::builder::{PossibleValue, TypedValueParser};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::num::NonZeroU64;
use zebu_disks::Program;
use zebu_disks::size::size_argument;
use zebu_disks::words::no_creation;
pub(crate) use zebu_disks::words::{
    Aio, Discard, FORMATS, NamedFormat, ReferenceRule, aio_argument, discard_argument, format_argument,
    reference_argument, slice_size_argument, zero_policy_argument,
};
use zebu_engine::jobs::Speed;
use zebu_engine::{CacheMode, Format, Preallocation};

/// `--output`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum OutputFormat {
    /// For people.
    #[default]
    Human,
    /// For programs.
    Json,
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

/// Program whose command line a grammar, or a part of it, is of.
fn program_of(command: &clap::Command) -> Program {
    let names = command.get_bin_name().unwrap_or_default();
    Program::by_path(names.split(' ').next().unwrap_or_default().as_ref())
}

impl<T: Clone + Send + Sync + 'static> TypedValueParser for Words<T> {
    type Value = T;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<T, clap::Error> {
        let (parse, dialect) = (self.parse, program_of(command));
        (move |text: &str| parse(dialect, text)).parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        (!self.words.is_empty()).then(|| Box::new(self.words.iter().map(PossibleValue::new)) as Box<_>)
    }
}

/// Formats that are read, for an option.
pub(crate) fn formats() -> Words<NamedFormat> {
    Words { parse: NamedFormat::parse, words: FORMATS }
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
