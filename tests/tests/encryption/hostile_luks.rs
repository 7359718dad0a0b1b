//! Hostile LUKS headers with every command: one line of an error, in bounded time and memory, and the file as it was. Headers that are
//! amiss in a part only open by the rest.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;
use zebu_tests::encrypted::{encrypt_options, of, run_zebu};
use zebu_tests::hostile::luks::{
    FIRST_VERSION, HostileHeader, SECOND_VERSION, first_version, second_version,
};
use zebu_tests::program::{find, finish, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::scratch::Scratch;
use zebu_tests::tenth;
use zebu_tests::usage::run_measured;

const IMAGE: &str = "disk.luks";
const SECRET: &str = "secret,id=key,data=guess";
const NAME: &str = "driver=luks,key-secret=key,file.filename=disk.luks";
/// Processor time of a command.
const DEADLINE: Duration = Duration::from_secs(20);
/// Resident memory of a command, KiB. (A header of LUKS2 may have 8 MiB.)
const MEMORY_KIB: u64 = 80 << 10;

/// Commands that open the disk, and have to refuse it.
const REFUSING: &[&str] = &[
    "convert --image-opts NAME -O raw out",
    "dd --image-opts if=NAME of=out -O raw bs=64k count=1",
    "map --image-opts NAME",
    "compare --image-opts NAME NAME",
    "io --image-opts NAME -c read",
    "bench -c 1 --image-opts NAME",
    "measure --image-opts NAME -O qcow2",
    "backup --decrypt --image-opts NAME out",
    "clone --key-secret key disk.luks out",
    "amend --image-opts NAME -o state=active,new-secret=key,iter-time=10",
    "resize --image-opts NAME 4M",
    "convert -n disk.plain --target-image-opts NAME",
];

/// Commands that look at it, and may say something.
const LOOKING: &[&str] = &["info disk.luks", "info --output=json disk.luks", "info --verdict disk.luks"];

/// Runs a command on the header. `Err`: what must not be.
fn run(dir: &Path, case: &HostileHeader, line: &str) -> Result<String, String> {
    let mut words: Vec<&str> =
        line.split_whitespace().map(|word| if word == "NAME" { NAME } else { word }).collect();
    let equals = format!("if={NAME}");
    for word in &mut words {
        if *word == "if=NAME" {
            *word = &equals;
        }
    }
    if !line.starts_with("info") {
        words.splice(1..1, ["--object", SECRET]);
    }
    let (out, peak_kib) = run_measured(Path::new(env!("CARGO_BIN_EXE_measured")), DEADLINE, dir, &words);
    let wrong = |what: &str| Err(format!("{}: {line}: {what}: {out}", case.name));
    if !matches!(out.code, Some(0..=2)) || out.stderr.contains("panicked") {
        return wrong("ended by a signal, a panic, or out of time");
    }
    if out.stderr.trim_end().lines().count() > 1
        || out.stderr.contains('\u{1b}')
        || out.stdout.contains('\u{1b}')
    {
        return wrong("more than a line, or control characters");
    }
    if peak_kib > MEMORY_KIB {
        return wrong(&format!("{peak_kib} KiB resident"));
    }
    if !line.starts_with("info") && out.code == Some(0) {
        return wrong("was not refused");
    }
    Ok(out.stderr)
}

#[test]
fn hostile_headers_end_in_one_line_and_within_bounds() {
    let all: Vec<HostileHeader> = [FIRST_VERSION, SECOND_VERSION].concat();
    let names: BTreeSet<&str> = all.iter().map(|case| case.name).collect();
    assert_eq!(names.len(), all.len(), "two headers have one name");
    let some = std::env::var("ZEBU_HOSTILE").unwrap_or_default();
    let scratch = Scratch::new("hostile-luks");
    let dir = scratch.path();
    std::fs::write(dir.join("disk.plain"), vec![7; 64 << 10]).unwrap();
    let mut faults = Vec::new();
    for (number, case) in all.iter().filter(|case| case.name.contains(&some)).enumerate() {
        let file = (case.file)();
        std::fs::write(dir.join(IMAGE), &file).unwrap();
        // A tenth has every command, each with many headers.
        let mine = |index: usize| tenth::has(index + number);
        let commands = REFUSING.iter().chain(LOOKING).enumerate().filter(|(index, _)| mine(*index));
        for (_, line) in commands {
            match run(dir, case, line) {
                // Key slots have nothing to do with missing data.
                Ok(_) if line.starts_with("amend") && case.refusal == "cut short" => {}
                // Costs do not matter where nothing is computed.
                Ok(said) if line.starts_with("amend") && said.contains("LUKS2 headers are not changed") => {}
                Ok(said) if !line.starts_with("info") && !said.contains(case.refusal) => {
                    faults.push(format!("{}: {line}: does not say '{}': {said}", case.name, case.refusal));
                }
                Ok(_) => {}
                Err(fault) => faults.push(fault),
            }
            if dir.join("out").exists() {
                faults.push(format!("{}: {line}: left a file", case.name));
                std::fs::remove_file(dir.join("out")).unwrap();
            }
            if std::fs::read(dir.join(IMAGE)).unwrap() != file {
                faults.push(format!("{}: {line}: changed the file", case.name));
                std::fs::write(dir.join(IMAGE), &file).unwrap();
            }
        }
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

/// The sound headers, of which hostile ones are made, are understood: nothing but the key is missing.
#[test]
fn the_sound_headers_are_understood() {
    let scratch = Scratch::new("hostile-luks");
    for (file, version) in [(first_version(), "1"), (second_version(), "2")] {
        std::fs::write(scratch.file(IMAGE), file).unwrap();
        zebu(scratch.path(), ["info", IMAGE]).ok();
        let words = ["map", "--object", SECRET, "--image-opts", NAME];
        let finished = zebu(scratch.path(), words).exits(1);
        assert!(finished.stderr.contains("Invalid password"), "version {version}: {finished}");
    }
}

/// The bounds are lifted by an option: 60 million iterations and one pass over 1.5 GiB are computed then.
#[test]
#[ignore = "a minute of computation, and 1.5 GiB of memory"]
fn a_costly_header_is_tried_when_asked_for() {
    let scratch = Scratch::new("hostile-luks");
    let mut file = first_version();
    file[212..216].copy_from_slice(&60_000_000u32.to_be_bytes());
    std::fs::write(scratch.file(IMAGE), file).unwrap();
    for (costs, words) in [("bounded", "more than the limit"), ("unbounded", "Invalid password")] {
        let line = ["map", "--object", SECRET, "--header-costs", costs, "--image-opts", NAME];
        let finished = zebu(scratch.path(), line).exits(1);
        assert!(finished.stderr.contains(words), "{finished}");
    }
}

/// LUKS2 of cryptsetup with something amiss that leaves a way in: a slot that zebu does not support or that costs too much, a first
/// copy of the header that is lost.
#[test]
fn a_way_in_that_is_left_is_found() {
    let Some(_) = Qemu::find() else { return };
    let program = find("cryptsetup").expect("cryptsetup is needed: `cargo xtask setup` installs it");
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    let cryptsetup = |line: &str| {
        let mut command = std::process::Command::new(&program);
        command.current_dir(dir).args(line.split_whitespace());
        finish(command).ok();
    };
    std::fs::write(dir.join("one"), "first").unwrap();
    std::fs::write(dir.join("two"), "second").unwrap();
    std::fs::File::create(dir.join("c.luks")).unwrap().set_len(20 << 20).unwrap();
    let fast = "--pbkdf pbkdf2 --pbkdf-force-iterations 1000";
    cryptsetup(&format!("luksFormat -q --type luks2 {fast} --key-file one c.luks"));
    cryptsetup(&format!("luksAddKey -q {fast} --hash sha384 --key-file one c.luks two"));
    let map = |key: &str| run_zebu(dir, &format!("map --output=json --image-opts {}", of("c.luks", key)));
    map("one").ok();
    let finished = map("two").exits(1);
    assert!(finished.stderr.contains("Invalid password") && finished.stderr.contains("sha384"), "{finished}");
    let info = zebu(dir, ["info", "c.luks"]).ok().stdout;
    assert!(info.contains("unusable: ") && info.contains("sha384"), "{info}");
    // Magic number, version and all the rest of the first copy.
    let whole = std::fs::read(dir.join("c.luks")).unwrap();
    for damage in [0..6, 6..8, 0..512, 0..16384] {
        let mut bytes = whole.clone();
        bytes[damage.clone()].fill(0);
        std::fs::write(dir.join("c.luks"), bytes).unwrap();
        map("one").ok();
    }
}

/// A slot that would take too long keeps nobody from the others, and none is made that could not be opened. `info` computes nothing.
#[test]
fn costs_of_a_slot_are_bounded() {
    let Some(_) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    run_zebu(dir, &format!("create -q -f luks -o {} a.luks 1M", encrypt_options("", ""))).ok();
    let before = std::fs::read(dir.join("a.luks")).unwrap();
    let long = "state=active,new-secret=two,iter-time=3600000";
    let finished = run_zebu(dir, &format!("amend --image-opts {} -o {long}", of("a.luks", "one"))).exits(1);
    assert!(
        finished.stderr.contains("iter-time") && finished.stderr.contains("--header-costs"),
        "{finished}"
    );
    assert!(std::fs::read(dir.join("a.luks")).unwrap() == before);
    let finished = run_zebu(dir, "create -f luks -o key-secret=one,iter-time=3600000 out 1M").exits(1);
    assert!(finished.stderr.contains("iter-time") && !dir.join("out").exists(), "{finished}");
    let finished = run_zebu(dir, "create -f luks -o key-secret=one,iter-time=3600001 out 1M").exits(1);
    assert!(finished.stderr.contains("at most 3600000"), "{finished}");
    // Another slot asks for hours.
    let second = 208 + 48;
    let mut bytes = before.clone();
    bytes[second..second + 4].copy_from_slice(&0x00ac_71f3u32.to_be_bytes());
    bytes[second + 4..second + 8].copy_from_slice(&u32::MAX.to_be_bytes());
    std::fs::write(dir.join("a.luks"), &bytes).unwrap();
    run_zebu(dir, &format!("map --output=json --image-opts {}", of("a.luks", "one"))).ok();
    let finished = run_zebu(dir, &format!("map --output=json --image-opts {}", of("a.luks", "two"))).exits(1);
    assert!(
        finished.stderr.contains("key slot 1") && finished.stderr.contains("--header-costs"),
        "{finished}"
    );
    let info = zebu(dir, ["info", "a.luks"]).ok().stdout;
    assert!(info.contains("iters: 4294967295"), "{info}");
    run_zebu(dir, &format!("amend --image-opts {} -o state=inactive,keyslot=1", of("a.luks", "one"))).ok();
}
