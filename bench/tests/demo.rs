//! The demo, on a small disk, with the command that lies beside the test programs.

use clap::Parser;
use std::path::PathBuf;
use std::process::Command;
use zebu_bench::demo::{self, DemoArgs};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    demo: DemoArgs,
}

fn zebu() -> PathBuf {
    let own = std::env::current_exe().unwrap();
    let zebu = own.parent().unwrap().parent().unwrap().join("zebu");
    assert!(zebu.is_file(), "{} is missing: cargo build -p zebu-cli", zebu.display());
    zebu
}

/// Runs the demo as a process of its own, whose output can be read.
#[test]
fn every_step_is_done() {
    if let Some(words) = std::env::var_os("ZEBU_DEMO") {
        let line = Line::parse_from(words.to_str().unwrap().split('\n'));
        demo::command(&line.demo).unwrap();
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let words = [
        "demo",
        "--folder",
        concat!(env!("CARGO_MANIFEST_DIR"), "/src"),
        "--dir",
        scratch.path().to_str().unwrap(),
        "--size",
        "64",
        "--zebu",
        zebu().to_str().unwrap(),
    ]
    .join("\n");
    let mut command = Command::new(std::env::current_exe().unwrap());
    let out = command.args(["--nocapture", "every_step_is_done"]).env("ZEBU_DEMO", words).output().unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    for words in [
        "$ zebu convert -f raw disk.raw disk.qcow2",
        "Images are identical.",
        "zebu finds all of them",
        "No errors were found on the image.",
        "ready after",
        "MiB on the server were fetched",
        "compressed backup, zstd",
    ] {
        assert!(text.contains(words), "{words} is missing:\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 132), "{text}");
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0, "nothing is left");
}
