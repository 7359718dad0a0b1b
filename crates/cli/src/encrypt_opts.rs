//! Options of `-o` about how a new image is encrypted, with QEMU's names.

use crate::output::stderr;
use std::fmt::Write as _;
use std::time::Duration;
use zebu_disks::{Program, Secrets};
use zebu_engine::luks::{BlockCipher, CipherSpec, HashName, Mode};
use zebu_engine::{Format, NewEncryption, NewMethod};

/// Milliseconds that it may take to try a passphrase.
pub(crate) const LONGEST_ITERATION: u64 = 3_600_000;

/// Lines of `-o help`: name without its prefix, value, description.
pub(crate) const OPTIONS: &[(&str, &str, &str)] = &[
    ("cipher-alg", "str", "Cipher (aes, serpent, twofish; each -128, -192, -256; default aes-256)"),
    ("cipher-mode", "str", "Mode of the cipher (xts, cbc; default xts)"),
    ("format", "str", "Encrypt the image (luks; aes is weak, for old programs)"),
    ("hash-alg", "str", "Hash of the passphrase (sha1, sha256, sha512; default sha256)"),
    ("iter-time", "num", "Milliseconds that it takes to try a passphrase (default 2000)"),
    ("ivgen-alg", "str", "Initialization vectors (plain, plain64, essiv; default plain64)"),
    ("ivgen-hash-alg", "str", "Hash of essiv (sha256)"),
    ("key-secret", "str", "ID of the secret that is the passphrase"),
];

/// The options that were given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct EncryptOpts {
    /// As written, in the order of the help.
    given: Vec<(&'static str, String)>,
    /// `encrypt.format`.
    method: Option<NewMethod>,
    /// `encryption=on`: the old name of `encrypt.format=aes`.
    is_old_name: bool,
    cipher: Option<(BlockCipher, usize)>,
    is_cbc: bool,
    ivgen: Option<IvGenerator>,
    hash: Option<HashName>,
    iteration_time: Option<Duration>,
    key_secret: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IvGenerator {
    Plain,
    Plain64,
    Essiv,
}

/// The prefix of the options for images of a format.
pub(crate) fn prefix(format: Format) -> &'static str {
    if format == Format::Luks { "" } else { "encrypt." }
}

impl EncryptOpts {
    /// Takes an option, named without its prefix; false if there is none of this name.
    pub(crate) fn set(&mut self, name: &str, value: &str, format: Format) -> Result<bool, String> {
        let Some((name, ..)) = OPTIONS.iter().find(|(known, ..)| *known == name) else { return Ok(false) };
        if *name == "format" && format == Format::Luks {
            return Ok(false);
        }
        let unknown = || format!("Parameter '{}{name}' does not accept value '{value}'", prefix(format));
        match *name {
            "format" => match value {
                "luks" => self.method = Some(NewMethod::Luks1),
                "aes" => self.method = Some(NewMethod::LegacyAes),
                _ => return Err(unknown()),
            },
            "cipher-alg" => {
                let (cipher, bits) = value.rsplit_once('-').ok_or_else(unknown)?;
                let cipher = match cipher {
                    "aes" => BlockCipher::Aes,
                    "serpent" => BlockCipher::Serpent,
                    "twofish" => BlockCipher::Twofish,
                    _ => return Err(unknown()),
                };
                let bits: usize = bits.parse().map_err(|_| unknown())?;
                if !matches!(bits, 128 | 192 | 256) {
                    return Err(unknown());
                }
                self.cipher = Some((cipher, bits / 8));
            }
            "cipher-mode" => match value {
                "xts" => self.is_cbc = false,
                "cbc" => self.is_cbc = true,
                _ => return Err(unknown()),
            },
            "ivgen-alg" => {
                self.ivgen = Some(match value {
                    "plain" => IvGenerator::Plain,
                    "plain64" => IvGenerator::Plain64,
                    "essiv" => IvGenerator::Essiv,
                    _ => return Err(unknown()),
                });
            }
            "ivgen-hash-alg" if value != "sha256" => return Err(unknown()),
            "hash-alg" => self.hash = Some(HashName::parse(value).map_err(|_| unknown())?),
            "iter-time" => {
                let milliseconds: u64 = value.parse().map_err(|_| {
                    format!("Parameter '{}{name}' expects a number of milliseconds", prefix(format))
                })?;
                if milliseconds == 0 {
                    return Err("iter-time must be greater than 0".to_owned());
                }
                if milliseconds > LONGEST_ITERATION {
                    return Err(format!("iter-time must be at most {LONGEST_ITERATION} (an hour)"));
                }
                self.iteration_time = Some(Duration::from_millis(milliseconds));
            }
            "key-secret" => self.key_secret = Some(value.to_owned()),
            _ => {}
        }
        self.given.retain(|(other, _)| other != name);
        self.given.push((name, value.to_owned()));
        Ok(true)
    }

    /// Takes `encryption`, the old name of `encrypt.format=aes`.
    pub(crate) fn set_old(&mut self, is_on: bool) {
        self.is_old_name = is_on;
    }

    /// The options that were given, as ` name=value` for the line that `create` begins with.
    pub(crate) fn formatting(&self, format: Format) -> String {
        let order = |name: &str| {
            ["format", "key-secret", "cipher-alg", "cipher-mode", "ivgen-alg", "ivgen-hash-alg", "hash-alg"]
                .iter()
                .position(|known| *known == name)
                .unwrap_or(usize::MAX)
        };
        let mut given: Vec<_> = self.given.iter().collect();
        given.sort_by_key(|(name, _)| order(name));
        let mut text = if self.is_old_name { " encryption=on".to_owned() } else { String::new() };
        for (name, value) in given {
            let _ = write!(text, " {}{name}={value}", prefix(format));
        }
        text
    }

    /// How an image of this format is encrypted, if it is. `secrets` has the passphrase; without it, none is looked up.
    pub(crate) fn resolve(
        &self,
        dialect: Program,
        format: Format,
        secrets: Option<&Secrets>,
    ) -> Result<Option<NewEncryption>, String> {
        let method = match (self.method, self.is_old_name) {
            (Some(_), true) => {
                return Err("Options encryption and encrypt.format are mutually exclusive".to_owned());
            }
            (None, true) => Some(NewMethod::LegacyAes),
            (None, false) if format == Format::Luks => Some(NewMethod::Luks1),
            (given, false) => given,
        };
        let Some(method) = method else {
            return match self.given.first() {
                Some((name, _)) => {
                    Err(format!("Parameter '{}{name}' needs 'encrypt.format=luks'", prefix(format)))
                }
                None => Ok(None),
            };
        };
        if method == NewMethod::LegacyAes
            && let Some((name, _)) =
                self.given.iter().find(|(name, _)| !matches!(*name, "format" | "key-secret"))
        {
            return Err(format!("Parameter 'encrypt.{name}' needs 'encrypt.format=luks'"));
        }
        let (cipher, block_key) = self.cipher.unwrap_or((BlockCipher::Aes, 32));
        let has_hash = self.given.iter().any(|(name, _)| *name == "ivgen-hash-alg");
        let mode = match (self.is_cbc, self.ivgen.unwrap_or(IvGenerator::Plain64)) {
            // QEMU takes it, and has no use for it either.
            (_, IvGenerator::Plain | IvGenerator::Plain64) if has_hash && !dialect.is_qemu() => {
                return Err("ivgen-hash-alg is for ivgen-alg=essiv alone".to_owned());
            }
            (false, IvGenerator::Plain64) => Mode::XtsPlain64,
            (false, IvGenerator::Plain) => Mode::XtsPlain,
            (true, IvGenerator::Plain64) => Mode::CbcPlain64,
            (true, IvGenerator::Plain) => Mode::CbcPlain,
            (true, IvGenerator::Essiv) => Mode::CbcEssivSha256,
            (false, IvGenerator::Essiv) => Mode::XtsEssivSha256,
        };
        let key_len = if mode.is_xts() { 2 * block_key } else { block_key };
        let cipher = CipherSpec::new(cipher, mode, key_len).map_err(|error| error.to_string())?;
        let mut encryption = NewEncryption::default()
            .method(method)
            .cipher(cipher)
            .hash(self.hash.unwrap_or(HashName::Sha256))
            .iteration_time(self.iteration_time.unwrap_or(Duration::from_secs(2)));
        if let Some(secrets) = secrets {
            if method == NewMethod::LegacyAes && !dialect.is_qemu() {
                stderr::tell(
                    dialect,
                    "warning: encrypt.format=aes is weak: the passphrase itself is the key; use luks",
                );
            }
            let id = self
                .key_secret
                .as_ref()
                .ok_or_else(|| format!("Parameter '{}key-secret' is required for cipher", prefix(format)))?;
            encryption.passphrase = Some(secrets.get(id)?);
        }
        Ok(Some(encryption))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)], format: Format) -> Result<Option<NewEncryption>, String> {
        let mut opts = EncryptOpts::default();
        for (name, value) in pairs {
            assert!(opts.set(name, value, format)?, "{name}");
        }
        opts.resolve(Program::Zebu, format, None)
    }

    #[test]
    fn ciphers_have_qemus_names() {
        let found = |pairs: &[(&str, &str)]| {
            let cipher = parse(pairs, Format::Luks).unwrap().unwrap().cipher;
            (cipher.to_string(), cipher.key_len())
        };
        assert_eq!(found(&[]), ("aes-xts-plain64".to_owned(), 64));
        assert_eq!(
            found(&[("cipher-alg", "aes-128"), ("cipher-mode", "cbc"), ("ivgen-alg", "essiv")]),
            ("aes-cbc-essiv:sha256".to_owned(), 16)
        );
        assert_eq!(found(&[("cipher-alg", "twofish-192")]), ("twofish-xts-plain64".to_owned(), 48));
    }

    #[test]
    fn what_is_not_there_is_refused_by_name() {
        for (name, value) in [
            ("cipher-alg", "des"),
            ("cipher-alg", "aes-512"),
            ("cipher-alg", "cast5-128"),
            ("cipher-mode", "ecb"),
            ("ivgen-hash-alg", "sha256"),
            ("hash-alg", "ripemd160"),
            ("iter-time", "0"),
            ("iter-time", "long"),
            ("iter-time", "3600001"),
        ] {
            let error = parse(&[(name, value)], Format::Luks).unwrap_err();
            assert!(error.contains(name), "{name}={value}: {error}");
        }
        let aes = parse(&[("format", "aes")], Format::Qcow2).unwrap().unwrap();
        assert_eq!(aes.method, NewMethod::LegacyAes);
        let more = parse(&[("format", "aes"), ("hash-alg", "sha1")], Format::Qcow2).unwrap_err();
        assert!(more.contains("'encrypt.hash-alg' needs"), "{more}");
        assert!(
            parse(&[("cipher-alg", "aes-128")], Format::Qcow2).unwrap_err().contains("encrypt.format=luks")
        );
        assert!(parse(&[("format", "luks")], Format::Qcow2).unwrap().is_some());
    }
}
