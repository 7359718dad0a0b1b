//! Another width of refcounts: new refcount structures for the whole image.

use super::count::count;
use super::examine::examine;
use super::inventory::Inventory;
use super::options::{CheckOptions, Repair};
use super::rebuild::rebuild_in_width;
use super::reftable::RefTable;
use super::report::Tally;
use super::snapshots;
use super::source::Source;
use crate::Remedy;
use crate::{Error, ErrorKind, Result};
use zebu_storage::{File, Worker};

/// Gives the image in an open file, which the caller has locked alone, refcounts of `1 << order` bits. Until the header
/// changes, in one sector, nothing refers to the new structures; after it nothing refers to the old ones. The caller
/// must read the header again.
///
/// # Errors
/// [`ErrorKind::Corrupt`] if a check finds errors; [`ErrorKind::Unsupported`] if a count does not fit; no space. The
/// image is as before then.
pub(crate) async fn change_refcount_width(
    worker: &Worker,
    file: &File,
    order: u32,
    options: &CheckOptions,
) -> Result<()> {
    let options = CheckOptions { repair: Repair::None, ..options.clone() };
    let counts = examine(&mut Source::open(worker, file, &options).await?).await?.tally.counts;
    if counts.corruptions > 0 || counts.check_errors > 0 {
        let message = "the image has errors: repair it first";
        return Err(Error::new(ErrorKind::Corrupt, message).on(file.path()).with_remedy(Remedy::Repair));
    }
    let mut source = Source::open(worker, file, &options).await?;
    if source.geometry.refcount_order == order {
        return Ok(());
    }
    let mut tally = Tally::new(0);
    let table = snapshots::read(&source, &mut tally).await?;
    let mut inventory = Inventory::read(&source, table, None, &mut tally).await?;
    let old = RefTable::read(&source, &mut tally).await?;
    let most = if order >= 6 { u64::MAX } else { (1 << (1 << order)) - 1 };
    let (mut start, mut references_end, mut too_large) = (0, 0, None);
    loop {
        let (map, _) = count(&source, &mut inventory, Some(&old), start, &mut tally).await?;
        references_end = references_end.max(map.used_end());
        map.visit(map.start(), map.used_end(), |cluster, cell| {
            if cell.count > most && too_large.is_none() {
                too_large = Some((cluster, cell.count));
            }
        });
        if map.end() == u64::MAX {
            break;
        }
        start = map.end();
    }
    if let Some((cluster, count)) = too_large {
        let message =
            format!("a cluster has {count} references, which refcounts of {} bits can't count", 1 << order);
        let at = cluster << source.geometry.cluster_bits;
        return Err(Error::new(ErrorKind::Unsupported, message).on(file.path()).at_host(at));
    }
    source.clear_unknown_autoclear().await?;
    rebuild_in_width(&mut source, &mut inventory, &old, references_end, order).await
}
