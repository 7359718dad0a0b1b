//! Under `-t none` the kernel gets page-aligned buffers, whatever the guest's request looks like, and no request is
//! split because of its alignment. Judged by strace: it sees what the thread-pool worker hands over.

use std::collections::HashSet;
use std::path::Path;
use zebu_tests::program::{traced, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

/// A read or write of one buffer.
#[derive(Debug)]
struct Transfer {
    address: u64,
    len: u64,
    offset: u64,
}

/// The requests of one program to the files that it opened with O_DIRECT.
#[derive(Debug, Default)]
struct Trace {
    single: Vec<Transfer>,
    /// Lines of transfers of several buffers, whose addresses strace does not print.
    vectored: Vec<String>,
}

/// Runs `zebu` in `dir` under strace.
fn transfers(dir: &Path, args: &[&str]) -> Trace {
    let calls = "trace=openat,openat2,pread64,pwrite64,preadv,pwritev,preadv2,pwritev2";
    parse(&traced(dir, &["-e", "raw=pread64,pwrite64", "-e", calls], zebu_program(), args))
}

fn parse(text: &str) -> Trace {
    let mut direct = HashSet::new();
    let mut trace = Trace::default();
    for line in text.lines() {
        let Some((_, call)) = line.split_once(char::is_whitespace) else { continue };
        // The call that a thread was killed in.
        if call.starts_with("???") {
            continue;
        }
        let (Some((name, rest)), Some(result)) = (call.split_once('('), call.rsplit("= ").next()) else {
            continue;
        };
        if name.starts_with("openat") {
            if let (true, Ok(fd)) = (rest.contains("O_DIRECT"), result.trim().parse::<u64>()) {
                direct.insert(fd);
            }
            continue;
        }
        let fields: Vec<&str> = rest.split([',', ')', ' ', '<']).filter(|word| !word.is_empty()).collect();
        let number = |i: usize| -> u64 {
            let word: &str = fields[i];
            word.strip_prefix("0x")
                .map_or_else(|| word.parse(), |hex| u64::from_str_radix(hex, 16))
                .unwrap_or_else(|e| panic!("{line}: {e}"))
        };
        if !direct.contains(&number(0)) {
            continue;
        }
        if name.ends_with("64") {
            trace.single.push(Transfer { address: number(1), len: number(2), offset: number(3) });
        } else {
            trace.vectored.push(line.to_owned());
        }
    }
    trace
}

#[test]
fn a_convert_hands_over_whole_aligned_pages_and_splits_nothing() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("alignment");
    let dir = scratch.path();
    qemu.create(dir, "source.qcow2", "qcow2", "", 64 * MIB);
    qemu.io(dir, "-f qcow2", "source.qcow2", &["write -q -P 7 0 64M"]).ok();
    let convert = ["convert", "-t", "none", "-T", "none", "--aio", "threads", "--copy", "buffers"];
    let trace =
        transfers(dir, &[&convert[..], &["-f", "qcow2", "-O", "raw", "source.qcow2", "target.raw"]].concat());
    assert!(trace.vectored.is_empty(), "{:#?}", trace.vectored);
    for transfer in &trace.single {
        assert!(transfer.address.is_multiple_of(PAGE), "{transfer:#x?}");
        // Metadata may be asked for by the sector; a disk of 4 KiB sectors would have said so.
        let unit = if transfer.len >= PAGE { PAGE } else { 512 };
        assert!(transfer.len.is_multiple_of(unit) && transfer.offset.is_multiple_of(unit), "{transfer:#x?}");
    }
    // 64 MiB read and as many written. Whatever else there is, is metadata, and a few requests; data that was split at
    // pages, or at clusters, would take thousands.
    let bytes: u64 = trace.single.iter().map(|transfer| transfer.len).sum();
    assert!((128 * MIB..130 * MIB).contains(&bytes), "{bytes} bytes");
    assert!(trace.single.len() <= 2 * 64 * 2 + 40, "{} requests for {bytes} bytes", trace.single.len());
    qemu.img(dir, ["compare", "-q", "source.qcow2", "target.raw"]).ok();
}

#[test]
fn unaligned_guest_requests_reach_the_kernel_aligned() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("alignment");
    let dir = scratch.path();
    qemu.create(dir, "disk.qcow2", "qcow2", "", 8 * MIB);
    qemu.io(dir, "-f qcow2", "disk.qcow2", &["write -q -P 7 0 8M"]).ok();
    let io = ["io", "-f", "qcow2", "-t", "none", "--aio", "threads", "disk.qcow2"];
    let requests = ["-c", "write -P 1 513 70000", "-c", "read -P 1 513 70000", "-c", "read -P 7 71681 99"];
    let trace = transfers(dir, &[&io[..], &requests[..]].concat());
    for transfer in &trace.single {
        assert!(transfer.address.is_multiple_of(PAGE), "{transfer:#x?}");
        assert!(transfer.len.is_multiple_of(512) && transfer.offset.is_multiple_of(512), "{transfer:#x?}");
    }
    assert!(trace.single.iter().any(|transfer| transfer.len >= 70000), "{trace:#x?}");
    qemu.io(
        dir,
        "-f qcow2",
        "disk.qcow2",
        &["read -P 7 0 513", "read -P 1 513 70000", "read -P 7 70513 64k"],
    )
    .ok();
}
