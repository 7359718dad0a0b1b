//! Everything that each sector of a file may hold if the power failed now: all crash states at once.

use super::CopiedRuns;
use crate::content::Content;
use crate::disk::{Applied, DiskState, FileState, Image, SECTOR};
use crate::op::OpNumber;
use std::collections::{BTreeMap, HashMap};

const BYTES: usize = SECTOR as usize;

/// The possible contents of each sector of one file after a crash at one moment, each on its own account.
///
/// Sectors are independent of each other after a crash (see `docs/testing.md`), so that what holds for every choice
/// of these contents holds for every crash state, however many there are. Where operations in flight overlap within a
/// sector that neither writes whole, or a change of length is not durable, it says what one order of them would leave.
pub struct Possible {
    durable: Content,
    changes: Vec<Applied>,
    /// For each sector that is not certain: the change and its piece, oldest first.
    uncertain: HashMap<u64, Vec<(usize, usize)>, foldhash::fast::FixedState>,
}

impl Possible {
    pub(crate) fn of(disk: &DiskState, name: &str) -> Option<Self> {
        let file = disk.files.iter().find(|file| file.name == name)?;
        let changes = changes(disk, file);
        let mut uncertain: HashMap<u64, Vec<(usize, usize)>, _> = HashMap::default();
        for (index, change) in changes.iter().enumerate() {
            for (part, piece) in change.pieces.iter().enumerate() {
                if matches!(piece.image, Image::Reserve) {
                    continue;
                }
                for sector in piece.range.start / SECTOR..piece.range.end.div_ceil(SECTOR) {
                    uncertain.entry(sector).or_default().push((index, part));
                }
            }
        }
        Some(Self { durable: file.durable.clone(), changes, uncertain })
    }

    /// Calls `look` with each content that the sector may have, the surely durable one first; one may come twice.
    pub fn each(&self, sector: u64, mut look: impl FnMut(&[u8])) {
        let mut bytes = [0; BYTES];
        self.durable.read(sector * SECTOR, &mut bytes);
        look(&bytes);
        for &(change, part) in self.uncertain.get(&sector).into_iter().flatten() {
            let piece = &self.changes[change].pieces[part];
            match &piece.image {
                Image::Bytes { data, start } => {
                    let at = start + (sector * SECTOR - piece.range.start) as usize;
                    look(&data[at..at + BYTES]);
                }
                Image::Clear(_) => look(&[0; BYTES]),
                Image::Reserve => {}
            }
        }
    }

    /// Whether the sector may hold but one thing.
    pub fn is_certain(&self, sector: u64) -> bool {
        !self.uncertain.contains_key(&sector)
    }

    /// The sectors that may hold more than one thing, in no order.
    pub fn uncertain(&self) -> impl Iterator<Item = u64> + '_ {
        self.uncertain.keys().copied()
    }
}

/// The changes that are not surely durable, and those that the operations in flight would make.
fn changes(disk: &DiskState, file: &FileState) -> Vec<Applied> {
    let mut copied: BTreeMap<OpNumber, CopiedRuns> = BTreeMap::new();
    for (op, what) in &file.in_flight {
        if let Some(runs) = disk.source_bytes(what, &what.range()) {
            copied.insert(*op, runs);
        }
    }
    let order: Vec<OpNumber> = file.in_flight.keys().copied().collect();
    let unfinished = file.unfinished(&order, &copied);
    file.uncovered.iter().cloned().chain(unfinished).collect()
}
