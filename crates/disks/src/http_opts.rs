//! Image options of a file on a web server (`driver=http`, `driver=https`), with QEMU's keys and some of zebu's own; and of an
//! object in a store (`driver=s3`, `driver=gs`, `driver=az`), with those of them that mean something there.

use crate::disks::Disks;
use crate::keyval::{parse_size_value, parse_switch};
use crate::remote_disk::RemoteName;
use std::path::Path;
use std::time::Duration;
use zebu_remote::http::{Cookie, Credentials, HttpUrl, Redirects, Verification, password_of};
use zebu_store::StoreName;

/// Keys that mean something with these drivers.
const KEYS: [&str; 18] = [
    "url",
    "readahead",
    "timeout",
    "sslverify",
    "cookie",
    "username",
    "password-file",
    "proxy-username",
    "proxy-password-file",
    "tls-ca",
    "memory",
    "connections",
    "redirects",
    "netrc",
    "cookie-secret",
    "password-secret",
    "proxy-password-secret",
    "force-range",
];

/// Keys that QEMU has and zebu refuses, with the reason.
const REFUSED: [(&str, &str); 4] = [
    ("cookie-secret", "use cookie=VALUE"),
    ("password-secret", "use password-file=FILE, whose first line is the password, or a netrc file"),
    ("proxy-password-secret", "use proxy-password-file=FILE, whose first line is the password"),
    ("force-range", "ranges are always asked for, and a server without them is detected"),
];

/// Keys that say who asks, or where to: a store has its own ways.
const NOT_OF_STORES: [&str; 5] = ["cookie", "username", "password-file", "redirects", "netrc"];

/// The most connections of one disk.
const MOST_CONNECTIONS: usize = 256;

/// The keys of one file, as far as they are those of web servers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct HttpOpts {
    /// The driver's name, which is the scheme.
    driver: Option<String>,
    pairs: Vec<(&'static str, String)>,
}

impl HttpOpts {
    /// The driver is `http` or `https`.
    pub(crate) fn name(&mut self, driver: &str) {
        self.driver = Some(driver.to_owned());
    }

    /// Whether `driver` is one of these.
    pub(crate) fn is_driver(driver: &str) -> bool {
        matches!(driver, "http" | "https" | "s3" | "gs" | "az")
    }

    /// Takes a pair if its key is one of these.
    pub(crate) fn take(&mut self, key: &str, value: &str) -> Result<bool, String> {
        let Some(&key) = KEYS.iter().find(|known| **known == key) else { return Ok(false) };
        if self.pairs.iter().any(|(known, _)| *known == key) {
            return Err(format!("Parameter '{key}' is given twice"));
        }
        self.pairs.push((key, value.to_owned()));
        Ok(true)
    }

    /// The disk; `None` if there is no word of web servers.
    ///
    /// # Errors
    /// A key without the driver, one that is missing, contradicts another, can't be read, or is not supported.
    pub(crate) fn finish(self, disks: &Disks) -> Result<Option<RemoteName>, String> {
        let Some(driver) = &self.driver else {
            return match self.pairs.first() {
                None => Ok(None),
                Some((key, _)) => {
                    Err(format!("Unknown parameter '{key}' (it goes with driver=http, https, s3, gs and az)"))
                }
            };
        };
        let get =
            |key: &str| self.pairs.iter().find(|(known, _)| *known == key).map(|(_, value)| value.as_str());
        if let Some((key, reason)) = REFUSED.iter().find(|(key, _)| get(key).is_some()) {
            return Err(format!("Parameter '{key}' is not supported: {reason}"));
        }
        let is_store = !matches!(driver.as_str(), "http" | "https");
        let form = if is_store { "BUCKET/KEY" } else { "HOST/PATH" };
        let url = get("url").ok_or_else(|| format!("driver={driver} needs url={driver}://{form}"))?;
        if is_store && let Some(key) = NOT_OF_STORES.iter().find(|key| get(key).is_some()) {
            return Err(format!(
                "Parameter '{key}' is not supported: credentials of a store are in the environment or a profile"
            ));
        }
        let place = UrlValue::parse(url, is_store).map_err(|reason| format!("Parameter 'url': {reason}"))?;
        if place.scheme() != driver {
            return Err(format!(
                "Parameter 'url': {driver} driver cannot handle the URL '{}' (its scheme differs)",
                place.shown()
            ));
        }
        let mut options = disks.remote.http_options();
        if let Some(value) = get("readahead") {
            let bytes = parse_size_value("readahead", value)?;
            if bytes == 0 || bytes % 512 != 0 || bytes > 8 << 20 {
                return Err(format!(
                    "Parameter 'readahead' expects a multiple of 512 up to 8M, not '{value}'"
                ));
            }
            options.readahead = Some(bytes);
        }
        if let Some(value) = get("timeout") {
            options.timeout = match value.parse::<u32>() {
                Ok(seconds @ 1..=86400) => Duration::from_secs(seconds.into()),
                _ => {
                    return Err(format!(
                        "Parameter 'timeout' expects seconds from 1 to 86400, not '{value}'"
                    ));
                }
            };
            options.connect_timeout = options.connect_timeout.min(options.timeout);
        }
        if let Some(value) = get("sslverify")
            && !parse_switch("sslverify", value)?
        {
            options.verification = Verification::Off;
        }
        if let Some(value) = get("netrc") {
            options.netrc = parse_switch("netrc", value)?;
        }
        if let Some(value) = get("cookie") {
            let cookie = Cookie::new(value).map_err(|reason| format!("Parameter 'cookie': {reason}"))?;
            options.cookie = Some(cookie);
        }
        if let Some(value) = get("tls-ca") {
            options.authorities = Some(value.into());
        }
        if let Some(value) = get("memory") {
            options.memory = parse_size_value("memory", value)?;
            if options.memory < 4 << 20 {
                return Err(format!("Parameter 'memory' expects at least 4M, not '{value}'"));
            }
        }
        if let Some(value) = get("connections") {
            options.connections = match value.parse() {
                Ok(connections @ 1..=MOST_CONNECTIONS) => connections,
                _ => {
                    return Err(format!(
                        "Parameter 'connections' expects a number from 1 to {MOST_CONNECTIONS}, not '{value}'"
                    ));
                }
            };
        }
        if let Some(value) = get("redirects") {
            options.redirects = match value {
                "safe" => Redirects::Safe,
                "any" => Redirects::Any,
                _ => return Err(format!("Parameter 'redirects' expects safe or any, not '{value}'")),
            };
        }
        options.credentials =
            credentials("username", get("username"), "password-file", get("password-file"))?;
        options.proxy_credentials = credentials(
            "proxy-username",
            get("proxy-username"),
            "proxy-password-file",
            get("proxy-password-file"),
        )?;
        let options = Box::new(options);
        Ok(Some(match place {
            UrlValue::Web(url) => RemoteName::Http { url, options },
            UrlValue::Store(name) => RemoteName::Object { name, options },
        }))
    }
}

/// The value of `url`.
enum UrlValue {
    Web(HttpUrl),
    Store(StoreName),
}

impl UrlValue {
    fn parse(url: &str, is_store: bool) -> Result<Self, String> {
        if is_store { StoreName::parse(url).map(Self::Store) } else { HttpUrl::parse(url).map(Self::Web) }
    }

    fn scheme(&self) -> &'static str {
        match self {
            Self::Web(url) if url.is_secure() => "https",
            Self::Web(_) => "http",
            Self::Store(name) => name.kind().scheme(),
        }
    }

    fn shown(&self) -> String {
        match self {
            Self::Web(url) => url.to_string(),
            Self::Store(name) => name.to_string(),
        }
    }
}

fn credentials(
    user_key: &str,
    user: Option<&str>,
    file_key: &str,
    file: Option<&str>,
) -> Result<Option<Credentials>, String> {
    let Some(user) = user else {
        return match file {
            None => Ok(None),
            Some(_) => Err(format!("Parameter '{file_key}' needs '{user_key}'")),
        };
    };
    let password = match file {
        None => String::new(),
        Some(path) => {
            password_of(Path::new(path)).map_err(|reason| format!("Parameter '{file_key}': {reason}"))?
        }
    };
    Credentials::new(user, password).map(Some).map_err(|reason| format!("Parameter '{user_key}': {reason}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opts(driver: &str, pairs: &[(&str, &str)]) -> Result<Option<RemoteName>, String> {
        let mut opts = HttpOpts::default();
        opts.name(driver);
        for (key, value) in pairs {
            assert!(opts.take(key, value)?, "{key}");
        }
        opts.finish(&Disks::default())
    }

    #[test]
    fn keys_are_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "secret\n").unwrap();
        let path = file.path().to_str().unwrap();
        let found = opts(
            "https",
            &[
                ("url", "https://h/x"),
                ("readahead", "1M"),
                ("timeout", "5"),
                ("sslverify", "off"),
                ("cookie", "a=b"),
                ("username", "u"),
                ("password-file", path),
                ("memory", "8M"),
                ("connections", "3"),
                ("redirects", "any"),
                ("netrc", "off"),
            ],
        );
        let Ok(Some(RemoteName::Http { url, options })) = found else { panic!("{found:?}") };
        assert_eq!((url.to_string().as_str(), options.readahead), ("https://h/x", Some(1 << 20)));
        assert_eq!((options.timeout.as_secs(), options.connections, options.memory), (5, 3, 8 << 20));
        assert_eq!((options.verification, options.redirects), (Verification::Off, Redirects::Any));
        assert_eq!(options.credentials, Credentials::new("u", "secret").ok());
        assert!(options.cookie.is_some() && !options.netrc && !format!("{options:?}").contains("secret"));
    }

    #[test]
    fn what_contradicts_or_is_not_supported_is_named() {
        let url = ("url", "http://h/x");
        for (pairs, word) in [
            (&[][..], "url"),
            (&[("url", "https://h/x")], "scheme"),
            (&[("url", "ftp://h/x")], "scheme"),
            (&[url, ("timeout", "0")], "timeout"),
            (&[url, ("readahead", "100")], "readahead"),
            (&[url, ("memory", "1M")], "memory"),
            (&[url, ("connections", "0")], "connections"),
            (&[url, ("sslverify", "maybe")], "sslverify"),
            (&[url, ("password-secret", "s")], "password-file"),
            (&[url, ("password-file", "s")], "username"),
            (&[url, ("cookie-secret", "s")], "cookie"),
            (&[url, ("cookie", "a\nb")], "cookie"),
            (&[url, url], "twice"),
        ] {
            let error = opts("http", pairs).unwrap_err();
            assert!(error.contains(word), "{pairs:?}: {error}");
        }
        let mut opts = HttpOpts::default();
        assert_eq!(opts.take("nothing", "x"), Ok(false));
        assert_eq!(opts.take("url", "x"), Ok(true));
        assert!(opts.finish(&Disks::default()).unwrap_err().contains("driver=http"));
    }
}
