//! Runs of the tests by cargo-nextest: a process for each test, several at a time. `.config/nextest.toml` says which are
//! watched and run one at a time.

use crate::built_tools;
use crate::tenth::Tenth;
use crate::test_programs::{BESIDE_QEMU, BLACK_BOX, BUILT, Qemu, on_this_machine};
use crate::torture::STEPS_OF_A_COMMIT;
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::{output, run};
use zebu_bench::workspace::{root, target_dir};

/// Tests whose processes wait for each other, or who watch the whole machine.
const WATCHED: &str = "group(watched) + group(alone)";

/// Tests, and what they are told.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tests {
    pub(crate) qemu: Qemu,
    pub(crate) tenth: Tenth,
}

/// A test that was run, and how long it took.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Timed {
    pub(crate) name: String,
    pub(crate) seconds: f64,
}

impl Tests {
    /// All tests.
    pub(crate) fn all(self) -> Outcome {
        self.run(&[], &all())
    }

    /// The tests that show a mistake soonest.
    pub(crate) fn quick(self) -> Outcome {
        self.run(&[], &format!("not package({BLACK_BOX}) and not test(/^(mutants|torture)::/)"))
    }

    /// The watched tests, so many times each, then all once: so many at once as a busy machine has processes.
    pub(crate) fn under_load(self, at_once: usize, times: u32) -> Outcome {
        let (at_once, times) = (at_once.to_string(), times.to_string());
        self.run(&["--test-threads", &at_once, "--stress-count", &times], WATCHED)?;
        self.run(&["--test-threads", &at_once], &all())
    }

    fn run(self, options: &[&str], filter: &str) -> Outcome {
        let filter = match self.qemu {
            Qemu::Asked => filter.to_owned(),
            Qemu::LeftOut => {
                let (package, program) = BESIDE_QEMU;
                format!(
                    "({filter}) and not package({BLACK_BOX}) and not (package({package}) and binary({program}))"
                )
            }
        };
        let mut command = nextest("run")?;
        command.args(options).args(["--no-fail-fast", "--no-tests", "fail", "-E", &filter]);
        on_this_machine(&mut command).env("ZEBU_BIN", target_dir()?.join(BUILT).join("zebu"));
        if self.tenth != Tenth::All {
            // What fails here is what a change did; fresh cases are for the runs that somebody looks at.
            command.env("PROPTEST_RNG_SEED", "1");
        }
        self.qemu.tell(&mut command);
        run(self.tenth.tell(&mut command))
    }
}

/// The filter of all tests. The steps of a commit are left to the torture run.
fn all() -> String {
    format!("not test(={STEPS_OF_A_COMMIT})")
}

/// The name of each test, a line each: package, program and path.
pub(crate) fn names() -> Outcome<Vec<String>> {
    let text = output(nextest("list")?.args(["--message-format", "oneline"]))?;
    Ok(text.lines().filter(|line| !line.trim().is_empty()).map(str::to_owned).collect())
}

fn nextest(verb: &str) -> Outcome<Command> {
    let mut command = Command::new(built_tools::nextest()?);
    command.current_dir(root()).env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO_MANIFEST_DIR");
    command.args(["nextest", verb, "--workspace", "--locked"]);
    Ok(command)
}

/// The slowest tests of the last run, the slowest first.
pub(crate) fn slowest(count: usize) -> Outcome<Vec<Timed>> {
    let report = target_dir()?.join("nextest/default/junit.xml");
    let text = std::fs::read_to_string(&report).map_err(|e| format!("{}: {e}", report.display()))?;
    let mut tests = timed(&text);
    tests.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    tests.truncate(count);
    Ok(tests)
}

/// The tests in a report in JUnit's format.
fn timed(report: &str) -> Vec<Timed> {
    let case = |text: &str| {
        let tag = text.split_once('>')?.0;
        let attribute = |name: &str| {
            let (_, rest) = tag.split_once(&format!(" {name}=\""))?;
            Some(rest.split_once('"')?.0)
        };
        let name = format!("{} {}", attribute("classname")?, attribute("name").or_else(|| first_name(tag))?);
        Some(Timed { name, seconds: attribute("time")?.parse().ok()? })
    };
    report.split("<testcase").skip(1).filter_map(case).collect()
}

/// The name where it is the first attribute.
fn first_name(tag: &str) -> Option<&str> {
    Some(tag.trim_start().strip_prefix("name=\"")?.split_once('"')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_the_name_and_the_time_of_each_test() {
        let report = "<testsuites><testsuite name=\"zebu::check\"><testcase name=\"clean::matrix\" classname=\"zebu::check\" \
                      timestamp=\"2026-01-01T00:00:00.000+00:00\" time=\"84.4\"></testcase><testcase name=\"a\" \
                      classname=\"zebu\" time=\"0.5\"/></testsuite></testsuites>";
        let timed = timed(report);
        let expected = [("zebu::check clean::matrix", 84.4), ("zebu a", 0.5)];
        assert_eq!(timed, expected.map(|(name, seconds)| Timed { name: name.to_owned(), seconds }));
    }
}
