//! A passphrase typed at a terminal, without echo.

use crate::output::printable::printable;
use crate::program;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use std::fs::File;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::Path;
use zebu::{Error, ErrorKind, Keys, Passphrase, Result};
use zeroize::Zeroizing;

/// The keys, and a question at the terminal for those that are missing, if somebody sits there. QEMU's programs ask nothing.
pub(crate) fn with_prompt(keys: Keys) -> Keys {
    if program::called().is_qemu() || !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return keys;
    }
    keys.asking(ask)
}

/// The terminal as it was before.
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

fn ask(image: &Path) -> Result<Option<Passphrase>> {
    let failed = |error: std::io::Error| {
        Error::new(ErrorKind::Io, format!("can't ask for a passphrase at the terminal: {error}"))
    };
    let mut terminal = File::options().read(true).write(true).open("/dev/tty").map_err(failed)?;
    write!(terminal, "Passphrase for {}: ", printable(&image.to_string_lossy())).map_err(failed)?;
    terminal.flush().map_err(failed)?;
    let line = {
        let _echo = Echo::off(&terminal).map_err(|error| failed(error.into()))?;
        let mut line = Zeroizing::new(Vec::new());
        BufReader::new(&terminal).read_until(b'\n', &mut line).map_err(failed)?;
        line
    };
    let text = line.strip_suffix(b"\n").unwrap_or(&line);
    Ok(Some(Passphrase::new(text)?))
}
