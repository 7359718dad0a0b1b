//! QEMU's monitor: commands and events as lines of JSON.

use crate::Outcome;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A connection to the monitor of a storage daemon.
pub(crate) struct Qmp {
    lines: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects, and leaves the mode in which only capabilities can be asked for.
    pub(crate) fn connect(socket: &Path) -> Outcome<Self> {
        let said = |e: std::io::Error| format!("{}: {e}", socket.display());
        let stream = UnixStream::connect(socket).map_err(said)?;
        stream.set_read_timeout(Some(Duration::from_secs(600))).map_err(said)?;
        let mut qmp = Self { lines: BufReader::new(stream) };
        qmp.line()?;
        qmp.execute("qmp_capabilities", &json!({}))?;
        Ok(qmp)
    }

    /// Runs a command. Events that come before its answer are lost.
    pub(crate) fn execute(&mut self, command: &str, arguments: &Value) -> Outcome<Value> {
        let line = json!({ "execute": command, "arguments": arguments });
        writeln!(self.lines.get_mut(), "{line}").map_err(|e| format!("QEMU's monitor: {e}"))?;
        loop {
            let answer = self.line()?;
            if let Some(value) = answer.get("return") {
                return Ok(value.clone());
            }
            if let Some(error) = answer.get("error") {
                return Err(format!("{command}: {}", error["desc"]));
            }
        }
    }

    /// Waits for an event.
    pub(crate) fn wait_for(&mut self, event: &str) -> Outcome<Value> {
        loop {
            let line = self.line()?;
            if line["event"] == event {
                return Ok(line);
            }
        }
    }

    fn line(&mut self) -> Outcome<Value> {
        let mut line = String::new();
        match self.lines.read_line(&mut line) {
            Ok(0) => Err("QEMU's monitor ended".to_owned()),
            Ok(_) => serde_json::from_str(&line).map_err(|e| format!("QEMU's monitor: {e}")),
            Err(e) => Err(format!("QEMU's monitor: {e}")),
        }
    }
}
