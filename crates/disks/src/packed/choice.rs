//! The member of a tar file that is the disk.

use super::manifest;
use super::ovf::{self, DiskFile};
use super::pieces::Pieces;
use super::range_reader::RangeReader;
use super::tar::{self, Member};
use crate::printable::printable;
use crate::watch::Watch;
use encoding_rs::{Encoding, UTF_8};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Read;

/// Bytes of an OVF descriptor, and of a manifest.
const MOST_DESCRIPTOR: u64 = 1 << 20;
/// Names that an error lists.
const MOST_LISTED: usize = 20;
/// The files by which a box of Vagrant for libvirt is known, and the disk in it.
const BOX_METADATA: &str = "metadata.json";
const BOX_DISK: &str = "box.img";

/// The members of a tar file. Of two with one name the last counts, which is the one that unpacking leaves.
struct Members<'a> {
    file: &'a File,
    all: Vec<(String, Pieces)>,
    numbers: HashMap<String, usize>,
}

/// An OVF descriptor.
struct Descriptor {
    number: usize,
    /// The directory that its names are relative to; empty or with a slash at the end.
    directory: String,
    disks: Vec<DiskFile>,
}

/// The bytes of the member that is asked for, or else of the one disk. Those that a manifest tells of are checked.
pub(super) fn choose(
    file: &File,
    archive: &Pieces,
    asked: Option<&str>,
    watch: &Watch<'_>,
) -> Result<Pieces, String> {
    let (members, descriptor) = Members::read(file, archive)?;
    let chosen = match (asked, &descriptor) {
        (Some(name), descriptor) => {
            let found = members.named(name).or_else(|| members.beside(descriptor.as_ref()?, name));
            found.ok_or_else(|| format!("the tar file has no member '{name}': it has {}", members.list()))?
        }
        (None, Some(descriptor)) => members.disk_of(descriptor)?,
        (None, None) => members.only_disk()?,
    };
    if let Some(descriptor) = &descriptor {
        members.verify(descriptor, &chosen, watch)?;
    }
    members.joined(&chosen)
}

impl<'a> Members<'a> {
    fn read(file: &'a File, archive: &Pieces) -> Result<(Self, Option<Descriptor>), String> {
        let mut found = tar::members(file, archive).map_err(|e| e.to_string())?;
        // What macOS keeps beside each file.
        found.retain(|member| !file_name(&member.name).starts_with(b"._"));
        let is_descriptor = |member: &&Member| member.name.to_ascii_lowercase().ends_with(b".ovf");
        let first = found.iter().find(is_descriptor);
        let descriptor = first.and_then(|first| found.iter().rfind(|member| member.name == first.name));
        let (encoding, descriptor) = match descriptor {
            Some(member) => {
                let (text, encoding) = ovf::decode(&text_of(file, &member.bytes)?);
                (encoding, Some((decoded(&member.name, encoding), text)))
            }
            None => (UTF_8, None),
        };
        let mut members = Self { file, all: Vec::new(), numbers: HashMap::new() };
        for member in found {
            let name = decoded(&member.name, encoding);
            if let Some(number) = members.numbers.get(&name) {
                members.all[*number].1 = member.bytes;
            } else {
                members.numbers.insert(name.clone(), members.all.len());
                members.all.push((name, member.bytes));
            }
        }
        let descriptor = descriptor.and_then(|(name, text)| {
            let directory = name.rfind('/').map_or("", |slash| &name[..=slash]).to_owned();
            Some(Descriptor {
                number: *members.numbers.get(&name)?,
                directory,
                disks: ovf::disk_files(&text),
            })
        });
        Ok((members, descriptor))
    }

    /// The member of this name, or those in which a file of this name lies in chunks.
    fn named(&self, name: &str) -> Option<Vec<usize>> {
        let name = plain(name);
        if let Some(number) = self.numbers.get(name) {
            return Some(vec![*number]);
        }
        let chunk = |number: usize| self.numbers.get(&format!("{name}.{number:09}")).copied();
        let chunks: Vec<usize> = (0..).map_while(chunk).collect();
        (!chunks.is_empty()).then_some(chunks)
    }

    /// The same of a name in a descriptor or a manifest, which may be written as in a URL.
    fn beside(&self, descriptor: &Descriptor, name: &str) -> Option<Vec<usize>> {
        let unescaped = percent_encoding::percent_decode_str(name).decode_utf8_lossy();
        [name, &*unescaped].into_iter().find_map(|name| {
            self.named(&format!("{}{}", descriptor.directory, plain(name))).or_else(|| self.named(name))
        })
    }

    /// The bytes of members, one behind the other.
    fn joined(&self, numbers: &[usize]) -> Result<Pieces, String> {
        let mut bytes = Pieces::default();
        for number in numbers {
            bytes.append(&self.all[*number].1).map_err(|e| e.to_string())?;
        }
        Ok(bytes)
    }

    fn list(&self) -> String {
        listed(self.all.iter().map(|(name, _)| name.as_str()))
    }

    /// The disk of a tar file without a descriptor.
    fn only_disk(&self) -> Result<Vec<usize>, String> {
        match (&self.all[..], self.numbers.get(BOX_DISK)) {
            ([_], _) => Ok(vec![0]),
            ([], _) => Err("the tar file is empty".to_owned()),
            (_, Some(disk)) if self.numbers.contains_key(BOX_METADATA) => Ok(vec![*disk]),
            _ => Err(format!("choose one of the members of the tar file with --member: {}", self.list())),
        }
    }

    /// The one disk that a descriptor names.
    fn disk_of(&self, descriptor: &Descriptor) -> Result<Vec<usize>, String> {
        let disk = match &descriptor.disks[..] {
            [only] => only,
            [] => {
                return Err(format!("the OVF names no disk: choose a member with --member: {}", self.list()));
            }
            several => {
                let names = listed(several.iter().map(|disk| disk.name.as_str()));
                return Err(format!("the OVF names several disks: choose one with --member: {names}"));
            }
        };
        let found = self.beside(descriptor, &disk.name).ok_or_else(|| {
            format!(
                "the OVF names the disk '{}', which is not in the file: it has {}",
                printable(&disk.name),
                self.list()
            )
        })?;
        let len: u64 = found.iter().map(|number| self.all[*number].1.len()).sum();
        match disk.size {
            Some(size) if found.len() > 1 && size != len => Err(format!(
                "the chunks of '{}' have {len} of the {size} bytes that the OVF says: one is missing or cut \
                 off",
                printable(&disk.name)
            )),
            _ => Ok(found),
        }
    }

    /// Fails if the descriptor or one of `chosen` is not what the manifest beside the descriptor says.
    fn verify(&self, descriptor: &Descriptor, chosen: &[usize], watch: &Watch<'_>) -> Result<(), String> {
        let name = &self.all[descriptor.number].0;
        let manifest = [".mf", ".MF"].iter().find_map(|ending| {
            let stem = name.get(..name.len().checked_sub(".ovf".len())?)?;
            self.numbers.get(&format!("{stem}{ending}"))
        });
        let Some(manifest) = manifest else { return Ok(()) };
        let (text, _) = ovf::decode(&text_of(self.file, &self.all[*manifest].1)?);
        let read: HashSet<usize> = chosen.iter().copied().chain([descriptor.number]).collect();
        let mut met = HashSet::new();
        for told in manifest::parse(&text)? {
            let Some(numbers) = self.beside(descriptor, &told.file) else { continue };
            let bytes = if numbers.iter().any(|number| read.contains(number)) {
                Some(self.joined(&numbers)?)
            } else {
                None
            };
            // Each file is read once, however many lines there are.
            if !met.insert(numbers) {
                let name = printable(&told.file);
                return Err(format!("the manifest lists '{name}' twice: unpack the file with tar"));
            }
            let Some(bytes) = bytes else { continue };
            match told.is_of(self.file, &bytes, watch).map_err(|e| e.to_string())? {
                Some(true) => {}
                Some(false) => {
                    return Err(format!(
                        "'{}' does not match the manifest: it is damaged, or was changed since. To read it \
                         all the same, unpack the file with tar",
                        printable(&told.file)
                    ));
                }
                None => return Err("given up".to_owned()),
            }
        }
        Ok(())
    }
}

/// The bytes of a small member.
fn text_of(file: &File, bytes: &Pieces) -> Result<Vec<u8>, String> {
    if bytes.len() > MOST_DESCRIPTOR {
        return Err(format!("its OVF descriptor or manifest has {} bytes", bytes.len()));
    }
    let mut text = Vec::new();
    RangeReader::new(file, bytes).read_to_end(&mut text).map_err(|e| e.to_string())?;
    Ok(text)
}

fn plain(name: &str) -> &str {
    name.strip_prefix("./").unwrap_or(name)
}

fn file_name(name: &[u8]) -> &[u8] {
    name.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

/// The name of a member: in UTF-8, or as its descriptor is encoded.
fn decoded(name: &[u8], encoding: &'static Encoding) -> String {
    let name = match std::str::from_utf8(name) {
        Ok(name) => name.to_owned(),
        Err(_) => encoding.decode_without_bom_handling(name).0.into_owned(),
    };
    plain(&name).to_owned()
}

fn listed<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let names: Vec<String> = names.take(MOST_LISTED).map(|name| format!("'{}'", printable(name))).collect();
    names.join(", ")
}
