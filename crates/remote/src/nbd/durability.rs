//! Which answered changes are known to be durable.

/// Whether all answered changes of a disk are known to be durable.
#[derive(Debug)]
pub(super) struct Durability {
    connections: Vec<Changes>,
    /// Answered changes may be gone, or be overwritten by what was given up.
    is_lost: bool,
}

/// The changes of one connection, in the order of their answers.
#[derive(Debug, Clone, Copy, Default)]
struct Changes {
    answered: u64,
    /// The first so many are durable.
    flushed: u64,
}

impl Changes {
    fn has_unflushed(self) -> bool {
        self.answered > self.flushed
    }
}

impl Durability {
    /// For so many connections.
    pub(super) fn new(connections: usize) -> Self {
        Self { connections: vec![Changes::default(); connections], is_lost: false }
    }

    /// Whether no flush can succeed any more.
    pub(super) fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Connections that have something to flush.
    pub(super) fn unflushed(&self) -> Vec<usize> {
        let all = self.connections.iter().enumerate();
        all.filter(|(_, changes)| changes.has_unflushed()).map(|(connection, _)| connection).collect()
    }

    /// The number of changes up to which a flush covers them that is sent now.
    pub(super) fn covered(&self, connection: usize) -> u64 {
        self.connections[connection].answered
    }

    /// A change was answered, which a flush is to make durable.
    pub(super) fn note_change(&mut self, connection: usize) {
        self.connections[connection].answered += 1;
    }

    /// A flush was answered that covers so many changes. Others may be under way, and end in any order.
    pub(super) fn note_flush(&mut self, connection: usize, covered: u64) {
        let changes = &mut self.connections[connection];
        changes.flushed = changes.flushed.max(covered);
    }

    /// A connection is over. `may_come`: its server may still do changes that have no answer.
    pub(super) fn note_end(&mut self, connection: usize, may_come: bool) {
        let changes = std::mem::take(&mut self.connections[connection]);
        self.is_lost |= changes.has_unflushed() || may_come;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As clients of a server send them: each flush covers what was answered before it was sent, however many are under way.
    #[test]
    fn flushes_at_once_cover_nothing_twice() {
        let mut durability = Durability::new(2);
        durability.note_change(1);
        let first = durability.covered(1);
        durability.note_change(1);
        let second = durability.covered(1);
        durability.note_change(1);
        durability.note_flush(1, first);
        durability.note_flush(1, second);
        assert_eq!(durability.unflushed(), [1], "the third change is not durable");
        let third = durability.covered(1);
        durability.note_flush(1, third);
        assert!(durability.unflushed().is_empty());
        durability.note_change(1);
        durability.note_end(1, false);
        assert!(durability.is_lost());
    }

    #[test]
    fn an_early_flush_that_ends_late_takes_nothing_back() {
        let mut durability = Durability::new(1);
        let early = durability.covered(0);
        durability.note_change(0);
        durability.note_flush(0, durability.covered(0));
        durability.note_flush(0, early);
        assert!(durability.unflushed().is_empty());
        durability.note_end(0, false);
        assert!(!durability.is_lost(), "all was durable");
        durability.note_end(0, true);
        assert!(durability.is_lost());
    }
}
