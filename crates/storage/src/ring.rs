//! Whether a worker gets a ring.

use crate::error::{IoError, IoErrorKind, Op};
use crate::notify::Notifier;
use crate::worker_types::{Engine, WorkerConfig};
use std::sync::Arc;

/// The backend of io_uring, or none at all where it is left out.
#[cfg(feature = "io-uring")]
pub(crate) use crate::uring::{Submitter, Uring as Ring};

/// There is none.
#[cfg(not(feature = "io-uring"))]
pub(crate) enum Ring {}

#[cfg(not(feature = "io-uring"))]
#[derive(Clone, Copy)]
pub(crate) enum Submitter {
    Maker,
    Other,
}

/// A ring, if the configuration wants one and it can be had, and why it can't.
///
/// # Errors
/// It can't be had, and nothing else will do.
pub(crate) fn ring(
    config: &WorkerConfig,
    notifier: &Arc<Notifier>,
    submitter: Submitter,
) -> Result<(Option<Ring>, Option<String>), IoError> {
    match config.engine {
        Engine::Threads => Ok((None, None)),
        Engine::Auto => match make(config, notifier, submitter) {
            Ok(ring) => Ok((Some(ring), None)),
            Err(refused) => Ok((None, refused.detail.or_else(|| Some("there is no io_uring".to_owned())))),
        },
        Engine::IoUring => Ok((Some(make(config, notifier, submitter)?), None)),
    }
}

#[cfg(feature = "io-uring")]
fn make(config: &WorkerConfig, notifier: &Arc<Notifier>, submitter: Submitter) -> Result<Ring, IoError> {
    Ring::new(config, Arc::clone(notifier), submitter).map_err(|refused| {
        IoError::of_file(Op::Setup, IoErrorKind::Os(refused.errno), "").with_detail(refused.reason)
    })
}

#[cfg(not(feature = "io-uring"))]
fn make(_: &WorkerConfig, _: &Arc<Notifier>, _: Submitter) -> Result<Ring, IoError> {
    Err(IoError::of_file(Op::Setup, IoErrorKind::Unsupported, "").with_detail("built without io_uring"))
}
