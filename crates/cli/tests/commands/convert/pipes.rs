//! Images that go to standard output and come from standard input (`-`).

use super::{identical, source};
use crate::common::{Ran, Scratch, noise, qemu, send, wait_for, words};
use rustix::process::Signal;
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Stdio};

/// Runs a command whose standard output goes through a pipe into a file.
#[track_caller]
fn piped(scratch: &Scratch, line: &str, out: &str) -> Ran {
    let mut command = scratch.command(env!("CARGO_BIN_EXE_zebu"), &words(line));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut file = File::create(scratch.file(out)).unwrap();
    std::io::copy(child.stdout.as_mut().unwrap(), &mut file).unwrap();
    let mut stderr = String::new();
    child.stderr.as_mut().unwrap().read_to_string(&mut stderr).unwrap();
    Ran { code: child.wait().unwrap().code(), stdout: String::new(), stderr }
}

#[test]
fn each_format_goes_through_a_pipe() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    source(&scratch);
    for (options, format) in [
        ("-O raw", "raw"),
        ("-O qcow2", "qcow2"),
        ("-O qcow2 -S 0", "qcow2"),
        ("-O qcow2 -o cluster_size=512", "qcow2"),
        ("-O qcow2 -o cluster_size=2M", "qcow2"),
        ("-O qcow2 -o compat=0.10", "qcow2"),
        ("-O qcow2 -o extended_l2=on", "qcow2"),
        ("-O qcow2 -o refcount_bits=1", "qcow2"),
        ("-O qcow2 -o preallocation=metadata", "qcow2"),
        ("-O qcow2 -m 1", "qcow2"),
        ("-O qcow2 -m 16 --workers 3", "qcow2"),
        ("-O qcow2 -c", "qcow2"),
        ("-O qcow2 -c -o compression_type=zstd", "qcow2"),
        ("-O vmdk -o subformat=streamOptimized", "vmdk"),
        ("-O vdi", "vdi"),
        ("-O vhdx", "vhdx"),
        ("-O qcow2 -l before", "qcow2"),
    ] {
        piped(&scratch, &format!("convert {options} a.qcow2 -"), "out").ok();
        let before = if options.contains("-l ") { "-l before" } else { "" };
        scratch.qemu_img(&words(&format!("convert {before} -O raw a.qcow2 reference.raw"))).ok();
        scratch.qemu_img(&words(&format!("convert -f {format} -O raw out data.raw"))).ok();
        let (mut made, wanted) = (scratch.read("data.raw"), scratch.read("reference.raw"));
        made.truncate(wanted.len());
        assert!(made == wanted, "{options}");
        if format == "qcow2" {
            scratch.qemu_img(&words("check out")).ok();
            scratch.zebu(&words("check out")).ok();
        }
    }
    assert!(!scratch.file("-").exists());
}

#[test]
fn several_sources_that_end_within_clusters() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(1, 100_000 / 512 * 512));
    scratch.write("b.raw", &noise(2, 3 << 20));
    piped(&scratch, "convert -f raw -O qcow2 a.raw b.raw a.raw -", "out").ok();
    scratch.qemu_img(&words("convert -f raw -O raw a.raw b.raw a.raw data.raw")).ok();
    identical(&scratch, "data.raw", "out");
    scratch.qemu_img(&words("check out")).ok();
}

/// A command whose output is a pipe, of which `until` bytes were read.
fn reading(scratch: &Scratch, line: &str, until: u64) -> (Child, Vec<u8>) {
    let mut command = scratch.command(env!("CARGO_BIN_EXE_zebu"), &words(line));
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut out = Vec::new();
    child.stdout.as_mut().unwrap().take(until).read_to_end(&mut out).unwrap();
    (child, out)
}

/// The most memory that was resident until now, KiB.
fn peak_kib(child: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    most.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn a_large_sparse_disk_takes_no_more_memory_than_a_small_one() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 big.qcow2 1T")).ok();
    for at in ["0", "100G", "1023G"] {
        scratch.qemu_io(&["-c", &format!("write -P 7 {at} 3M"), "big.qcow2"]).ok();
    }
    // All tables and most of the data have come, and more than a pipe holds is left.
    let (mut child, mut out) = reading(&scratch, "convert -O qcow2 big.qcow2 -", 8 << 20);
    let most = peak_kib(&child);
    child.stdout.take().unwrap().read_to_end(&mut out).unwrap();
    assert!(child.wait().unwrap().success());
    scratch.write("out", &out);
    assert!(most < 96 << 10, "{most} KiB");
    identical(&scratch, "big.qcow2", "out");
    assert!(std::fs::metadata(scratch.file("out")).unwrap().len() < 32 << 20);
}

/// The L1 table of a disk of 1 PiB in clusters of 64 KiB has 16 MiB; what else is in memory follows from the data.
#[test]
fn a_disk_of_a_pebibyte_takes_the_memory_of_its_tables() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 -o cluster_size=2M huge.qcow2 1P")).ok();
    scratch.qemu_io(&["-c", "write -P 7 900T 3M", "huge.qcow2"]).ok();
    let (mut child, mut out) = reading(&scratch, "convert -O qcow2 huge.qcow2 -", 16 << 20);
    let most = peak_kib(&child);
    child.stdout.take().unwrap().read_to_end(&mut out).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(most < 192 << 10, "{most} KiB");
    scratch.write("out", &out);
    let out = scratch.qemu_io(&["-r", "-c", "read -P 7 900T 3M", "-c", "read -P 0 1023T 1M", "out"]).ok();
    assert!(!out.stdout.contains("failed"), "{out:#?}");
    // All of it: the tables alone would take hours, and come at once.
    let (mut child, _) = reading(&scratch, "convert -S 0 -O qcow2 huge.qcow2 -", 16 << 20);
    let most = peak_kib(&child);
    send(&child, Signal::KILL);
    child.wait().unwrap();
    assert!(most < 192 << 10, "{most} KiB");
    let too_large = piped(&scratch, "convert -O qcow2 -o cluster_size=512 huge.qcow2 -", "out");
    too_large.fails_naming(1, &["too large"]);
}

/// Standard input is silent: the command waits, and a signal ends it. Whatever ends it, nothing stays.
#[test]
fn a_signal_ends_what_nobody_writes() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.file("tmp")).unwrap();
    for signal in [Signal::TERM, Signal::KILL] {
        let mut command =
            scratch.command(env!("CARGO_BIN_EXE_zebu"), &words("convert -f raw -O qcow2 - out"));
        command.env("TMPDIR", scratch.file("tmp")).stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(&[7; 512]).unwrap();
        // It is at work when it has read.
        wait_for("standard input is read", || rustix::io::ioctl_fionread(&input).unwrap() == 0);
        send(&child, signal);
        assert_ne!(child.wait().unwrap().code(), Some(0), "{signal:?}");
        assert_eq!(std::fs::read_dir(scratch.file("tmp")).unwrap().count(), 0, "{signal:?}");
        assert!(!scratch.file("out").exists());
    }
}

/// An image that is made before it goes out has no name.
#[test]
fn a_kill_leaves_no_temporary_image() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.file("tmp")).unwrap();
    scratch.write("a.raw", &noise(1, 4 << 20));
    let mut command = scratch.command(env!("CARGO_BIN_EXE_zebu"), &words("convert -f raw -O vhdx a.raw -"));
    command.env("TMPDIR", scratch.file("tmp")).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 100]).unwrap();
    send(&child, Signal::KILL);
    child.wait().unwrap();
    assert_eq!(std::fs::read_dir(scratch.file("tmp")).unwrap().count(), 0);
}

#[test]
fn a_disk_comes_from_standard_input() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    source(&scratch);
    let run = |line: &str| {
        let script = format!("{} {line}", env!("CARGO_BIN_EXE_zebu"));
        let mut command = scratch.command("sh", &["-c", &script]);
        let output = command.output().unwrap();
        Ran {
            code: output.status.code(),
            stdout: String::new(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    };
    run("convert -O qcow2 - out < a.qcow2").ok();
    identical(&scratch, "a.qcow2", "out");
    run("convert -O vmdk a.qcow2 - | cat > image.vmdk").ok();
    identical(&scratch, "a.qcow2", "image.vmdk");
    run("convert -O qcow2 - - < image.vmdk > out").ok();
    identical(&scratch, "a.qcow2", "out");
    run("convert --force --max-size 1M -O qcow2 - out < a.qcow2")
        .fails_naming(1, &["standard input", "--max-size"]);
    run("convert --force -O qcow2 - - out < a.qcow2").fails_naming(1, &["standard input"]);
}

#[test]
fn a_reader_that_leaves_is_an_error() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(1, 8 << 20));
    for options in ["-O raw", "-O qcow2", "-O qcow2 -c"] {
        let line = format!("convert -f raw {options} a.raw -");
        let mut command = scratch.command(env!("CARGO_BIN_EXE_zebu"), &words(&line));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.as_mut().unwrap().read_to_string(&mut stderr).unwrap();
        let ran = Ran { code: child.wait().unwrap().code(), stdout: String::new(), stderr };
        ran.fails_naming(1, &["standard output", "Broken pipe"]);
    }
}

/// Nobody reads: the command waits, and a signal ends it.
#[test]
fn a_signal_ends_what_nobody_reads() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(1, 8 << 20));
    for options in ["-O raw", "-O qcow2"] {
        let line = format!("convert -f raw {options} a.raw -");
        let mut command = scratch.command(env!("CARGO_BIN_EXE_zebu"), &words(&line));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // The first bytes: it is at work.
        child.stdout.as_mut().unwrap().read_exact(&mut [0; 100]).unwrap();
        send(&child, Signal::TERM);
        assert_ne!(child.wait().unwrap().code(), Some(0), "{options}");
    }
}

#[test]
fn what_a_pipe_can_not_have_is_named() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(1, 1 << 20));
    for (options, word) in [
        ("-n", "-n"),
        ("-O qcow2 -B b.qcow2 -F qcow2", "-B"),
        ("-t none", "-t"),
        ("--output json", "--output"),
        ("-O qcow2 -o data_file=d", "data file"),
    ] {
        let ran = piped(&scratch, &format!("convert -f raw {options} a.raw -"), "out");
        ran.fails_naming(1, &["standard output", word]);
        assert!(scratch.read("out").is_empty(), "{options}");
    }
}

/// Under QEMU's names, and as `./-`, it is a file.
#[test]
fn a_file_of_that_name() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(1, 1 << 20));
    scratch.zebu(&words("convert -f raw -O raw a.raw ./-")).ok();
    assert!(scratch.read("-") == scratch.read("a.raw"));
    std::fs::remove_file(scratch.file("-")).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_zebu"), scratch.file("qemu-img")).unwrap();
    let program = scratch.file("qemu-img");
    scratch.run(program.to_str().unwrap(), &words("convert -f raw -O raw a.raw -")).ok();
    assert!(scratch.read("-") == scratch.read("a.raw"));
}

/// No file of the user's has the name of an image that is made before it goes out.
#[test]
fn a_source_may_have_any_name() {
    let scratch = Scratch::new();
    scratch.write("temporary image", &noise(1, 1 << 20));
    let script = format!("{} convert -f raw -O vhdx 'temporary image' - > out", env!("CARGO_BIN_EXE_zebu"));
    assert!(scratch.command("sh", &["-c", &script]).status().unwrap().success());
    identical(&scratch, "temporary image", "out");
}

/// Progress goes to standard error.
#[test]
fn progress_does_not_mix_with_the_image() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(1, 4 << 20));
    let ran = piped(&scratch, "convert -p -f raw -O raw a.raw -", "out").ok();
    assert!(scratch.read("out") == scratch.read("a.raw"));
    assert!(ran.stderr.contains("percent"), "{ran:#?}");
}
