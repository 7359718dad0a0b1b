//! The command `mutants`: the changes of the code that cargo-mutants thinks of, all of them built at once.
//!
//! `cargo mutants` builds the engine and its tests anew for each change, which takes longer than most tests need to
//! notice it. Here a copy of the tree gets all changes, and the environment says which one is active.

mod judge;
mod tree;
mod verdict;

use crate::nightly::ensure_subcommand;
use clap::Args;
use judge::Suite;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tree::ChangedTree;
use verdict::{Finding, Verdict};
use zebu_bench::Outcome;
use zebu_bench::process::output;
use zebu_bench::table::Table;
use zebu_bench::workspace::root;
use zebu_bench::workspace::{cargo, target_dir};
use zebu_source::schema::Change;

#[derive(Args)]
#[command(after_help = "Needs cargo install --locked cargo-mutants. Which files: .cargo/mutants.toml.

Examples:
  cargo xtask mutants --lanes 2
  cargo xtask mutants commit.rs                 # changes whose name holds these words
  cargo xtask mutants --tests zebu,torture      # by some tests; then by all what these did not notice:
  cargo xtask mutants --survivors

What became of each change stays in target/mutants/outcomes.jsonl until its source is changed.")]
pub(crate) struct MutantsArgs {
    /// How many changes at a time
    #[arg(long, default_value_t = 1)]
    lanes: usize,
    /// Only those that no test noticed the last time
    #[arg(long)]
    survivors: bool,
    /// Go on where a run was stopped: leave out what has a verdict
    #[arg(long, conflicts_with = "survivors")]
    resume: bool,
    /// Only these test programs (`zebu` is that of the unit tests); all if none is named
    #[arg(long, value_delimiter = ',')]
    tests: Vec<String>,
    /// Only changes whose name holds one of these
    names: Vec<String>,
}

/// A kept verdict on a change.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Judged {
    name: String,
    /// The git object of the source that the name's line and column are of.
    source: String,
    #[serde(flatten)]
    finding: Finding,
}

pub(crate) fn command(args: &MutantsArgs) -> Outcome {
    ensure_subcommand("mutants")?;
    let place = target_dir()?.join("mutants");
    std::fs::create_dir_all(&place).map_err(|e| format!("{}: {e}", place.display()))?;
    let kept = place.join("outcomes.jsonl");
    let changes = changes()?;
    let sources = sources(&changes)?;
    let earlier = read(&kept, &changes, &sources)?;
    let wanted = |change: &Change| {
        let named = args.names.is_empty() || args.names.iter().any(|name| change.name.contains(name));
        let before = earlier.get(&change.name).map(|judged| judged.finding.verdict);
        named
            && (!args.survivors || before.is_some_and(Verdict::is_open))
            && !(args.resume && before.is_some())
    };
    let chosen: BTreeSet<u32> =
        changes.iter().filter(|(_, change)| wanted(change)).map(|(number, _)| *number).collect();
    let tree = ChangedTree::build(&place, &changes)?;
    let programs: Vec<_> = tree
        .programs()
        .iter()
        .filter(|program| args.tests.is_empty() || args.tests.contains(&program.name))
        .cloned()
        .collect();
    if let Some(unknown) = args.tests.iter().find(|name| !programs.iter().any(|known| known.name == **name)) {
        let known: Vec<&str> = tree.programs().iter().map(|program| program.name.as_str()).collect();
        return Err(format!("there is no test program {unknown}; there are: {}", known.join(", ")));
    }
    let suite = Suite::measure(&place, &programs, args.lanes.max(1))?;
    let open = std::fs::OpenOptions::new().append(true).create(true).open(&kept);
    let log = Mutex::new(open.map_err(|e| format!("{}: {e}", kept.display()))?);
    let queue: Vec<u32> = chosen.into_iter().collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let lane = || -> Outcome {
            while let Some(number) = queue.get(next.fetch_add(1, Relaxed)) {
                let finding = match tree.outcome_of_building(*number) {
                    Some(verdict) => Finding { verdict, by: None, seconds: 0.0 },
                    None => suite.judge(*number)?,
                };
                let change = &changes[number];
                let source = sources.get(&change.file).cloned().unwrap_or_default();
                let judged = Judged { name: change.name.clone(), source, finding };
                println!("{}: {}", judged.finding.verdict.name(), judged.name);
                let line = serde_json::to_string(&judged).map_err(|e| e.to_string())?;
                let mut log = log.lock().map_err(|_| "a lane has panicked")?;
                writeln!(log, "{line}").map_err(|e| format!("{}: {e}", kept.display()))?;
            }
            Ok(())
        };
        let lanes: Vec<_> = (0..args.lanes.max(1)).map(|_| scope.spawn(lane)).collect();
        lanes.into_iter().try_for_each(|lane| lane.join().map_err(|_| "a lane has panicked")?)
    })?;
    let judged = read(&kept, &changes, &sources)?;
    println!("{}", report(judged.values()));
    Ok(())
}

/// All changes, with numbers.
fn changes() -> Outcome<BTreeMap<u32, Change>> {
    let list = output(cargo().args(["mutants", "--list", "--json"]))?;
    let changes: Vec<Change> =
        serde_json::from_str(&list).map_err(|e| format!("cargo mutants --list: {e}"))?;
    Ok((0..).zip(changes).collect())
}

/// The git objects of the files that are changed, as they are now.
fn sources(changes: &BTreeMap<u32, Change>) -> Outcome<BTreeMap<String, String>> {
    let files: BTreeSet<&String> = changes.values().map(|change| &change.file).collect();
    let objects = output(Command::new("git").current_dir(root()).arg("hash-object").args(&files))?;
    Ok(files.into_iter().cloned().zip(objects.lines().map(str::to_owned)).collect())
}

/// The last verdict on each of `changes`, if its source is still the same.
fn read(
    kept: &Path,
    changes: &BTreeMap<u32, Change>,
    sources: &BTreeMap<String, String>,
) -> Outcome<HashMap<String, Judged>> {
    let text = match std::fs::read_to_string(kept) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        text => text.map_err(|e| format!("{}: {e}", kept.display()))?,
    };
    let source_of: HashMap<&String, Option<&String>> =
        changes.values().map(|change| (&change.name, sources.get(&change.file))).collect();
    let mut last = HashMap::new();
    for line in text.lines() {
        let judged: Judged = serde_json::from_str(line).map_err(|e| format!("{}: {e}", kept.display()))?;
        if source_of.get(&judged.name).is_some_and(|source| *source == Some(&judged.source)) {
            last.insert(judged.name.clone(), judged);
        }
    }
    Ok(last)
}

/// The survivors, which somebody has to look at, and the counts of each verdict in each file.
fn report<'a>(judged: impl Iterator<Item = &'a Judged>) -> String {
    let mut files = BTreeMap::<String, BTreeMap<Verdict, u64>>::new();
    let mut open = Vec::new();
    for judged in judged {
        let file = judged.name.split(':').next().unwrap_or_default();
        let file = file.rsplit('/').next().unwrap_or_default();
        *files.entry(file.to_owned()).or_default().entry(judged.finding.verdict).or_default() += 1;
        if judged.finding.verdict.is_open() {
            open.push(format!("{}: {}", judged.finding.verdict.name(), judged.name));
        }
    }
    open.sort_unstable();
    let mut table = Table::new(std::iter::once("file").chain(Verdict::ALL.map(Verdict::name)));
    let mut all = BTreeMap::<Verdict, u64>::new();
    let cells = |counts: &BTreeMap<Verdict, u64>| {
        Verdict::ALL.map(|verdict| counts.get(&verdict).copied().unwrap_or(0).to_string())
    };
    for (file, counts) in &files {
        table.row(std::iter::once(file.clone()).chain(cells(counts)));
        for (verdict, count) in counts {
            *all.entry(*verdict).or_default() += count;
        }
    }
    table.row(std::iter::once("all".to_owned()).chain(cells(&all)));
    format!("{}\n\n{}", open.join("\n"), table.render())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_what_somebody_has_to_look_at() {
        let judged = |name: &str, verdict| Judged {
            name: name.into(),
            source: String::new(),
            finding: Finding { verdict, by: None, seconds: 1.0 },
        };
        let all = [
            judged("src/a.rs:1:2: replace f with ()", Verdict::Caught),
            judged("src/a.rs:3:4: replace + with -", Verdict::Survived),
            judged("src/b.rs:3:4: replace + with -", Verdict::Unviable),
        ];
        let text = report(all.iter());
        assert!(text.starts_with("survived: src/a.rs:3:4: replace + with -\n\n"), "{text}");
        assert!(text.lines().last().is_some_and(|line| line.starts_with("all")), "{text}");
    }
}
