//! `zebu map --picture`: samples of a disk's mapping. Their number does not depend on the disk's size.

use super::shown_name;
use crate::failure::Failure;
use crate::output::picture::{CellsAre, Content, Picture, by_disk, by_file};
use crate::output::stdout;
use crate::output::terminal::Terminal;
use crate::session::Session;
use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::path::PathBuf;
use zebu_disks::errno_text;
use zebu_engine::{Extent, ExtentKind, Image};

/// Rows of a picture.
const ROWS: usize = 16;
/// Columns, at most.
const COLUMNS: usize = 96;
/// Samples of a cell.
const SAMPLES: usize = 4;

/// Options of pictures.
#[derive(Debug, clap::Args)]
pub(crate) struct PictureArgs {
    /// Draw what the disk is made of, by samples: data of each image, compressed, zeroes, nothing
    #[arg(long, conflicts_with = "output")]
    picture: bool,

    /// With --picture: draw where the image's data lies in its file
    #[arg(long, requires = "picture")]
    host: bool,

    /// With --picture: write an SVG document into this new file instead (`-`: to standard output)
    #[arg(long, value_name = "FILE", requires = "picture")]
    svg: Option<PathBuf>,
}

/// The axes of a picture.
#[derive(Debug, Clone, Copy)]
enum Axes {
    /// Cells are parts of the disk.
    Disk,
    /// Columns are parts of the disk, rows parts of the file.
    File,
}

impl PictureArgs {
    pub(super) fn is_asked_for(&self) -> bool {
        self.picture
    }

    /// Draws a part of the disk, and puts it where it was asked for.
    pub(super) fn draw(&self, session: &Session, image: &Image, range: Range<u64>) -> Result<(), Failure> {
        let terminal = Terminal::of_standard_output();
        let axes = if self.host { Axes::File } else { Axes::Disk };
        let Some(file) = &self.svg else {
            let columns = terminal.columns.saturating_sub(2).clamp(8, COLUMNS);
            return stdout::print(&picture(session, image, range, axes, columns)?.text(terminal));
        };
        let drawn = picture(session, image, range, axes, COLUMNS)?.svg();
        if file.as_os_str() == "-" {
            return stdout::print(&drawn);
        }
        let written = File::create_new(file).and_then(|mut file| file.write_all(drawn.as_bytes()));
        let reason = |error: std::io::Error| errno_text(error.raw_os_error().unwrap_or(0));
        written.map_err(|error| Failure::creating_name(file.as_os_str(), &reason(error)))
    }
}

fn picture(
    session: &Session,
    image: &Image,
    range: Range<u64>,
    axes: Axes,
    columns: usize,
) -> Result<Picture, Failure> {
    let mut samples = Samples { session, image, end: range.end, known: None };
    let cells = columns * ROWS;
    let (cells, caption, cells_are) = match axes {
        Axes::Disk => {
            let cells = samples.of_cells(&range, cells)?;
            (cells, by_disk(range.end - range.start, columns * ROWS), CellsAre::PartsOfTheDisk)
        }
        Axes::File => {
            let file = image.info()?.file_length;
            let cells = samples.by_file(&range, columns, file)?;
            (cells, by_file(range.end - range.start, file), CellsAre::PlacesInTheFile)
        }
    };
    let layers = std::iter::successors(Some(image.clone()), Image::backing);
    let layers = layers.map(|image| Ok(shown_name(&image.info()?.filename)));
    Ok(Picture { columns, cells, layers: layers.collect::<Result<_, Failure>>()?, caption, cells_are })
}

/// Looks at the mapping.
struct Samples<'a> {
    session: &'a Session,
    image: &'a Image,
    end: u64,
    /// The run that was found last: samples within it ask nothing.
    known: Option<Extent>,
}

impl Samples<'_> {
    fn at(&mut self, offset: u64) -> Result<Extent, Failure> {
        if let Some(known) = self.known.filter(|known| (known.offset..known.end()).contains(&offset)) {
            return Ok(known);
        }
        let worker = self.session.worker();
        let found = worker.block_on(self.image.extent(worker, offset, self.end - offset))?;
        Ok(*self.known.insert(found))
    }

    /// The content that most samples of each cell have.
    fn of_cells(&mut self, range: &Range<u64>, cells: usize) -> Result<Vec<Content>, Failure> {
        let mut found = Vec::with_capacity(cells);
        for cell in 0..cells {
            let samples = (0..SAMPLES).map(|sample| part(range, cell * SAMPLES + sample, cells * SAMPLES));
            let mut contents = samples
                .filter(|at| *at < range.end)
                .map(|at| self.at(at).map(content))
                .collect::<Result<Vec<_>, _>>()?;
            contents.sort_unstable();
            let most = contents.chunk_by(|a, b| a == b).max_by_key(|run| run.len());
            found.push(most.map_or(Content::Nothing, |run| run[0]));
        }
        Ok(found)
    }

    /// Cells in which data of the image lies, by columns of the disk and rows of the file.
    fn by_file(&mut self, range: &Range<u64>, columns: usize, file: u64) -> Result<Vec<Content>, Failure> {
        let mut cells = vec![Content::Nothing; columns * ROWS];
        let samples = columns * ROWS * SAMPLES;
        for sample in 0..samples {
            let at = part(range, sample, samples);
            if at >= range.end {
                continue;
            }
            let extent = self.at(at)?;
            if let (ExtentKind::Data { host }, 0) = (extent.kind, extent.depth) {
                let host = host + (at - extent.offset);
                let row = (u128::from(host) * ROWS as u128 / u128::from(file.max(1))).min(ROWS as u128 - 1);
                cells[row as usize * columns + sample * columns / samples] = Content::Data(0);
            }
        }
        Ok(cells)
    }
}

/// The first byte of a part of so many.
fn part(range: &Range<u64>, number: usize, parts: usize) -> u64 {
    let len = u128::from(range.end - range.start);
    range.start + (len * number as u128 / parts.max(1) as u128) as u64
}

fn content(extent: Extent) -> Content {
    match extent.kind {
        ExtentKind::Unallocated => Content::Nothing,
        ExtentKind::Zero { .. } => Content::Zero,
        _ if extent.hole => Content::Zero,
        ExtentKind::Compressed => Content::Compressed(extent.depth),
        _ => Content::Data(extent.depth),
    }
}
