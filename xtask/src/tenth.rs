//! The tenth of the long matrices that a run has: those of ten commits in a row have all of them.

use std::fmt;
use std::process::Command;
use std::str::FromStr;
use zebu_bench::process::output;
use zebu_bench::workspace::root;

/// The share of what is too long for every run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tenth {
    /// One of ten, 0 to 9.
    One(u64),
    /// All of it.
    All,
}

/// Beginnings of program and path: families of tests that take long and try one thing in many ways. A run has those whose names
/// fall into its tenth.
const FAMILIES: [&str; 19] = [
    "zebu-engine::check clean::matrix",
    "zebu-engine::jobs matrix::",
    "zebu-engine::mapping_pressure ",
    "zebu-engine::random_operations ",
    "zebu-engine::simulated mutants::killed::",
    "zebu-tests::backup backup_crash::",
    "zebu-tests::backup bitmap_matrix::",
    "zebu-tests::encryption cryptsetup_payloads::",
    "zebu-tests::formats foreign_write::",
    "zebu-tests::formats packed_sources::",
    "zebu-tests::images aged::",
    "zebu-tests::images compressed_matrix::",
    "zebu-tests::images large::",
    "zebu-tests::images random_operations::",
    "zebu-tests::losses ",
    "zebu-tests::remote registry_clients::",
    "zebu-tests::serve guest::",
    "zebu-tests::serve threads::",
    "zebu-tests::serve ublk::",
];

/// Tests whose cases come in tenths. `crate::suite` has the steps.
pub(crate) const ROTATING: [&str; 12] = [
    "beside_qemu::lines_end_",
    "beside_qemu::stacks_do_",
    "encryption_matrix::images_of_zebu",
    "encryption_matrix::what_qemu_does_not_make_is_refused",
    "hostile_luks::hostile_headers_end_in_one_line_and_within_bounds",
    "foreign_matrix::images_of_qemu_read_as_qemu_reads_them",
    "strangers::hostile_images_end_in_an_error_or_a_result_within_bounds",
    "strangers::no_trick_opens_a_file_that_was_not_allowed",
    "amend::version_",
    "read_matrix::version_",
    "snapshot_matrix::version_",
    "write_matrix::version_",
];

/// The test whose cases take too long for a tenth of them: a run has a tenth of its tenth.
pub(crate) const SLOWEST: &str = "encryption_matrix::images_of_qemu";

impl Tenth {
    /// The one that follows from the number of commits: ten commits in a row have another each.
    pub(crate) fn of_commit() -> Self {
        let git = |words: &[&str]| {
            output(Command::new("git").current_dir(root()).args(words)).map(|said| said.trim().to_owned())
        };
        if git(&["rev-parse", "--is-shallow-repository"]).as_deref() == Ok("true") {
            println!(
                "note: a shallow clone does not know the number of commits; `--tenth N` names another tenth"
            );
        }
        let count = git(&["rev-list", "--count", "HEAD"]);
        Self::One(count.ok().and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) % 10)
    }

    /// Tells it to tests.
    pub(crate) fn tell(self, command: &mut Command) -> &mut Command {
        match self {
            Self::One(number) => command.env("ZEBU_TENTH", number.to_string()),
            Self::All => command.env("ZEBU_TENTH", "all"),
        }
    }

    /// Tells whether it has the test of this name. Tests that come or go move no others.
    pub(crate) fn has_test(self, name: &str) -> bool {
        !is_shared_out(name) || self.has(number_of(name))
    }

    /// Tells whether the thing of this number is in it.
    pub(crate) fn has(self, number: u64) -> bool {
        match self {
            Self::One(tenth) => number % 10 == tenth,
            Self::All => true,
        }
    }
}

/// Tells whether only one of ten runs has the test of this name.
pub(crate) fn is_shared_out(name: &str) -> bool {
    FAMILIES.iter().any(|family| name.starts_with(family))
}

/// The tenth of a test that is shared out, by FNV-1a of its name.
pub(crate) fn number_of(name: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    (name.bytes().fold(0xcbf2_9ce4_8422_2325, step) >> 32) % 10
}

impl FromStr for Tenth {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(number @ 0..=9) => Ok(Self::One(number)),
            _ if text == "all" => Ok(Self::All),
            _ => Err("a number from 0 to 9, or `all`".to_owned()),
        }
    }
}

impl fmt::Display for Tenth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(number) => {
                write!(f, "tenth {number} of the long matrices (--tenth {number}; --tenth all: each)")
            }
            Self::All => f.write_str("the long matrices whole"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_runs_have_everything_once() {
        for number in 0..100 {
            assert_eq!((0..10).filter(|tenth| Tenth::One(*tenth).has(number)).count(), 1);
            assert!(Tenth::All.has(number));
        }
    }

    #[test]
    fn ten_runs_have_each_test_of_a_family_once_and_the_others_always() {
        let runs = |name: &str| (0..10).filter(|tenth| Tenth::One(*tenth).has_test(name)).count();
        assert_eq!(runs("zebu-engine::simulated mutants::killed::nothing_is_copied"), 1);
        assert_eq!(runs("zebu-engine::simulated crash::replay::bitmaps_know_what_crashes_leave"), 10);
        assert!(Tenth::All.has_test("zebu-engine::simulated mutants::killed::nothing_is_copied"));
    }

    /// Each file of tests that asks for its tenth is listed as one that does.
    #[test]
    fn tests_that_have_tenths_are_listed() {
        let tests = root().join("tests/tests");
        let folders = std::fs::read_dir(&tests).expect("a folder").flatten();
        let files = folders.filter_map(|folder| std::fs::read_dir(folder.path()).ok()).flatten().flatten();
        for file in files.map(|file| file.path()).filter(|file| file.extension().is_some_and(|e| e == "rs")) {
            let text = std::fs::read_to_string(&file).expect("text");
            let module = format!("{}::", file.file_stem().expect("a name").display());
            let is_listed = ROTATING.iter().any(|name| name.starts_with(&module));
            assert_eq!(text.contains("zebu_tests::tenth"), is_listed, "{module}");
        }
    }

    #[test]
    fn a_tenth_is_named_by_its_number() {
        assert_eq!("7".parse(), Ok(Tenth::One(7)));
        assert_eq!("all".parse(), Ok(Tenth::All));
        assert!("10".parse::<Tenth>().is_err() && "".parse::<Tenth>().is_err());
    }
}
