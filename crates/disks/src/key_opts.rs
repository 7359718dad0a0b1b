//! Image options that name the keys of a chain: `key-secret`, `encrypt.key-secret` and `encrypt.format`, each with `backing.`
//! before it for every step down.

use crate::json_name::parse_json_name;
use crate::secrets::Secrets;
use std::path::Path;
use zebu_engine::{Error, ErrorKind, Keys};

/// The keys that options name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KeyOpts {
    /// IDs of secrets, each with the depth of its image in the chain.
    ids: Vec<(u32, String)>,
    /// `encrypt.format`, with the depth.
    methods: Vec<(u32, &'static str)>,
    /// Options that were given, by the depth of the image that they are about.
    options: Vec<(u32, String)>,
}

impl KeyOpts {
    /// Takes an option; false if it is about something else.
    pub(crate) fn take(&mut self, key: &str, value: &str) -> Result<bool, String> {
        let (mut depth, mut rest) = (0, key);
        while let Some(below) = rest.strip_prefix("backing.") {
            (depth, rest) = (depth + 1, below);
        }
        match rest {
            "encrypt.key-secret" | "key-secret" => {
                if self.ids.iter().any(|(other, _)| *other == depth) {
                    return Err(format!("Parameter '{key}' is given twice"));
                }
                self.ids.push((depth, value.to_owned()));
                self.options.push((depth, key.to_owned()));
            }
            "encrypt.format" => {
                let method = match value {
                    "luks" => "luks",
                    "aes" => "aes",
                    _ => {
                        return Err(format!(
                            "Parameter '{key}' does not accept value '{value}' (luks or aes)"
                        ));
                    }
                };
                if self.methods.iter().any(|(other, _)| *other == depth) {
                    return Err(format!("Parameter '{key}' is given twice"));
                }
                self.methods.push((depth, method));
                self.options.push((depth, key.to_owned()));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Options without those about keys, and these.
    pub(crate) fn split(pairs: Vec<(String, String)>) -> Result<(Vec<(String, String)>, Self), String> {
        let (mut others, mut opts) = (Vec::new(), Self::default());
        for (key, value) in pairs {
            if !opts.take(&key, &value)? {
                others.push((key, value));
            }
        }
        Ok((others, opts))
    }

    /// The ID for the top image.
    pub(crate) fn of_top(&self) -> Option<&str> {
        self.ids.iter().find(|(depth, _)| *depth == 0).map(|(_, id)| id.as_str())
    }

    /// An option that is about the top image.
    pub(crate) fn option_of_top(&self) -> Option<&str> {
        self.options.iter().find(|(depth, _)| *depth == 0).map(|(_, option)| option.as_str())
    }

    /// Adds the keys that are named to `keys`.
    pub(crate) fn keys(&self, secrets: &Secrets, mut keys: Keys) -> Result<Keys, String> {
        for (depth, id) in &self.ids {
            if let Some(passphrase) = secrets.key(id)? {
                keys = keys.with(*depth, passphrase);
            }
        }
        for (depth, method) in &self.methods {
            keys = keys.expecting(*depth, method);
        }
        Ok(keys)
    }
}

/// The same keys, and those that a `json:` name in an image, or on the command line, names.
pub fn with_names(keys: Keys, secrets: &Secrets) -> Keys {
    let secrets = secrets.clone();
    keys.naming(move |name| {
        keys_of_name(name, &secrets).map_err(|reason| Error::new(ErrorKind::KeyMissing, reason).on(name))
    })
}

fn keys_of_name(name: &Path, secrets: &Secrets) -> Result<Keys, String> {
    let Some(pairs) = name.to_str().and_then(parse_json_name) else { return Ok(Keys::default()) };
    KeyOpts::split(pairs?)?.1.keys(secrets, Keys::default())
}

/// Adds the keys of `--backing-key-secret`: the first is that of the image at `depth`, the next of the one below it. An empty ID
/// is for an image that is not encrypted.
pub fn with_backing_keys(
    mut keys: Keys,
    ids: &[String],
    depth: u32,
    secrets: &Secrets,
) -> Result<Keys, String> {
    for (depth, id) in (depth..).zip(ids) {
        if !id.is_empty() {
            keys = keys.with(depth, secrets.get(id)?);
        }
    }
    Ok(keys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secrets::tests::read;

    #[test]
    fn a_name_tells_the_key_of_each_image() {
        let secrets = read(&["secret,id=a,data=x", "secret,id=b,data=y"]).unwrap();
        let of = |name: &str| keys_of_name(Path::new(name), &secrets).map(|keys| format!("{keys:?}"));
        let both = of("json:{'driver':'qcow2','encrypt':{'key-secret':'a'},'backing':{'key-secret':'b'}}");
        assert!(both.as_ref().is_ok_and(|keys| keys.contains("[0, 1]")), "{both:?}");
        assert!(of("disk.qcow2").is_ok_and(|keys| keys.contains("[]")));
        let missing = of("json:{'driver':'luks','key-secret':'c'}");
        assert!(missing.is_err_and(|reason| reason.contains("'c'")));
    }
}
