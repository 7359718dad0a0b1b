//! The descriptor of a Parallels disk that is a directory (`.hdd`): which of the files in it is the disk.

use crate::disk::Format;
use crate::error::{Error, Result, printable, require};

/// The name of the descriptor in the directory.
pub const DESCRIPTOR: &str = "DiskDescriptor.xml";
/// Bytes of a descriptor at most.
pub const MOST: u64 = 1 << 20;

/// The file that holds the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskFile {
    /// Its name, relative to the directory. It is not checked in any way.
    pub name: String,
    /// Its format; `None` if it has the bytes of the disk.
    pub format: Option<Format>,
    /// Bytes of the disk, if the descriptor tells them.
    pub size: Option<u64>,
}

/// The one file that a descriptor names.
///
/// # Errors
/// It is no such descriptor, or the disk lies in several files.
pub fn disk_file(text: &str) -> Result<DiskFile> {
    if !text.contains("<Parallels_disk_image") {
        return Err(Error::damaged(format!("{DESCRIPTOR} is not the descriptor of a Parallels disk")));
    }
    let engine = elements(text, "Engine").first().map_or("", |engine| engine.trim());
    let is_plain = engine.chars().all(|c| matches!(c, '{' | '}' | '-' | '0'));
    require!(is_plain, "the Parallels disk is encrypted: decrypt it in Parallels");
    let parts = elements(text, "Storage");
    require!(
        parts.len() <= 1,
        "the Parallels disk lies in {} parts: join them in Parallels (prl_disk_tool)",
        parts.len()
    );
    let nothing = || Error::damaged(format!("{DESCRIPTOR} names no file with the disk"));
    let images = elements(parts.first().ok_or_else(nothing)?, "Image");
    require!(
        images.len() <= 1,
        "the Parallels disk has snapshots: merge them in Parallels (prl_disk_tool merge)"
    );
    let image = images.first().ok_or_else(nothing)?;
    let field = |name| elements(image, name).first().map(|value| value.trim());
    let name = field("File").filter(|name| !name.is_empty()).ok_or_else(nothing)?;
    let format = match field("Type") {
        Some("Compressed") => Some(Format::Parallels),
        Some("Plain") => None,
        other => {
            return Err(Error::unsupported(format!(
                "Parallels images of type {} are not supported",
                printable(other.unwrap_or_default())
            )));
        }
    };
    Ok(DiskFile { name: unescaped(name), format, size: size(text) })
}

/// Names of the files of a disk with snapshots; none if it has no snapshots.
pub fn files_with_snapshots(text: &str) -> Vec<String> {
    let files = |storage: &&str| {
        let images = elements(storage, "Image");
        let names = images
            .iter()
            .filter_map(|image| elements(image, "File").first().map(|name| unescaped(name.trim())));
        if images.len() > 1 { names.collect() } else { Vec::new() }
    };
    elements(text, "Storage").iter().flat_map(files).collect()
}

fn unescaped(name: &str) -> String {
    let name = name.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"");
    name.replace("&apos;", "'").replace("&amp;", "&")
}

/// Bytes of the disk. Sectors of another size than the usual one may count the disk in either.
fn size(text: &str) -> Option<u64> {
    let number = |name| elements(text, name).first().and_then(|value| value.trim().parse::<u64>().ok());
    let sectors = number("Disk_size")?;
    matches!(number("LogicalSectorSize"), None | Some(512)).then_some(())?;
    sectors.checked_mul(512)
}

/// Contents of the elements of a name. None of them lies in another of its name.
fn elements<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let (start, end) = (format!("<{name}>"), format!("</{name}>"));
    let within = text.split(start.as_str()).skip(1);
    within.filter_map(|rest| rest.split_once(end.as_str()).map(|(within, _)| within)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_file_is_found() {
        let image = |kind: &str| {
            format!("<Image><GUID>{{5fbaabe3}}</GUID><Type>{kind}</Type><File>a &amp; b.hds</File></Image>")
        };
        let with = |images: &str| {
            format!(
                "<?xml version='1.0'?><Parallels_disk_image Version=\"1.0\"><StorageData><Storage><Start>0</Start>{images}\
                 </Storage></StorageData><Snapshots><Shot><GUID>x</GUID></Shot></Snapshots></Parallels_disk_image>"
            )
        };
        let found = disk_file(&with(&image("Compressed"))).unwrap();
        assert_eq!(
            found,
            DiskFile { name: "a & b.hds".to_owned(), format: Some(Format::Parallels), size: None }
        );
        let told = |sectors: &str| {
            let parameters =
                format!("<Disk_Parameters><Disk_size>{sectors}</Disk_size></Disk_Parameters><StorageData>");
            disk_file(&with(&image("Plain")).replace("<StorageData>", &parameters)).unwrap().size
        };
        assert_eq!([told("2048"), told("x"), told("99999999999999999999")], [Some(1 << 20), None, None]);
        assert!(files_with_snapshots(&with(&image("Plain"))).is_empty());
        assert_eq!(files_with_snapshots(&with(&image("Plain").repeat(2))), ["a & b.hds"; 2]);
        assert_eq!(disk_file(&with(&image("Plain"))).unwrap().format, None);
        let encrypted = |engine| format!("<Encryption><Engine>{engine}</Engine></Encryption><StorageData>");
        let none = with(&image("Plain"))
            .replace("<StorageData>", &encrypted("{00000000-0000-0000-0000-000000000000}"));
        assert_eq!(disk_file(&none).unwrap().format, None);
        for (text, word) in [
            (with(&image("Compressed").repeat(2)), "snapshots"),
            (with(&image("Odd")), "Odd"),
            (with(""), "names no file"),
            (with(&image("Plain")).replace("</StorageData>", "<Storage></Storage>"), "2 parts"),
            (with(&image("Plain")).replace("<StorageData>", &encrypted("{5f-0}")), "encrypted"),
            ("<html>".to_owned(), "not the descriptor"),
        ] {
            let error = disk_file(&text).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }
}
