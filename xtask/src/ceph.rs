//! The command `ceph`: a cluster of one node on the loopback interface, and the tests of RBD disks against it.
//!
//! One monitor, one daemon with its data in a file, and nothing of the machine's own configuration. All of it lies in a
//! directory that is removed at the end.

use crate::setup::{self, Need};
use clap::Args;
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use zebu_bench::Outcome;
use zebu_bench::process::run;
use zebu_bench::workspace::{cargo, target_dir};

#[derive(Args)]
pub(crate) struct CephArgs {
    /// Run these tests only (a part of their names)
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
    /// Run no tests: keep the cluster until standard input ends, and print where its configuration is
    #[arg(long, conflicts_with = "only")]
    stay: bool,
}

/// The variable by which tests find the cluster's directory: `ceph.conf`, `keyring`, and `run/` with the daemons' numbers.
const VARIABLE: &str = "ZEBU_CEPH";
/// The tests that need the cluster.
const TESTS: [[&str; 4]; 2] =
    [["-p", "zebu-rbd", "--test", "cluster"], ["-p", "zebu-tests", "--test", "remote"]];
/// The time that a step of the start may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// The file of the daemon's data, in bytes.
const STORE: u64 = 4 << 30;

/// Users, and what they may do.
const USERS: [(&str, &[(&str, &str)]); 5] = [
    ("mon.", &[("mon", "allow *")]),
    ("osd.0", &[("mon", "allow profile osd"), ("osd", "allow *")]),
    ("client.admin", &[("mon", "allow *"), ("osd", "allow *")]),
    ("client.reader", &[("mon", "profile rbd"), ("osd", "profile rbd-read-only pool=disks")]),
    ("client.nobody", &[("mon", "allow r")]),
];

/// Runs the command.
pub(crate) fn command(args: &CephArgs) -> Outcome {
    setup::ensure(Need::Ceph)?;
    if !args.stay {
        run(cargo().args(["build", "--locked", "-p", "zebu-cli"]))?;
        for test in TESTS {
            run(cargo().args(["test", "--locked", "--no-run"]).args(test))?;
        }
    }
    let base = target_dir()?;
    fs::create_dir_all(&base).map_err(|e| format!("{}: {e}", base.display()))?;
    let dir =
        tempfile::TempDir::with_prefix_in("ceph-", &base).map_err(|e| format!("{}: {e}", base.display()))?;
    let begin = Instant::now();
    let _cluster = Cluster::start(dir.path())?;
    println!("the cluster has started in {:.1} s", begin.elapsed().as_secs_f64());
    if args.stay {
        println!("{VARIABLE}={} (end of input stops it)", dir.path().display());
        return std::io::copy(&mut std::io::stdin(), &mut std::io::sink())
            .map(drop)
            .map_err(|e| e.to_string());
    }
    let outcomes = TESTS.map(|test| {
        let mut tests = cargo();
        tests.args(["test", "--locked"]).args(test).arg("--").args(&args.only);
        // One stops the cluster's daemon, so none runs beside another.
        tests.args(["--ignored", "--test-threads=1"]);
        run(tests.env(VARIABLE, dir.path()))
    });
    crate::all(outcomes)
}

/// Daemons that run. Ended on drop.
struct Cluster {
    dir: PathBuf,
    daemons: Vec<Child>,
}

impl Cluster {
    fn start(dir: &Path) -> Result<Self, String> {
        for folder in ["mon", "osd", "run"] {
            fs::create_dir(dir.join(folder)).map_err(|e| format!("{}: {e}", dir.display()))?;
        }
        let id = fs::read_to_string("/proc/sys/kernel/random/uuid").map_err(|e| e.to_string())?;
        let (id, port) = (id.trim(), free_port()?);
        let config = dir.join("ceph.conf");
        fs::write(&config, configuration(dir, id, port)).map_err(|e| format!("{}: {e}", config.display()))?;
        let mut cluster = Self { dir: dir.to_owned(), daemons: Vec::new() };
        cluster.make_users()?;
        let address = format!("[v2:127.0.0.1:{port}/0]");
        cluster.run("monmaptool", &["--create", "--fsid", id, "--addv", "a", &address, "monmap"])?;
        cluster.run("ceph-mon", &["--mkfs", "-i", "a", "--monmap", "monmap", "--keyring", "keyring"])?;
        cluster.daemon("ceph-mon", "a")?;
        // The monitor answers when it has elected itself.
        cluster.run("ceph", &["osd", "new", id])?;
        cluster.run("ceph", &["auth", "import", "-i", "keyring"])?;
        cluster.run("ceph-osd", &["-i", "0", "--mkfs", "--osd-uuid", id])?;
        cluster.daemon("ceph-osd", "0")?;
        cluster.run("ceph", &["osd", "pool", "create", "disks", "8"])?;
        cluster.run("rbd", &["pool", "init", "disks"])?;
        cluster.run("rbd", &["namespace", "create", "disks/team"])?;
        Ok(cluster)
    }

    fn make_users(&self) -> Outcome {
        for (number, (name, rights)) in USERS.iter().enumerate() {
            let mut words = vec!["keyring", "--gen-key", "-n", name];
            if number == 0 {
                words.push("--create-keyring");
            }
            for (daemon, right) in *rights {
                words.extend(["--cap", daemon, right]);
            }
            self.run("ceph-authtool", &words)?;
        }
        Ok(())
    }

    fn program(&self, program: &str, words: &[&str]) -> Result<Command, String> {
        let path = self.dir.join("run").join(format!("{program}.out"));
        let log = File::options().create(true).append(true).open(&path);
        let log = log.map_err(|e| format!("{}: {e}", path.display()))?;
        let mut command = Command::new(program);
        command.args(words).current_dir(&self.dir).env("CEPH_CONF", self.dir.join("ceph.conf"));
        command.env_remove("CEPH_ARGS");
        command.stdin(Stdio::null()).stderr(log.try_clone().map_err(|e| e.to_string())?).stdout(log);
        Ok(command)
    }

    /// Runs a program to its end, which must come within [`PATIENCE`].
    fn run(&self, program: &str, words: &[&str]) -> Outcome {
        let fail = |reason: &str| {
            let told = fs::read_to_string(self.dir.join("run").join(format!("{program}.out")));
            let told = told.unwrap_or_default();
            let last: Vec<&str> = told.lines().rev().take(10).collect();
            let last = last.into_iter().rev().collect::<Vec<_>>().join("\n");
            format!("{program} {}: {reason}\n{last}", words.join(" "))
        };
        let mut child = self.program(program, words)?.spawn().map_err(|e| fail(&e.to_string()))?;
        let begin = Instant::now();
        loop {
            match child.try_wait().map_err(|e| fail(&e.to_string()))? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(fail(&status.to_string())),
                None if begin.elapsed() > PATIENCE => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(fail("it does not end"));
                }
                None => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    /// Starts a daemon in the foreground, so that it ends with the terminal's group, too.
    fn daemon(&mut self, program: &str, id: &str) -> Outcome {
        let child =
            self.program(program, &["-f", "-i", id])?.spawn().map_err(|e| format!("{program}: {e}"))?;
        self.daemons.push(child);
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for child in self.daemons.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
        // A test may have started the daemon again.
        let files = fs::read_dir(self.dir.join("run")).into_iter().flatten().flatten();
        for file in
            files.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|e| e == "pid"))
        {
            let number = fs::read_to_string(&file).ok().and_then(|text| text.trim().parse().ok());
            let Some(pid) = number.and_then(Pid::from_raw) else { continue };
            // The number may be another program's by now.
            let name = fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero()));
            if !name.is_ok_and(|name| name.starts_with("ceph-")) {
                continue;
            }
            let _ = kill_process(pid, Signal::KILL);
            let begin = Instant::now();
            while test_kill_process(pid).is_ok() && begin.elapsed() < PATIENCE {
                thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

fn free_port() -> Result<u16, String> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|e| e.to_string())?;
    Ok(listener.local_addr().map_err(|e| e.to_string())?.port())
}

/// The configuration of daemons and clients.
fn configuration(dir: &Path, id: &str, port: u16) -> String {
    let dir = dir.display();
    format!(
        "[global]
fsid = {id}
mon initial members = a
mon host = [v2:127.0.0.1:{port}/0]
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {dir}/keyring
run dir = {dir}/run
admin socket = {dir}/run/$name.$pid.asok
public addr = 127.0.0.1
cluster addr = 127.0.0.1
osd pool default size = 1
osd pool default min size = 1
osd pool default pg autoscale mode = off
mon allow pool size one = true
osd crush chooseleaf type = 0

[mon]
mon data = {dir}/mon
mon cluster log file = {dir}/run/cluster.log
log file = {dir}/run/mon.log
pid file = {dir}/run/mon.pid
mon data avail crit = 1
mon data avail warn = 2
auth allow insecure global id reclaim = false

[osd]
osd data = {dir}/osd
log file = {dir}/run/osd.log
pid file = {dir}/run/osd.pid
osd objectstore = bluestore
bluestore block size = {STORE}
osd memory target = 939524096
bluestore cache autotune = false
bluestore cache size = 67108864

[client]
admin socket =
log file =
"
    )
}
