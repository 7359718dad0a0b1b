//! VMDK, the format of VMware: a text that describes the disk, and extents that hold it.
//!
//! The text lies in the one file of the disk, or beside its extents. Integers are little endian. Rules: VMware's "Virtual
//! Disk Format 5.0" where it says something, and QEMU's `block/vmdk.c` (COWD, seSparse, limits) where it doesn't.

mod descriptor;
pub mod facts;
mod sesparse;
pub(crate) mod sparse;

use crate::error::{Error, Result, ensure};
use crate::files::{FileIndex, Files, Source};
use crate::limits::{MAX_DESCRIPTOR, MAX_NAME};
use crate::opened::Opened;
use crate::parent::{Identity, Parent, ParentFormat, with_slashes};
use crate::run::{Kind, Run};
use descriptor::{Descriptor, ExtentKind};
use facts::Facts;
use sparse::Header;
pub use sparse::{COWD_MAGIC, SPARSE_MAGIC};

/// A part of the disk.
#[derive(Debug, Clone)]
struct Extent {
    start: u64,
    len: u64,
    content: Content,
}

#[derive(Debug, Clone)]
enum Content {
    Zero,
    Flat { file: FileIndex, offset: u64 },
    Sparse(sparse::Tables),
    SeSparse(sesparse::Tables),
}

/// The extents of a disk, in order, without gaps.
#[derive(Debug, Clone)]
pub(crate) struct Map {
    extents: Vec<Extent>,
    /// For those who inspect the image.
    facts: Option<Box<Facts>>,
}

/// The kinds of image file.
#[derive(Debug)]
enum Layout {
    /// One sparse extent with a descriptor in it.
    Sparse(Header),
    /// Text that names extents; it may lie in an otherwise empty sparse extent.
    Described(Descriptor),
}

/// The descriptor in a range of the image file.
fn descriptor_at(source: Source<'_>, offset: u64, len: u64) -> Result<Descriptor> {
    ensure!(len <= MAX_DESCRIPTOR, "the VMDK descriptor has {len} bytes");
    let text = source.vec(offset, len, "the VMDK descriptor")?;
    Descriptor::parse(text.split(|byte| *byte == 0).next().unwrap_or_default())
}

/// The refusal of an extent by itself: only the descriptor tells which part of which disk it is.
fn part(what: &str) -> Error {
    Error::unsupported(format!(
        "it is {what} alone, a part of a VMDK and no disk: open the descriptor, the VMDK that names this file"
    ))
}

fn layout(files: &dyn Files) -> Result<Layout> {
    let source = Source::image(files);
    let magic: [u8; 4] = source.array(0, "the VMDK header")?;
    if magic == *COWD_MAGIC {
        return Err(part("an extent of ESX (COWD)"));
    }
    if magic == *SPARSE_MAGIC {
        let header = Header::read(source)?;
        if header.capacity > 0 && header.descriptor.is_none() {
            return Err(part("a sparse extent"));
        }
        if header.capacity > 0 {
            return Ok(Layout::Sparse(header));
        }
        let (at, len) =
            header.descriptor.ok_or_else(|| Error::damaged("the VMDK has neither disk nor descriptor"))?;
        return descriptor_at(source, at, len).map(Layout::Described);
    }
    if magic == *sesparse::FIRST_BYTES {
        return Err(part("a seSparse extent"));
    }
    ensure!(source.len() <= MAX_DESCRIPTOR, "Image not in VMDK format");
    descriptor_at(source, 0, source.len()).map(Layout::Described)
}

pub(crate) fn extent_files(files: &dyn Files) -> Result<Vec<String>> {
    match layout(files)? {
        Layout::Described(descriptor) => {
            descriptor.names.iter().try_for_each(|name| descriptor.check_name(name))?;
            Ok(descriptor.names)
        }
        Layout::Sparse(_) => Ok(Vec::new()),
    }
}

/// An image that is being read: what the image file says, and the extents that were looked at.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    layout: Option<Layout>,
    extents: Vec<Extent>,
}

pub(crate) fn open(files: &dyn Files, reading: &mut Reading) -> Result<Opened<Map>> {
    read(files, reading, add_extent)
}

/// Reads the image file alone: extents that it names are as long as it says.
pub(crate) fn inspect(files: &dyn Files) -> Result<Opened<Map>> {
    let mut reading = Reading::default();
    let add = |_: &dyn Files, _, extent: &descriptor::Extent, extents: &mut Vec<Extent>| {
        push(extents, extent.len, Content::Zero)
    };
    let mut opened = read(files, &mut reading, add)?;
    let facts = match &reading.layout {
        Some(Layout::Described(descriptor)) => Facts::described(descriptor),
        Some(Layout::Sparse(header)) => {
            let described = header.descriptor.map(|(at, len)| descriptor_at(Source::image(files), at, len));
            let described = described.transpose()?;
            Facts::of_file(described.as_ref(), opened.size, opened.unit, header.is_compressed())
        }
        None => Facts::of_file(None, opened.size, opened.unit, false),
    };
    opened.map.facts = Some(Box::new(facts));
    Ok(opened)
}

/// Adds a described extent to those before it.
type Add = fn(&dyn Files, FileIndex, &descriptor::Extent, &mut Vec<Extent>) -> Result<()>;

fn read(files: &dyn Files, reading: &mut Reading, add_extent: Add) -> Result<Opened<Map>> {
    let image = Source::image(files);
    let Reading { layout: found, extents } = reading;
    let found = match found {
        Some(found) => found,
        None => found.insert(layout(files)?),
    };
    let inner;
    let (descriptor, variant) = match found {
        Layout::Sparse(header) => {
            let described = header.descriptor.map(|(at, len)| descriptor_at(image, at, len)).transpose()?;
            if described.as_ref().is_some_and(|described| described.extents.len() > 1) {
                return Err(part("one of several extents"));
            }
            let variant = if header.is_compressed() { "streamOptimized" } else { "monolithicSparse" };
            let tables = sparse::Tables::open(files, FileIndex::IMAGE, header)?;
            push(extents, tables.size(), Content::Sparse(tables))?;
            inner = described;
            (inner.as_ref(), variant)
        }
        Layout::Described(descriptor) => {
            let variant = descriptor.variant()?;
            ensure!(!descriptor.extents.is_empty(), "the VMDK descriptor names no extents");
            while let Some(extent) = descriptor.extents.get(extents.len()) {
                // The image file is 0.
                let file = FileIndex(extent.name.map_or(0, |name| name.saturating_add(1)));
                add_extent(files, file, extent, extents)?;
            }
            (Some(&*descriptor), variant)
        }
    };
    let size = extents.last().map_or(0, |extent: &Extent| extent.start.saturating_add(extent.len));
    let unit = extents.iter().find_map(|extent| match &extent.content {
        Content::Sparse(tables) => Some(tables.grain()),
        Content::SeSparse(_) => Some(sesparse::GRAIN),
        Content::Zero | Content::Flat { .. } => None,
    });
    let parent = descriptor.map(parent).transpose()?.flatten();
    let identity = descriptor.and_then(|descriptor| descriptor.cid).map(Identity::Cid);
    let map = Map { extents: std::mem::take(extents), facts: None };
    Ok(Opened { size, unit: unit.unwrap_or_default(), variant, parent, identity, map })
}

fn push(extents: &mut Vec<Extent>, len: u64, content: Content) -> Result<()> {
    let start = extents.last().map_or(0, |extent| extent.start.saturating_add(extent.len));
    ensure!(start.checked_add(len).is_some(), "the extents of the VMDK reach past 2^64");
    extents.push(Extent { start, len, content });
    Ok(())
}

fn add_extent(
    files: &dyn Files,
    file: FileIndex,
    extent: &descriptor::Extent,
    extents: &mut Vec<Extent>,
) -> Result<()> {
    let (len, content) = match extent.kind {
        ExtentKind::Zero => (extent.len, Content::Zero),
        ExtentKind::Flat { offset } => (extent.len, Content::Flat { file, offset }),
        ExtentKind::Sparse => {
            let source = Source::new(files, file);
            let magic: [u8; 4] = source.array(0, "the header of a VMDK extent")?;
            let tables = if magic == *COWD_MAGIC {
                sparse::Tables::cowd(files, file)?
            } else {
                sparse::Tables::open(files, file, &Header::read(source)?)?
            };
            (tables.size(), Content::Sparse(tables))
        }
        ExtentKind::SeSparse => {
            let tables = sesparse::Tables::open(files, file)?;
            (tables.size(), Content::SeSparse(tables))
        }
    };
    // VirtualBox rounds the length in the header up to whole grains; the disk goes on where the descriptor says.
    let grain = match &content {
        Content::Sparse(tables) => tables.grain(),
        _ => 1,
    };
    if len != extent.len && Some(len) != extent.len.checked_next_multiple_of(grain) {
        let message =
            format!("a VMDK extent has {len} bytes by its own header, {} by the descriptor", extent.len);
        return Err(Error::damaged(message).at(file, 0));
    }
    push(extents, extent.len, content)
}

fn parent(descriptor: &Descriptor) -> Result<Option<Parent>> {
    let Some(cid) = descriptor.parent_cid else { return Ok(None) };
    let name = descriptor.parent_name.as_deref().map(with_slashes);
    let name =
        name.ok_or_else(|| Error::damaged("the VMDK has a parent (parentCID) and does not name it"))?;
    descriptor.check_name(&name)?;
    ensure!(name.len() as u64 <= MAX_NAME, "the name of the VMDK's parent has {} bytes", name.len());
    Ok(Some(Parent { name, format: ParentFormat::Same, identities: vec![Identity::Cid(cid)] }))
}

impl Map {
    pub(crate) fn facts(&self) -> Option<&Facts> {
        self.facts.as_deref()
    }

    pub(crate) fn run(&self, files: &dyn Files, guest: u64, max_len: u64) -> Result<Run> {
        let after = self.extents.partition_point(|extent| extent.start <= guest);
        let Some(extent) = after.checked_sub(1).and_then(|at| self.extents.get(at)) else {
            return Ok(Run { kind: Kind::Hole, len: max_len });
        };
        let within = guest.saturating_sub(extent.start);
        let rest = extent.len.saturating_sub(within).min(max_len);
        match &extent.content {
            Content::Zero => Ok(Run { kind: Kind::Zero, len: rest }),
            Content::Flat { file, offset } => {
                let kind = Kind::Data { file: *file, offset: offset.saturating_add(within) };
                Ok(Run { kind, len: rest })
            }
            Content::Sparse(tables) => {
                let run = tables.run(files, within, rest)?;
                Ok(match run.kind {
                    // Units are counted from the start of the extent.
                    Kind::Packed(mut packed) => {
                        packed.start = packed.start.saturating_add(extent.start);
                        Run { kind: Kind::Packed(packed), len: run.len }
                    }
                    _ => run,
                })
            }
            Content::SeSparse(tables) => tables.run(files, within, rest),
        }
    }
}
