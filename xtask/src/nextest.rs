//! Runs of the tests by cargo-nextest: a process for each test, several at a time. `.config/nextest.toml` says which are
//! watched and run one at a time.

use crate::built_tools;
use crate::tenth::Tenth;
use crate::test_programs::{BESIDE_QEMU, BLACK_BOX, BUILT, Qemu, on_this_machine};
use crate::torture::STEPS_OF_A_COMMIT;
use std::path::Path;
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::output;
use zebu_bench::workspace::{in_workspace, root, target_dir};

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

    /// The watched tests, on a busy machine.
    pub(crate) fn watched(self, busy: &Busy) -> Outcome {
        self.run(&busy.options(), WATCHED)
    }

    /// All tests, on a busy machine.
    pub(crate) fn all_of(self, busy: &Busy) -> Outcome {
        self.run(&busy.options(), &all())
    }

    /// The filter without the tests that other tenths have.
    fn without_other_tenths(self, filter: &str) -> Outcome<String> {
        let mut left_out = Vec::new();
        for name in names()?.iter().filter(|name| !self.tenth.has_test(name)) {
            let (program, path) = name.split_once(' ').ok_or_else(|| format!("'{name}' names no program"))?;
            left_out.push(format!("(binary_id(={program}) and test(={path}))"));
        }
        if left_out.is_empty() {
            return Ok(filter.to_owned());
        }
        println!("{} tests are left to other tenths", left_out.len());
        Ok(format!("({filter}) and not ({})", left_out.join(" or ")))
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
        let filter = self.without_other_tenths(&filter)?;
        let mut command = nextest("run")?;
        command.args(options).args(["--no-fail-fast", "--no-tests", "fail", "-E", &filter]);
        on_this_machine(&mut command).env("ZEBU_BIN", target_dir()?.join(BUILT).join("zebu"));
        if self.tenth != Tenth::All {
            // What fails here is what a change did; fresh cases are for the runs that somebody looks at.
            command.env("PROPTEST_RNG_SEED", "1");
        }
        self.qemu.tell(&mut command);
        let status =
            self.tenth.tell(&mut command).status().map_err(|e| format!("cannot run the tests: {e}"))?;
        // Without the command: it names hundreds of tests.
        if status.success() { Ok(()) } else { Err(format!("the tests: {status}")) }
    }
}

/// A runner that keeps a machine busy: so many tests at once, the watched ones among them.
pub(crate) struct Busy {
    at_once: String,
    config: String,
}

impl Busy {
    pub(crate) fn new(at_once: usize) -> Outcome<Self> {
        let (from, to) = (root().join(".config/nextest.toml"), target_dir()?.join("nextest-busy.toml"));
        let said = |path: &Path, e: std::io::Error| format!("{}: {e}", path.display());
        let text = std::fs::read_to_string(&from).map_err(|e| said(&from, e))?;
        let one = "watched = { max-threads = 1 }";
        if !text.contains(one) {
            return Err(format!("{}: has no line '{one}'", from.display()));
        }
        let text = text.replace(one, &format!("watched = {{ max-threads = {at_once} }}"));
        std::fs::write(&to, text).map_err(|e| said(&to, e))?;
        Ok(Self { at_once: at_once.to_string(), config: to.display().to_string() })
    }

    fn options(&self) -> [&str; 4] {
        ["--test-threads", &self.at_once, "--config-file", &self.config]
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
    let mut command = in_workspace(built_tools::nextest()?);
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
