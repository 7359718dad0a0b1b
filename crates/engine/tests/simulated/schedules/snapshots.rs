//! Internal snapshots that threads take and delete: which of them must be there, and what they hold.

use crate::crash::guest::Guest;
use std::collections::BTreeMap;
use zebu_engine::storage::Worker;
use zebu_engine::{ErrorKind, NewSnapshot, SnapshotRef};
use zebu_sim::{GuestModel, GuestOp, GuestRequest, GuestResult, backing_pattern};

#[derive(Clone)]
enum Holds {
    /// The pattern, and zeroes behind it, up to this length.
    Pattern { pattern: u64, len: u64 },
    /// A read that began with the taking. Before it ended: as the disk's model is now.
    Taken { began: GuestOp, ended: Option<GuestModel> },
}

#[derive(Clone)]
struct Snapshot {
    holds: Holds,
    must_be: bool,
    may_be: bool,
}

/// All snapshots that there ever were.
#[derive(Clone, Default)]
pub(crate) struct Snapshots(BTreeMap<String, Snapshot>);

impl Snapshots {
    pub(crate) fn add_old(&mut self, name: &str, pattern: u64, len: u64) {
        let holds = Holds::Pattern { pattern, len };
        self.0.insert(name.to_owned(), Snapshot { holds, must_be: true, may_be: true });
    }

    fn change(&mut self, name: &str, change: impl FnOnce(&mut Snapshot)) {
        if let Some(snapshot) = self.0.get_mut(name) {
            change(snapshot);
        }
    }

    /// These are there; `read`: what each holds.
    pub(crate) fn judge(&self, model: &GuestModel, found: &BTreeMap<String, Vec<u8>>) -> Result<(), String> {
        for (name, snapshot) in &self.0 {
            if snapshot.must_be && !found.contains_key(name) {
                return Err(format!("the snapshot {name} is missing"));
            }
        }
        for (name, bytes) in found {
            let Some(snapshot) = self.0.get(name).filter(|snapshot| snapshot.may_be) else {
                return Err(format!("there is a snapshot {name}"));
            };
            match &snapshot.holds {
                Holds::Pattern { pattern, len } => {
                    let mut expected = backing_pattern(0, *pattern as usize);
                    expected.resize(*len as usize, 0);
                    if *bytes != expected {
                        return Err(format!("the snapshot {name} has changed"));
                    }
                }
                Holds::Taken { began, ended } => ended
                    .as_ref()
                    .unwrap_or(model)
                    .check_read(*began, 0, bytes)
                    .map_err(|violation| format!("the snapshot {name}: {violation}"))?,
            }
        }
        Ok(())
    }
}

/// Takes a snapshot.
pub(crate) async fn take(guest: &Guest, snapshots: &std::cell::RefCell<Snapshots>, on: &Worker, name: &str) {
    let began = guest.model.borrow_mut().begin(GuestRequest::Read);
    // It makes durable what was written before.
    let flush = guest.model.borrow_mut().begin(GuestRequest::Flush);
    let holds = Holds::Taken { began, ended: None };
    snapshots.borrow_mut().0.insert(name.to_owned(), Snapshot { holds, must_be: false, may_be: true });
    let new = NewSnapshot::named(name).date(Some(std::time::UNIX_EPOCH));
    match guest.image.create_snapshot(on, new).await {
        Ok(_) => {
            let holds = Holds::Taken { began, ended: Some(guest.model.borrow().clone()) };
            snapshots.borrow_mut().change(name, |snapshot| {
                snapshot.holds = holds;
                snapshot.must_be = true;
            });
            guest.model.borrow_mut().end(flush, GuestResult::Done);
            guest.model.borrow_mut().end(began, GuestResult::Done);
        }
        Err(error) => guest.blame(format!("a snapshot was not taken: {error}")),
    }
}

/// Deletes a snapshot, which another thread may have done before.
pub(crate) async fn delete(
    guest: &Guest,
    snapshots: &std::cell::RefCell<Snapshots>,
    on: &Worker,
    name: &str,
) {
    snapshots.borrow_mut().change(name, |snapshot| snapshot.must_be = false);
    match guest.image.delete_snapshot(on, &SnapshotRef::Name(name.to_owned())).await {
        Ok(_) => snapshots.borrow_mut().change(name, |snapshot| snapshot.may_be = false),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => guest.blame(format!("a snapshot was not deleted: {error}")),
    }
}
