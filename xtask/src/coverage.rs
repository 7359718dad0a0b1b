//! The command `coverage`: how many lines of the format crate its own tests reach.

use crate::nightly::ensure_subcommand;
use clap::Args;
use std::collections::BTreeMap;
use std::path::Path;
use zebu_bench::Outcome;
use zebu_bench::process::run;
use zebu_bench::table::Table;
use zebu_bench::workspace::root;
use zebu_bench::workspace::{cargo, target_dir};

#[derive(Args)]
#[command(after_help = "Needs cargo install --locked cargo-llvm-cov, and rustup component add llvm-tools.
Lines of unit tests are not counted, though they are in the same files.")]
pub(crate) struct CoverageArgs {
    /// Fail if less than so many per cent of the lines are reached
    #[arg(long, default_value_t = 95.0)]
    least: f64,
}

const SOURCES: &str = "crates/qcow2/src";

/// The lines of a file that hold code, and whether a test reaches them.
type Lines = BTreeMap<usize, bool>;

pub(crate) fn command(args: &CoverageArgs) -> Outcome {
    ensure_subcommand("llvm-cov")?;
    let report = target_dir()?.join("coverage.lcov");
    run(cargo()
        .args(["llvm-cov", "--locked", "--package", "zebu-qcow2", "--lcov", "--output-path"])
        .arg(&report))?;
    let text = std::fs::read_to_string(&report).map_err(|e| format!("{}: {e}", report.display()))?;
    let mut table = Table::new(["file", "lines", "reached"]);
    let (mut all, mut all_reached, mut not_reached) = (0, 0, String::new());
    for (file, mut lines) in files(&text) {
        let Ok(name) = Path::new(&file).strip_prefix(root().join(SOURCES)) else { continue };
        let source = std::fs::read_to_string(&file).map_err(|e| format!("{file}: {e}"))?;
        lines.split_off(&first_line_of_tests(&source));
        let reached = lines.values().filter(|reached| **reached).count();
        let missed: Vec<String> =
            lines.iter().filter(|(_, reached)| !**reached).map(|(line, _)| line.to_string()).collect();
        if !missed.is_empty() {
            not_reached += &format!("not reached: {}: {}\n", name.display(), missed.join(" "));
        }
        table.row([name.display().to_string(), lines.len().to_string(), reached.to_string()]);
        all += lines.len();
        all_reached += reached;
    }
    let percent = 100.0 * all_reached as f64 / all.max(1) as f64;
    println!("{}\n{not_reached}{all_reached} of {all} lines: {percent:.1} %", table.render());
    if percent < args.least {
        return Err(format!(
            "tests reach {percent:.1} % of the lines of {SOURCES}, less than {} %",
            args.least
        ));
    }
    Ok(())
}

/// The files of a report in lcov's format (geninfo(1)): `SF:` names a file, `DA:` a line and how often it ran.
fn files(lcov: &str) -> BTreeMap<String, Lines> {
    let mut files = BTreeMap::<String, Lines>::new();
    let mut file = String::new();
    for line in lcov.lines() {
        if let Some(name) = line.strip_prefix("SF:") {
            name.clone_into(&mut file);
        } else if let Some((number, count)) = line.strip_prefix("DA:").and_then(|data| data.split_once(','))
            && let Ok(number) = number.parse()
        {
            *files.entry(file.clone()).or_default().entry(number).or_default() |= count != "0";
        }
    }
    files
}

/// Where the unit tests of a source begin, which are at its end; behind it if it has none.
fn first_line_of_tests(source: &str) -> usize {
    let at = source.lines().position(|line| line.starts_with("#[cfg(test)]"));
    at.map_or(usize::MAX, |index| index + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_reached_if_any_instance_of_it_ran() {
        let report = "SF:/a.rs\nDA:3,0\nDA:4,7\nend_of_record\nSF:/b.rs\nDA:3,1\nend_of_record\nSF:/a.rs\nDA:3,2\nDA:9,0\n";
        let files = files(report);
        assert_eq!(files["/a.rs"], Lines::from([(3, true), (4, true), (9, false)]));
        assert_eq!(files["/b.rs"], Lines::from([(3, true)]));
    }

    #[test]
    fn tests_begin_at_their_attribute() {
        assert_eq!(first_line_of_tests("fn a() {}\n\n#[cfg(test)]\nmod tests {}\n"), 3);
        assert_eq!(first_line_of_tests("fn a() {}\n"), usize::MAX);
    }
}
