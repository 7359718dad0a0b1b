//! `--object tls-creds-x509,...` and `tls-creds-psk,...`: certificates and keys of TLS, as QEMU's programs take them.

use crate::keyval::{parse_keyval, parse_switch};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use zebu_remote::nbd::{PskFile, TlsFiles};

/// The identity of a client that says none, in QEMU.
const IDENTITY: &str = "qemu";
/// The file of pre-shared keys in its directory, in QEMU.
const KEYS: &str = "keys.psk";

/// Lists of revoked certificates in their directory, in QEMU.
const REVOKED: &str = "ca-crl.pem";

/// The end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Client,
    Server,
}

/// Certificates or keys of one end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TlsObject {
    id: String,
    end: End,
    credentials: Credentials,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Credentials {
    Certificates { directory: PathBuf, verifies_peer: bool },
    PreSharedKeys { directory: PathBuf, identity: String },
}

/// Whether an `--object` is of this kind.
pub(crate) fn is_tls_object(object: &str) -> bool {
    kind(object).starts_with("tls-creds-")
}

/// The type of an `--object`.
pub(crate) fn kind(object: &str) -> &str {
    let kind = object.split(',').next().unwrap_or_default();
    kind.strip_prefix("qom-type=").unwrap_or(kind)
}

/// Objects that the command line has named; image options name them by their IDs.
static GIVEN: Mutex<Vec<TlsObject>> = Mutex::new(Vec::new());

/// Files of a client for `tls-creds=ID` of a disk over the network.
///
/// # Errors
/// The command line has no such object, or one of a server.
pub(crate) fn client_files(id: &str) -> Result<TlsFiles, String> {
    let given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    TlsObject::find(&given, id, End::Client).map(TlsObject::client_files)
}

impl TlsObject {
    /// Reads an `--object`.
    ///
    /// # Errors
    /// Another type, a parameter that is missing, unknown, or has a value that it can't have.
    pub(crate) fn parse(object: &str) -> Result<Self, String> {
        let is_psk = match kind(object) {
            "tls-creds-x509" => false,
            "tls-creds-psk" => true,
            other => {
                return Err(format!(
                    "--object {other} is not supported (there are tls-creds-x509 and tls-creds-psk)"
                ));
            }
        };
        let options = object.split_once(',').map_or("", |(_, options)| options);
        let (mut id, mut directory, mut end) = (None, None, End::Client);
        let (mut verifies_peer, mut identity) = (true, IDENTITY.to_owned());
        for (key, value) in parse_keyval(options).map_err(|error| format!("--object: {error}"))? {
            match key.as_str() {
                "id" => id = Some(value),
                "dir" => directory = Some(PathBuf::from(value)),
                "endpoint" => {
                    end = match value.as_str() {
                        "client" => End::Client,
                        "server" => End::Server,
                        _ => return Err(format!("Parameter 'endpoint' does not accept value '{value}'")),
                    };
                }
                "verify-peer" => verifies_peer = parse_switch(&key, &value)?,
                "username" if is_psk => identity = value,
                _ => return Err(format!("--object: Parameter '{key}' is not supported")),
            }
        }
        let id = id.ok_or("Parameter 'id' is missing")?;
        let directory = directory.ok_or("--object: Parameter 'dir' is missing")?;
        if end == End::Client && !verifies_peer {
            return Err(
                "--object: a client that does not verify the server (verify-peer=off) is not supported"
                    .to_owned(),
            );
        }
        let credentials = if is_psk {
            Credentials::PreSharedKeys { directory, identity }
        } else {
            Credentials::Certificates { directory, verifies_peer }
        };
        Ok(Self { id, end, credentials })
    }

    /// The object of an ID, for one end.
    ///
    /// # Errors
    /// There is none, or it is for the other end.
    pub(crate) fn find<'a>(objects: &'a [Self], id: &str, end: End) -> Result<&'a Self, String> {
        let found = objects.iter().find(|object| object.id == id);
        let found = found.ok_or_else(|| format!("No TLS credentials with id '{id}'"))?;
        if found.end != end {
            let end = if end == End::Client { "client" } else { "server" };
            return Err(format!("Expected TLS credentials for a {end} endpoint"));
        }
        Ok(found)
    }

    /// From now on, image options may name it.
    pub(crate) fn keep(self) {
        let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
        given.retain(|known| known.id != self.id);
        given.push(self);
    }

    /// Options of `zebu serve`, with the server's files.
    pub(crate) fn server_options(&self) -> Vec<(&'static str, PathBuf)> {
        match &self.credentials {
            Credentials::PreSharedKeys { directory, .. } => vec![("tls-psk-file", directory.join(KEYS))],
            Credentials::Certificates { directory, verifies_peer } => {
                let mut files = vec![("tls-certificate", "server-cert.pem"), ("tls-key", "server-key.pem")];
                if *verifies_peer {
                    files.push(("tls-client-ca", "ca-cert.pem"));
                    if directory.join(REVOKED).exists() {
                        files.push(("tls-client-crl", REVOKED));
                    }
                }
                files.into_iter().map(|(option, name)| (option, directory.join(name))).collect()
            }
        }
    }

    /// Whether it has pre-shared keys, and no certificates.
    pub(crate) fn is_psk(&self) -> bool {
        matches!(self.credentials, Credentials::PreSharedKeys { .. })
    }

    /// The client's files.
    pub(crate) fn client_files(&self) -> TlsFiles {
        match &self.credentials {
            Credentials::Certificates { directory, .. } => TlsFiles::default().directory(directory.clone()),
            Credentials::PreSharedKeys { directory, identity } => {
                TlsFiles::default().psk(PskFile::new(directory.join(KEYS), identity))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_files_of_a_directory() {
        let server = TlsObject::parse("tls-creds-x509,id=a,endpoint=server,dir=/d,verify-peer=off").unwrap();
        let options = server.server_options();
        assert_eq!(options[0], ("tls-certificate", PathBuf::from("/d/server-cert.pem")));
        assert_eq!(options.len(), 2);
        let psk = TlsObject::parse("tls-creds-psk,id=b,dir=/d,username=u").unwrap();
        assert_eq!(psk.client_files().psk, Some(PskFile::new("/d/keys.psk", "u")));
        let objects = [server, psk];
        assert!(TlsObject::find(&objects, "a", End::Server).is_ok());
        for (id, end, reason) in [
            ("a", End::Client, "client endpoint"),
            ("b", End::Server, "server endpoint"),
            ("c", End::Server, "No TLS credentials with id 'c'"),
        ] {
            assert!(TlsObject::find(&objects, id, end).unwrap_err().contains(reason));
        }
    }

    #[test]
    fn other_objects_and_parameters_are_refused_by_name() {
        for (object, reason) in [
            ("tls-creds-anon,id=a", "tls-creds-anon"),
            ("tls-creds-x509,dir=/d", "'id' is missing"),
            ("tls-creds-psk,id=a", "'dir' is missing"),
            ("tls-creds-psk,id=a,dir=/d,endpoint=both", "'both'"),
            ("tls-creds-x509,id=a,dir=/d,username=u", "'username'"),
            ("tls-creds-x509,id=a,dir=/d,priority=NORMAL", "'priority'"),
            ("tls-creds-x509,id=a,dir=/d,verify-peer=off", "verify-peer=off"),
        ] {
            let error = TlsObject::parse(object).unwrap_err();
            assert!(error.contains(reason), "{object}: {error}");
        }
    }
}
