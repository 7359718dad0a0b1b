//! The binary under the names of QEMU's programs, beside those programs.

mod common;

use common::{Ran, qemu};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A directory with links of QEMU's names to the binary.
struct Names(tempfile::TempDir);

impl Names {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        install(dir.path()).ok();
        Self(dir)
    }

    fn dir(&self) -> PathBuf {
        let dir = self.0.path().join("work");
        std::fs::create_dir_all(&dir).unwrap();
        dir
    }

    /// Runs `line` with the links in place of QEMU's programs.
    fn run(&self, line: &str) -> Ran {
        let (program, rest) = line.split_once(' ').unwrap_or((line, ""));
        run(self.0.path().join(program).as_os_str(), rest, &self.dir())
    }
}

fn run(program: &OsStr, line: &str, dir: &Path) -> Ran {
    let output = Command::new(program)
        .args(words(line))
        .current_dir(dir)
        .env_remove("ZEBU_ALLOW_REFS")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    Ran {
        code: output.status.code(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn install(dir: &Path) -> Ran {
    let line = format!("install-names '{}'", dir.display());
    run(OsStr::new(env!("CARGO_BIN_EXE_zebu")), &line, Path::new("/"))
}

#[test]
fn links_are_made_once_and_nothing_else_is_replaced() {
    let names = Names::new();
    install(names.0.path()).ok();
    let link = names.0.path().join("qemu-img");
    std::fs::remove_file(&link).unwrap();
    std::fs::write(&link, "a program").unwrap();
    install(names.0.path()).fails_naming(1, &["qemu-img", "exists already: remove it first"]);
    assert_eq!(std::fs::read_to_string(&link).unwrap(), "a program");
    install(Path::new("/nonexistent")).fails_naming(1, &["'/nonexistent/qemu-img'"]);
}

/// The words of a line; what stands between single quotes is one.
fn words(line: &str) -> Vec<String> {
    line.split('\'')
        .enumerate()
        .flat_map(|(index, part)| match index % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        })
        .collect()
}

#[test]
fn scripts_find_the_version_that_they_look_for() {
    let names = Names::new();
    for (program, option) in [("qemu-img", "--version"), ("qemu-img", "-V"), ("qemu-io", "--version")] {
        let ran = names.run(&format!("{program} {option}")).ok();
        assert!(ran.stdout.starts_with(&format!("{program} version 10.2.2 (zebu ")), "{ran:?}");
    }
    let help = names.run("qemu-img --help").ok().stdout;
    assert!(
        help.lines().any(|line| line.starts_with("Supported formats:") && line.contains(" qcow2")),
        "{help}"
    );
}

/// Command lines that both programs take or refuse alike, with the first line of what they say when they fail.
const LINES: &[&str] = &[
    "qemu-img create -q -f qcow2 -f raw -f qcow2 a.qcow2 8M",
    "qemu-img create -q -f qcow2 -o compat=1.1,lazy_refcounts lazy.qcow2 8M",
    "qemu-io -f qcow2 -c 'write -P 7 0 1M' -c 'read -P 7 0 1M' -c quit a.qcow2",
    "qemu-img convert -p -p -t writeback -T none -t none -O raw -O qcow2 a.qcow2 b.qcow2",
    "qemu-img compare -q -q a.qcow2 b.qcow2",
    "qemu-img -T qcow2_* info --out=json -U -U a.qcow2",
    "qemu-img check a.qcow2 -q -f qcow2",
    "qemu-img -- info a.qcow2",
    "qemu-img create -q -f qcow2 x/over.qcow2 -b ../a.qcow2 -F qcow2",
    "qemu-img map --output=json x/over.qcow2",
    "qemu-io -r -f qcow2 -c 'read -P 7 0 64k' x/over.qcow2",
    "qemu-img",
    "qemu-img nosuch",
    "qemu-img create --nosuch a",
    "qemu-img create -x a",
    "qemu-img create",
    "qemu-img info a b",
    "qemu-img compare a",
    "qemu-img info --output",
    "qemu-img info nosuch.qcow2",
    "qemu-io -r -f qcow2 -c 'write 0 4k' a.qcow2",
    "qemu-io -r -f qcow2 -c nosuch a.qcow2",
];

#[test]
fn command_lines_end_as_with_qemu() {
    if !qemu() {
        return;
    }
    let names = Names::new();
    let dirs = [names.dir(), names.0.path().join("qemu")];
    for dir in &dirs {
        std::fs::create_dir_all(dir.join("x")).unwrap();
    }
    for line in LINES {
        let ours = names.run(line);
        let (program, rest) = line.split_once(' ').unwrap_or((line, ""));
        let theirs = run(OsStr::new(program), rest, &dirs[1]);
        assert_eq!(ours.code, theirs.code, "{line}: {ours:#?} {theirs:#?}");
        if theirs.code != Some(0) {
            assert_eq!(ours.stderr.lines().next(), theirs.stderr.lines().next(), "{line}");
        }
    }
}

#[test]
fn the_prompt_is_that_of_the_name() {
    let names = Names::new();
    let ran = names.run("qemu-io").ok();
    assert!(ran.stdout.starts_with("qemu-io> "), "{ran:?}");
}

#[test]
fn the_environment_widens_what_an_image_may_name() {
    let names = Names::new();
    let dir = names.dir();
    std::fs::create_dir_all(dir.join("x")).unwrap();
    names.run("qemu-img create -q -f qcow2 a.qcow2 8M").ok();
    names.run("qemu-img create -q -f qcow2 -b ../a.qcow2 -F qcow2 x/over.qcow2").ok();
    let map = |rules: Option<String>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_zebu"));
        command.args(["map", "x/over.qcow2"]).current_dir(&dir).env_remove("ZEBU_ALLOW_REFS");
        if let Some(rules) = rules {
            command.env("ZEBU_ALLOW_REFS", rules);
        }
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, message) = map(None);
    assert_eq!(code, Some(1));
    assert!(message.contains("--allow-refs dir=") && message.contains("ZEBU_ALLOW_REFS"), "{message}");
    assert!(message.contains("/etc/zebu/refs"), "{message}");
    assert_eq!(map(Some(dir.to_string_lossy().into_owned())), (Some(0), String::new()));
    assert_eq!(map(Some(format!("local,dir={}", dir.display()))), (Some(0), String::new()));
    let (code, message) = map(Some("everything".to_owned()));
    assert_eq!(code, Some(1));
    assert!(message.contains("ZEBU_ALLOW_REFS: 'everything': expected none, local"), "{message}");
}
