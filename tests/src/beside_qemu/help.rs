//! Options as QEMU's programs tell of them: `qemu-img COMMAND --help`, `qemu-io --help`, `qemu-io -c help`, `qemu-nbd --help`.

use crate::program::required;
use std::process::{Command, Stdio};

/// An option of a program.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct CliOption {
    /// Its spellings, such as `-f` and `--format`.
    pub spellings: Vec<String>,
    /// Whether it has a value.
    pub has_value: bool,
}

impl CliOption {
    /// The longest spelling without dashes, by which values are found.
    pub fn name(&self) -> &str {
        let longest = self.spellings.iter().max_by_key(|spelling| spelling.len());
        longest.map_or("", |spelling| spelling.trim_start_matches('-'))
    }
}

/// Standard output of a program of QEMU.
fn told(program: &str, words: &[&str]) -> String {
    let mut command = Command::new(required(program));
    let output = command.args(words).stdin(Stdio::null()).output().expect("QEMU's program");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The commands of `qemu-img`.
pub fn commands() -> Vec<String> {
    let text = told("qemu-img", &["--help"]);
    let list = text.lines().skip_while(|line| !line.contains("commands"));
    let lines = list.skip(1).filter_map(|line| line.split_once(" - "));
    lines.map(|(name, _)| name.trim().to_owned()).filter(|name| !name.contains(' ')).collect()
}

/// The options of a command of `qemu-img`.
pub fn options_of(command: &str) -> Vec<CliOption> {
    options(&told("qemu-img", &[command, "--help"]))
}

/// The options of `qemu-io` or `qemu-nbd`.
pub fn options_of_program(program: &str) -> Vec<CliOption> {
    options(&told(program, &["--help"]))
}

/// A command of `qemu-io`: its name, its flags without values, and its arguments.
pub type IoCommand = (String, Vec<char>, String);

/// The commands of `qemu-io`.
pub fn io_commands() -> Vec<IoCommand> {
    let text = told("qemu-io", &["-c", "help"]);
    let lines = text.lines().filter_map(|line| line.split_once(" -- "));
    lines.map(|(usage, _)| io_command(usage)).collect()
}

fn io_command(usage: &str) -> IoCommand {
    let (name, rest) = usage.split_once(' ').unwrap_or((usage, ""));
    let flags = rest.split_once("[-").and_then(|(_, rest)| rest.split_once(']')).map(|(flags, _)| flags);
    let is_flags = |text: &&str| text.chars().all(char::is_alphabetic);
    let flags = flags.filter(is_flags).map(|flags| flags.chars().collect()).unwrap_or_default();
    (name.to_owned(), flags, rest.trim().to_owned())
}

/// The options of a help text: lines that begin with one.
fn options(text: &str) -> Vec<CliOption> {
    let mut found: Vec<CliOption> = text.lines().filter_map(option).collect();
    // `--enable, --disable` are two options in one line.
    found.retain(|option| !option.name().is_empty());
    found.sort();
    found.dedup();
    found
}

fn option(line: &str) -> Option<CliOption> {
    let mut rest = line.trim_start();
    if !rest.starts_with('-') || line.len() - rest.len() > 8 {
        return None;
    }
    let mut spellings = Vec::new();
    loop {
        let end = rest.find(|c: char| c != '-' && !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
        spellings.push(rest[..end].to_owned());
        rest = &rest[end..];
        match rest.strip_prefix(',').map(str::trim_start) {
            Some(more) if more.starts_with('-') => rest = more,
            _ => break,
        }
    }
    // Two blanks begin an explanation.
    let has_value =
        rest.starts_with('=') || (rest.starts_with(' ') && !rest.starts_with("  ") && rest.len() > 1);
    Some(CliOption { spellings, has_value })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> (Vec<String>, bool) {
        let option = option(text).unwrap();
        (option.spellings, option.has_value)
    }

    #[test]
    fn options_are_read_as_they_stand_in_help() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(of("  -f, --format FMT"), (words(&["-f", "--format"]), true));
        assert_eq!(of("  -q, --quiet"), (words(&["-q", "--quiet"]), false));
        assert_eq!(of("  -t, --cache=MODE     use the given"), (words(&["-t", "--cache"]), true));
        assert_eq!(of("  -r, --read-only      export read-only"), (words(&["-r", "--read-only"]), false));
        assert_eq!(of("      --aio=MODE            set AIO mode"), (words(&["--aio"]), true));
        assert_eq!(of("  --enable, --disable"), (words(&["--enable", "--disable"]), false));
        assert_eq!(option("     quiet operations"), None);
        assert_eq!(
            io_command("read [-abCqrv] [-P pattern [-s off] [-l len]] off len"),
            (
                "read".to_owned(),
                "abCqrv".chars().collect(),
                "[-abCqrv] [-P pattern [-s off] [-l len]] off len".to_owned()
            )
        );
        assert_eq!(io_command("truncate [-m prealloc_mode] off").1, []);
    }
}
