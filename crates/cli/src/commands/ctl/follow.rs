//! Work of a server that `zebu ctl` waits for.

use super::server::Server;
use crate::failure::Failure;
use crate::serve::control_request::Command;
use crate::watch::Watch;
use std::time::Duration;

/// How often a backup that is waited for is asked about.
const POLL: Duration = Duration::from_millis(100);

/// Waits until work of the server is over. The outer error: it could not be asked.
pub(super) fn follow(
    server: &mut Server,
    watch: &mut Watch,
    query: impl Fn() -> Command,
    cancel: impl Fn() -> Command,
    what: &str,
) -> Result<Result<u8, Failure>, Failure> {
    loop {
        if watch.cancel().is_cancelled() {
            drop(server.ask(cancel())?);
        }
        let state = server.ask(query())?;
        let bytes = |key: &str| state[key].as_u64().unwrap_or_default();
        watch.note("copying", bytes("done"), bytes("total"));
        return Ok(match state["status"].as_str() {
            Some("running") => {
                std::thread::sleep(POLL);
                continue;
            }
            Some("completed") => {
                watch.finish();
                Ok(0)
            }
            Some("cancelled") => Err(Failure::interrupted()),
            _ => {
                let reason = state["error"].as_str().unwrap_or("for an unknown reason");
                Err(Failure::new(format!("{what} failed: {reason}")))
            }
        });
    }
}
