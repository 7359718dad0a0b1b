//! LUKS1 and LUKS2: headers as pure data, key slots, and the ciphers of sectors.
//!
//! Nothing here reads or writes a file. A caller reads the header, then the key material of the slots that it names, and writes
//! the steps of a change in their order.
//!
//! ```
//! use zebu_luks::{CipherSpec, HashName, LastKey, Limits, Luks1Header, Luks1Options, SystemRandom};
//!
//! let options = Luks1Options::new(CipherSpec::AES_256_XTS, HashName::Sha256, 1000);
//! let (_, _, device) = Luks1Header::create(&options, b"first", &mut SystemRandom)?;
//!
//! let header = Luks1Header::parse(&device, &Limits::default())?;
//! let material = header.material(0)?;
//! let material = &device[material.start as usize..material.end as usize];
//! assert!(header.unlock(0, b"wrong", material)?.is_none());
//! let key = header.unlock(0, b"first", material)?.expect("the right passphrase");
//!
//! let cipher = key.sector_cipher(header.cipher())?;
//! let mut sector = [7; 512];
//! cipher.encrypt(0, &mut sector)?;
//! cipher.decrypt(0, &mut sector)?;
//! assert_eq!(sector, [7; 512]);
//!
//! let mut changed = header.clone();
//! assert!(changed.remove_key(0, LastKey::Keep, &mut SystemRandom).is_err());
//! # Ok::<(), zebu_luks::LuksError>(())
//! ```

#![forbid(unsafe_code)]

mod anti_forensic;
mod block_cipher;
mod bytes;
mod calibrate;
mod cbc_sectors;
mod cipher_spec;
mod error;
mod hash;
mod kdf;
mod legacy_aes;
mod limits;
mod luks1;
mod luks1_keys;
mod luks2;
mod luks2_json;
mod luks2_keys;
mod luks2_metadata;
mod master_key;
mod random;
mod sector_cipher;
mod xts_sectors;

pub use calibrate::{MIN_ITERATIONS, pbkdf2_iterations};
pub use cipher_spec::{BlockCipher, CipherSpec, Mode};
pub use error::LuksError;
pub use hash::HashName;
pub use kdf::{Argon2Cost, Argon2Kind, Kdf};
pub use legacy_aes::legacy_aes;
pub use limits::{LUKS1_SLOTS, LUKS2_SLOTS, Limits, MAX_STRIPES, STRIPES};
pub use luks1::{LUKS1_HEADER_LEN, Luks1Header, Luks1Slot};
pub use luks1_keys::{HeaderStep, HeaderWrite, LastKey, Luks1Options};
pub use luks2::{HeaderCopy, LUKS2_HEADERS_MAX, Luks2Header};
pub use luks2_metadata::{Luks2Metadata, Luks2Segment, Luks2Slot, Luks2UnusableSlot, Priority};
pub use master_key::MasterKey;
pub use random::{Random, SystemRandom};
pub use sector_cipher::SectorCipher;
