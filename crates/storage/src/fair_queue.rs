//! Places for work on several disks, of which none gets all.
//!
//! A disk may stand still. What is asked of it keeps its places then, and work on other disks must find some.
//! So a disk may have as many places as are left: alone it has half of them, beside one that stands still a quarter, and so on.

use crate::file::File;
use crate::file_types::{FileId, FileKind};
use foldhash::HashMap;
use std::collections::VecDeque;

/// The disk below a file, as far as files of one stand still together: a file system, or a device.
pub(crate) fn disk_of(file: &File) -> FileId {
    match file.kind() {
        FileKind::Regular => FileId { ino: 0, ..file.id() },
        FileKind::BlockDevice | FileKind::Simulated | FileKind::Foreign => file.id(),
    }
}

/// The disk of work without a file.
pub(crate) const NO_DISK: FileId = FileId { dev: 0, ino: 0 };

/// Places, and work that waits for one.
#[derive(Debug)]
pub(crate) struct FairQueue<T> {
    places: usize,
    taken: usize,
    /// The places of each disk that has some.
    of: HashMap<FileId, usize>,
    /// Disks with work that waits. The first one's turn is next.
    waiting: VecDeque<(FileId, VecDeque<T>)>,
}

impl<T> FairQueue<T> {
    pub(crate) fn new(places: usize) -> Self {
        Self { places, taken: 0, of: HashMap::default(), waiting: VecDeque::new() }
    }

    /// Places that are taken.
    #[cfg(any(test, feature = "io-uring"))]
    pub(crate) fn taken(&self) -> usize {
        self.taken
    }

    /// Work that waits.
    #[cfg(any(test, feature = "io-uring"))]
    pub(crate) fn len(&self) -> usize {
        self.waiting.iter().map(|(_, queue)| queue.len()).sum()
    }

    fn has_place(&self, disk: FileId) -> bool {
        let free = self.places - self.taken;
        // Where more than half are free, nobody has as many.
        self.taken < free || free > 0 && self.of.get(&disk).is_none_or(|own| *own < free)
    }

    /// Takes a place for work on a disk, if it may have one more.
    pub(crate) fn enter(&mut self, disk: FileId) -> bool {
        if !self.has_place(disk) {
            return false;
        }
        self.taken += 1;
        *self.of.entry(disk).or_default() += 1;
        true
    }

    /// Gives a place back.
    pub(crate) fn leave(&mut self, disk: FileId) {
        self.taken -= 1;
        if let Some(own) = self.of.get_mut(&disk) {
            *own -= 1;
            if *own == 0 {
                self.of.remove(&disk);
            }
        }
    }

    /// Has work wait for a place.
    pub(crate) fn wait(&mut self, disk: FileId, work: T) {
        match self.waiting.iter_mut().find(|(other, _)| *other == disk) {
            Some((_, queue)) => queue.push_back(work),
            None => self.waiting.push_back((disk, VecDeque::from([work]))),
        }
    }

    /// Takes the next work that waits and may have a place: the disks take turns. The place is not taken yet.
    pub(crate) fn next(&mut self) -> Option<(FileId, T)> {
        let at = (0..self.waiting.len()).find(|at| self.has_place(self.waiting[*at].0))?;
        let (disk, mut queue) = self.waiting.remove(at)?;
        let work = queue.pop_front()?;
        if !queue.is_empty() {
            self.waiting.push_back((disk, queue));
        }
        Some((disk, work))
    }

    /// Forgets all work that waits.
    #[cfg(any(test, feature = "io-uring"))]
    pub(crate) fn clear(&mut self) {
        self.waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(number: u64) -> FileId {
        FileId { dev: number, ino: 0 }
    }

    fn fill(queue: &mut FairQueue<u64>, number: u64) -> usize {
        std::iter::repeat_with(|| queue.enter(disk(number))).take_while(|entered| *entered).count()
    }

    #[test]
    fn disks_that_stand_still_leave_places_to_others() {
        let mut queue = FairQueue::new(510);
        assert_eq!(fill(&mut queue, 1), 255, "one alone has half");
        assert_eq!(fill(&mut queue, 2), 128);
        assert_eq!(fill(&mut queue, 3), 64);
        assert!(!queue.enter(disk(1)) && !queue.enter(disk(2)));
        // A fourth one goes on, as slowly as it may be.
        for _ in 0..1000 {
            assert!(queue.enter(disk(4)));
            queue.leave(disk(4));
        }
        assert_eq!(queue.taken(), 447);
        (0..255).for_each(|_| queue.leave(disk(1)));
        assert!(queue.enter(disk(2)));
    }

    #[test]
    fn disks_take_turns_and_nothing_is_overtaken_within_one() {
        let mut queue = FairQueue::new(4);
        assert_eq!(fill(&mut queue, 1), 2);
        for work in [10, 11, 12] {
            queue.wait(disk(1), work);
        }
        assert_eq!(queue.next(), None);
        queue.wait(disk(2), 20);
        queue.wait(disk(2), 21);
        assert_eq!((queue.len(), queue.next()), (5, Some((disk(2), 20))));
        assert!(queue.enter(disk(2)));
        assert_eq!(queue.next(), None, "what is left is for a third one");
        queue.leave(disk(1));
        queue.leave(disk(1));
        let order: Vec<u64> = std::iter::from_fn(|| queue.next()).map(|(_, work)| work).collect();
        assert_eq!(order, [10, 21, 11, 12]);
        queue.wait(disk(3), 30);
        queue.clear();
        assert_eq!((queue.len(), queue.next()), (0, None));
    }

    #[test]
    fn the_smallest_queues_let_work_through() {
        for places in 1..8 {
            let mut queue = FairQueue::<u64>::new(places);
            assert!(fill(&mut queue, 1) >= 1, "{places}");
            queue.leave(disk(1));
            assert!(queue.enter(disk(2)), "{places}");
        }
    }
}
