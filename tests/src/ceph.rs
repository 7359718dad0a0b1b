//! The Ceph cluster that `cargo xtask ceph` has started.

use crate::patience::{LONGEST, wait_until};
use crate::program::{Finished, finish, required, zebu_program};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The variable that names the cluster's directory.
const VARIABLE: &str = "ZEBU_CEPH";
/// The pool of the tests' images.
const POOL: &str = "disks";

/// The cluster.
#[derive(Debug)]
pub struct Ceph {
    dir: PathBuf,
}

impl Ceph {
    /// The cluster that the environment tells of.
    ///
    /// # Panics
    /// If it tells of none.
    pub fn find() -> Self {
        let dir = std::env::var_os(VARIABLE);
        let dir = dir.unwrap_or_else(|| panic!("no cluster ({VARIABLE}): `cargo xtask ceph` starts one"));
        Self { dir: dir.into() }
    }

    /// Its configuration.
    pub fn conf(&self) -> String {
        self.dir.join("ceph.conf").display().to_string()
    }

    /// The name of an image, with the cluster's configuration.
    pub fn name(&self, image: &str) -> String {
        format!("rbd:{POOL}/{image}:conf={}", self.conf())
    }

    /// The command `rbd`; words that begin with `@` are images. The words are split at blanks.
    ///
    /// # Panics
    /// If it can't be started.
    pub fn rbd(&self, line: &str) -> Finished {
        let image = |word: &str| word.strip_prefix('@').map(|image| format!("{POOL}/{image}"));
        let mut command = Command::new(required("rbd"));
        command.arg("--conf").arg(self.conf());
        command.args(line.split_whitespace().map(|word| image(word).unwrap_or_else(|| word.to_owned())));
        finish(command)
    }

    /// The bytes of an image, as `rbd export` reads them.
    ///
    /// # Panics
    /// If it can't be read.
    pub fn export(&self, image: &str) -> Vec<u8> {
        let mut command = Command::new(required("rbd"));
        command.args(["--conf", &self.conf(), "export", "--no-progress", &format!("{POOL}/{image}"), "-"]);
        let out = command.stdin(Stdio::null()).output().expect("rbd");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        out.stdout
    }

    /// The command `zebu`, which finds the configuration by itself. Words are split at blanks; those that begin with `@` are images.
    ///
    /// # Panics
    /// If it can't be started.
    pub fn zebu(&self, dir: &Path, line: &str) -> Finished {
        finish(self.command(dir, zebu_program(), line))
    }

    /// A program, prepared as for [`Ceph::zebu`].
    pub fn command(&self, dir: &Path, program: &Path, line: &str) -> Command {
        let mut command = Command::new(program);
        let image = |word: &str| word.strip_prefix('@').map(|image| format!("rbd:{POOL}/{image}"));
        command.args(line.split_whitespace().map(|word| image(word).unwrap_or_else(|| word.to_owned())));
        command.current_dir(dir).env("CEPH_CONF", self.conf()).env_remove("CEPH_ARGS");
        command
    }

    /// A program of QEMU's, with the same words.
    ///
    /// # Panics
    /// If it can't be started.
    pub fn qemu(&self, dir: &Path, program: &str, line: &str) -> Finished {
        finish(self.command(dir, &required(program), line))
    }

    /// Kills the daemon that has the disks. It is started again when this is dropped.
    ///
    /// # Panics
    /// If there is none.
    pub fn without_daemon(&self) -> Outage<'_> {
        let pid = self.daemon().expect("the number of the daemon");
        kill_process(pid, Signal::KILL).expect("the daemon runs");
        wait_until("the end of the daemon", || !is_running(pid));
        Outage { ceph: self }
    }

    fn daemon(&self) -> Option<Pid> {
        let number = std::fs::read_to_string(self.dir.join("run/osd.pid")).ok()?;
        Pid::from_raw(number.trim().parse().ok()?)
    }
}

/// Whether a process runs: one that has ended and was not waited for does not.
fn is_running(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    test_kill_process(pid).is_ok() && !stat.contains(") Z ")
}

/// A time without the daemon that has the disks.
#[derive(Debug)]
pub struct Outage<'a> {
    ceph: &'a Ceph,
}

impl Drop for Outage<'_> {
    fn drop(&mut self) {
        let Ceph { dir } = self.ceph;
        let mut command = Command::new(required("ceph-osd"));
        command.args(["-i", "0"]).env("CEPH_CONF", self.ceph.conf()).current_dir(dir);
        let started = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        let is_started = started.is_ok_and(|status| status.success());
        let begin = Instant::now();
        // Until it answers.
        while is_started && begin.elapsed() < LONGEST {
            let words = "ls disks --rados-osd-op-timeout 3";
            if self.ceph.rbd(words).code == Some(0) {
                return;
            }
        }
        eprintln!("the daemon does not come back");
    }
}
