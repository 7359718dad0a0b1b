//! Histories made by hand: wrong ones must be rejected, and what overlapping requests may do must not.

use super::super::sector::{SECTOR, Values, ZERO, fill};
use super::*;

fn change(value: u64, begin: u64, end: u64) -> Change {
    Change { begin, end, value, certainty: Certainty::Must, lasting: Lasting::AfterFlush }
}

fn look(value: u64, begin: u64, end: u64) -> Look {
    Look { begin, end, seen: Seen::Value(value) }
}

/// Values that differ: those of the writes A, B and C.
const A: u64 = 1 << 40 | 1;
const B: u64 = 2 << 40 | 1;
const C: u64 = 3 << 40 | 1;

fn rejects(changes: &[Change], looks: &[Look], why: &str) {
    let initial = [&[change(ZERO, 0, 0)], changes].concat();
    let Unexplained { why: found, .. } = judge(7, Tearing::Bytes, &initial, looks).expect_err(why);
    assert!(found.contains(why), "{found}");
}

fn accepts(changes: &[Change], looks: &[Look]) {
    let initial = [&[change(ZERO, 0, 0)], changes].concat();
    judge(7, Tearing::Bytes, &initial, looks).expect("an order explains it");
}

#[test]
fn a_lost_write_is_rejected() {
    rejects(&[change(A, 1, 2)], &[look(ZERO, 3, 4)], "zeroes was surely overwritten");
    rejects(&[change(A, 1, 2), change(B, 3, 4)], &[look(A, 5, 6)], "surely overwritten");
    // Zeroes that were written are a write as well.
    rejects(&[change(A, 1, 2), change(ZERO, 3, 4)], &[look(A, 5, 6)], "surely overwritten");
    // A write that is still under way has not overwritten anything.
    accepts(&[change(A, 1, 2), change(B, 3, NEVER)], &[look(A, 5, 6)]);
    accepts(&[change(A, 1, 2), change(B, 3, 6)], &[look(A, 5, 7)]);
}

#[test]
fn a_stale_read_is_rejected() {
    let writes = [change(A, 1, 2), change(B, 3, 20)];
    rejects(&writes, &[look(B, 4, 6), look(A, 21, 22)], "surely overwritten");
    // The write is under way: both may be seen, in any order.
    accepts(&writes, &[look(B, 4, 6), look(A, 8, 9)]);
    accepts(&writes, &[look(A, 4, 6), look(B, 8, 9)]);
    // The same with zeroes as the old value.
    rejects(&[change(B, 3, 20)], &[look(B, 4, 6), look(ZERO, 21, 22)], "surely overwritten");
    accepts(&[change(B, 3, 20)], &[look(B, 4, 6), look(ZERO, 8, 9)]);
}

#[test]
fn an_old_value_that_comes_back_is_rejected() {
    let writes = [change(A, 1, 30), change(B, 2, 30)];
    rejects(&writes, &[look(A, 33, 34), look(B, 35, 36), look(A, 37, 38)], "between");
    accepts(&writes, &[look(A, 33, 34), look(A, 35, 36)]);
    accepts(&writes, &[look(A, 3, 4), look(B, 5, 6), look(A, 7, 8)]);
    // Zeroes between two looks at one value, and nobody who wrote it twice.
    let writes = [change(A, 1, 30), change(ZERO, 2, 30)];
    rejects(&writes, &[look(A, 33, 34), look(ZERO, 35, 36), look(A, 37, 38)], "between");
    accepts(&writes, &[look(A, 33, 34), look(A, 35, 36)]);
    accepts(&writes, &[look(A, 3, 4), look(ZERO, 5, 6), look(A, 37, 38)]);
    // A value that was written and overwritten while another one was there.
    let writes = [change(A, 1, 2), change(B, 3, 4)];
    rejects(&writes, &[look(A, 5, 6)], "surely overwritten");
}

#[test]
fn a_value_from_nowhere_or_from_the_future_is_rejected() {
    rejects(&[change(A, 1, 2)], &[look(B, 3, 4)], "never written");
    rejects(&[change(A, 5, 6)], &[look(A, 3, 4)], "not written yet");
    accepts(&[change(A, 3, 6)], &[look(A, 2, 4)]);
}

#[test]
fn what_may_have_happened_is_no_reason_to_reject() {
    let may = Change { certainty: Certainty::May, ..change(ZERO, 3, 4) };
    accepts(&[change(A, 1, 2), may], &[look(A, 5, 6)]);
    accepts(&[change(A, 1, 2), may], &[look(ZERO, 5, 6)]);
    // What it would have brought, twice over, is not older than what came after it.
    rejects(&[change(A, 1, 2), may, change(B, 5, 6)], &[look(A, 7, 8)], "surely overwritten");
}

#[test]
fn a_torn_sector_is_rejected_unless_it_is_being_written() {
    let mut values = Values::new(3, 1);
    let (old, new, other) = (values.next_value(), values.next_value(), values.next_value());
    let mut bytes = [0; SECTOR];
    fill(&mut bytes, old, 7);
    let mut newer = [0; SECTOR];
    fill(&mut newer, new, 7);
    bytes[..96].copy_from_slice(&newer[..96]);
    let torn = |begin, end| Look { begin, end, seen: Seen::Torn(Box::new(bytes)) };
    accepts(&[change(old, 1, 2), change(new, 3, 6)], &[torn(4, 5)]);
    rejects(&[change(old, 1, 2), change(new, 3, 6)], &[torn(7, 8)], "torn sector while nobody writes it");
    rejects(&[change(old, 1, 2), change(other, 3, 6)], &[torn(4, 5)], "torn sector of other values");
}

fn crash(changes: &[Change], flushed: u64, left: u64) -> Result<(), String> {
    let initial = [&[change(ZERO, 0, 0)], changes].concat();
    judge_crash(7, Tearing::Bytes, &initial, &[], flushed, &Seen::Value(left))
}

#[test]
fn after_a_crash_what_was_flushed_is_there_or_what_came_later() {
    let writes = [change(A, 1, 2), change(B, 3, 5), change(C, 7, NEVER)];
    for value in [ZERO, A, B, C] {
        assert!(crash(&writes, 0, value).is_ok(), "nothing was flushed");
    }
    assert!(crash(&writes, 3, ZERO).is_err(), "a flush covers what was acknowledged before it began");
    assert!(crash(&writes, 4, A).is_ok(), "and nothing that was still under way");
    assert!(crash(&writes, 6, A).is_err());
    assert!(crash(&writes, 6, B).is_ok() && crash(&writes, 6, C).is_ok());
    assert!(crash(&writes, 6, C + 1).is_err(), "what nobody wrote");
    let durable = [change(A, 1, 2), Change { lasting: Lasting::AtItsEnd, ..change(B, 3, 5) }];
    assert!(crash(&durable, 0, A).is_err() && crash(&durable, 0, B).is_ok());
}

#[test]
fn after_a_crash_nothing_is_torn_that_was_acknowledged() {
    let mut bytes = [0; SECTOR];
    fill(&mut bytes, A, 7);
    bytes[..96].fill(0);
    bytes[8..16].fill(0);
    let left = Seen::Torn(Box::new(bytes));
    let of = |end| judge_crash(7, Tearing::Bytes, &[change(ZERO, 0, 0), change(A, 1, end)], &[], 0, &left);
    assert!(of(2).is_err());
    assert!(of(NEVER).is_ok());
}
