//! `--image-opts`: an image described by `key=value` pairs with the names of QEMU's node options.
//!
//! Every key either works or is refused by its name; none is ignored.

use crate::backing_opts::BackingOpts;
use crate::context::Context;
use crate::file_driver::{FileDriver, FileKind};
use crate::graph::{Description, Filter, Node, plan};
use crate::image_spec::ImageSpec;
use crate::json_name::{TypedValues, parse_json_name};
use crate::key_opts::KeyOpts;
use crate::keyval::{parse_keyval, parse_size_value, parse_switch};
use crate::program::Program;
use crate::remote_opts::RemoteOpts;
use crate::words::{
    Aio, Discard, aio_argument, discard_argument, format_argument, slice_size_argument, zero_policy_argument,
};
use std::path::{Path, PathBuf};
use std::time::Duration;
use zebu_engine::{Access, CacheMode, ExtentIndex, Format, Sharing, ZeroMode, ZeroPolicy};

/// The pairs of one image, understood.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageOpts {
    filename: Option<PathBuf>,
    format: Option<Format>,
    cache_direct: Option<bool>,
    cache_no_flush: Option<bool>,
    read_only: bool,
    force_share: bool,
    cache_size: Option<u64>,
    slice_size: Option<u32>,
    cache_clean_interval: Option<Duration>,
    extent_index: Option<ExtentIndex>,
    zero_policy: Option<ZeroPolicy>,
    aio: Option<Aio>,
    discard: Option<Discard>,
    data_file: Option<PathBuf>,
    backing: BackingOpts,
    remote: RemoteOpts,
    /// `cache-size`, `l2-cache-size` and `refcount-cache-size`, under QEMU's names.
    cache_sizes: [Option<u64>; 3],
    /// `overlap-check` and `overlap-check.template`, under QEMU's names.
    overlap_check: [Option<String>; 2],
    /// The driver of the image's file, if it was named.
    file_driver: Option<FileDriver>,
    /// No lock is taken (`locking=off`).
    unlocked: bool,
    /// Zeroes in writes are zeroed, in this way.
    detect_zeroes: Option<ZeroMode>,
    /// Keys of the images of the chain.
    keys: KeyOpts,
    /// Filters above the image, the top first.
    filters: Vec<Filter>,
    /// The driver on top, if it is no format.
    driver: Option<String>,
    /// All drivers, as they were described.
    described: Option<Description>,
    /// Names of nodes.
    node_names: Vec<(String, String)>,
    /// Files whose driver is named: their names are paths, whatever they look like.
    plain: Vec<NamedFile>,
}

/// One of the files that the pairs name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NamedFile {
    Image,
    DataFile,
}

/// Keys that QEMU has and zebu refuses, with the reason.
const REFUSED: &[(&str, &str)] = &[
    ("refcount-cache-size", "the caches of mapping and refcounts share one budget: use cache-size"),
    ("overlap-check", "every write is always checked against all metadata"),
    ("overlap-check.template", "every write is always checked against all metadata"),
    ("detect-zeroes", "use 'zebu serve --detect-zeroes', or a command under QEMU's names"),
    ("copy-on-read", "put driver=copy-on-read above the image"),
    ("node-name", "no option refers to a node by its name"),
    ("discard-no-unref", "it is not implemented"),
    ("pass-discard-request", "discards always give space back (use discard=ignore to drop them)"),
    ("pass-discard-snapshot", "it can't be set"),
    ("pass-discard-other", "it can't be set"),
    ("lazy-refcounts", "that mode is never entered; the flag in the image is kept"),
    ("offset", "only driver=raw takes a part of a disk"),
    ("size", "only driver=raw takes a part of a disk"),
    ("file.locking", "use force-share=on"),
    ("auto-read-only", "an image is opened as the command needs it"),
];

/// Values of `overlap-check`.
const OVERLAP_CHECKS: [&str; 4] = ["none", "constant", "cached", "all"];
/// Parts of the overlap check that QEMU can switch on and off.
const OVERLAP_PARTS: [&str; 9] = [
    "main-header",
    "active-l1",
    "active-l2",
    "refcount-table",
    "refcount-block",
    "snapshot-table",
    "inactive-l1",
    "inactive-l2",
    "bitmap-directory",
];
/// QEMU counts clusters of the refcount cache in 31 bits; the smallest has 512 bytes.
const MAX_REFCOUNT_CACHE: u64 = 1 << 40;

/// A switch, refused in QEMU's words.
fn qemu_switch(key: &str, value: &str) -> Result<bool, String> {
    parse_switch(key, value).map_err(|_| format!("Parameter '{key}' expects 'on' or 'off'"))
}

impl ImageOpts {
    /// Reads the pairs. The error names the key and says what is wrong with it.
    pub fn parse(context: &Context, text: &str) -> Result<Self, String> {
        let pairs = parse_keyval(text).map_err(|error| error.to_string())?;
        Self::from_typed(context, &pairs, TypedValues::default())
    }

    /// Reads a name that is JSON; `None` if it is none.
    pub fn of_json_name(context: &Context, name: &str) -> Option<Result<Self, String>> {
        let pairs = parse_json_name(name)?;
        Some(pairs.and_then(|pairs| Self::from_typed(context, &pairs, TypedValues::of_name(name))))
    }

    /// Reads pairs that were taken apart already.
    fn from_typed(context: &Context, pairs: &[(String, String)], typed: TypedValues) -> Result<Self, String> {
        let opts = Self::read_graph(context, pairs, None, typed)?;
        if opts.filename.is_none() {
            return Err("A file must be specified: add file.filename=NAME".to_owned());
        }
        Ok(opts)
    }

    /// Reads the pairs for a file that is known already.
    pub fn parse_for(context: &Context, text: &str, file: &Path) -> Result<Self, String> {
        Self::beside_name(context, parse_keyval(text).map_err(|error| error.to_string())?, file)
    }

    /// Reads pairs that were taken apart already, for a file that was opened before.
    pub fn from_pairs_for(
        context: &Context,
        given: Vec<(String, String)>,
        file: &Path,
    ) -> Result<Self, String> {
        if context.disks.names.is_remote(file) {
            let opts = Self::read_graph(context, &given, None, TypedValues::default())?;
            return Ok(Self { filename: Some(opts.filename.unwrap_or_else(|| file.to_owned())), ..opts });
        }
        Self::beside_name(context, given, file)
    }

    /// Reads pairs beside a name.
    fn beside_name(context: &Context, given: Vec<(String, String)>, file: &Path) -> Result<Self, String> {
        let Some(named) = file.to_str().and_then(parse_json_name) else {
            return Self::read_graph(context, &given, Some(file), TypedValues::default());
        };
        // What is given beside a name goes over what the name says.
        let mut pairs = named?;
        let mut typed = file.to_str().map(TypedValues::of_name).unwrap_or_default();
        pairs.retain(|(key, _)| given.iter().all(|(other, _)| other != key));
        for (key, _) in &given {
            typed.remove(key);
        }
        pairs.extend(given);
        Self::from_typed(context, &pairs, typed)
    }

    /// Reads pairs, and the name beside them, after the drivers were taken out.
    fn read_graph(
        context: &Context,
        pairs: &[(String, String)],
        file: Option<&Path>,
        typed: TypedValues,
    ) -> Result<Self, String> {
        if let Some(plan) = plan(context, pairs, file.and_then(Path::to_str), typed)? {
            let opts = Self::read(context, &plan.pairs)?;
            return Ok(Self {
                filters: plan.filters,
                driver: plan.driver,
                described: Some(plan.described),
                ..opts
            });
        }
        let mut opts = Self::read(context, pairs)?;
        if let Some(file) = file {
            set_once(&mut opts.filename, "file.filename", file.to_owned())?;
        }
        Ok(opts)
    }

    fn read(context: &Context, pairs: &[(String, String)]) -> Result<Self, String> {
        let mut opts = Self::default();
        for (key, value) in without_idle_raw(pairs) {
            opts.set(context, &key, &value)?;
        }
        for name in std::mem::take(&mut opts.remote).finish(context)? {
            set_once(&mut opts.filename, "file.filename", context.disks.names.note_remote(name)?)?;
            opts.plain.push(NamedFile::Image);
        }
        opts.backing.finish(context)?;
        opts.check_cache_sizes()?;
        for (file, key, path) in [
            (NamedFile::Image, "file.filename", &mut opts.filename),
            (NamedFile::DataFile, "data-file.filename", &mut opts.data_file),
        ] {
            if let Some(path) = path
                && !opts.plain.contains(&file)
            {
                *path = context
                    .image_path(path.as_os_str())
                    .map_err(|reason| format!("Parameter '{key}': {reason}"))?;
            }
        }
        Ok(opts)
    }

    fn set(&mut self, context: &Context, key: &str, value: &str) -> Result<(), String> {
        if context.dialect.is_qemu() && self.set_as_qemu(key, value)? {
            return Ok(());
        }
        match key {
            "driver" => match value {
                "file" | "host_device" | "host_cdrom" => {
                    self.file_driver = FileDriver::named(value);
                    self.format = Some(Format::Raw);
                    self.plain.push(NamedFile::Image);
                }
                _ if self.remote.name(value) => {
                    self.format = Some(Format::Raw);
                    self.driver = ["nbd", "rbd"].contains(&value).then(|| value.to_owned());
                }
                _ => {
                    let format = format_argument(context.dialect, value);
                    self.format = Some(
                        format
                            .map_err(|reason| reason.replacen("Unknown file format", "Unknown driver", 1))?,
                    );
                }
            },
            "file.driver" if self.remote.name(value) => {}
            "filename" | "file.filename" => set_once(&mut self.filename, key, PathBuf::from(value))?,
            "file.driver" | "data-file.driver" => {
                FileDriver::of_option(key, value)?;
                let is_image = key == "file.driver";
                self.plain.push(if is_image { NamedFile::Image } else { NamedFile::DataFile });
            }
            "cache.direct" | "file.cache.direct" => self.cache_direct = Some(parse_switch(key, value)?),
            "cache.no-flush" | "file.cache.no-flush" => self.cache_no_flush = Some(parse_switch(key, value)?),
            "read-only" => self.read_only = parse_switch(key, value)?,
            "force-share" => self.force_share = parse_switch(key, value)?,
            "cache-size" | "l2-cache-size" => {
                let bytes = parse_size_value(key, value)?;
                if self.cache_size.is_some() {
                    return Err("cache-size and l2-cache-size may not be set at the same time".to_owned());
                }
                self.cache_size = Some(bytes);
            }
            "l2-cache-entry-size" => {
                self.slice_size = Some(match slice_size_argument(value) {
                    Ok(bytes) => bytes,
                    // The image has the words, when it is known how large a cluster is.
                    Err(_) if context.dialect.is_qemu() => {
                        u32::try_from(parse_size_value(key, value)?).unwrap_or(u32::MAX)
                    }
                    Err(e) => return Err(format!("Parameter '{key}': '{value}': {e}")),
                });
            }
            "cache-clean-interval" => {
                let seconds: u32 = value.parse().map_err(|_| match value.parse::<i64>() {
                    Ok(_) if context.dialect.is_qemu() => "Cache clean interval too big".to_owned(),
                    _ => format!("Parameter '{key}' expects a number of seconds, not '{value}'"),
                })?;
                self.cache_clean_interval = Some(Duration::from_secs(u64::from(seconds)));
            }
            "extent-index" => {
                let index = if parse_switch(key, value)? { ExtentIndex::On } else { ExtentIndex::Off };
                self.extent_index = Some(index);
            }
            "zero-policy" => self.zero_policy = Some(zero_policy_argument(value)?),
            "aio" | "file.aio" => self.aio = Some(aio_argument(value)?),
            "discard" | "file.discard" => self.discard = Some(discard_argument(value)?),
            "data-file.filename" | "data-file.file.filename" => {
                set_once(&mut self.data_file, key, PathBuf::from(value))?;
            }
            _ if self.keys.take(key, value)? || self.backing.take(context.dialect, key, value)? => {}
            _ if self.remote.take(context.dialect, key.strip_prefix("file.").unwrap_or(key), value)? => {}
            _ => {
                return Err(match REFUSED.iter().find(|(name, _)| *name == key) {
                    Some((_, reason)) => format!("Parameter '{key}' is not supported: {reason}"),
                    None => format!("Unknown parameter '{key}'"),
                });
            }
        }
        Ok(())
    }

    /// Reads a key that QEMU's programs have and zebu's own names refuse. It is checked as QEMU does; that these have no
    /// effect here, the guide says. True if it was one.
    fn set_as_qemu(&mut self, key: &str, value: &str) -> Result<bool, String> {
        match key {
            "lazy-refcounts"
            | "pass-discard-snapshot"
            | "pass-discard-other"
            | "discard-no-unref"
            | "auto-read-only"
            | "file.auto-read-only" => drop(qemu_switch(key, value)?),
            "pass-discard-request" => {
                let mode = if qemu_switch(key, value)? { Discard::Unmap } else { Discard::Ignore };
                self.discard = Some(mode);
            }
            "read-only" | "force-share" | "cache.direct" | "cache.no-flush" => {
                qemu_switch(key, value)?;
                return Ok(false);
            }
            _ if BackingOpts::own_key(key) == "node-name"
                || BackingOpts::own_key(key) == "file.node-name" =>
            {
                self.node_names.push((key.to_owned(), value.to_owned()));
            }
            "file.locking" | "locking" => match value {
                "auto" | "on" => {}
                "off" => self.unlocked = true,
                _ => return Err(format!("Parameter '{key}' does not accept value '{value}'")),
            },
            "detect-zeroes" => match value {
                "off" => {}
                "on" => self.detect_zeroes = Some(ZeroMode::Keep),
                "unmap" => self.detect_zeroes = Some(ZeroMode::Unmap),
                _ => return Err(format!("Parameter '{key}' does not accept value '{value}'")),
            },
            "cache-size" => self.cache_sizes[0] = Some(parse_size_value(key, value)?),
            "l2-cache-size" => self.cache_sizes[1] = Some(parse_size_value(key, value)?),
            "refcount-cache-size" => {
                let bytes = parse_size_value(key, value)?;
                if bytes >= MAX_REFCOUNT_CACHE {
                    return Err("Refcount cache size too big".to_owned());
                }
                self.cache_sizes[2] = Some(bytes);
            }
            "overlap-check" | "overlap-check.template" => {
                if !OVERLAP_CHECKS.contains(&value) {
                    return Err(format!(
                        "Unsupported value '{value}' for qcow2 option 'overlap-check'. Allowed are any of the following: {}",
                        OVERLAP_CHECKS.join(", ")
                    ));
                }
                self.overlap_check[usize::from(key != "overlap-check")] = Some(value.to_owned());
                if let [Some(check), Some(template)] = &self.overlap_check
                    && check != template
                {
                    return Err(format!(
                        "Conflicting values for qcow2 options 'overlap-check' ('{check}') and 'overlap-check.template' \
                         ('{template}')"
                    ));
                }
            }
            _ => match key.strip_prefix("overlap-check.") {
                Some(part) if OVERLAP_PARTS.contains(&part) => drop(qemu_switch(key, value)?),
                _ => return Ok(false),
            },
        }
        Ok(true)
    }

    /// The budget of all caches, of the three sizes that QEMU has.
    fn check_cache_sizes(&mut self) -> Result<(), String> {
        match self.cache_sizes {
            [Some(_), Some(_), Some(_)] => {
                return Err(
                    "cache-size, l2-cache-size and refcount-cache-size may not be set at the same time"
                        .to_owned(),
                );
            }
            [Some(all), Some(l2), _] if l2 > all => {
                return Err("l2-cache-size may not exceed cache-size".to_owned());
            }
            [Some(all), _, Some(refcounts)] if refcounts > all => {
                return Err("refcount-cache-size may not exceed cache-size".to_owned());
            }
            [Some(all), ..] => self.cache_size = Some(all),
            [None, Some(l2), refcounts] => self.cache_size = Some(l2.saturating_add(refcounts.unwrap_or(0))),
            [None, None, _] => {}
        }
        Ok(())
    }

    /// Puts what was given over what the command wants.
    pub fn apply(self, context: &Context, spec: &mut ImageSpec) -> Result<(), String> {
        // An encrypted disk would be taken for raw, and written in plain text.
        if self.format == Some(Format::Raw)
            && let Some(key) = self.keys.option_of_top()
        {
            return Err(format!("Block format 'raw' does not support the option '{key}'"));
        }
        spec.secrets.key_of_top = self.keys.of_top().map(str::to_owned);
        spec.options.keys = self.keys.keys(&spec.secrets, std::mem::take(&mut spec.options.keys))?;
        let options = &mut spec.options;
        if let Some(path) = self.filename {
            spec.path = path;
        }
        options.format = self.format.or(options.format);
        options.cache = cache_mode(context.dialect, options.cache, self.cache_direct, self.cache_no_flush)?;
        if self.read_only {
            if options.access == Access::ReadWrite {
                return Err("Parameter 'read-only=on' contradicts a command that writes".to_owned());
            }
            options.access = Access::ReadOnly;
        }
        let kind = match self.file_driver.filter(|_| context.dialect.is_qemu()) {
            Some(driver) => driver.check(&spec.path, options.access)?,
            None => FileKind::Any,
        };
        if kind == FileKind::CharacterDevice {
            // It has no end to look for, and so no bytes.
            let nothing = Node::Null { size: 0, reads_zeroes: true, latency: Duration::ZERO };
            spec.path = context.disks.names.note_node(spec.path.clone(), nothing)?;
        } else if self.unlocked && options.access == Access::ReadWrite {
            return Err(
                "Parameter 'locking=off' is for reading only: two writers destroy an image".to_owned()
            );
        }
        if self.force_share || (self.unlocked && kind != FileKind::CharacterDevice) {
            if options.access == Access::ReadWrite {
                return Err("Parameter 'force-share=on' is for reading only".to_owned());
            }
            options.sharing = Sharing::Unlocked;
        }
        options.cache_size = self.cache_size.or(options.cache_size);
        options.slice_size = self.slice_size.or(options.slice_size);
        options.cache_clean_interval = self.cache_clean_interval.or(options.cache_clean_interval);
        options.extent_index = self.extent_index.unwrap_or(options.extent_index);
        options.zero_policy = self.zero_policy.unwrap_or(options.zero_policy);
        options.data_file = self.data_file.or(options.data_file.take());
        self.backing.apply(options);
        spec.called_raw = "driver=raw";
        spec.node_names.extend(self.node_names);
        spec.filters = self.filters;
        spec.driver = self.driver;
        spec.described = self.described;
        spec.aio = self.aio.or(spec.aio);
        spec.discard = self.discard.or(spec.discard);
        spec.detect_zeroes = self.detect_zeroes.or(spec.detect_zeroes);
        let unmaps = spec.detect_zeroes == Some(ZeroMode::Unmap);
        if unmaps && spec.discard != Some(Discard::Unmap) && context.dialect.is_qemu() {
            return Err(
                "setting detect-zeroes to unmap is not allowed without setting discard operation to unmap"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

/// The pairs where `file.driver=raw` stands for the file below it: a raw node without offset and size changes nothing.
fn without_idle_raw(pairs: &[(String, String)]) -> Vec<(String, String)> {
    let mut pairs = pairs.to_vec();
    for _ in 0..pairs.len() {
        let is_raw = pairs.iter().any(|(key, value)| key == "file.driver" && value == "raw");
        let is_plain = pairs.iter().all(|(key, _)| {
            key.strip_prefix("file.").is_none_or(|below| below == "driver" || below.starts_with("file."))
        });
        if !is_raw || !is_plain {
            break;
        }
        pairs.retain(|(key, _)| key != "file.driver");
        for (key, _) in &mut pairs {
            if let Some(below) = key.strip_prefix("file.file.") {
                *key = format!("file.{below}");
            }
        }
    }
    pairs
}

fn set_once<T>(slot: &mut Option<T>, key: &str, value: T) -> Result<(), String> {
    if slot.is_some() {
        return Err(format!("Parameter '{key}' is given twice"));
    }
    *slot = Some(value);
    Ok(())
}

/// The mode that two switches make of the one asked for with `-t`.
fn cache_mode(
    dialect: Program,
    mode: CacheMode,
    direct: Option<bool>,
    no_flush: Option<bool>,
) -> Result<CacheMode, String> {
    let direct = direct.unwrap_or(mode.is_direct());
    let no_flush = no_flush.unwrap_or(mode == CacheMode::Unsafe);
    // For QEMU both may be asked for; flushes are carried out all the same.
    let no_flush = no_flush && !(direct && dialect.is_qemu());
    match (direct, no_flush, mode.is_writethrough()) {
        (true, true, _) => {
            Err("Parameters 'cache.direct=on' and 'cache.no-flush=on' can't be combined".to_owned())
        }
        (false, true, _) => Ok(CacheMode::Unsafe),
        (true, false, false) => Ok(CacheMode::None),
        (true, false, true) => Ok(CacheMode::Directsync),
        (false, false, false) => Ok(CacheMode::Writeback),
        (false, false, true) => Ok(CacheMode::Writethrough),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zebu_engine::OpenOptions;

    fn parse(text: &str) -> Result<ImageOpts, String> {
        ImageOpts::parse(&Context::default(), text)
    }

    fn spec(access: Access) -> ImageSpec {
        ImageSpec::new("unset".into(), OpenOptions::default().access(access))
    }

    #[test]
    fn the_keys_of_the_manual_reach_the_engine() {
        let text = "driver=qcow2,l2-cache-size=1M,l2-cache-entry-size=4096,file.filename=a,,b.qcow2,\
                    cache.direct=on,file.aio=threads,force-share=on,data-file.filename=d.raw,\
                    backing.driver=raw,backing.file.filename=base.raw,discard=unmap,file.driver=file,\
                    cache-clean-interval=60,extent-index=off";
        let mut spec = spec(Access::ReadOnly);
        parse(text).unwrap().apply(&Context::default(), &mut spec).unwrap();
        assert_eq!(spec.path, PathBuf::from("a,b.qcow2"));
        assert_eq!(spec.options.format, Some(Format::Qcow2));
        assert_eq!(spec.options.cache_size, Some(1 << 20));
        assert_eq!(spec.options.slice_size, Some(4096));
        assert_eq!(spec.options.cache_clean_interval, Some(Duration::from_secs(60)));
        assert_eq!(spec.options.extent_index, ExtentIndex::Off);
        assert_eq!(spec.options.cache, CacheMode::None);
        assert_eq!(spec.options.sharing, Sharing::Unlocked);
        assert_eq!(spec.options.data_file, Some("d.raw".into()));
        assert_eq!(spec.options.backing, Some(("base.raw".into(), Some(Format::Raw))));
        assert_eq!(spec.aio, Some(Aio::Threads));
        assert_eq!(spec.discard, Some(Discard::Unmap));
    }

    #[test]
    fn unknown_and_refused_keys_are_named() {
        let error = parse("file.filename=a,foo=bar").unwrap_err();
        assert_eq!(error, "Unknown parameter 'foo'");
        for (key, _) in REFUSED {
            let error = parse(&format!("file.filename=a,{key}=1")).unwrap_err();
            assert!(error.contains(&format!("'{key}'")), "{error}");
        }
    }

    #[test]
    fn wrong_values_name_their_key() {
        for (text, key) in [
            ("file.filename=a,l2-cache-size=1x", "'l2-cache-size'"),
            ("file.filename=a,read-only=maybe", "'read-only'"),
            ("file.filename=a,l2-cache-entry-size=5", "'l2-cache-entry-size'"),
            ("file.filename=a,file.driver=ssh", "'file.driver'"),
            ("file.driver=nbd", "server.host"),
            ("file.filename=a,file.export=x", "'export'"),
            ("file.driver=nbd,file.host=h,file.filename=a", "file.filename"),
            ("file.filename=a,file.filename=b", "'file.filename'"),
            ("file.filename=a,backing.driver=raw,backing=", "'backing.driver'"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(key), "{text}: {error}");
        }
    }

    #[test]
    fn a_file_is_needed() {
        assert!(parse("driver=qcow2").unwrap_err().contains("file.filename"));
        assert!(parse("disk.qcow2").unwrap_err().contains("disk.qcow2"));
    }

    #[test]
    fn reading_only_contradicts_a_writing_command() {
        for text in ["file.filename=a,read-only=on", "file.filename=a,force-share=on"] {
            let opts = parse(text).unwrap();
            assert!(opts.clone().apply(&Context::default(), &mut spec(Access::ReadWrite)).is_err());
            assert!(opts.apply(&Context::default(), &mut spec(Access::ReadOnly)).is_ok());
        }
    }

    #[test]
    fn switches_of_the_cache_refine_the_mode() {
        assert_eq!(
            cache_mode(Program::Zebu, CacheMode::Writethrough, Some(true), None),
            Ok(CacheMode::Directsync)
        );
        assert_eq!(cache_mode(Program::Zebu, CacheMode::None, Some(false), None), Ok(CacheMode::Writeback));
        assert_eq!(cache_mode(Program::Zebu, CacheMode::Writeback, None, Some(true)), Ok(CacheMode::Unsafe));
        assert_eq!(cache_mode(Program::Zebu, CacheMode::Unsafe, None, Some(false)), Ok(CacheMode::Writeback));
        assert!(cache_mode(Program::Zebu, CacheMode::None, None, Some(true)).is_err());
    }
}
