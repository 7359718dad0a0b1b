//! Words of options that open images, and what they stand for.

use crate::program::Program;
use crate::size::size_argument;
use std::ffi::OsStr;
use std::path::PathBuf;
use zebu_engine::{Format, RefPolicy, ZeroPolicy};
use zebu_remote::nbd::NbdAddress;

/// The engine of the I/O, as the user asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aio {
    /// io_uring, or threads where it is refused.
    IoUring,
    /// Threads.
    Threads,
}

impl Aio {
    /// As the worker's word.
    pub fn engine(self) -> zebu_engine::storage::Engine {
        match self {
            Aio::IoUring => zebu_engine::storage::Engine::Auto,
            Aio::Threads => zebu_engine::storage::Engine::Threads,
        }
    }
}

/// The treatment of discards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Discard {
    /// Nothing is done.
    Ignore,
    /// The space is given back.
    Unmap,
}

/// One `--allow-refs`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReferenceRule {
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
pub fn reference_policy(rules: &[ReferenceRule]) -> Result<RefPolicy, &'static str> {
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

/// Names of formats, those that guests write first.
pub const FORMATS: &[&str] =
    &["qcow2", "raw", "luks", "vmdk", "vhdx", "vpc", "vdi", "qed", "parallels", "qcow", "cloop", "dmg"];

/// A format as an option names it. For QEMU, the driver of a file or of a disk stands for raw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedFormat {
    /// The format.
    pub format: Format,
    /// Its name.
    pub name: String,
}

impl NamedFormat {
    /// Reads a name.
    pub fn parse(dialect: Program, text: &str) -> Result<Self, String> {
        let is_driver = ["file", "host_device", "null-co", "null-aio", "blkdebug", "nbd"].contains(&text);
        let format = match Format::from_name(text) {
            Some(format) => format,
            None if is_driver && dialect.is_qemu() => Format::Raw,
            None => return Err(format!("Unknown file format '{text}' (there are {})", FORMATS.join(", "))),
        };
        Ok(Self { format, name: text.to_owned() })
    }

    /// Refuses the name of an image that does not lead to the driver which stands for the format.
    pub fn check(&self, image: &OsStr) -> Result<(), String> {
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
    pub fn check_new(&self, image: &OsStr) -> Result<(), String> {
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

/// A format by its name.
pub fn format_argument(dialect: Program, text: &str) -> Result<Format, String> {
    NamedFormat::parse(dialect, text).map(|named| named.format)
}

/// The refusal to make an image, in QEMU's words.
pub fn no_creation(name: &str) -> String {
    format!("Format driver '{name}' does not support image creation")
}

/// An engine of I/O by its name.
pub fn aio_argument(text: &str) -> Result<Aio, String> {
    match text {
        "io_uring" | "native" => Ok(Aio::IoUring),
        "threads" => Ok(Aio::Threads),
        _ => Err(format!("Invalid aio option: {text} (there are io_uring, threads, native)")),
    }
}

/// A treatment of discards by its name.
pub fn discard_argument(text: &str) -> Result<Discard, String> {
    match text {
        "ignore" | "off" => Ok(Discard::Ignore),
        "unmap" | "on" => Ok(Discard::Unmap),
        _ => Err(format!("Invalid discard option: {text} (there are ignore and unmap)")),
    }
}

/// A way of zeroing by its name.
pub fn zero_policy_argument(text: &str) -> Result<ZeroPolicy, String> {
    match text {
        "auto" => Ok(ZeroPolicy::Auto),
        "write" => Ok(ZeroPolicy::Write),
        "fallocate" => Ok(ZeroPolicy::Fallocate),
        _ => Err(format!("Invalid zero policy: {text} (there are auto, write, fallocate)")),
    }
}

/// A slice size; how large a cluster is, is known when the image is open.
pub fn slice_size_argument(text: &str) -> Result<u32, String> {
    let bytes = size_argument(text).map_err(|error| error.to_string())?;
    if !bytes.is_power_of_two() || !(512..=2 << 20).contains(&bytes) {
        return Err("L2 cache entry size must be a power of two between 512 and the cluster size".to_owned());
    }
    Ok(bytes as u32)
}

/// One value of `--allow-refs`.
pub fn reference_argument(text: &str) -> Result<ReferenceRule, String> {
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
}
