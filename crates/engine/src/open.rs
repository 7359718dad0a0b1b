//! Opening an image with its backing chain.

use crate::before_change::BeforeChange;
use crate::chain::map::{ChainMap, DerivedFrom, MERGED_BYTES};
use crate::check;
use crate::continued::Continued;
use crate::error::format_error;
use crate::foreign::{Foreign, Guess, guess};
use crate::foreign_image::{ForeignImage, convert_first, parse_from};
use crate::image_worker::ImageWorker;
use crate::luks_disk::LuksDisk;
use crate::node::{ChainView, Driver, Node, Raw};
use crate::options::{
    Access, BaseName, CacheMode, Chain, ExtentIndex, ForeignFormat, Format, OpenOptions, OpenedFile, Probe,
    Purpose, RefPolicy, Sharing,
};
use crate::qcow2::cache::slice_cache::SliceCache;
use crate::qcow2::cache::slice_store::{Class, SliceStore};
use crate::qcow2::encryption::ImageEncryption;
use crate::qcow2::life::create::Magic;
use crate::qcow2::life::open::{
    ChainContext, Parsed, default_cache_bytes, full_cache_bytes, parse, parse_with,
};
use crate::qcow2::life::unlock::unlock;
use crate::qcow2::state::Qcow2;
use crate::qcow2::text::text;
use crate::refs::{self, Role};
use crate::same_file::FilePlace;
use crate::sync::atomic::AtomicU64;
use crate::sync::{OnceLock, RequestBarrier};
use crate::{Error, ErrorKind, Keys, Remedy, Remote, Result, parallels_directory};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use zebu_foreign::{Disk, Opening, Parent, ParentFormat, extent_files};
use zebu_qcow2::header::DataFileOption;
use zebu_qcow2::{FormatError, Header, Incompatible};
use zebu_storage::{Create, File, FileId, ForkMark, LockMode, OpenFlags, Worker};

/// Images in a chain at most.
const MAX_DEPTH: usize = 1024;
/// How long mapping is kept that is not used.
const DEFAULT_CLEAN_INTERVAL: Duration = Duration::from_secs(600);

/// An image of the chain that is opened but stands on nothing yet.
struct Link {
    path: PathBuf,
    file: File,
    parsed: Option<Parsed>,
    foreign: Option<Box<ForeignImage>>,
    encryption: LinkEncryption,
    data_file: Option<File>,
    options: OpenOptions,
}

/// Whether an image stands on another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parentage {
    None,
    Child,
}

/// The encryption of an image of the chain.
enum LinkEncryption {
    /// There is none.
    None,
    /// Of a qcow2 image, which may have none.
    Qcow2(ImageEncryption),
    /// Of a file with a LUKS header.
    Luks(Box<LuksDisk>),
}

impl LinkEncryption {
    fn is_none(&self) -> bool {
        match self {
            Self::None => true,
            Self::Qcow2(encryption) => encryption.is_none(),
            Self::Luks(_) => false,
        }
    }
}

impl Link {
    /// The files that the image names, but those that the caller gave in their place.
    async fn named_files(&self, worker: &Worker) -> Vec<String> {
        let Some(foreign) = &self.foreign else {
            let header = self.parsed.as_ref().map(Parsed::header);
            let data_file = header.and_then(Header::data_file_name);
            return [data_file, header.and_then(Header::backing_file)]
                .into_iter()
                .flatten()
                .map(text)
                .collect();
        };
        let (files, format) = (std::slice::from_ref(&self.file), foreign.disk().format());
        let extents = parse_from(worker, files, None, |pages| extent_files(format, pages)).await;
        let parent =
            foreign.disk().parent().map(|parent| parent.name.clone()).filter(|name| !name.is_empty());
        extents.unwrap_or_default().into_iter().chain(parent).collect()
    }
}

/// The next image of the chain.
struct Next {
    file: File,
    path: PathBuf,
    format: Option<Format>,
    /// Its external data file, if that is open already.
    data_file: Option<File>,
    /// Bytes of its disk, as a descriptor of that name tells.
    size: Option<(u64, PathBuf)>,
}

pub(crate) fn flags(options: &OpenOptions) -> OpenFlags {
    OpenFlags::default()
        .access(options.access)
        .direct(options.cache.is_direct())
        .create(Create::No)
        .lock(match (options.sharing, options.access, options.purpose) {
            (Sharing::Unlocked, ..) => LockMode::None,
            (_, Access::ReadWrite, _) => LockMode::Write,
            (_, _, Purpose::Inspect) => LockMode::Inspect,
            (..) => LockMode::Read,
        })
        .lock_wait(options.lock_wait.clone())
        .no_flush(options.cache == CacheMode::Unsafe)
}

/// The format of a file that nobody named, by its first and last bytes.
///
/// # Errors
/// [`ErrorKind::ForeignFormat`]: it is an image of another format, or a packed file. The bytes of such a file are a disk
/// only if the caller says so, by [`Format::Raw`].
pub async fn probe(worker: &Worker, file: &File) -> Result<Format> {
    probe_by(worker, file, Probe::BothEnds).await
}

/// The same by some of these bytes.
///
/// # Errors
/// As [`probe`].
pub async fn probe_by(worker: &Worker, file: &File, by: Probe) -> Result<Format> {
    match guess(worker, file, by).await? {
        Guess::Known(format) => Ok(format),
        Guess::Foreign(foreign) => {
            let message = match foreign {
                Foreign::Image(_) => format!(
                    "it looks like {foreign}, which can't be read: make qcow2 or raw of it with another tool first, or \
                     say that its very bytes are the disk"
                ),
                Foreign::NoDisk(other) => format!(
                    "it looks like {other}, which is no disk by itself: {}, or say that its very bytes are the disk",
                    other.remedy()
                ),
                Foreign::Packed(packed) => {
                    let remedy = if packed.is_unpacked() {
                        "convert it (convert and backup unpack their sources)".to_owned()
                    } else {
                        format!("unpack it first (by {})", packed.unpacker())
                    };
                    format!(
                        "it looks like {foreign}, which can't be read in place: {remedy}, or say that its very bytes are \
                         the disk"
                    )
                }
            };
            Err(Error::new(ErrorKind::ForeignFormat, message).on(file.path()))
        }
    }
}

/// Opens `path` and what it stands on.
pub(crate) async fn open_chain(worker: &Worker, path: &Path, options: &OpenOptions) -> Result<Arc<Node>> {
    let top = first_of(path, options)?;
    open_below(worker, top, options).await
}

/// Looks at the images of a chain, top first, each by its header alone: those that open, and why the chain goes no further.
pub(crate) async fn look_down(
    worker: &Worker,
    path: &Path,
    options: &OpenOptions,
) -> Result<(Vec<Arc<Node>>, Option<Error>)> {
    let options = &OpenOptions { purpose: Purpose::Inspect, ..options.clone() };
    let mut links: Vec<Link> = Vec::new();
    let mut next = Some(first_of(path, options)?);
    let mut end = None;
    while let Some(found) = next.take() {
        match open_link(worker, &links, found, options).await {
            Err(error) if links.is_empty() => return Err(error),
            Err(error) => end = Some(error),
            Ok(link) => {
                match below(&link, options, Access::ReadOnly) {
                    Ok(found) => next = found,
                    Err(error) => end = Some(error),
                }
                links.push(link);
            }
        }
    }
    let mut nodes = Vec::with_capacity(links.len());
    for link in links {
        nodes.push(assemble(worker, vec![link], options).await?);
    }
    Ok((nodes, end))
}

/// Opens an image that was just made at `path`, under the locks that its files have, and what it stands on.
pub(crate) async fn open_made(
    worker: &Worker,
    path: &Path,
    file: File,
    data_file: Option<File>,
    options: &OpenOptions,
) -> Result<Arc<Node>> {
    let top = Next { file, path: path.to_owned(), format: options.format, data_file, size: None };
    open_below(worker, top, options).await
}

async fn open_below(worker: &Worker, top: Next, options: &OpenOptions) -> Result<Arc<Node>> {
    let mut next = Some(top);
    let mut links: Vec<Link> = Vec::new();
    while let Some(found) = next {
        let link = open_link(worker, &links, found, options).await?;
        next = next_in_chain(&link, options, Access::ReadOnly)?;
        links.push(link);
    }
    assemble(worker, links, options).await
}

/// Opens a chain in two: the images above `base`, as if there was nothing below them, and `base` with what it stands
/// on, for the access of `options`. Without `base`, it is what `path` stands on. `base` is read as `base_name` says.
pub(crate) async fn open_split(
    worker: &Worker,
    path: &Path,
    base: Option<&Path>,
    base_name: BaseName,
    options: &OpenOptions,
) -> Result<(Arc<Node>, Arc<Node>)> {
    let mut next = Some(first_of(path, options)?);
    let mut above: Vec<Link> = Vec::new();
    let mut found_base = None;
    while let Some(found) = next {
        let link = open_link(worker, &above, found, options).await?;
        next = next_in_chain(&link, options, Access::ReadOnly)?;
        if let Some(below) = &next
            && base.is_none_or(|base| is_file(base, base_name, &link.path, &below.file, &options.remote))
        {
            // Closed first: its locks would be in the way.
            next = None;
            found_base = next_in_chain(&link, options, options.access)?;
        }
        above.push(link);
    }
    let Some(found) = found_base else {
        let message = match base {
            None => "Image does not have a backing file".to_owned(),
            Some(base) => {
                format!("Did not find '{}' in the backing chain of '{}'", base.display(), path.display())
            }
        };
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(path));
    };
    let keys = keys_below(&above, options).below(above.len() as u32);
    let base_options = OpenOptions { access: options.access, keys, ..options.at_depth(above.len()) };
    let mut below: Vec<Link> = Vec::new();
    next = Some(found);
    while let Some(found) = next {
        check_chain(&above, &found.file)?;
        let link = open_link(worker, &below, found, &base_options).await?;
        next = next_in_chain(&link, &base_options, Access::ReadOnly)?;
        below.push(link);
    }
    let base = assemble(worker, below, &base_options).await?;
    Ok((assemble(worker, above, options).await?, base))
}

/// The files of the image at `path` and of what it stands on, by their names too where they can't be opened. Nothing is
/// read but headers, without locks; the chain ends where an image can't be looked at.
///
/// # Errors
/// [`ErrorKind::ReferenceRefused`]: an image names a local file that may not be opened.
pub(crate) async fn chain_files(worker: &Worker, path: &Path, options: &OpenOptions) -> Result<Vec<FileId>> {
    let options = &OpenOptions { sharing: Sharing::Unlocked, purpose: Purpose::Inspect, ..options.clone() };
    let mut files = Vec::new();
    let mut links: Vec<Link> = Vec::new();
    let mut next = first_of(path, options).ok();
    while let Some(found) = next {
        files.extend(found.file.files());
        let Ok(link) = open_link(worker, &links, found, options).await else { break };
        let image = options.remote.local_file(&link.path).unwrap_or_else(|| link.path.clone());
        let mut described = None;
        for name in link.named_files(worker).await {
            let below_drivers = options.remote.local_file(Path::new(&name));
            // As QEMU writes the name of a local file.
            let plain = name.strip_prefix("file:").unwrap_or(&name);
            let is_plain = plain == name && below_drivers.is_none();
            let path = below_drivers.unwrap_or_else(|| refs::resolve(&image, plain));
            files.extend(FilePlace::of(&path).file());
            described = if is_plain { described } else { Some(path) };
        }
        next = match below(&link, options, Access::ReadOnly) {
            Err(error) if hides_local_file(&error) => return Err(error),
            Ok(Some(found)) => Some(found),
            Ok(None) | Err(_) => match described {
                Some(path) => named_by_description(&image, &path, options)?,
                None => None,
            },
        };
        links.push(link);
    }
    Ok(files)
}

/// The file of a chain that is described below drivers, or named as QEMU writes it, to go on there.
fn named_by_description(image: &Path, path: &Path, options: &OpenOptions) -> Result<Option<Next>> {
    let Some(name) = std::path::absolute(path).ok().and_then(|path| path.into_os_string().into_string().ok())
    else {
        return Ok(None);
    };
    if !path.is_file() {
        return Ok(None);
    }
    match refs::open(image, &name, Role::BackingFile, options, &flags(options)) {
        Ok((file, path)) => Ok(Some(Next { file, path, format: None, data_file: None, size: None })),
        Err(error) if hides_local_file(&error) => Err(error),
        Err(_) => Ok(None),
    }
}

/// Whether an image names a local file that may not be opened.
fn hides_local_file(error: &Error) -> bool {
    matches!(error.remedy(), Some(Remedy::AllowLocalReferences | Remedy::AllowReferencesWithin(_)))
}

/// Whether `name`, read as `how` says beside the image at `image`, is the name of `file`.
fn is_file(name: &Path, how: BaseName, image: &Path, file: &File, remote: &Remote) -> bool {
    let unlocked = OpenFlags::default().lock(LockMode::None);
    if let Some(found) = remote.open_elsewhere(name, &unlocked) {
        return found.is_ok_and(|found| found.id() == file.id());
    }
    let given = (how == BaseName::FromEither).then(|| name.to_owned());
    let beside = name.to_str().map(|name| refs::resolve(image, name));
    [given, beside]
        .into_iter()
        .flatten()
        .any(|path| File::open(&path, &unlocked).is_ok_and(|found| found.id() == file.id()))
}

fn first_of(path: &Path, options: &OpenOptions) -> Result<Next> {
    if options.access == Access::ReadWrite && options.sharing == Sharing::Unlocked {
        let message = "an image that is opened without locks can't be written";
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(path));
    }
    if let Some(named) = parallels_directory::image_in(path)? {
        let (file, path) = refs::open(&named.by, &named.name, Role::Extent, options, &flags(options))?;
        let format = options.format.or(Some(named.format));
        let size = named.size.map(|size| (size, named.by));
        return Ok(Next { file, path, format, data_file: None, size });
    }
    if options.format.is_none() && options.probe == Probe::BothEnds {
        parallels_directory::refuse_part(path)?;
    }
    let file = options.remote.open(path, &flags(options)).map_err(|e| Error::from(e).on(path))?;
    Ok(Next { file, path: path.to_owned(), format: options.format, data_file: None, size: None })
}

/// Looks into a file of the chain; `links` are those above it.
async fn open_link(worker: &Worker, links: &[Link], found: Next, options: &OpenOptions) -> Result<Link> {
    let Next { file, path, format, data_file, size } = found;
    check_chain(links, &file)?;
    let mut link_options = options.at_depth(links.len());
    let depth = links.len() as u32;
    // Names further up have told keys, too.
    link_options.keys = keys_below(links, options).with_named(depth, &path)?;
    let format = known_format(worker, &file, format, &link_options).await?;
    if let Format::Foreign(format) = format {
        let foreign = open_foreign(worker, file.clone(), &path, format, &link_options).await?;
        parallels_directory::check_size(size, foreign.disk().virtual_size(), &path)?;
        let foreign = Some(foreign);
        let encryption = LinkEncryption::None;
        let link =
            Link { path, file, parsed: None, foreign, encryption, data_file: None, options: link_options };
        check_parent(links.last(), &link)?;
        return Ok(link);
    }
    if format == Format::Raw {
        parallels_directory::check_size(size, file.len(), &path)?;
    }
    let (file, parsed, encryption) = parse_link(worker, file, format, &link_options, depth).await?;
    let data_file = match &parsed {
        Some(parsed) if data_file.is_none() => open_data_file(parsed.header(), &path, &link_options)?,
        _ => data_file,
    };
    let link = Link { path, file, parsed, foreign: None, encryption, data_file, options: link_options };
    check_parent(links.last(), &link)?;
    Ok(link)
}

/// The keys of the next image below `links`.
fn keys_below(links: &[Link], options: &OpenOptions) -> Keys {
    links.last().map_or(&options.keys, |link| &link.options.keys).clone()
}

/// Opens a chain of files that the caller has opened and locked, the top first.
pub(crate) async fn open_given(
    worker: &Worker,
    images: Vec<OpenedFile>,
    options: &OpenOptions,
) -> Result<Arc<Node>> {
    let mut links: Vec<Link> = Vec::new();
    for OpenedFile { file, data_file, format } in images {
        check_chain(&links, &file)?;
        let link_options = options.at_depth(links.len());
        if let Format::Foreign(format) = format {
            let path = file.path().to_owned();
            let options = OpenOptions { refs: RefPolicy::None, ..link_options };
            let foreign = Some(open_foreign(worker, file.clone(), &path, format, &options).await?);
            let encryption = LinkEncryption::None;
            let link = Link { path, file, parsed: None, foreign, encryption, data_file: None, options };
            check_parent(links.last(), &link)?;
            links.push(link);
            continue;
        }
        let depth = links.len() as u32;
        let (file, parsed, encryption) = parse_link(worker, file, format, &link_options, depth).await?;
        if let Some(parsed) = &parsed {
            let given = if data_file.is_some() { DataFileOption::Given } else { DataFileOption::NotGiven };
            let required = parsed.header().geometry().external_data;
            if required != data_file.is_some() {
                parsed.header().check_data_file(given).map_err(|e| format_error(file.path(), &e))?;
                return Err(format_error(file.path(), &FormatError::DataFileRequired));
            }
        }
        let path = file.path().to_owned();
        let link = Link { path, file, parsed, foreign: None, encryption, data_file, options: link_options };
        check_parent(links.last(), &link)?;
        links.push(link);
    }
    assemble(worker, links, options).await
}

/// Opens an image that was just made and has no magic number yet, to be written, without what it stands on.
pub(crate) async fn open_unfinished(worker: &Worker, file: File, options: &OpenOptions) -> Result<Arc<Node>> {
    let options = OpenOptions { chain: Chain::TopOnly, access: Access::ReadWrite, ..options.clone() };
    let parsed = parse_with(worker, &file, zebu_qcow2::Purpose::ReadWrite, Magic::Withheld).await?;
    let path = file.path().to_owned();
    let encryption = unlock(worker, &file, parsed.header(), &options, 0).await?;
    let link = Link {
        path,
        file,
        parsed: Some(parsed),
        foreign: None,
        encryption: LinkEncryption::Qcow2(encryption),
        data_file: None,
        options: options.clone(),
    };
    assemble(worker, vec![link], &options).await
}

/// Refuses one more image for a chain of so many. `path` is named in the error.
pub(crate) fn check_room_above(images: usize, path: &Path) -> Result<()> {
    if images < MAX_DEPTH {
        return Ok(());
    }
    let message = format!("a backing chain has {MAX_DEPTH} images at most: commit or rebase some of them");
    Err(Error::new(ErrorKind::Unsupported, message).on(path))
}

/// Refuses chains without end.
fn check_chain(links: &[Link], file: &File) -> Result<()> {
    let Some(top) = links.first() else { return Ok(()) };
    check_room_above(links.len(), &top.path)?;
    if links.iter().any(|link| link.file.id() == file.id()) {
        let message = format!("Backing file '{}' creates an infinite loop.", file.path().display());
        return Err(Error::new(ErrorKind::Corrupt, message).on(&top.path));
    }
    Ok(())
}

/// The format as given, or as found in the first bytes.
async fn known_format(
    worker: &Worker,
    file: &File,
    format: Option<Format>,
    options: &OpenOptions,
) -> Result<Format> {
    if let Some(format) = format {
        return Ok(format);
    }
    let probed = probe_by(worker, file, options.probe).await?;
    if probed == Format::Raw && options.access == Access::ReadWrite {
        let message = "the format was not given and looks raw; a guest could write a header that is taken for another \
                       format: say that it is raw";
        return Err(Error::new(ErrorKind::InvalidArgument, message)
            .on(file.path())
            .with_remedy(Remedy::NameFormatRaw));
    }
    Ok(probed)
}

/// Reads what has to be known of an image before it is set up: of a qcow2 image the small tables, of an encrypted one the key.
/// Makes the refcounts of a dirty one right.
async fn parse_link(
    worker: &Worker,
    file: File,
    format: Format,
    options: &OpenOptions,
    depth: u32,
) -> Result<(File, Option<Parsed>, LinkEncryption)> {
    if format == Format::Raw {
        refuse_what_raw_has_not(&file, format, Parentage::None, options)?;
        return Ok((file, None, LinkEncryption::None));
    }
    if format == Format::Luks {
        refuse_what_raw_has_not(&file, format, Parentage::None, options)?;
        let luks = LuksDisk::open(worker, &file, options, depth).await?;
        return Ok((file, None, LinkEncryption::Luks(Box::new(luks))));
    }
    let purpose = match (options.purpose, options.access) {
        (Purpose::Inspect, _) => zebu_qcow2::Purpose::Inspect,
        (_, Access::ReadWrite) => zebu_qcow2::Purpose::ReadWrite,
        (_, Access::ReadOnly) => zebu_qcow2::Purpose::ReadOnly,
    };
    let mut parsed = parse(worker, &file, purpose).await?;
    let encryption = unlock(worker, &file, parsed.header(), options, depth).await?;
    let is_dirty = parsed.header().incompatible().contains(Incompatible::DIRTY);
    if options.access == Access::ReadWrite && is_dirty {
        check::rebuild_refcounts(worker, &file, &check::CheckOptions::default()).await?;
        parsed = parse(worker, &file, purpose).await?;
    }
    Ok((file, Some(parsed), LinkEncryption::Qcow2(encryption)))
}

/// Opens an image of another program, with the files that it names.
async fn open_foreign(
    worker: &Worker,
    file: File,
    path: &Path,
    format: ForeignFormat,
    options: &OpenOptions,
) -> Result<Box<ForeignImage>> {
    if options.access == Access::ReadWrite {
        return Err(convert_first(Format::Foreign(format)).on(path));
    }
    let check = |disk: &Disk| {
        let parent = if disk.parent().is_some() { Parentage::Child } else { Parentage::None };
        refuse_what_raw_has_not(&file, Format::Foreign(format), parent, options)
    };
    let mut files = vec![file.clone()];
    if options.purpose == Purpose::Inspect {
        let mut opening = Opening::new(format);
        let disk = parse_from(worker, &files, None, |pages| opening.inspect(pages)).await?;
        check(&disk)?;
        return Ok(Box::new(ForeignImage::new(disk, files, options)));
    }
    let names = parse_from(worker, &files, None, |pages| extent_files(format, pages)).await?;
    for name in names {
        let (extent, _) = refs::open(path, &name, Role::Extent, options, &flags(options))?;
        files.push(extent);
    }
    let mut opening = Opening::new(format);
    let disk = parse_from(worker, &files, None, |pages| opening.open(pages)).await?;
    check(&disk)?;
    Ok(Box::new(ForeignImage::new(disk, files, options)))
}

/// The parent that an image of another program names, opened.
fn parent_of(
    link: &Link,
    foreign: &ForeignImage,
    options: &OpenOptions,
    flags: &OpenFlags,
) -> Result<Option<Next>> {
    let Some(parent) = foreign.disk().parent() else { return Ok(None) };
    let (file, path) = open_parent(&link.path, parent, options, flags)?;
    let format = link.options.backing_format().or(match parent.format {
        ParentFormat::Same => Some(Format::Foreign(foreign.disk().format())),
        ParentFormat::Raw => Some(Format::Raw),
        _ => None,
    });
    Ok(Some(Next { file, path, format, data_file: None, size: None }))
}

/// Opens the parent of the image at `image`. A name of another machine leads nowhere, so the parent is looked for beside the image,
/// too, if its identity can tell that it is the one.
fn open_parent(
    image: &Path,
    parent: &Parent,
    options: &OpenOptions,
    flags: &OpenFlags,
) -> Result<(File, PathBuf)> {
    if parent.name.is_empty() {
        let message = "the image does not name its parent: name it yourself";
        return Err(Error::new(ErrorKind::ReferenceRefused, message).on(image).with_remedy(Remedy::NameFile));
    }
    let told = refs::open(image, &parent.name, Role::BackingFile, options, flags);
    let beside = parent.name.rsplit(['/', ':']).next().filter(|beside| {
        let is_name = !matches!(*beside, "" | "." | "..") && *beside != parent.name;
        is_name && !parent.identities.is_empty()
    });
    match (told, beside) {
        (Err(error), Some(beside)) if leads_nowhere(&error) => {
            match refs::open(image, beside, Role::BackingFile, options, flags) {
                Err(found) if found.kind() == ErrorKind::ReferenceRefused => Err(error),
                Err(found) if leads_nowhere(&found) => {
                    Err(error.adding(", and there is no file of that name beside the image"))
                }
                found => found,
            }
        }
        (told, _) => told,
    }
}

/// Whether there is no file that may be opened under a name.
fn leads_nowhere(error: &Error) -> bool {
    let kind = io::Error::from_raw_os_error(error.errno()).kind();
    error.kind() == ErrorKind::ReferenceRefused
        || matches!(kind, io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Fails if an image of another program stands on another state of its parent than it was made for. An image of another format is
/// believed where the caller has named it.
fn check_parent(child: Option<&Link>, below: &Link) -> Result<()> {
    let Some(child) = child else { return Ok(()) };
    let Some(disk) = child.foreign.as_ref().map(|child| child.disk()) else { return Ok(()) };
    let Some(parent) = disk.parent() else { return Ok(()) };
    let below_disk = below.foreign.as_ref().map(|below| below.disk());
    let identity = below_disk.filter(|below| below.format() == disk.format()).and_then(Disk::identity);
    let fits = match identity {
        Some(identity) => parent.identities.iter().any(|told| told.is_of(identity)),
        None => child.options.backing.is_some(),
    };
    if parent.identities.is_empty() || fits {
        return Ok(());
    }
    let message = format!(
        "the parent '{}' is not the image that this one was made for, or it was changed since",
        below.path.display()
    );
    Err(Error::new(ErrorKind::Corrupt, message).on(&child.path))
}

/// A raw image is the bytes of its disk and nothing else; images of other programs tell the rest themselves, but where a parent is.
fn refuse_what_raw_has_not(
    file: &File,
    format: Format,
    parent: Parentage,
    options: &OpenOptions,
) -> Result<()> {
    let OpenOptions { snapshot, data_file, backing, .. } = options;
    let what = match (snapshot, data_file, backing) {
        (Some(name), ..) => format!("there is no snapshot '{name}'"),
        (_, Some(_), _) => "it takes no data file".to_owned(),
        _ if parent == Parentage::Child => return Ok(()),
        (_, _, Some((path, _))) if !path.as_os_str().is_empty() => "it takes no backing file".to_owned(),
        (_, _, None) if options.backing_format().is_some() => "it takes no backing file".to_owned(),
        _ => return Ok(()),
    };
    let message = if format == Format::Raw {
        format!("a raw image has the bytes of its disk alone: {what}")
    } else {
        format!("this can't be asked of an image in the format {}: {what}", format.name())
    };
    Err(Error::new(ErrorKind::InvalidArgument, message).on(file.path()))
}

fn open_data_file(header: &Header, path: &Path, options: &OpenOptions) -> Result<Option<File>> {
    let given = if options.data_file.is_some() { DataFileOption::Given } else { DataFileOption::NotGiven };
    if options.purpose == Purpose::Inspect {
        return Ok(None);
    }
    header.check_data_file(given).map_err(|e| format_error(path, &e))?;
    if !header.geometry().external_data {
        return Ok(None);
    }
    let flags = flags(options);
    if let Some(given) = &options.data_file {
        return Ok(Some(options.remote.open(given, &flags).map_err(|e| Error::from(e).on(given))?));
    }
    let name = header.data_file_name().map(text).unwrap_or_default();
    let (file, _) = refs::open(path, &name, Role::DataFile, options, &flags)?;
    Ok(Some(file))
}

/// Opens what `link` stands on, if the chain is followed.
fn next_in_chain(link: &Link, top: &OpenOptions, access: Access) -> Result<Option<Next>> {
    if top.chain == Chain::TopOnly || top.purpose == Purpose::Inspect {
        return Ok(None);
    }
    below(link, top, access)
}

/// Opens what `link` stands on.
fn below(link: &Link, top: &OpenOptions, access: Access) -> Result<Option<Next>> {
    let flags = flags(&OpenOptions { access, ..top.at_depth(1) });
    if let Some((path, format)) = &link.options.backing {
        if path.as_os_str().is_empty() {
            return Ok(None);
        }
        let file = top.remote.open(path, &flags).map_err(|e| Error::from(e).on(path))?;
        return Ok(Some(Next { file, path: path.clone(), format: *format, data_file: None, size: None }));
    }
    if let Some(foreign) = &link.foreign {
        return parent_of(link, foreign, top, &flags);
    }
    let Some(header) = link.parsed.as_ref().map(Parsed::header) else { return Ok(None) };
    let given = link.options.backing_format();
    let Some(name) = header.backing_file() else {
        let Some(format) = given else { return Ok(None) };
        let message = format!("it names no backing file that could be opened as {}", format.name());
        return Err(Error::new(ErrorKind::InvalidArgument, message).on(&link.path));
    };
    let (file, path) = refs::open(&link.path, &text(name), Role::BackingFile, top, &flags)?;
    let format = match header.backing_format().map(text).as_deref() {
        _ if given.is_some() => given,
        None => None,
        Some("qcow2") => Some(Format::Qcow2),
        Some("raw" | "file" | "host_device") => Some(Format::Raw),
        Some(other) => Some(Format::from_name(other).ok_or_else(|| {
            let message =
                format!("the format '{other}' of the backing file '{}' is not supported", path.display());
            Error::new(ErrorKind::Unsupported, message).on(&link.path)
        })?),
    };
    Ok(Some(Next { file, path, format, data_file: None, size: None }))
}

async fn assemble(worker: &Worker, links: Vec<Link>, options: &OpenOptions) -> Result<Arc<Node>> {
    for (depth, link) in (0..).zip(&links) {
        if link.encryption.is_none() {
            link.options.keys.check_plain(depth, &link.path)?;
        }
    }
    let (mut full, mut in_files) = (0u64, 0u64);
    for link in &links {
        let mapping = link.parsed.as_ref().map_or(0, |parsed| full_cache_bytes(parsed.header()));
        full = full.saturating_add(mapping);
        in_files = in_files.saturating_add(link.file.len());
    }
    let interval = options.cache_clean_interval.unwrap_or(DEFAULT_CLEAN_INTERVAL);
    let store = Arc::new(SliceStore::new(u64::MAX, interval).for_queues(options.queues));
    let inflated = Arc::default();
    let index = chain_index(&links, options, &store);
    let mut below: Vec<Arc<Node>> = Vec::new();
    let depth = links.len();
    for (above, link) in links.into_iter().enumerate().rev() {
        let backing = below.last().cloned();
        let is_top = above == 0;
        let driver = if let Some(parsed) = &link.parsed {
            let mut link_options = link.options;
            if !is_top {
                // The size that was asked for may be larger than a cluster of this image.
                let cluster = parsed.header().geometry().cluster_size().min(u64::from(u32::MAX)) as u32;
                link_options.slice_size = link_options.slice_size.map(|size| size.min(cluster));
            }
            let encryption = match link.encryption {
                LinkEncryption::Qcow2(encryption) => encryption,
                LinkEncryption::None | LinkEncryption::Luks(_) => ImageEncryption::NONE,
            };
            let mut context = ChainContext::new(store.clone(), Arc::clone(&inflated), encryption);
            if is_top {
                context = context.at_top(index.clone());
            }
            if backing.is_some() {
                context = context.above_backing();
            }
            if let Some(data_file) = link.data_file {
                context = context.with_data_file(data_file);
            }
            Driver::Qcow2(Qcow2::open(worker, link.file, parsed, &link_options, context).await?)
        } else if let Some(foreign) = link.foreign {
            Driver::Foreign(foreign)
        } else {
            let luks = match link.encryption {
                LinkEncryption::Luks(luks) => Some(luks),
                LinkEncryption::None | LinkEncryption::Qcow2(_) => None,
            };
            let in_file = link.file.len();
            // A disk ends at a sector; the rest of the last one reads as zero.
            let size = luks.as_ref().map_or(in_file.next_multiple_of(512), |luks| luks.size_in(in_file));
            Driver::Raw(Raw {
                file: link.file,
                size: AtomicU64::new(size),
                luks,
                cache_mode: options.cache,
                own_worker: ImageWorker::default(),
            })
        };
        let view = index.clone().filter(|_| is_top).map(|index| ChainView {
            merged: index
                .merged_owner()
                .map(|owner| SliceCache::of_owner(store.clone(), Class::Derived, owner, MERGED_BYTES)),
            map: index,
            members: below.iter().rev().cloned().collect(),
        });
        below.push(Arc::new(Node {
            path: link.path,
            driver,
            backing,
            changes: RequestBarrier::default(),
            closed: OnceLock::new(),
            before_change: BeforeChange::default(),
            continued: Continued::default(),
            view,
            made_in: ForkMark::here(),
        }));
    }
    debug_assert_eq!(below.len(), depth);
    let top = below.pop().ok_or_else(|| Error::new(ErrorKind::InvalidArgument, "no image"))?;
    top.set_cache_size(options.cache_size.unwrap_or(default_cache_bytes(
        full,
        in_files,
        top.cache_minimum(),
        options.access,
    )))?;
    Ok(top)
}

/// The index of a chain whose top is a qcow2 image.
fn chain_index(links: &[Link], options: &OpenOptions, store: &Arc<SliceStore>) -> Option<Arc<ChainMap>> {
    let header = links.first()?.parsed.as_ref()?.header();
    if options.extent_index == ExtentIndex::Off || options.purpose == Purpose::Inspect {
        return None;
    }
    let geometry = header.geometry();
    let from = if links.len() > 1 { DerivedFrom::Chain } else { DerivedFrom::Tables };
    let (bits, entry) = (geometry.cluster_bits, u64::from(geometry.l2_entry_size));
    Some(Arc::new(ChainMap::new(store.clone(), header.virtual_size(), bits, entry, from)))
}

/// The policy that lets a caller look up what a new image is to stand on.
pub(crate) fn size_lookup(refs: &RefPolicy, format: Format) -> OpenOptions {
    OpenOptions {
        format: Some(format),
        refs: refs.clone(),
        purpose: Purpose::Inspect,
        ..OpenOptions::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_has_room_up_to_its_limit() {
        let path = Path::new("/top");
        check_room_above(MAX_DEPTH - 1, path).unwrap();
        let error = check_room_above(MAX_DEPTH, path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
}
