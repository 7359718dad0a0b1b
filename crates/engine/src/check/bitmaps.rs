//! Where the persistent bitmaps are: their directory and the tables it lists.

use super::finding::{FindingKind, TableKind};
use super::report::Tally;
use super::source::Source;
use crate::Result;
use zebu_qcow2::bitmap::{BitmapEntry, parse_directory};
use zebu_qcow2::limits::MAX_BITMAP_TABLE_ENTRIES;

/// Clusters that the bitmaps use.
#[derive(Debug, Default)]
pub(super) struct Bitmaps {
    /// Offset and bytes of the directory, if there is one.
    pub(super) directory: Option<(u64, u64)>,
    /// Offset and bytes of each bitmap's table.
    pub(super) tables: Vec<(u64, u64)>,
    /// Whether some clusters of the bitmaps are unknown.
    pub(super) unknown: bool,
}

/// Reads the directory.
pub(super) async fn read(source: &Source<'_>, tally: &mut Tally) -> Result<Bitmaps> {
    let Some(extension) = source.header.bitmaps() else { return Ok(Bitmaps::default()) };
    let (offset, size) = (extension.directory_offset.0, extension.directory_size);
    let mut bitmaps = Bitmaps { directory: Some((offset, size)), ..Bitmaps::default() };
    if source.is_past_end(offset, size) {
        // Reported with the region. All of it reads as zero, so that nothing can be followed.
        bitmaps.unknown = true;
        return Ok(bitmaps);
    }
    // At most the 64 MiB that the header's parser admits.
    let entries = match source.read(offset, size as usize).await {
        Ok(directory) => parse_directory(directory.as_slice(), extension.bitmap_count),
        Err(error) => {
            let (table, error) = (TableKind::BitmapDirectory, error.to_string());
            tally.add(FindingKind::Unreadable { table, offset, error }, 1);
            bitmaps.unknown = true;
            return Ok(bitmaps);
        }
    };
    match entries {
        Ok(entries) => {
            for entry in entries {
                if is_usable(&entry, source) {
                    bitmaps.tables.push((entry.table_offset.0, u64::from(entry.table_entries) * 8));
                } else {
                    let name = String::from_utf8_lossy(&entry.name).escape_debug().to_string();
                    let reason = format!("the table of bitmap '{name}' is invalid");
                    tally.add(FindingKind::BitmapDirectoryInvalid { reason }, 1);
                    bitmaps.unknown = true;
                }
            }
        }
        Err(error) => {
            tally.add(FindingKind::BitmapDirectoryInvalid { reason: error.to_string() }, 1);
            bitmaps.unknown = true;
        }
    }
    Ok(bitmaps)
}

/// Whether the entry leads to a table; what else is wrong with a bitmap concerns only those who use it.
fn is_usable(entry: &BitmapEntry, source: &Source<'_>) -> bool {
    let offset = entry.table_offset.0;
    offset != 0
        && source.geometry.is_cluster_aligned(offset)
        && (1..=MAX_BITMAP_TABLE_ENTRIES).contains(&entry.table_entries)
}
