//! Image options of a disk on an NBD server (`driver=nbd`), with QEMU's keys.

use crate::context::Context;
use crate::program::Program;
use crate::remote_disk::RemoteName;
use crate::tls_objects::NO_HOSTNAME;
use std::time::Duration;
use zebu_remote::nbd::{Endpoint, NbdAddress};

/// Keys that mean something with `driver=nbd`.
const KEYS: [&str; 13] = [
    "server.type",
    "server.host",
    "server.port",
    "server.path",
    "host",
    "port",
    "path",
    "export",
    "reconnect-delay",
    "open-timeout",
    "tls-creds",
    "tls-hostname",
    "x-dirty-bitmap",
];

/// The keys of one file, as far as they are those of NBD.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NbdOpts {
    /// Whether the driver is named.
    is_named: bool,
    pairs: Vec<(&'static str, String)>,
}

impl NbdOpts {
    /// The driver is `nbd`.
    pub(crate) fn name(&mut self) {
        self.is_named = true;
    }

    /// Takes a pair if its key is one of NBD's.
    pub(crate) fn take(&mut self, dialect: Program, key: &str, value: &str) -> Result<bool, String> {
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

    /// The disk; `None` if there is no word of NBD.
    ///
    /// # Errors
    /// A key without the driver, a key that is missing, contradicts another, or is not supported.
    pub(crate) fn finish(self, context: &Context) -> Result<Option<RemoteName>, String> {
        if !self.is_named {
            return match self.pairs.first() {
                None => Ok(None),
                Some((key, _)) => Err(format!("Unknown parameter '{key}' (it goes with driver=nbd)")),
            };
        }
        let get = |key: &str| self.pairs.iter().find(|(known, _)| *known == key).map(|(_, value)| value);
        let mut tls = get("tls-creds").map(|id| context.disks.tls.client_files(id)).transpose()?;
        if let Some(name) = get("tls-hostname") {
            let files = tls.as_mut().ok_or("Parameter 'tls-hostname' goes with tls-creds")?;
            files.server_name = Some(name.clone());
        }
        if get("x-dirty-bitmap").is_some() && !context.disks.names.bitmaps_are_allowed() {
            return Err("Parameter 'x-dirty-bitmap' is not supported: only 'map' shows bitmaps".to_owned());
        }
        let either = |new: &str, old: &str| match (get(new), get(old)) {
            (Some(_), Some(_)) => Err(format!("Parameters '{new}' and '{old}' are the same: give one")),
            (new, old) => Ok(new.or(old)),
        };
        let (host, port) = (either("server.host", "host")?, either("server.port", "port")?);
        let path = either("server.path", "path")?;
        let endpoint = match (get("server.type").map(String::as_str), host, path) {
            (Some("unix") | None, None, Some(path)) if port.is_none() => Endpoint::Unix(path.into()),
            (Some("inet") | None, Some(host), None) => {
                let port = match port {
                    None => 10809,
                    Some(port) => port.parse().ok().filter(|port| *port != 0).ok_or_else(|| {
                        format!("Parameter 'port' expects a number from 1 to 65535, not '{port}'")
                    })?,
                };
                Endpoint::Tcp { host: host.clone(), port }
            }
            (Some(other), ..) if other != "unix" && other != "inet" => {
                return Err(format!("Parameter 'server.type' expects inet or unix, not '{other}'"));
            }
            _ => {
                return Err("driver=nbd needs either server.host (and server.port) or server.path".to_owned());
            }
        };
        // QEMU takes no name in place of the host's, which a Unix socket does not have.
        if let (Some(files), Endpoint::Unix(_), true) = (&tls, &endpoint, context.dialect.is_qemu())
            && files.psk.is_none()
            && files.server_name.is_none()
        {
            return Err(NO_HOSTNAME.to_owned());
        }
        let mut options = context.disks.remote.nbd_options();
        if let Some(value) = get("reconnect-delay") {
            options.timeout = seconds("reconnect-delay", value)?;
        }
        if let Some(value) = get("open-timeout") {
            options.patience = match value.as_str() {
                "0" => Duration::ZERO,
                value => seconds("open-timeout", value)?,
            };
        }
        if let Some(context) = get("x-dirty-bitmap") {
            options.holes_from = Some(context.clone());
            options.contexts.push(context.clone());
        }
        let export = get("export").cloned().unwrap_or_default();
        let mut address = NbdAddress::new(endpoint, export);
        address.tls = tls;
        Ok(Some(RemoteName::Nbd { address, options }))
    }
}

fn seconds(key: &str, value: &str) -> Result<Duration, String> {
    match value.parse::<u32>() {
        Ok(seconds @ 1..=86400) => Ok(Duration::from_secs(seconds.into())),
        _ => Err(format!("Parameter '{key}' expects seconds from 1 to 86400, not '{value}'")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opts(pairs: &[(&str, &str)]) -> Result<Option<String>, String> {
        let mut opts = NbdOpts::default();
        opts.name();
        for (key, value) in pairs {
            assert!(opts.take(Program::Zebu, key, value)?, "{key}");
        }
        Ok(opts.finish(&Context::default())?.map(|name| name.shown()))
    }

    #[test]
    fn both_spellings_of_a_server_are_read() {
        for (pairs, name) in [
            (&[("host", "h"), ("port", "7"), ("export", "e")][..], "nbd://h:7/e"),
            (&[("server.type", "inet"), ("server.host", "h"), ("server.port", "7")], "nbd://h:7/"),
            (&[("server.type", "unix"), ("server.path", "/s")], "nbd+unix:///?socket=/s"),
            (&[("path", "/s"), ("export", "e"), ("reconnect-delay", "5")], "nbd+unix:///e?socket=/s"),
        ] {
            assert_eq!(opts(pairs), Ok(Some(name.to_owned())));
        }
    }

    #[test]
    fn what_contradicts_or_is_missing_is_named() {
        for (pairs, word) in [
            (&[("export", "e")][..], "server.host"),
            (&[("host", "h"), ("server.host", "h")], "same"),
            (&[("host", "h"), ("path", "p")], "either"),
            (&[("host", "h"), ("port", "0")], "port"),
            (&[("host", "h"), ("server.type", "fd")], "server.type"),
            (&[("path", "p"), ("tls-creds", "t")], "No TLS credentials"),
            (&[("path", "p"), ("tls-hostname", "t")], "tls-creds"),
            (&[("path", "p"), ("reconnect-delay", "0")], "reconnect-delay"),
            (&[("path", "p"), ("path", "p")], "twice"),
        ] {
            let error = opts(pairs).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
        let mut opts = NbdOpts::default();
        assert_eq!(opts.take(Program::Zebu, "nothing", "x"), Ok(false));
        assert_eq!(opts.take(Program::Zebu, "export", "x"), Ok(true));
        assert!(opts.finish(&Context::default()).unwrap_err().contains("driver=nbd"));
    }
}
