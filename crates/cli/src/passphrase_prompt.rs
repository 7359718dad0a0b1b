//! A passphrase typed at a terminal, without echo.

use crate::stop_signals::DuringQuestion;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Signal, getpid, kill_process};
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr};
use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::path::Path;
use zebu_disks::{Program, printable};
use zebu_engine::{Error, ErrorKind, Keys, Passphrase, Result};
use zeroize::Zeroizing;

/// The keys, and a question at the terminal for those that are missing, if somebody sits there. QEMU's programs ask nothing.
pub(crate) fn with_prompt(dialect: Program, keys: Keys) -> Keys {
    if dialect.is_qemu() || !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return keys;
    }
    keys.asking(ask)
}

/// Bytes of a line that a terminal gives at most.
const LONGEST: usize = 4096;

/// The terminal as it was before. Until then, an interruption ends the line instead of the process, which would leave the terminal
/// as it is now.
struct Echo<'a> {
    terminal: &'a File,
    before: Termios,
}

impl<'a> Echo<'a> {
    fn off(terminal: &'a File) -> rustix::io::Result<Self> {
        let before = tcgetattr(terminal)?;
        let mut quiet = before.clone();
        quiet.local_modes.remove(LocalModes::ECHO);
        quiet.local_modes.insert(LocalModes::ECHONL);
        quiet.local_modes.remove(LocalModes::ISIG);
        quiet.special_codes[SpecialCodeIndex::VEOL] = quiet.special_codes[SpecialCodeIndex::VINTR];
        tcsetattr(terminal, OptionalActions::Flush, &quiet)?;
        Ok(Self { terminal, before })
    }
}

impl Drop for Echo<'_> {
    fn drop(&mut self) {
        // If this fails, the terminal is gone.
        let _ = tcsetattr(self.terminal, OptionalActions::Flush, &self.before);
    }
}

/// How soon a signal is noticed.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// Reads a line, or nothing if a signal comes first.
fn read_line(terminal: &File, line: &mut [u8], signals: &DuringQuestion) -> std::io::Result<usize> {
    while !signals.has_come() {
        let mut fds = [PollFd::new(terminal, PollFlags::IN)];
        match poll(&mut fds, Some(&TICK)) {
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return (&*terminal).read(line),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(0)
}

fn ask(image: &Path) -> Result<Option<Passphrase>> {
    let failed = |error: std::io::Error| {
        Error::new(ErrorKind::Io, format!("can't ask for a passphrase at the terminal: {error}"))
    };
    let terminal = File::options().read(true).write(true).open("/dev/tty").map_err(failed)?;
    let mut line = Zeroizing::new([0; LONGEST]);
    let signals = DuringQuestion::begin().map_err(failed)?;
    let nobody = || Error::new(ErrorKind::KeyMissing, "no passphrase was given").on(image);
    let answer = Echo::off(&terminal).map_err(std::io::Error::from).and_then(|echo| {
        // Nothing that is typed after the question is shown or thrown away.
        write!(&terminal, "Passphrase for {}: ", printable(&image.to_string_lossy()))?;
        let len = read_line(&terminal, &mut line[..], &signals)?;
        Ok((len, echo.before.special_codes[SpecialCodeIndex::VINTR]))
    });
    let was_stopped = signals.has_come();
    if was_stopped {
        let _ = writeln!(&terminal);
    }
    signals.end();
    if was_stopped {
        return Err(nobody());
    }
    let (len, interruption) = answer.map_err(failed)?;
    let text = &line[..len];
    if text.last() == Some(&interruption) {
        // As the terminal would have done.
        let _ = kill_process(getpid(), Signal::INT);
        return Err(nobody());
    }
    match text.strip_suffix(b"\n") {
        Some(text) => Passphrase::new(text).map(Some),
        // The end of the input: what was typed before it is no whole line.
        None => Ok(None),
    }
}
