//! The text that describes a disk.

use crate::error::{Error, Result, ensure, printable, require};
use crate::limits::{MAX_EXTENT_FILES, MAX_EXTENTS, MAX_PATH};
use encoding_rs::{Encoding, UTF_8};
use std::borrow::Cow;
use std::collections::HashMap;

/// The kind of storage of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ExtentKind {
    /// Zeroes, without a file.
    Zero,
    /// The bytes of the disk, from this offset of the file on, in bytes.
    Flat { offset: u64 },
    /// A sparse extent: the file says of which kind.
    Sparse,
    /// A seSparse extent.
    SeSparse,
}

/// An extent as it is described.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Extent {
    /// Bytes of the disk.
    pub(super) len: u64,
    pub(super) kind: ExtentKind,
    /// The number of its file's name; none for zeroes.
    pub(super) name: Option<u32>,
}

/// The facts that the text states.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Descriptor {
    /// The content's number.
    pub(super) cid: Option<u32>,
    /// The parent's content's number, if there is a parent.
    pub(super) parent_cid: Option<u32>,
    pub(super) parent_name: Option<String>,
    pub(super) create_type: String,
    pub(super) extents: Vec<Extent>,
    /// The files that are named, each once.
    pub(super) names: Vec<String>,
    /// The encoding of the text as it is told.
    encoding: String,
}

/// The number that stands for no parent.
const NO_PARENT: u32 = u32::MAX;

impl Descriptor {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self> {
        let text = decoded(bytes);
        let mut found = Self::default();
        let mut has_version = false;
        let mut names = HashMap::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if let Some((len, kind, name)) = extent(line)? {
                let name = name.map(|name| found.number(&mut names, name)).transpose()?;
                require!(
                    found.extents.len() < MAX_EXTENTS,
                    "the VMDK descriptor has more than {MAX_EXTENTS} extents"
                );
                found.extents.push(Extent { len, kind, name });
                continue;
            }
            let Some((key, value)) = line.split_once('=') else { continue };
            let value = value.trim().trim_matches('"');
            let number = || {
                u32::from_str_radix(value, 16).map_err(|_| {
                    Error::damaged(format!("the VMDK descriptor has a bad line: {}", printable(line)))
                })
            };
            match key.trim() {
                "CID" => found.cid = Some(number()?),
                "parentCID" => found.parent_cid = Some(number()?).filter(|cid| *cid != NO_PARENT),
                "parentFileNameHint" => found.parent_name = Some(value.to_owned()),
                "createType" => value.clone_into(&mut found.create_type),
                "version" => has_version = true,
                key if key.eq_ignore_ascii_case("version") => has_version = true,
                ENCODING => value.clone_into(&mut found.encoding),
                _ => {}
            }
        }
        ensure!(has_version, "Image not in VMDK format: the descriptor tells no version");
        Ok(found)
    }

    /// The kind of disk, for a descriptor that names extents.
    pub(super) fn variant(&self) -> Result<&'static str> {
        const KNOWN: [&str; 7] = [
            "monolithicSparse",
            "monolithicFlat",
            "twoGbMaxExtentSparse",
            "twoGbMaxExtentFlat",
            "vmfs",
            "vmfsSparse",
            "seSparse",
        ];
        require!(!self.create_type.is_empty(), "the VMDK descriptor tells no createType");
        let known = KNOWN.iter().find(|known| **known == self.create_type);
        known.copied().ok_or_else(|| {
            Error::unsupported(format!("Unsupported image type '{}'", printable(&self.create_type)))
        })
    }

    /// Fails if a name can't be read: of an image in one file, none is needed.
    pub(super) fn check_name(&self, name: &str) -> Result<()> {
        require!(
            !name.contains(char::REPLACEMENT_CHARACTER),
            "the VMDK descriptor is encoded in '{}', in which the name '{}' can't be read",
            printable(if self.encoding.is_empty() { "UTF-8" } else { &self.encoding }),
            printable(name)
        );
        Ok(())
    }

    /// The number of a name: that which it has, or the next one.
    fn number<'a>(&mut self, known: &mut HashMap<&'a str, u32>, name: &'a str) -> Result<u32> {
        if let Some(number) = known.get(name) {
            return Ok(*number);
        }
        require!(
            self.names.len() < MAX_EXTENT_FILES,
            "the VMDK descriptor names more than {MAX_EXTENT_FILES} files"
        );
        let number = self.names.len() as u32;
        known.insert(name, number);
        self.names.push(name.to_owned());
        Ok(number)
    }
}

/// The key of a descriptor that tells its encoding.
const ENCODING: &str = "encoding";

/// The text in the encoding that it tells, or else in UTF-8. What is none there becomes [`char::REPLACEMENT_CHARACTER`].
///
/// Tools that edit such a text on other systems write names in UTF-8, and leave the code page of Windows that is told.
/// Other text in one of these is no UTF-8.
fn decoded(bytes: &[u8]) -> Cow<'_, str> {
    let told = bytes.split(|byte| *byte == b'\n').find_map(|line| {
        let (key, value) = std::str::from_utf8(line).ok()?.split_once('=')?;
        (key.trim() == ENCODING).then(|| value.trim().trim_matches('"'))
    });
    let encoding = told.and_then(encoding).unwrap_or(UTF_8);
    match std::str::from_utf8(bytes) {
        Ok(text) if encoding.is_single_byte() => Cow::Borrowed(text),
        _ => encoding.decode_without_bom_handling(bytes).0,
    }
}

/// The encoding of a name that VMware uses: those of the web, and numbers of code pages of Windows.
fn encoding(name: &str) -> Option<&'static Encoding> {
    let lower = name.to_ascii_lowercase();
    let number = ["windows-", "cp", "ibm-"].iter().find_map(|prefix| lower.strip_prefix(prefix));
    let label = match number.unwrap_or_default() {
        "932" | "943" => "shift_jis",
        "936" | "1386" => "gbk",
        "949" | "1363" => "euc-kr",
        "950" | "1373" => "big5",
        number if !number.is_empty() => return Encoding::for_label(format!("windows-{number}").as_bytes()),
        _ => lower.as_str(),
    };
    Encoding::for_label(label.as_bytes()).filter(|encoding| encoding.is_ascii_compatible())
}

/// Length, kind and file of a line like `RW 4192256 SPARSE "disk-s001.vmdk"`; none if it is another line.
fn extent(line: &str) -> Result<Option<(u64, ExtentKind, Option<&str>)>> {
    let mut words = line.splitn(2, char::is_whitespace);
    let access = words.next().unwrap_or_default();
    let rest = words.next().unwrap_or_default().trim_start();
    match access {
        "RW" | "RDONLY" => {}
        "NOACCESS" => {
            return Err(Error::unsupported("the VMDK has an extent that may not be read (NOACCESS)"));
        }
        _ => return Ok(None),
    }
    let bad = || Error::damaged(format!("Invalid extent line: {}", printable(line)));
    let (sectors, rest) = rest.split_once(char::is_whitespace).ok_or_else(bad)?;
    let len = sectors.parse().ok().and_then(|sectors: u64| sectors.checked_mul(512)).filter(|len| *len > 0);
    let len = len.ok_or_else(bad)?;
    let rest = rest.trim_start();
    let (kind, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
    if kind == "ZERO" {
        return Ok(Some((len, ExtentKind::Zero, None)));
    }
    let quoted = rest.trim_start().strip_prefix('"').ok_or_else(bad)?;
    let (name, behind) = quoted.split_once('"').ok_or_else(bad)?;
    ensure!(
        (1..=MAX_PATH).contains(&name.len()),
        "Invalid extent line with a name of {} bytes: {}",
        name.len(),
        printable(line)
    );
    let behind = behind.split_whitespace().next();
    let offset = behind.map(|sectors| sectors.parse().ok().and_then(|sectors: u64| sectors.checked_mul(512)));
    let kind = match (kind, offset) {
        ("FLAT", Some(Some(offset))) => ExtentKind::Flat { offset },
        ("VMFS", None | Some(Some(0))) => ExtentKind::Flat { offset: 0 },
        ("SPARSE" | "VMFSSPARSE", None) => ExtentKind::Sparse,
        ("SESPARSE", None) => ExtentKind::SeSparse,
        ("FLAT" | "VMFS" | "SPARSE" | "VMFSSPARSE" | "SESPARSE", _) => return Err(bad()),
        (other, _) => {
            return Err(Error::unsupported(format!(
                "VMDK extents of type {} are not supported",
                printable(other)
            )));
        }
    };
    Ok(Some((len, kind, Some(name))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Disk DescriptorFile\nversion=1\nCID=123a\nparentCID=ffffffff\n\
    createType=\"twoGbMaxExtentSparse\"\n\nRW 4192256 SPARSE \"a b-s001.vmdk\"\nRDONLY 8 FLAT \"x\" 16\n\
    RW 5 ZERO\nRW 4192256 SPARSE \"a b-s001.vmdk\"\nddb.adapterType = \"ide\"\n";

    #[test]
    fn lines_are_understood() {
        let found = Descriptor::parse(TEXT.as_bytes()).unwrap();
        assert_eq!(
            (found.cid, found.parent_cid, found.variant().unwrap()),
            (Some(0x123a), None, "twoGbMaxExtentSparse")
        );
        assert_eq!(found.names, ["a b-s001.vmdk", "x"]);
        let kinds: Vec<_> = found.extents.iter().map(|extent| (extent.len / 512, extent.kind)).collect();
        let sparse = (4192256, ExtentKind::Sparse);
        assert_eq!(kinds, [sparse, (8, ExtentKind::Flat { offset: 8192 }), (5, ExtentKind::Zero), sparse]);
    }

    #[test]
    fn damaged_lines_are_errors() {
        for line in [
            "RW",
            "RW x FLAT \"a\" 0",
            "RW 0 FLAT \"a\" 0",
            "RW -1 FLAT \"a\" 0",
            "RW 99999999999999999999 FLAT \"a\" 0",
            "RW 36028797018963968 FLAT \"a\" 0",
            "RW 1 FLAT \"a\"",
            "RW 1 FLAT \"a\" -1",
            "RW 1 FLAT \"\" 0",
            "RW 1 FLAT \"a",
            "RW 1 SPARSE \"a\" 8",
            "RW 1 VMFSRDM \"a\"",
            "NOACCESS 1 ZERO",
            "CID=xyz",
        ] {
            assert!(Descriptor::parse(format!("version=1\n{line}\n").as_bytes()).is_err(), "{line}");
        }
        assert!(Descriptor::parse(b"CID=1\n").is_err());
    }

    #[test]
    fn names_are_decoded_as_the_text_says() {
        let line = |encoding: &str, name: &[u8]| {
            let text = format!("version=1\nencoding=\"{encoding}\"\nRW 8 FLAT \"");
            [text.as_bytes(), name, b"\" 0\n"].concat()
        };
        for (encoding, name, expected) in [
            ("GBK", &b"\xd0\xe9\xc4\xe2\xbb\xfa"[..], "虚拟机"),
            ("windows-936", b"\xd0\xe9\xc4\xe2\xbb\xfa", "虚拟机"),
            ("Shift_JIS", b"\x89\xbc\x91\x7a", "仮想"),
            ("cp932", b"\x89\xbc\x91\x7a", "仮想"),
            ("Big5", b"\xb5\xea\xc0\xc0", "虛擬"),
            ("EUC-KR", b"\xb0\xa1", "가"),
            ("windows-1251", b"\xc4\xe8\xf1\xea", "Диск"),
            ("cp1252", b"M\xfcller", "Müller"),
            ("windows-1252", "Müller 仮想".as_bytes(), "Müller 仮想"),
            ("UTF-8", "Müller".as_bytes(), "Müller"),
        ] {
            let found = Descriptor::parse(&line(encoding, name)).unwrap();
            assert_eq!(found.names, [expected], "{encoding}");
            found.check_name(&found.names[0]).unwrap();
        }
        for (encoding, name) in [("GBK", &b"\xff\xff"[..]), ("klingon", b"\xc4\xe8"), ("UTF-8", b"M\xfcller")]
        {
            let found = Descriptor::parse(&line(encoding, name)).unwrap();
            let refused = found.check_name(&found.names[0]).unwrap_err().to_string();
            assert!(refused.contains(encoding), "{refused}");
        }
    }
}
