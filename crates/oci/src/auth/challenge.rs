//! The header `WWW-Authenticate`: what a registry wants to be shown (RFC 9110, section 11.6.1).

/// A wish of a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Challenge {
    /// A user and a password.
    Basic,
    /// A token that `realm` gives.
    Bearer {
        /// The URL that gives tokens.
        realm: String,
        /// The name of the registry there.
        service: String,
    },
}

/// The longest value of a header that is read, in bytes.
const LONGEST: usize = 4096;

impl Challenge {
    /// The wish in a header: a token before a password. `None` if there is none that is known.
    pub(crate) fn parse(header: &str) -> Option<Self> {
        if header.len() > LONGEST {
            return None;
        }
        let mut found = None;
        let mut rest = header.trim_start();
        while !rest.is_empty() {
            let end = rest.find([' ', ',']).unwrap_or(rest.len());
            let scheme = &rest[..end];
            rest = rest[end..].trim_start_matches([' ', ',']);
            let (mut realm, mut service) = (None, String::new());
            while let Some((key, value, after)) = parameter(rest) {
                match key.to_ascii_lowercase().as_str() {
                    "realm" => realm = Some(value),
                    "service" => service = value,
                    _ => {}
                }
                rest = after;
            }
            if scheme.eq_ignore_ascii_case("bearer") {
                return realm.map(|realm| Self::Bearer { realm, service });
            }
            if scheme.eq_ignore_ascii_case("basic") {
                found = Some(Self::Basic);
            }
        }
        found
    }
}

/// The parameter at the beginning of a text, and what follows it.
fn parameter(text: &str) -> Option<(&str, String, &str)> {
    let (key, rest) = text.split_once('=')?;
    let key = key.trim();
    if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte)) {
        return None;
    }
    let rest = rest.trim_start();
    let (value, rest) = match rest.strip_prefix('"') {
        None => {
            let end = rest.find([' ', ',']).unwrap_or(rest.len());
            (rest[..end].to_owned(), &rest[end..])
        }
        Some(quoted) => {
            let mut value = String::new();
            let mut letters = quoted.char_indices();
            let end = loop {
                match letters.next()? {
                    (at, '"') => break at + 1,
                    (_, '\\') => value.push(letters.next()?.1),
                    (_, letter) => value.push(letter),
                }
            };
            (value, &quoted[end..])
        }
    };
    Some((key, value, rest.trim_start_matches([' ', ','])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wishes_are_read() {
        let bearer = |realm: &str, service: &str| {
            Some(Challenge::Bearer { realm: realm.to_owned(), service: service.to_owned() })
        };
        for (header, expected) in [
            ("Basic realm=\"x\"", Some(Challenge::Basic)),
            (
                "Bearer realm=\"https://a/t\",service=\"r\",scope=\"repository:x:pull\"",
                bearer("https://a/t", "r"),
            ),
            ("bearer realm=https://a/t", bearer("https://a/t", "")),
            (
                "Basic realm=\"x\", Bearer realm=\"https://a/t\", service=\"a \\\"b\"",
                bearer("https://a/t", "a \"b"),
            ),
            ("Negotiate, Basic realm=x", Some(Challenge::Basic)),
            ("Basic", Some(Challenge::Basic)),
            ("Bearer service=\"x\"", None),
            ("Bearer realm=\"open", None),
            ("Digest realm=\"x\"", None),
            ("", None),
            ("=,=\"", None),
        ] {
            assert_eq!(Challenge::parse(header), expected, "{header}");
        }
        assert_eq!(Challenge::parse(&format!("Basic realm=\"{}\"", "x".repeat(5000))), None);
    }
}
