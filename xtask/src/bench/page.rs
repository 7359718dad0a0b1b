//! The page of results: one self-contained HTML file with plots, written from what is saved and nothing else.

use super::bars::{Bar, drawn};
use super::published;
use super::record::{Advantage, Saved};
use crate::Outcome;
use crate::table::number;
use std::fmt::Write;
use std::path::Path;

/// What the tables are about, in the order of the page. What others published is in `published.rs`.
const TABLES: &[(&str, &str, &str)] = &[
    ("random", "Small requests", "4 KiB reads and writes of allocated clusters, O_DIRECT, depth 32."),
    ("sequential", "Large requests", "1 MiB reads and writes, one after the other, O_DIRECT."),
    ("convert", "Convert", "Raw to qcow2 and back with data that has no zeroes, O_DIRECT on both sides."),
    ("reflink", "Convert by reflink", "On XFS, beside a copy of the bytes."),
    (
        "open",
        "Opening 16 TiB",
        "A whole process: start, open, one read in the middle of the disk, close, exit.",
    ),
    (
        "alignment",
        "Alignment (May 2015)",
        "Requests that reach the disk while a 1 GiB image becomes raw. \u{201c}block: enforce minimal 4096 alignment\u{201d} \
         was about requests that the kernel had to split.",
    ),
    (
        "preallocation",
        "First writes, by preallocation (August 2020)",
        "4 KiB into each of many fresh clusters, depth 32. zebu needs no \
         zeroing of a fresh cluster, with or without zero-range; the table of recycled clusters compares the ways to zero.",
    ),
    (
        "large-clusters",
        "First writes into large clusters (2020)",
        "4 KiB into each of 100,000 fresh clusters of 1 and 2 MiB, depth 32, where QEMU zeroes the rest of each.",
    ),
    (
        "overlays",
        "First writes in overlays (October 2019)",
        "Copy-on-write of clusters, and of subclusters (extended L2).",
    ),
    (
        "clusters",
        "Cluster allocation (October 2019)",
        "15,360 writes of 4 KiB by step and cluster size on a disk of 15 GiB, with qemu-img bench's own options.",
    ),
    (
        "readback",
        "Reading back (2021)",
        "How fast, and in how many extents, an image reads that was written at random or by several streams. A loss of \
         32 % was reported for lazily allocated files.",
    ),
    ("growth", "Growth", "Overwriting in place on a small and on a large disk."),
    (
        "compress",
        "Compressed images (February 2021)",
        "convert -c beside QEMU's fastest setting (-m 16 -W), and small reads of the result.",
    ),
    ("recycled", "Recycled clusters", "How the rest of a cluster that held data before is zeroed."),
    (
        "mapping",
        "Mapping cache (September 2017)",
        "Random reads of a disk of 16 GiB whose mapping does not fit the cache.",
    ),
    ("mapping-large", "Mapping cache, large clusters", "The same on a disk of 2 TiB with clusters of 2 MiB."),
    ("caches", "Sizes of caches and slices", "What a miss costs, and what a hit."),
    (
        "backup",
        "Compressed backup (February 2021)",
        "Time, size, and what stays in the page cache. \u{201c}qcow2: compressed write cache\u{201d} was about a compressed \
         backup with O_DIRECT.",
    ),
    ("serve", "Service", "NBD beside QEMU's storage daemon and nbdkit."),
    ("serve-vhost-user", "vhost-user-blk", "Beside QEMU's storage daemon, with the same front end."),
    ("serve-fuse", "The disk as a file (FUSE)", "Beside QEMU's storage daemon, with fio on the file."),
    (
        "mapping-latency",
        "Mapping cache on a slow disk",
        "A file system that takes 2 ms for each read serves both sides.",
    ),
    ("lookups", "Size of slices", "Instructions of a read whose mapping is cached, counted by callgrind."),
    ("chains", "Long chains", "Random reads; each image holds a random part of the data."),
    ("queues", "Several queues", "One image in memory, so that the disk is not the limit."),
    ("memory", "Memory", "Of the process, by size of the disk."),
    ("check", "Check", "Disks that are wholly allocated; nothing of the image in the page cache."),
    ("snapshots", "Internal snapshots", "A whole process; nothing of the image in the page cache."),
    (
        "sizes",
        "Size of the disk",
        "Opening an empty image, and 4 KiB into each of 4096 clusters that are far apart.",
    ),
    ("fragmentation", "Fragmentation", "Shuffled: no two neighbouring clusters are neighbours in the file."),
];

const STYLE: &str = "
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:56rem;margin:0 auto;padding:1rem}
h1,h2{line-height:1.2}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.875rem;width:100%}
th,td{padding:.3rem .5rem;text-align:right;border-bottom:1px solid #8884;white-space:nowrap}
table.published{width:auto}
th:first-child,td:first-child{text-align:left;white-space:normal;min-width:12rem}
.behind{color:#c02020}
figure{margin:1rem 0;background:#fff;border-radius:.5rem;padding:.5rem}
svg{width:100%;max-width:36rem;height:auto;display:block}
small{opacity:.8}
@media(prefers-color-scheme:dark){.behind{color:#ff8080}}
";

/// Writes the page of the tables into `folder`.
pub(super) fn write(folder: &Path, tables: &[Saved]) -> Outcome<std::path::PathBuf> {
    let file = folder.join("index.html");
    std::fs::write(&file, page(tables)?).map_err(|e| format!("{}: {e}", file.display()))?;
    Ok(file)
}

fn page(tables: &[Saved]) -> Outcome<String> {
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>zebu: measured</title><style>{STYLE}</style>\n<h1>zebu: measured</h1>\n\
         <p>Two programs at a time, in turn, on one machine. A bar is the median of the rounds\u{2019} ratios, above 1 when zebu \
         is better; the line across it spans all rounds. Where the rounds scatter too much, there is no ratio.</p>\n\
         <p>ext4, XFS and btrfs of the tables are made anew, with the defaults of mkfs and mount, on loop devices with direct \
         I/O. imago and qcow2-rs are libraries: they take part where a small program of ours can make their requests (small \
         and large requests, first writes, compressed images, chains, fragmented images); they have no command that converts, \
         checks or backs up, and no server. nbdkit takes part in the service over NBD.</p>\n"
    );
    behind(&mut html, tables);
    let known = |name: &str| TABLES.iter().position(|(n, ..)| *n == name).unwrap_or(TABLES.len());
    let mut ordered: Vec<&Saved> = tables.iter().collect();
    ordered.sort_by_key(|table| known(&table.name));
    for table in ordered {
        section(&mut html, table)?;
    }
    html.push_str("</html>\n");
    Ok(html)
}

/// Work for the future, not to be hidden.
fn behind(html: &mut String, tables: &[Saved]) {
    html.push_str("<h2>Where zebu is behind</h2>\n");
    let mut rows = String::new();
    for table in tables {
        for cell in table.cells.iter().filter(|cell| cell.is_beside_a_peer() && cell.is_behind()) {
            let (name, metric, peer) = (text(&cell.benchmark), text(&cell.metric), text(&cell.b.label));
            let shown = cell.advantage_shown();
            let _ = writeln!(
                rows,
                "<tr><td>{name}<br><small>{metric}, beside {peer}</small><td class=behind>{shown}"
            );
        }
    }
    if rows.is_empty() {
        html.push_str("<p>Nowhere by more than the spread of the rounds.</p>\n");
    } else {
        let _ =
            writeln!(html, "<div class=scroll><table><tr><th>benchmark<th>better by\n{rows}</table></div>");
    }
}

fn section(html: &mut String, table: &Saved) -> Outcome {
    let (title, about) = TABLES
        .iter()
        .find(|(name, ..)| *name == table.name)
        .map_or((table.name.as_str(), ""), |(_, title, about)| (*title, *about));
    let _ = writeln!(
        html,
        "<h2 id=\"{}\">{}</h2>\n<p>{}</p>\n<p><small>{}, {} sizes, zebu {}, {}</small></p>",
        text(&table.name),
        text(title),
        text(about),
        text(&table.date),
        text(&table.extent),
        text(&table.commit),
        text(&table.machine)
    );
    if let Some(published) = published::about(&table.name) {
        html.push_str(&published.html());
    }
    if let Some(svg) = plot(table)? {
        let _ = writeln!(html, "<figure>{svg}</figure>");
    }
    html.push_str("<div class=scroll><table><tr><th>benchmark<th>A better by<th>metric<th>A<th>B\n");
    for cell in &table.cells {
        let side = |f: &super::record::Figures| {
            format!("{} {} \u{b1}{}", text(&f.label), number(f.median), number(f.mad))
        };
        let class = if cell.is_behind() { " class=behind" } else { "" };
        let _ = writeln!(
            html,
            "<tr><td>{}<td{class}>{}<td>{}<td>{}<td>{}",
            text(&cell.benchmark),
            cell.advantage_shown(),
            text(&cell.metric),
            side(&cell.a),
            side(&cell.b)
        );
    }
    html.push_str("</table></div>\n");
    for row in &table.not_measured {
        let _ = writeln!(html, "<p>Not measured: {}: {}</p>", text(&row.benchmark), text(&row.why));
    }
    Ok(())
}

fn text(raw: &str) -> String {
    raw.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

/// A bar for each benchmark whose first metric has a ratio.
fn plot(table: &Saved) -> Outcome<Option<String>> {
    let bars = table.first_cells().filter_map(|cell| {
        let Advantage { median, min, max, .. } = cell.advantage()?;
        let name = format!("{}, {}", cell.benchmark, cell.metric);
        Some(Bar { name, value: median, low: min, high: max })
    });
    let bars: Vec<Bar> = bars.collect();
    if bars.is_empty() {
        return Ok(None);
    }
    drawn(&bars).map(Some).map_err(|why| format!("plot of {}: {why}", table.name))
}
