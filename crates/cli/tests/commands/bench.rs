//! `zebu bench` against `qemu-img bench`.

use crate::common::{Scratch, noise, qemu, words};

/// The lines that qemu-img prints, with the time taken out.
fn masked(text: &str) -> Vec<String> {
    text.lines()
        .map(
            |line| {
                if line.starts_with("Run completed in ") {
                    "Run completed".to_owned()
                } else {
                    line.to_owned()
                }
            },
        )
        .collect()
}

fn image(scratch: &Scratch) {
    scratch.write("a.raw", &noise(1, 8 << 20));
    scratch.qemu_img(&words("convert -f raw -O qcow2 a.raw a.qcow2")).ok();
}

#[test]
fn lines_and_codes_are_qemus() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    image(&scratch);
    for line in [
        "-c 100",
        "-c 100 -d 4 -s 64k -S 128k -o 4096",
        "-c 100 -w",
        "-c 100 -w -d 4 --flush-interval 10",
        "-c 100 -w -d 4 --flush-interval=10 --no-drain",
        "-c 100 -w --pattern 7",
        "-c 10 -i threads",
        "-c 10 -i io_uring -t none",
        "-c 10 -n -t none",
        "-c 10 -U",
        "-c 10 -s 8M",
        "-c 0",
        "-d 0",
        "-s 0",
        "-c 1k",
        "-c 100 -d 4 --flush-interval 10",
        "-c 100 -w -d 64 --flush-interval 10",
        "-c 100 -w --pattern 300",
        "-c 10 -o 1G",
        "-c 10 -s 1G",
        "-c 10 -U -w",
        "-i nosuch",
    ] {
        let arguments: Vec<&str> = ["bench"].into_iter().chain(words(line)).chain(["a.qcow2"]).collect();
        let (ours, theirs) = (scratch.zebu(&arguments), scratch.qemu_img(&arguments));
        assert_eq!(ours.code, theirs.code, "{line}: {ours:#?} {theirs:#?}");
        if theirs.code == Some(0) {
            let (own, other) = (masked(&ours.stdout), masked(&theirs.stdout));
            assert!(own.starts_with(&other), "{line}: {own:#?} {other:#?}");
        }
    }
}

#[test]
fn quiet_means_quiet() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    assert_eq!(scratch.zebu(&words("bench -q -c 10 a.qcow2")).ok().stdout, "");
}

#[test]
fn writes_reach_the_image() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.zebu(&words("bench -w --pattern 0x5a -c 255 -d 16 a.qcow2")).ok();
    scratch.qemu_io(&["-c", "read -P 0x5a 0 1020k", "-c", "read -P 0 1020k 4k", "a.qcow2"]).ok();
    // Scattered over the disk, each place once: 16 KiB times 19 modulo 1 MiB.
    scratch.zebu(&words("bench -w --pattern 0xa5 -c 64 -s 16k -S 304k -d 16 a.qcow2")).ok();
    scratch.qemu_io(&["-c", "read -P 0xa5 0 1M", "a.qcow2"]).ok();
    assert_eq!(scratch.qemu_img(&words("check a.qcow2")).code, Some(0));
}

#[test]
fn random_writes_on_several_queues_cover_the_disk() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    // 256 places, 8000 requests: that a place is missed has a probability below 10^-11.
    scratch.zebu(&words("bench -w --pattern 0x5a -c 8000 -d 8 --queues 3 --random=3 a.qcow2")).ok();
    scratch.qemu_io(&["-c", "read -P 0x5a 0 1M", "a.qcow2"]).ok();
    assert_eq!(scratch.qemu_img(&words("check a.qcow2")).code, Some(0));
}

#[test]
fn numbers_are_consistent() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    image(&scratch);
    let report =
        scratch.zebu(&words("bench --output json -t none -c 2000 -d 8 --random a.qcow2")).ok().json();
    assert_eq!(report["requests"], 2000);
    let number = |key: &str| report[key].as_f64().unwrap();
    assert!((number("iops") - 2000.0 / number("seconds")).abs() < 1.0, "{report:#}");
    // Data of an allocated image: one read each, and a few more for the mapping.
    assert!((1.0..1.1).contains(&number("io-per-request")), "{report:#}");
    let latency = |key: &str| report["latency-us"][key].as_f64().unwrap();
    let percentiles = [latency("p50"), latency("p90"), latency("p99"), latency("p99.9"), latency("max")];
    assert!(percentiles.is_sorted() && percentiles[0] > 0.0, "{report:#}");
    let flushed =
        scratch.zebu(&words("bench --output json -w -d 4 -c 100 --flush-interval 10 a.qcow2")).ok().json();
    assert!(flushed["flushes"].as_u64().unwrap() >= 9, "{flushed:#}");
}

#[test]
fn time_ends_a_run() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    image(&scratch);
    let report =
        scratch.zebu(&words("bench --output json --runtime 0.3 -d 4 --queues 2 a.qcow2")).ok().json();
    // Nothing else would end it.
    assert!(report["seconds"].as_f64().unwrap() >= 0.3, "{report:#}");
    assert!(report["requests"].as_u64().unwrap() > 0, "{report:#}");
}

/// The minimum that a refusal names is enough.
#[test]
fn the_least_cache_is_told_and_is_enough() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 -o preallocation=metadata a.qcow2 4G")).ok();
    for command in
        ["bench -c 100 --queues 16 --image-opts", "bench -c 100 -w --image-opts", "map --image-opts"]
    {
        for option in ["cache-size", "l2-cache-size"] {
            let with = |bytes: u64| {
                let image = format!("driver=qcow2,file.filename=a.qcow2,{option}={bytes}");
                scratch.zebu(&words(&format!("{command} {image}")))
            };
            let told = with(1);
            assert_eq!(told.code, Some(1), "{told:#?}");
            let least = told.stderr.split("at least ").nth(1).and_then(|rest| rest.split(' ').next());
            let least: u64 =
                least.and_then(|least| least.parse().ok()).unwrap_or_else(|| panic!("{told:#?}"));
            assert_eq!(with(least - 1).code, Some(1), "{command}, {option}: {} bytes", least - 1);
            with(least).ok();
        }
    }
}

#[test]
fn buffers_may_begin_past_a_page() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(1, 1 << 20));
    let report =
        scratch.zebu(&words("bench -f raw -t none --buffer-offset 512 -s 64k -c 16 --output json a.raw"));
    assert_eq!(report.ok().json()["requests"], 16);
    scratch.zebu(&words("bench -f raw -w --pattern 7 --buffer-offset 1k -s 64k -c 16 a.raw")).ok();
    assert!(std::fs::read(scratch.file("a.raw")).unwrap().iter().all(|byte| *byte == 7));
    for wrong in ["100", "4k", "-1"] {
        let ran = scratch.zebu(&words(&format!("bench -f raw --buffer-offset={wrong} a.raw")));
        ran.fails_naming(1, &["buffer offset"]);
    }
}

/// A script takes the last line: as QEMU, the time under its name, and nothing behind it.
#[test]
fn under_the_name_of_qemu_the_time_comes_last() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 16M")).ok();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_zebu"), scratch.file("qemu-img")).unwrap();
    let program = scratch.file("qemu-img");
    let ran = scratch.run(program.to_str().unwrap(), &words("bench -f qcow2 -c 100 a.qcow2")).ok();
    let last = ran.stdout.lines().last().unwrap();
    assert!(last.starts_with("Run completed in ") && last.ends_with(" seconds."), "{ran:#?}");
}
