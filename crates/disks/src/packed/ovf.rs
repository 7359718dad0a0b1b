//! The disks that an OVF descriptor names.

use encoding_rs::{Encoding, UTF_8, UTF_16LE};
use std::collections::{HashMap, HashSet};

/// Bytes in which XML says how it is encoded.
const DECLARATION: usize = 200;

/// The file of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskFile {
    pub(crate) name: String,
    /// Its bytes, if they are told.
    pub(crate) size: Option<u64>,
}

/// The text of a descriptor, and its encoding: as its first bytes tell, or UTF-8.
pub(crate) fn decode(bytes: &[u8]) -> (String, &'static Encoding) {
    let start = String::from_utf8_lossy(&bytes[..bytes.len().min(DECLARATION)]);
    let declared = start.split('>').next().and_then(|tag| attribute(tag, "encoding"));
    let told = match declared {
        _ if bytes.starts_with(b"<\0") => UTF_16LE,
        Some(label) => for_label(&label).unwrap_or(UTF_8),
        None => UTF_8,
    };
    let (text, encoding, _) = told.decode(bytes);
    (text.into_owned(), encoding)
}

fn for_label(label: &str) -> Option<&'static Encoding> {
    Encoding::for_label(label.as_bytes()).filter(|told| told.is_ascii_compatible())
}

/// The files of its disks, each once.
pub(crate) fn disk_files(text: &str) -> Vec<DiskFile> {
    let text = without_comments(text);
    let elements = elements(&text);
    let of = |wanted: &'static str| {
        elements
            .iter()
            .filter(move |(name, _)| name.rsplit(':').next() == Some(wanted))
            .map(|(_, rest)| *rest)
    };
    let mut files = HashMap::new();
    for file in of("File") {
        if let Some(id) = attribute(file, "id") {
            files.entry(id).or_insert(file);
        }
    }
    let (mut found, mut names) = (Vec::new(), HashSet::new());
    for disk in of("Disk") {
        let Some(reference) = attribute(disk, "fileRef") else { continue };
        let file = files.get(&reference);
        if let Some((name, file)) = file.and_then(|file| Some((attribute(file, "href")?, file)))
            && names.insert(name.clone())
        {
            let size = attribute(file, "size").and_then(|size| size.parse().ok());
            found.push(DiskFile { name, size });
        }
    }
    found
}

fn without_comments(text: &str) -> String {
    let mut parts = text.split("<!--");
    let first = parts.next().unwrap_or_default();
    let rest = parts.filter_map(|part| part.split_once("-->").map(|(_, behind)| behind));
    std::iter::once(first).chain(rest).collect()
}

/// The names of elements, and the rest of their tags.
fn elements(text: &str) -> Vec<(&str, &str)> {
    text.split('<')
        .skip(1)
        .filter_map(|tag| tag.split_once('>').map(|(tag, _)| tag))
        .filter_map(|tag| {
            let end = tag.find(|c: char| c.is_whitespace() || c == '/')?;
            Some(tag.split_at(end))
        })
        .collect()
}

/// An attribute by its name without its prefix.
fn attribute(tag: &str, wanted: &str) -> Option<String> {
    let mut rest = tag;
    while let Some((before, after)) = rest.split_once('=') {
        let name = before.trim().rsplit(|c: char| c.is_whitespace() || c == ':').next()?;
        let after = after.trim_start();
        let quote = after.chars().next().filter(|c| matches!(c, '"' | '\''))?;
        let (value, behind) = after[1..].split_once(quote)?;
        if name == wanted {
            let plain = value.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
            return Some(plain.replace("&apos;", "'").replace("&amp;", "&"));
        }
        rest = behind;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::samples::cpu_time;
    use std::time::Duration;

    fn names(text: &str) -> Vec<String> {
        disk_files(text).into_iter().map(|file| file.name).collect()
    }

    #[test]
    fn the_disks_of_a_descriptor_are_found_whatever_its_prefixes() {
        let text = r#"<?xml version="1.0"?><Envelope xmlns:ovf="x"><References>
            <File ovf:href="a &amp; b.vmdk" ovf:id="file1" ovf:size="5"/><ovf:File href='notes.txt' id='n'/>
            <!-- <File ovf:id="file2" ovf:href="old.vmdk"/> -->
            <File ovf:id="file2" ovf:href="second.vmdk"/></References>
            <DiskSection><Info>disks</Info><Disk ovf:diskId="d1" ovf:fileRef="file1"/><!--<Disk fileRef="n"/>-->
            <ovf:Disk ovf:capacity="1" fileRef="file2"></ovf:Disk><Disk ovf:diskId="empty"/></DiskSection></Envelope>"#;
        assert_eq!(names(text), ["a & b.vmdk", "second.vmdk"]);
        assert_eq!(disk_files(text)[0].size, Some(5));
        assert!(names("").is_empty() && names("<Disk fileRef=").is_empty());
        assert!(names("<Disk fileRef=\"x\"/><File id=\"x\" href=\"/etc/passwd").is_empty());
    }

    /// As many as there is room for: looking for each file among all of them would take minutes.
    #[test]
    fn many_disks_and_files_are_matched_at_once() {
        let mut text = String::new();
        for number in 0..20_000 {
            text += &format!("<File id='{number}' href='f'/>");
        }
        for number in 0..20_000 {
            text += &format!("<Disk fileRef='{number}'/>");
        }
        let began = cpu_time();
        assert_eq!(names(&text), ["f"]);
        assert!(cpu_time() < began + Duration::from_secs(10), "{began:?} to {:?}", cpu_time());
    }

    #[test]
    fn descriptors_are_decoded_as_they_say() {
        let text = |encoding: &str| {
            format!(
                "<?xml version='1.0' encoding=\"{encoding}\"?><File id='f' href='Müller.vmdk'/><Disk fileRef='f'/>"
            )
        };
        let in_utf16: Vec<u8> = text("UTF-16").encode_utf16().flat_map(u16::to_le_bytes).collect();
        let marked = [b"\xff\xfe", &in_utf16[..]].concat();
        let in_1252 = encoding_rs::WINDOWS_1252.encode(&text("windows-1252")).0.into_owned();
        let plain = text("UTF-8").into_bytes();
        for bytes in [plain.clone(), [b"\xef\xbb\xbf", &plain[..]].concat(), in_1252, in_utf16, marked] {
            assert_eq!(names(&decode(&bytes).0), ["Müller.vmdk"], "{bytes:?}");
        }
    }
}
