//! QEMU's programs and zebu under their names, side by side.

use crate::foreign_server::ForeignServer;
use crate::program::{Finished, required, run_in, zebu};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Makes zebu's programs in `dir/names`, where [`both`] finds them.
///
/// # Panics
/// If they can't be made.
pub fn install_names(dir: &Path) {
    std::fs::create_dir(dir.join("names")).expect("a directory");
    zebu(dir, ["install-names", "names"]).ok();
}

/// Runs a program of QEMU, the real one or zebu under its name. `line` is split at blanks.
pub fn run(dir: &Path, program: &Path, line: &str) -> Finished {
    run_in(dir, program, line.split_whitespace())
}

/// QEMU's program and zebu under its name.
pub fn both(dir: &Path, name: &str) -> [PathBuf; 2] {
    [required(name), dir.join("names").join(name)]
}

/// Starts a server by the command line of qemu-nbd.
pub fn serve(dir: &Path, qemu_nbd: &Path, options: &str) -> ForeignServer {
    let socket = dir.join("named.sock");
    let mut command = Command::new(qemu_nbd);
    command.args(["-t", "-k"]).arg(&socket).args(options.split_whitespace()).current_dir(dir);
    ForeignServer::spawn(command, socket)
}

/// Image options of a client of `socket`.
pub fn image_options(socket: &Path) -> String {
    format!("--image-opts driver=raw,file.driver=nbd,file.path={},file.tls-creds=t", socket.display())
}
