//! A chain of images as a tree, for people.

use super::terminal::Charset;
use super::units::size_short;
use std::fmt::Write as _;
use std::path::Path;
use zebu_disks::printable;
use zebu_engine::{ImageInfo, Qcow2Info};

/// The images of a chain, top first, each with what belongs to it. `end`: why the image below the last one can't be looked at.
pub(crate) fn tree_text(images: &[ImageInfo], end: Option<&str>, charset: Charset) -> String {
    let mut out = String::new();
    for (depth, image) in images.iter().enumerate() {
        let role = if depth == 0 { "" } else { "backing file: " };
        let indent = indent(depth, charset);
        let _ = writeln!(out, "{indent}{role}{}  {}", shown(&image.filename), facts(image));
        let is_last = depth + 1 == images.len() && end.is_none();
        let files = files_beside(image);
        for (index, file) in files.iter().enumerate() {
            let branch = branch(is_last && index + 1 == files.len(), charset);
            let _ = writeln!(out, "{}{branch}{file}", "   ".repeat(depth));
        }
    }
    if let Some(end) = end {
        let last = images.last().and_then(|image| image.backing_file.as_deref());
        let name = last.map_or_else(|| "a backing file".to_owned(), |name| printable(name).into_owned());
        let _ = writeln!(
            out,
            "{}backing file: {name}  not opened: {}",
            indent(images.len(), charset),
            printable(end)
        );
    }
    out
}

/// The beginning of the line of an image so far below the top.
fn indent(depth: usize, charset: Charset) -> String {
    match depth {
        0 => String::new(),
        _ => "   ".repeat(depth - 1) + branch(true, charset),
    }
}

fn branch(is_last: bool, charset: Charset) -> &'static str {
    match (charset, is_last) {
        (Charset::Unicode, true) => "└─ ",
        (Charset::Unicode, false) => "├─ ",
        (Charset::Ascii, true) => "`- ",
        (Charset::Ascii, false) => "|- ",
    }
}

fn shown(path: &Path) -> String {
    printable(&path.strip_prefix(".").unwrap_or(path).to_string_lossy()).into_owned()
}

/// Facts of an image in a line.
fn facts(image: &ImageInfo) -> String {
    let mut facts = vec![
        image.format.name().to_owned(),
        size_short(image.virtual_size),
        format!("{} on disk", size_short(image.actual_size)),
    ];
    if image.encryption.is_some() || image.qcow2.as_ref().is_some_and(|qcow2| qcow2.encryption.is_some()) {
        facts.push("encrypted".to_owned());
    }
    let mut text = facts.join(", ");
    if let Some(qcow2) = &image.qcow2 {
        text += &lists(qcow2);
    }
    text
}

/// Snapshots, bitmaps and marks of a qcow2 image.
fn lists(qcow2: &Qcow2Info) -> String {
    let mut text = String::new();
    let snapshots = qcow2.snapshots.iter().map(|snapshot| printable(&snapshot.name).into_owned());
    let bitmaps = qcow2.bitmaps.iter().map(|bitmap| {
        let state = match (bitmap.in_use, bitmap.recovered) {
            (true, _) => " (inconsistent)",
            (false, Some(_)) => " (recovered)",
            (false, None) => "",
        };
        format!("{}{state}", printable(&bitmap.name))
    });
    for (what, names) in [("snapshots", snapshots.collect::<Vec<_>>()), ("bitmaps", bitmaps.collect())] {
        if !names.is_empty() {
            let _ = write!(text, "; {what}: {}", names.join(", "));
        }
    }
    for (is_so, mark) in [(qcow2.dirty, "dirty"), (qcow2.corrupt, "corrupt")] {
        if is_so {
            let _ = write!(text, "; {mark}");
        }
    }
    text
}

/// Files that belong to an image, beside its own: none of them is opened.
fn files_beside(image: &ImageInfo) -> Vec<String> {
    let directory = image.filename.parent().unwrap_or(Path::new(""));
    let told = |role: &str, name: &Path| {
        let missing = if directory.join(name).exists() { "" } else { "  missing" };
        format!("{role}: {}{missing}", shown(name))
    };
    let data_file = image.qcow2.as_ref().and_then(|qcow2| qcow2.data_file.as_deref());
    let extents = image.foreign.iter().flat_map(|foreign| &foreign.vmdk).flat_map(|vmdk| &vmdk.extents);
    let extents = extents.filter_map(|extent| extent.path.as_deref()).filter(|path| *path != image.filename);
    data_file
        .map(|name| told("data file", Path::new(name)))
        .into_iter()
        .chain(extents.map(|path| told("extent", path)))
        .collect()
}
