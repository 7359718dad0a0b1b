//! From options to nodes and filters.

use super::debug_options::{configuration, split_name};
use super::description::Description;
use super::filter::Filter;
use super::node::Node;
use super::pairs::{Pair, below, get, refuse_others, take_common, without};
use crate::context::Context;
use crate::json_name::{TypedValues, parse_json_name};
use crate::key_opts::KeyOpts;
use crate::keyval::{parse_size_value, parse_switch};
use crate::local_name::local_path;
use crate::nbd_opts::NbdOpts;
use crate::rbd_opts::RbdOpts;
use crate::remote_disk::RemoteName;
use crate::words::FORMATS;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;
use zebu_drivers::{NullDisk, PreallocateConfig};
use zebu_engine::{Access, Format};
use zebu_rbd::RbdName;
use zebu_remote::nbd::NbdAddress;

/// Nodes below each other at most.
const MAX_DEPTH: usize = 32;
/// Drivers that lie below a format.
const PROTOCOLS: [&str; 5] = ["blkdebug", "blkverify", "null-co", "null-aio", "preallocate"];
/// Starts of names that are of a driver here.
const PREFIXES: [&str; 4] = ["blkdebug:", "blkverify:", "null-co:", "null-aio:"];

/// Options of an image with drivers, as they are left when these are taken out.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Options of the image, whose files have the names that nodes were noted under.
    pub(crate) pairs: Vec<Pair>,
    /// Filters above the image, the top first.
    pub(crate) filters: Vec<Filter>,
    /// The driver on top, if it is no format.
    pub(crate) driver: Option<String>,
    /// All of it, as it was described.
    pub(crate) described: Description,
}

/// Whether a name leads to a driver here.
pub fn is_graph_name(name: &str) -> bool {
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// The node that a name of a driver here describes.
pub(crate) fn name_node(context: &Context, name: &str) -> Result<Node, String> {
    protocol(context, &[], Some(name), 0)
}

/// The node that a name in an image describes. The driver of a format on top is the image's business, which names the
/// format of its backing file beside the name.
pub fn reference_node(context: &Context, name: &str) -> Result<Node, String> {
    if let Some(pairs) = parse_json_name(name) {
        // Whose key is for whom, the opening of the image asks.
        let (pairs, _) = KeyOpts::split(pairs?)?;
        let driver = get(&pairs, "driver");
        let is_part = get(&pairs, "offset").is_some() || get(&pairs, "size").is_some();
        if driver.is_none_or(|driver| FORMATS.contains(&driver)) && !is_part {
            let own = below(&pairs, "file");
            if !own.is_empty() {
                let (pairs, access) = take_common(&pairs)?;
                refuse_others(&pairs, driver.unwrap_or("raw"), &[], &["file"])?;
                let node = protocol(context, &own, None, 0)?;
                return Ok(if access == Access::ReadOnly { Node::ReadOnly(Box::new(node)) } else { node });
            }
        }
    }
    protocol(context, &[], Some(name), 0)
}

/// Takes the drivers out of options, if there are any; `filename` is given beside them. `typed` has the numbers and switches
/// among the options that came as JSON.
///
/// # Errors
/// An option that its driver has not, or that can't be read.
pub(crate) fn plan(
    context: &Context,
    pairs: &[Pair],
    filename: Option<&str>,
    mut typed: TypedValues,
) -> Result<Option<Plan>, String> {
    if !has_drivers(pairs) && !filename.is_some_and(is_graph_name) {
        return Ok(None);
    }
    let mut pairs = pairs.to_vec();
    let mut filename = filename.map(str::to_owned);
    let described = Description::of_pairs(&pairs).typed(&typed);
    let mut plan = Plan { pairs: Vec::new(), filters: Vec::new(), driver: None, described };
    for _ in 0..MAX_DEPTH {
        let driver = get(&pairs, "driver").map(str::to_owned);
        let child = match driver.as_deref() {
            Some(name @ ("copy-on-read" | "compress")) => {
                refuse_filter_options(&pairs, name, &["file"])?;
                plan.filters.push(if name == "compress" { Filter::Compress } else { Filter::CopyOnRead });
                "file"
            }
            Some("blkdebug") if is_image(&below(&pairs, "image")) => {
                let (config, image) = match filename.as_deref().filter(|name| name.starts_with("blkdebug:")) {
                    Some(name) => split_name(name).map(|(config, image)| (Some(config), Some(image)))?,
                    None => (None, get(&pairs, "x-image").or(filename.as_deref())),
                };
                refuse_filter_options(&pairs, "blkdebug", &["image", "inject-error", "set-state"])?;
                plan.filters.push(Filter::Blkdebug(configuration(&pairs, config)?));
                filename = image.map(str::to_owned);
                "image"
            }
            _ => {
                plan.pairs = bottom(context, &pairs, filename.as_deref(), driver.as_deref(), &typed)?;
                if plan.filters.is_empty() && driver.as_deref().is_some_and(|name| PROTOCOLS.contains(&name))
                {
                    plan.driver = driver;
                }
                return Ok(Some(plan));
            }
        };
        plan.driver = plan.driver.or(driver);
        // What is said of the whole stack holds for the image.
        let next = below(&pairs, child);
        let mut general: Vec<Pair> = pairs.iter().filter(|(key, _)| is_general(key)).cloned().collect();
        let differing =
            general.iter().find(|(key, value)| get(&next, key).is_some_and(|lower| lower != value));
        if let Some((key, _)) = differing {
            return Err(format!(
                "Parameter '{key}' is not supported: it differs between a driver and the image below it, which has it for all"
            ));
        }
        general.retain(|(key, _)| get(&next, key).is_none());
        pairs = [next, general].concat();
        typed = typed.below(child);
    }
    Err("too many drivers lie above each other".to_owned())
}

/// Options of a whole stack, which its image takes.
fn is_general(key: &str) -> bool {
    let keys = ["read-only", "auto-read-only", "force-share", "discard", "detect-zeroes"];
    keys.contains(&key) || key.starts_with("cache.")
}

fn refuse_filter_options(pairs: &[Pair], driver: &str, children: &[&str]) -> Result<(), String> {
    let others: Vec<Pair> = pairs.iter().filter(|(key, _)| !is_general(key)).cloned().collect();
    let (others, _) = take_common(&others)?;
    let keys: &[&str] = if driver == "blkdebug" { &DEBUG_KEYS } else { &[] };
    refuse_others(&others, driver, keys, children)
}

/// Keys of `blkdebug` but rules and the node below.
const DEBUG_KEYS: [&str; 9] = [
    "config",
    "x-image",
    "filename",
    "align",
    "max-transfer",
    "opt-write-zero",
    "max-write-zero",
    "opt-discard",
    "max-discard",
];

/// Whether options have a driver that is the business of this module.
fn has_drivers(pairs: &[Pair]) -> bool {
    let named = pairs.iter().any(|(key, value)| {
        let is_driver = key == "driver" || key.ends_with(".driver");
        let is_nested = key.ends_with("file.driver") && FORMATS.contains(&value.as_str()) && value != "raw";
        is_driver
            && (PROTOCOLS.contains(&value.as_str()) || matches!(value.as_str(), "copy-on-read" | "compress"))
            || is_nested
    });
    let is_part = |prefix: &str| {
        get(pairs, &format!("{prefix}driver")) == Some("raw")
            && ["offset", "size"].iter().any(|key| get(pairs, &format!("{prefix}{key}")).is_some())
    };
    // A raw node below a format is left out if it says nothing.
    let says_something = get(pairs, "file.driver") == Some("raw")
        && pairs.iter().any(|(key, _)| {
            let own = key.strip_prefix("file.").unwrap_or("driver");
            own != "driver" && !own.starts_with("file.")
        });
    named
        || says_something
        || is_part("")
        || backing_images(pairs)
            .iter()
            .any(|image| is_part(&format!("{image}.")) || is_part(&format!("{image}.file.")))
}

/// The backing images that options describe, the next one first.
fn backing_images(pairs: &[Pair]) -> Vec<String> {
    let is_described = |image: &String| pairs.iter().any(|(key, _)| key.starts_with(&format!("{image}.")));
    std::iter::successors(Some("backing".to_owned()), |image| Some(format!("{image}.backing")))
        .take(MAX_DEPTH)
        .take_while(is_described)
        .collect()
}

/// Whether a node is an image of some format, or a filter above one.
fn is_image(pairs: &[Pair]) -> bool {
    match get(pairs, "driver") {
        Some("copy-on-read" | "compress") => true,
        Some("blkdebug") => is_image(&below(pairs, "image")),
        Some(name) => FORMATS.contains(&name),
        None => false,
    }
}

/// Options of an image whose files are nodes: noted, and named.
fn bottom(
    context: &Context,
    pairs: &[Pair],
    filename: Option<&str>,
    driver: Option<&str>,
    typed: &TypedValues,
) -> Result<Vec<Pair>, String> {
    let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let is_part = driver == Some("raw") && (get(pairs, "offset").is_some() || get(pairs, "size").is_some());
    if is_part || driver.is_some_and(|name| PROTOCOLS.contains(&name)) {
        let own: Vec<Pair> = pairs.iter().filter(|(key, _)| !is_general(key)).cloned().collect();
        let node = protocol(context, &own, filename, 0)?;
        let mut kept: Vec<Pair> = pairs.iter().filter(|(key, _)| is_general(key)).cloned().collect();
        kept.push(pair("driver", "raw"));
        kept.push(pair("file.filename", &note(context, filename, pairs, typed, node)?));
        return Ok(kept);
    }
    let mut kept = pairs.to_vec();
    let images = backing_images(pairs);
    for image in &images {
        let own = below(pairs, image);
        let is_part = ["offset", "size"].iter().any(|key| get(&own, key).is_some());
        if is_part && get(&own, "driver") == Some("raw") {
            let node = protocol(context, &own, None, 0)?;
            kept = without(&kept, image);
            kept.push(pair(&format!("{image}.driver"), "raw"));
            kept.push(pair(
                &format!("{image}.file.filename"),
                &note(context, None, &own, &typed.below(image), node)?,
            ));
        }
    }
    for file in images.iter().map(|image| format!("{image}.file")).chain(["data-file".to_owned()]) {
        let file = file.as_str();
        let own = below(&kept, file);
        if has_drivers(&own) || get(&own, "filename").is_some_and(is_graph_name) {
            let node = protocol(context, &own, None, 0)?;
            kept = without(&kept, file);
            kept.push(pair(
                &format!("{file}.filename"),
                &note(context, None, &own, &typed.below(file), node)?,
            ));
        }
    }
    let own = below(pairs, "file");
    if filename.is_some_and(is_graph_name)
        || has_drivers(&own)
        || is_image(&own)
        || get(&own, "filename").is_some_and(is_graph_name)
    {
        let node = protocol(context, &own, filename, 0)?;
        kept = without(&kept, "file");
        kept.push(pair("file.filename", &note(context, filename, &own, &typed.below("file"), node)?));
    } else if let Some(name) = filename
        && get(pairs, "filename").is_none()
    {
        kept.push(pair("file.filename", name));
    }
    Ok(kept)
}

/// Notes a node, under the name that the command line gave, or under its options.
fn note(
    context: &Context,
    filename: Option<&str>,
    pairs: &[Pair],
    typed: &TypedValues,
    node: Node,
) -> Result<String, String> {
    let name = if let Some(name) = filename.filter(|name| is_graph_name(name)) {
        name.to_owned()
    } else {
        Description::of_pairs(pairs).typed(typed).name()
    };
    context.disks.names.note_node(PathBuf::from(&name), node)?;
    Ok(name)
}

/// A node below a format; `filename` is given beside its options.
fn protocol(context: &Context, pairs: &[Pair], filename: Option<&str>, depth: usize) -> Result<Node, String> {
    let (own, access) = take_common(pairs)?;
    let node = driver_node(context, &own, filename, depth)?;
    Ok(if access == Access::ReadOnly { Node::ReadOnly(Box::new(node)) } else { node })
}

/// The same, of the options that are its driver's alone.
fn driver_node(
    context: &Context,
    pairs: &[Pair],
    filename: Option<&str>,
    depth: usize,
) -> Result<Node, String> {
    if depth > MAX_DEPTH {
        return Err("too many drivers lie below each other".to_owned());
    }
    let name = filename.or(get(pairs, "filename"));
    if let Some(parsed) = name.and_then(parse_json_name) {
        let mut all = parsed?;
        all.retain(|(key, _)| get(pairs, key).is_none());
        all.extend(pairs.iter().filter(|(key, _)| key != "filename").cloned());
        return protocol(context, &all, None, depth + 1);
    }
    let driver = get(pairs, "driver").or_else(|| {
        let name = name?;
        PREFIXES.iter().find(|prefix| name.starts_with(*prefix)).map(|prefix| prefix.trim_end_matches(':'))
    });
    let child = |child: &str, filename: Option<&str>| -> Result<Box<Node>, String> {
        Ok(Box::new(protocol(context, &below(pairs, child), filename, depth + 1)?))
    };
    match driver {
        Some("null-co" | "null-aio") => {
            refuse_others(pairs, "null-co", &["size", "latency-ns", "read-zeroes", "filename"], &[])?;
            null_disk(pairs)
        }
        Some("blkdebug") => {
            let (config, image) = match name.filter(|name| name.starts_with("blkdebug:")) {
                Some(name) => split_name(name).map(|(config, image)| (Some(config), Some(image)))?,
                None => (None, get(pairs, "x-image")),
            };
            refuse_others(pairs, "blkdebug", &DEBUG_KEYS, &["image", "inject-error", "set-state"])?;
            Ok(Node::Blkdebug { config: configuration(pairs, config)?, image: child("image", image)? })
        }
        Some("blkverify") => {
            refuse_others(pairs, "blkverify", &["x-raw", "x-image", "filename"], &["raw", "test"])?;
            let named = name.and_then(|name| name.strip_prefix("blkverify:"));
            let (raw, test) = match named {
                Some(names) => {
                    let (raw, test) = names
                        .split_once(':')
                        .ok_or("blkverify requires raw copy and original image: blkverify:RAW:IMAGE")?;
                    (Some(raw), Some(test))
                }
                None => (get(pairs, "x-raw"), get(pairs, "x-image")),
            };
            Ok(Node::Blkverify { raw: child("raw", raw)?, test: Box::new(probed(*child("test", test)?)) })
        }
        Some("preallocate") => {
            refuse_others(pairs, "preallocate", &["prealloc-align", "prealloc-size", "filename"], &["file"])?;
            let mut config = PreallocateConfig::default();
            if let Some(value) = get(pairs, "prealloc-align") {
                config.align = parse_size_value("prealloc-align", value)?;
            }
            if let Some(value) = get(pairs, "prealloc-size") {
                config.size = parse_size_value("prealloc-size", value)?;
            }
            if config.align == 0 || !config.align.is_multiple_of(512) {
                return Err("prealloc-align parameter of preallocate filter is not aligned to 512".to_owned());
            }
            Ok(Node::Preallocate { config, file: child("file", filename)? })
        }
        Some("raw") => {
            refuse_others(pairs, "raw", &["offset", "size", "filename"], &["file"])?;
            let file = child("file", name)?;
            let bytes = |key| get(pairs, key).map(|value| parse_size_value(key, value)).transpose();
            match (bytes("offset")?, bytes("size")?) {
                (None, None) => Ok(*file),
                (offset, size) => Ok(Node::Part { offset: offset.unwrap_or(0), size, file }),
            }
        }
        Some("nbd") => nbd(context, pairs, name),
        Some("rbd") => rbd(context, pairs, name),
        Some("file" | "host_device") => {
            refuse_others(pairs, "file", &["filename"], &[])?;
            let name = name.ok_or("A file must be specified: add filename=NAME")?;
            let name = name.strip_prefix("file:").unwrap_or(name);
            Ok(Node::File(PathBuf::from(name)))
        }
        Some(name @ ("copy-on-read" | "compress")) => {
            Err(format!("Driver '{name}' can only lie above an image's format here"))
        }
        Some(format) => {
            let Some(known) = Format::from_name(format) else {
                return Err(format!("Unknown driver '{format}'"));
            };
            refuse_others(pairs, format, &["filename"], &["file"])?;
            Ok(Node::Image { format: Some(known), file: child("file", name)? })
        }
        None => match name {
            Some(name) if NbdAddress::is_name(name) => nbd(context, pairs, Some(name)),
            Some(name) if RbdName::is_name(name) => rbd(context, pairs, Some(name)),
            Some(name) => {
                refuse_others(pairs, "file", &["filename"], &[])?;
                Ok(Node::File(local_path(OsStr::new(name))?))
            }
            None => Err("A file must be specified: add filename=NAME".to_owned()),
        },
    }
}

/// The disk that is put to the test by `blkverify`: its format is found out; the other disk is raw.
fn probed(node: Node) -> Node {
    match node {
        file @ (Node::File(_) | Node::Remote(_)) => Node::Image { format: None, file: Box::new(file) },
        Node::ReadOnly(node) => Node::ReadOnly(Box::new(probed(*node))),
        other => other,
    }
}

fn null_disk(pairs: &[Pair]) -> Result<Node, String> {
    let size = match get(pairs, "size") {
        None => NullDisk::DEFAULT_SIZE,
        Some(value) => parse_size_value("size", value)?,
    };
    if i64::try_from(size).is_err() {
        return Err("size is too big".to_owned());
    }
    let latency = match get(pairs, "latency-ns") {
        None => 0,
        Some(value) => value
            .parse::<u64>()
            .ok()
            .filter(|latency| i64::try_from(*latency).is_ok())
            .ok_or("latency-ns is invalid")?,
    };
    let reads_zeroes =
        get(pairs, "read-zeroes").map_or(Ok(false), |value| parse_switch("read-zeroes", value))?;
    Ok(Node::Null { size, reads_zeroes, latency: Duration::from_nanos(latency) })
}

fn nbd(context: &Context, pairs: &[Pair], name: Option<&str>) -> Result<Node, String> {
    if let Some(name) = name.filter(|name| NbdAddress::is_name(name)) {
        refuse_others(pairs, "nbd", &["filename"], &[])?;
        return Ok(Node::Remote(RemoteName::parse(name, &context.disks.remote)?));
    }
    let mut nbd = NbdOpts::default();
    nbd.name();
    for (key, value) in pairs {
        if key != "driver" && !nbd.take(context.dialect, key, value)? {
            return Err(format!("Block protocol 'nbd' doesn't support the option '{key}'"));
        }
    }
    nbd.finish(context)?.map(Node::Remote).ok_or_else(|| "driver=nbd needs a server".to_owned())
}

fn rbd(context: &Context, pairs: &[Pair], name: Option<&str>) -> Result<Node, String> {
    if let Some(name) = name.filter(|name| RbdName::is_name(name)) {
        refuse_others(pairs, "rbd", &["filename"], &[])?;
        return Ok(Node::Remote(RemoteName::parse(name, &context.disks.remote)?));
    }
    let mut rbd = RbdOpts::default();
    rbd.name();
    for (key, value) in pairs {
        if key != "driver" && !rbd.take(context.dialect, key, value)? {
            return Err(format!("Block protocol 'rbd' doesn't support the option '{key}'"));
        }
    }
    rbd.finish()?.map(Node::Remote).ok_or_else(|| "driver=rbd needs a pool and an image".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keyval::parse_keyval;

    fn planned(text: &str, filename: Option<&str>) -> Plan {
        plan(&Context::default(), &parse_keyval(text).unwrap(), filename, TypedValues::default())
            .unwrap()
            .unwrap()
    }

    #[test]
    fn options_without_drivers_stay_alone() {
        for text in
            ["driver=qcow2,file.filename=a", "file.driver=nbd,file.host=h", "driver=raw,file.filename=a"]
        {
            assert!(
                plan(&Context::default(), &parse_keyval(text).unwrap(), None, TypedValues::default())
                    .unwrap()
                    .is_none(),
                "{text}"
            );
        }
        assert!(plan(&Context::default(), &[], Some("a.qcow2"), TypedValues::default()).unwrap().is_none());
    }

    #[test]
    fn drivers_below_a_format_become_a_name() {
        let plan =
            planned("driver=qcow2,file.driver=blkdebug,file.align=4k,file.image.filename=a.qcow2", None);
        assert!(plan.filters.is_empty() && plan.driver.is_none());
        let name = get(&plan.pairs, "file.filename").unwrap();
        assert!(name.starts_with("json:{") && name.contains(r#""align": "4k""#), "{name}");
        assert_eq!(plan.pairs.len(), 2);
        let plan = planned("driver=qcow2,file.align=4k", Some("blkdebug::b.qcow2"));
        assert_eq!(get(&plan.pairs, "file.filename"), Some("blkdebug::b.qcow2"));
    }

    #[test]
    fn drivers_above_a_format_become_filters() {
        let text = "driver=copy-on-read,file.driver=blkdebug,file.image.driver=qcow2,cache.direct=on";
        let plan = planned(text, Some("c.qcow2"));
        assert!(matches!(&plan.filters[..], [Filter::CopyOnRead, Filter::Blkdebug(_)]), "{:?}", plan.filters);
        assert_eq!(plan.driver.as_deref(), Some("copy-on-read"));
        assert_eq!(get(&plan.pairs, "file.filename"), Some("c.qcow2"));
        assert_eq!(get(&plan.pairs, "cache.direct"), Some("on"));
        assert_eq!(get(&plan.pairs, "driver"), Some("qcow2"));
    }

    #[test]
    fn a_protocol_on_top_is_raw() {
        let plan = planned("driver=null-co,size=64k", None);
        assert_eq!(get(&plan.pairs, "driver"), Some("raw"));
        assert_eq!(plan.driver.as_deref(), Some("null-co"));
        let plan = planned("driver=raw,offset=1k,size=2k,file.filename=d", None);
        assert!(get(&plan.pairs, "file.filename").unwrap().starts_with("json:"));
    }

    #[test]
    fn what_is_not_known_is_named() {
        for (text, word) in [
            ("driver=null-co,nothing=1", "nothing"),
            ("driver=blkdebug,image.filename=a,image.nothing=1", "nothing"),
            ("driver=blkdebug,image.filename=a,align=3", "align"),
            ("driver=blkdebug,inject-error.0.event=l3,image.filename=a", "l3"),
            ("driver=blkdebug,align=512", "filename"),
            ("driver=copy-on-read,bottom=x,file.driver=qcow2,file.file.filename=a", "bottom"),
            ("driver=qcow2,file.driver=blkdebug,file.image.driver=ssh", "ssh"),
        ] {
            let error = plan(&Context::default(), &parse_keyval(text).unwrap(), None, TypedValues::default())
                .unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
        assert!(name_node(&Context::default(), "blkdebug:a").unwrap_err().contains("CONFIG_FILE"));
    }
}
