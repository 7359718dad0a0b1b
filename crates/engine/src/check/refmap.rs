//! How often each host cluster is referenced: counts that cost two bits where a cluster is used once.
//!
//! The map is sparse (chunks of [`CHUNK`] clusters exist only where something is referenced), exact for any count
//! (a chunk is widened when a count in it outgrows it), and bounded: when it would outgrow its budget it gives up
//! the highest clusters, says so by [`RefMap::end`], and the caller counts those in another pass.

use std::collections::HashMap;

/// Clusters in a chunk.
const CHUNK: usize = 4096;
const CHUNK_BITS: u32 = CHUNK.trailing_zeros();
/// Bytes that the directory needs for a chunk, about.
const CHUNK_OVERHEAD: usize = 48;

/// Facts about one cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Cell {
    /// References to the cluster.
    pub(super) count: u64,
    /// An active L1 or L2 entry with the COPIED flag set refers to it.
    pub(super) copied: bool,
    /// An active L1 or L2 entry with the COPIED flag clear refers to it.
    pub(super) shared: bool,
}

impl Cell {
    /// Whether nothing was ever noted for the cluster.
    pub(super) fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Whether some active entry's COPIED flag contradicts a refcount of `refcount`.
    pub(super) fn contradicts(self, refcount: u64) -> bool {
        if refcount == 1 { self.shared } else { self.copied }
    }
}

/// Counts of the clusters of one chunk. In the wider forms the two lowest bits are the flags.
enum Chunk {
    /// 2 bits: 0 nothing, 1 one reference, 2 one with COPIED, 3 one without COPIED.
    Narrow(Box<[u8; CHUNK / 4]>),
    Byte(Box<[u8; CHUNK]>),
    Short(Box<[u16; CHUNK]>),
    Long(Box<[u64; CHUNK]>),
}

const COPIED: u64 = 1;
const SHARED: u64 = 2;
const FLAG_BITS: u32 = 2;
const MAX_COUNT: u64 = u64::MAX >> FLAG_BITS;

fn pack(cell: Cell) -> u64 {
    let flags = if cell.copied { COPIED } else { 0 } | if cell.shared { SHARED } else { 0 };
    cell.count.min(MAX_COUNT) << FLAG_BITS | flags
}

fn unpack(bits: u64) -> Cell {
    Cell { count: bits >> FLAG_BITS, copied: bits & COPIED != 0, shared: bits & SHARED != 0 }
}

fn narrow_code(cell: Cell) -> Option<u8> {
    match (cell.count, cell.copied, cell.shared) {
        (0, false, false) => Some(0),
        (1, false, false) => Some(1),
        (1, true, false) => Some(2),
        (1, false, true) => Some(3),
        _ => None,
    }
}

fn boxed<T: Copy + Default, const N: usize>() -> Box<[T; N]> {
    match vec![T::default(); N].into_boxed_slice().try_into() {
        Ok(array) => array,
        Err(_) => unreachable!("a vector of N elements is an array of N"),
    }
}

impl Chunk {
    fn new() -> Self {
        Self::Narrow(boxed())
    }

    fn bytes(&self) -> usize {
        CHUNK_OVERHEAD
            + match self {
                Self::Narrow(_) => CHUNK / 4,
                Self::Byte(_) => CHUNK,
                Self::Short(_) => CHUNK * 2,
                Self::Long(_) => CHUNK * 8,
            }
    }

    #[inline]
    fn get(&self, index: usize) -> Cell {
        match self {
            Self::Narrow(cells) => match cells[index / 4] >> (index % 4 * 2) & 3 {
                0 => Cell::default(),
                1 => Cell { count: 1, copied: false, shared: false },
                2 => Cell { count: 1, copied: true, shared: false },
                _ => Cell { count: 1, copied: false, shared: true },
            },
            Self::Byte(cells) => unpack(cells[index].into()),
            Self::Short(cells) => unpack(cells[index].into()),
            Self::Long(cells) => unpack(cells[index]),
        }
    }

    /// Stores `cell`, or returns false if the chunk is too narrow for it.
    #[inline]
    fn put(&mut self, index: usize, cell: Cell) -> bool {
        match self {
            Self::Narrow(cells) => {
                let Some(code) = narrow_code(cell) else { return false };
                let shift = index % 4 * 2;
                let byte = &mut cells[index / 4];
                *byte = *byte & !(3 << shift) | code << shift;
            }
            Self::Byte(cells) => {
                let Ok(packed) = pack(cell).try_into() else { return false };
                cells[index] = packed;
            }
            Self::Short(cells) => {
                let Ok(packed) = pack(cell).try_into() else { return false };
                cells[index] = packed;
            }
            Self::Long(cells) => cells[index] = pack(cell),
        }
        true
    }

    /// The next wider form with the same counts.
    fn widened(&self) -> Self {
        let mut wider = match self {
            Self::Narrow(_) => Self::Byte(boxed()),
            Self::Byte(_) => Self::Short(boxed()),
            Self::Short(_) | Self::Long(_) => Self::Long(boxed()),
        };
        for index in 0..CHUNK {
            let cell = self.get(index);
            if !cell.is_empty() {
                wider.put(index, cell);
            }
        }
        wider
    }
}

/// Reference counts of the host clusters in `start..end`.
pub(super) struct RefMap {
    /// The place in `chunks` of each chunk that exists, by its number.
    places: HashMap<u64, usize, foldhash::fast::FixedState>,
    /// The chunks with their numbers.
    chunks: Vec<(u64, Chunk)>,
    /// Number and place of the chunk used last: neighbours follow each other.
    last: (u64, usize),
    start: u64,
    end: u64,
    /// Bytes in use, and the most that may be.
    bytes: usize,
    budget: usize,
    /// One past the highest cluster below `end` that was ever noted.
    used_end: u64,
}

impl RefMap {
    /// An empty map of all clusters from `start` on that takes at most about `budget` bytes.
    pub(super) fn new(start: u64, budget: usize) -> Self {
        Self {
            places: HashMap::default(),
            chunks: Vec::new(),
            last: (u64::MAX, 0),
            start,
            end: u64::MAX,
            bytes: 0,
            budget: budget.max(16 * (CHUNK * 8 + CHUNK_OVERHEAD)),
            used_end: start,
        }
    }

    /// First cluster that the map does not hold any more; `u64::MAX` if it holds all.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    /// First cluster that the map holds.
    pub(super) fn start(&self) -> u64 {
        self.start
    }

    /// One past the highest cluster with a reference, within the map.
    pub(super) fn used_end(&self) -> u64 {
        self.used_end.min(self.end)
    }

    /// Bytes of memory in use, about.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Adds `count` references to `cluster`, and notes the COPIED flags of the active entries among them.
    /// Clusters outside the map are ignored.
    #[inline]
    pub(super) fn add(&mut self, cluster: u64, count: u64, copied: bool, shared: bool) {
        self.change(cluster, |cell| Cell {
            count: cell.count.saturating_add(count),
            copied: cell.copied | copied,
            shared: cell.shared | shared,
        });
    }

    /// Replaces the count of a cluster, keeps what is known of flags.
    pub(super) fn set_count(&mut self, cluster: u64, count: u64) {
        self.change(cluster, |cell| Cell { count, ..cell });
    }

    #[inline]
    fn change(&mut self, cluster: u64, change: impl FnOnce(Cell) -> Cell) {
        if cluster < self.start || cluster >= self.end {
            return;
        }
        let number = cluster >> CHUNK_BITS;
        if self.last.0 != number {
            self.last = (number, self.place(number));
        }
        let chunk = &mut self.chunks[self.last.1].1;
        let index = cluster as usize % CHUNK;
        let cell = change(chunk.get(index));
        while !chunk.put(index, cell) {
            let wider = chunk.widened();
            self.bytes = self.bytes + wider.bytes() - chunk.bytes();
            *chunk = wider;
        }
        self.used_end = self.used_end.max(cluster + 1);
        if self.bytes > self.budget {
            self.give_up_highest();
        }
    }

    /// The place of a chunk, which is made if there is none yet.
    fn place(&mut self, number: u64) -> usize {
        *self.places.entry(number).or_insert_with(|| {
            let chunk = Chunk::new();
            self.bytes += chunk.bytes();
            self.chunks.push((number, chunk));
            self.chunks.len() - 1
        })
    }

    fn chunk(&self, number: u64) -> Option<&Chunk> {
        Some(&self.chunks[*self.places.get(&number)?].1)
    }

    /// Drops the highest chunks until three quarters of the budget are in use (so that it is not done for each
    /// new chunk), but always keeps the first one.
    fn give_up_highest(&mut self) {
        let mut numbers: Vec<u64> = self.places.keys().copied().collect();
        numbers.sort_unstable();
        while self.bytes > self.budget / 4 * 3
            && numbers.len() > 1
            && let Some(number) = numbers.pop()
        {
            if let Some(place) = self.places.remove(&number) {
                let (_, chunk) = self.chunks.swap_remove(place);
                self.bytes -= chunk.bytes();
                if let Some((moved, _)) = self.chunks.get(place) {
                    self.places.insert(*moved, place);
                }
            }
            self.end = number << CHUNK_BITS;
        }
        self.last = (u64::MAX, 0);
    }

    /// Facts about `cluster`; none for clusters outside the map.
    #[inline]
    pub(super) fn get(&self, cluster: u64) -> Cell {
        if cluster < self.start || cluster >= self.end {
            return Cell::default();
        }
        self.chunk(cluster >> CHUNK_BITS)
            .map_or_else(Cell::default, |chunk| chunk.get(cluster as usize % CHUNK))
    }

    /// Calls `f` with each of the clusters `from..to` that the map holds, noted or not, and what is known of it.
    #[inline]
    pub(super) fn visit(&self, from: u64, to: u64, mut f: impl FnMut(u64, Cell)) {
        let (mut at, to) = (from.max(self.start), to.min(self.end));
        while at < to {
            let number = at >> CHUNK_BITS;
            let stop = to.min((number + 1) << CHUNK_BITS);
            if let Some(chunk) = self.chunk(number) {
                for cluster in at..stop {
                    f(cluster, chunk.get(cluster as usize % CHUNK));
                }
            } else {
                for cluster in at..stop {
                    f(cluster, Cell::default());
                }
            }
            at = stop;
        }
    }

    /// Whether any of the clusters `from..to` has been noted. May say true where none is; false is certain.
    pub(super) fn may_have(&self, from: u64, to: u64) -> bool {
        let (from, to) = (from.max(self.start), to.min(self.end));
        if from >= to {
            return false;
        }
        let (first, last) = (from >> CHUNK_BITS, (to - 1) >> CHUNK_BITS);
        if last - first < self.places.len() as u64 {
            (first..=last).any(|number| self.places.contains_key(&number))
        } else {
            self.places.keys().any(|number| (first..=last).contains(number))
        }
    }

    /// The groups of `1 << group_bits` clusters in which anything was noted, ascending: their indices.
    pub(super) fn groups(&self, group_bits: u32) -> Vec<u64> {
        let mut groups = Vec::new();
        for number in self.places.keys() {
            if group_bits >= CHUNK_BITS {
                groups.push(number >> (group_bits - CHUNK_BITS));
            } else {
                let first = number << (CHUNK_BITS - group_bits);
                groups.extend(first..first + (1 << (CHUNK_BITS - group_bits)));
            }
        }
        groups.sort_unstable();
        groups.dedup();
        groups
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Step {
        Add { cluster: u64, count: u64, copied: bool, shared: bool },
        Set { cluster: u64, count: u64 },
    }

    fn step() -> impl Strategy<Value = Step> {
        let cluster = prop_oneof![0u64..20, 4090u64..4100, (1u64 << 50)..(1 << 50) + 3];
        let count = prop_oneof![4 => 0u64..3, 1 => 60u64..70, 1 => 16380u64..16390, 1 => 0u64..1 << 40];
        prop_oneof![
            (cluster.clone(), count.clone(), any::<bool>(), any::<bool>())
                .prop_map(|(cluster, count, copied, shared)| Step::Add { cluster, count, copied, shared }),
            (cluster, count).prop_map(|(cluster, count)| Step::Set { cluster, count }),
        ]
    }

    proptest! {
        #[test]
        fn behaves_as_an_ordinary_map(steps in proptest::collection::vec(step(), 0..200)) {
            let mut map = RefMap::new(0, usize::MAX);
            let mut model: HashMap<u64, Cell> = HashMap::new();
            for step in steps {
                match step {
                    Step::Add { cluster, count, copied, shared } => {
                        map.add(cluster, count, copied, shared);
                        let cell = model.entry(cluster).or_default();
                        cell.count += count;
                        cell.copied |= copied;
                        cell.shared |= shared;
                    }
                    Step::Set { cluster, count } => {
                        map.set_count(cluster, count);
                        model.entry(cluster).or_default().count = count;
                    }
                }
            }
            for (cluster, cell) in &model {
                prop_assert_eq!(map.get(*cluster), *cell);
                prop_assert!(map.may_have(*cluster, *cluster + 1));
            }
            prop_assert_eq!(map.used_end(), model.keys().max().map_or(0, |cluster| cluster + 1));
        }
    }

    #[test]
    fn one_reference_costs_two_bits() {
        let mut map = RefMap::new(0, usize::MAX);
        for cluster in 0..1 << 20 {
            map.add(cluster, 1, cluster % 2 == 0, cluster % 2 == 1);
        }
        assert!(map.bytes() < (1 << 18) + (1 << 14), "{}", map.bytes());
    }

    #[test]
    fn sparse_clusters_cost_a_chunk() {
        let mut map = RefMap::new(0, usize::MAX);
        map.add(u64::MAX - 1, 1, false, false);
        map.add(5, 1, false, false);
        assert!(map.bytes() < 4096);
        assert_eq!(map.get(u64::MAX - 1).count, 1);
        assert_eq!(map.groups(15), vec![0, (u64::MAX - 1) >> 15]);
    }

    #[test]
    fn a_full_map_keeps_the_low_clusters() {
        let budget = 1 << 20;
        let mut map = RefMap::new(7, budget);
        for number in (0..10_000u64).rev() {
            map.add(number * CHUNK as u64 + 9, 1, false, false);
            assert!(map.bytes() <= budget);
        }
        assert!(map.end() < u64::MAX && map.end() > CHUNK as u64 * 100);
        assert_eq!(map.get(9).count, 1);
        assert_eq!(map.get(map.end() + 9).count, 0);
        let end = map.end();
        for number in 0..10_000u64 {
            let cluster = number * CHUNK as u64 + 9;
            assert_eq!(map.get(cluster).count, u64::from(cluster < end));
        }
        map.add(3, 1, false, false);
        assert_eq!(map.get(3).count, 0, "below the start");
    }

    #[test]
    fn groups_of_all_sizes() {
        let mut map = RefMap::new(0, usize::MAX);
        map.add(CHUNK as u64 * 3, 1, false, false);
        map.add(CHUNK as u64 * 5, 1, false, false);
        assert_eq!(map.groups(CHUNK_BITS), vec![3, 5]);
        assert_eq!(map.groups(CHUNK_BITS + 1), vec![1, 2]);
        assert_eq!(map.groups(CHUNK_BITS - 1), vec![6, 7, 10, 11]);
        assert!(!map.may_have(0, CHUNK as u64 * 3));
        assert!(!map.may_have(CHUNK as u64 * 4, CHUNK as u64 * 5));
        assert!(map.may_have(0, u64::MAX));
    }

    #[test]
    fn contradictions() {
        let normal = Cell { count: 1, copied: true, shared: false };
        assert!(!normal.contradicts(1) && normal.contradicts(2) && normal.contradicts(0));
        let shared = Cell { count: 2, copied: false, shared: true };
        assert!(!shared.contradicts(2) && shared.contradicts(1));
        assert!(!Cell::default().contradicts(1) && !Cell::default().contradicts(5));
    }
}
