//! Users and passwords, which nothing shows.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use std::fmt;
use std::path::{Path, PathBuf};

/// The largest file of passwords that is read, in bytes.
const LARGEST: u64 = 1 << 20;

/// The entries of a netrc file that count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NetrcEntries {
    /// All of them: where there is none for a host, the default is.
    All,
    /// Entries that name a host.
    Named,
}

/// A user and a password. Their text forms show neither.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Credentials {
    user: String,
    password: String,
}

impl Credentials {
    /// A user's name without colon, and a password; neither has control characters (RFC 7617, section 2).
    ///
    /// # Errors
    /// The reason in words.
    pub fn new(user: impl Into<String>, password: impl Into<String>) -> Result<Self, String> {
        let (user, password) = (user.into(), password.into());
        if user.contains(':') {
            return Err("the name of a user can't have a colon".to_owned());
        }
        if user.chars().chain(password.chars()).any(char::is_control) {
            return Err("user and password can't have control characters".to_owned());
        }
        Ok(Self { user, password })
    }

    /// The value of the header `Authorization`.
    pub(super) fn basic(&self) -> String {
        format!("Basic {}", BASE64_STANDARD.encode(format!("{}:{}", self.user, self.password)))
    }

    /// The entry of `host` in the user's netrc file: the one that `NETRC` names, or `~/.netrc`. A file that is missing has
    /// none.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn of_netrc(host: &str, entries: NetrcEntries) -> Result<Option<Self>, String> {
        let named = std::env::var_os("NETRC").filter(|path| !path.is_empty()).map(PathBuf::from);
        let is_named = named.is_some();
        let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".netrc"));
        let Some(path) = named.or_else(home) else { return Ok(None) };
        match read_small(&path) {
            Ok(text) => find(&text, host, entries).map_err(|reason| format!("{}: {reason}", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !is_named => Ok(None),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    }
}

/// The first line of a file, as a password.
///
/// # Errors
/// The file can't be read.
pub fn password_of(path: &Path) -> Result<String, String> {
    let text = read_small(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

fn read_small(path: &Path) -> std::io::Result<String> {
    use std::io::Read;
    let mut text = String::new();
    std::fs::File::open(path)?.take(LARGEST).read_to_string(&mut text)?;
    Ok(text)
}

/// The entry of `host`, or else the default if it counts, in the text of a netrc file.
fn find(text: &str, host: &str, entries: NetrcEntries) -> Result<Option<Credentials>, String> {
    let mut words = Words(text);
    let mut is_meant = false;
    let mut found: Option<(String, String)> = None;
    while let Some(word) = words.next() {
        match word.as_str() {
            "machine" | "default" => {
                if is_meant && found.is_some() {
                    break;
                }
                is_meant = if word == "default" {
                    entries == NetrcEntries::All
                } else {
                    words.next().is_some_and(|name| name.eq_ignore_ascii_case(host))
                };
                found = is_meant.then(Default::default);
            }
            "login" => {
                let value = words.next().unwrap_or_default();
                if let Some((user, _)) = &mut found {
                    *user = value;
                }
            }
            "password" => {
                let value = words.next().unwrap_or_default();
                if let Some((_, password)) = &mut found {
                    *password = value;
                }
            }
            "account" => drop(words.next()),
            // A macro goes to the next empty line.
            "macdef" => words.skip_macro(),
            _ => return Err("a word that netrc files don't have".to_owned()),
        }
    }
    found.map(|(user, password)| Credentials::new(user, password)).transpose()
}

/// The words of a netrc file, some in quotes.
struct Words<'a>(&'a str);

impl Words<'_> {
    fn next(&mut self) -> Option<String> {
        loop {
            self.0 = self.0.trim_start();
            if !self.0.starts_with('#') {
                break;
            }
            self.0 = self.0.split_once('\n').map_or("", |(_, rest)| rest);
        }
        if self.0.is_empty() {
            return None;
        }
        let quoted = self.0.starts_with('"');
        let mut word = String::new();
        let mut letters = self.0.char_indices().skip(usize::from(quoted));
        let mut end = self.0.len();
        while let Some((at, letter)) = letters.next() {
            match letter {
                '"' if quoted => {
                    end = at + 1;
                    break;
                }
                '\\' if quoted => word.extend(letters.next().map(|(_, escaped)| escaped)),
                _ if letter.is_whitespace() && !quoted => {
                    end = at;
                    break;
                }
                _ => word.push(letter),
            }
        }
        self.0 = &self.0[end..];
        Some(word)
    }

    fn skip_macro(&mut self) {
        self.0 = self.0.find("\n\n").map_or("", |end| &self.0[end..]);
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn netrc_files_are_read() {
        let text = "# people\nmachine a.example login u password \"p w\\\"\"\nmachine b.example\n  password q\n\tlogin v\n\
                    macdef x\nmachine c.example login no\n\ndefault login any password r\n";
        let basic = |host| {
            find(text, host, NetrcEntries::All)
                .unwrap()
                .map(|found| format!("{}:{}", found.user, found.password))
        };
        assert_eq!(basic("A.example").as_deref(), Some("u:p w\""));
        assert_eq!(basic("b.example").as_deref(), Some("v:q"));
        assert_eq!(basic("c.example").as_deref(), Some("any:r"));
        assert_eq!(find("machine a login b", "c", NetrcEntries::All), Ok(None));
        let text = "machine a login b default login c";
        assert!(find(text, "x", NetrcEntries::All).is_ok_and(|found| found.is_some()));
        assert!(find(text, "a", NetrcEntries::Named).is_ok_and(|found| found.is_some()));
        assert_eq!(find(text, "x", NetrcEntries::Named), Ok(None));
        assert!(
            find("machine a secret", "a", NetrcEntries::All).is_err_and(|error| !error.contains("secret"))
        );
        assert!(
            find("machine", "a", NetrcEntries::All).is_ok()
                && find("login \"", "a", NetrcEntries::All).is_ok()
                && find("machine a login", "a", NetrcEntries::All).is_ok()
        );
    }

    #[test]
    fn nothing_shows_a_password() {
        let credentials = Credentials::new("user", "secret").unwrap();
        assert_eq!(format!("{credentials:?}"), "Credentials");
        assert_eq!(credentials.basic(), "Basic dXNlcjpzZWNyZXQ=");
        assert!(Credentials::new("a:b", "").is_err() && Credentials::new("a", "b\n").is_err());
    }
}
