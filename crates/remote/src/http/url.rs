//! Names of objects on web servers (RFC 3986).

use super::credentials::Credentials;
use crate::percent;
use std::fmt;
use ureq_proto::http::uri::PathAndQuery;

/// The longest name that is taken, in bytes.
const LONGEST: usize = 16 << 10;

/// `http://` or `https://`, a host, and a path. Its text form has neither user, nor password, nor the query.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HttpUrl {
    is_secure: bool,
    /// Without brackets.
    host: String,
    port: u16,
    path_and_query: String,
    credentials: Option<Credentials>,
}

impl HttpUrl {
    /// Whether `name` is of a kind that [`HttpUrl::parse`] reads.
    pub fn is_name(name: &str) -> bool {
        ["http://", "https://"].iter().any(|scheme| {
            name.get(..scheme.len()).is_some_and(|beginning| beginning.eq_ignore_ascii_case(scheme))
        })
    }

    /// Reads a name.
    ///
    /// # Errors
    /// The reason in words, without what could be secret: another scheme, no host, characters that must be escaped.
    pub fn parse(name: &str) -> Result<Self, String> {
        if name.len() > LONGEST {
            return Err(format!("the URL is longer than {LONGEST} bytes"));
        }
        let (scheme, rest) = name.split_once("://").ok_or("a URL begins with http:// or https://")?;
        let is_secure = match scheme.to_ascii_lowercase().as_str() {
            "http" => false,
            "https" => true,
            _ => return Err("the scheme must be http or https".to_owned()),
        };
        if rest.contains('#') {
            return Err("a fragment (#) means nothing here: write %23 for the character".to_owned());
        }
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let (user, place) = match authority.rsplit_once('@') {
            None => (None, authority),
            Some((user, place)) => (Some(user), place),
        };
        let credentials = user.map(parse_user).transpose()?;
        let (host, port) = parse_place(place, if is_secure { 443 } else { 80 })?;
        let path_and_query = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let is_plain = path_and_query.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_plain || path_and_query.parse::<PathAndQuery>().is_err() {
            return Err("the path has characters that must be written as %XX".to_owned());
        }
        Ok(Self { is_secure, host, port, path_and_query, credentials })
    }

    /// A text that may be a URL, without what can be secret in it.
    pub fn hide(name: &str) -> String {
        let (scheme, rest) =
            name.split_once("://").map_or(("", name), |(_, rest)| (&name[..name.len() - rest.len()], rest));
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let has_no_port = |(_, port): (&str, &str)| !port.bytes().all(|byte| byte.is_ascii_digit());
        let is_cut = !rest[..end].contains('@') && rest[..end].rsplit_once(':').is_some_and(has_no_port);
        let from = match rest.rfind('@') {
            // A password with a character that ends the authority: it should have been escaped.
            Some(at) if is_cut => at + 1,
            _ => 0,
        };
        let rest = &rest[from..];
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        let place = authority.rsplit('@').next().unwrap_or_default();
        let shown = path.split('?').next().unwrap_or_default();
        format!("{scheme}{place}{shown}{}", if shown.len() < path.len() { "?..." } else { "" })
    }

    /// The host, without brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether it is `https`.
    pub fn is_secure(&self) -> bool {
        self.is_secure
    }

    /// Whether a user stands in the name.
    pub fn has_credentials(&self) -> bool {
        self.credentials.is_some()
    }

    /// User and password that stand in the name.
    pub(super) fn credentials(&self) -> Option<&Credentials> {
        self.credentials.as_ref()
    }

    /// Whether both are of one scheme, host and port.
    pub(super) fn has_origin_of(&self, other: &Self) -> bool {
        (self.is_secure, &self.host, self.port) == (other.is_secure, &other.host, other.port)
    }

    /// The same without what stands behind `?`.
    pub(super) fn without_query(&self) -> Self {
        let path = self.path_and_query.split('?').next().unwrap_or_default();
        Self { path_and_query: path.to_owned(), ..self.clone() }
    }

    /// `http://host:port`.
    pub(super) fn origin(&self) -> String {
        let scheme = if self.is_secure { "https" } else { "http" };
        let default = if self.is_secure { 443 } else { 80 };
        let host = self.bracketed();
        if self.port == default {
            format!("{scheme}://{host}")
        } else {
            format!("{scheme}://{host}:{}", self.port)
        }
    }

    /// The host as it stands in a URL.
    pub(super) fn bracketed(&self) -> String {
        if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() }
    }

    /// All of it but user and password, with the query: for the server only.
    pub(super) fn for_request(&self) -> String {
        format!("{}{}", self.origin(), self.path_and_query)
    }
}

fn parse_user(user: &str) -> Result<Credentials, String> {
    let (name, password) = user.split_once(':').unwrap_or((user, ""));
    // The text of the error would have the secret in it.
    let decoded =
        |text| percent::decode(text).map_err(|_| "user or password of the URL can't be read".to_owned());
    Credentials::new(decoded(name)?, decoded(password)?)
}

fn parse_place(place: &str, default: u16) -> Result<(String, u16), String> {
    let (host, port) = match place.strip_prefix('[') {
        Some(rest) => rest.split_once(']').ok_or("the bracket of the address is not closed")?,
        None => place.find(':').map_or((place, ""), |colon| place.split_at(colon)),
    };
    let is_address = place.starts_with('[');
    let fits = |byte: u8| {
        let more: &[u8] = if is_address { b":." } else { b"-._" };
        more.contains(&byte) || byte.is_ascii_hexdigit() || !is_address && byte.is_ascii_alphanumeric()
    };
    if host.is_empty() {
        return Err("the host is missing".to_owned());
    }
    if !host.bytes().all(fits) {
        return Err(
            "the host has characters that no host has (write an international name in its ASCII form)"
                .to_owned(),
        );
    }
    let port = match port.strip_prefix(':') {
        None if port.is_empty() => default,
        Some("") => default,
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            digits.parse().ok().filter(|port| *port != 0).ok_or("the port must be from 1 to 65535")?
        }
        _ => return Err("the port is no number".to_owned()),
    };
    Ok((host.to_ascii_lowercase(), port))
}

/// The URL without what can be secret.
impl fmt::Display for HttpUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path_and_query.split('?').next().unwrap_or_default();
        write!(f, "{}{path}", self.origin())?;
        if path.len() < self.path_and_query.len() { f.write_str("?...") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_shown_without_secrets() {
        for (name, request, shown) in [
            ("http://h", "http://h/", "http://h/"),
            ("HTTP://H:80/a%20b", "http://h/a%20b", "http://h/a%20b"),
            ("https://h:8443/x?sig=secret", "https://h:8443/x?sig=secret", "https://h:8443/x?..."),
            ("https://u:secret@h/x", "https://h/x", "https://h/x"),
            ("https://u%40d:s:e@h?q", "https://h/?q", "https://h/?..."),
            ("http://[::1]:7/x", "http://[::1]:7/x", "http://[::1]:7/x"),
        ] {
            let url = HttpUrl::parse(name).unwrap();
            assert_eq!((url.for_request().as_str(), url.to_string().as_str()), (request, shown), "{name}");
            assert!(HttpUrl::is_name(name) && !format!("{:?}", url.credentials).contains("secret"));
        }
    }

    #[test]
    fn what_can_not_be_read_is_hidden_as_well() {
        for (name, shown) in [
            ("http://u:secret@h:x/p?s=secret", "http://h:x/p?..."),
            ("http://secret@", "http://"),
            ("nbd://h/x", "nbd://h/x"),
            ("a@b/c", "b/c"),
            ("http://u:se/cret@h/p", "http://h/p"),
            ("http://u:se?cret@h/p?s=secret", "http://h/p?..."),
            ("http://h:80/a@b", "http://h:80/a@b"),
        ] {
            assert_eq!(HttpUrl::hide(name), shown);
        }
    }

    #[test]
    fn wrong_names_say_what_is_wrong_but_no_secret() {
        for (name, word) in [
            ("ftp://h/x", "scheme"),
            ("http:/h", "begins"),
            ("http://", "host"),
            ("http:///x", "host"),
            ("http://u:secret@/x", "host"),
            ("http://h:0/", "port"),
            ("http://h:+1/", "port"),
            ("http://h:99999/", "port"),
            ("http://h/secret x", "%XX"),
            ("http://h/\u{e9}", "%XX"),
            ("http://h/x#y", "fragment"),
            ("http://[::1/x", "bracket"),
            ("http://h\u{e9}/x", "ASCII"),
            ("http://a:%zzsecret@h/x", "password"),
            ("http://evil\r\nHost: x/", "host"),
        ] {
            let error = HttpUrl::parse(name).unwrap_err();
            assert!(error.contains(word) && !error.contains("secret"), "{name}: {error}");
        }
    }
}
