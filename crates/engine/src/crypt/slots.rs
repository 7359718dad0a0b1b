//! Changes of the key slots of a LUKS1 header.
//!
//! A change is a list of steps, each durable before the next. Whatever a crash leaves of a step, every slot that was not changed
//! opens as before.

use super::header::{LuksHeader, luks_error};
use super::keys::Passphrase;
use super::new_header::slot_iterations;
use crate::{Error, ErrorKind, Result};
use std::path::Path;
use std::time::Duration;
use zebu_luks::{HeaderStep, LastKey, Limits, Luks1Header, SystemRandom};
use zebu_storage::sabotage::{self, Fault};
use zebu_storage::{File, IoBuf, Worker};

/// Which key slots lose their keys.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum SlotChoice {
    /// One, by its number from 0 to 7.
    Number(u32),
    /// All that a passphrase opens.
    OpenedBy(Passphrase),
}

/// A key that is added.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NewKey {
    /// The new passphrase.
    pub passphrase: Passphrase,
    /// Number of the slot; the first that is free if `None`.
    pub slot: Option<u32>,
    /// Time that it takes to try the passphrase on a machine like this one.
    pub iteration_time: Duration,
}

zebu_storage::option_setters!(NewKey { slot: impl Into<Option<u32>>, iteration_time: Duration });

impl NewKey {
    /// A passphrase for the first slot that is free, two seconds to try it.
    pub fn new(passphrase: Passphrase) -> Self {
        Self { passphrase, slot: None, iteration_time: Duration::from_secs(2) }
    }
}

/// A change of key slots.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum KeySlotChange {
    /// A passphrase is put into a slot.
    Add(NewKey),
    /// Slots lose their keys.
    Remove(SlotChoice),
}

/// Which keys may go, and whether a key in use may be overwritten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum KeySlotGuard {
    /// The key that was given opens a slot that stays, and no key in use is overwritten.
    #[default]
    Keep,
    /// Some key stays, perhaps one that the caller does not have, and no key in use is overwritten. QEMU has this rule.
    KeepLast,
    /// All may go, and a key in use may be overwritten. Without any key, nobody can read the data again.
    Force,
}

/// The key of those who change key slots, and how far they may go.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotRights<'a> {
    /// Passphrase that opens the header.
    pub(crate) passphrase: &'a Passphrase,
    pub(crate) guard: KeySlotGuard,
    /// Costs that a passphrase may have.
    pub(crate) limits: &'a Limits,
}

/// Changes key slots of the header at byte `start` of `file`.
pub(crate) async fn change(
    worker: &Worker,
    file: &File,
    start: u64,
    header: LuksHeader,
    change: &KeySlotChange,
    rights: SlotRights<'_>,
) -> Result<()> {
    let LuksHeader::V1(header) = header else {
        let message = "key slots of LUKS2 headers are not changed; use cryptsetup for them";
        return Err(Error::new(ErrorKind::Unsupported, message).on(file.path()));
    };
    match change {
        KeySlotChange::Add(new) => add(worker, file, start, header, new, rights).await,
        KeySlotChange::Remove(choice) => remove(worker, file, start, header, choice, rights).await,
    }
}

async fn add(
    worker: &Worker,
    file: &File,
    start: u64,
    mut header: Box<Luks1Header>,
    new: &NewKey,
    rights: SlotRights<'_>,
) -> Result<()> {
    let SlotRights { passphrase, guard, limits } = rights;
    let refuse = |error| luks_error(file.path(), &error);
    let (_, key) = LuksHeader::V1(header.clone()).unlock(worker, file, start, passphrase, limits).await?;
    let (path, hash, key_len) = (file.path().to_owned(), header.hash(), header.cipher().key_len());
    let (time, limits) = (new.iteration_time, *limits);
    let iterations =
        worker.run_blocking(move || slot_iterations(&path, hash, key_len, time, &limits)).await?;
    if let Some(slot) = new.slot
        && header.active_slots().any(|active| active == slot)
    {
        if guard != KeySlotGuard::Force {
            let message = format!("Refusing to overwrite active keyslot {slot} - please erase it first");
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(file.path()));
        }
        if header.active_slots().count() == 1 {
            // A crash between the two steps would leave no key at all.
            let message =
                format!("keyslot {slot} holds the only key: add one in another slot, then erase it");
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(file.path()));
        }
        let steps = header.remove_key(slot, LastKey::Keep, &mut SystemRandom).map_err(refuse)?;
        write(worker, file, start, &steps).await?;
    }
    let new = new.clone();
    let added = worker.run_blocking(move || {
        header.add_key(new.slot, &key, new.passphrase.as_bytes(), iterations, &mut SystemRandom)
    });
    let steps = added.await.map_err(refuse)?;
    write(worker, file, start, &steps).await
}

async fn remove(
    worker: &Worker,
    file: &File,
    start: u64,
    mut header: Box<Luks1Header>,
    choice: &SlotChoice,
    rights: SlotRights<'_>,
) -> Result<()> {
    let SlotRights { passphrase, guard, limits } = rights;
    let any = LuksHeader::V1(header.clone());
    // Whoever has no key of the image takes none from it.
    let (opened, _) = any.unlock(worker, file, start, passphrase, limits).await?;
    let slots = match choice {
        SlotChoice::Number(slot) => vec![*slot],
        SlotChoice::OpenedBy(old) => {
            let mut opened = Vec::new();
            for slot in any.slots_to_try(limits).tried {
                if any.unlock_slot(worker, file, start, slot, old).await?.is_some() {
                    opened.push(slot);
                }
            }
            if opened.is_empty() {
                let message = "No keyslots match given (old) password for erase operation";
                return Err(Error::new(ErrorKind::WrongKey, message).on(file.path()));
            }
            if opened.len() == header.active_slots().count() && guard != KeySlotGuard::Force {
                let message = "All the active keyslots match the (old) password that was given and erasing them will \
                               erase all the data in the image irreversibly - refusing operation";
                return Err(Error::new(ErrorKind::InvalidArgument, message).on(file.path()));
            }
            opened
        }
    };
    let last = if guard == KeySlotGuard::Force { LastKey::Remove } else { LastKey::Keep };
    let mut steps = Vec::new();
    for slot in &slots {
        let removed = header.remove_key(*slot, last, &mut SystemRandom);
        steps.extend(removed.map_err(|error| luks_error(file.path(), &error))?);
    }
    if guard == KeySlotGuard::Keep && slots.contains(&opened) {
        let staying = LuksHeader::V1(header.clone());
        if !staying.opens(worker, file, start, passphrase, limits).await? {
            let message =
                "the key that was given opens no key slot that stays: give the key of one that does";
            return Err(Error::new(ErrorKind::InvalidArgument, message).on(file.path()));
        }
    }
    write(worker, file, start, &steps).await
}

/// Writes a change, step by step.
async fn write(worker: &Worker, file: &File, start: u64, steps: &[HeaderStep]) -> Result<()> {
    let on = |error: zebu_storage::IoError, path: &Path| Error::from(error).on(path);
    for step in steps {
        for write in &step.writes {
            let (result, _) =
                worker.write(file, start + write.offset, IoBuf::copy_of(&write.bytes).into()).await;
            result.map_err(|error| on(error, file.path()))?;
        }
        if !sabotage::is(Fault::SkipBarrierOfKeySlots) {
            worker.flush(file).await.map_err(|error| on(error, file.path()))?;
        }
    }
    Ok(())
}
