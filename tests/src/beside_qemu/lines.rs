//! Command lines: each command, each option that QEMU's help tells of in each of its spellings, its values, and files in each state.

use super::help::{self, CliOption};
use super::states::{STATES, State};
use super::values::{self, FILE, FILE_OPTIONS};

/// A command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// The program and its arguments.
    pub words: Vec<String>,
    /// The state of its file.
    pub state: State,
}

impl Line {
    /// The line as a shell would have it.
    pub fn text(&self) -> String {
        let quoted = |word: &String| if word.contains(' ') { format!("'{word}'") } else { word.clone() };
        self.words.iter().map(quoted).collect::<Vec<_>>().join(" ")
    }
}

/// All lines, in an order that does not change.
///
/// # Errors
/// QEMU has a command or an option that nothing is known of here.
pub fn all() -> Result<Vec<Line>, String> {
    let mut patterns: Vec<Vec<String>> = Vec::new();
    for command in help::commands() {
        let plain = CliOption { spellings: vec![String::new()], has_value: false };
        for option in [plain].into_iter().chain(help::options_of(&command)) {
            if option.name() == "help" {
                continue;
            }
            let (before, behind) = values::rest_of(&command, &option)?;
            let first = ["qemu-img", command.as_str()].into_iter().chain(before.iter().copied());
            let first: Vec<String> = first.map(str::to_owned).collect();
            let behind: Vec<String> = behind.iter().map(|word| (*word).to_owned()).collect();
            add(&mut patterns, &first, &option, values::of(&command, &option)?, &behind);
        }
    }
    io_patterns(&mut patterns)?;
    let mut lines = Vec::new();
    for (number, spellings) in patterns.chunks(2).enumerate() {
        // Spellings take turns over the states.
        for (at, state) in STATES.iter().enumerate() {
            let pattern = spellings.get((at + number) % 2).or(spellings.first());
            lines.extend(pattern.map(|pattern| line(pattern, *state)));
        }
    }
    lines.dedup();
    Ok(lines)
}

fn line(pattern: &[String], state: State) -> Line {
    Line { words: pattern.iter().map(|word| word.replace(FILE, state.file)).collect(), state }
}

/// Adds two lines for each value: with the first spelling and with the last.
fn add(
    patterns: &mut Vec<Vec<String>>,
    before: &[String],
    option: &CliOption,
    values: &[&str],
    behind: &[String],
) {
    let mut push = |words: &[String], behind: &[String]| patterns.push([before, words, behind].concat());
    let (Some(first), Some(last)) = (option.spellings.first(), option.spellings.last()) else { return };
    for value in values {
        for spelling in [first, last] {
            let words = match (option.has_value, spelling.is_empty()) {
                (_, true) => vec![],
                (false, false) => vec![spelling.clone()],
                (true, false) if spelling.starts_with("--") => vec![format!("{spelling}={value}")],
                (true, false) => vec![spelling.clone(), (*value).to_owned()],
            };
            push(&words, behind);
        }
    }
    if option.name().ends_with("image-opts") {
        let behind: Vec<String> = behind.iter().map(|word| word.replace(FILE, FILE_OPTIONS)).collect();
        for spelling in [first, last] {
            push(std::slice::from_ref(spelling), &behind);
        }
    }
}

fn io_patterns(patterns: &mut Vec<Vec<String>>) -> Result<(), String> {
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    for option in help::options_of_program("qemu-io") {
        if matches!(option.name(), "help" | "version") {
            continue;
        }
        let behind = ["-c", "read 0 64k", "-c", "write -P 5 256k 64k", FILE];
        add(patterns, &owned(&["qemu-io"]), &option, values::of("qemu-io", &option)?, &owned(&behind));
    }
    for (command, flags, _) in help::io_commands() {
        let Some(arguments) = values::io_arguments(&command)? else { continue };
        let flags = flags.iter().map(|flag| format!(" -{flag}")).chain([
            String::new(),
            " -P 1".to_owned(),
            " -X".to_owned(),
        ]);
        for flag in flags {
            let text = format!("{command}{flag} {arguments}");
            // With the format probed, or told, in turn over the states.
            patterns.push(owned(&["qemu-io", "-c", text.trim_end(), "-c", "read 0 4k", FILE]));
            patterns.push(owned(&["qemu-io", "-f", "qcow2", "-c", text.trim_end(), "-c", "read 0 4k", FILE]));
        }
    }
    Ok(())
}
