//! `--object tls-creds-x509,...` and `tls-creds-psk,...`: certificates and keys of TLS, as QEMU's programs take them.

use crate::errno_text::errno_text;
use crate::objects::Object;
use std::fs::File;
use std::path::PathBuf;
use zebu_remote::nbd::{PskFile, TlsClient, TlsFiles};
use zebu_storage::sync::Mutex;

/// The identity of a client that says none, in QEMU.
const IDENTITY: &str = "qemu";
/// The file of pre-shared keys in its directory, in QEMU.
const KEYS: &str = "keys.psk";
/// The authorities in their directory, in QEMU.
const AUTHORITIES: &str = "ca-cert.pem";
/// Lists of revoked certificates in their directory, in QEMU.
const REVOKED: &str = "ca-crl.pem";

/// The refusal of a client that has no name to look for in the server's certificate, in QEMU's words.
pub const NO_HOSTNAME: &str = "No hostname for certificate validation";

/// The end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The side that connects.
    Client,
    /// The side that is connected to.
    Server,
}

/// Certificates or keys of one end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsObject {
    id: String,
    end: End,
    credentials: Credentials,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Credentials {
    Certificates { directory: PathBuf, verifies_peer: bool },
    PreSharedKeys { directory: PathBuf, identity: String },
}

impl std::str::FromStr for End {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "client" => Ok(End::Client),
            "server" => Ok(End::Server),
            _ => Err(format!("Parameter 'endpoint' does not accept value '{text}'")),
        }
    }
}

/// Objects that the command line has named; image options name them by their IDs.
#[derive(Default)]
pub struct TlsObjects(Mutex<Vec<TlsObject>>);

impl TlsObjects {
    /// Files of a client for `tls-creds=ID` of a disk over the network.
    ///
    /// # Errors
    /// The command line has no such object, or one of a server.
    pub fn client_files(&self, id: &str) -> Result<TlsFiles, String> {
        TlsObject::find(&self.0.lock(), id, End::Client).map(TlsObject::client_files)
    }

    /// From now on, image options may name the object.
    pub fn keep(&self, object: TlsObject) {
        let mut given = self.0.lock();
        given.retain(|known| known.id != object.id);
        given.push(object);
    }
}

impl TlsObject {
    /// Whether an object is of this kind.
    pub fn is(object: &Object) -> bool {
        object.kind().starts_with("tls-creds-")
    }

    /// Reads an object, and the files of a client once: QEMU's programs refuse one that is not used as well.
    ///
    /// # Errors
    /// A parameter that is missing, unknown, or has a value that it can't have; a file that is missing or can't be used.
    pub fn read(object: &Object) -> Result<Self, String> {
        let object = Self::parse(object.clone())?;
        object.check_files()?;
        Ok(object)
    }

    fn parse(mut object: Object) -> Result<Self, String> {
        let end = object.plain("endpoint")?.map_or(Ok(End::Client), |end| end.parse())?;
        let verifies_peer = object.switch("verify-peer")?.unwrap_or(true);
        let directory = object.plain("dir")?;
        let is_psk = object.kind() == "tls-creds-psk";
        let username = if is_psk { object.plain("username")? } else { None };
        let id = object.id().to_owned();
        object.finish()?;
        if end == End::Server && username.is_some() {
            return Err("username should not be set when endpoint=server".to_owned());
        }
        let directory = match directory.ok_or("Missing 'dir' property value")?.as_str() {
            // A slash follows it.
            "" => PathBuf::from("/"),
            directory => PathBuf::from(directory),
        };
        if end == End::Client && !verifies_peer {
            return Err(
                "--object: a client that does not verify the server (verify-peer=off) is not supported"
                    .to_owned(),
            );
        }
        let credentials = if is_psk {
            let identity = username.unwrap_or_else(|| IDENTITY.to_owned());
            Credentials::PreSharedKeys { directory, identity }
        } else {
            Credentials::Certificates { directory, verifies_peer }
        };
        Ok(Self { id, end, credentials })
    }

    /// Looks for its files, and loads those of a client, as the connections do later.
    fn check_files(&self) -> Result<(), String> {
        for path in self.needed_files() {
            File::open(&path).map_err(|error| {
                let reason = error.raw_os_error().map_or_else(|| error.to_string(), errno_text);
                format!("Unable to access credentials {}: {reason}", path.display())
            })?;
        }
        match self.end {
            // Any name of a host that can be one.
            End::Client => TlsClient::load(&self.client_files(), "localhost").map(drop),
            End::Server => Ok(()),
        }
    }

    /// The end that it is for.
    pub fn end(&self) -> End {
        self.end
    }

    /// Files without which it is nothing.
    fn needed_files(&self) -> Vec<PathBuf> {
        match (self.end, &self.credentials) {
            (_, Credentials::PreSharedKeys { directory, .. }) => vec![directory.join(KEYS)],
            (End::Client, Credentials::Certificates { directory, .. }) => vec![directory.join(AUTHORITIES)],
            (End::Server, Credentials::Certificates { .. }) => {
                let mut files = self.server_options();
                files.retain(|(option, _)| *option != "tls-client-crl");
                files.sort_by_key(|(option, _)| *option != "tls-client-ca");
                files.into_iter().map(|(_, path)| path).collect()
            }
        }
    }

    /// The object of an ID, for one end.
    ///
    /// # Errors
    /// There is none, or it is for the other end.
    pub fn find<'a>(objects: &'a [Self], id: &str, end: End) -> Result<&'a Self, String> {
        let found = objects.iter().find(|object| object.id == id);
        let found = found.ok_or_else(|| format!("No TLS credentials with id '{id}'"))?;
        if found.end != end {
            let end = if end == End::Client { "client" } else { "server" };
            return Err(format!("Expected TLS credentials for a {end} endpoint"));
        }
        Ok(found)
    }

    /// Options of `zebu serve`, with the server's files.
    pub fn server_options(&self) -> Vec<(&'static str, PathBuf)> {
        match &self.credentials {
            Credentials::PreSharedKeys { directory, .. } => vec![("tls-psk-file", directory.join(KEYS))],
            Credentials::Certificates { directory, verifies_peer } => {
                let mut files = vec![("tls-certificate", "server-cert.pem"), ("tls-key", "server-key.pem")];
                if *verifies_peer {
                    files.push(("tls-client-ca", AUTHORITIES));
                    if directory.join(REVOKED).exists() {
                        files.push(("tls-client-crl", REVOKED));
                    }
                }
                files.into_iter().map(|(option, name)| (option, directory.join(name))).collect()
            }
        }
    }

    /// Whether it has pre-shared keys, and no certificates.
    pub fn is_psk(&self) -> bool {
        matches!(self.credentials, Credentials::PreSharedKeys { .. })
    }

    /// The client's files.
    pub fn client_files(&self) -> TlsFiles {
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
    use crate::objects::parse_objects;

    fn parsed(text: &str) -> Result<TlsObject, String> {
        let objects = parse_objects(&[text.to_owned()])?;
        TlsObject::parse(objects[0].clone())
    }

    #[test]
    fn objects_are_files_of_a_directory() {
        let server = parsed("tls-creds-x509,id=a,endpoint=server,dir=/d,verify-peer=off").unwrap();
        let options = server.server_options();
        assert_eq!(options[0], ("tls-certificate", PathBuf::from("/d/server-cert.pem")));
        assert_eq!(options.len(), 2);
        assert_eq!(server.needed_files().len(), 2);
        let verifying = parsed("tls-creds-x509,id=a,endpoint=server,dir=").unwrap();
        assert_eq!(verifying.needed_files()[0], PathBuf::from("/ca-cert.pem"));
        let psk = parsed("{'qom-type': 'tls-creds-psk', 'id': 'b', 'dir': '/d', 'username': 'u'}").unwrap();
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
    fn parameters_that_do_not_fit_are_refused_by_name() {
        for (object, reason) in [
            ("tls-creds-psk,id=a", "Missing 'dir' property value"),
            ("tls-creds-psk,id=a,dir=/d,endpoint=both", "'both'"),
            ("tls-creds-psk,id=a,dir=/d,endpoint=server,username=u", "username should not be set"),
            ("tls-creds-x509,id=a,dir=/d,username=u", "'username' is unexpected"),
            ("tls-creds-x509,id=a,dir=/d,priority=NORMAL", "'priority'"),
            ("tls-creds-x509,id=a,dir=/d,verify-peer=off", "verify-peer=off"),
        ] {
            let error = parsed(object).unwrap_err();
            assert!(error.contains(reason), "{object}: {error}");
        }
    }

    #[test]
    fn files_that_are_missing_or_no_good_are_told_of_before_they_are_used() {
        let dir = tempfile::tempdir().unwrap();
        let here = dir.path().display();
        let refusal = |text: &str| {
            let objects = parse_objects(&[format!("{text},id=a,dir={here}")]).unwrap();
            TlsObject::read(&objects[0]).unwrap_err()
        };
        for (object, file) in [
            ("tls-creds-x509", "ca-cert.pem"),
            ("tls-creds-x509,endpoint=server", "ca-cert.pem"),
            ("tls-creds-x509,endpoint=server,verify-peer=off", "server-cert.pem"),
            ("tls-creds-psk", "keys.psk"),
            ("tls-creds-psk,endpoint=server", "keys.psk"),
        ] {
            let expected = format!("Unable to access credentials {here}/{file}: No such file or directory");
            assert_eq!(refusal(object), expected);
        }
        std::fs::write(dir.path().join("ca-cert.pem"), "no certificate").unwrap();
        assert!(refusal("tls-creds-x509").contains("ca-cert.pem"));
    }
}
