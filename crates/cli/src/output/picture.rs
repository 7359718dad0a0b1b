//! A picture of a disk: what its parts are made of, or where they lie in their file. For a terminal, or as SVG.

use super::terminal::{Charset, Colours, Terminal};
use super::units::size_short;
use std::fmt::Write as _;
use zebu_disks::printable;

/// The content of a part of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Content {
    /// Nothing in any image: reads as zero.
    Nothing,
    /// Zeroes.
    Zero,
    /// Compressed data in the image so far below the top.
    Compressed(u32),
    /// Data in the image so far below the top.
    Data(u32),
}

impl Content {
    /// The character for it in a terminal.
    fn glyph(self, charset: Charset) -> char {
        match (self, charset) {
            (Self::Nothing, _) => ' ',
            (Self::Zero, Charset::Unicode) => '·',
            (Self::Zero, Charset::Ascii) => '.',
            (Self::Compressed(_), Charset::Unicode) => '▞',
            (Self::Compressed(_), Charset::Ascii) => 'c',
            (Self::Data(depth), Charset::Unicode) => ['█', '▓', '▒', '░'][depth.min(3) as usize],
            (Self::Data(depth), Charset::Ascii) => ['#', '1', '2', '3'][depth.min(3) as usize],
        }
    }

    fn depth(self) -> Option<u32> {
        match self {
            Self::Compressed(depth) | Self::Data(depth) => Some(depth),
            Self::Nothing | Self::Zero => None,
        }
    }

    /// Number of the terminal's colour, and the same for SVG.
    fn colour(self) -> (u8, &'static str) {
        const LAYERS: [(u8, &str); 6] = [
            (34, "#2563eb"),
            (32, "#16a34a"),
            (33, "#d97706"),
            (35, "#9333ea"),
            (36, "#0891b2"),
            (31, "#dc2626"),
        ];
        match self.depth() {
            Some(depth) => LAYERS[depth as usize % LAYERS.len()],
            None if self == Self::Zero => (90, "#cbd5e1"),
            None => (39, "#f8fafc"),
        }
    }

    /// The same as an attribute of SVG.
    fn fill(self) -> String {
        let opacity = if matches!(self, Self::Compressed(_)) { " fill-opacity=\"0.55\"" } else { "" };
        format!("fill=\"{}\"{opacity}", self.colour().1)
    }

    fn name(self, layers: &[String]) -> String {
        let file = |depth: u32| {
            layers.get(depth as usize).map_or_else(String::new, |name| format!(" in {}", printable(name)))
        };
        match self {
            Self::Nothing => "nothing (reads as zero)".to_owned(),
            Self::Zero => "zeroes".to_owned(),
            Self::Compressed(depth) => format!("compressed{}", file(depth)),
            Self::Data(depth) => format!("data{}", file(depth)),
        }
    }
}

/// Cells in rows, from the beginning of the disk on.
#[derive(Debug)]
pub(crate) struct Picture {
    pub(crate) columns: usize,
    pub(crate) cells: Vec<Content>,
    /// Names of the images, top first.
    pub(crate) layers: Vec<String>,
    /// The meaning of rows and columns, in a line.
    pub(crate) caption: String,
    pub(crate) cells_are: CellsAre,
}

/// The meaning of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CellsAre {
    /// A part of the disk.
    PartsOfTheDisk,
    /// A part of the disk, if it lies in a part of the file.
    PlacesInTheFile,
}

impl Picture {
    /// Each content with its share of the cells, the largest first. Where cells are no parts of the disk, they have none, and
    /// those without data mean nothing.
    fn legend(&self) -> Vec<(Content, Option<f64>)> {
        let mut kinds = self.cells.clone();
        kinds.sort_unstable();
        kinds.dedup();
        let share = |kind: Content| {
            let count = self.cells.iter().filter(|cell| **cell == kind).count();
            count as f64 * 100.0 / self.cells.len().max(1) as f64
        };
        let mut legend: Vec<(Content, f64)> = kinds.into_iter().map(|kind| (kind, share(kind))).collect();
        legend.sort_by(|a, b| b.1.total_cmp(&a.1));
        match self.cells_are {
            CellsAre::PartsOfTheDisk => legend.into_iter().map(|(kind, share)| (kind, Some(share))).collect(),
            CellsAre::PlacesInTheFile => legend
                .into_iter()
                .filter(|(kind, _)| *kind != Content::Nothing)
                .map(|(kind, _)| (kind, None))
                .collect(),
        }
    }

    /// Lines for a terminal.
    pub(crate) fn text(&self, terminal: Terminal) -> String {
        let mut out = String::new();
        let (corner, dash, bar) = match terminal.charset {
            Charset::Unicode => (["┌", "┐", "└", "┘"], "─", "│"),
            Charset::Ascii => (["+", "+", "+", "+"], "-", "|"),
        };
        let [top_left, top_right, bottom_left, bottom_right] = corner;
        let edge = dash.repeat(self.columns);
        let _ = writeln!(out, "{top_left}{edge}{top_right}");
        for row in self.cells.chunks(self.columns.max(1)) {
            out.push_str(bar);
            for cell in row {
                paint(&mut out, *cell, terminal);
            }
            let _ = writeln!(out, "{}{bar}", " ".repeat(self.columns - row.len()));
        }
        let _ = writeln!(out, "{bottom_left}{edge}{bottom_right}");
        let _ = writeln!(out, "{}", self.caption);
        for (content, share) in self.legend() {
            out.push_str("  ");
            paint(&mut out, content, terminal);
            let share = share.map_or_else(String::new, |share| format!("{share:5.1} %  "));
            let _ = writeln!(out, "  {share}{}", content.name(&self.layers));
        }
        out
    }

    /// A document of its own.
    pub(crate) fn svg(&self) -> String {
        const CELL: usize = 10;
        let columns = self.columns.max(1);
        let (width, rows) = (columns * CELL, self.cells.len().div_ceil(columns));
        let legend = self.legend();
        let (frame, height) = (rows * CELL, rows * CELL + (legend.len() + 2) * 2 * CELL);
        // A margin of a cell on each side.
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"-{CELL} -{CELL} {} {}\" font-family=\"sans-serif\" \
             font-size=\"12\" shape-rendering=\"crispEdges\">\n\
             <path d=\"M-{CELL} -{CELL}h{}v{}H-{CELL}z\" fill=\"white\"/>\n",
            width + 2 * CELL,
            height + CELL,
            width + 2 * CELL,
            height + CELL
        );
        for (row, cells) in self.cells.chunks(columns).enumerate() {
            let mut x = 0;
            for run in cells.chunk_by(|a, b| a == b) {
                let len = run.len() * CELL;
                let _ = writeln!(
                    out,
                    "<rect x=\"{x}\" y=\"{}\" width=\"{len}\" height=\"{CELL}\" {}/>",
                    row * CELL,
                    run[0].fill()
                );
                x += len;
            }
        }
        let _ = writeln!(out, "<path d=\"M0 0h{width}v{frame}H0z\" fill=\"none\" stroke=\"#64748b\"/>");
        let mut y = frame + 2 * CELL;
        let _ = writeln!(out, "<text x=\"0\" y=\"{y}\">{}</text>", escaped(&self.caption));
        for (content, share) in legend {
            y += 2 * CELL;
            let _ = writeln!(
                out,
                "<rect x=\"0\" y=\"{}\" width=\"{CELL}\" height=\"{CELL}\" {} stroke=\"#64748b\"/>\
                 <text x=\"{}\" y=\"{y}\">{}{}</text>",
                y - CELL,
                content.fill(),
                2 * CELL,
                share.map_or_else(String::new, |share| format!("{share:.1} % ")),
                escaped(&content.name(&self.layers))
            );
        }
        out + "</svg>\n"
    }
}

fn paint(out: &mut String, content: Content, terminal: Terminal) {
    let glyph = content.glyph(terminal.charset);
    match terminal.colours {
        Colours::Shown if glyph != ' ' => {
            let _ = write!(out, "\u{1b}[{}m{glyph}\u{1b}[0m", content.colour().0);
        }
        _ => out.push(glyph),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The caption of a picture by the disk's offsets.
pub(crate) fn by_disk(bytes: u64, cells: usize) -> String {
    let each = bytes.div_ceil(cells.max(1) as u64);
    format!("{} of disk, row by row; a cell is {}", size_short(bytes), size_short(each))
}

/// The caption of a picture by offsets in the file.
pub(crate) fn by_file(bytes: u64, file: u64) -> String {
    format!(
        "left to right: {} of disk; top to bottom: {} of file. Data in the disk's order is one diagonal",
        size_short(bytes),
        size_short(file)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture() -> Picture {
        Picture {
            columns: 4,
            cells: vec![
                Content::Data(0),
                Content::Data(1),
                Content::Zero,
                Content::Nothing,
                Content::Data(0),
                Content::Compressed(1),
            ],
            layers: vec!["top.qcow2".into(), "<base>".into()],
            caption: by_disk(6 << 20, 6),
            cells_are: CellsAre::PartsOfTheDisk,
        }
    }

    #[test]
    fn places_without_data_are_no_part_of_a_disk() {
        let picture = Picture { cells_are: CellsAre::PlacesInTheFile, ..picture() };
        let terminal = Terminal { charset: Charset::Ascii, colours: Colours::None, columns: 40 };
        let text = picture.text(terminal);
        assert!(
            !text.contains("nothing") && !text.contains('%') && text.contains("  #  data in top.qcow2"),
            "{text}"
        );
        assert!(!picture.svg().contains("nothing"));
    }

    #[test]
    fn rows_are_framed_and_the_largest_share_comes_first() {
        let terminal = Terminal { charset: Charset::Ascii, colours: Colours::None, columns: 40 };
        let text = picture().text(terminal);
        let expected = "+----+\n|#1. |\n|#c  |\n+----+\n6 MiB of disk, row by row; a cell is 1 MiB\n  #   33.3 %  data in top.qcow2\n";
        assert!(text.starts_with(expected), "{text}");
        assert_eq!(text.lines().count(), 10);
    }

    #[test]
    fn colours_are_shown_only_where_they_are_wanted() {
        let terminal = Terminal { charset: Charset::Unicode, colours: Colours::Shown, columns: 40 };
        let text = picture().text(terminal);
        assert!(text.contains("\u{1b}[34m█\u{1b}[0m"), "{text}");
        assert!(!picture().text(Terminal { colours: Colours::None, ..terminal }).contains('\u{1b}'));
    }

    #[test]
    fn names_are_text_in_a_document() {
        let svg = picture().svg();
        assert!(svg.contains("&lt;base&gt;") && !svg.contains("<base>"), "{svg}");
        assert_eq!(svg.matches("<rect x=\"").count(), 6 + 5);
    }
}
