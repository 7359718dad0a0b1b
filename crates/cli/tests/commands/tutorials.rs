//! The commands of the first page and of the tutorials, as they stand there.

use crate::common::Scratch;
use std::path::Path;

/// The blocks of a language in a page.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let begin = format!("```{language}\n");
    page.split(&begin).skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

fn page(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::read_to_string(root.join(name)).unwrap()
}

/// Runs lines of a shell in which `zebu` is the one under test. Gives what it printed.
fn pasted(scratch: &Scratch, lines: &str) -> String {
    let directory = Path::new(env!("CARGO_BIN_EXE_zebu")).parent().unwrap();
    let path = format!("{}:{}", directory.display(), std::env::var("PATH").unwrap());
    // A server in the background ends with the shell, also where a line fails.
    let lines = format!("trap 'test -z \"$!\" || kill $! 2> /dev/null || :' EXIT\n{lines}");
    let mut command = scratch.command("sh", &["-e", "-c", &lines]);
    let out = command.env("PATH", path).stdin(std::process::Stdio::null()).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{text}{}\n{lines}", String::from_utf8_lossy(&out.stderr));
    text
}

#[track_caller]
fn works(name: &str) {
    let lines = blocks(&page(name), "sh").concat();
    assert!(lines.lines().count() > 10, "{name} has no commands");
    pasted(&Scratch::new(), &lines);
}

#[test]
fn a_terminal_and_an_image() {
    works("docs/tutorial/terminal.md");
}

#[test]
fn backups_of_a_running_disk() {
    works("docs/tutorial/backup.md");
}

#[test]
fn disks_for_virtual_machines() {
    works("docs/tutorial/operator.md");
}

/// Runs a line of a shell on a terminal, as [`pasted`].
fn typed(scratch: &Scratch, line: &str) -> String {
    let printed = pasted(scratch, &format!("script -q -e -c \"stty cols 80 rows 24; {line}\" /dev/null"));
    printed.replace("\r\n", "\n")
}

/// The first session: commands after `$ `, and what they print on a terminal. `...` stands for what is not the same every time.
#[test]
fn the_first_session_prints_what_it_says() {
    let scratch = Scratch::new();
    let sessions = blocks(&page("README.md"), "console");
    assert_eq!(sessions.len(), 1);
    let mut steps: Vec<(String, String)> = Vec::new();
    for line in sessions[0].lines() {
        if let Some(command) = line.strip_prefix("$ ") {
            steps.push((command.to_owned(), String::new()));
            continue;
        }
        let (_, said) = steps.last_mut().expect("a command comes first");
        *said += line;
        said.push('\n');
    }
    assert!(steps.len() > 4, "{steps:?}");
    for (command, expected) in steps {
        let printed = typed(&scratch, &command);
        let is_same = match expected.split_once("...") {
            Some((begin, end)) => printed.starts_with(begin) && printed.ends_with(end),
            None => printed == expected,
        };
        assert!(is_same, "{command}:\n{printed}\ninstead of\n{expected}");
    }
}
