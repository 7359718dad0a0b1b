//! Encrypted disks: their keys, and the sectors that are encrypted with them.
//!
//! | file | |
//! |---|---|
//! | `keys` | passphrases, and which image of a chain each is for |
//! | `header` | LUKS headers in files: reading them, trying a passphrase |
//! | `protection` | whether an image is encrypted, and its key known |
//! | `cipher_run` | a cipher over buffers |
//! | `sectors` | guest data that is encrypted on its way to a file, and decrypted on its way back |
//! | `new_header` | the header of a new image |
//! | `info` | facts about a header |
//! | `slots` | changes of key slots |
//!
//! An image that is not encrypted has none of this. One that is, and whose key is not known, refuses every request for data: no
//! plain text gets into it.

pub(crate) mod cipher_run;
pub(crate) mod header;
mod info;
mod keys;
pub(crate) mod new_header;
pub(crate) mod protection;
pub(crate) mod sectors;
pub(crate) mod slots;

pub use info::{EncryptionInfo, LuksInfo, LuksSlotInfo};
pub use keys::{HeaderCosts, Keys, Passphrase};
pub use new_header::{NewEncryption, NewMethod};
pub use slots::{KeySlotChange, KeySlotGuard, NewKey, SlotChoice};
