//! `zebu io` against qemu-io: the same commands on the same image give the same output, times left out.

use crate::common::{Scratch, noise, qemu, send, words};
use rustix::process::Signal;
use std::io::{Read, Write};
use std::process::Stdio;

/// Output with times and rates masked, and the programs' names made equal.
fn masked(text: &str) -> String {
    text.lines()
        .map(|line| {
            let line = line.replace("qemu-io: ", "zebu: ");
            if let Some((size, _)) = line.split_once(" ops; ") {
                format!("{size} ops; TIME\n")
            } else if line.split(',').count() == 5 && line.contains(":0") {
                let (numbers, _) = line.split_once(":0").unwrap();
                format!("{numbers} TIME\n")
            } else {
                format!("{line}\n")
            }
        })
        .collect()
}

/// Runs the same commands in both programs on equal images, and compares what they print and return.
#[track_caller]
fn same(options: &[&str], commands: &[&str]) {
    let (ours, theirs) = (Scratch::new(), Scratch::new());
    for scratch in [&ours, &theirs] {
        scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 8M")).ok();
        scratch.write("source", b"0123456789abcdef");
        scratch.write("empty", b"");
        scratch.write("a.raw", &noise(1, 1 << 20));
    }
    let mut arguments: Vec<&str> = options.to_vec();
    for command in commands {
        arguments.extend(["-c", command]);
    }
    if !options.contains(&"--image-opts") && !commands.iter().any(|command| command.starts_with("open")) {
        arguments.push(if options.contains(&"raw") { "a.raw" } else { "a.qcow2" });
    } else if options.contains(&"--image-opts") {
        arguments.push("driver=qcow2,file.filename=a.qcow2,l2-cache-size=64k");
    }
    let own = ours.zebu(&[&["io"], arguments.as_slice()].concat());
    let other = theirs.qemu_io(&arguments);
    assert_eq!(masked(&own.stdout), masked(&other.stdout), "{commands:?} {own:#?} {other:#?}");
    assert_eq!(masked(&own.stderr), masked(&other.stderr), "{commands:?}");
    assert_eq!(own.code, other.code, "{commands:?} {own:#?} {other:#?}");
    let compare = ours.qemu_img(&["compare", "a.qcow2", theirs.file("a.qcow2").to_str().unwrap()]);
    assert_eq!(compare.code, Some(0), "{commands:?}: {compare:#?}");
    assert_eq!(ours.read("a.raw"), theirs.read("a.raw"), "{commands:?}");
    let check = ours.qemu_img(&["check", "a.qcow2"]);
    assert_eq!(check.code, Some(0), "{commands:?}: {check:#?}");
}

#[test]
fn reads_and_writes() {
    if !qemu() {
        return;
    }
    same(
        &[],
        &[
            "read 0 512",
            "read -v 0 20",
            "write -P 0x41 512 1k",
            "read -v 512 32",
            "r -P 65 512 1k",
            "w 4k 4k",
            "read -P 0xcd 4k 4k",
            "write -q 1M 64k",
            "read -C 0 4k",
            "write -C 0 4k",
            "write -f 2M 64k",
            "write -s source 3M 100",
            "read -v 3M 110",
            "read 1.5k 512",
            "read 0x10 0x10",
            "read 0 0",
            "read 0 4k -P 0xcd",
            "write -r 5M 4k",
            "read -r 5M 4k",
            "read -p 0 1k",
            "writev -P 7 6M 4k 1k 512",
            "readv -P 7 6M 1k 4k 512",
            "readv -v 6M 16 16",
            "flush",
            "f",
        ],
    );
}

#[test]
fn patterns_that_differ_fail() {
    if !qemu() {
        return;
    }
    same(&[], &["write -P 1 0 64k", "read -P 1 0 64k", "read -P 2 4k 1k", "read -P 1 0 1k"]);
    same(&[], &["readv -P 3 0 1k 1k"]);
    same(&[], &["write -P 1 1k 1k", "read -P 1 -s 1k -l 1k 0 4k", "read -P 1 -s 1023 -l 5 0 4k"]);
    same(&[], &["read -P 1 -l 2k 0 1k", "read -P 1 -s 2k 0 1k"]);
}

#[test]
fn zeroes_and_discards() {
    if !qemu() {
        return;
    }
    same(
        &[],
        &[
            "write -P 1 0 1M",
            "write -z 64k 64k",
            "write -z -u 128k 64k",
            "write -zn 256k 64k",
            "write -z 1000 5000",
            "read -P 0 1000 5000",
            "read -P 1 6000 100",
            "write -z -f 320k 64k",
            "discard 512k 128k",
            "read -P 0 512k 128k",
            "d -C 0 64k",
            "discard -q 0 1",
            "map",
            "alloc 0 1M",
        ],
    );
    same(&["-d", "ignore"], &["write -P 1 0 128k", "discard 0 64k", "read -P 1 0 128k", "discard 8M 64k"]);
}

#[test]
fn requests_past_the_end_fail() {
    if !qemu() {
        return;
    }
    for command in [
        "read 8M 512",
        "write 7M 2M",
        "write -z 8M 1k",
        "discard 8M 64k",
        "readv 8M 512",
        "writev 8M 512",
        "read 0 2147483136",
        "write 0 3G",
        "read 0 3G",
        "discard 0 3G",
        "readv 0 3G",
    ] {
        same(&[], &[command, "length"]);
    }
}

#[test]
fn wrong_commands_are_told() {
    if !qemu() {
        return;
    }
    for command in [
        "nosuch",
        "read 0",
        "read 0 x",
        "read -P x 0 1k",
        "read -P 256 0 1k",
        "read -- -1 1k",
        "read 0 -- -1",
        "read 8E 1",
        "write -n 0 4k",
        "write -u 0 4k",
        "write -P 1 -z 0 1k",
        "write -s source -P 1 0 4k",
        "write -s missing 0 4k",
        "write -s empty 0 4k",
        "flush 3",
        "alloc",
        "alloc 0 1 2",
        "alloc x",
        "truncate",
        "truncate -m foo 32M",
        "aio_read",
        "discard 0",
        "readv 0 1x",
        "sleep",
        "sleep x",
        "sleep 1 2",
        "sigraise",
        "aio_write -u 0 1k",
        "aio_write -z 0 1k 2k",
        "help nosuch",
    ] {
        same(&[], &[command, "read 0 512"]);
    }
}

#[test]
fn wrong_options_show_how_the_command_is_used() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 8M")).ok();
    for (command, name) in [
        ("read -z 0 1", "read"),
        ("read 0 1k 2k", "read"),
        ("read -s 4 0 1k", "read"),
        ("write -i 0 1k", "write"),
    ] {
        let (own, other) =
            (scratch.zebu(&["io", "-c", command, "a.qcow2"]), scratch.qemu_io(&["-c", command, "a.qcow2"]));
        assert_eq!((own.code, own.stderr.as_str()), (other.code, other.stderr.as_str()), "{command}");
        for ran in [&own, &other] {
            assert!(
                ran.stdout.starts_with(&format!("{name} [")) && ran.stdout.contains(" off len -- "),
                "{ran:#?}"
            );
        }
    }
}

#[test]
fn the_image_is_described() {
    if !qemu() {
        return;
    }
    let commands = [
        "write 1M 100k",
        "length",
        "l",
        "info",
        "map",
        "alloc 0",
        "alloc 1M",
        "a 1M 1M",
        "alloc 9M",
        "alloc 7M 2M",
    ];
    same(&[], &commands);
    same(&["-f", "raw"], &["length", "info", "map", "alloc 0 1M"]);
    same(
        &[],
        &["truncate 16M", "length", "info", "truncate 1M", "length", "t 2.5M", "length", "write 2M 512k"],
    );
    same(&["--image-opts"], &["length", "write 0 64k", "map"]);
}

#[test]
fn asynchronous_requests_complete() {
    if !qemu() {
        return;
    }
    same(&[], &["aio_write -P 1 0 64k", "aio_flush", "aio_read -P 1 0 64k", "aio_flush", "read -P 1 0 64k"]);
    same(
        &[],
        &["aio_write -P 1 0 4k 4k", "aio_flush", "aio_read -v 0 16 4", "aio_flush", "aio_read -C 0 4k"],
    );
    same(&[], &["write -P 1 0 64k", "aio_write -z 0 64k", "aio_flush", "read -P 0 0 64k"]);
    same(&[], &["aio_read 8M 4k"]);
    same(&[], &["aio_write 8M 4k"]);
    same(&[], &["aio_read -P 5 0 4k", "aio_flush"]);
    same(&[], &["aio_write -q 0 64k"]);
}

#[test]
fn many_asynchronous_requests_run_at_once() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 64M")).ok();
    let commands: Vec<String> =
        (0..200).map(|i| format!("aio_write -P {} {}k 100k", i + 1, i * 300)).collect();
    let mut arguments = vec!["io"];
    for command in &commands {
        arguments.extend(["-c", command]);
    }
    arguments.push("a.qcow2");
    let ran = scratch.zebu(&arguments).ok();
    assert_eq!(ran.stdout.matches("wrote 102400/102400 bytes").count(), 200);
    for i in [0, 99, 199] {
        scratch.qemu_io(&["-c", &format!("read -P {} {}k 100k", i + 1, i * 300), "a.qcow2"]).ok();
    }
}

#[test]
fn images_are_opened_and_closed() {
    if !qemu() {
        return;
    }
    same(&[], &["close", "read 0 1k"]);
    same(&[], &["open a.qcow2", "length", "open a.qcow2", "close", "open missing"]);
    same(&[], &["open -r a.qcow2", "write 0 1k", "reopen -w", "write 0 1k", "reopen -r", "write 0 1k"]);
    same(&[], &["open -o driver=qcow2,file.filename=a.qcow2", "length", "reopen -c none", "read 0 4k"]);
    same(&["-r"], &["write 0 1k", "discard 0 64k", "read 0 1k"]);
    same(&[], &["quit", "length"]);
    same(&[], &["write 0 64k", "q", "nosuch"]);
    same(&["-n"], &["write -P 3 0 64k", "read -P 3 0 64k"]);
    same(&["-t", "none", "-m"], &["write -P 3 100 64k", "read -P 3 100 64k"]);
    same(&["-t", "unsafe"], &["write -P 3 100 64k"]);
    same(&["-f", "raw"], &["write -P 3 100 64k", "read -P 3 100 64k", "write -z 50k 10k"]);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    for (command, named) in [
        ("aio_read -i 0 64k", "-i"),
        ("zone_open 0 1", "zone_open"),
        ("reopen -o lazy-refcounts=on", "lazy-refcounts"),
        ("reopen -o aio=threads", "aio"),
    ] {
        let ran = scratch.zebu(&["io", "-c", command, "a.qcow2"]);
        assert_eq!(ran.code, Some(1), "{command}: {ran:#?}");
        assert!(ran.stderr.contains(named), "{command}: {ran:#?}");
    }
    let ran = scratch.zebu(&["io", "-c", "break write_aio A", "a.qcow2"]);
    assert_eq!(ran.code, Some(1), "{ran:#?}");
    assert!(ran.stdout.contains("Could not set a breakpoint: Operation not supported"), "{ran:#?}");
    scratch.zebu(&["io", "-r", "-C", "-c", "length", "a.qcow2"]).fails_naming(1, &["copy-on-read"]);
}

#[test]
fn commands_come_from_standard_input_too() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    for (input, code) in [("length\nwrite -P 1 0 1k\nq\n", 0), ("length\nnosuch\n", 1), ("", 0)] {
        let mut child = scratch
            .command(env!("CARGO_BIN_EXE_zebu"), &words("io a.qcow2"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{input:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.starts_with("zebu> "), "{text}");
        assert_eq!(text.contains("1 MiB\n"), input.starts_with("length"), "{text}");
    }
}

/// Whether at a prompt or between two commands: what was written is in the image, and bitmaps were stored.
#[test]
fn a_signal_closes_the_image_first() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        for commands in [&[][..], &["-c", "write -P 7 0 64k", "-c", "sleep 100000", "-c", "write 0 1M"]] {
            let scratch = Scratch::new();
            scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
            scratch.zebu(&words("bitmap --add a.qcow2 changes")).ok();
            let arguments = [&["io"], commands, &["a.qcow2"]].concat();
            let mut command = scratch.command(env!("CARGO_BIN_EXE_zebu"), &arguments);
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            let mut child = command.spawn().unwrap();
            let mut stdin = child.stdin.take().unwrap();
            if commands.is_empty() {
                stdin.write_all(b"write -P 7 0 64k\nlen").unwrap();
            }
            let mut stdout = child.stdout.take().unwrap();
            let mut text = Vec::new();
            while !String::from_utf8_lossy(&text).contains("ops/sec") {
                let mut byte = [0];
                stdout.read_exact(&mut byte).unwrap();
                text.extend(byte);
            }
            send(&child, signal);
            let output = child.wait_with_output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(130), "{signal:?} {commands:?}: {output:?}");
            assert_eq!(stderr, "zebu: interrupted\n");
            let info = scratch.zebu(&words("info --output json a.qcow2")).ok().json();
            let bitmap = &info["format-specific"]["data"]["bitmaps"][0];
            assert_eq!(
                (&bitmap["name"], &bitmap["flags"]),
                (&"changes".into(), &serde_json::json!(["auto"]))
            );
            scratch.zebu(&["io", "-r", "-c", "read -P 7 0 64k", "-c", "read -P 0 64k 960k", "a.qcow2"]).ok();
            scratch.zebu(&words("check a.qcow2")).ok();
        }
    }
}

#[test]
fn crashes_are_real() {
    use std::os::unix::process::ExitStatusExt;
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    for (command, signal) in [("sigraise 9", 9), ("sigraise 15", 15), ("abort", 6)] {
        let status = scratch
            .command(env!("CARGO_BIN_EXE_zebu"), &["io", "-c", "length", "-c", command, "a.qcow2"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.signal(), Some(signal), "{command}");
    }
}

#[test]
fn help_lists_the_commands() {
    let scratch = Scratch::new();
    let text = scratch.zebu(&words("io -c help")).ok().stdout;
    for command in ["aio_flush", "read", "write", "discard", "reopen", "sigraise", "truncate"] {
        assert!(text.lines().any(|line| line.starts_with(command) && line.contains(" -- ")), "{command}");
    }
    assert!(scratch.zebu(&["io", "-c", "help write"]).ok().stdout.contains(" -P  "));
}
