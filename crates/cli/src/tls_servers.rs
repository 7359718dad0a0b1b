//! Certificates and keys that the command line names, with those of servers loaded once.

use std::path::PathBuf;
use zebu_disks::objects::Object;
use zebu_disks::tls_objects::{End, TlsObject};
use zebu_export::nbd::{CertificateFiles, TlsConfig};

/// Reads an object, and its files: QEMU's programs refuse one that is not used as well.
///
/// # Errors
/// As [`TlsObject::read`]; a server can't be made with its files.
pub(crate) fn read_credentials(object: &Object) -> Result<TlsObject, String> {
    let credentials = TlsObject::read(object)?;
    if credentials.end() == End::Server {
        load(&credentials.server_options())?;
    }
    Ok(credentials)
}

fn load(files: &[(&'static str, PathBuf)]) -> Result<(), String> {
    let file = |name: &str| files.iter().find(|(known, _)| *known == name).map(|(_, path)| path.clone());
    let loaded = if let Some(keys) = file("tls-psk-file") {
        TlsConfig::from_psk_file(&keys)
    } else {
        let (certificate, key) = (file("tls-certificate"), file("tls-key"));
        let files = CertificateFiles::new(certificate.unwrap_or_default(), key.unwrap_or_default());
        TlsConfig::from_files(&files.client_ca(file("tls-client-ca")).client_crl(file("tls-client-crl")))
    };
    loaded.map(drop).map_err(|error| error.to_string())
}
