//! The command `iotests`: tests of QEMU's own suite, run as a black box on zebu under QEMU's names.
//!
//! The suite comes in QEMU's source package, through the sources of this machine's apt, and stays below `target`.

use crate::tenth::Tenth;
use clap::Args;
use std::collections::VecDeque;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use zebu_bench::Outcome;
use zebu_bench::process::run;
use zebu_bench::workspace::{cargo, target_dir};

#[derive(Args)]
#[command(after_help = "Each failed test leaves NAME.log in target/iotests/results, with the difference.
Needs python3, tar, and apt with a source that has QEMU's source package.")]
pub(crate) struct IotestsArgs {
    /// File with the names of the tests, one a line; `#` begins a comment
    list: PathBuf,
    /// Tests at the same time
    #[arg(long, default_value_t = 1)]
    jobs: usize,
    /// Seconds that a test may take
    #[arg(long, default_value_t = 300)]
    timeout: u64,
    /// Directory of the programs qemu-img, qemu-io and qemu-nbd [default: links to a zebu that is built first]
    #[arg(long)]
    programs: Option<PathBuf>,
}

/// Release of QEMU whose suite is run, if the sources have it.
const RELEASE: &str = "1:10.2.2+ds-1";
/// Suites of Debian that are asked for the source package.
const SUITES: &str = "sid trixie";
/// The machine's description of its Debian archive.
const ARCHIVE: &str = "/etc/apt/sources.list.d/debian.sources";

/// Answers the questions of the suite about QEMU's emulator, which tests of the programs alone don't start.
const EMULATOR: &str = "#!/bin/sh
case \"$*\" in
*'-machine help'*) echo 'none                 empty machine (default)' ;;
*'format=help'*) echo 'Supported formats: blkdebug blkverify bochs cloop compress copy-on-read dmg file host_device \
luks nbd null-aio null-co parallels preallocate qcow qcow2 qed quorum raw throttle vdi vhdx vmdk vpc vvfat' ;;
*'-device help'*) echo 'name \"virtio-blk-pci\", bus PCI' ;;
*) echo 'there is no emulator here' >&2; exit 1 ;;
esac
";

/// Tests that runs of the project have time for, a tenth each. All of them have to pass.
const SELECTION: &str = "002 004 005 008 010 011 012 018 020 021 029 031 034 035 038 042 043 046 050 053 063 089 104 105 133 137 \
150 187 217 226 252 268 272 292 305 qemu-img-bitmaps detect-zeroes-registered-buf";

/// Result of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Passed,
    Failed,
    Skipped,
}

pub(crate) fn command(args: &IotestsArgs) -> Outcome {
    let text = fs::read_to_string(&args.list).map_err(|e| format!("{}: {e}", args.list.display()))?;
    let tests = names(&text);
    if tests.is_empty() {
        return Err(format!("{} names no test", args.list.display()));
    }
    let home = target_dir()?.join("iotests");
    let programs = if let Some(directory) = &args.programs {
        fs::canonicalize(directory).map_err(|e| format!("{}: {e}", directory.display()))?
    } else {
        run(cargo().args(["build", "--locked", "--release", "--package", "zebu-cli"]))?;
        fs::create_dir_all(&home).map_err(|e| format!("{}: {e}", home.display()))?;
        links(&home, &target_dir()?.join("release/zebu"))?
    };
    judge(&home, programs, tests, args.jobs, Duration::from_secs(args.timeout))
}

/// Runs this tenth of a selection on `zebu`, two tests at a time.
pub(crate) fn selection(zebu: &Path, tenth: Tenth) -> Outcome {
    let home = target_dir()?.join("iotests");
    fs::create_dir_all(&home).map_err(|e| format!("{}: {e}", home.display()))?;
    let programs = links(&home, zebu)?;
    let numbered = SELECTION.split(' ').zip(0..).filter(|(_, number)| tenth.has(*number));
    let tests = numbered.map(|(name, _)| name.to_owned()).collect();
    judge(&home, programs, tests, 2, Duration::from_secs(1200))
}

/// Fetches the suite, if it is not here yet.
pub(crate) fn bring() -> Outcome {
    let home = target_dir()?.join("iotests");
    fs::create_dir_all(&home).map_err(|e| format!("{}: {e}", home.display()))?;
    fetch(&home).map(drop)
}

/// The obstacle to fetching the suite here, if there is one.
pub(crate) fn obstacle() -> Option<String> {
    (!Path::new(ARCHIVE).is_file())
        .then(|| format!("QEMU's source package is fetched by Debian's apt: there is no {ARCHIVE}"))
}

fn judge(home: &Path, programs: PathBuf, tests: VecDeque<String>, jobs: usize, limit: Duration) -> Outcome {
    let suite = fetch(home)?;
    let bench = Bench { suite, programs, emulator: emulator(home)?, results: home.join("results"), limit };
    fs::create_dir_all(&bench.results).map_err(|e| e.to_string())?;
    let verdicts = run_all(&bench, tests, jobs.max(1))?;
    let count = |wanted| verdicts.iter().filter(|verdict| **verdict == wanted).count();
    let failed = count(Verdict::Failed);
    println!("{} passed, {failed} failed, {} skipped", count(Verdict::Passed), count(Verdict::Skipped));
    if failed == 0 { Ok(()) } else { Err(format!("{failed} tests failed: {}", bench.results.display())) }
}

/// The names in a list.
fn names(text: &str) -> VecDeque<String> {
    let names = text.lines().filter_map(|line| line.split('#').next()).map(str::trim);
    names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// The suite, which is fetched below `home` the first time, and once more when another release is wanted.
fn fetch(home: &Path) -> Outcome<PathBuf> {
    let home = &home.join(RELEASE.replace([':', '+'], "-"));
    if let Some(suite) = find_suite(home) {
        return Ok(suite);
    }
    let lists = home.join("apt");
    fs::create_dir_all(lists.join("lists/partial")).map_err(|e| format!("{}: {e}", lists.display()))?;
    let archive = fs::read_to_string(ARCHIVE).map_err(|e| format!("{ARCHIVE}: {e}"))?;
    let sources = lists.join("source.sources");
    fs::write(&sources, source_of(&archive)).map_err(|e| format!("{}: {e}", sources.display()))?;
    let apt = |words: &[&str]| {
        let mut command = Command::new("apt-get");
        let source = format!("Dir::Etc::sourcelist={}", sources.display());
        let state = format!("Dir::State::lists={}", lists.join("lists").display());
        command.current_dir(home).args(["-qq", "-o", &source, "-o", "Dir::Etc::sourceparts=-", "-o", &state]);
        command.args(["-o", "Acquire::Retries=3"]);
        run(command.args(words))
    };
    let bring = |package: &str| -> Outcome {
        apt(&["update"])?;
        apt(&["source", "--download-only", package])
    };
    // An archive that is being updated has other packages than the index said a moment ago.
    let bring = |package: &str| {
        bring(package).or_else(|error| {
            println!("note: {error}; once more with a new index");
            bring(package)
        })
    };
    bring(&format!("qemu={RELEASE}")).or_else(|_| bring("qemu"))?;
    let packed = fs::read_dir(home)
        .map_err(|e| e.to_string())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.to_string_lossy().ends_with(".orig.tar.xz"))
        .ok_or("apt-get brought no source of QEMU")?;
    run(Command::new("tar").current_dir(home).arg("xf").arg(&packed).args([
        "--wildcards",
        "*/tests/qemu-iotests/*",
        "*/python/*",
        "*/scripts/*",
    ]))?;
    find_suite(home).ok_or_else(|| format!("{} has no tests/qemu-iotests", packed.display()))
}

/// The entry for source packages that corresponds to the first one of the machine's description of its archive.
fn source_of(archive: &str) -> String {
    let mut source = String::new();
    for line in archive.lines().take_while(|line| !line.trim().is_empty()) {
        source.push_str(match line.split_once(':') {
            Some(("Types", _)) => "Types: deb-src",
            Some(("Suites", _)) => "Suites: ",
            _ => line,
        });
        if line.starts_with("Suites:") {
            source.push_str(SUITES);
        }
        source.push('\n');
    }
    source
}

fn find_suite(home: &Path) -> Option<PathBuf> {
    let found =
        fs::read_dir(home).ok()?.filter_map(|entry| Some(entry.ok()?.path().join("tests/qemu-iotests")));
    found.into_iter().find(|suite| suite.join("check").is_file())
}

/// Links of QEMU's names to `zebu`.
pub(crate) fn links(home: &Path, zebu: &Path) -> Outcome<PathBuf> {
    let directory = home.join("bin");
    fs::create_dir_all(&directory).map_err(|e| e.to_string())?;
    for name in ["qemu-img", "qemu-io", "qemu-nbd"] {
        let link = directory.join(name);
        let _ = fs::remove_file(&link);
        symlink(zebu, &link).map_err(|e| format!("{}: {e}", link.display()))?;
    }
    Ok(directory)
}

fn emulator(home: &Path) -> Outcome<PathBuf> {
    let path = home.join("qemu-system-x86_64");
    let made = fs::write(&path, EMULATOR)
        .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)));
    made.map(|()| path.clone()).map_err(|e| format!("{}: {e}", path.display()))
}

/// Everything that tests share.
struct Bench {
    suite: PathBuf,
    programs: PathBuf,
    emulator: PathBuf,
    results: PathBuf,
    limit: Duration,
}

fn run_all(bench: &Bench, tests: VecDeque<String>, jobs: usize) -> Outcome<Vec<Verdict>> {
    let (left, verdicts) = (Mutex::new(tests), Mutex::new(Vec::new()));
    let work = || -> Outcome {
        loop {
            let next = left.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(name) = next else { return Ok(()) };
            let begun = Instant::now();
            let verdict = bench.run(&name)?;
            println!("{name:30} {verdict:?} {:.1} s", begun.elapsed().as_secs_f64());
            verdicts.lock().unwrap_or_else(PoisonError::into_inner).push(verdict);
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?)
    })?;
    Ok(verdicts.into_inner().unwrap_or_else(PoisonError::into_inner))
}

impl Bench {
    fn run(&self, name: &str) -> Outcome<Verdict> {
        // Short, since paths of sockets are.
        let directory = tempfile::Builder::new().prefix("iot").tempdir().map_err(|e| e.to_string())?;
        let log = self.results.join(format!("{}.log", name.replace('/', "-")));
        let file = File::create(&log).map_err(|e| format!("{}: {e}", log.display()))?;
        let errors = file.try_clone().map_err(|e| e.to_string())?;
        let mut command = Command::new("timeout");
        // Its whole group is ended then: servers that a test started, too.
        command.arg("--kill-after=5").arg(self.limit.as_secs().to_string());
        command.arg("python3").arg("check").args(["-qcow2", "-file", name]);
        command.current_dir(&self.suite).stdin(Stdio::null()).stdout(file).stderr(errors).process_group(0);
        for variable in ["IMGFMT", "IMGPROTO", "IMGOPTS", "TMPDIR"] {
            command.env_remove(variable);
        }
        for (variable, program) in
            [("QEMU_IMG_PROG", "qemu-img"), ("QEMU_IO_PROG", "qemu-io"), ("QEMU_NBD_PROG", "qemu-nbd")]
        {
            command.env(variable, self.programs.join(program));
        }
        command.env("QEMU_PROG", &self.emulator).env("QSD_PROG", &self.emulator).env("LC_ALL", "C.UTF-8");
        command.env("TEST_DIR", directory.path().join("t")).env("SOCK_DIR", directory.path().join("s"));
        command.env("PYTHON", "python3");
        // The suite has images that name others by `json:` and protocols.
        command.env("ZEBU_ALLOW_REFS", "all");
        let ended = command.status().map_err(|e| format!("could not start python3: {e}"))?;
        let said = fs::read_to_string(&log).unwrap_or_default();
        let verdict = match (ended.success(), said.contains("not run")) {
            (true, true) => Verdict::Skipped,
            (true, false) => Verdict::Passed,
            (false, _) => Verdict::Failed,
        };
        if verdict != Verdict::Failed {
            let _ = fs::remove_file(&log);
        }
        Ok(verdict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_a_name_a_line() {
        assert_eq!(names("# all\n001\n\n 002 # slow\n"), ["001", "002"]);
    }

    #[test]
    fn the_source_is_that_of_the_machine() {
        let archive =
            "Types: deb\nURIs: http://archive/debian\nSuites: a b\nSigned-By: key\n\nTypes: other\n";
        let source = "Types: deb-src\nURIs: http://archive/debian\nSuites: sid trixie\nSigned-By: key\n";
        assert_eq!(source_of(archive), source);
    }
}
