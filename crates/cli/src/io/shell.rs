//! One command after the other.

use super::call::{Call, Outcome, fail, tell_error};
use super::state::State;
use super::table::{self, Name, Needs};
use super::words::split_words;
use super::{async_requests, inspect, open_commands, requests};
use crate::failure::{EXIT_FAILURE, Failure};
use crate::output::stdout;
use std::io::{BufRead, Write};
use zebu::Access;

/// Runs one line.
pub(crate) fn execute(state: &mut State, line: &str) -> Result<Outcome, Failure> {
    let words = split_words(line);
    let Some((&word, rest)) = words.split_first() else { return Ok(Outcome::Done) };
    let Some(info) = table::find(word) else {
        tell_error(&table::unknown(word));
        return Ok(Outcome::Failed);
    };
    match (info.needs, &state.open) {
        (Needs::Nothing, _) => {}
        (_, None) => {
            tell_error("no file open, try 'help open'");
            return Ok(Outcome::Failed);
        }
        (Needs::WritableImage, Some(open)) if open.spec.options.access == Access::ReadOnly => {
            tell_error("zebu: Block node is read-only");
            return Ok(Outcome::Failed);
        }
        _ => {}
    }
    if let Err(message) = info.check_count(rest.len()) {
        tell_error(&message);
        return Ok(Outcome::Failed);
    }
    let call = Call { info, words: rest.to_vec() };
    let outcome = run(state, &call)?;
    if state.output_failed.get() {
        return Err(Failure::silent(EXIT_FAILURE));
    }
    Ok(outcome)
}

fn run(state: &mut State, call: &Call<'_>) -> Result<Outcome, Failure> {
    match call.info.name {
        Name::Abort => std::process::abort(),
        Name::Quit => Ok(Outcome::Quit),
        Name::Help => help(call),
        Name::Sleep => sleep(state, call),
        Name::Sigraise => sigraise(call),
        Name::Open => open_commands::open(state, call),
        Name::Close => Ok(open_commands::close(state)),
        Name::Reopen => open_commands::reopen(state, call),
        Name::AioFlush => {
            state.wait_for_pending();
            Ok(Outcome::Done)
        }
        name => {
            let Some(open) = &state.open else { return Ok(Outcome::Failed) };
            match name {
                Name::Read => requests::read(state, open, call),
                Name::Readv => requests::readv(state, open, call),
                Name::Write => requests::write(state, open, call),
                Name::Writev => requests::writev(state, open, call),
                Name::Discard => requests::discard(state, open, call),
                Name::Flush => requests::flush(state, open),
                Name::Truncate => requests::truncate(state, open, call),
                Name::AioRead => async_requests::read(state, open, call),
                Name::AioWrite => async_requests::write(state, open, call),
                Name::Alloc => inspect::alloc(state, open, call),
                Name::Map => inspect::map(state, open),
                Name::Info => inspect::info(open),
                _ => inspect::length(open),
            }
        }
    }
}

fn help(call: &Call<'_>) -> Result<Outcome, Failure> {
    match call.words.first() {
        None => stdout::print(&table::help_all())?,
        Some(word) => match table::find(word) {
            Some(info) => stdout::print(&info.help())?,
            None => return fail(&format!("command {word} not found")),
        },
    }
    Ok(Outcome::Done)
}

fn sleep(state: &State, call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(&word) = call.words.first() else { return Ok(Outcome::Failed) };
    match word.parse::<u64>() {
        Ok(milliseconds) => {
            let worker = state.session.worker();
            worker.block_on(worker.sleep(std::time::Duration::from_millis(milliseconds)));
            Ok(Outcome::Done)
        }
        Err(_) => fail(&format!("{word} is not a valid number")),
    }
}

fn sigraise(call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(&word) = call.words.first() else { return Ok(Outcome::Failed) };
    let Some(signal) = word.parse().ok().and_then(rustix::process::Signal::from_named_raw) else {
        return fail(&format!("{word} is not a valid signal number"));
    };
    // What was printed so far must not be lost with the process.
    let _ = std::io::stdout().flush();
    match rustix::process::kill_process(rustix::process::getpid(), signal) {
        Ok(()) => Ok(Outcome::Done),
        Err(error) => fail(&format!("could not raise signal {word}: {error}")),
    }
}

/// Runs the commands of `-c`, all of them, whether or not they succeed. True if all did.
pub(crate) fn run_commands(state: &mut State, commands: &[String]) -> Result<bool, Failure> {
    let mut all_done = true;
    for command in commands {
        match execute(state, command)? {
            Outcome::Done => {}
            Outcome::Failed => all_done = false,
            Outcome::Quit => break,
        }
    }
    Ok(all_done)
}

/// Reads commands from standard input, with a prompt. True if all succeeded.
pub(crate) fn run_prompt(state: &mut State) -> Result<bool, Failure> {
    let mut all_done = true;
    let mut input = std::io::stdin().lock();
    loop {
        stdout::print("zebu> ")?;
        let mut line = Vec::new();
        let length = input
            .read_until(b'\n', &mut line)
            .map_err(|error| Failure::new(format!("could not read commands from standard input: {error}")))?;
        if length == 0 {
            stdout::print("\n")?;
            return Ok(all_done);
        }
        match execute(state, String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']))? {
            Outcome::Done => {}
            Outcome::Failed => all_done = false,
            Outcome::Quit => return Ok(all_done),
        }
    }
}
