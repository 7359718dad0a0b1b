//! Standard output, of which a reader may go away.

use crate::failure::{EXIT_FAILURE, Failure};
use std::io::{self, Write};

/// Writes `text` and makes sure that it left the process. A reader that went away (`| head`) ends the command without
/// a word.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(failure)
}

/// The failure that an error of standard output amounts to.
pub(crate) fn failure(error: io::Error) -> Failure {
    if error.kind() == io::ErrorKind::BrokenPipe {
        Failure::silent(EXIT_FAILURE)
    } else {
        Failure::new(format!("could not write standard output: {error}"))
    }
}
