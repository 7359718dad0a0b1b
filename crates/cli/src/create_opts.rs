//! `-o`: how a new image is made, for `create`, `convert` and `measure`.

use crate::encrypt_opts::{self, EncryptOpts};
use crate::foreign_opts::{self, ForeignOpts};
use crate::lock_patience::lock_wait;
use crate::qemu_names::option_lists::{self, FileOptions};
use crate::suggestion::meant;
use crate::values::preallocation_argument;
use std::fmt::Write as _;
use zebu_disks::keyval::{asks_for_help, parse_options, parse_size_value, parse_switch};
use zebu_disks::{Program, Secrets, local_name};
use zebu_engine::{Compression, CreateOptions, Format, Preallocation};

/// One option of `-o`: its name, the kind of its value, its description, and which formats have it.
struct Described {
    name: &'static str,
    value: &'static str,
    description: &'static str,
    raw: bool,
}

const OPTIONS: &[Described] = &[
    Described { name: "backing_file", value: "str", description: "File name of a base image", raw: false },
    Described {
        name: "backing_fmt",
        value: "str",
        description: "Image format of the base image",
        raw: false,
    },
    Described {
        name: "cluster_size",
        value: "size",
        description: "Bytes of a cluster: a power of two, 512 to 2M",
        raw: false,
    },
    Described {
        name: "compat",
        value: "str",
        description: "Compatibility level (v2 [0.10] or v3 [1.1])",
        raw: false,
    },
    Described {
        name: "compression_type",
        value: "str",
        description: "Compression of compressed clusters (zlib, zstd)",
        raw: false,
    },
    Described {
        name: "data_file",
        value: "str",
        description: "File name of an external data file",
        raw: false,
    },
    Described {
        name: "data_file_raw",
        value: "bool (on/off)",
        description: "The external data file must stay valid as a raw image",
        raw: false,
    },
    Described {
        name: "extended_l2",
        value: "bool (on/off)",
        description: "Extended L2 tables (subclusters)",
        raw: false,
    },
    Described {
        name: "extent_size_hint",
        value: "size",
        description: "Extent size hint for the file on XFS; 0 for none (default 1M)",
        raw: true,
    },
    Described {
        name: "lazy_refcounts",
        value: "bool (on/off)",
        description: "Sets the flag; zebu itself never postpones refcounts",
        raw: false,
    },
    Described {
        name: "nocow",
        value: "bool (on/off)",
        description: "Turn off copy-on-write of the file on btrfs (no effect elsewhere)",
        raw: true,
    },
    Described {
        name: "preallocation",
        value: "str",
        description: "Space set aside (off, metadata [qcow2], falloc, full)",
        raw: true,
    },
    Described {
        name: "refcount_bits",
        value: "num",
        description: "Width of a reference count entry in bits",
        raw: false,
    },
    Described { name: "size", value: "size", description: "Virtual disk size", raw: true },
];

/// The end of a message about an option that there is not.
const LIST_HINT: &str = "(-o help lists them)";

/// Options of any file, whatever its format.
const OF_ALL_FILES: [&str; 3] = ["extent_size_hint", "nocow", "size"];

/// Values of `-o`, each option if it was given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CreateOpts {
    pub(crate) size: Option<u64>,
    pub(crate) backing_file: Option<String>,
    pub(crate) backing_format: Option<String>,
    cluster_size: Option<u64>,
    /// As written by the user, for the line that repeats it.
    compat: Option<String>,
    version: Option<u32>,
    compression: Option<Compression>,
    pub(crate) data_file: Option<String>,
    data_file_raw: Option<bool>,
    extended_l2: Option<bool>,
    extent_size_hint: Option<u32>,
    lazy_refcounts: Option<bool>,
    nocow: Option<bool>,
    pub(crate) preallocation: Option<Preallocation>,
    refcount_bits: Option<u32>,
    encryption: EncryptOpts,
    /// Options of images of other programs.
    foreign: ForeignOpts,
}

/// The meaning of a list of `-o` arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ParsedOpts {
    /// Options to use.
    Use(Box<CreateOpts>),
    /// `-o help`: the list of options to print.
    Help(String),
}

impl CreateOpts {
    /// Whether options of encryption are among them.
    pub(crate) fn has_encryption(&self) -> bool {
        self.encryption != EncryptOpts::default()
    }

    /// Reads all `-o` arguments, for an image of `format`. The error names the option.
    pub(crate) fn parse(
        dialect: Program,
        arguments: &[String],
        format: Format,
        of_file: FileOptions,
    ) -> Result<ParsedOpts, String> {
        if arguments.iter().any(|argument| asks_for_help(argument)) {
            let as_qemu = dialect.is_qemu().then(|| option_lists::create(format, of_file)).flatten();
            return Ok(ParsedOpts::Help(as_qemu.unwrap_or_else(|| help(format))));
        }
        let mut opts = Self::default();
        for argument in arguments {
            for (key, value) in parse_options(argument).map_err(|error| error.to_string())? {
                opts.set(&key, &value, format).map_err(|message| {
                    // Under QEMU's names, messages are as there.
                    if dialect.is_qemu() || !message.ends_with(LIST_HINT) {
                        return message;
                    }
                    message + &meant(&key, "options", names(format))
                })?;
            }
        }
        Ok(ParsedOpts::Use(Box::new(opts)))
    }

    fn set(&mut self, key: &str, value: &str, format: Format) -> Result<(), String> {
        if key == "encryption" && format == Format::Qcow2 {
            self.encryption.set_old(parse_switch(key, value)?);
            return Ok(());
        }
        let encrypts = match format {
            Format::Luks => Some(key),
            Format::Qcow2 => key.strip_prefix("encrypt."),
            _ => None,
        };
        if let Some(name) = encrypts
            && self.encryption.set(name, value, format)?
        {
            return Ok(());
        }
        if let Format::Foreign(foreign) = format
            && !OF_ALL_FILES.contains(&key)
        {
            return self.foreign.set(key, value, foreign);
        }
        match OPTIONS.iter().find(|option| option.name == key) {
            None => return Err(format!("Invalid parameter '{key}' (-o help lists them)")),
            Some(option) if format != Format::Qcow2 && !option.raw => {
                return Err(format!(
                    "Invalid parameter '{key}' for format {} (-o help lists them)",
                    format.name()
                ));
            }
            Some(_) => {}
        }
        match key {
            "size" => self.size = Some(parse_size_value(key, value)?),
            "backing_file" => self.backing_file = Some(value.to_owned()),
            "backing_fmt" => self.backing_format = Some(value.to_owned()),
            "cluster_size" => {
                let bytes = parse_size_value(key, value)?;
                if !bytes.is_power_of_two() || !(512..=2 << 20).contains(&bytes) {
                    return Err("Cluster size must be a power of two between 512 and 2048k".to_owned());
                }
                self.cluster_size = Some(bytes);
            }
            "compat" => {
                self.version = Some(match value {
                    "0.10" | "v2" => 2,
                    "1.1" | "v3" => 3,
                    _ => {
                        return Err(format!("Parameter 'compat' does not accept value '{value}' (v2 or v3)"));
                    }
                });
                self.compat = Some(value.to_owned());
            }
            "compression_type" => {
                self.compression = Some(match value {
                    "zlib" => Compression::Zlib,
                    "zstd" => Compression::Zstd,
                    _ => {
                        return Err(format!(
                            "Parameter 'compression_type' does not accept value '{value}' (zlib or zstd)"
                        ));
                    }
                });
            }
            "data_file" => {
                self.data_file =
                    Some(local_name(value).map_err(|reason| format!("Parameter '{key}': {reason}"))?);
            }
            "data_file_raw" => self.data_file_raw = Some(parse_switch(key, value)?),
            "extended_l2" => self.extended_l2 = Some(parse_switch(key, value)?),
            "extent_size_hint" => {
                let bytes = parse_size_value(key, value)?;
                self.extent_size_hint =
                    Some(u32::try_from(bytes).map_err(|_| "Extent size hint is too large".to_owned())?);
            }
            "lazy_refcounts" => self.lazy_refcounts = Some(parse_switch(key, value)?),
            "nocow" => self.nocow = Some(parse_switch(key, value)?),
            "preallocation" => {
                let mode = preallocation_argument(value)?;
                if format != Format::Qcow2 && mode == Preallocation::Metadata {
                    return Err(format!(
                        "Invalid preallocation mode 'metadata' for format {} (off, falloc, full)",
                        format.name()
                    ));
                }
                self.preallocation = Some(mode);
            }
            "refcount_bits" => {
                let bits = parse_size_value(key, value)?;
                if !bits.is_power_of_two() || bits > 64 {
                    return Err("Refcount width must be a power of two and may not exceed 64 bits".to_owned());
                }
                self.refcount_bits = Some(bits as u32);
            }
            _ => return Err(format!("Invalid parameter '{key}'")),
        }
        Ok(())
    }

    /// The options of the engine; the backing file is put in by the command, which has looked at it.
    pub(crate) fn create_options(&self, dialect: Program, format: Format) -> CreateOptions {
        let mut create =
            CreateOptions::default().format(format).size(self.size).lock_wait(lock_wait(dialect));
        create.cluster_size = self.cluster_size.unwrap_or(create.cluster_size);
        create.version = self.version.unwrap_or(create.version);
        create.refcount_bits = self.refcount_bits.unwrap_or(create.refcount_bits);
        create.extended_l2 = self.extended_l2.unwrap_or(create.extended_l2);
        create.compression = self.compression.unwrap_or(create.compression);
        create.lazy_refcounts = self.lazy_refcounts.unwrap_or(create.lazy_refcounts);
        create.data_file.clone_from(&self.data_file);
        create.data_file_raw = self.data_file_raw.unwrap_or(create.data_file_raw);
        create.preallocation = self.preallocation.unwrap_or(create.preallocation);
        create.extent_size_hint = self.extent_size_hint;
        create.nocow = self.nocow.unwrap_or(create.nocow);
        if let Format::Foreign(format) = format {
            // Values were checked when they were set.
            create.foreign = self.foreign.image(format).ok().flatten();
        }
        create
    }

    /// The same, encrypted as the options say. `secrets` has the passphrase; without it, none is looked up.
    pub(crate) fn create_options_with(
        &self,
        dialect: Program,
        format: Format,
        secrets: Option<&Secrets>,
    ) -> Result<CreateOptions, String> {
        let encryption = self.encryption.resolve(dialect, format, secrets)?;
        Ok(self.create_options(dialect, format).encryption(encryption))
    }

    /// The line that `create` begins with: the name, and the options in QEMU's order, those with a default always.
    pub(crate) fn formatting_line(&self, name: &str, create: &CreateOptions) -> String {
        let mut line = format!("Formatting '{name}', fmt={}", create.format.name());
        let size = create.size.unwrap_or(0);
        if create.format == Format::Qcow2 {
            line.push_str(&self.encryption.formatting(create.format));
            let _ = write!(line, " cluster_size={}", create.cluster_size);
            let _ = write!(line, " extended_l2={}", on_off(create.extended_l2));
            if let Some(mode) = self.preallocation {
                let _ = write!(line, " preallocation={}", preallocation_name(mode));
            }
            let _ = write!(line, " compression_type={} size={size}", create.compression.name());
            if let Some(compat) = &self.compat {
                let _ = write!(line, " compat={compat}");
            }
            if let Some((file, format)) = &create.backing {
                // As it would be given again.
                let file = file.replace(',', ",,");
                let _ = write!(line, " backing_file={file} backing_fmt={}", format.name());
            }
            if let Some(file) = &create.data_file {
                let file = file.replace(',', ",,");
                let _ = write!(line, " data_file={file}");
            }
            if let Some(raw) = self.data_file_raw {
                let _ = write!(line, " data_file_raw={}", on_off(raw));
            }
            let _ = write!(line, " lazy_refcounts={}", on_off(create.lazy_refcounts));
            let _ = write!(line, " refcount_bits={}", create.refcount_bits);
        } else {
            let _ = write!(line, " size={size}");
            line.push_str(&self.encryption.formatting(create.format));
        }
        if let Format::Foreign(format) = create.format {
            line.push_str(&self.foreign.formatting(format));
        }
        if let Some(nocow) = self.nocow {
            let _ = write!(line, " nocow={}", on_off(nocow));
        }
        if let (Format::Raw | Format::Luks, Some(mode)) = (create.format, self.preallocation) {
            let _ = write!(line, " preallocation={}", preallocation_name(mode));
        }
        if let Some(bytes) = self.extent_size_hint {
            let _ = write!(line, " extent_size_hint={bytes}");
        }
        line
    }
}

fn on_off(value: bool) -> &'static str {
    if value { "on" } else { "off" }
}

/// The name as in `-o preallocation=`.
fn preallocation_name(mode: Preallocation) -> &'static str {
    match mode {
        Preallocation::Off => "off",
        Preallocation::Metadata => "metadata",
        Preallocation::Falloc => "falloc",
        Preallocation::Full => "full",
    }
}

/// Options of new images of a format, those of encryption apart: name, kind of value, description.
fn described(format: Format) -> Vec<(&'static str, &'static str, &'static str)> {
    let own = OPTIONS.iter().filter(|option| match format {
        Format::Raw | Format::Luks => option.raw,
        Format::Foreign(_) => OF_ALL_FILES.contains(&option.name),
        _ => true,
    });
    let mut options: Vec<_> = own.map(|option| (option.name, option.value, option.description)).collect();
    if let Format::Foreign(format) = format {
        options.extend(foreign_opts::described(format));
        options.sort_unstable();
    }
    options
}

/// Names of all options of new images of a format.
fn names(format: Format) -> impl Iterator<Item = &'static str> {
    described(format).into_iter().map(|(name, ..)| name)
}

fn help(format: Format) -> String {
    let mut text = format!("Supported {} options:\n", format.name());
    for (name, value, description) in described(format) {
        let head = format!("{name}=<{value}>");
        let _ = writeln!(text, "  {head:<22} - {description}");
    }
    if matches!(format, Format::Qcow2 | Format::Luks) {
        let of_format = |name: &str| format == Format::Qcow2 || name != "format";
        for (name, value, description) in encrypt_opts::OPTIONS.iter().filter(|(name, ..)| of_format(name)) {
            let head = format!("{}{name}=<{value}>", encrypt_opts::prefix(format));
            let _ = writeln!(text, "  {head:<22} - {description}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, format: Format) -> Result<CreateOpts, String> {
        match CreateOpts::parse(Program::Zebu, &[text.to_owned()], format, FileOptions::Listed)? {
            ParsedOpts::Use(opts) => Ok(*opts),
            ParsedOpts::Help(_) => Err("help".to_owned()),
        }
    }

    #[test]
    fn every_described_option_is_understood() {
        for option in OPTIONS {
            let value = match (option.name, option.value) {
                ("compat", _) => "v3",
                ("compression_type", _) => "zstd",
                ("preallocation", _) => "falloc",
                (_, "size") => "4k",
                (_, "num") => "8",
                (_, "bool (on/off)") => "on",
                _ => "name",
            };
            let text = format!("{}={value}", option.name);
            assert!(parse(&text, Format::Qcow2).is_ok(), "{text}");
            assert_eq!(parse(&text, Format::Raw).is_ok(), option.raw, "{text}");
        }
    }

    #[test]
    fn later_options_win_over_earlier_ones() {
        let arguments = ["cluster_size=4k".to_owned(), "cluster_size=8k,size=1M".to_owned()];
        let Ok(ParsedOpts::Use(opts)) =
            CreateOpts::parse(Program::Zebu, &arguments, Format::Qcow2, FileOptions::Listed)
        else {
            panic!()
        };
        assert_eq!(opts.create_options(Program::Zebu, Format::Qcow2).cluster_size, 8192);
        assert_eq!(opts.size, Some(1 << 20));
    }

    #[test]
    fn values_out_of_range_are_refused_in_qemus_words() {
        for (text, words) in [
            ("cluster_size=3", "Cluster size must be a power of two between 512 and 2048k"),
            ("cluster_size=4M", "Cluster size must be a power of two"),
            ("refcount_bits=3", "Refcount width must be a power of two and may not exceed 64 bits"),
            ("refcount_bits=128", "Refcount width"),
            ("lazy_refcounts=perhaps", "'lazy_refcounts' expects 'on' or 'off'"),
            ("compat=0.9", "does not accept value '0.9'"),
            ("foo=bar", "Invalid parameter 'foo'"),
            ("encryption=perhaps", "'encryption' expects 'on' or 'off'"),
            ("encrypt.nosuch=1", "'encrypt.nosuch'"),
            ("extent_size_hint=8G", "Extent size hint is too large"),
            ("preallocation=some", "'some'"),
        ] {
            let error = parse(text, Format::Qcow2).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
        assert!(parse("preallocation=metadata", Format::Raw).is_err());
    }

    #[test]
    fn help_lists_the_options_of_the_format() {
        let Ok(ParsedOpts::Help(text)) =
            CreateOpts::parse(Program::Zebu, &["help".to_owned()], Format::Raw, FileOptions::Listed)
        else {
            panic!()
        };
        assert!(text.starts_with("Supported raw options:\n"));
        assert!(text.contains("  size=<size>"));
        assert!(!text.contains("cluster_size"));
    }
}
