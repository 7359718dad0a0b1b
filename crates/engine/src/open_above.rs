//! Opening an overlay above an image that is open already and stays so.

use crate::before_change::BeforeChange;
use crate::chain::map::{ChainMap, DerivedFrom, MERGED_BYTES};
use crate::continued::Continued;
use crate::node::{ChainView, Driver, Node};
use crate::options::{Access, ExtentIndex, OpenOptions};
use crate::qcow2::cache::slice_cache::SliceCache;
use crate::qcow2::cache::slice_store::Class;
use crate::qcow2::encryption::ImageEncryption;
use crate::qcow2::life::open::{ChainContext, parse};
use crate::qcow2::state::Qcow2;
use crate::sync::{OnceLock, RequestBarrier};
use crate::{Error, ErrorKind, Result};
use std::sync::Arc;
use zebu_storage::{File, ForkMark, Worker};

/// Opens the qcow2 image in `file` for writing, above `below`, whose memory for the mapping it shares. Of `options`, names, formats
/// and keys mean nothing.
pub(crate) async fn open_above(
    worker: &Worker,
    file: File,
    below: &Arc<Node>,
    options: &OpenOptions,
) -> Result<Arc<Node>> {
    let path = file.path().to_owned();
    let Driver::Qcow2(lower) = &below.driver else {
        let message = "an overlay is opened above a qcow2 image only";
        return Err(Error::new(ErrorKind::Unsupported, message).on(&path));
    };
    let parsed = parse(worker, &file, zebu_qcow2::Purpose::ReadWrite).await?;
    let geometry = parsed.header().geometry();
    let store = lower.active_map().store().clone();
    let cluster = geometry.cluster_size().min(u64::from(u32::MAX)) as u32;
    let options = OpenOptions {
        access: Access::ReadWrite,
        snapshot: None,
        slice_size: options.slice_size.map(|size| size.min(cluster)),
        ..options.clone()
    };
    let map = (options.extent_index != ExtentIndex::Off).then(|| {
        let (size, entry) = (parsed.header().virtual_size(), u64::from(geometry.l2_entry_size));
        Arc::new(ChainMap::new(store.clone(), size, geometry.cluster_bits, entry, DerivedFrom::Chain))
    });
    let context = ChainContext::new(store.clone(), Arc::default(), ImageEncryption::NONE)
        .at_top(map.clone())
        .above_backing();
    let driver = Driver::Qcow2(Qcow2::open(worker, file, &parsed, &options, context).await?);
    let members = std::iter::successors(Some(below), |node| node.backing.as_ref()).cloned();
    let view = map.map(|map| ChainView {
        merged: map
            .merged_owner()
            .map(|owner| SliceCache::of_owner(store.clone(), Class::Derived, owner, MERGED_BYTES)),
        map,
        members: members.collect(),
    });
    Ok(Arc::new(Node {
        path,
        driver,
        backing: Some(below.clone()),
        changes: RequestBarrier::default(),
        closed: OnceLock::new(),
        before_change: BeforeChange::default(),
        continued: Continued::default(),
        view,
        made_in: ForkMark::here(),
    }))
}
