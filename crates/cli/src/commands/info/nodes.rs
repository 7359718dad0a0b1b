//! The nodes that an image consists of, from what was opened and what the command line describes.

use crate::backing::{is_described, resolve};
use crate::failure::Failure;
use crate::output::info_json::parent_elsewhere;
use crate::output::info_node::{InfoNode, Kind, whole_sectors};
use crate::output::json::path_text;
use crate::session::Session;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use zebu_disks::graph::{Description, Filter, Node, open_node, reference_node};
use zebu_disks::{Context, Disks, ImageSpec, Reference};
use zebu_engine::storage::{File, LockMode, OpenFlags};
use zebu_engine::{Access, Chain, Format, Image, ImageInfo, OpenOptions, Purpose};

/// Tells of the nodes of one command line.
pub(super) struct Nodes<'a> {
    pub(super) session: &'a Session,
    pub(super) spec: &'a ImageSpec,
}

impl Nodes<'_> {
    fn disks(&self) -> &Disks {
        &self.session.context().disks
    }

    /// Node that the command line named, of whose image `info` is known. `name` says how it was opened, where its path alone does not.
    pub(super) fn top(&self, info: &ImageInfo, name: Option<String>) -> Result<InfoNode, Failure> {
        let described = self.spec.described.as_ref();
        if let Some(described) = described {
            if !self.spec.filters.is_empty() {
                return self.filtered(described);
            }
            if described.is_part() {
                return self.file_of(info);
            }
        }
        if self.spec.driver.is_some() {
            return self.file_of(info);
        }
        let mut node = self.image(info)?;
        if let Some(name) = name {
            node.filename = name;
        }
        Ok(node)
    }

    /// An image without its backing files.
    pub(super) fn image(&self, info: &ImageInfo) -> Result<InfoNode, Failure> {
        let path = path_text(&info.filename);
        let filename = match self.disks().names.named(&info.filename) {
            Some(Reference::Graph(_)) => Description::of_name(&path).name_of_image(info.format.name()),
            Some(Reference::Remote(remote)) => remote.reported(),
            _ => path,
        };
        let file = self.file_of(info)?;
        let qcow2 = info.qcow2.as_ref();
        let unit = info.foreign.as_ref().and_then(|foreign| foreign.unit);
        let (cluster_size, dirty) = match info.format {
            Format::Raw => (file.cluster_size, file.dirty),
            _ => (qcow2.map(|q| q.cluster_size).or(unit), Some(qcow2.is_some_and(|q| q.dirty))),
        };
        let mut children = extents(self.session.context(), info)?;
        children.push(("file".to_owned(), file));
        let sizes = children.iter().map(|(_, below)| below.actual_size);
        Ok(InfoNode {
            filename,
            format: info.format.name(),
            virtual_size: info.virtual_size,
            actual_size: sizes.sum(),
            cluster_size,
            dirty,
            kind: Kind::Image(Box::new(info.clone())),
            children,
        })
    }

    /// An image with its backing files below it.
    fn chain(&self, image: &Image) -> Result<InfoNode, Failure> {
        let mut nodes = Vec::new();
        for info in chain_of(self.session.context(), image)? {
            nodes.push(self.image(&info)?);
        }
        let add = |below: InfoNode, mut node: InfoNode| {
            node.children.insert(0, ("backing".to_owned(), below));
            node
        };
        nodes.into_iter().rev().reduce(add).ok_or_else(|| Failure::new("no image"))
    }

    /// The image below filters, and these.
    fn filtered(&self, described: &Description) -> Result<InfoNode, Failure> {
        let filters = &self.spec.filters;
        if filters.contains(&Filter::CopyOnRead) && self.spec.options.access == Access::ReadOnly {
            return Err(Failure::opening_name(self.spec.path.as_os_str(), "Block node is read-only"));
        }
        let mut names = vec![described.clone()];
        for filter in filters {
            names.extend(names.last().map(|above| above.child(filter.child())));
        }
        let mut node = self.session.with_unfiltered(self.spec, |image| self.chain(image))?;
        for (filter, name) in filters.iter().zip(&names).rev() {
            let is_transparent = !matches!(filter, Filter::Blkdebug(_));
            node = InfoNode {
                filename: name.name(),
                format: filter.driver(),
                virtual_size: node.virtual_size,
                actual_size: node.actual_size.filter(|_| is_transparent),
                cluster_size: node.cluster_size,
                dirty: node.dirty,
                kind: Kind::Driver,
                children: vec![(filter.child().to_owned(), node)],
            };
        }
        Ok(node)
    }

    /// The file that an image lies in.
    fn file_of(&self, info: &ImageInfo) -> Result<InfoNode, Failure> {
        let filename = path_text(&info.filename);
        match self.disks().names.named(&info.filename) {
            Some(Reference::Graph(node)) => self.node(&node, &Description::of_name(&filename)),
            Some(Reference::Remote(remote)) => {
                Ok(driver(remote.reported(), remote.driver(), info.file_length, None))
            }
            _ => Ok(InfoNode {
                actual_size: Some(info.actual_size),
                kind: Kind::File { extent_size_hint: info.extent_size_hint },
                dirty: Some(false),
                ..driver(filename, protocol(self.disks(), &info.filename), info.file_length, None)
            }),
        }
    }

    /// A node that the command line describes.
    fn node(&self, node: &Node, described: &Description) -> Result<InfoNode, Failure> {
        let below = |child: &str, node: &Node| -> Result<(String, InfoNode), Failure> {
            Ok((child.to_owned(), self.node(node, &described.child(child))?))
        };
        let name = described.name();
        let length = || -> Result<u64, Failure> {
            let opened =
                open_node(self.session.context(), node, &name, &OpenFlags::default().lock(LockMode::None));
            Ok(opened
                .map_err(|error| Failure::opening(self.session.context(), Path::new(&name), &error.into()))?
                .len())
        };
        Ok(match node {
            Node::File(path) => file(self.session.context(), path)?,
            Node::Remote(remote) => driver(remote.reported(), remote.driver(), length()?, None),
            Node::ReadOnly(node) => self.node(node, described)?,
            Node::Null { size, .. } => {
                // It has the two names of its driver.
                let format = if described.driver() == "null-aio" { "null-aio" } else { "null-co" };
                InfoNode { actual_size: Some(0), ..driver(name, format, *size, None) }
            }
            Node::Blkdebug { image, .. } => {
                driver(name.clone(), "blkdebug", length()?, Some(vec![below("image", image)?]))
            }
            Node::Blkverify { raw, test } => {
                let children = vec![below("test", test)?, below("raw", raw)?];
                driver(name.clone(), "blkverify", length()?, Some(children))
            }
            Node::Preallocate { file, .. } => {
                through(driver(name.clone(), "preallocate", length()?, Some(vec![below("file", file)?])))
            }
            Node::Part { file, .. } => {
                through(driver(name.clone(), "raw", length()?, Some(vec![below("file", file)?])))
            }
            Node::Image { format, file } => self.opened(*format, file, described)?,
        })
    }

    /// An image that lies below a driver, with its backing files.
    fn opened(
        &self,
        format: Option<Format>,
        file: &Node,
        described: &Description,
    ) -> Result<InfoNode, Failure> {
        let path = if let Node::File(path) = file {
            path.clone()
        } else {
            let name = described.child("file").name();
            self.disks().names.note_node(PathBuf::from(name), file.clone()).map_err(Failure::new)?
        };
        let options = OpenOptions::default()
            .format(format)
            .probe(self.spec.options.probe)
            .sharing(self.spec.options.sharing)
            .lock_wait(self.spec.options.lock_wait.clone())
            .refs(self.spec.options.refs.clone())
            .remote(self.spec.options.remote.clone());
        let spec = ImageSpec { path, options, filters: Vec::new(), ..self.spec.clone() };
        self.session.with_unfiltered(&spec, |image| self.chain(image))
    }
}

/// The files that a VMDK names, the last first, as far as they are open.
fn extents(context: &Context, info: &ImageInfo) -> Result<Vec<(String, InfoNode)>, Failure> {
    let vmdk = info.foreign.as_ref().and_then(|foreign| foreign.vmdk.as_ref());
    let extents = vmdk.map(|vmdk| vmdk.extents.as_slice()).unwrap_or_default();
    let paths = extents.iter().filter_map(|extent| extent.path.as_deref());
    let mut nodes = Vec::new();
    if context.dialect.is_qemu() {
        for (number, path) in paths.enumerate() {
            if path != info.filename {
                nodes.push((format!("extents.{number}"), file(context, path)?));
            }
        }
    }
    nodes.reverse();
    Ok(nodes)
}

/// Opens the files that a VMDK names, and adds what they tell: QEMU tells nothing of an image of which it can't open one.
pub(super) fn open_extents(
    session: &Session,
    mut spec: ImageSpec,
    info: &mut ImageInfo,
) -> Result<(), Failure> {
    let Some(foreign) = &mut info.foreign else { return Ok(()) };
    let Some(vmdk) = &mut foreign.vmdk else { return Ok(()) };
    if vmdk.extents.iter().all(|extent| extent.path.as_ref().is_none_or(|path| *path == info.filename)) {
        return Ok(());
    }
    spec.options.purpose = Purpose::default();
    spec.options.chain = Chain::TopOnly;
    let opened = session.with_unfiltered(&spec, |image| Ok(image.info()?))?;
    foreign.unit = opened.foreign.and_then(|opened| opened.unit);
    for extent in vmdk.extents.iter_mut().filter(|extent| extent.kind == "SPARSE") {
        extent.grain = extent.grain.or(foreign.unit);
    }
    Ok(())
}

fn driver(
    filename: String,
    format: &'static str,
    length: u64,
    children: Option<Vec<(String, InfoNode)>>,
) -> InfoNode {
    let children = children.unwrap_or_default();
    InfoNode {
        filename,
        format,
        virtual_size: whole_sectors(length),
        actual_size: None,
        cluster_size: None,
        dirty: children.last().and_then(|(_, below)| below.dirty),
        kind: Kind::Driver,
        children,
    }
}

/// A node that is kept where the one below it is kept.
fn through(node: InfoNode) -> InfoNode {
    let below = node.children.last();
    let (actual_size, cluster_size) =
        below.map_or((None, None), |(_, below)| (below.actual_size, below.cluster_size));
    InfoNode { actual_size, cluster_size, ..node }
}

/// A file of the system.
fn file(context: &Context, path: &Path) -> Result<InfoNode, Failure> {
    let failure = |error| Failure::opening(context, path, &zebu_engine::Error::from(error));
    let file = File::open(path, &OpenFlags::default().lock(LockMode::None)).map_err(failure)?;
    Ok(InfoNode {
        actual_size: Some(file.disk_usage().map_err(failure)?),
        dirty: Some(false),
        kind: Kind::File { extent_size_hint: file.extent_size_hint() },
        ..driver(path_text(path), protocol(&context.disks, path), file.len(), None)
    })
}

/// An image and its backing files, each with the name that the one above leads to.
pub(super) fn chain_of(context: &Context, image: &Image) -> Result<Vec<ImageInfo>, Failure> {
    let mut infos: Vec<ImageInfo> = Vec::new();
    let mut next: Option<Image> = Some(image.clone());
    while let Some(image) = next {
        let mut info = image.info()?;
        if let Some(above) = infos.last() {
            info.filename = name_below(context, above);
        }
        infos.push(info);
        next = image.backing();
    }
    Ok(infos)
}

/// The name of the backing file of an image, from where the image itself was opened. A description of a file is the file's name.
fn name_below(context: &Context, above: &ImageInfo) -> PathBuf {
    if let Some(found) = parent_elsewhere(above) {
        return found.to_owned();
    }
    let Some(name) = above.backing_file.as_deref() else { return PathBuf::new() };
    if is_described(name)
        && let Ok(Node::File(path)) = reference_node(context, name)
    {
        return path;
    }
    resolve(&above.filename, name)
}

/// QEMU's name for what an image lies in.
pub(crate) fn protocol(disks: &Disks, path: &Path) -> &'static str {
    if let Some(driver) = disks.names.driver(path) {
        return driver;
    }
    match std::fs::metadata(path) {
        Ok(metadata) if metadata.file_type().is_block_device() => "host_device",
        _ => "file",
    }
}
