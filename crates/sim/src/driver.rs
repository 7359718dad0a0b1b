//! Running a test over many seeds, saying how to repeat the one that failed, and counting what was done.

use crate::counts::{Counts, Tally};
use std::env;
use std::io::Write;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// A range of seeds for a test to run over.
///
/// Environment variables change it without a rebuild:
/// - `ZEBU_SEED=17`: only that seed, to repeat a failure;
/// - `ZEBU_SEEDS=5000` or `ZEBU_SEEDS=1000..6000`: these;
/// - `ZEBU_SECONDS=300`: seeds from the first on, without end, until the time is over;
/// - `ZEBU_TALLY=path`: a line of JSON is added to that file when it ends, with what was counted ([`Seeds::tally`]).
#[derive(Debug, Clone)]
pub struct Seeds {
    range: Range<u64>,
    limit: Option<Duration>,
    tally: Tally,
}

fn number(name: &str) -> Option<u64> {
    let text = env::var(name).ok()?;
    Some(text.trim().parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")))
}

fn parse_range(text: &str) -> Option<Range<u64>> {
    match text.split_once("..") {
        Some((first, end)) => Some(first.trim().parse().ok()?..end.trim().parse().ok()?),
        None => Some(0..text.trim().parse().ok()?),
    }
}

impl Seeds {
    /// The seeds from 0 to `count - 1`, unless the environment says otherwise.
    ///
    /// # Panics
    /// If an environment variable cannot be understood.
    pub fn new(count: u64) -> Self {
        if let Some(seed) = number("ZEBU_SEED") {
            return Self { range: seed..seed.saturating_add(1), limit: None, tally: Tally::default() };
        }
        let range = match env::var("ZEBU_SEEDS") {
            Ok(text) => {
                parse_range(&text).unwrap_or_else(|| panic!("ZEBU_SEEDS={text}: not a number or a range"))
            }
            Err(_) => 0..count,
        };
        let limit = number("ZEBU_SECONDS").map(Duration::from_secs);
        let range = if limit.is_some() { range.start..u64::MAX } else { range };
        Self { range, limit, tally: Tally::default() }
    }

    /// The counts of a run, for the worlds and models that belong to it.
    pub fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Calls `test` with each seed; returns how many there were. If `test` panics, the seed and the command that
    /// repeats it are printed on standard error, and the panic goes on.
    pub fn run(&self, mut test: impl FnMut(u64)) -> u64 {
        self.run_until(|seed| {
            test(seed);
            false
        })
    }

    /// As [`Seeds::run`], until `test` says that it is enough.
    pub fn run_until(&self, mut test: impl FnMut(u64) -> bool) -> u64 {
        let start = Instant::now();
        let mut ran = 0;
        for seed in self.range.clone() {
            // One at least, however little time there is.
            if ran > 0 && self.limit.is_some_and(|limit| start.elapsed() >= limit) {
                break;
            }
            match catch_unwind(AssertUnwindSafe(|| test(seed))) {
                Err(panic) => {
                    eprintln!("seed {seed} failed; to repeat it:\n    {}", replay_command(seed));
                    write_tally(ran, Some(seed), self.tally.counts());
                    resume_unwind(panic);
                }
                Ok(enough) => {
                    ran += 1;
                    if enough {
                        break;
                    }
                }
            }
        }
        write_tally(ran, None, self.tally.counts());
        ran
    }
}

/// Adds what a run counted to the file that the environment names.
fn write_tally(seeds: u64, failed: Option<u64>, counts: Counts) {
    let Some(path) = env::var_os("ZEBU_TALLY") else { return };
    let thread = std::thread::current();
    let test = thread.name().unwrap_or_default();
    let failed = failed.map_or("null".to_owned(), |seed| seed.to_string());
    let mut line = format!("{{\"test\":\"{test}\",\"seeds\":{seeds},\"failed_seed\":{failed}");
    for (name, number) in counts.named() {
        line += &format!(",\"{name}\":{number}");
    }
    line += "}\n";
    let file = std::fs::OpenOptions::new().append(true).create(true).open(&path);
    // One write, so that lines of several threads do not mix.
    if let Err(error) = file.and_then(|mut file| file.write_all(line.as_bytes())) {
        eprintln!("ZEBU_TALLY={}: {error}", Path::new(&path).display());
    }
}

/// One command that runs the test of this thread with one seed. Package, target and profile are those of the running
/// test: this crate is only the driver.
fn replay_command(seed: u64) -> String {
    // Cargo runs a test with the package's directory in its environment; without it, the one of the driver is said.
    let package = env::var("CARGO_PKG_NAME").unwrap_or_else(|_| "zebu-sim".to_owned());
    let program = env::current_exe().ok();
    let target = program.as_deref().and_then(test_target).unwrap_or_default();
    let profile = program.as_deref().map(profile_flag).unwrap_or_default();
    let thread = std::thread::current();
    // libtest names the thread by the test, unless tests run on the main thread.
    let test = match thread.name() {
        Some(test) if test != "main" => format!(" --exact {test}"),
        _ => String::new(),
    };
    format!("ZEBU_SEED={seed} cargo test{profile} -p {package}{target} --{test} --nocapture")
}

/// ` --test crash` for `target/debug/deps/crash-0123456789abcdef`; nothing for the tests within a library.
fn test_target(program: &Path) -> Option<String> {
    let name = program.file_stem()?.to_str()?;
    let (name, hash) = name.rsplit_once('-')?;
    let is_hash = hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit());
    let package = env::var("CARGO_PKG_NAME").unwrap_or_default().replace('-', "_");
    if !is_hash || name == package {
        return is_hash.then(|| " --lib".to_owned());
    }
    Some(format!(" --test {name}"))
}

/// The profile that a program in a folder of Cargo's was built with: `target/<profile>/deps/<program>`.
fn profile_flag(program: &Path) -> String {
    let folder = program.ancestors().nth(2).and_then(Path::file_name).and_then(|name| name.to_str());
    match folder {
        None | Some("debug") => String::new(),
        Some("release") => " --release".to_owned(),
        Some(profile) => format!(" --profile {profile}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_understood() {
        assert_eq!(parse_range("12"), Some(0..12));
        assert_eq!(parse_range("5..12"), Some(5..12));
        assert_eq!(parse_range("x"), None);
        assert_eq!(parse_range("5..y"), None);
    }

    #[test]
    fn a_failure_keeps_its_panic_and_names_its_seed() {
        let seeds = Seeds { range: 0..10, limit: None, tally: Tally::default() };
        let mut last = 0;
        let failure = catch_unwind(AssertUnwindSafe(|| {
            seeds.run(|seed| {
                last = seed;
                assert!(seed < 3, "three");
            })
        }));
        assert_eq!(last, 3);
        let panic = failure.unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"three"));
        let command = replay_command(3);
        assert!(
            command.starts_with("ZEBU_SEED=3 cargo test") && command.contains("names_its_seed"),
            "{command}"
        );
    }

    #[test]
    fn the_command_names_the_target_and_the_profile() {
        let program = Path::new("/x/target/other/deps/crash-0123456789abcdef");
        assert_eq!(test_target(program).as_deref(), Some(" --test crash"));
        assert_eq!(profile_flag(program), " --profile other");
        assert_eq!(profile_flag(Path::new("target/debug/deps/crash-0123456789abcdef")), "");
        assert_eq!(profile_flag(Path::new("target/release/deps/crash-0123456789abcdef")), " --release");
        assert_eq!(test_target(Path::new("crash")), None);
        // Cargo tells a test its package when it runs it.
        let command = replay_command(3);
        assert!(command.contains(" -p zebu-sim") && command.contains(" --lib -- --exact "), "{command}");
    }

    #[test]
    fn time_ends_an_endless_range() {
        let limit = Some(Duration::from_millis(20));
        let seeds = Seeds { range: 7..u64::MAX, limit, tally: Tally::default() };
        assert!(seeds.run(|seed| assert!(seed >= 7)) > 0);
    }
}
