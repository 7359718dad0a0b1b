//! Options of `amend` about the key slots of an encrypted image, with QEMU's names.

use crate::encrypt_opts::LONGEST_ITERATION;
use std::time::Duration;
use zebu_disks::Secrets;
use zebu_engine::{KeySlotChange, NewKey, SlotChoice};

/// Names, without the prefix that qcow2 has.
pub(crate) const NAMES: [&str; 5] = ["state", "new-secret", "old-secret", "keyslot", "iter-time"];
/// Number of key slots of LUKS1.
const SLOTS: u32 = 8;

/// The options that were given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KeySlotOpts {
    is_active: Option<bool>,
    new_secret: Option<String>,
    old_secret: Option<String>,
    slot: Option<u32>,
    iteration_time: Option<Duration>,
}

impl KeySlotOpts {
    /// Takes an option, named without its prefix; false if there is none of this name.
    pub(crate) fn set(&mut self, name: &str, value: &str) -> Result<bool, String> {
        match name {
            "state" => {
                self.is_active = Some(match value {
                    "active" => true,
                    "inactive" => false,
                    _ => return Err(format!("Parameter 'state' does not accept value '{value}'")),
                });
            }
            "new-secret" => self.new_secret = Some(value.to_owned()),
            "old-secret" => self.old_secret = Some(value.to_owned()),
            "keyslot" => {
                let slot: u32 = value
                    .parse()
                    .map_err(|_| format!("Parameter 'keyslot' expects a number, not '{value}'"))?;
                if slot >= SLOTS {
                    return Err(format!(
                        "Invalid keyslot {slot} specified, must be between 0 and {}",
                        SLOTS - 1
                    ));
                }
                self.slot = Some(slot);
            }
            "iter-time" => {
                let milliseconds: u64 = value
                    .parse()
                    .map_err(|_| "Parameter 'iter-time' expects a number of milliseconds".to_owned())?;
                if milliseconds == 0 {
                    return Err("iter-time must be greater than 0".to_owned());
                }
                if milliseconds > LONGEST_ITERATION {
                    return Err(format!("iter-time must be at most {LONGEST_ITERATION} (an hour)"));
                }
                self.iteration_time = Some(Duration::from_millis(milliseconds));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Whether any was given.
    pub(crate) fn is_given(&self) -> bool {
        *self != Self::default()
    }

    /// The change that is asked for.
    pub(crate) fn change(&self, secrets: &Secrets) -> Result<KeySlotChange, String> {
        let Some(is_active) = self.is_active else { return Err("Parameter 'state' is missing".to_owned()) };
        if is_active {
            if self.old_secret.is_some() {
                return Err("'old-secret' must not be given when activating keyslots".to_owned());
            }
            let id = self
                .new_secret
                .as_ref()
                .ok_or("'new-secret' is required to activate a keyslot".to_owned())?;
            let mut key = NewKey::new(secrets.get(id)?).slot(self.slot);
            if let Some(time) = self.iteration_time {
                key = key.iteration_time(time);
            }
            return Ok(KeySlotChange::Add(key));
        }
        if self.new_secret.is_some() {
            return Err("'new-secret' must not be given when erasing keyslots".to_owned());
        }
        if self.iteration_time.is_some() {
            return Err("'iter-time' must not be given when erasing keyslots".to_owned());
        }
        match (self.slot, &self.old_secret) {
            (Some(_), Some(_)) => Err("give 'keyslot' or 'old-secret', not both".to_owned()),
            (Some(slot), None) => Ok(KeySlotChange::Remove(SlotChoice::Number(slot))),
            (None, Some(id)) => Ok(KeySlotChange::Remove(SlotChoice::OpenedBy(secrets.get(id)?))),
            (None, None) => {
                Err("To erase keyslot(s), either explicit keyslot index or the password currently contained \
                                 in them must be given"
                    .to_owned())
            }
        }
    }
}
