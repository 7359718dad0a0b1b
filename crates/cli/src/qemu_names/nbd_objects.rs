//! Objects of `qemu-nbd`'s command line, before the server reads them.

use crate::authorization_objects::{is_authorization, read_authorization};
use crate::failure::Failure;
use crate::tls_servers::read_credentials;
use zebu_disks::objects::{Object, parse_objects};
use zebu_disks::tls_objects::TlsObject;
use zebu_export::nbd::Authorization;

/// Names of this process's standard input.
const STANDARD_INPUT: [&str; 3] = ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"];

/// Objects that were given.
pub(super) struct Objects {
    pub(super) tls: Vec<TlsObject>,
    pub(super) authorizations: Vec<(String, Authorization)>,
    /// A secret is read from standard input, which the server needs then.
    pub(super) need_standard_input: bool,
}

impl Objects {
    /// Reads all but the secrets, which the server reads.
    pub(super) fn read(texts: &[String]) -> Result<Self, Failure> {
        let mut objects = Self { tls: Vec::new(), authorizations: Vec::new(), need_standard_input: false };
        for object in parse_objects(texts).map_err(Failure::new)? {
            objects.take(object).map_err(Failure::new)?;
        }
        Ok(objects)
    }

    fn take(&mut self, mut object: Object) -> Result<(), String> {
        if TlsObject::is(&object) {
            self.tls.push(read_credentials(&object)?);
        } else if is_authorization(&object) {
            let rules = read_authorization(&object)?;
            self.authorizations.push((object.id().to_owned(), rules));
        } else if let Some(file) = object.plain("file")? {
            self.need_standard_input |= STANDARD_INPUT.contains(&file.as_str());
        }
        Ok(())
    }
}
