//! `--object`: secrets and credentials, as QEMU's programs take them.

use crate::authorization_objects::{is_authorization, read_authorization};
use crate::failure::Failure;
use crate::tls_servers::read_credentials;
use zebu_disks::objects::parse_objects;
use zebu_disks::tls_objects::TlsObject;
use zebu_disks::{Disks, Secrets, Sources};

/// Heading of the options, in the help.
pub(crate) const ENCRYPTION: &str = "Encrypted images";

/// `--object`.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct SecretArgs {
    /// Passphrase of an encrypted image, which options name by its ID; may be given more than once.
    ///
    /// `secret,id=ID,file=PATH` reads it from a file or a descriptor (`/dev/fd/N`). `secret,id=ID,data=TEXT` has it in the
    /// command line, where others can see it. `format=base64`: it is base64. `keyid=ID` and `iv=BASE64`: it is
    /// encrypted with AES-256-CBC and the secret of that ID, whose 32 bytes are the key.
    /// `tls-creds-x509,id=ID,dir=DIR` and `tls-creds-psk,id=ID,dir=DIR,username=NAME` are certificates and keys for
    /// `tls-creds=ID` of disks on NBD servers. An object may be JSON as well: `{"qom-type": "secret", "id": "ID", ...}`.
    #[arg(long, help_heading = ENCRYPTION, hide_short_help = true, value_name = "secret,id=ID,...", action = clap::ArgAction::Append)]
    pub(crate) object: Vec<String>,
}

impl SecretArgs {
    /// Reads all objects, those that no option names as well. Credentials are kept for image options; rules on clients are only
    /// checked.
    pub(crate) fn read(&self, disks: &Disks, sources: Sources) -> Result<Secrets, Failure> {
        let mut secrets = Secrets::new(sources);
        for object in parse_objects(&self.object).map_err(Failure::new)? {
            let taken = if TlsObject::is(&object) {
                read_credentials(&object).map(|credentials| disks.tls.keep(credentials))
            } else if is_authorization(&object) {
                read_authorization(&object).map(drop)
            } else {
                secrets.add(disks, object, sources)
            };
            taken.map_err(Failure::new)?;
        }
        Ok(secrets)
    }
}
