//! Running `zebu` with an eye on what it uses: memory by the kernel's account, time of the processor by a limit.

use crate::program::{Finished, replacing, zebu_program};
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Runs `zebu` in `dir` by the program `measured`; returns how it ended, and the most memory that was resident beside pages of
/// files, in KiB. A command that takes more than `most` of a processor (whole seconds) is killed and has no exit code then.
///
/// # Panics
/// If it can't be started.
pub fn run_measured(measured: &Path, most: Duration, dir: &Path, words: &[&str]) -> (Finished, u64) {
    let (out, err, result) = (dir.join("stdout"), dir.join("stderr"), dir.join("usage"));
    let create = |path: &Path| File::create(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut command = Command::new(measured);
    command
        .arg(&result)
        .arg(most.as_secs().to_string())
        .arg(zebu_program())
        .args(replacing(words))
        .current_dir(dir);
    command.stdin(Stdio::null()).stdout(create(&out)).stderr(create(&err));
    let status = command.status().unwrap_or_else(|e| panic!("cannot run {}: {e}", measured.display()));
    let text = |path| String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned();
    assert!(status.success(), "zebu {}: not measured: {}", words.join(" "), text(&err));
    let usage = text(&result);
    let numbers: Vec<i64> = usage.split(' ').map(|word| word.parse().expect("a number")).collect();
    let [code, peak_kib] = numbers[..] else { panic!("not an account: {usage}") };
    let finished = Finished {
        line: format!("zebu {}", words.join(" ")),
        code: i32::try_from(code).ok().filter(|code| *code >= 0),
        stdout: text(&out),
        stderr: text(&err),
    };
    (finished, peak_kib as u64)
}
