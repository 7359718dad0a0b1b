//! Objects `secret,...`: passphrases for encrypted images, as QEMU's programs take them.

use crate::disks::Disks;
use crate::drained_pipes::DrainedPipes;
use crate::objects::Object;
use aes::Aes256;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use cbc::cipher::{BlockModeDecrypt, KeyIvInit, block_padding::Pkcs7};
use std::collections::HashMap;
use zebu_engine::Passphrase;
use zebu_storage::on_wiped_stack;
use zeroize::Zeroizing;

/// Bytes of the key that secrets are encrypted with.
const KEY_LEN: usize = 32;
/// Bytes of the stack on which secrets are decrypted.
const STACK: usize = 16 << 10;
/// Bytes of an initialization vector.
const IV_LEN: usize = 16;

/// The places from which a command takes secrets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sources {
    /// Files, and the text of the command line.
    All,
    /// Files alone.
    Files,
    /// All, of a command that looks at an image without its key: what is named and not given is not missed.
    Unneeded,
}

/// Secrets by their IDs.
#[derive(Debug, Clone, Default)]
pub struct Secrets {
    by_id: HashMap<String, Passphrase>,
    are_unneeded: bool,
    /// The ID that image options give for the key of the top image.
    pub key_of_top: Option<String>,
}

/// One `--object secret`.
struct Described {
    data: Option<Zeroizing<String>>,
    file: Option<String>,
    is_base64: bool,
    key_id: Option<String>,
    iv: Option<String>,
}

impl Secrets {
    /// None, as a command starts with.
    pub fn new(sources: Sources) -> Self {
        Self { are_unneeded: sources == Sources::Unneeded, ..Self::default() }
    }

    /// The secret of an ID.
    pub fn get(&self, id: &str) -> Result<Passphrase, String> {
        self.by_id.get(id).cloned().ok_or_else(|| format!("No secret with id '{id}'"))
    }

    /// The key that an image option names; `None` if it is missing and not needed.
    pub fn key(&self, id: &str) -> Result<Option<Passphrase>, String> {
        if self.are_unneeded { Ok(self.by_id.get(id).cloned()) } else { self.get(id).map(Some) }
    }

    /// Takes an object that is a secret.
    ///
    /// # Errors
    /// It can't be read, or its source is none of `sources`.
    pub fn add(&mut self, disks: &Disks, object: Object, sources: Sources) -> Result<(), String> {
        let id = object.id().to_owned();
        let secret = Described::parse(object)?;
        // What is encrypted may be seen.
        if secret.data.is_some() && secret.key_id.is_none() && sources == Sources::Files {
            return Err(format!(
                "the secret '{id}' stands in the command line, where others can see it: give file= with a file or a \
                 descriptor (/dev/fd/N), or --allow-secret-data"
            ));
        }
        let bytes = secret.bytes(&disks.pipes, self)?;
        let passphrase = Passphrase::new(&bytes).map_err(|error| error.to_string())?;
        self.by_id.insert(id, passphrase);
        Ok(())
    }
}

impl Described {
    fn parse(mut object: Object) -> Result<Self, String> {
        let is_base64 = match object.plain("format")?.as_deref() {
            None | Some("raw") => false,
            Some("base64") => true,
            Some(other) => return Err(format!("Parameter 'format' does not accept value '{other}'")),
        };
        let secret = Self {
            data: object.text("data")?,
            file: object.plain("file")?,
            is_base64,
            key_id: object.plain("keyid")?,
            iv: object.plain("iv")?,
        };
        object.finish()?;
        Ok(secret)
    }

    /// The secret's bytes, decrypted and decoded.
    fn bytes(self, pipes: &DrainedPipes, earlier: &Secrets) -> Result<Zeroizing<Vec<u8>>, String> {
        let given = match (self.data, self.file) {
            (Some(_), Some(_)) => return Err("'file' and 'data' are mutually exclusive".to_owned()),
            (None, None) => return Err("Either 'file' or 'data' must be provided".to_owned()),
            (Some(data), None) => Zeroizing::new(data.as_bytes().to_vec()),
            (None, Some(path)) => pipes.read(&path)?,
        };
        match (self.key_id, self.iv) {
            (Some(key_id), Some(iv)) => {
                let encrypted = if self.is_base64 { decode(&given)? } else { given };
                decrypt(encrypted, earlier.get(&key_id)?.as_bytes(), &iv)
            }
            (Some(_), None) => Err("IV is required to decrypt secret".to_owned()),
            (None, Some(_)) => Err("Parameter 'iv' needs 'keyid'".to_owned()),
            (None, None) if self.is_base64 => decode(&given),
            (None, None) => Ok(given),
        }
    }
}

/// The bytes of base64, with line breaks left out.
fn decode(text: &[u8]) -> Result<Zeroizing<Vec<u8>>, String> {
    let text: Zeroizing<Vec<u8>> =
        Zeroizing::new(text.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect());
    STANDARD.decode(&*text).map(Zeroizing::new).map_err(|_| "Base64 data is not valid".to_owned())
}

fn decrypt(mut bytes: Zeroizing<Vec<u8>>, key: &[u8], iv: &str) -> Result<Zeroizing<Vec<u8>>, String> {
    if key.len() != KEY_LEN {
        return Err(format!("Key should be {KEY_LEN} bytes in length"));
    }
    let iv = decode(iv.as_bytes())?;
    if iv.len() != IV_LEN {
        return Err(format!("IV should be {IV_LEN} bytes in length not {}", iv.len()));
    }
    let len = on_wiped_stack::<STACK, _>(|| {
        let cipher = cbc::Decryptor::<Aes256>::new_from_slices(key, &iv)
            .map_err(|_| format!("Key should be {KEY_LEN} bytes in length"))?;
        let plain = cipher.decrypt_padded::<Pkcs7>(&mut bytes);
        let plain = plain.map_err(|_| "Incorrect number of padding bytes on decrypted data".to_owned())?;
        Ok::<usize, String>(plain.len())
    })?;
    bytes.truncate(len);
    Ok(bytes)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::objects::parse_objects;

    pub(crate) fn read(objects: &[&str]) -> Result<Secrets, String> {
        read_from(objects, Sources::All)
    }

    fn read_from(objects: &[&str], sources: Sources) -> Result<Secrets, String> {
        let texts: Vec<String> = objects.iter().map(|text| (*text).to_owned()).collect();
        let (disks, mut secrets) = (Disks::default(), Secrets::new(sources));
        for object in parse_objects(&texts)? {
            secrets.add(&disks, object, sources)?;
        }
        Ok(secrets)
    }

    #[test]
    fn secrets_are_text_files_and_base64() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        std::fs::write(&path, b"from a file\n").unwrap();
        let file = format!("secret,id=f,file={}", path.display());
        let secrets = read(&["secret,id=a,data=text", &file, "secret,id=b,data=dGV4dA==,format=base64"]);
        let secrets = secrets.unwrap();
        for (id, bytes) in [("a", &b"text"[..]), ("f", b"from a file\n"), ("b", b"text")] {
            assert_eq!(secrets.get(id).unwrap().as_bytes(), bytes, "{id}");
        }
        assert!(secrets.get("c").unwrap_err().contains("No secret with id 'c'"));
    }

    /// Made by `openssl enc -aes-256-cbc -K 00..1f -iv 00..0f`.
    #[test]
    fn a_secret_may_be_encrypted_with_another() {
        let key = STANDARD.encode((0..32).collect::<Vec<u8>>());
        let iv = STANDARD.encode((0..16).collect::<Vec<u8>>());
        let key = format!("secret,id=key,data={key},format=base64");
        let encrypted = "JyqcWFyaFGSBUHI1tbXquA==";
        let secret = format!("secret,id=a,data={encrypted},format=base64,keyid=key,iv={iv}");
        let secrets = read(&[&key, &secret]).unwrap();
        assert_eq!(secrets.get("a").unwrap().as_bytes(), b"passphrase");
        let wrong = format!("secret,id=a,data={encrypted},format=base64,keyid=key,iv=AAAA");
        assert!(read(&[&key, &wrong]).unwrap_err().contains("IV should be 16 bytes"));
    }

    /// As QEMU reads them: the key is never base64 of its own, and what is encrypted is base64 only if its format says so.
    #[test]
    fn keys_and_encrypted_secrets_are_what_their_formats_say() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            std::fs::write(dir.path().join(name), bytes).unwrap();
            dir.path().join(name).display().to_string()
        };
        let letters = file("letters", b"abcdefghijklmnopqrstuvwxyz012345");
        let key = file("key", &(0..32).collect::<Vec<u8>>());
        let iv = STANDARD.encode((0..16).collect::<Vec<u8>>());
        let text = "JyqcWFyaFGSBUHI1tbXquA==";
        let raw = file("raw", &STANDARD.decode(text).unwrap());
        let key = format!("secret,id=key,file={key}");
        let of = |what: &str| {
            let secret = format!("secret,id=a,{what},keyid=key,iv={iv}");
            read(&[&key, &secret]).map(|secrets| secrets.get("a").unwrap().as_bytes().to_vec())
        };
        assert_eq!(of(&format!("file={raw},format=raw")).unwrap(), b"passphrase");
        assert_eq!(of(&format!("file={raw}")).unwrap(), b"passphrase");
        assert_eq!(of(&format!("data={text},format=base64")).unwrap(), b"passphrase");
        assert!(of(&format!("data={text},format=raw")).is_err());
        // A key of 32 letters is no base64 of 24 bytes.
        let letters = format!("secret,id=key,file={letters}");
        let secret = format!("secret,id=a,data={text},format=base64,keyid=key,iv={iv}");
        assert!(read(&[&letters, &secret]).unwrap_err().contains("padding"));
        // What is encrypted may stand in a command line.
        assert!(read_from(&[&key, &secret], Sources::Files).is_ok());
    }

    #[test]
    fn no_part_of_a_secret_is_told() {
        for object in [
            "data=hunter2,id=k",
            "secretdata=hunter2,id=k",
            "secret,id=k,data=a,hunter2",
            "secret,id=k,data=a,hunter2=b",
        ] {
            let error = read(&[object]).unwrap_err();
            assert!(!error.contains("hunter2"), "{object}: {error}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (object, part) in [
            ("tls-creds,id=a", "qom-type"),
            ("secret,id=a", "Either 'file' or 'data'"),
            ("secret,data=a", "'id' is missing"),
            ("secret,id=a,data=a,file=b", "mutually exclusive"),
            ("secret,id=a,data=a,format=hex", "'format'"),
            ("secret,id=a,file=a,size=1", "'size'"),
            ("secret,id=a,data=!,format=base64", "Base64"),
            ("secret,id=a,data=a,keyid=b", "IV"),
            ("secret,id=a,data=a,keyid=b,iv=AAAA", "'b'"),
            ("secret,id=a,file=/nosuch/file", "/nosuch/file"),
        ] {
            let error = read(&[object]).unwrap_err();
            assert!(error.contains(part), "{object}: {error}");
        }
        assert!(read(&["secret,id=a,data=b", "secret,id=a,data=c"]).is_err());
        assert!(read_from(&["secret,id=a,data=b"], Sources::Files).is_err(), "the command line's text");
    }
}
