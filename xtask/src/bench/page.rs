//! The page of results: one self-contained HTML file with plots, written from what is saved and nothing else.

use super::record::{Advantage, Cell, Saved};
use crate::Outcome;
use crate::table::number;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::fmt::Write;
use std::path::Path;

/// What the tables are about, and the figures that were published before, for comparison.
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
         was about requests that the kernel had to split. Published then: writes of 4 KiB 5 % slower with unaligned buffers, \
         and twice the requests.",
    ),
    (
        "preallocation",
        "First writes, by preallocation (August 2020)",
        "4 KiB into each of many fresh clusters, depth 32. Published then for QEMU (25 GB, XFS and ext4, IOPS): off 8,139 and \
         11,688; off without zero-range 2,965 and 2,780; metadata 7,768 and 9,132; falloc 7,742 and 13,108; full 41,389 and \
         16,351; a raw file 7,277 and 43,260, fallocated 7,299 and 42,810, full 88,404 and 83,197. zebu has no off without \
         zero-range: a fresh cluster needs no zeroing at all; the table of recycled clusters compares the ways to zero.",
    ),
    (
        "overlays",
        "First writes in overlays (October 2019)",
        "Copy-on-write of clusters, and of subclusters (extended L2). Published for QEMU (IOPS with and without subclusters): \
         64K clusters 13,341 and 1,671; 128K 12,391 and 870; 1M 2,732 and 215; 2M 1,630 and 214.",
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
        "convert -c beside QEMU's fastest setting (-m 16 -W), and small reads of the result. \u{201c}qcow2: compressed \
         write cache\u{201d} was about a compressed backup with O_DIRECT. Published then for 1000 MiB of ones: 300 s with \
         O_DIRECT, 5.7 s through the page cache; with the patch 4.4 s and 5.4 s.",
    ),
    ("recycled", "Recycled clusters", "How the rest of a cluster that held data before is zeroed."),
    (
        "mapping",
        "Mapping cache (September 2017)",
        "Random reads of disks whose mapping does not fit the cache. Published for QEMU (40 GB, 64 KiB clusters, IOPS): with \
         1 MiB of cache 2,718 with whole tables and 6,545 with slices of 4 KiB; with 3 MiB 5,326 and 12,045; where everything \
         fits 57,355 and 55,680.",
    ),
    ("backup", "Compressed backup (February 2021)", "Time, size, and what stays in the page cache."),
    ("serve", "Service", "NBD beside QEMU's storage daemon and nbdkit."),
    ("serve-vhost-user", "vhost-user-blk", "Beside QEMU's storage daemon, with the same front end."),
    ("serve-fuse", "The disk as a file (FUSE)", "Beside QEMU's storage daemon, with fio on the file."),
    (
        "mapping-latency",
        "Mapping cache on a slow disk",
        "A file system that takes 2 ms for each read serves both sides.",
    ),
    (
        "chains",
        "Long chains",
        "Random reads; each image holds a random part of the data. Published (SVD/sQEMU, 2022): RocksDB 48 % faster at a chain \
         of 500.",
    ),
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
         is better; the line across it spans all rounds. Where the rounds scatter too much, there is no ratio.</p>\n"
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
        for cell in table.cells.iter().filter(|cell| cell.is_beside_a_peer()) {
            if let Some(advantage) = cell.advantage().filter(Advantage::is_behind) {
                let (name, metric, peer) = (text(&cell.benchmark), text(&cell.metric), text(&cell.b.label));
                let _ = writeln!(
                    rows,
                    "<tr><td>{name}<td class=behind>{}<td>{metric}<td>{peer}",
                    shown(&advantage)
                );
            }
        }
    }
    if rows.is_empty() {
        html.push_str("<p>Nowhere by more than the spread of the rounds.</p>\n");
    } else {
        let _ = writeln!(
            html,
            "<div class=scroll><table><tr><th>benchmark<th>better by<th>metric<th>beside\n{rows}</table></div>"
        );
    }
}

fn section(html: &mut String, table: &Saved) -> Outcome {
    let (title, about) = TABLES
        .iter()
        .find(|(name, ..)| *name == table.name)
        .map_or((table.name.as_str(), ""), |(_, title, about)| (*title, *about));
    let _ = writeln!(
        html,
        "<h2 id=\"{}\">{}</h2>\n<p>{}</p>\n<p><small>{}, {} sizes, {}</small></p>",
        text(&table.name),
        text(title),
        text(about),
        text(&table.date),
        text(&table.extent),
        text(&table.machine)
    );
    if let Some(svg) = plot(table)? {
        let _ = writeln!(html, "<figure>{svg}</figure>");
    }
    html.push_str("<div class=scroll><table><tr><th>benchmark<th>A better by<th>metric<th>A<th>B\n");
    for cell in &table.cells {
        let side = |f: &super::record::Figures| {
            format!("{} {} \u{b1}{}", text(&f.label), number(f.median), number(f.mad))
        };
        let advantage = cell.advantage();
        let class = if advantage.is_some_and(|a| a.is_behind()) { " class=behind" } else { "" };
        let _ = writeln!(
            html,
            "<tr><td>{}<td{class}>{}<td>{}<td>{}<td>{}",
            text(&cell.benchmark),
            advantage.as_ref().map_or("scatters".into(), shown),
            text(&cell.metric),
            side(&cell.a),
            side(&cell.b)
        );
    }
    html.push_str("</table></div>\n");
    Ok(())
}

fn shown(advantage: &Advantage) -> String {
    format!("{:.2}x \u{b1}{:.2}", advantage.median, advantage.mad)
}

fn text(raw: &str) -> String {
    raw.replace('&', "&amp;").replace('<', "&lt;").replace('"', "&quot;")
}

/// A bar for each benchmark, of the first of its metrics that has a ratio. Names stand above their bars, so that the plot is
/// narrow enough for a telephone.
fn plot(table: &Saved) -> Outcome<Option<String>> {
    let mut seen = std::collections::HashSet::new();
    let bars: Vec<(&Cell, Advantage)> = table
        .cells
        .iter()
        .filter_map(|cell| cell.advantage().map(|advantage| (cell, advantage)))
        .filter(|(cell, _)| seen.insert(&cell.benchmark))
        .collect();
    if bars.is_empty() {
        return Ok(None);
    }
    let height = bars.len() as u32 * 44 + 40;
    let right = bars.iter().map(|(_, a)| a.max).fold(2.0, f64::max) * 1.05;
    let mut svg = String::new();
    draw(&mut svg, &bars, height, right).map_err(|e| format!("plot of {}: {e}", table.name))?;
    Ok(Some(svg))
}

fn draw(
    svg: &mut String,
    bars: &[(&Cell, Advantage)],
    height: u32,
    right: f64,
) -> Result<(), Box<dyn std::error::Error>> {
    const WIDTH: u32 = 460;
    const LEFT: i32 = 8;
    let (good, bad) = (RGBColor(46, 125, 80), RGBColor(192, 57, 43));
    let area = SVGBackend::with_string(svg, (WIDTH, height)).into_drawing_area();
    let scale = |x: f64| LEFT + (x / right * f64::from(WIDTH as i32 - 2 * LEFT)) as i32;
    let words = ("sans-serif", 16).into_font();
    for (i, (cell, advantage)) in bars.iter().enumerate() {
        let top = i as i32 * 44 + 20;
        let style = TextStyle::from(words.clone()).pos(Pos::new(HPos::Left, VPos::Bottom));
        area.draw_text(&cell.benchmark, &style, (LEFT, top))?;
        let color = if advantage.median >= 1.0 { good } else { bad };
        area.draw(&Rectangle::new([(LEFT, top + 2), (scale(advantage.median), top + 18)], color.filled()))?;
        let middle = top + 10;
        area.draw(&PathElement::new(
            [(scale(advantage.min), middle), (scale(advantage.max), middle)],
            BLACK,
        ))?;
        let style = TextStyle::from(words.clone()).pos(Pos::new(HPos::Left, VPos::Center));
        let label = format!("{:.2}x", advantage.median);
        let after = scale(advantage.max) + 6;
        let (at, style) =
            if after > WIDTH as i32 - 50 { (LEFT + 4, style.color(&WHITE)) } else { (after, style) };
        area.draw_text(&label, &style, (at, middle))?;
    }
    let bottom = height as i32 - 18;
    area.draw(&PathElement::new([(scale(1.0), 0), (scale(1.0), bottom)], BLACK.mix(0.5)))?;
    let style = TextStyle::from(words).pos(Pos::new(HPos::Center, VPos::Top));
    area.draw_text("1x", &style, (scale(1.0), bottom))?;
    area.present()?;
    Ok(())
}
