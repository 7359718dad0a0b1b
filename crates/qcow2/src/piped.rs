//! New images that are written from their first byte to their last, as into a pipe. Which clusters hold data is known before, so that
//! all tables come first.
//!
//! ```text
//! header | L1 table | refcount table | refcount blocks | L2 tables | clusters in the order of the disk
//! ```

use crate::cluster_set::ClusterSet;
use crate::geometry::Geometry;
use crate::header::Header;
use crate::l1::L1Entry;
use crate::l2::L2Entry;
use crate::limits;
use crate::offsets::GuestOffset;
use crate::refcount::{self, RefTableEntry};
use crate::stream::StreamError;

/// The part of the file that comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    Front,
    RefcountBlock(u64),
    /// The L2 table of this entry of the L1 table.
    Table(u64),
    Clusters,
}

/// An image that is being written.
#[derive(Debug)]
pub struct PipedImage {
    header: Header,
    geometry: Geometry,
    held: ClusterSet,
    l1: Vec<L1Entry>,
    /// The first cluster of the file that is a refcount block, and how many there are.
    blocks: (u64, u64),
    /// Clusters of the file.
    total: u64,
    /// The cluster of the file that the next guest cluster with data has in the tables.
    place: u64,
    next: Next,
    /// The next guest cluster at least.
    cluster: u64,
    /// Guest clusters of the disk.
    end: u64,
}

impl PipedImage {
    /// Entries of the L1 table of an image with this header.
    ///
    /// # Errors
    /// [`StreamError::TooLarge`]: more than the format allows.
    pub fn l1_entries(header: &Header) -> Result<u64, StreamError> {
        let entries = header.geometry().l1_entries_for(header.virtual_size());
        entries.filter(|entries| *entries <= limits::MAX_L1_ENTRIES).ok_or(StreamError::TooLarge)
    }

    /// An image with this header, whose tables have no places yet, of a disk that has data in these clusters. None of them lies past
    /// its end.
    ///
    /// # Errors
    /// [`StreamError::TooLarge`]: the file would be longer than its tables can say.
    pub fn new(mut header: Header, held: ClusterSet) -> Result<Self, StreamError> {
        let geometry = header.geometry();
        let size = header.virtual_size();
        let end = geometry.host_clusters(size);
        let entries = Self::l1_entries(&header)?;
        let mut l1 = vec![L1Entry::UNALLOCATED; usize::try_from(entries).map_err(|_| StreamError::TooLarge)?];
        let mut from = 0;
        let tables = std::iter::from_fn(|| {
            let number = held.within(from..end).next()?.checked_div(geometry.l2_entries())?;
            from = number.saturating_add(1).saturating_mul(geometry.l2_entries());
            Some(number)
        });
        let tables: Vec<u64> = tables.collect();
        let l1_clusters = geometry.host_clusters(entries.saturating_mul(8)).max(1);
        let others =
            (tables.len() as u64).saturating_add(held.count()).saturating_add(l1_clusters).saturating_add(1);
        let (mut blocks, mut table) = (0u64, 0u64);
        // Each round counts what the last one added, which is less every time.
        let total = loop {
            let total = others.saturating_add(blocks).saturating_add(table);
            let all = total.div_ceil(geometry.refcount_entries_per_block().max(1));
            let next = (all, all.div_ceil(geometry.reftable_entries_per_cluster().max(1)));
            if next == (blocks, table) {
                break total;
            }
            (blocks, table) = next;
        };
        let at = |cluster: u64| {
            let offset = geometry.cluster_offset(cluster).filter(|at| at.0 < limits::HOST_OFFSET_END);
            offset.ok_or(StreamError::TooLarge)
        };
        at(total)?;
        if table.saturating_mul(geometry.cluster_size()) > limits::MAX_REFTABLE_SIZE {
            return Err(StreamError::TooLarge);
        }
        header.l1_table_offset = at(1)?;
        header.l1_size = u32::try_from(entries).map_err(|_| StreamError::TooLarge)?;
        let table_at = l1_clusters.saturating_add(1);
        header.refcount_table_offset = at(table_at)?;
        header.refcount_table_clusters = u32::try_from(table).map_err(|_| StreamError::TooLarge)?;
        let blocks_at = table_at.saturating_add(table);
        let tables_at = blocks_at.saturating_add(blocks);
        for (place, number) in (tables_at..).zip(&tables) {
            if let Some(entry) = l1.get_mut(*number as usize) {
                *entry = L1Entry::new(at(place)?, true);
            }
        }
        let place = tables_at.saturating_add(tables.len() as u64);
        let blocks = (blocks_at, blocks);
        Ok(Self { header, geometry, held, l1, blocks, total, place, next: Next::Front, cluster: 0, end })
    }

    /// Bytes of the whole file.
    pub fn file_size(&self) -> u64 {
        self.total.saturating_mul(self.geometry.cluster_size())
    }

    /// The next bytes before the first cluster; `None` if clusters come next.
    ///
    /// # Errors
    /// [`StreamError::Header`].
    pub fn tables(&mut self) -> Result<Option<Vec<u8>>, StreamError> {
        let (bytes, next) = match self.next {
            Next::Front => (self.front()?, Next::RefcountBlock(0)),
            Next::RefcountBlock(number) if number < self.blocks.1 => {
                (self.refcount_block(number)?, Next::RefcountBlock(number.saturating_add(1)))
            }
            Next::RefcountBlock(_) => (Vec::new(), Next::Table(0)),
            Next::Table(from) => {
                let rest = self.l1.iter().enumerate().skip(from as usize);
                match rest
                    .map(|(number, entry)| (number as u64, entry))
                    .find(|(_, entry)| entry.table().is_some())
                {
                    Some((number, _)) => (self.l2_table(number)?, Next::Table(number.saturating_add(1))),
                    None => (Vec::new(), Next::Clusters),
                }
            }
            Next::Clusters => return Ok(None),
        };
        self.next = next;
        Ok(Some(bytes))
    }

    /// Begins a guest cluster. All before it came, or were left out by [`Self::zeroes`]. True: its bytes, a whole cluster, come next in
    /// the file. False: it was said to hold none.
    ///
    /// # Errors
    /// [`StreamError::OutOfOrder`].
    pub fn begin(&mut self, cluster: u64) -> Result<bool, StreamError> {
        let is_in_order = cluster >= self.cluster && cluster < self.end;
        let is_next = is_in_order && self.held.within(self.cluster..cluster).next().is_none();
        if self.next != Next::Clusters || !is_next {
            return Err(StreamError::OutOfOrder);
        }
        self.cluster = cluster.saturating_add(1);
        Ok(self.held.within(cluster..self.cluster).next().is_some())
    }

    /// Adds zeroes for the clusters before `until` that hold data and did not come, up to a MiB of them; true if that is all.
    pub fn zeroes(&mut self, until: u64, out: &mut Vec<u8>) -> bool {
        const MOST: u64 = 1 << 20;
        let size = self.geometry.cluster_size();
        let until = until.min(self.end);
        let mut held = self.held.within(self.cluster..until);
        let added = held.by_ref().take(MOST.checked_div(size).unwrap_or(1).max(1) as usize).count() as u64;
        let next = held.next();
        pad(out, added.saturating_mul(size));
        self.cluster = self.cluster.max(next.unwrap_or(until));
        next.is_none()
    }

    fn front(&self) -> Result<Vec<u8>, StreamError> {
        let size = self.geometry.cluster_size() as usize;
        let mut bytes = self.header.encode()?;
        bytes.resize(size, 0);
        bytes.extend(self.l1.iter().flat_map(|entry| entry.0.to_be_bytes()));
        bytes.resize(self.header.refcount_table_offset.0 as usize, 0);
        let (first, count) = self.blocks;
        for block in first..first.saturating_add(count) {
            let at = self.geometry.cluster_offset(block).ok_or(StreamError::TooLarge)?;
            bytes.extend(RefTableEntry::new(at).0.to_be_bytes());
        }
        bytes.resize((first as usize).saturating_mul(size), 0);
        Ok(bytes)
    }

    fn refcount_block(&self, number: u64) -> Result<Vec<u8>, StreamError> {
        let per_block = self.geometry.refcount_entries_per_block();
        let first = number.saturating_mul(per_block);
        let count = self.total.saturating_sub(first).min(per_block);
        let mut block = vec![0; self.geometry.cluster_size() as usize];
        for index in 0..count as usize {
            let set = refcount::set(&mut block, index, self.geometry.refcount_order, 1);
            set.map_err(|_| StreamError::TooLarge)?;
        }
        Ok(block)
    }

    fn l2_table(&mut self, number: u64) -> Result<Vec<u8>, StreamError> {
        let mut table = vec![0; self.geometry.cluster_size() as usize];
        let first = number.saturating_mul(self.geometry.l2_entries());
        let range = first..first.saturating_add(self.geometry.l2_entries()).min(self.end);
        for cluster in self.held.within(range) {
            let host = self.geometry.cluster_offset(self.place).ok_or(StreamError::TooLarge)?;
            self.place = self.place.saturating_add(1);
            let entry = if self.geometry.extended_l2 {
                L2Entry::subclusters(Some(host), u32::MAX, 0)
            } else {
                L2Entry::data(host, &self.geometry)
            };
            let guest = GuestOffset(cluster.saturating_mul(self.geometry.cluster_size()));
            let index = self.geometry.l2_index(guest) as usize;
            entry.write(&mut table, index, &self.geometry).map_err(|_| StreamError::OutOfOrder)?;
        }
        Ok(table)
    }
}

/// Adds zeroes.
fn pad(out: &mut Vec<u8>, zeroes: u64) {
    out.resize(out.len().saturating_add(zeroes as usize), 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::tests::{header, verify};
    use proptest::prelude::*;

    fn content(cluster: u64, size: u64) -> Vec<u8> {
        vec![(cluster % 251 + 1) as u8; size as usize]
    }

    /// Writes a disk of whose clusters `held` were said to have data, and `given` come.
    fn piped(bits: u32, order: u32, clusters: u64, held: &[u64], given: &[u64]) -> Vec<u8> {
        let mut set = ClusterSet::default();
        for cluster in held {
            set.insert(*cluster..*cluster + 1);
        }
        let mut image = PipedImage::new(header(clusters << bits, bits, order), set).unwrap();
        let mut file = Vec::new();
        while let Some(bytes) = image.tables().unwrap() {
            file.extend(bytes);
        }
        for cluster in given {
            while !image.zeroes(*cluster, &mut file) {}
            assert!(image.begin(*cluster).unwrap());
            file.extend(content(*cluster, 1 << bits));
        }
        while !image.zeroes(u64::MAX, &mut file) {}
        assert_eq!(file.len() as u64, image.file_size());
        file
    }

    #[test]
    fn clusters_that_did_not_come_are_zero() {
        let file = piped(9, 4, 5000, &[0, 1, 70, 71, 4999], &[1, 4999]);
        verify(
            &file,
            5000,
            |cluster| [0, 1, 70, 71, 4999].contains(&cluster),
            |cluster| match cluster {
                1 | 4999 => content(cluster, 512),
                _ => vec![0; 512],
            },
        );
        let file = piped(12, 4, 3000, &(0..3000).collect::<Vec<_>>(), &[]);
        verify(&file, 3000, |_| true, |_| vec![0; 4096]);
        assert_eq!(piped(16, 4, 0, &[], &[]).len() % 65536, 0);
    }

    #[test]
    fn clusters_come_in_their_order() {
        let mut set = ClusterSet::default();
        set.insert(3..5);
        let mut image = PipedImage::new(header(1 << 20, 16, 4), set).unwrap();
        assert_eq!(image.begin(3), Err(StreamError::OutOfOrder));
        while image.tables().unwrap().is_some() {}
        assert_eq!(image.begin(0), Ok(false));
        assert_eq!(image.begin(4), Err(StreamError::OutOfOrder));
        let mut out = Vec::new();
        assert!(image.zeroes(4, &mut out));
        assert_eq!((image.begin(4), out.len()), (Ok(true), 65536));
        assert_eq!(
            (image.begin(4), image.begin(16)),
            (Err(StreamError::OutOfOrder), Err(StreamError::OutOfOrder))
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_set_of_clusters_is_an_image(
            bits in prop::sample::select(vec![9u32, 10, 12]),
            order in 0u32..7,
            held in prop::collection::btree_set(0u64..4000, 0..600),
        ) {
            let held: Vec<u64> = held.into_iter().collect();
            let file = piped(bits, order, 4000, &held, &held);
            verify(&file, 4000, |cluster| held.binary_search(&cluster).is_ok(), |cluster| content(cluster, 1 << bits));
        }
    }
}
