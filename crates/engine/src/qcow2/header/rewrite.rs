//! Changing what has no fixed place in the header: extensions, the name of the backing file, the version.
//!
//! Sectors of 512 bytes are written whole or not at all, but a block of several may come to the disk in part. So a
//! change is a list of blocks, each durable before the next is written. Each differs from the one before in its first sector
//! only, or in bytes that its header does not refer to. Whatever part of a block a crash leaves, the header says the same as
//! before or as after.
//!
//! Extensions past the first sector may move. Then a step in between leaves out the names of the feature bits, so that all
//! others fit into that sector. It also puts the name of the backing file elsewhere. A header too full for that (a cluster of 1 KiB, a long name of a data file) is written as one block, as every header was at
//! its creation.

use crate::error::format_error;
use crate::qcow2::header::block::{ImageHeader, OnFailure};
use crate::qcow2::read_tables::read_bytes;
use crate::{Error, ErrorKind, Result};
use std::ops::Range;
use zebu_qcow2::{FormatError, Header, Purpose};
use zebu_storage::Worker;

/// Bytes that are written whole or not at all.
const SECTOR: usize = 512;

/// The blocks to write, one after the other.
fn steps(block: &[u8], old: &Header, mut new: Header) -> Result<Vec<Vec<u8>>, FormatError> {
    let limit = block.len() as u64;
    let name = |header: &Header| header.backing_file().unwrap_or_default().to_vec();
    let (old_name, new_name) = (name(old), name(&new));
    let old_place = old.backing_name_offset();
    let old_range = old_place..old_place.saturating_add(old_name.len() as u64);
    let free_from = new.extensions_end().max(old.extensions_end()).next_multiple_of(8);

    let place = find_place(free_from, limit, &new_name, std::slice::from_ref(&old_range));
    new.place_backing_name(place.unwrap_or(0));
    let encoded = new.encode()?;
    let area = area_of(&new, limit)?;
    let Some(place) = place else { return Ok(vec![in_one_block(block, &encoded)?]) };

    let mut prepared = block.to_vec();
    put(&mut prepared, place, &new_name);
    let mut last = prepared.clone();
    put(&mut last, 0, &encoded[..area]);
    if area <= SECTOR || last[SECTOR..area] == prepared[SECTOR..area] {
        return Ok(vec![prepared, last]);
    }

    let mut between = old.clone();
    between.drop_feature_table();
    let new_range = place..place.saturating_add(new_name.len() as u64);
    let away = find_place(free_from, limit, &old_name, &[old_range, new_range]);
    let (Some(away), true) = (away, between.extensions_end() <= SECTOR as u64) else {
        return Ok(vec![in_one_block(block, &encoded)?]);
    };
    between.place_backing_name(away);
    put(&mut prepared, away, &old_name);
    let mut short = prepared.clone();
    put(&mut short, 0, &between.encode()?[..area_of(&between, limit)?]);
    let mut rest = short.clone();
    put(&mut rest, SECTOR as u64, &encoded[SECTOR..area]);
    let mut last = rest.clone();
    put(&mut last, 0, &encoded[..SECTOR]);
    Ok(vec![prepared, short, rest, last])
}

/// Bytes of the header with its extensions.
fn area_of(header: &Header, limit: u64) -> Result<usize, FormatError> {
    let needed = header.extensions_end();
    if needed > limit {
        return Err(FormatError::HeaderDoesNotFit { needed, cluster_size: limit });
    }
    Ok(needed as usize)
}

fn put(block: &mut [u8], at: u64, bytes: &[u8]) {
    block[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
}

/// The first place for `name` that overlaps none of `taken`; 0 for no name at all.
fn find_place(from: u64, limit: u64, name: &[u8], taken: &[Range<u64>]) -> Option<u64> {
    if name.is_empty() {
        return Some(0);
    }
    let mut at = from;
    while let Some(in_the_way) =
        taken.iter().find(|range| at < range.end && range.start < at.saturating_add(name.len() as u64))
    {
        at = in_the_way.end.checked_next_multiple_of(8)?;
    }
    at.checked_add(name.len() as u64).filter(|&end| end <= limit).map(|_| at)
}

fn in_one_block(block: &[u8], encoded: &[u8]) -> Result<Vec<u8>, FormatError> {
    if encoded.len() > block.len() {
        let (needed, cluster_size) = (encoded.len() as u64, block.len() as u64);
        return Err(FormatError::HeaderDoesNotFit { needed, cluster_size });
    }
    let mut new = block.to_vec();
    put(&mut new, 0, encoded);
    Ok(new)
}

impl ImageHeader {
    /// Changes the header on disk, durably. What this opening knows of the header stays as it was: it is to be closed.
    /// The caller is alone.
    pub(crate) async fn rewrite(
        &self,
        worker: &Worker,
        change: impl FnOnce(&mut Header) -> Result<()>,
    ) -> Result<()> {
        let cluster = self.opened().geometry().cluster_size() as usize;
        let first_cluster = read_bytes(worker, self.files().file(), 0, cluster).await?;
        let wrong = |e: FormatError| match e {
            FormatError::HeaderDoesNotFit { .. } => {
                Error::new(ErrorKind::NoSpace, "No space left in the file header").on(self.files().path())
            }
            e => format_error(self.files().path(), &e),
        };
        let (old, _) = Header::parse(&first_cluster, Purpose::ReadWrite).map_err(wrong)?;
        let mut new = old.clone();
        change(&mut new)?;
        // Others' features that say nothing about the data once somebody who does not know them has changed it.
        let _ = new.clear_for_writing();
        if new == old {
            return Ok(());
        }
        self.change_in_steps(worker, OnFailure::Restore, |block| {
            let mut steps = steps(block, &old, new).map_err(wrong)?;
            steps.dedup();
            if steps.first().is_some_and(|first| first == block) {
                steps.remove(0);
            }
            Ok(steps)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zebu_qcow2::{HostOffset, NewHeader, Version};

    /// The meaning to a reader: everything but where the name lies and the names of the feature bits.
    fn meaning(block: &[u8]) -> Header {
        let (mut header, _) = Header::parse(block, Purpose::ReadWrite).unwrap();
        header.place_backing_name(0);
        header.drop_feature_table();
        header
    }

    fn header(version: Version, cluster_bits: u32, name: &str, format: Option<&str>) -> Header {
        let mut header =
            Header::new(&NewHeader::default().version(version).cluster_bits(cluster_bits)).unwrap();
        header.size = 1 << 20;
        header.l1_size = 1;
        header.l1_table_offset = HostOffset(3 << cluster_bits);
        header.refcount_table_offset = HostOffset(1 << cluster_bits);
        header.refcount_table_clusters = 1;
        header.set_backing_file(Some(name.as_bytes())).unwrap();
        header.set_backing_format(format.map(str::as_bytes)).unwrap();
        header
    }

    #[test]
    fn whatever_sectors_of_a_block_arrive_the_header_is_the_old_or_the_new_one() {
        let names = ["", "b", "base.qcow2", "directory/with-a-long-name/of-a-base-image.qcow2"];
        let long = "x".repeat(900);
        let names: Vec<&str> = names.into_iter().chain([long.as_str()]).collect();
        let mut changes = 0;
        for (version, new_version) in [
            (Version::V3, Version::V3),
            (Version::V2, Version::V2),
            (Version::V2, Version::V3),
            (Version::V3, Version::V2),
        ] {
            for cluster_bits in [12, 16] {
                for old_name in &names {
                    for new_name in &names {
                        for old_format in [None, Some("raw")] {
                            let old = header(version, cluster_bits, old_name, old_format);
                            let mut block = old.encode().unwrap();
                            block.resize(4096, 0);
                            let (old, _) = Header::parse(&block, Purpose::ReadWrite).unwrap();
                            let mut new = old.clone();
                            new.set_version(new_version).unwrap();
                            new.set_backing_file(Some(new_name.as_bytes())).unwrap();
                            let format = (!new_name.is_empty()).then_some(b"qcow2".as_slice());
                            new.set_backing_format(format).unwrap();
                            check(&block, &old, new);
                            changes += 1;
                        }
                    }
                }
            }
        }
        assert_eq!(changes, 4 * 2 * 25 * 2);
    }

    fn check(block: &[u8], old: &Header, new: Header) {
        let mut wanted = new.clone();
        wanted.place_backing_name(0);
        wanted.drop_feature_table();
        let before = meaning(block);
        let steps = steps(block, old, new.clone()).unwrap();
        let mut on_disk = block.to_vec();
        let count = steps.len();
        for (index, step) in steps.into_iter().enumerate() {
            let differing: Vec<usize> =
                (0..8).filter(|&s| on_disk[s * 512..][..512] != step[s * 512..][..512]).collect();
            for subset in 0u32..1 << differing.len() {
                let mut torn = on_disk.clone();
                for (bit, sector) in differing.iter().enumerate() {
                    if subset & (1 << bit) != 0 {
                        torn[sector * 512..][..512].copy_from_slice(&step[sector * 512..][..512]);
                    }
                }
                let seen = meaning(&torn);
                let is_last = index + 1 == count;
                assert!(
                    seen == before || is_last && seen == wanted,
                    "{old:?}\nto {new:?}\nstep {index}: {seen:?}"
                );
            }
            on_disk = step;
        }
        assert_eq!(meaning(&on_disk), wanted);
        let (after, _) = Header::parse(&on_disk, Purpose::ReadWrite).unwrap();
        assert_eq!(after.feature_table(), new.feature_table());
    }

    #[test]
    fn a_name_that_has_no_room_is_refused() {
        let old = header(Version::V3, 9, "", None);
        let mut block = old.encode().unwrap();
        block.resize(512, 0);
        let mut new = old.clone();
        new.set_backing_file(Some(&[b'x'; 600])).unwrap();
        assert!(matches!(steps(&block, &old, new), Err(FormatError::HeaderDoesNotFit { .. })));
    }
}
