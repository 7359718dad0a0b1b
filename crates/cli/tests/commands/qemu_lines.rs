//! Command lines by the hundred, run by the binary under QEMU's names and by QEMU's programs, each in a fresh copy of the same
//! images. Exit codes, JSON and resulting disks are compared.
//!
//! A test run takes every sixteenth of the lines that the table stands for; `ZEBU_QEMU_LINES=all` takes all of them.

use crate::common::qemu;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// Images that both programs write.
const WRITTEN: &[&str] = &[
    "a.qcow2",
    "base.raw",
    "ov.qcow2",
    "top.qcow2",
    "snap.qcow2",
    "bm.qcow2",
    "v2.qcow2",
    "ext.qcow2",
    "comp.qcow2",
    "zstd.qcow2",
    "empty.img",
    "nosuch.img",
];
/// Images that zebu reads only.
const READ: &[&str] = &["a.vmdk", "a.vdi", "a.vpc", "a.vhdx", "a.qed", "so.vmdk"];
const FORMATS: &[&str] = &["qcow2", "raw", "vmdk", "vdi", "vpc", "vhdx"];
const SIZES: &[&str] = &["1M", "8M", "1G", "8.5M", "64k", "512", "511", "-1", "1MB", "8m", "8388609"];
const OPTIONS: &[&str] = &[
    "cluster_size=512",
    "cluster_size=2M",
    "cluster_size=4M",
    "cluster_size=3000",
    "compat=0.10",
    "compat=v3",
    "compat=2",
    "compat=1.1,lazy_refcounts=on",
    "lazy_refcounts",
    "refcount_bits=1",
    "refcount_bits=64",
    "refcount_bits=3",
    "refcount_bits=1,compat=0.10",
    "preallocation=off",
    "preallocation=metadata",
    "preallocation=full",
    "preallocation=bogus",
    "extended_l2=on",
    "extended_l2=on,cluster_size=4k",
    "compression_type=zstd",
    "compression_type=zstd,compat=0.10",
    "data_file_raw=on",
    "backing_file=base.raw,backing_fmt=raw",
    "nosuch=1",
    "help",
    "encryption=off",
    "compat=1.1,compat=0.10",
];
const BACKING: &[&str] = &[
    "-b base.raw",
    "-b base.raw -F raw",
    "-b base.raw -F qcow2",
    "-b a.qcow2 -F qcow2",
    "-b nosuch -F raw",
    "-F raw",
    "-b base.raw -F bogus",
    "-b ./sub/../base.raw -F raw",
    "-b $PWD/base.raw -F raw",
];

/// Lines that end otherwise than with QEMU, as docs/guide/qemu-names.md says, or whose results can't be compared: a footer has the time, a
/// backing file is missing.
const LISTED: &[&str] = &[
    "qemu-img rebase -b base2.raw -F raw v2.qcow2",
    "qemu-io -f qcow2 -c 'discard 1 4097' ext.qcow2",
    "qemu-img convert -O vpc -o subformat=fixed,force_size=on a.qcow2 o.img",
    "qemu-img rebase -u -b nosuch.qcow2 -F qcow2 ov.qcow2",
    "qemu-img check missing_ov.qcow2",
];

/// How the images are made.
const MAKE: &str = "
qemu-img create -q -f raw base.raw 8M
qemu-io -f raw -c 'write -P 1 0 64k' -c 'write -P 2 4M 1M' base.raw
qemu-img convert -O raw base.raw base2.raw
qemu-io -f raw -c 'write -P 7 1M 64k' base2.raw
qemu-img convert -O qcow2 base.raw a.qcow2
qemu-img convert -O qcow2 base.raw base.qcow2
qemu-img create -q -f qcow2 -b base.raw -F raw ov.qcow2
qemu-io -f qcow2 -c 'write -P 3 2M 128k' ov.qcow2
qemu-img create -q -f qcow2 -b ov.qcow2 -F qcow2 top.qcow2
qemu-io -f qcow2 -c 'write -P 4 3M 64k' top.qcow2
qemu-img convert -O qcow2 base.raw snap.qcow2
qemu-img snapshot -c one snap.qcow2
qemu-io -f qcow2 -c 'write -P 9 0 128k' snap.qcow2
qemu-img convert -O qcow2 base.raw bm.qcow2
qemu-img bitmap --add bm.qcow2 b0
qemu-io -f qcow2 -c 'write -P 9 1M 128k' bm.qcow2
qemu-img bitmap --add bm.qcow2 b1
qemu-img convert -O qcow2 -o compat=0.10 base.raw v2.qcow2
qemu-img convert -O qcow2 -o extended_l2=on base.raw ext.qcow2
qemu-img convert -c -O qcow2 base.raw comp.qcow2
qemu-img convert -c -O qcow2 -o compression_type=zstd base.raw zstd.qcow2
qemu-img create -q -f raw empty.img 0
qemu-img convert -O vmdk base.raw a.vmdk
qemu-img convert -O vmdk -o subformat=streamOptimized base.raw so.vmdk
qemu-img convert -O vdi base.raw a.vdi
qemu-img convert -O vpc base.raw a.vpc
qemu-img convert -O vhdx base.raw a.vhdx
qemu-img convert -O qed base.raw a.qed
qemu-img create -q -f qcow2 zero.qcow2 8M
qemu-img create -q -f raw zero.raw 8M
qemu-img create -q -f raw small.raw 1M
qemu-img create -q -f qcow2 -b ../base.qcow2 -F qcow2 sub/relup.qcow2
qemu-img create -q -u -f qcow2 -b nosuch.qcow2 -F qcow2 missing_ov.qcow2 8M
";

/// The lines that the table stands for.
fn expanded() -> Vec<String> {
    let any: Vec<&str> = WRITTEN.iter().chain(READ).copied().collect();
    let words: [(&str, &[&str]); 7] = [
        ("IMAGE", WRITTEN),
        ("READ", READ),
        ("ANY", &any),
        ("FORMAT", FORMATS),
        ("SIZE", SIZES),
        ("OPTION", OPTIONS),
        ("BACKING", BACKING),
    ];
    let table = include_str!("qemu_lines.txt");
    let mut lines: Vec<String> =
        table.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(str::to_owned).collect();
    for (word, values) in words {
        lines = lines
            .into_iter()
            .flat_map(|line| {
                if line.contains(word) {
                    values.iter().map(|value| line.replace(word, value)).collect()
                } else {
                    vec![line]
                }
            })
            .collect();
    }
    lines.retain(|line| !LISTED.contains(&line.as_str()));
    lines
}

/// The words of a line; what stands between single quotes is one.
fn words(line: &str) -> Vec<String> {
    let parts = line.split('\'').enumerate();
    parts
        .flat_map(|(index, part)| match index % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        })
        .collect()
}

struct Ran {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn run(program: &OsStr, arguments: &[String], dir: &Path) -> Ran {
    let output = Command::new(program)
        .args(arguments)
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

/// All files below a directory, by name.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut left = vec![dir.to_owned()];
    while let Some(below) = left.pop() {
        for entry in std::fs::read_dir(&below).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                left.push(path);
            } else {
                found.insert(path.strip_prefix(dir).unwrap().to_owned(), std::fs::read(&path).unwrap());
            }
        }
    }
    found
}

fn copy(images: &BTreeMap<PathBuf, Vec<u8>>, dir: &Path) {
    for (name, bytes) in images {
        let path = dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

/// JSON without what depends on the directory, the allocator and the file system.
fn report(text: &str) -> serde_json::Value {
    fn leave_out(value: &mut serde_json::Value) {
        match value {
            serde_json::Value::Object(members) => {
                for key in [
                    "actual-size",
                    "image-end-offset",
                    "offset",
                    "date-sec",
                    "date-nsec",
                    "children",
                    "cid",
                    "parent-cid",
                ] {
                    members.remove(key);
                }
                for key in ["filename", "full-backing-filename", "backing-filename"] {
                    if let Some(name) = members.get_mut(key) {
                        let text = name.as_str().unwrap_or_default();
                        *name = text.rsplit('/').next().unwrap_or_default().into();
                    }
                }
                members.values_mut().for_each(leave_out);
            }
            serde_json::Value::Array(items) => items.iter_mut().for_each(leave_out),
            _ => {}
        }
    }
    let mut value = serde_json::from_str(text).unwrap_or_default();
    leave_out(&mut value);
    value
}

/// Differences between the programs.
fn difference(line: &str, images: &BTreeMap<PathBuf, Vec<u8>>, links: &Path) -> Option<String> {
    let home = tempfile::tempdir().unwrap();
    let dirs = ["ours", "theirs"].map(|name| home.path().join(name));
    let [ours, theirs] = [0, 1].map(|which| {
        copy(images, &dirs[which]);
        let line = line.replace("$PWD", dirs[which].to_str().unwrap());
        let words = words(&line);
        let program = if which == 0 { links.join(&words[0]) } else { PathBuf::from(&words[0]) };
        run(program.as_os_str(), &words[1..], &dirs[which])
    });
    let said = || format!("\n  ours: {}  theirs: {}", ours.stderr, theirs.stderr);
    if ours.code != theirs.code {
        return Some(format!("exit code {:?}, with QEMU {:?}{}", ours.code, theirs.code, said()));
    }
    if line.contains("--output=json") && report(&ours.stdout) != report(&theirs.stdout) {
        return Some(format!("JSON\n{}\n{}", ours.stdout, theirs.stdout));
    }
    // A failed command may leave a target behind with one program.
    if ours.code != Some(0) {
        return None;
    }
    let left = dirs.each_ref().map(|dir| files(dir));
    let names = left.each_ref().map(|files| files.keys().cloned().collect::<BTreeSet<_>>());
    if names[0] != names[1] {
        let odd: Vec<_> = names[0].symmetric_difference(&names[1]).collect();
        return Some(format!("one program made {odd:?}{}", said()));
    }
    for name in &names[0] {
        if left[0][name] == left[1][name] {
            continue;
        }
        let paths = dirs.each_ref().map(|dir| dir.join(name).display().to_string());
        let compared = run(
            OsStr::new("qemu-img"),
            &["compare".to_owned(), paths[0].clone(), paths[1].clone()],
            home.path(),
        );
        if compared.code != Some(0) {
            return Some(format!("{}: {}{}", name.display(), compared.stdout, compared.stderr));
        }
        let checked = run(OsStr::new("qemu-img"), &["check".to_owned(), paths[0].clone()], home.path());
        if !matches!(checked.code, Some(0 | 63)) {
            return Some(format!("{}: {}{}", name.display(), checked.stdout, checked.stderr));
        }
    }
    None
}

#[test]
fn lines_do_what_they_do_with_qemu() {
    if !qemu() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let (links, made) = (home.path().join("bin"), home.path().join("made"));
    std::fs::create_dir_all(made.join("sub")).unwrap();
    std::fs::create_dir_all(&links).unwrap();
    for name in ["qemu-img", "qemu-io"] {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_zebu"), links.join(name)).unwrap();
    }
    for line in MAKE.lines().filter(|line| !line.is_empty()) {
        let words = words(line);
        let ran = run(OsStr::new(&words[0]), &words[1..], &made);
        assert_eq!(ran.code, Some(0), "{line}: {}", ran.stderr);
    }
    let images = files(&made);
    let all = expanded();
    let is_whole = std::env::var("ZEBU_QEMU_LINES").is_ok_and(|value| value == "all");
    let chosen: Vec<&String> = all.iter().step_by(if is_whole { 1 } else { 16 }).collect();
    let (next, differences) = (Mutex::new(chosen.iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                loop {
                    let Some(line) = next.lock().unwrap().next() else { return };
                    if let Some(what) = difference(line, &images, &links) {
                        differences.lock().unwrap().push(format!("{line}: {what}"));
                    }
                }
            });
        }
    });
    let differences = differences.into_inner().unwrap();
    eprintln!("{} of {} lines were run", chosen.len(), all.len());
    assert!(differences.is_empty(), "{} lines differ:\n{}", differences.len(), differences.join("\n"));
}
