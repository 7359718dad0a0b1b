//! Refusals, reports and warnings.

use crate::common::{Scratch, noise, words};

#[test]
fn options_that_do_not_work_are_refused_by_name() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    for (line, named) in [
        ("convert -O raw -c a.qcow2 out", "Compression not supported for this file format"),
        ("convert -c -O qcow2 -o preallocation=metadata a.qcow2 out", "preallocation"),
        ("convert -c -O qcow2 -o data_file=d.raw a.qcow2 out", "external data file"),
        ("convert -c -C -O qcow2 a.qcow2 out", "copy offloading"),
        ("convert -c -O qcow2 --compression-level 13 a.qcow2 out", "level 13"),
        ("convert -c -O qcow2 -o compression_type=zstd --compression-level 23 a.qcow2 out", "level 23"),
        ("convert --strict-deflate -O qcow2 a.qcow2 out", "--strict-deflate needs -c"),
        ("convert -O raw --bitmaps a.qcow2 out", "does not support bitmaps"),
        ("convert --skip-broken-bitmaps -O qcow2 a.qcow2 out", "--bitmaps"),
        ("convert --bitmaps -O qcow2 a.qcow2 a.qcow2 out", "single source"),
        ("convert a.qcow2", "file name"),
        ("convert -O foo a.qcow2 out", "foo"),
        ("convert -O raw -f foo a.qcow2 out", "foo"),
        ("convert -O raw -t foo a.qcow2 out", "foo"),
        ("convert -O raw -m 0 a.qcow2 out", "0"),
        ("convert -O raw -S 1x a.qcow2 out", "1x"),
        ("convert -O qcow2 -o cluster_size=3 a.qcow2 out", "Cluster size"),
        ("convert -O qcow2 -o nosuch=3 a.qcow2 out", "nosuch"),
        ("convert -O raw --target-is-zero a.qcow2 out", "--no-create"),
        ("convert -n -o compat=v2 -O qcow2 a.qcow2 a.qcow2", "-o"),
        ("convert -O raw missing.qcow2 out", "missing.qcow2"),
        ("convert -O raw a.qcow2 nodir/out", "nodir/out"),
    ] {
        scratch.zebu(&words(line)).fails_naming(1, &[named]);
        assert!(!scratch.file("out").exists(), "{line}");
    }
}

#[test]
fn reports_are_printed_on_request() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(3, 1 << 20));
    let report = scratch.zebu(&words("convert -f raw -O qcow2 --output json a.raw out")).ok().json();
    assert_eq!(report["total"], 1 << 20);
    let moved: u64 =
        ["written", "reflinked", "range-copied"].iter().map(|key| report[*key].as_u64().unwrap()).sum();
    assert_eq!(moved, 1 << 20, "{report:#}");
    let ran = scratch.zebu(&words("convert -f raw -O qcow2 --progress=json a.raw out2")).ok();
    let last: serde_json::Value = serde_json::from_str(ran.stderr.lines().last().unwrap()).unwrap();
    assert_eq!((&last["done"], &last["total"]), (&(1 << 20).into(), &(1 << 20).into()), "{ran:#?}");
    let ran = scratch.zebu(&words("convert -p -f raw -O qcow2 a.raw out3")).ok();
    assert!(ran.stdout.ends_with("    (100.00/100%)\r\n"), "{ran:#?}");
}

/// More ranges than are listed are counted, and what is lost is summed up.
#[test]
fn all_ranges_that_are_lost_are_counted() {
    const CLUSTER: usize = 4096;
    const CLUSTERS: usize = 3000;
    let scratch = Scratch::new();
    scratch.write("disk", &noise(1, CLUSTERS * CLUSTER));
    scratch.zebu(&words("convert -f raw -O qcow2 -o cluster_size=4k disk bad.qcow2")).ok();
    let mut bytes = scratch.read("bad.qcow2");
    let number = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let place = |entry: u64| (entry & 0x00ff_ffff_ffff_fe00) as usize;
    let l1 = place(number(&bytes, 40));
    for cluster in (0..CLUSTERS).step_by(2) {
        let entry = place(number(&bytes, l1 + cluster / 512 * 8)) + cluster % 512 * 8;
        // No cluster begins there.
        bytes[entry + 6] |= 2;
    }
    scratch.write("bad.qcow2", &bytes);
    for command in ["convert --salvage -O raw", "backup --skip-errors"] {
        let _ = std::fs::remove_file(scratch.file("out"));
        let report = scratch.zebu(&words(&format!("{command} --output json bad.qcow2 out"))).ok();
        let found = report.json();
        assert_eq!(found["unreadable"], CLUSTERS / 2 * CLUSTER, "{command}");
        assert_eq!(found["unreadable-ranges"].as_array().unwrap().len(), 1024, "{command}");
        assert_eq!(found["unreadable-range-count"], CLUSTERS / 2, "{command}");
        let end: Vec<&str> = report.stderr.lines().rev().take(2).collect();
        assert!(end[1].contains("error while reading 476 more ranges"), "{end:?}");
        assert!(end[0].contains("6144000 bytes in 1500 ranges could not be read"), "{end:?}");
        std::fs::remove_file(scratch.file("out")).unwrap();
        let report = scratch.zebu(&words(&format!("{command} --output human bad.qcow2 out"))).ok();
        assert!(report.stdout.contains("unreadable 6144000"), "{report:#?}");
        assert!(report.stdout.contains("unreadable ranges: 1500"), "{report:#?}");
    }
}

#[test]
fn nobody_reads_the_messages() {
    let scratch = Scratch::new();
    scratch.write("a.raw", &noise(1, 1 << 20));
    // Data beyond its end reads as an error in no image but one whose file is cut.
    scratch.zebu(&words("convert -f raw -O qcow2 a.raw cut.qcow2")).ok();
    let bytes = scratch.read("cut.qcow2");
    scratch.write("cut.qcow2", &bytes[..bytes.len() / 2]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = scratch
        .command(env!("CARGO_BIN_EXE_zebu"), &words("convert --verbose --salvage -O raw cut.qcow2 out"))
        .stderr(writer)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(0));
    assert!(scratch.file("out").exists());
}
