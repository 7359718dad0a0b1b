//! The file of `zebu serve --config`: parsing and checks. Mistakes are named with the file, the line and the key.

use super::address::Address;
use super::limit_change::limit_of;
use super::limits::check_group_name;
use crate::values::NamedFormat;
use rustix::fs::{Mode, OFlags, open};
use serde::de::{Error as _, Visitor};
use serde::{Deserialize, Deserializer};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;
use std::io::Read as _;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::Spanned;
use zebu_disks::Program;
use zebu_disks::size::parse_size;
use zebu_export::Limits;

/// Bytes of the largest file that is read.
const LARGEST: u64 = 4 << 20;

/// The words of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ConfigFile {
    pub(crate) server: ServerPart,
    pub(crate) groups: BTreeMap<String, Limits>,
    pub(crate) exports: Vec<FileExport>,
}

/// Sockets and TLS, which are read at the start only.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ServerPart {
    pub(crate) nbd: Vec<Address>,
    pub(crate) control: Option<PathBuf>,
    pub(crate) metrics: Option<Address>,
    pub(crate) tls_certificate: Option<PathBuf>,
    pub(crate) tls_key: Option<PathBuf>,
    pub(crate) tls_client_ca: Option<PathBuf>,
    pub(crate) tls_client_crl: Option<PathBuf>,
    pub(crate) tls_psk_file: Option<PathBuf>,
    /// The lines of the keys that are there.
    pub(crate) lines: BTreeMap<&'static str, usize>,
}

/// An export of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileExport {
    pub(crate) name: String,
    /// A path, absolute, or a name with a protocol.
    pub(crate) file: PathBuf,
    pub(crate) format: Option<String>,
    pub(crate) read_only: bool,
    pub(crate) limits: Limits,
    pub(crate) group: Option<String>,
    pub(crate) line: usize,
}

impl FileExport {
    /// Whether another one is served as this one is, whatever its limits.
    pub(crate) fn is_served_as(&self, other: &Self) -> bool {
        (&self.file, &self.format, self.read_only) == (&other.file, &other.format, other.read_only)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    #[serde(default)]
    server: ServerText,
    #[serde(default)]
    groups: BTreeMap<String, Spanned<LimitsText>>,
    #[serde(default)]
    exports: Vec<ExportText>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ServerText {
    #[serde(default)]
    nbd: Vec<Spanned<String>>,
    control: Option<Spanned<PathBuf>>,
    metrics: Option<Spanned<String>>,
    tls_certificate: Option<Spanned<PathBuf>>,
    tls_key: Option<Spanned<PathBuf>>,
    tls_client_ca: Option<Spanned<PathBuf>>,
    tls_client_crl: Option<Spanned<PathBuf>>,
    tls_psk_file: Option<Spanned<PathBuf>>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct LimitsText {
    iops: Option<Amount>,
    iops_read: Option<Amount>,
    iops_write: Option<Amount>,
    bps: Option<Amount>,
    bps_read: Option<Amount>,
    bps_write: Option<Amount>,
    burst: Option<Amount>,
    bps_burst: Option<Amount>,
}

/// With the limits field by field: serde can't refuse unknown keys of what is flattened.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ExportText {
    name: Spanned<String>,
    file: PathBuf,
    format: Option<Spanned<String>>,
    #[serde(default)]
    read_only: bool,
    group: Option<Spanned<String>>,
    iops: Option<Amount>,
    iops_read: Option<Amount>,
    iops_write: Option<Amount>,
    bps: Option<Amount>,
    bps_read: Option<Amount>,
    bps_write: Option<Amount>,
    burst: Option<Amount>,
    bps_burst: Option<Amount>,
}

/// A number above zero, or a text with a suffix as sizes have them.
struct Amount(NonZeroU64);

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Numbers;
        impl Visitor<'_> for Numbers {
            type Value = Amount;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number above zero, or a text such as \"100M\"")
            }
            fn visit_i64<E: serde::de::Error>(self, number: i64) -> Result<Amount, E> {
                let number = u64::try_from(number).map_err(|_| E::custom("a limit can't be negative"))?;
                self.visit_u64(number)
            }
            fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Amount, E> {
                let why = "a limit of zero would let nothing through: leave the key out for no limit";
                NonZeroU64::new(number).map(Amount).ok_or_else(|| E::custom(why))
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Amount, E> {
                self.visit_u64(parse_size(text).map_err(E::custom)?)
            }
        }
        deserializer.deserialize_any(Numbers).map_err(D::Error::custom)
    }
}

impl From<LimitsText> for Limits {
    fn from(text: LimitsText) -> Self {
        let number = |amount: Option<Amount>| amount.map(|Amount(number)| number);
        Limits::default()
            .iops(number(text.iops))
            .iops_read(number(text.iops_read))
            .iops_write(number(text.iops_write))
            .bps(number(text.bps))
            .bps_read(number(text.bps_read))
            .bps_write(number(text.bps_write))
            .burst(number(text.burst))
            .bps_burst(number(text.bps_burst))
    }
}

/// The configuration of a server.
pub(crate) struct Loaded {
    pub(crate) path: PathBuf,
    /// As far as it is in effect: sockets as they were at the start, exports of it that are there, as they were opened.
    pub(crate) in_effect: RefCell<ConfigFile>,
}

/// A file, to name lines of it.
struct Source<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Source<'_> {
    fn line(&self, at: usize) -> usize {
        1 + self.text.get(..at).unwrap_or_default().matches('\n').count()
    }

    /// Whether the value in the line of a byte is a text without quotes.
    fn has_bare_text(&self, at: usize) -> bool {
        let line = self.text.lines().nth(self.line(at) - 1).unwrap_or_default();
        let value = line.split_once('=').map_or("", |(_, value)| value.trim());
        let word = value.split([' ', '#']).next().unwrap_or_default();
        value.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/') && !["true", "false"].contains(&word)
    }

    /// A mistake in a range of bytes: with the key of its line, if it has one.
    fn mistake(&self, span: Range<usize>, key: Option<&str>, what: impl fmt::Display) -> String {
        let line = self.line(span.start);
        let text = self.text.lines().nth(line - 1).unwrap_or_default();
        let of_line = text.split_once('=').map(|(key, _)| key.trim());
        let key = key.or(of_line).map(|key| format!("{key}: ")).unwrap_or_default();
        format!("'{}', line {line}: {key}{what}", self.path.display())
    }
}

/// The text of a file.
pub(crate) fn read(path: &Path) -> Result<String, String> {
    let fail = |error: std::io::Error| format!("could not read '{}': {error}", path.display());
    let mut text = String::new();
    // What is no file may never answer.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = std::fs::File::from(open(path, flags, Mode::empty()).map_err(|error| fail(error.into()))?);
    if !file.metadata().map_err(fail)?.is_file() {
        return Err(format!("'{}' is no regular file", path.display()));
    }
    file.take(LARGEST + 1).read_to_string(&mut text).map_err(fail)?;
    if text.len() as u64 > LARGEST {
        return Err(format!("'{}' is larger than {} MiB", path.display(), LARGEST >> 20));
    }
    Ok(text)
}

impl ConfigFile {
    /// Reads the text of the file `path`, relative to whose directory its paths are.
    pub(crate) fn parse(path: &Path, text: &str) -> Result<Self, String> {
        let source = Source { path, text };
        let parsed: Text = toml::from_str(text).map_err(|error| {
            let span = error.span().unwrap_or_default();
            let what = error.message().trim().replace('\n', " ");
            let what = what.replace("expected a sequence", "expected a list in brackets");
            let hint = if source.has_bare_text(span.start) { " (a text stands in quotes)" } else { "" };
            source.mistake(span, None, what + hint)
        })?;
        let mut groups = BTreeMap::new();
        for (name, limits) in parsed.groups {
            let span = limits.span();
            let limits = Limits::from(limits.into_inner());
            let fail = |what: &str| source.mistake(span.clone(), Some(&format!("groups.{name}")), what);
            check_group_name(&name).map_err(|what| fail(&what))?;
            check_bursts(&limits).map_err(|what| fail(&what))?;
            if limits.is_empty() {
                return Err(fail("a group needs at least one limit"));
            }
            groups.insert(name, limits);
        }
        let mut exports: Vec<FileExport> = Vec::new();
        for export in parsed.exports {
            exports.push(export_of(&source, export, &groups, &exports)?);
        }
        Ok(Self { server: server_of(&source, parsed.server)?, groups, exports })
    }
}

fn export_of(
    source: &Source<'_>,
    text: ExportText,
    groups: &BTreeMap<String, Limits>,
    others: &[FileExport],
) -> Result<FileExport, String> {
    let (span, name) = (text.name.span(), text.name.into_inner());
    if name.is_empty() {
        return Err(source.mistake(span, Some("name"), "an export needs a name"));
    }
    if let Some(other) = others.iter().find(|other| other.name == name) {
        let what = format!("the export '{name}' is in line {} already", other.line);
        return Err(source.mistake(span, Some("name"), what));
    }
    if let Some(format) = &text.format {
        NamedFormat::parse(Program::Zebu, format.get_ref())
            .map_err(|what| source.mistake(format.span(), Some("format"), what))?;
    }
    if let Some(group) = text.group.as_ref().filter(|group| !groups.contains_key(group.get_ref())) {
        let there = super::limits::some_of(groups.keys());
        let there = if there.is_empty() { "there is none".to_owned() } else { format!("there are {there}") };
        let what = format!("there is no group '{}' in this file ({there})", group.get_ref());
        return Err(source.mistake(group.span(), Some("group"), what));
    }
    let limits = Limits::from(LimitsText {
        iops: text.iops,
        iops_read: text.iops_read,
        iops_write: text.iops_write,
        bps: text.bps,
        bps_read: text.bps_read,
        bps_write: text.bps_write,
        burst: text.burst,
        bps_burst: text.bps_burst,
    });
    check_bursts(&limits)
        .map_err(|what| source.mistake(span.clone(), Some(&format!("export '{name}'")), what))?;
    Ok(FileExport {
        file: located(source.path, &text.file),
        format: text.format.map(Spanned::into_inner),
        read_only: text.read_only,
        limits,
        group: text.group.map(Spanned::into_inner),
        line: source.line(span.start),
        name,
    })
}

fn check_bursts(limits: &Limits) -> Result<(), String> {
    if limits.burst.is_some() && !limits.has_iops() {
        return Err("burst needs a limit: give iops as well".to_owned());
    }
    if limits.bps_burst.is_some() && !limits.has_bps() {
        return Err("bps-burst needs a limit: give bps as well".to_owned());
    }
    for (name, value) in limits.named() {
        value.map_or(Ok(NonZeroU64::MIN), |value| limit_of(name, value.get()))?;
    }
    Ok(())
}

fn server_of(source: &Source<'_>, text: ServerText) -> Result<ServerPart, String> {
    let mut part = ServerPart::default();
    let address = |key: &str, text: &Spanned<String>| {
        let address = text.get_ref().parse::<Address>();
        let address = address.map_err(|what| source.mistake(text.span(), Some(key), what))?;
        Ok::<_, String>(match address {
            Address::Unix(path) => Address::Unix(located(source.path, &path)),
            other => other,
        })
    };
    for text in &text.nbd {
        part.nbd.push(address("nbd", text)?);
        part.lines.entry("nbd").or_insert(source.line(text.span().start));
    }
    if let Some(text) = &text.metrics {
        part.metrics = Some(address("metrics", text)?);
        part.lines.insert("metrics", source.line(text.span().start));
    }
    let paths = [
        ("control", text.control, &mut part.control),
        ("tls-certificate", text.tls_certificate, &mut part.tls_certificate),
        ("tls-key", text.tls_key, &mut part.tls_key),
        ("tls-client-ca", text.tls_client_ca, &mut part.tls_client_ca),
        ("tls-client-crl", text.tls_client_crl, &mut part.tls_client_crl),
        ("tls-psk-file", text.tls_psk_file, &mut part.tls_psk_file),
    ];
    for (key, text, field) in paths {
        if let Some(text) = text {
            part.lines.insert(key, source.line(text.span().start));
            *field = Some(located(source.path, text.get_ref()));
        }
    }
    let line_of = |key: &str| part.lines.get(key).copied().unwrap_or(1);
    let needs = [
        ("tls-certificate", part.tls_certificate.is_some(), "tls-key", part.tls_key.is_some()),
        ("tls-key", part.tls_key.is_some(), "tls-certificate", part.tls_certificate.is_some()),
        ("tls-client-ca", part.tls_client_ca.is_some(), "tls-certificate", part.tls_certificate.is_some()),
        ("tls-client-crl", part.tls_client_crl.is_some(), "tls-client-ca", part.tls_client_ca.is_some()),
        ("tls-psk-file", part.tls_psk_file.is_some(), "no tls-certificate", part.tls_certificate.is_none()),
    ];
    for (key, is_there, other, has_other) in needs {
        if is_there && !has_other {
            let file = source.path.display();
            return Err(format!("'{file}', line {}: {key}: it needs {other} as well", line_of(key)));
        }
    }
    Ok(part)
}

/// A path of the file: relative to its directory, unless it is a name with a protocol.
fn located(config: &Path, name: &Path) -> PathBuf {
    let has_protocol = name.to_str().and_then(|name| name.split_once(':')).is_some_and(|(protocol, _)| {
        !protocol.is_empty()
            && !protocol.contains('/')
            && protocol.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-_".contains(&b))
    });
    match config.parent() {
        Some(directory) if !has_protocol => directory.join(name),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
[server]
nbd = ["unix:nbd.sock", "localhost:10809"]
control = "/run/zebu.ctl"

[groups.tenant]
iops = 1000
bps = "100M"

[[exports]]
name = "root"
file = "root.qcow2"
format = "qcow2"
group = "tenant"
iops-read = 10
burst = 20

[[exports]]
name = "remote"
file = "nbd://host/x"
read-only = true
"#;

    fn parse(text: &str) -> Result<ConfigFile, String> {
        ConfigFile::parse(Path::new("/etc/zebu/a.toml"), text)
    }

    #[test]
    fn a_file_says_what_it_says() {
        let file = parse(GOOD).unwrap();
        assert_eq!(file.server.nbd[0], Address::Unix("/etc/zebu/nbd.sock".into()));
        assert_eq!(file.server.control, Some("/run/zebu.ctl".into()));
        assert_eq!(file.server.lines.get("control"), Some(&4));
        assert_eq!(file.groups["tenant"].bps, NonZeroU64::new(100 << 20));
        let [root, remote] = &file.exports[..] else { panic!("{file:?}") };
        assert_eq!(root.file, Path::new("/etc/zebu/root.qcow2"));
        assert_eq!((root.limits.iops_read, root.limits.burst), (NonZeroU64::new(10), NonZeroU64::new(20)));
        assert_eq!((root.group.as_deref(), root.read_only, root.line), (Some("tenant"), false, 11));
        assert_eq!((remote.file.to_str(), remote.read_only), (Some("nbd://host/x"), true));
        assert_eq!(parse("").unwrap(), ConfigFile::default());
    }

    #[test]
    fn mistakes_name_the_line_and_the_key() {
        let export = "[[exports]]\nname = \"a\"\nfile = \"b\"\n";
        for (text, expected) in [
            ("x", "line 1: "),
            ("[server]\nnbt = []\n", "line 2: nbt: unknown field"),
            ("[sockets]\n", "line 1: "),
            ("[server]\nnbd = [\"nonsense\"]\n", "line 2: nbd: expected unix:PATH"),
            ("[server]\n\ntls-key = \"k\"\n", "line 3: tls-key: it needs tls-certificate"),
            ("[groups.g]\niops = 0\n", "line 2: iops: a limit of zero"),
            ("[groups.g]\niops = -5\n", "line 2: iops: "),
            ("[groups.g]\nbps = \"fast\"\n", "line 2: bps: expected a number"),
            ("[groups.g]\nbps = 99999999999999999999\n", "line 2: bps: "),
            ("[groups.g]\nburst = 5\n", "line 1: groups.g: burst needs a limit"),
            ("[groups.g]\n", "line 1: groups.g: a group needs at least one limit"),
            ("[groups.\"a b\"]\niops = 1\n", "line 1: groups.a b: 'a b' can't be the name of a group"),
            ("[groups.none]\niops = 1\n", "line 1: groups.none: 'none' can't be the name"),
            ("[groups.g]\niops = 1\niops = 2\n", "line 3: iops: duplicate key"),
            (&format!("{export}{export}"), "line 5: name: the export 'a' is in line 2 already"),
            (&format!("{export}group = \"g\"\n"), "line 4: group: there is no group 'g' in this file"),
            (&format!("{export}format = \"nosuch\"\n"), "line 4: format: Unknown file format 'nosuch'"),
            (&format!("{export}read-only = 1\n"), "line 4: read-only: invalid type"),
            (&format!("{export}group = tenant\n"), "(a text stands in quotes)"),
            (
                "[server]\nnbd = \"unix:x\"\n",
                "line 2: nbd: invalid type: string \"unix:x\", expected a list in brackets",
            ),
            (&format!("{export}burst = 1\n"), "line 2: export 'a': burst needs a limit"),
            ("[[exports]]\nfile = \"b\"\n", "missing field `name`"),
            ("[[exports]]\nname = \"\"\nfile = \"b\"\n", "line 2: name: an export needs a name"),
        ] {
            let message = parse(text).unwrap_err();
            assert!(message.starts_with("'/etc/zebu/a.toml', line "), "{text}: {message}");
            assert!(message.contains(expected) && !message.contains('\n'), "{text}: {message}");
        }
    }
}
