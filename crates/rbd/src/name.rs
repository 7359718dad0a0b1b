//! Names of images: QEMU's `rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][:KEY=VALUE...]`.
//!
//! A backslash takes the meaning from the character behind it.

use std::fmt;

/// The start of a name.
const PREFIX: &str = "rbd:";
/// Keys of Ceph whose value is a secret. A name is shown, and seen by every user of the machine.
const SECRETS: [&str; 2] = ["key", "auth_service_key"];

/// An image of a cluster, or a snapshot of one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RbdName {
    /// The pool; not empty.
    pub pool: String,
    /// The namespace in the pool; empty for the pool's own.
    pub namespace: String,
    /// The image; not empty.
    pub image: String,
    /// The snapshot of the image, which can be read only.
    pub snapshot: Option<String>,
    /// The file with Ceph's configuration, in place of the one that librados looks for.
    pub conf: Option<String>,
    /// The user without `client.`; librados's own (`admin`) unless given.
    pub user: Option<String>,
    /// Settings of Ceph's configuration, over those of the file.
    pub settings: Vec<(String, String)>,
}

impl RbdName {
    /// An image, with all else as librados has it.
    pub fn new(pool: impl Into<String>, image: impl Into<String>) -> Self {
        Self {
            pool: pool.into(),
            namespace: String::new(),
            image: image.into(),
            snapshot: None,
            conf: None,
            user: None,
            settings: Vec::new(),
        }
    }

    /// Whether `name` is of the kind that [`RbdName::parse`] reads.
    pub fn is_name(name: &str) -> bool {
        name.starts_with(PREFIX)
    }

    /// Reads a name.
    ///
    /// # Errors
    /// The reason in words: a missing part, a key without a value, a key that is given twice, or a secret.
    pub fn parse(name: &str) -> Result<Self, String> {
        let rest = name.strip_prefix(PREFIX).ok_or("a name of RBD begins with rbd:")?;
        let (place, settings) = cut(rest, ':');
        let (pool, place) = cut(place, '/');
        let place = place.ok_or("the image is missing: rbd:POOL/IMAGE")?;
        let (path, snapshot) = cut(place, '@');
        let (namespace, image) = match cut(path, '/') {
            (image, None) => ("", image),
            (namespace, Some(image)) => (namespace, image),
        };
        let mut parsed = Self::new(plain(pool), plain(image));
        parsed.namespace = plain(namespace);
        parsed.snapshot = snapshot.map(plain);
        let mut rest = settings;
        while let Some(text) = rest {
            let (pair, next) = cut(text, ':');
            rest = next;
            let (key, value) = cut(pair, '=');
            let (key, value) = (plain(key), value.map(plain));
            let value = value.ok_or_else(|| format!("the key '{key}' has no value: add =VALUE"))?;
            parsed.set(&key, value)?;
        }
        parsed.check()?;
        Ok(parsed)
    }

    /// Takes a setting: `conf`, `id`, or one of Ceph's configuration.
    ///
    /// # Errors
    /// The key is empty, was given before, or is that of a secret.
    pub fn set(&mut self, key: &str, value: String) -> Result<(), String> {
        let is_given = match key {
            "" => return Err("a key is empty".to_owned()),
            "conf" => self.conf.is_some(),
            "id" => self.user.is_some(),
            _ if SECRETS.contains(&key) => {
                return Err(format!(
                    "the key '{key}' is a secret, and names are seen by others: name a file with keyring= or keyfile="
                ));
            }
            _ => self.settings.iter().any(|(known, _)| known == key),
        };
        if is_given {
            return Err(format!("the key '{key}' is given twice"));
        }
        match key {
            "conf" => self.conf = Some(value),
            "id" => self.user = Some(value),
            _ => self.settings.push((key.to_owned(), value)),
        }
        Ok(())
    }

    /// Whether all parts are there.
    ///
    /// # Errors
    /// The reason in words: which part is empty, or has a NUL character.
    pub fn check(&self) -> Result<(), String> {
        let parts = [
            ("pool", Some(&self.pool)),
            ("image", Some(&self.image)),
            ("snapshot", self.snapshot.as_ref()),
            ("value of 'conf'", self.conf.as_ref()),
            ("value of 'id'", self.user.as_ref()),
        ];
        if let Some((part, _)) = parts.iter().find(|(_, text)| text.is_some_and(String::is_empty)) {
            return Err(format!("the {part} is empty: rbd:POOL/IMAGE[@SNAPSHOT]"));
        }
        let settings = self.settings.iter().flat_map(|(key, value)| [key, value]);
        let all = parts.iter().filter_map(|(_, text)| *text).chain([&self.namespace]).chain(settings);
        if all.into_iter().any(|text| text.contains('\0')) {
            return Err("there is a NUL character in it".to_owned());
        }
        Ok(())
    }

    /// Whether it says which cluster, user or settings are used.
    pub fn has_settings(&self) -> bool {
        self.conf.is_some() || self.user.is_some() || !self.settings.is_empty()
    }

    /// Whether both are the same image or snapshot, as the names tell it. Users and settings may differ.
    pub fn is_place_of(&self, other: &Self) -> bool {
        let place = |name: &Self| {
            let Self { pool, namespace, image, snapshot, conf, .. } = name.clone();
            (pool, namespace, image, snapshot, conf)
        };
        place(self) == place(other)
    }
}

/// The name without `rbd:` and settings: `POOL/IMAGE`.
pub(crate) struct PoolAndImage<'a>(pub(crate) &'a RbdName);

impl fmt::Display for PoolAndImage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RbdName { pool, namespace, image, snapshot, .. } = self.0;
        write!(f, "{}/", Escaped(pool))?;
        if !namespace.is_empty() {
            write!(f, "{}/", Escaped(namespace))?;
        }
        write!(f, "{}", Escaped(image))?;
        match snapshot {
            Some(snapshot) => write!(f, "@{}", Escaped(snapshot)),
            None => Ok(()),
        }
    }
}

/// The name that [`RbdName::parse`] reads.
impl fmt::Display for RbdName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", PoolAndImage(self))?;
        if let Some(conf) = &self.conf {
            write!(f, ":conf={}", EscapedValue(conf))?;
        }
        if let Some(user) = &self.user {
            write!(f, ":id={}", EscapedValue(user))?;
        }
        for (key, value) in &self.settings {
            write!(f, ":{}={}", Escaped(key), EscapedValue(value))?;
        }
        Ok(())
    }
}

/// A part of a name, with a backslash before what would mean something.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        escape(f, self.0, &['\\', ':', '/', '@', '='])
    }
}

/// A value, where slashes and the like mean nothing.
struct EscapedValue<'a>(&'a str);

impl fmt::Display for EscapedValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // QEMU takes an @ in a value for that of a snapshot.
        escape(f, self.0, &['\\', ':', '@'])
    }
}

fn escape(f: &mut fmt::Formatter<'_>, text: &str, meaning: &[char]) -> fmt::Result {
    for c in text.chars() {
        if meaning.contains(&c) {
            f.write_str("\\")?;
        }
        write!(f, "{c}")?;
    }
    Ok(())
}

/// The text before the first `border` without a backslash, and that after it.
fn cut(text: &str, border: char) -> (&str, Option<&str>) {
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        if c == border {
            return (&text[..at], Some(&text[at + c.len_utf8()..]));
        }
        if c == '\\' {
            chars.next();
        }
    }
    (text, None)
}

/// The text without its backslashes. One at the end stands for itself.
fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        out.push(if c == '\\' { chars.next().unwrap_or(c) } else { c });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(pool: &str, image: &str) -> RbdName {
        RbdName::new(pool, image)
    }

    #[test]
    fn all_parts_are_read_and_written() {
        let all = RbdName {
            namespace: "n".to_owned(),
            snapshot: Some("s".to_owned()),
            conf: Some("/etc/ceph/c.conf".to_owned()),
            user: Some("u".to_owned()),
            settings: vec![("mon_host".to_owned(), "[::1]:3300,h@x".to_owned())],
            ..name("p", "i")
        };
        for (text, expected) in [
            ("rbd:p/i", name("p", "i")),
            ("rbd:p/n/i@s:conf=/etc/ceph/c.conf:id=u:mon_host=[\\:\\:1]\\:3300,h\\@x", all),
            ("rbd:p\\/q/i\\:j", name("p/q", "i:j")),
            ("rbd:p/a\\\\b\\@c", name("p", "a\\b@c")),
            ("rbd:p/n/i", RbdName { namespace: "n".to_owned(), ..name("p", "i") }),
            ("rbd:p/i@s", RbdName { snapshot: Some("s".to_owned()), ..name("p", "i") }),
            ("rbd:p/i\\", name("p", "i\\")),
            ("rbd:p/ä\\öü", name("p", "äöü")),
        ] {
            assert_eq!(RbdName::parse(text).as_ref(), Ok(&expected), "{text}");
            assert_eq!(RbdName::parse(&expected.to_string()), Ok(expected), "{text}");
        }
        // An @ in a value is none of a snapshot.
        let odd = RbdName::parse("rbd:p/i:rbd_x=a@b").unwrap();
        assert_eq!((odd.snapshot.as_deref(), odd.settings[0].1.as_str()), (None, "a@b"));
    }

    #[test]
    fn wrong_names_say_what_is_wrong() {
        for (text, word) in [
            ("rbd:", "image is missing"),
            ("rbd:pool", "image is missing"),
            ("rbd:/i", "pool is empty"),
            ("rbd:p/", "image is empty"),
            ("rbd:p/n/", "image is empty"),
            ("rbd:p/i@", "snapshot is empty"),
            ("rbd:p/i:conf", "'conf' has no value"),
            ("rbd:p/i:conf=", "'conf' is empty"),
            ("rbd:p/i:", "'' has no value"),
            ("rbd:p/i:=x", "empty"),
            ("rbd:p/i:id=a:id=b", "'id' is given twice"),
            ("rbd:p/i:rbd_cache=a:rbd_cache=b", "'rbd_cache' is given twice"),
            ("rbd:p/i:key=AQB", "keyring="),
            ("rbd:p/i\0", "NUL"),
            ("nbd:p/i", "begins"),
        ] {
            let error = RbdName::parse(text).unwrap_err();
            assert!(error.contains(word) && !error.contains("AQB"), "{text}: {error}");
        }
    }

    #[test]
    fn a_place_is_told_by_its_parts() {
        let parse = |text: &str| RbdName::parse(text).unwrap();
        assert!(parse("rbd:p/i:id=a").is_place_of(&parse("rbd:p/i")));
        assert!(!parse("rbd:p/i@s").is_place_of(&parse("rbd:p/i")));
        assert!(parse("rbd:p/i:id=a").has_settings() && !parse("rbd:p/n/i@s").has_settings());
    }
}
