//! Image options of a disk on a server, of whichever kind: `driver=nbd`, `rbd`, `http`, `https`, `s3`, `gs` or `az`.

use crate::context::Context;
use crate::http_opts::HttpOpts;
use crate::nbd_opts::NbdOpts;
use crate::program::Program;
use crate::rbd_opts::RbdOpts;
use crate::remote_disk::RemoteName;

/// The keys of one file, as far as they are those of servers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RemoteOpts {
    nbd: NbdOpts,
    rbd: RbdOpts,
    http: HttpOpts,
}

impl RemoteOpts {
    /// Notes the driver; false if it is none of a server.
    pub(crate) fn name(&mut self, driver: &str) -> bool {
        match driver {
            "nbd" => self.nbd.name(),
            "rbd" => self.rbd.name(),
            _ if HttpOpts::is_driver(driver) => self.http.name(driver),
            _ => return false,
        }
        true
    }

    /// Takes a pair if its key is one of these.
    ///
    /// # Errors
    /// The key is given twice, or is one that QEMU has and zebu has not.
    pub(crate) fn take(&mut self, dialect: Program, key: &str, value: &str) -> Result<bool, String> {
        Ok(self.nbd.take(dialect, key, value)?
            || self.rbd.take(dialect, key, value)?
            || self.http.take(key, value)?)
    }

    /// The disks that the pairs name. There may be several, which contradict each other.
    ///
    /// # Errors
    /// A key without its driver, one that is missing, contradicts another, can't be read, or is not supported.
    pub(crate) fn finish(self, context: &Context) -> Result<Vec<RemoteName>, String> {
        let named = [self.nbd.finish(context)?, self.rbd.finish()?, self.http.finish(&context.disks)?];
        Ok(named.into_iter().flatten().collect())
    }
}
