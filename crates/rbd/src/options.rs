//! How images are used.

use std::time::Duration;

/// How an image is used.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RbdOptions {
    /// How long a request waits for the cluster's answer, in whole seconds, at least one. It holds unless the configuration sets
    /// `rados_osd_op_timeout`.
    pub timeout: Duration,
    /// How long connecting may take, in whole seconds, at least one. It holds unless the configuration sets
    /// `client_mount_timeout` to less than Ceph's default of 300 s.
    pub connect_timeout: Duration,
}

zebu_storage::option_setters!(RbdOptions { timeout: Duration, connect_timeout: Duration });

impl Default for RbdOptions {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(60), connect_timeout: Duration::from_secs(30) }
    }
}
