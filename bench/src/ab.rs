//! The command `ab`: any two commands, measured alternately.

use crate::Outcome;
use crate::process::{measure_ok, run};
use crate::run::{Rounds, Side, alternate, sample};
use clap::Args;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

/// The options of `ab`.
#[derive(Args)]
pub struct AbArgs {
    /// Measured rounds; in each both commands run once, in turn the one and the other first
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Rounds before them that don't count
    #[arg(long, default_value_t = 1)]
    warm_up: usize,
    /// A shell command that runs before each measured command, unmeasured
    #[arg(long, value_name = "COMMAND")]
    prepare: Option<String>,
    /// Append the results to this file, one JSON object a line
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The two commands, with `--vs` between them
    #[arg(last = true, required = true, value_name = "CMD_A --vs CMD_B")]
    commands: Vec<String>,
}

/// The command `ab`.
pub fn command(args: &AbArgs) -> Outcome {
    let (a, b) = split(&args.commands)?;
    println!("A: {}\nB: {}\n", a.join(" "), b.join(" "));
    let side = |who: &str, words: Vec<String>| {
        Side::new(who, move || {
            if let Some(prepare) = &args.prepare {
                run(Command::new("sh").args(["-c", prepare]))?;
            }
            Ok(sample(&measure_ok(Command::new(&words[0]).args(&words[1..]))?))
        })
    };
    let rounds = Rounds { measured: args.rounds, warm_up: args.warm_up };
    let row = alternate("A beside B", rounds, vec![side("A", a.to_vec()), side("B", b.to_vec())]);
    if let Some(failed) = row.failed.first() {
        return Err(failed.why.clone());
    }
    println!("{}", row.render());
    let Some(file) = &args.json else { return Ok(()) };
    let said = |e: std::io::Error| format!("{}: {e}", file.display());
    let mut out = std::fs::OpenOptions::new().create(true).append(true).open(file).map_err(said)?;
    writeln!(out, "{}", serde_json::to_string(&row).map_err(|e| e.to_string())?).map_err(said)
}

fn split(words: &[String]) -> Outcome<(&[String], &[String])> {
    let at = words.iter().position(|w| w == "--vs").ok_or("no `--vs` between the two commands")?;
    let (a, b) = (&words[..at], &words[at + 1..]);
    if a.is_empty() || b.is_empty() { Err("a command is empty".into()) } else { Ok((a, b)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_split_at_vs() {
        let words = |s: &str| s.split(' ').map(String::from).collect::<Vec<_>>();
        assert_eq!(split(&words("a -x --vs b")).expect("fine"), (&words("a -x")[..], &words("b")[..]));
        assert!(split(&words("a b")).is_err() && split(&words("--vs b")).is_err());
    }
}
