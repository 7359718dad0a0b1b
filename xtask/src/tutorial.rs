//! The page docs/tutorial/contributor.md: its commands run in a clone, and Cargo has each that it names.

use crate::Cli;
use clap::Parser;
use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_bench::workspace::root;

fn page() -> String {
    std::fs::read_to_string(root().join("docs/tutorial/contributor.md")).unwrap()
}

/// The folder of a package of the workspace.
fn folder_of(package: &str) -> PathBuf {
    let named = format!("name = \"{package}\"\n");
    let crates = std::fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let mut folders = crates.chain([root().join("tests")]);
    let has_name = |folder: &PathBuf| {
        std::fs::read_to_string(folder.join("Cargo.toml")).is_ok_and(|text| text.contains(&named))
    };
    folders.find(has_name).unwrap_or_else(|| panic!("there is no package {package}"))
}

/// Checks that Cargo would find what a command line names.
fn check(line: &str) {
    let words: Vec<&str> = line.split_whitespace().collect();
    if words[0] == "xtask" {
        Cli::try_parse_from(["cargo xtask"].iter().chain(&words[1..]))
            .unwrap_or_else(|e| panic!("{line}: {e}"));
        return;
    }
    assert!(["build", "test"].contains(&words[0]), "{line}");
    let behind = |option: &str| words.iter().position(|word| *word == option).map(|at| words[at + 1]);
    let Some(package) = behind("-p") else { return };
    let tests = folder_of(package).join("tests");
    if let Some(program) = behind("--test") {
        let is_there = tests.join(program).join("main.rs").is_file()
            || tests.join(program).with_extension("rs").is_file();
        assert!(is_there, "{line}: there is no test program {program}");
        for module in words.iter().filter_map(|word| word.strip_suffix("::")) {
            assert!(
                tests.join(program).join(module).with_extension("rs").is_file(),
                "{line}: no module {module}"
            );
        }
    }
}

#[test]
fn the_commands_of_the_page_are_there() {
    let page = page();
    let inline = page.split('`').filter_map(|text| text.strip_prefix("cargo "));
    let mut count = 0;
    for line in inline.filter(|text| !text.contains('\n')) {
        check(line);
        count += 1;
    }
    assert!(count > 6, "{count}");
}

/// In a clone of the last commit, where Cargo only says what it was asked for.
#[test]
fn the_lines_of_the_page_make_a_commit() {
    if !root().join(".git").exists() {
        eprintln!("skipped: these are no sources of git");
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let clone = scratch.path().join("zebu");
    let mut git = Command::new("git");
    git.args(["clone", "-q", "--shared", "--no-hardlinks"]).arg(root()).arg(&clone);
    assert!(git.status().unwrap().success());
    let page = page();
    let blocks = page.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let lines: String = blocks.collect();
    let asked = scratch.path().join("asked");
    let script = format!("cargo() {{ echo \"$*\" >> '{}'; }}\n{lines}", asked.display());
    let mut shell = Command::new("sh");
    shell.args(["-e", "-c", &script]).current_dir(&clone);
    for (name, value) in [("NAME", "A Contributor"), ("EMAIL", "contributor@example.org")] {
        shell.env(format!("GIT_AUTHOR_{name}"), value).env(format!("GIT_COMMITTER_{name}"), value);
    }
    let out = shell.output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    assert!(text.contains("lists the topics") && text.contains("2 files changed"), "{text}");
    let asked = std::fs::read_to_string(asked).unwrap();
    asked.lines().for_each(check);
    assert!(asked.lines().count() > 4, "{asked}");
    assert_eq!(told(&clone, "crates/cli/src/cli.rs", "lists all topics"), 1);
    assert_eq!(told(&clone, "crates/cli/tests/commands/help.rs", "\"all topics\""), 1);
}

/// How often a file of the clone has the words.
fn told(clone: &Path, file: &str, words: &str) -> usize {
    std::fs::read_to_string(clone.join(file)).unwrap().matches(words).count()
}
