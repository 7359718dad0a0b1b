//! Image options of an image of Ceph RBD (`driver=rbd`), with QEMU's keys.

use crate::program::Program;
use crate::remote_disk::RemoteName;
use zebu_rbd::RbdName;

/// Keys that mean something with `driver=rbd`.
const KEYS: [&str; 6] = ["pool", "namespace", "image", "snapshot", "conf", "user"];

/// Keys that QEMU has and zebu refuses, with the reason.
const REFUSED: [(&str, &str); 4] = [
    ("key-secret", "use the name rbd:POOL/IMAGE:keyring=FILE, whose file has the key"),
    ("auth-client-required", "use the name rbd:POOL/IMAGE:auth_client_required=VALUE"),
    ("server", "use conf=FILE, whose file names the monitors, or the name rbd:POOL/IMAGE:mon_host=ADDRESS"),
    (
        "encrypt",
        "librbd's encryption is not used: zebu decrypts LUKS itself, with the format luks above driver=rbd",
    ),
];

/// The keys of one file, as far as they are those of RBD.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RbdOpts {
    /// Whether the driver is named.
    is_named: bool,
    pairs: Vec<(&'static str, String)>,
}

impl RbdOpts {
    /// The driver is `rbd`.
    pub(crate) fn name(&mut self) {
        self.is_named = true;
    }

    /// Takes a pair if its key is one of RBD's.
    ///
    /// # Errors
    /// The key is given twice, or is one that QEMU has and zebu has not.
    pub(crate) fn take(&mut self, dialect: Program, key: &str, value: &str) -> Result<bool, String> {
        let first = key.split('.').next().unwrap_or(key);
        if self.is_named
            && let Some((_, reason)) = REFUSED.iter().find(|(name, _)| *name == first)
        {
            return Err(format!("Parameter '{key}' is not supported: {reason}"));
        }
        let Some(&key) = KEYS.iter().find(|known| **known == key) else { return Ok(false) };
        let given = self.pairs.iter().position(|(known, _)| *known == key);
        match given {
            // The last counts.
            Some(at) if dialect.is_qemu() => drop(self.pairs.remove(at)),
            Some(_) => return Err(format!("Parameter '{key}' is given twice")),
            None => {}
        }
        self.pairs.push((key, value.to_owned()));
        Ok(true)
    }

    /// The image; `None` if there is no word of RBD.
    ///
    /// # Errors
    /// A key without the driver, or one that is missing or empty.
    pub(crate) fn finish(self) -> Result<Option<RemoteName>, String> {
        if !self.is_named {
            return match self.pairs.first() {
                None => Ok(None),
                Some((key, _)) => Err(format!("Unknown parameter '{key}' (it goes with driver=rbd)")),
            };
        }
        let get =
            |key: &str| self.pairs.iter().find(|(known, _)| *known == key).map(|(_, value)| value.clone());
        let needed = |key: &str| get(key).ok_or_else(|| format!("Parameter '{key}' is missing"));
        let mut name = RbdName::new(needed("pool")?, needed("image")?);
        name.namespace = get("namespace").unwrap_or_default();
        name.snapshot = get("snapshot");
        name.conf = get("conf");
        name.user = get("user");
        name.check().map_err(|reason| format!("driver=rbd: {reason}"))?;
        Ok(Some(RemoteName::Rbd { name: Box::new(name) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opts(pairs: &[(&str, &str)]) -> Result<Option<String>, String> {
        let mut opts = RbdOpts::default();
        opts.name();
        for (key, value) in pairs {
            assert!(opts.take(Program::Zebu, key, value)?, "{key}");
        }
        Ok(opts.finish()?.map(|name| name.shown()))
    }

    #[test]
    fn keys_make_a_name() {
        for (pairs, name) in [
            (&[("pool", "p"), ("image", "i")][..], "rbd:p/i"),
            (
                &[
                    ("pool", "p"),
                    ("namespace", "n"),
                    ("image", "a:b"),
                    ("snapshot", "s"),
                    ("user", "u"),
                    ("conf", "/c"),
                ],
                "rbd:p/n/a\\:b@s:conf=/c:id=u",
            ),
        ] {
            assert_eq!(opts(pairs), Ok(Some(name.to_owned())));
        }
    }

    #[test]
    fn what_is_missing_or_not_supported_is_named() {
        for (pairs, word) in [
            (&[("pool", "p")][..], "'image'"),
            (&[("image", "i")], "'pool'"),
            (&[("pool", ""), ("image", "i")], "pool is empty"),
            (&[("pool", "p"), ("pool", "q")], "twice"),
            (&[("key-secret", "s")], "keyring"),
            (&[("server.0.host", "h")], "mon_host"),
            (&[("encrypt.format", "luks")], "luks"),
            (&[("auth-client-required.0", "none")], "auth_client_required"),
        ] {
            let error = opts(pairs).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        let mut opts = RbdOpts::default();
        assert_eq!(opts.take(Program::Zebu, "encrypt.format", "luks"), Ok(false));
        assert_eq!(opts.take(Program::Zebu, "pool", "x"), Ok(true));
        assert!(opts.finish().unwrap_err().contains("driver=rbd"));
    }
}
