//! Commands that stop requests and let them go on: `break`, `remove_break`, `resume`, `wait_break`.

use super::call::{Call, Outcome, fail};
use super::state::State;
use crate::failure::Failure;
use rustix::io::Errno;
use std::time::Duration;
use zebu_disks::errno_text;
use zebu_drivers::event;

/// How often `wait_break` looks.
const POLL: Duration = Duration::from_millis(1);

fn words(errno: Errno) -> String {
    errno_text(errno.raw_os_error())
}

pub(crate) fn set(state: &State, call: &Call<'_>) -> Result<Outcome, Failure> {
    let &[name, tag] = call.words.as_slice() else { return call.usage() };
    let debugs = state.session.context().disks.blkdebugs.all();
    let errno = match event(name) {
        None => Errno::NOENT,
        Some(_) if debugs.is_empty() => Errno::OPNOTSUPP,
        Some(event) => {
            for debug in &debugs {
                debug.add_breakpoint(event, tag);
            }
            return Ok(Outcome::Done);
        }
    };
    fail(&format!("Could not set a breakpoint: {}", words(errno)))
}

pub(crate) fn remove(state: &State, call: &Call<'_>) -> Result<Outcome, Failure> {
    let &[tag] = call.words.as_slice() else { return call.usage() };
    let debugs = state.session.context().disks.blkdebugs.all();
    let mut found = false;
    for debug in &debugs {
        found |= debug.remove_breakpoint(tag);
    }
    let errno = if debugs.is_empty() { Errno::OPNOTSUPP } else { Errno::NOENT };
    if found {
        Ok(Outcome::Done)
    } else {
        fail(&format!("Could not remove breakpoint {tag}: {}", words(errno)))
    }
}

pub(crate) fn resume(state: &State, call: &Call<'_>) -> Result<Outcome, Failure> {
    let &[tag] = call.words.as_slice() else { return call.usage() };
    let debugs = state.session.context().disks.blkdebugs.all();
    if debugs.iter().any(|debug| debug.resume(tag)) {
        return Ok(Outcome::Done);
    }
    let errno = if debugs.is_empty() { Errno::OPNOTSUPP } else { Errno::NOENT };
    fail(&format!("Could not resume request: {}", words(errno)))
}

pub(crate) fn wait(state: &State, call: &Call<'_>) -> Result<Outcome, Failure> {
    let &[tag] = call.words.as_slice() else { return call.usage() };
    let debugs = state.session.context().disks.blkdebugs.all();
    let worker = state.session.worker();
    state.session.run_until_cancelled(state.watch.cancel(), async {
        while !debugs.iter().any(|debug| debug.is_stopped(tag)) {
            worker.sleep(POLL).await;
        }
    });
    Ok(Outcome::Done)
}
