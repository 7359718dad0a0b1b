//! Mirrors that are named by hand.

use std::str::FromStr;
use zebu_remote::http::HttpUrl;

/// A place that is asked before a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mirror {
    /// The registry; `None`: all.
    pub(crate) registry: Option<String>,
    pub(crate) url: String,
}

impl FromStr for Mirror {
    type Err = String;

    /// Reads `[REGISTRY=]URL`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (registry, url) = match text.split_once('=') {
            Some((registry, url)) if !registry.contains("://") => (Some(registry), url),
            _ => (None, text),
        };
        if registry.is_some_and(str::is_empty) {
            return Err("the registry is missing: [REGISTRY=]URL".to_owned());
        }
        let parsed = HttpUrl::parse(url)?;
        if parsed.has_credentials() {
            return Err(
                "no user belongs into the URL of a mirror: docker's or podman's files have it".to_owned()
            );
        }
        if url.contains('?') {
            return Err("no query belongs into the URL of a mirror".to_owned());
        }
        let (registry, url) = (registry.map(str::to_ascii_lowercase), url.trim_end_matches('/').to_owned());
        Ok(Self { registry, url })
    }
}
