//! `--dry-run`: what a job would read. The sources are opened and their mapping is walked; nothing is written.

use crate::failure::Failure;
use crate::output::json;
use crate::output::stdout;
use crate::session::Session;
use crate::values::OutputFormat;
use serde::Serialize;
use zebu_disks::RemoteTransfers;
use zebu_engine::{ExtentKind, Image};

/// Figures are bytes of the virtual disks.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Estimate {
    /// The disks' sizes, added up.
    total: u64,
    /// Data that would be read as it is.
    read: u64,
    /// Data that would be read compressed, and so takes less.
    read_compressed: u64,
    /// Ranges that are known to read as zero.
    zero: u64,
    /// Transfers over the network that it took to find that out.
    #[serde(skip_serializing_if = "Option::is_none")]
    remote: Option<RemoteTransfers>,
}

/// Prints what copying `images` would read.
pub(crate) fn tell(session: &Session, images: &[Image], output: OutputFormat) -> Result<(), Failure> {
    let worker = session.worker();
    let mut estimate = Estimate::default();
    for image in images {
        estimate.total += image.virtual_size();
        let mut extents = image.extents(0..image.virtual_size());
        while let Some(extent) = worker.block_on(extents.next(worker))? {
            *match extent.kind {
                _ if extent.hole => &mut estimate.zero,
                ExtentKind::Zero { .. } | ExtentKind::Unallocated => &mut estimate.zero,
                ExtentKind::Compressed => &mut estimate.read_compressed,
                // Data, in whichever file.
                _ => &mut estimate.read,
            } += extent.len;
        }
    }
    let disks = &session.context().disks;
    estimate.remote = disks.remote.transfers(&disks.uploads);
    stdout::print(&match output {
        OutputFormat::Json => json::to_text(session.dialect(), &estimate)?,
        OutputFormat::Human => format!(
            "would read {} bytes of data and {} that are compressed; {} of {} are known to be zero. Nothing was written\n",
            estimate.read, estimate.read_compressed, estimate.zero, estimate.total
        ),
    })
}
