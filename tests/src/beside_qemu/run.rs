//! Runs of lines and of stacks, and their reports on standard output.

use super::judge::Judge;
use super::lines::Line;
use super::named::{self, Named};
use super::stacks::{self, Outcome, Stack};
use super::states::STATES;
use crate::both_programs::install_names;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Whether a run has all lines: only then a row of the page that names nothing is a mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// It has all.
    Whole,
    /// It has some.
    Part,
}

/// Lines with their numbers.
pub fn numbered(lines: Vec<Line>) -> impl Iterator<Item = (usize, Line)> {
    lines.into_iter().enumerate()
}

/// Tells whether a line is in a tenth. Each tenth has each state, of other options.
pub fn is_in_tenth(number: usize, tenth: usize) -> bool {
    (number + number / STATES.len()) % 10 == tenth
}

/// Does the work of all numbers below `count`, some at the same time.
fn in_parallel(jobs: usize, count: usize, work: impl Fn(usize) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= count {
                        return;
                    }
                    work(number);
                }
            });
        }
    });
}

/// How often rows of the page were found, and what none of them names.
#[derive(Default)]
struct Tally {
    rows: Mutex<BTreeMap<u32, usize>>,
    unnamed: Mutex<BTreeSet<u64>>,
}

impl Tally {
    /// Counts a difference. False if no row names it.
    fn count(&self, rows: &[Named], number: u64, text: &str, kind: &str) -> bool {
        let row = rows.iter().find(|row| row.names(text, kind));
        match row {
            Some(row) => *self.rows.lock().expect("no panic").entry(row.number).or_default() += 1,
            None => drop(self.unnamed.lock().expect("no panic").insert(number)),
        }
        row.is_some()
    }
}

/// Has both programs run lines.
///
/// # Errors
/// There is a difference that the page does not name; in a whole run, a row of it whose difference is gone.
///
/// # Panics
/// If a program can't be started.
pub fn run_lines(chosen: &[(usize, Line)], extent: Extent, jobs: usize) -> Result<(), String> {
    let (judge, rows, tally) = (Judge::new(), named::rows(), Tally::default());
    in_parallel(jobs, chosen.len(), |at| {
        let (number, line) = &chosen[at];
        let text = line.text();
        for difference in judge.differences(line) {
            if !tally.count(&rows, *number as u64, &text, difference.kind) {
                println!(
                    "{number}: {text} ({})\n  {}: {}",
                    line.state.name, difference.kind, difference.what
                );
            }
        }
    });
    let (found, unnamed) =
        (tally.rows.into_inner().expect("no panic"), tally.unnamed.into_inner().expect("no panic"));
    println!("{} lines, {} differ without a name", chosen.len(), unnamed.len());
    let of_lines: Vec<_> = rows.iter().filter(|row| !row.is_of_stacks()).collect();
    for row in &of_lines {
        println!("row {}: {} differences", row.number, found.get(&row.number).copied().unwrap_or_default());
    }
    let idle = of_lines.iter().map(|row| row.number).filter(|number| !found.contains_key(number));
    let idle: Vec<u32> = idle.collect();
    if !unnamed.is_empty() {
        return Err(format!("lines that {} does not name: {unnamed:?}", named::PAGE));
    }
    if extent == Extent::Whole && !idle.is_empty() {
        return Err(format!("rows of {} whose differences are gone: {idle:?}", named::PAGE));
    }
    Ok(())
}

/// Has both programs work on the stacks of these seeds.
///
/// # Errors
/// There is a difference that the page does not name.
///
/// # Panics
/// If a program can't be started.
pub fn run_stacks(seeds: Range<u64>, jobs: usize) -> Result<(), String> {
    let home = tempfile::tempdir().map_err(|error| error.to_string())?;
    install_names(home.path());
    let (made, names) = (home.path().join("made"), home.path().join("names"));
    stacks::make(&made);
    let (rows, tally) = (named::rows(), Tally::default());
    let counts: Mutex<BTreeMap<String, usize>> = Mutex::default();
    in_parallel(jobs, seeds.clone().count(), |at| {
        let stack = Stack::of(seeds.start + at as u64);
        let word = match stacks::judge(&stack, &made, &names, home.path()) {
            Outcome::Same => "the same".to_owned(),
            Outcome::BothRefused => "refused by both".to_owned(),
            Outcome::Refused(key) => format!("refused by name: {key}"),
            Outcome::Differs(what) => {
                if tally.count(&rows, stack.seed, &stack.options(), named::STACK) {
                    "different, as a row names it".to_owned()
                } else {
                    println!("seed {}: {what}", stack.seed);
                    "different".to_owned()
                }
            }
        };
        *counts.lock().expect("no panic").entry(word).or_default() += 1;
    });
    for (word, count) in counts.into_inner().expect("no panic") {
        println!("{count} {word}");
    }
    let unnamed = tally.unnamed.into_inner().expect("no panic");
    if unnamed.is_empty() {
        Ok(())
    } else {
        Err(format!("stacks that {} does not name: seeds {unnamed:?}", named::PAGE))
    }
}
