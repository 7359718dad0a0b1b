//! The tenth of the long matrices that a run has: ten landings have all of them.

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

/// Things whose cases come in tenths, and the tests that have them. `crate::suite` has the steps.
pub(crate) const ROTATING: [&str; 10] = [
    "encryption_matrix::images_of_zebu",
    "encryption_matrix::images_of_qemu",
    "hostile_luks::hostile_headers_end_in_one_line_and_within_bounds",
    "foreign_matrix::images_of_qemu_read_as_qemu_reads_them",
    "strangers::hostile_images_end_in_an_error_or_a_result_within_bounds",
    "strangers::no_trick_opens_a_file_that_was_not_allowed",
    "amend::version_",
    "read_matrix::version_",
    "snapshot_matrix::version_",
    "write_matrix::version_",
];

impl Tenth {
    /// The one that follows from the number of commits: each landing has another.
    pub(crate) fn of_commit() -> Self {
        let count = output(Command::new("git").current_dir(root()).args(["rev-list", "--count", "HEAD"]));
        Self::One(count.ok().and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0) % 10)
    }

    /// Tells it to tests.
    pub(crate) fn tell(self, command: &mut Command) -> &mut Command {
        match self {
            Self::One(number) => command.env("ZEBU_TENTH", number.to_string()),
            Self::All => command.env("ZEBU_TENTH", "all"),
        }
    }

    /// Tells whether the thing of this number is in it.
    pub(crate) fn has(self, number: u64) -> bool {
        match self {
            Self::One(tenth) => number % 10 == tenth,
            Self::All => true,
        }
    }
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
    fn a_tenth_is_named_by_its_number() {
        assert_eq!("7".parse(), Ok(Tenth::One(7)));
        assert_eq!("all".parse(), Ok(Tenth::All));
        assert!("10".parse::<Tenth>().is_err() && "".parse::<Tenth>().is_err());
    }
}
