//! A disk in memory: what the engine must show, byte for byte.

use std::ops::Range;

/// The required effect of a discard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiscardRule {
    /// Whole clusters read as zero afterwards.
    WholeClustersZero,
    /// Nothing: version 2 has no way to say that a cluster hides what the backing file holds.
    MayKeep,
}

/// The content of a disk.
#[derive(Debug, Clone)]
pub struct Model {
    bytes: Vec<u8>,
}

impl Model {
    /// A disk with this content.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes }
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes of a range, which lies on the disk.
    pub fn range(&self, offset: u64, len: u64) -> &[u8] {
        &self.bytes[span(offset, len)]
    }

    /// A write.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        self.bytes[span(offset, data.len() as u64)].copy_from_slice(data);
    }

    /// A write of zeroes.
    pub fn zero(&mut self, offset: u64, len: u64) {
        self.bytes[span(offset, len)].fill(0);
    }

    /// A new size; what is new reads as zero.
    pub fn resize(&mut self, size: u64) {
        self.bytes.resize(size as usize, 0);
    }

    /// Takes the blocks of one lane from a model that a queue kept of its own.
    pub fn adopt_lane(&mut self, other: &Model, index: u64, count: u64) {
        let block = crate::stream::LANE_BLOCK as usize;
        let lanes = self.bytes.chunks_mut(block).zip(other.bytes.chunks(block)).zip(0..);
        for ((own, theirs), number) in lanes {
            if number % count == index {
                own.copy_from_slice(theirs);
            }
        }
    }

    /// After a discard: takes what was `read` from the range, if it is what a discard may leave. Whole clusters are
    /// zero if `rule` says so; any other byte is what it was, or zero.
    pub fn adopt_discard(
        &mut self,
        offset: u64,
        read: &[u8],
        cluster: u64,
        rule: DiscardRule,
    ) -> Result<(), String> {
        let whole = offset.next_multiple_of(cluster)..(offset + read.len() as u64) / cluster * cluster;
        for (at, (new, old)) in
            (offset..).zip(read.iter().zip(&mut self.bytes[span(offset, read.len() as u64)]))
        {
            if *new != 0 && rule == DiscardRule::WholeClustersZero && whole.contains(&at) {
                return Err(format!("offset {at}: {new:#04x} in a cluster that was discarded as a whole"));
            }
            if *new != 0 && new != old {
                return Err(format!("offset {at}: {new:#04x} after a discard, neither {old:#04x} nor zero"));
            }
            *old = *new;
        }
        Ok(())
    }
}

fn span(offset: u64, len: u64) -> Range<usize> {
    offset as usize..(offset + len) as usize
}

/// Where two equally long pieces first differ, in words; `offset` is that of their first byte.
pub fn difference(offset: u64, expected: &[u8], found: &[u8]) -> Option<String> {
    if expected.len() != found.len() {
        return Some(format!("{} bytes expected, {} found", expected.len(), found.len()));
    }
    let at = expected.iter().zip(found).position(|(e, f)| e != f)?;
    let count = expected.iter().zip(found).filter(|(e, f)| e != f).count();
    Some(format!(
        "offset {}: {:#04x} expected, {:#04x} found ({count} of {} bytes differ)",
        offset + at as u64,
        expected[at],
        found[at],
        expected.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_discard_may_zero_or_keep_but_not_change() {
        let disk = || Model::new(vec![7; 8]);
        assert!(disk().adopt_discard(1, &[7, 0, 0, 0, 0, 7], 2, DiscardRule::WholeClustersZero).is_ok());
        assert!(
            disk().adopt_discard(1, &[7, 0, 7, 0, 0, 7], 2, DiscardRule::WholeClustersZero).is_err(),
            "a whole cluster kept"
        );
        assert!(disk().adopt_discard(1, &[7, 0, 7, 0, 0, 7], 2, DiscardRule::MayKeep).is_ok());
        assert!(
            disk().adopt_discard(1, &[7, 0, 0, 0, 0, 8], 2, DiscardRule::MayKeep).is_err(),
            "other content"
        );
        let mut model = disk();
        model.adopt_discard(2, &[0, 0], 2, DiscardRule::WholeClustersZero).expect("legal");
        assert_eq!(model.bytes(), [7, 7, 0, 0, 7, 7, 7, 7]);
    }

    #[test]
    fn difference_names_the_first_byte() {
        assert_eq!(difference(512, &[1, 2, 3], &[1, 2, 3]), None);
        let text = difference(512, &[1, 2, 3], &[1, 9, 9]).expect("differs");
        assert!(text.starts_with("offset 513: 0x02 expected, 0x09 found (2 of 3"), "{text}");
    }
}
