//! NBD servers of others: qemu-nbd and nbdkit.

use crate::patience::Patience;
use crate::program::required;
use crate::server::{is_listening, kill_until_free};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A running NBD server that is not zebu's. Killed on drop.
#[derive(Debug)]
pub struct ForeignServer {
    child: Child,
    socket: PathBuf,
}

impl ForeignServer {
    /// Starts qemu-nbd on a Unix socket in `dir`. `options` are split at blanks.
    ///
    /// # Panics
    /// If it is missing or does not listen.
    pub fn qemu(dir: &Path, options: &str) -> Self {
        let socket = dir.join("qemu.sock");
        let mut command = Command::new(required("qemu-nbd"));
        command.args(["-t", "-k"]).arg(&socket).args(options.split_whitespace()).current_dir(dir);
        Self::spawn(command, socket)
    }

    /// Starts nbdkit on a Unix socket in `dir`. `options` are split at blanks.
    ///
    /// # Panics
    /// If it is missing or does not listen.
    pub fn nbdkit(dir: &Path, options: &str) -> Self {
        let socket = dir.join("nbdkit.sock");
        let mut command = Command::new(required("nbdkit"));
        command.args(["-f", "-U"]).arg(&socket).args(options.split_whitespace()).current_dir(dir);
        Self::spawn(command, socket)
    }

    /// Starts a server that listens on `socket`.
    ///
    /// # Panics
    /// If it never does.
    pub fn spawn(mut command: Command, socket: PathBuf) -> Self {
        // One that was killed leaves it behind.
        let _ = std::fs::remove_file(&socket);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("the server starts");
        let mut server = Self { child, socket };
        let patience = Patience::begin();
        while !(server.socket.exists() && is_listening(&server.socket)) {
            let ended = server.child.try_wait().expect("our child");
            assert_eq!(ended, None, "the server has ended");
            patience.pause("the server listens");
        }
        server
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// URI of its export without a name.
    pub fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }
}

impl Drop for ForeignServer {
    fn drop(&mut self) {
        // Another may listen at the same place next.
        if std::thread::panicking() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        } else {
            kill_until_free(&mut self.child);
        }
    }
}
