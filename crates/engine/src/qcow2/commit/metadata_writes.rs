//! Writes of a commit, as places in the file and bytes.

use zebu_storage::sabotage::{self, Limit};
use zebu_storage::{IoBuf, IoBufs};

/// The most pieces of one write: a system call takes 1024 (`IOV_MAX`, sysconf(3)).
const MOST_PIECES: usize = 256;

/// Bytes that lie at `offset`, in writes of at most `most` bytes.
pub(super) fn in_pieces(offset: u64, bytes: &[u8], most: usize) -> Vec<(u64, IoBuf)> {
    let places = (offset..).step_by(most);
    places.zip(bytes.chunks(most)).map(|(at, piece)| (at, IoBuf::copy_of(piece))).collect()
}

/// Neighbours become one write, of at most `most` bytes.
pub(super) fn joined(mut writes: Vec<(u64, IoBuf)>, most: usize) -> Vec<(u64, IoBufs)> {
    writes.sort_unstable_by_key(|(offset, _)| *offset);
    let most_pieces = sabotage::at_most(Limit::CommitPieces, MOST_PIECES as u64) as usize;
    let mut joined: Vec<(u64, IoBufs)> = Vec::new();
    for (offset, buf) in writes {
        match joined.last_mut() {
            Some((start, bufs))
                if *start + bufs.len() as u64 == offset
                    && bufs.len() + buf.len() <= most
                    && bufs.parts().len() < most_pieces =>
            {
                bufs.push(buf);
            }
            _ => joined.push((offset, buf.into())),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(writes: &[(u64, IoBufs)]) -> Vec<(u64, usize)> {
        writes.iter().map(|(offset, bufs)| (*offset, bufs.len())).collect()
    }

    fn buf(len: usize) -> IoBuf {
        IoBuf::zeroed(len)
    }

    #[test]
    fn long_tables_are_written_in_pieces_that_follow_each_other() {
        let bytes: Vec<u8> = (0..10).collect();
        let pieces: Vec<(u64, Vec<u8>)> =
            in_pieces(1000, &bytes, 4).into_iter().map(|(at, buf)| (at, buf.as_slice().to_vec())).collect();
        assert_eq!(pieces, [(1000, vec![0, 1, 2, 3]), (1004, vec![4, 5, 6, 7]), (1008, vec![8, 9])]);
    }

    #[test]
    fn neighbours_are_written_together() {
        let writes = vec![(4096, buf(512)), (512, buf(512)), (1024, buf(1024)), (2560, buf(512))];
        assert_eq!(places(&joined(writes, 1 << 20)), [(512, 1536), (2560, 512), (4096, 512)]);
    }

    #[test]
    fn no_write_is_longer_than_the_longest() {
        let writes = vec![(0, buf(512)), (512, buf(512)), (1024, buf(512))];
        assert_eq!(places(&joined(writes, 1024)), [(0, 1024), (1024, 512)]);
    }

    #[test]
    fn no_write_has_more_pieces_than_a_system_call_takes() {
        let writes = (0..MOST_PIECES as u64 + 2).map(|number| (number * 512, buf(512))).collect();
        let at_end = MOST_PIECES * 512;
        assert_eq!(places(&joined(writes, 1 << 30)), [(0, at_end), (at_end as u64, 1024)]);
    }
}
