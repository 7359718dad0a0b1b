//! The command `lazy-boot`: a Debian boots from a disk that is an object in a store behind a slow link, beside the same disk as a
//! local file and beside nbdkit's curl plugin.
//!
//! nginx stands before MinIO and notes each request, so that what is fetched is not zebu's own word.

use crate::Outcome;
use crate::process::{find, output, run};
use crate::stats::Summary;
use crate::web::{
    BUCKET, Daemon, Origin, STORE_PASSWORD, STORE_USER, link_program, minio, slow_link, store_variables,
    web_server,
};
use crate::workspace::{cargo, target_dir};
use clap::Args;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The script that makes the disk.
const MAKE: &str = include_str!("debian.sh");
/// The machine's message when all of its services run.
const BOOTED: &str = "MACHINE-IS-BOOTED";
/// How long a boot may take.
const PATIENCE: Duration = Duration::from_secs(1200);
/// Times of the local disk that the lazy one may take, and the percentage of the object that it may fetch.
const MOST_TIMES: f64 = 1.5;
const MOST_PERCENT: f64 = 15.0;
/// The longest range that pins a version.
const PIN: &str = "bytes=0-65535";
/// The object's key.
const KEY: &str = "debian.raw";

/// The options of `lazy-boot`.
#[derive(Args)]
#[command(
    after_help = "Needs debootstrap, qemu-system-x86, nbdkit, nginx, curl and minio. The disk is made once, as root.
Without KVM, QEMU computes the machine: some minutes for each boot on a busy one."
)]
pub struct LazyBootArgs {
    /// Rounds; in each, every disk boots once
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// A zebu to measure instead of this tree's release build
    #[arg(long)]
    zebu: Option<PathBuf>,
    /// The link to use instead of this tree's release build of slow_link
    #[arg(long)]
    link: Option<PathBuf>,
}

/// A disk that the machine boots from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Disk {
    /// The file, below an overlay.
    Local,
    /// The object, below an overlay, with an empty cache.
    Cold,
    /// The same with the cache that the start before it has filled, and a new overlay.
    Again,
    /// nbdkit's curl plugin below an overlay of QEMU's.
    Nbdkit,
}

impl Disk {
    const ALL: [Self; 4] = [Self::Local, Self::Cold, Self::Again, Self::Nbdkit];

    fn name(self) -> &'static str {
        match self {
            Self::Local => "zebu, local file",
            Self::Cold => "zebu, object, empty cache",
            Self::Again => "zebu, object, second start",
            Self::Nbdkit => "QEMU, overlay of nbdkit curl",
        }
    }
}

/// Figures of a boot.
struct Boot {
    seconds: f64,
    requests: Vec<Request>,
}

impl Boot {
    /// Bytes of the object that were fetched.
    fn bytes(&self) -> u64 {
        self.requests.iter().map(|request| request.bytes).sum()
    }
}

/// A line of nginx's.
struct Request {
    bytes: u64,
    range: String,
}

/// The place of everything.
struct Place {
    home: PathBuf,
    dir: PathBuf,
    zebu: PathBuf,
    /// The port of the link.
    link: u16,
}

/// The command `lazy-boot`.
///
/// # Errors
/// Something is missing, a machine does not boot, or a bound does not hold.
pub fn command(args: &LazyBootArgs) -> Outcome {
    let home = target_dir()?.join("lazy-boot");
    let disk = home.join("debian.raw");
    fs::create_dir_all(&home).map_err(|error| format!("{}: {error}", home.display()))?;
    let made_by = home.join("made-by.sh");
    if !disk.is_file() || fs::read_to_string(&made_by).ok().as_deref() != Some(MAKE) {
        find("debootstrap").ok_or("debootstrap is missing: apt-get install debootstrap")?;
        run(Command::new("sh").args(["-c", MAKE, "sh"]).arg(&home))?;
        fs::write(&made_by, MAKE).map_err(|error| format!("{}: {error}", made_by.display()))?;
    }
    let zebu = if let Some(zebu) = &args.zebu {
        std::path::absolute(zebu).map_err(|error| error.to_string())?
    } else {
        run(cargo().args(["build", "--quiet", "--release", "--locked", "--package", "zebu-cli"]))?;
        target_dir()?.join("release/zebu")
    };
    let scratch = tempfile::TempDir::with_prefix_in("boots-", &home).map_err(|error| error.to_string())?;
    let dir = scratch.path().to_owned();
    let (_store, port) = minio(&dir.join("store"))?;
    let mut convert = Command::new(&zebu);
    convert.args(["convert", "-f", "raw", "-O", "raw"]).arg(&disk).arg(format!("s3://{BUCKET}/{KEY}"));
    run(convert.envs(store_variables(port)))?;
    open_to_all(&dir, port)?;
    let (_web, web) = web_server(&dir, Origin::Server(port))?;
    let (_link, link) = slow_link(&args.link.clone().map_or_else(link_program, Ok)?, web)?;
    let place = Place { home, dir, zebu, link };
    let mut boots: Vec<Vec<Boot>> = Disk::ALL.iter().map(|_| Vec::new()).collect();
    for round in 1..=args.rounds {
        for (index, disk) in Disk::ALL.into_iter().enumerate() {
            let boot = place.boot(disk).map_err(|why| format!("{}: {why}", disk.name()))?;
            println!(
                "round {round}: {}: {:.1} s, {} requests, {} bytes",
                disk.name(),
                boot.seconds,
                boot.requests.len(),
                boot.bytes()
            );
            boots[index].push(boot);
        }
    }
    judge(&boots, fs::metadata(&disk).map_err(|error| error.to_string())?.len())
}

/// Prints the figures, and names the bounds that do not hold.
fn judge(boots: &[Vec<Boot>], len: u64) -> Outcome {
    let mut worse = Vec::new();
    println!(
        "\n| disk | median (s) | times local | fetched (MiB) | of the object | requests | that pin the version |"
    );
    println!("|---|---:|---:|---:|---:|---:|---:|");
    let seconds =
        |boots: &[Boot]| Summary::of(&boots.iter().map(|boot| boot.seconds).collect::<Vec<_>>()).median;
    for (disk, of_disk) in Disk::ALL.into_iter().zip(boots) {
        let time = seconds(of_disk);
        let ratios: Vec<f64> =
            of_disk.iter().zip(&boots[0]).map(|(boot, local)| boot.seconds / local.seconds).collect();
        let times = Summary::of(&ratios).median;
        let most = |of: &dyn Fn(&Boot) -> u64| of_disk.iter().map(of).max().unwrap_or(0);
        let bytes = most(&Boot::bytes);
        let requests = most(&|boot| boot.requests.len() as u64);
        let pins = most(&|boot| boot.requests.iter().filter(|one| one.range == PIN).count() as u64);
        let percent = bytes as f64 * 100.0 / len as f64;
        println!(
            "| {} | {time:.1} | {times:.2} | {:.1} | {percent:.1} % | {requests} | {pins} |",
            disk.name(),
            bytes as f64 / 1048576.0
        );
        if disk == Disk::Cold && times > MOST_TIMES {
            worse.push(format!("{}: {times:.2} times the local one, not {MOST_TIMES}", disk.name()));
        }
        if disk == Disk::Cold && percent > MOST_PERCENT {
            worse.push(format!("{}: {percent:.1} % of the object, not {MOST_PERCENT}", disk.name()));
        }
        if disk == Disk::Again && requests > pins {
            worse.push(format!(
                "{}: {} requests beside those that pin the version",
                disk.name(),
                requests - pins
            ));
        }
    }
    if worse.is_empty() { Ok(()) } else { Err(worse.join("\n")) }
}

/// Lets everybody read the bucket: nbdkit's plugin signs nothing.
fn open_to_all(dir: &Path, port: u16) -> Outcome {
    let rule = format!(
        "{{\"Version\":\"2012-10-17\",\"Statement\":[{{\"Effect\":\"Allow\",\"Principal\":{{\"AWS\":[\"*\"]}},\
         \"Action\":[\"s3:GetObject\"],\"Resource\":[\"arn:aws:s3:::{BUCKET}/*\"]}}]}}"
    );
    // The store refuses the signature that curl makes of `--data-binary`.
    let file = dir.join("rule.json");
    fs::write(&file, rule).map_err(|error| format!("{}: {error}", file.display()))?;
    let user = format!("{STORE_USER}:{STORE_PASSWORD}");
    let url = format!("http://127.0.0.1:{port}/{BUCKET}?policy=");
    let mut command = Command::new("curl");
    command.args(["--silent", "--show-error", "--fail", "--aws-sigv4", "aws:amz:us-east-1:s3"]);
    command.args(["--user", &user, "--upload-file"]).arg(&file).arg(&url);
    output(&mut command).map(drop)
}

impl Place {
    /// Boots from a disk, with a new overlay.
    fn boot(&self, disk: Disk) -> Outcome<Boot> {
        let socket = self.dir.join("disk.sock");
        let overlay = self.dir.join("overlay.qcow2");
        let cache = self.dir.join("cache");
        let log = self.dir.join("requests");
        let said = |error: std::io::Error| error.to_string();
        for file in [&socket, &overlay] {
            let _ = fs::remove_file(file);
        }
        if disk == Disk::Cold {
            let _ = fs::remove_dir_all(&cache);
        }
        // nginx goes on at the end of the file.
        fs::File::options().write(true).truncate(true).open(&log).map_err(said)?;
        let begin = Instant::now();
        let server = Daemon::start(&mut self.server(disk, &socket, &overlay, &cache), || {
            UnixStream::connect(&socket).is_ok()
        })?;
        let drive = if disk == Disk::Nbdkit {
            let base = format!("nbd+unix:///?socket={}", socket.display());
            run(Command::new("qemu-img")
                .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &base])
                .arg(&overlay))?;
            format!("driver=qcow2,node-name=disk,file.driver=file,file.filename={}", overlay.display())
        } else {
            format!("driver=nbd,node-name=disk,server.type=unix,server.path={}", socket.display())
        };
        let seconds = self.run_machine(&drive, begin)?;
        server.end()?;
        let text = fs::read_to_string(&log).map_err(said)?;
        Ok(Boot { seconds, requests: text.lines().filter_map(request).collect() })
    }

    fn server(&self, disk: Disk, socket: &Path, overlay: &Path, cache: &Path) -> Command {
        if disk == Disk::Nbdkit {
            let mut command = Command::new("nbdkit");
            command.args(["--foreground", "--readonly", "--unix"]).arg(socket);
            command.args(["curl", &format!("http://127.0.0.1:{}/{BUCKET}/{KEY}", self.link)]);
            return command;
        }
        let mut command = Command::new(&self.zebu);
        command.args(["serve", "--nbd", &format!("unix:{}", socket.display()), "-f", "raw", "--overlay"]);
        command.arg(overlay);
        if disk == Disk::Local {
            command.arg(self.home.join("debian.raw"));
        } else {
            command.arg("--cache-dir").arg(cache).arg(format!("s3://{BUCKET}/{KEY}"));
            command.envs(store_variables(self.link));
        }
        command
    }

    /// Starts QEMU, and waits for the machine's message and its end; seconds from `begin` to the message.
    fn run_machine(&self, drive: &str, begin: Instant) -> Outcome<f64> {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", &PATIENCE.as_secs().to_string(), "qemu-system-x86_64"]);
        command.args([
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-smp",
            "2",
            "-m",
            "1G",
            "-machine",
            "q35",
        ]);
        command.args(["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]);
        command
            .arg("-kernel")
            .arg(self.home.join("vmlinuz"))
            .arg("-initrd")
            .arg(self.home.join("initrd.img"));
        command.args(["-append", "console=ttyS0 root=/dev/vda rw panic=-1 systemd.show_status=0 quiet"]);
        command.args(["-blockdev", drive, "-device", "virtio-blk-pci,drive=disk"]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut machine = Daemon(child.map_err(|error| format!("qemu-system-x86_64: {error}"))?);
        let (mut said, mut seconds) = (String::new(), None);
        let stdout = machine.0.stdout.take().ok_or("the machine has no console")?;
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line.map_err(|error| error.to_string())?;
            let line = String::from_utf8_lossy(&line);
            if seconds.is_none() && line.contains(BOOTED) {
                seconds = Some(begin.elapsed().as_secs_f64());
            }
            said = said + &line + "\n";
        }
        let ended = machine.0.wait().map_err(|error| error.to_string())?;
        match seconds {
            Some(seconds) if ended.success() => Ok(seconds),
            _ => Err(format!("the machine did not boot: {ended}\n{said}")),
        }
    }
}

/// Reads a line of nginx's; `None` if it is of another request than for bytes.
fn request(line: &str) -> Option<Request> {
    let mut words = line.split(' ');
    let (method, _status) = (words.next()?, words.next()?);
    let bytes = words.next()?.parse().ok()?;
    let range = words.next()?.to_owned();
    let bytes = if method == "HEAD" { 0 } else { bytes };
    Some(Request { bytes, range })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_log_are_read() {
        let read = |line| request(line).map(|one| (one.bytes, one.range));
        assert_eq!(read("GET 206 65536 bytes=0-65535"), Some((65536, PIN.to_owned())));
        assert_eq!(read("HEAD 200 7 -"), Some((0, "-".to_owned())));
        assert_eq!(read("GET 206"), None);
    }

    #[test]
    fn bounds_that_do_not_hold_are_named() {
        let boot = |seconds, ranges: &[(u64, &str)]| {
            let requests =
                ranges.iter().map(|(bytes, range)| Request { bytes: *bytes, range: (*range).to_owned() });
            vec![Boot { seconds, requests: requests.collect() }]
        };
        let boots = |cold, bytes, second: &[(u64, &str)]| {
            [boot(10.0, &[]), boot(cold, &[(bytes, "bytes=1-2")]), boot(10.0, second), boot(10.0, &[])]
        };
        assert_eq!(judge(&boots(14.0, 10, &[(1, PIN)]), 100), Ok(()));
        for (boots, word) in [
            (boots(16.0, 10, &[(1, PIN)]), "1.60 times"),
            (boots(14.0, 20, &[(1, PIN)]), "20.0 %"),
            (boots(14.0, 10, &[(1, PIN), (1, "bytes=65536-70000")]), "1 requests beside"),
        ] {
            assert!(judge(&boots, 100).unwrap_err().contains(word));
        }
    }
}
