//! Whether an image may be handed to another tool: one that believes what the image says, guesses its format, and
//! opens the files that it names. Nothing but the file itself is opened to find out.

use crate::foreign::{Foreign, Guess, SNIFFED, guess, recognise};
use crate::foreign_image::parse_from;
use crate::open::flags;
use crate::options::{Access, Chain, ForeignFormat, Format, OpenOptions, Probe, Purpose, RefPolicy};
use crate::qcow2::life::open::read_snapshots;
use crate::qcow2::read_tables::{TABLE_STEP, read_bytes};
use crate::qcow2::text::text;
use crate::{Error, Image, Result};
use std::fmt;
use std::path::{Path, PathBuf};
use zebu_foreign::{Opening, ParentFormat, extent_files};
use zebu_qcow2::extension::Extension;
use zebu_qcow2::header::MAGIC;
use zebu_qcow2::{Autoclear, Compatible, Encryption, FormatError, Header, Incompatible, L1Entry, Warning};
use zebu_storage::{File, Worker};

/// A disk is called gigantic above this size in bytes...
pub const GIGANTIC_SIZE: u64 = 16 << 40;
/// ...if it is also so many times larger than the file.
pub const GIGANTIC_RATIO: u64 = 1000;

/// Where the incompatible feature bits stand in the header, bytes.
const INCOMPATIBLE: std::ops::Range<usize> = 72..80;

/// Whether a concern makes the image unsafe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConcernLevel {
    /// Worth knowing; the image may be handed on.
    Note,
    /// The image must not be handed to a tool that trusts it.
    Unsafe,
}

/// A trait that makes the name of a file in an image worse than a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NameTrait {
    /// A description in JSON, which may name any driver and any file.
    Json,
    /// A protocol before a colon: a network address or a device.
    Protocol,
    /// An absolute path.
    Absolute,
    /// Leaves a directory with `..`.
    Parent,
    /// Lies in `/proc`, `/dev` or `/sys`.
    System,
    /// Empty, or with control characters, or not UTF-8.
    Malformed,
}

impl NameTrait {
    /// The word for it in machine-readable output.
    pub fn code(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Protocol => "protocol",
            Self::Absolute => "absolute",
            Self::Parent => "parent-directory",
            Self::System => "system-directory",
            Self::Malformed => "malformed",
        }
    }

    fn of(name: &str) -> Vec<Self> {
        let before_slash = name.split('/').next().unwrap_or_default();
        let is_json = name.starts_with("json:");
        let path = Path::new(name);
        let system = ["/proc", "/dev", "/sys"].iter().any(|dir| path.starts_with(dir));
        let malformed = name.is_empty() || name.contains(|c: char| c.is_control() || c == '\u{fffd}');
        [
            (is_json, Self::Json),
            (!is_json && before_slash.contains(':'), Self::Protocol),
            (path.is_absolute(), Self::Absolute),
            (name.split('/').any(|part| part == ".."), Self::Parent),
            (system, Self::System),
            (malformed, Self::Malformed),
        ]
        .into_iter()
        .filter_map(|(holds, word)| holds.then_some(word))
        .collect()
    }
}

/// Where something was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Found {
    /// In the file.
    InFile,
    /// On the disk that a guest sees.
    OnDisk,
}

/// One thing to know before the image is handed on.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Concern {
    /// It names a backing file.
    BackingFile {
        /// As named; what is not UTF-8 is replaced.
        name: String,
        /// The bad traits of the name.
        traits: Vec<NameTrait>,
    },
    /// It names a backing file and no format of it: the format would be guessed.
    BackingFormatMissing,
    /// The format of the backing file is neither qcow2 nor raw.
    BackingFormat {
        /// As named.
        format: String,
    },
    /// Guest data is in another file.
    DataFile {
        /// As named, if it is.
        name: Option<String>,
        /// The bad traits of the name.
        traits: Vec<NameTrait>,
    },
    /// The header, or a table that hangs on it, fails a check.
    Invalid {
        /// Which.
        error: String,
    },
    /// Features that a program has to know to open the image, and that are not known.
    UnknownFeatures {
        /// Which.
        error: String,
    },
    /// Guest data is encrypted, or said to be.
    Encrypted {
        /// `aes` or `luks`.
        method: &'static str,
    },
    /// Marked corrupt.
    Corrupt,
    /// Not closed properly: its refcounts may be wrong.
    Dirty,
    /// Begins (or ends) as a file of another format does: a tool that guesses takes it for one.
    LooksLike {
        /// The other format.
        format: &'static str,
        /// Where.
        found: Found,
    },
    /// The disk is out of proportion to the file: more than [`GIGANTIC_SIZE`] and [`GIGANTIC_RATIO`] times the file.
    Gigantic {
        /// Bytes of the disk.
        virtual_size: u64,
        /// Bytes of the file.
        file_length: u64,
    },
    /// Entries of the L1 table that lead to one L2 table: a small file that describes a disk full of data, which whoever
    /// reads all of it goes over. No writer makes such an image.
    SharedTables {
        /// How many entries lead to a table of an entry before them.
        count: u64,
    },
    /// Internal snapshots: content that is not on the disk that a guest sees.
    Snapshots {
        /// How many.
        count: u32,
        /// Bytes of VM state in them.
        vm_state: u64,
    },
    /// Persistent bitmaps.
    Bitmaps {
        /// How many; 0 if they were left behind by a program that did not keep them.
        count: u32,
    },
    /// Something in the header that is ignored, as the format demands, because it is not known.
    UnknownParts {
        /// The ignored part, in words.
        what: &'static str,
    },
    /// The format was guessed from the first bytes, which a guest may have written.
    Guessed,
}

impl Concern {
    /// How bad it is.
    pub fn severity(&self) -> ConcernLevel {
        match self {
            Self::Snapshots { .. } | Self::Bitmaps { .. } | Self::UnknownParts { .. } | Self::Guessed => {
                ConcernLevel::Note
            }
            _ => ConcernLevel::Unsafe,
        }
    }

    /// The word for it in machine-readable output; words stay as they are.
    pub fn code(&self) -> &'static str {
        match self {
            Self::BackingFile { .. } => "backing-file",
            Self::BackingFormatMissing => "backing-format-missing",
            Self::BackingFormat { .. } => "backing-format",
            Self::DataFile { .. } => "data-file",
            Self::Invalid { .. } => "invalid",
            Self::UnknownFeatures { .. } => "unknown-features",
            Self::Encrypted { .. } => "encrypted",
            Self::Corrupt => "corrupt",
            Self::Dirty => "dirty",
            Self::LooksLike { .. } => "looks-like-another-format",
            Self::Gigantic { .. } => "gigantic",
            Self::SharedTables { .. } => "shared-tables",
            Self::Snapshots { .. } => "snapshots",
            Self::Bitmaps { .. } => "bitmaps",
            Self::UnknownParts { .. } => "unknown-parts",
            Self::Guessed => "format-guessed",
        }
    }

    /// The name of the file that the image names.
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::BackingFile { name, .. } => Some(name),
            Self::DataFile { name, .. } => name.as_deref(),
            _ => None,
        }
    }

    /// The bad traits of that name.
    pub fn traits(&self) -> &[NameTrait] {
        match self {
            Self::BackingFile { traits, .. } | Self::DataFile { traits, .. } => traits,
            _ => &[],
        }
    }
}

impl fmt::Display for Concern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BackingFile { name, .. } => {
                write!(f, "names the backing file '{}'{}", name.escape_debug(), Traits(self.traits()))
            }
            Self::BackingFormatMissing => {
                f.write_str("does not name the format of its backing file, which would be guessed")
            }
            Self::BackingFormat { format } => {
                write!(f, "names '{}' as the format of its backing file", format.escape_debug())
            }
            Self::DataFile { name: Some(name), .. } => {
                write!(f, "names the data file '{}'{}", name.escape_debug(), Traits(self.traits()))
            }
            Self::DataFile { name: None, .. } => f.write_str("needs a data file and does not name it"),
            Self::Invalid { error } | Self::UnknownFeatures { error } => {
                write!(f, "is not valid: {}", error.escape_debug())
            }
            Self::Encrypted { method } => write!(f, "is encrypted ({method}): its data can't be looked at"),
            Self::Corrupt => f.write_str("is marked corrupt (repair it first)"),
            Self::Dirty => f.write_str("was not closed properly (repair it first)"),
            Self::LooksLike { format, found: Found::InFile } => {
                write!(f, "looks like {format}: a tool that guesses the format takes it for that")
            }
            Self::LooksLike { format, found: Found::OnDisk } => {
                write!(f, "has a disk that looks like {format}: a raw copy of it would be taken for that")
            }
            Self::Gigantic { virtual_size, file_length } => {
                write!(f, "has a disk of {virtual_size} bytes in a file of {file_length} bytes")
            }
            Self::SharedTables { count } => write!(
                f,
                "has {count} entries of the L1 table that lead to the L2 table of another entry: it describes more data \
                 than the file can hold (zebu check)"
            ),
            Self::Snapshots { count, vm_state } => {
                write!(f, "has {count} internal snapshots with {vm_state} bytes of VM state")
            }
            Self::Bitmaps { count: 0 } => f.write_str("has persistent bitmaps that are no longer consistent"),
            Self::Bitmaps { count } => write!(f, "has {count} persistent bitmaps"),
            Self::UnknownParts { what } => write!(f, "has unknown {what}, which are ignored"),
            Self::Guessed => f.write_str("has a format that was guessed, since none was given"),
        }
    }
}

/// The words for traits in brackets.
struct Traits<'a>(&'a [NameTrait]);

impl fmt::Display for Traits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        let words: Vec<&str> = self.0.iter().map(|word| word.code()).collect();
        write!(f, " ({})", words.join(", "))
    }
}

/// The verdict on an image before it is handed to another tool.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verdict {
    /// As opened.
    pub filename: PathBuf,
    /// As given, or as guessed.
    pub format: Format,
    /// All concerns, the unsafe ones first.
    pub concerns: Vec<Concern>,
}

impl Verdict {
    /// Whether no concern makes the image unsafe.
    pub fn is_safe(&self) -> bool {
        self.concerns.iter().all(|concern| concern.severity() < ConcernLevel::Unsafe)
    }
}

/// Judges the image file at `path`. Of `options`, the format, the cache mode and the sharing count. No file that the
/// image names is opened.
///
/// # Errors
/// The file can't be opened or read. That it is not a valid image is no error but a concern.
pub async fn assess(worker: &Worker, path: &Path, options: &OpenOptions) -> Result<Verdict> {
    let options = OpenOptions {
        access: Access::ReadOnly,
        refs: RefPolicy::None,
        purpose: Purpose::Inspect,
        chain: Chain::TopOnly,
        ..options.clone()
    };
    let file = options.remote.open(path, &flags(&options)).map_err(|e| Error::from(e).on(path))?;
    let format = match options.format {
        Some(format) => format,
        None => match guess(worker, &file, options.probe).await? {
            Guess::Known(format) => format,
            Guess::Foreign(_) => Format::Raw,
        },
    };
    let mut concerns = Vec::new();
    match format {
        Format::Raw => {
            let looks_like = match guess(worker, &file, Probe::BothEnds).await? {
                Guess::Known(Format::Raw) => None,
                Guess::Known(other) => Some(other.name()),
                Guess::Foreign(foreign) => Some(foreign.name()),
            };
            let found = Found::InFile;
            concerns.extend(looks_like.map(|format| Concern::LooksLike { format, found }));
        }
        Format::Luks => concerns.push(Concern::Encrypted { method: "luks" }),
        Format::Foreign(foreign) => {
            if let Some(len) = assess_foreign(worker, &file, foreign, &mut concerns).await {
                let looks_like = first_of_disk(worker, path, &options, format, len).await;
                note_look(looks_like.map(|first| taken_for(&first)), &mut concerns);
            }
            // A tool that guesses takes the file for the other one, and for what stands in its headers.
            let other = match guess(worker, &file, Probe::BothEnds).await? {
                Guess::Known(other) => Some(other.name()).filter(|_| other != Format::Raw && other != format),
                // A part of the image may be packed, such as the first one of a DMG.
                Guess::Foreign(Foreign::Image(name)) => Some(name),
                Guess::Foreign(Foreign::Packed(_) | Foreign::NoDisk(_)) => None,
            };
            let found = Found::InFile;
            concerns.extend(other.map(|format| Concern::LooksLike { format, found }));
        }
        Format::Qcow2 => {
            if let Some(header) = assess_header(worker, &file, &mut concerns).await? {
                assess_tables(worker, &file, &header, &mut concerns).await;
                // What unknown features change is not known either: the disk stays unread.
                let unknown = concerns.iter().any(|c| matches!(c, Concern::UnknownFeatures { .. }));
                let looks_like =
                    if unknown { Ok(None) } else { assess_disk(worker, path, &options, &header).await };
                note_look(looks_like, &mut concerns);
            }
        }
    }
    if options.format.is_none() {
        concerns.push(Concern::Guessed);
    }
    concerns.sort_by_key(|concern| std::cmp::Reverse(concern.severity()));
    Ok(Verdict { filename: path.to_owned(), format, concerns })
}

/// Notes what a disk is taken for by a tool that guesses.
fn note_look(looks_like: Result<Option<&'static str>>, concerns: &mut Vec<Concern>) {
    match looks_like {
        Ok(None) => {}
        Ok(Some(format)) => concerns.push(Concern::LooksLike { format, found: Found::OnDisk }),
        Err(error) => {
            concerns.push(Concern::Invalid { error: error.message().to_owned() });
            concerns.dedup();
        }
    }
}

/// An image of another program: its headers, and the files that it names. How many bytes its disk has, if those are in no other
/// file.
async fn assess_foreign(
    worker: &Worker,
    file: &File,
    format: ForeignFormat,
    concerns: &mut Vec<Concern>,
) -> Option<u64> {
    let files = std::slice::from_ref(file);
    let mut opening = Opening::new(format);
    let disk = parse_from(worker, files, None, |pages| opening.inspect(pages)).await;
    let names = parse_from(worker, files, None, |pages| extent_files(format, pages)).await;
    let (disk, names) = match (disk, names) {
        (Ok(disk), Ok(names)) => (disk, names),
        (Err(error), _) | (_, Err(error)) => {
            concerns.push(Concern::Invalid { error: error.message().to_owned() });
            return None;
        }
    };
    let is_alone = disk.parent().is_none() && names.is_empty();
    if let Some(parent) = disk.parent() {
        let name = parent.name.clone();
        let traits = NameTrait::of(&name);
        concerns.push(Concern::BackingFile { name, traits });
        if parent.format == ParentFormat::Unknown {
            concerns.push(Concern::BackingFormatMissing);
        }
    }
    for name in names {
        let traits = NameTrait::of(&name);
        concerns.push(Concern::DataFile { name: Some(name), traits });
    }
    let (virtual_size, file_length) = (disk.virtual_size(), file.len());
    if virtual_size > GIGANTIC_SIZE && virtual_size / GIGANTIC_RATIO > file_length {
        concerns.push(Concern::Gigantic { virtual_size, file_length });
    }
    is_alone.then_some(virtual_size)
}

/// The header, and what is wrong with it; `None` if it can't be understood.
async fn assess_header(worker: &Worker, file: &File, concerns: &mut Vec<Concern>) -> Result<Option<Header>> {
    let first = read_bytes(worker, file, 0, (file.len().min(4096)) as usize).await?;
    let prefix = match Header::prefix(&first) {
        Ok(prefix) => prefix,
        Err(error) => {
            concerns.push(Concern::Invalid { error: error.to_string() });
            return Ok(None);
        }
    };
    let mut cluster = read_bytes(worker, file, 0, prefix.cluster_size() as usize).await?;
    let mut parsed = Header::parse(&cluster, zebu_qcow2::Purpose::Inspect);
    if let Err(error @ FormatError::UnsupportedFeatures { .. }) = &parsed {
        concerns.push(Concern::UnknownFeatures { error: error.to_string() });
        // Without them the rest can be told too.
        if let Some(bits) = cluster.get_mut(INCOMPATIBLE).and_then(|b| b.first_chunk_mut::<8>()) {
            *bits = (u64::from_be_bytes(*bits) & Incompatible::KNOWN.bits()).to_be_bytes();
        }
        parsed = Header::parse(&cluster, zebu_qcow2::Purpose::Inspect);
    }
    let (header, warnings) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            concerns.push(Concern::Invalid { error: error.to_string() });
            return Ok(None);
        }
    };
    assess_references(&header, concerns);
    let method = match header.encryption {
        Encryption::None => None,
        Encryption::Aes => Some("aes"),
        Encryption::Luks => Some("luks"),
        Encryption::Unknown(_) => Some("unknown"),
    };
    concerns.extend(method.map(|method| Concern::Encrypted { method }));
    if header.incompatible().contains(Incompatible::CORRUPT) {
        concerns.push(Concern::Corrupt);
    }
    if header.incompatible().contains(Incompatible::DIRTY) {
        concerns.push(Concern::Dirty);
    }
    let stale = warnings.iter().any(|warning| matches!(warning, Warning::BitmapsInconsistent { .. }));
    if stale || header.bitmaps().is_some() {
        let count = header.bitmaps().map_or(0, |bitmaps| bitmaps.bitmap_count);
        concerns.push(Concern::Bitmaps { count });
    }
    let unknown_extension = header.extensions().iter().any(|ext| matches!(ext, Extension::Unknown { .. }));
    let unknown = [
        (unknown_extension, "header extensions"),
        (header.unknown_fields().iter().any(|byte| *byte != 0), "header fields"),
        (!header.compatible.difference(Compatible::KNOWN).is_empty(), "compatible features"),
        (!header.autoclear.difference(Autoclear::KNOWN).is_empty(), "autoclear features"),
    ];
    concerns.extend(
        unknown.into_iter().filter(|(there, _)| *there).map(|(_, what)| Concern::UnknownParts { what }),
    );
    Ok(Some(header))
}

/// The files that the header names.
fn assess_references(header: &Header, concerns: &mut Vec<Concern>) {
    if let Some(name) = header.backing_file().map(text) {
        let traits = NameTrait::of(&name);
        concerns.push(Concern::BackingFile { name, traits });
        match header.backing_format().map(text) {
            None => concerns.push(Concern::BackingFormatMissing),
            Some(format) if matches!(format.as_str(), "qcow2" | "raw") => {}
            Some(format) => concerns.push(Concern::BackingFormat { format }),
        }
    }
    let name = header.data_file_name().map(text);
    if header.geometry().external_data
        || name.is_some()
        || header.autoclear.contains(Autoclear::RAW_EXTERNAL_DATA)
    {
        let traits = name.as_deref().map(NameTrait::of).unwrap_or_default();
        concerns.push(Concern::DataFile { name, traits });
    }
}

/// Judges the tables below the header, and the proportions.
async fn assess_tables(worker: &Worker, file: &File, header: &Header, concerns: &mut Vec<Concern>) {
    let (virtual_size, file_length) = (header.virtual_size(), file.len());
    if virtual_size > GIGANTIC_SIZE && virtual_size / GIGANTIC_RATIO > file_length {
        concerns.push(Concern::Gigantic { virtual_size, file_length });
    }
    let tables = [
        ("refcount table", header.refcount_table_offset.0, header.refcount_table_clusters),
        ("L1 table", header.l1_table_offset.0, header.l1_size),
        ("snapshot table", header.snapshots_offset.0, header.nb_snapshots),
    ];
    for (table, offset, entries) in tables {
        if entries > 0 && offset > file_length {
            let error = format!("the {table} lies outside the file");
            concerns.push(Concern::Invalid { error });
        } else if entries > 0 && offset == 0 {
            let error = format!("the {table} lies on the header");
            concerns.push(Concern::Invalid { error });
        }
    }
    match shared_tables(worker, file, header).await {
        Ok(0) => {}
        Ok(count) => concerns.push(Concern::SharedTables { count }),
        Err(error) => concerns.push(Concern::Invalid { error: error.message().to_owned() }),
    }
    if header.nb_snapshots == 0 {
        return;
    }
    match read_snapshots(worker, file, header, zebu_qcow2::Purpose::Inspect).await {
        Ok((entries, _)) => {
            let vm_state =
                entries.iter().fold(0, |sum: u64, entry| sum.saturating_add(entry.vm_state_size()));
            concerns.push(Concern::Snapshots { count: header.nb_snapshots, vm_state });
        }
        Err(error) => concerns.push(Concern::Invalid { error: error.message().to_owned() }),
    }
}

/// Entries of the L1 table that lead to a table that an entry before them leads to.
async fn shared_tables(worker: &Worker, file: &File, header: &Header) -> Result<u64> {
    let start = header.l1_table_offset.0.min(file.len());
    let end = start.saturating_add(u64::from(header.l1_size) * 8).min(file.len());
    let (mut tables, mut at) = (Vec::new(), start);
    while at < end {
        let len = (end - at).min(TABLE_STEP as u64);
        let bytes = read_bytes(worker, file, at, len as usize).await?;
        let entries = bytes.as_chunks::<8>().0.iter().map(|entry| L1Entry(u64::from_be_bytes(*entry)));
        tables.extend(entries.filter_map(|entry| entry.table()));
        at += len;
    }
    let all = tables.len();
    tables.sort_unstable();
    tables.dedup();
    Ok((all - tables.len()) as u64)
}

/// Judges the first bytes of the guest's disk, where they can be read from the file alone.
async fn assess_disk(
    worker: &Worker,
    path: &Path,
    options: &OpenOptions,
    header: &Header,
) -> Result<Option<&'static str>> {
    if header.geometry().external_data || header.encryption != Encryption::None {
        return Ok(None);
    }
    let first = first_of_disk(worker, path, options, Format::Qcow2, header.virtual_size()).await?;
    Ok(taken_for(&first))
}

/// The first bytes of a disk of `len` bytes.
async fn first_of_disk(
    worker: &Worker,
    path: &Path,
    options: &OpenOptions,
    format: Format,
    len: u64,
) -> Result<Vec<u8>> {
    let len = len.min(SNIFFED as u64) as usize;
    if len == 0 {
        return Ok(Vec::new());
    }
    let options = OpenOptions { format: Some(format), purpose: Purpose::Io, ..options.clone() };
    let image = Image::open(worker, path, &options).await?;
    let (result, bufs) = image.read(worker, 0, worker.buffer(len).into()).await;
    let mut first = vec![0; len];
    if result.is_ok() {
        bufs.copy_to(0, &mut first);
    }
    // Nothing was written that closing could fail to keep.
    let _ = image.close(worker).await;
    result.map(|()| first)
}

/// The format other than raw that a disk with these first bytes is taken for by a tool that guesses. Packed files and
/// files that are no disks are none: no tool takes a disk for one.
fn taken_for(first: &[u8]) -> Option<&'static str> {
    if first.starts_with(&MAGIC.to_be_bytes()) {
        return Some(Format::Qcow2.name());
    }
    match recognise(first, &[]) {
        Some(Foreign::Image(name)) => Some(name),
        Some(Foreign::Packed(_) | Foreign::NoDisk(_)) | None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_judged_by_what_other_tools_do_with_them() {
        for (name, expected) in [
            ("base.img", vec![]),
            ("dir/base:1.img", vec![]),
            ("json:{\"driver\":\"file\"}", vec![NameTrait::Json]),
            ("nbd://host/x", vec![NameTrait::Protocol]),
            ("/etc/passwd", vec![NameTrait::Absolute]),
            ("a/../../x", vec![NameTrait::Parent]),
            ("/proc/self/fd/3", vec![NameTrait::Absolute, NameTrait::System]),
            ("a\nb", vec![NameTrait::Malformed]),
            ("a..b", vec![]),
        ] {
            assert_eq!(NameTrait::of(name), expected, "{name}");
        }
    }
}
