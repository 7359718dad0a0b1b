//! One command after the other.

use super::call::{Call, Outcome, fail, tell_error};
use super::state::State;
use super::table::{self, Name, Needs};
use super::words::split_words;
use super::{async_requests, breakpoints, inspect, open_commands, requests};
use crate::failure::{EXIT_FAILURE, Failure};
use crate::output::stdout;
use crate::stop_signals::stop_signals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::fs::File;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::os::fd::AsFd;
use zebu_engine::Access;

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
            tell_error(&format!("{}: Block node is read-only", state.session.dialect().name()));
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
                Name::Break => breakpoints::set(state, call),
                Name::RemoveBreak => breakpoints::remove(state, call),
                Name::Resume => breakpoints::resume(state, call),
                Name::WaitBreak => breakpoints::wait(state, call),
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
            let nap = state.session.worker().sleep(std::time::Duration::from_millis(milliseconds));
            state.session.run_until_cancelled(state.watch.cancel(), nap);
            Ok(Outcome::Done)
        }
        Err(_) => fail(&format!("{word} is not a valid number")),
    }
}

fn sigraise(call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(&word) = call.words.first() else { return Ok(Outcome::Failed) };
    // Signal 0 only asks whether there is such a process (kill(2)).
    if word.parse() == Ok(0) {
        return Ok(Outcome::Done);
    }
    let Some(signal) = word.parse().ok().and_then(rustix::process::Signal::from_named_raw) else {
        return fail(&format!("{word} is not a valid signal number"));
    };
    // What was printed so far must not be lost with the process.
    let _ = std::io::stdout().flush();
    // This is how a crash is made, so those that end the program in good order otherwise do not.
    let raised = if stop_signals().contains(&signal.as_raw()) {
        signal_hook::low_level::emulate_default_handler(signal.as_raw())
    } else {
        rustix::process::kill_process(rustix::process::getpid(), signal).map_err(Into::into)
    };
    match raised {
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
        state.check_signals()?;
    }
    Ok(all_done)
}

/// Reads commands from standard input, with a prompt. True if all succeeded.
pub(crate) fn run_prompt(state: &mut State) -> Result<bool, Failure> {
    let mut all_done = true;
    let mut input = Lines::of_standard_input().map_err(unreadable)?;
    loop {
        stdout::print(&format!("{}> ", state.session.dialect().name()))?;
        let Some(line) = input.next(state)? else {
            // qemu-io leaves the prompt as it is where nobody looks at it; scripts compare its output.
            if !state.session.dialect().is_qemu() || std::io::stdin().is_terminal() {
                stdout::print("\n")?;
            }
            return Ok(all_done);
        };
        match execute(state, String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']))? {
            Outcome::Done => {}
            Outcome::Failed => all_done = false,
            Outcome::Quit => return Ok(all_done),
        }
        state.check_signals()?;
    }
}

/// How often a program that waits for a command looks whether a signal came.
const SIGNAL_POLL: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

fn unreadable(error: impl std::fmt::Display) -> Failure {
    Failure::new(format!("could not read commands from standard input: {error}"))
}

/// The lines of standard input.
struct Lines(BufReader<File>);

impl Lines {
    fn of_standard_input() -> std::io::Result<Self> {
        let file = std::io::stdin().as_fd().try_clone_to_owned()?;
        Ok(Self(BufReader::new(file.into())))
    }

    /// The next line with its end, once there is one; `None` at the end of the input.
    fn next(&mut self, state: &State) -> Result<Option<Vec<u8>>, Failure> {
        let mut line = Vec::new();
        loop {
            if self.0.buffer().is_empty() {
                self.wait(state)?;
            }
            let found = self.0.fill_buf().map_err(unreadable)?;
            let end = found.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
            let taken = end.unwrap_or(found.len());
            line.extend(&found[..taken]);
            self.0.consume(taken);
            if end.is_some() || taken == 0 {
                return Ok(Some(line).filter(|line| !line.is_empty()));
            }
        }
    }

    /// Waits until something can be read, or fails because a signal came.
    fn wait(&self, state: &State) -> Result<(), Failure> {
        loop {
            state.check_signals()?;
            let mut input = [PollFd::new(self.0.get_ref(), PollFlags::IN)];
            match poll(&mut input, Some(&SIGNAL_POLL)) {
                Ok(0) | Err(Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(unreadable(error)),
            }
        }
    }
}
