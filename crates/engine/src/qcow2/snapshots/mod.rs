//! Internal snapshots: making them, going back to them, deleting them, while the image is open.
//!
//! The caller of each is alone ([`crate::sync::RequestBarrier`]): changes wait until it is done. Reads go on, but for the moment
//! in which going back to a snapshot puts another L1 table in place. It begins with nothing dirty in memory. So tables can be
//! read and rewritten in the file directly, many at once. Reference counts go through the cache, a batch at a time, and reach
//! the disk by commits.
//!
//! | operation | order; each line is durable before the next |
//! |---|---|
//! | create | dirty bit; counts raised, COPIED cleared in the active tables; L1 copy; snapshot table; header; dirty bit off |
//! | apply | counts of the snapshot's clusters raised, COPIED cleared in its tables; L1 copy; header (one block: size and L1); counts of the old active clusters lowered |
//! | empty | an empty L1 table; header; counts of the old active clusters lowered |
//! | delete | dirty bit; snapshot table; header; counts lowered; COPIED set where a count fell to 1; dirty bit off |
//!
//! Guest data needs no protection by the dirty bit in any of them: a COPIED flag that is missing costs a copy, and one
//! is only set where the durable count is 1 or the second reference is not durable yet. The bit (version 3) is there
//! because a crash in between leaves flags that a check takes for errors: the next writer makes all counts and flags
//! anew. Version 2 has no such bit; there a check reports the flags. Apply leaves leaks at most and needs no bit.
//!
//! Tables of strangers: `read_snapshot_l1` takes no L1 table that is too large or lies outside the file.
//! `HostSpace::check_own_table` refuses to give one back that lies on other metadata. `Table::push_references` leaves out
//! what is metadata, so that none of its counts is changed. `check_own_l2_table` refuses to rewrite what is no table. Tables
//! are read a bounded number at a time.

mod apply;
mod counts;
mod create;
mod delete;
mod empty;
mod flags;
mod replace;
mod table;
mod walk;

pub(crate) use create::SnapshotRequest;
pub(crate) use table::SnapshotTable;
