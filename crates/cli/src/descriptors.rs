//! How many descriptors a command may have open: two for each file of an image, and a server one for each client.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit as far as it may be raised without rights: the soft limit is low for programs that use `select`.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        // Where it fails, there is the limit that was there before; who meets it is told then.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    }
}
