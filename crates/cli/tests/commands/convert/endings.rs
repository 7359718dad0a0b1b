//! Jobs that a signal or a limit ends, and what they leave.

use super::left_over;
use crate::common::{Background, Scratch, noise, send, wait_for, words};
use rustix::process::Signal;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

#[test]
fn a_signal_removes_what_was_made() {
    for signal in [Signal::INT, Signal::TERM] {
        let scratch = Scratch::new();
        scratch.write("big.raw", &noise(1, 64 << 20));
        // A rate that takes a minute leaves time for the signal.
        let mut child = slow_job(&scratch, "convert -r 1M -f raw -O qcow2 --copy buffers big.raw out", "");
        send(&child, Signal::USR1);
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut text = String::new();
        stderr.read_line(&mut text).unwrap();
        assert!(text.contains("/100%)"), "SIGUSR1 printed nothing: {text}");
        send(&child, signal);
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(130), "{signal:?}");
        assert_eq!(left_over(&scratch), Vec::<String>::new());
        assert!(!scratch.file("out").exists());
        assert_eq!(std::io::read_to_string(stderr).unwrap(), "zebu: interrupted\n");
    }
}

/// Starts a job that takes minutes and waits until it has made a file; `ignoring` are signals that it starts with.
fn slow_job(scratch: &Scratch, job: &str, ignoring: &str) -> Background {
    let line = format!("trap '' {ignoring}; exec \"$0\" $1");
    let line = if ignoring.is_empty() { "exec \"$0\" $1" } else { &line };
    let mut command = scratch.command("sh", &["-c", line, env!("CARGO_BIN_EXE_zebu"), job]);
    let child = Background::start(command.stderr(Stdio::piped()));
    wait_for("the temporary file", || !left_over(scratch).is_empty());
    child
}

#[test]
fn whatever_ends_a_job_nothing_is_left() {
    for job in [
        "convert -r 1M -f raw -O raw big.raw out",
        "convert -r 1M -f raw -O qcow2 -o data_file=out.data big.raw out",
        "convert -r 1M -c -f raw -O qcow2 big.raw out",
        "backup -r 1M -f raw big.raw out",
    ] {
        // As a closing terminal, timeout(1) and an impatient user send them.
        for signals in
            [&[Signal::HUP][..], &[Signal::HUP; 3], &[Signal::TERM; 2], &[Signal::INT, Signal::HUP]]
        {
            let scratch = Scratch::new();
            scratch.write("big.raw", &noise(1, 64 << 20));
            let child = slow_job(&scratch, job, "");
            for signal in signals {
                send(&child, *signal);
            }
            let (code, text) = child.ended();
            assert_eq!(code, Some(130), "{job} {signals:?}: {text}");
            assert_eq!(text, "zebu: interrupted\n", "{job} {signals:?}");
            let mut left = left_over(&scratch);
            // What a backup goes on from is no rubbish.
            left.retain(|name| !name.starts_with(".out.zebu-partial"));
            assert_eq!(left, Vec::<String>::new(), "{job} {signals:?}");
            for name in ["out", "out.data"] {
                assert!(!scratch.file(name).exists(), "{job} {signals:?}: {name}");
            }
        }
    }
}

#[test]
fn a_signal_that_was_ignored_at_the_start_stays_ignored() {
    for (name, signal) in [("HUP", Signal::HUP), ("INT", Signal::INT)] {
        let scratch = Scratch::new();
        scratch.write("big.raw", &noise(1, 3 << 20));
        let child = slow_job(&scratch, "convert -r 1M -f raw -O raw big.raw out", name);
        send(&child, signal);
        let (code, stderr) = child.ended();
        assert_eq!(code, Some(0), "{name}: {stderr}");
        assert_eq!(scratch.read("out"), scratch.read("big.raw"));
    }
}

#[test]
fn a_file_that_may_not_grow_so_far_is_an_error() {
    let scratch = Scratch::new();
    scratch.write("big.raw", &noise(1, 4 << 20));
    for job in [
        "convert -f raw -O raw big.raw out",
        "convert -f raw -O qcow2 big.raw out",
        "convert -c -f raw -O qcow2 big.raw out",
        "convert --aio threads -f raw -O qcow2 big.raw out",
        "backup -f raw big.raw out",
        "dd -f raw -O raw if=big.raw of=out",
        "create -f raw out 4M",
        "create -f qcow2 -o preallocation=full out 4M",
    ] {
        let limited = ["--fsize=1000000", env!("CARGO_BIN_EXE_zebu")];
        let arguments: Vec<&str> = limited.into_iter().chain(job.split(' ')).collect();
        let ran = scratch.run("prlimit", &arguments);
        ran.fails_naming(1, &["out", "File too large"]);
        let names: Vec<String> = std::fs::read_dir(scratch.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(names, ["big.raw"], "{job}");
    }
}

/// A symbolic link that leads to nothing is a name for a new file, which is complete or not there.
#[test]
fn a_new_file_behind_a_link_is_complete_or_not_there() {
    let scratch = Scratch::new();
    scratch.write("big.raw", &noise(1, 4 << 20));
    std::fs::create_dir(scratch.file("sub")).unwrap();
    std::os::unix::fs::symlink("sub/new", scratch.file("out")).unwrap();
    let names = || -> Vec<String> {
        let names = |dir: &Path| std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        let all = names(scratch.path()).chain(names(&scratch.file("sub")));
        let mut all: Vec<String> = all.map(|name| name.into_string().unwrap()).collect();
        all.sort();
        all
    };
    let before = names();
    assert_eq!(before, ["big.raw", "out", "sub"]);
    for job in [
        "convert -f raw -O raw big.raw out",
        "convert -f raw -O qcow2 big.raw out",
        "convert -f raw -O qcow2 -o data_file=data big.raw out",
        "dd -f raw -O raw if=big.raw of=out",
        "create -f qcow2 -o preallocation=full out 4M",
    ] {
        let limited = ["--fsize=1000000", env!("CARGO_BIN_EXE_zebu")];
        let arguments: Vec<&str> = limited.into_iter().chain(job.split(' ')).collect();
        scratch.run("prlimit", &arguments).fails_naming(1, &["File too large"]);
        assert_eq!(names(), before, "{job}");
        scratch.zebu(&words(job)).ok();
        assert!(scratch.file("sub/new").metadata().unwrap().is_file(), "{job}");
        assert_eq!(std::fs::read_link(scratch.file("out")).unwrap(), Path::new("sub/new"));
        if !job.starts_with("create") {
            let format = if job.contains("qcow2") { "qcow2" } else { "raw" };
            // The names of other files count from the link, as in QEMU.
            scratch.zebu(&words(&format!("compare -f raw -F {format} big.raw out"))).ok();
        }
        for made in ["sub/new", "data"] {
            let _ = std::fs::remove_file(scratch.file(made));
        }
        assert_eq!(names(), before, "{job}");
    }
    let job = "convert -r 128k -f raw -O raw big.raw out";
    let mut child = Background::start(&mut scratch.command(env!("CARGO_BIN_EXE_zebu"), &words(job)));
    wait_for("a file under a temporary name", || names().len() > before.len());
    assert!(!scratch.file("sub/new").exists());
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(names(), before);
}
