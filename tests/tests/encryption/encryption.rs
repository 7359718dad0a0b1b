//! Encrypted images beside QEMU and cryptsetup: each reads what the others wrote, byte for byte.

use serde_json::Value;
use std::process::Command;
use zebu_tests::device::LoopDevice;
use zebu_tests::encrypted::{all_read, cryptsetup, encrypt_options, of, run_qemu, run_zebu, with_objects};
use zebu_tests::program::{finish, required, zebu, zebu_program};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

const MIB: usize = 1 << 20;
fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.below(256) as u8).collect()
}

/// AES-128 of before LUKS: read, written, and converted away from.
#[test]
fn the_old_scheme_is_read_and_written() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    let mut plain = random_bytes(2, MIB);
    std::fs::write(dir.join("plain"), &plain).unwrap();
    let made = "convert -O qcow2 -o encrypt.format=aes,encrypt.key-secret=one plain old.qcow2";
    run_qemu(&qemu, dir, made).ok();
    all_read(&qemu, dir, "old.qcow2", "one", &plain);
    let words = ["-c", "write -P 7 1000 100000", "-c", "write -z 300k 200k"].map(str::to_owned);
    zebu(dir, with_objects(&format!("io --image-opts {}", of("old.qcow2", "one"))).into_iter().chain(words))
        .ok();
    plain[1000..101_000].fill(7);
    plain[300 << 10..500 << 10].fill(0);
    all_read(&qemu, dir, "old.qcow2", "one", &plain);
    // Nobody can tell that a key of the old scheme is wrong: what it shows is noise.
    run_zebu(dir, &format!("convert --image-opts {} -O raw noise", of("old.qcow2", "two"))).ok();
    assert!(std::fs::read(dir.join("noise")).unwrap() != plain);
    // Made by zebu, too, under both of its names, and with a warning.
    let old_name = made.replace("encrypt.format=aes", "encryption=on");
    for made in [made, old_name.as_str()] {
        std::fs::remove_file(dir.join("old.qcow2")).unwrap();
        let finished = run_zebu(dir, made).ok();
        assert!(finished.stderr.contains("weak"), "{finished}");
        std::fs::copy(dir.join("plain"), dir.join("again")).unwrap();
        all_read(&qemu, dir, "old.qcow2", "one", &std::fs::read(dir.join("again")).unwrap());
        assert_eq!(qemu.info(dir, "old.qcow2")["format-specific"]["data"]["encrypt"]["format"], "aes");
    }
    for (options, part) in [
        ("encrypt.format=aes,encryption=on,encrypt.key-secret=one", "mutually exclusive"),
        ("encrypt.format=aes,encrypt.key-secret=one,encrypt.iter-time=10", "'encrypt.iter-time' needs"),
        ("encryption=on", "key-secret"),
    ] {
        let finished = run_zebu(dir, &format!("create -f qcow2 -o {options} out 1M")).exits(1);
        assert!(finished.stderr.contains(part) && !dir.join("out").exists(), "{finished}");
    }
}

/// An overlay in plain text stands on an encrypted disk: the key is asked for by the name of the file that needs it, and no
/// command makes such an overlay by itself.
#[test]
fn plain_overlays_of_encrypted_disks() {
    let Some(_) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    let plain = random_bytes(8, MIB);
    std::fs::write(dir.join("plain"), &plain).unwrap();
    let options = "encrypt.format=luks,encrypt.key-secret=one,encrypt.iter-time=10";
    run_zebu(dir, &format!("convert -O qcow2 -o {options} plain base.qcow2")).ok();
    let made =
        zebu(dir, ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
    assert!(made.stderr.contains("is not encrypted"), "{made}");
    for line in ["map top.qcow2", "convert -O raw top.qcow2 out", "io top.qcow2 -c read", "check top.qcow2"] {
        let finished = run_zebu(dir, line);
        if !line.starts_with("check") {
            let finished = finished.exits(1);
            let said = &finished.stderr;
            assert!(said.contains("base.qcow2") && said.contains("key-secret"), "{line}: {finished}");
        }
        assert!(!dir.join("out").exists());
    }
    let name = "driver=qcow2,backing.encrypt.key-secret=one,file.filename=top.qcow2";
    run_zebu(dir, &format!("convert --image-opts {name} -O raw read")).ok();
    assert!(std::fs::read(dir.join("read")).unwrap() == plain);
    let finished = run_zebu(dir, &format!("backup --image-opts {name} out")).exits(1);
    assert!(finished.stderr.contains("--decrypt"), "{finished}");
    let refused = run_zebu(dir, "clone --mode overlay top.qcow2 out").exits(1);
    assert!(refused.stderr.contains("key-secret") && !dir.join("out").exists(), "{refused}");
    // Encrypted as its source is, with a key of its own.
    run_zebu(dir, "clone -q --mode overlay --key-secret one base.qcow2 clone.qcow2").ok();
    let both = "driver=qcow2,encrypt.key-secret=one,backing.encrypt.key-secret=one,file.filename=clone.qcow2";
    let io = ["-c", "write -s plain 4096 64k"].map(str::to_owned);
    zebu(dir, with_objects(&format!("io --image-opts {both}")).into_iter().chain(io)).ok();
    let clone = std::fs::read(dir.join("clone.qcow2")).unwrap();
    assert!(clone.windows(16).all(|window| window != &plain[..16]), "the clone holds plain text");
    run_zebu(dir, &format!("convert --image-opts {both} -O raw read")).ok();
    let read = std::fs::read(dir.join("read")).unwrap();
    assert!(read[4096..4096 + (64 << 10)] == plain[..64 << 10] && read[128 << 10..] == plain[128 << 10..]);
}

/// Without a named format, no command turns an encrypted image into one in plain text.
#[test]
fn an_encrypted_file_is_not_overwritten_by_default() {
    let Some(_) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    std::fs::write(dir.join("plain"), random_bytes(9, MIB)).unwrap();
    let options = "encrypt.format=luks,encrypt.key-secret=one,encrypt.iter-time=10";
    run_zebu(dir, &format!("create -q -f qcow2 -o {options} a.qcow2 1M")).ok();
    run_zebu(dir, "create -q -f luks -o key-secret=one,iter-time=10 a.luks 1M").ok();
    for file in ["a.qcow2", "a.luks"] {
        let before = std::fs::read(dir.join(file)).unwrap();
        for line in [
            format!("convert -n plain {file}"),
            format!("convert plain {file}"),
            format!("dd if=plain of={file}"),
            format!("bench -w -c 1 {file}"),
            format!("io {file} -c write"),
            format!("resize {file} 2M"),
            format!("serve --nbd unix:sock {file}"),
        ] {
            let finished = zebu(dir, line.split_whitespace()).exits(1);
            assert_eq!(finished.stderr.trim_end().lines().count(), 1, "{finished}");
            assert!(std::fs::read(dir.join(file)).unwrap() == before, "{line}");
        }
    }
}

/// Everything that `info` tells of encryption is QEMU's.
#[test]
fn info_is_that_of_qemu() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    for cipher in ["", "cipher-alg=aes-128,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256"] {
        for (format, file, prefix) in [("qcow2", "a.qcow2", "encrypt."), ("luks", "a.luks", "")] {
            let mut options = encrypt_options(cipher, prefix);
            if format == "qcow2" {
                options += ",encrypt.format=luks";
            }
            run_zebu(dir, &format!("create -q -f {format} -o {options} {file} 1M")).ok();
            let theirs = qemu.info(dir, file);
            let ours = zebu(dir, ["info", "--output=json", file]).ok();
            let ours: Value = serde_json::from_str(&ours.stdout).unwrap();
            for key in ["format-specific", "encrypted", "virtual-size", "format"] {
                assert_eq!(ours[key], theirs[key], "{file}: {key}");
            }
            let theirs = qemu.img(dir, ["info", file]).ok().stdout;
            let ours = zebu(dir, ["info", file]).ok().stdout;
            let of_format = |text: &str| {
                let from = text.find("Format specific").unwrap();
                text[from..text.find("Child node").unwrap()].to_owned()
            };
            assert_eq!(of_format(&ours), of_format(&theirs));
            // The header is counted.
            let mut measure = format!("measure -O {format} -o {options} --size 100M");
            let theirs = run_qemu(&qemu, dir, &measure).ok().stdout;
            assert_eq!(run_zebu(dir, &measure).ok().stdout, theirs, "{measure}");
            measure += " --output=json";
            run_zebu(dir, &measure).ok();
        }
    }
}

/// Each image of a chain has a key of its own; a base may be encrypted below an overlay that is not.
#[test]
fn a_chain_has_a_key_for_each_image() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    let mut plain = random_bytes(3, 2 * MIB);
    std::fs::write(dir.join("plain"), &plain).unwrap();
    run_zebu(dir, "convert -O luks -o key-secret=one,iter-time=10 plain base.luks").ok();
    let options = "encrypt.format=luks,encrypt.key-secret=two,encrypt.iter-time=10";
    run_zebu(dir, &format!("create -q -f qcow2 -b base.luks -F luks -o {options} top.qcow2")).ok();
    let name =
        "driver=qcow2,encrypt.key-secret=two,backing.key-secret=one,file.driver=file,file.filename=top.qcow2";
    let io = ["-c", "write -P 3 1000 5000", "-c", "write -P 4 1M 64k"].map(str::to_owned);
    zebu(dir, with_objects(&format!("io --image-opts {name}")).into_iter().chain(io)).ok();
    plain[1000..6000].fill(3);
    plain[MIB..MIB + (64 << 10)].fill(4);
    run_zebu(dir, &format!("convert --image-opts {name} -O raw read")).ok();
    assert!(std::fs::read(dir.join("read")).unwrap() == plain);
    let whole = "driver=qcow2,encrypt.key-secret=two,file.filename=top.qcow2,backing.driver=luks,backing.key-secret=one,\
                 backing.file.filename=base.luks";
    run_qemu(&qemu, dir, &format!("convert --image-opts {whole} -O raw read")).ok();
    assert!(std::fs::read(dir.join("read")).unwrap() == plain);
    let missing = run_zebu(dir, &format!("map --image-opts {}", of("top.qcow2", "two"))).exits(1).stderr;
    assert!(missing.contains("base.luks") && missing.contains("key-secret"), "{missing}");
    // What is committed is encrypted with the base's key.
    run_zebu(dir, &format!("commit --image-opts {name}")).ok();
    all_read(&qemu, dir, "base.luks", "one", &plain);
    // Rebase onto nothing: the top has it all, with its own key.
    let mut words = with_objects(&format!("rebase --image-opts {name}"));
    words.extend(["-b".to_owned(), String::new()]);
    zebu(dir, words).ok();
    all_read(&qemu, dir, "top.qcow2", "two", &plain);
}

/// A new backing file has a key of its own: named for zebu by an option, and as for QEMU by a `json:` name, which stays in the image.
#[test]
fn a_new_backing_file_has_its_own_key() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    let plain = random_bytes(9, MIB);
    std::fs::write(dir.join("plain"), &plain).unwrap();
    let options = |key: &str| format!("-o encrypt.format=luks,encrypt.key-secret={key},encrypt.iter-time=10");
    for (file, key) in
        [("base.luks", "key-secret=one,iter-time=10"), ("new.luks", "key-secret=two,iter-time=10")]
    {
        run_zebu(dir, &format!("convert -O luks -o {key} plain {file}")).ok();
    }
    run_zebu(dir, &format!("create -q -f qcow2 -b new.luks -F luks {} new.qcow2", options("one"))).ok();
    run_zebu(dir, &format!("create -q -f qcow2 -b base.luks -F luks {} old.qcow2", options("two"))).ok();
    let old = "driver=qcow2,encrypt.key-secret=two,backing.key-secret=one,file.driver=file,file.filename=";
    let io = ["-c", "write -P 5 64k 64k"].map(str::to_owned);
    zebu(dir, with_objects(&format!("io --image-opts {old}old.qcow2")).into_iter().chain(io)).ok();
    let mut disk = plain.clone();
    disk[64 << 10..128 << 10].fill(5);
    std::fs::write(dir.join("disk"), &disk).unwrap();
    // A chain of two, each with its key. (A LUKS header within qcow2 has nearly 2 MiB.)
    let named = r#"json:{"driver":"qcow2","encrypt.key-secret":"one","backing":{"key-secret":"two"},"file":{"driver":"file","filename":"new.qcow2"}}"#;
    let alone = r#"json:{"driver":"luks","key-secret":"two","file":{"driver":"file","filename":"new.luks"}}"#;
    let by_options: &[&str] =
        &["-b", "new.qcow2", "-F", "qcow2", "--backing-key-secret", "one", "--backing-key-secret", "two"];
    for (words, qemu_reads) in
        [(by_options, false), (&["-b", named, "-F", "qcow2"], false), (&["-b", alone, "-F", "luks"], true)]
    {
        let rebase = |image: &str| {
            let name = format!("{old}{image}");
            let mut line = with_objects(&format!("rebase --image-opts {name}"));
            line.extend(words.iter().map(|word| (*word).to_owned()));
            line
        };
        std::fs::copy(dir.join("old.qcow2"), dir.join("top.qcow2")).unwrap();
        zebu(dir, rebase("top.qcow2")).ok();
        let lower = if words == by_options {
            ",backing.encrypt.key-secret=one,backing.backing.key-secret=two"
        } else {
            ""
        };
        let top = format!("{}{lower}", of("top.qcow2", "two"));
        run_zebu(dir, &format!("convert --allow-refs all --image-opts {top} -O raw read")).ok();
        assert!(std::fs::read(dir.join("read")).unwrap() == disk, "{words:?}");
        if qemu_reads {
            run_qemu(&qemu, dir, &format!("compare --image-opts {top} driver=raw,file.filename=disk")).ok();
            // QEMU's own rebase leaves the same name.
            std::fs::copy(dir.join("old.qcow2"), dir.join("theirs.qcow2")).unwrap();
            qemu.img(dir, rebase("theirs.qcow2")).ok();
            let backing = |image: &str| qemu.info(dir, image)["backing-filename"].clone();
            assert_eq!(backing("top.qcow2"), backing("theirs.qcow2"));
        }
        // The same for a copy on that base.
        let base: Vec<String> =
            words.iter().map(|word| if *word == "-b" { "-B" } else { word }.to_owned()).collect();
        let line = format!("convert --image-opts {old}old.qcow2 -O qcow2 {} copy.qcow2", options("two"));
        zebu(dir, with_objects(&line).into_iter().chain(base)).ok();
        let copy = format!("{}{lower}", of("copy.qcow2", "two"));
        run_zebu(dir, &format!("compare --allow-refs all --image-opts {copy} {top}")).ok();
        assert!(
            std::fs::metadata(dir.join("copy.qcow2")).unwrap().len() < 3 * MIB as u64,
            "{words:?}: it copied the base"
        );
    }
    // Without a key, the file and the option are named; a clone of a chain needs all keys, too.
    let before = std::fs::read(dir.join("old.qcow2")).unwrap();
    for (line, file) in [
        (format!("rebase --image-opts {old}old.qcow2 -F luks -b new.luks"), "new.luks"),
        ("clone --mode overlay --key-secret two old.qcow2 out".to_owned(), "base.luks"),
    ] {
        let finished = run_zebu(dir, &line).exits(1);
        let parts = [file, "--backing-key-secret", "--object"];
        assert!(parts.iter().all(|part| finished.stderr.contains(part)), "{finished}");
    }
    assert!(std::fs::read(dir.join("old.qcow2")).unwrap() == before && !dir.join("out").exists());
    run_zebu(dir, "clone -q --mode overlay --key-secret two --backing-key-secret one old.qcow2 out").ok();
    let out = of("out", "two") + ",backing.encrypt.key-secret=two,backing.backing.key-secret=one";
    run_zebu(dir, &format!("compare --image-opts {out} driver=raw,file.filename=disk")).ok();
}

/// Refusals: one line, exit code 1, and nothing is made or changed.
#[test]
fn what_is_refused() {
    let Some(_) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    std::fs::write(dir.join("plain"), random_bytes(4, MIB)).unwrap();
    let options = "encrypt.format=luks,encrypt.key-secret=one,encrypt.iter-time=10";
    run_zebu(dir, &format!("convert -O qcow2 -o {options} plain a.qcow2")).ok();
    run_zebu(dir, "convert -O luks -o key-secret=one,iter-time=10 plain a.luks").ok();
    for file in ["a.qcow2", "a.luks"] {
        let before = std::fs::read(dir.join(file)).unwrap();
        let (right, wrong) = (of(file, "one"), of(file, "two"));
        for (line, part) in [
            (format!("io {file} -c read"), "key-secret"),
            (format!("convert {file} -O raw out"), "key-secret"),
            (format!("convert --image-opts {wrong} -O raw out"), "Invalid password"),
            (format!("convert --image-opts {} -O raw out", of(file, "nosuch")), "No secret with id 'nosuch'"),
            (format!("convert -n plain -O raw --target-image-opts {wrong}"), "Invalid password"),
            (
                format!("convert -n plain --target-image-opts {}", right.replace("one", "two")),
                "Invalid password",
            ),
            (format!("backup --image-opts {right} out"), "--decrypt"),
            (
                format!("convert -c --image-opts {right} -O qcow2 -o {options} out"),
                "not supported at the same time",
            ),
            (format!("dd -O raw if={file} of=out"), "key-secret"),
            (format!("serve --nbd unix:sock --image-opts {right}"), "command line"),
            (format!("resize {file} 2M"), "key-secret"),
        ] {
            let finished = run_zebu(dir, &line).exits(1);
            assert!(finished.stderr.contains(part), "{finished}");
            assert_eq!(finished.stderr.trim_end().lines().count(), 1, "{finished}");
            assert!(!dir.join("out").exists(), "{line}");
        }
        let finished = zebu(dir, ["serve", "--nbd", "unix:sock", file]).exits(1);
        assert!(finished.stderr.contains("key-secret"), "{finished}");
        assert!(std::fs::read(dir.join(file)).unwrap() == before, "{file} was changed");
    }
    for (options, part) in [
        ("encrypt.format=luks", "encrypt.key-secret"),
        ("encrypt.format=luks,encrypt.key-secret=nosuch", "nosuch"),
        ("encrypt.key-secret=one", "encrypt.format=luks"),
        ("encrypt.format=luks,encrypt.key-secret=one,encrypt.cipher-alg=des", "des"),
        ("encrypt.format=luks,encrypt.key-secret=one,data_file=x,data_file_raw=on", "data-file-raw"),
    ] {
        let finished = run_zebu(dir, &format!("create -f qcow2 -o {options} out 1M")).exits(1);
        assert!(finished.stderr.contains(part), "{finished}");
        assert!(!dir.join("out").exists(), "{options}");
    }
    run_zebu(dir, "create -f luks out 1M").exits(1);
    run_zebu(dir, "create -f raw -o key-secret=one out 1M").exits(1);
}

/// A backup in plain text is one by name, and says so.
#[test]
fn a_backup_says_that_it_is_in_plain_text() {
    let Some(_) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    let plain = random_bytes(5, MIB);
    std::fs::write(dir.join("plain"), &plain).unwrap();
    run_zebu(dir, "convert -O luks -o key-secret=one,iter-time=10 plain a.luks").ok();
    let line = format!("backup --decrypt --image-opts {} out.qcow2", of("a.luks", "one"));
    assert!(run_zebu(dir, &line).ok().stdout.contains("in plain text"));
    zebu(dir, ["convert", "out.qcow2", "-O", "raw", "read"]).ok();
    assert!(std::fs::read(dir.join("read")).unwrap() == plain);
}

/// The file holds no 16 bytes of the disk's, wherever it was written and whatever was done to it.
#[test]
fn no_plain_text_reaches_the_file() {
    let Some(_) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    let plain = random_bytes(6, MIB);
    std::fs::write(dir.join("plain"), &plain).unwrap();
    let options = "encrypt.format=luks,encrypt.key-secret=one,encrypt.iter-time=10";
    run_zebu(dir, &format!("convert -O qcow2 -o {options} plain a.qcow2")).ok();
    run_zebu(dir, "convert -O luks -o key-secret=one,iter-time=10 plain a.luks").ok();
    for file in ["a.qcow2", "a.luks"] {
        let mut words = with_objects(&format!("io --image-opts {}", of(file, "one")));
        words.extend(["-c", "write -s plain 0 512k", "-c", "write -s plain 700001 1001"].map(str::to_owned));
        zebu(dir, words).ok();
        let mut known: Vec<&[u8]> = plain.chunks(16).collect();
        known.sort_unstable();
        let bytes = std::fs::read(dir.join(file)).unwrap();
        let found = bytes.windows(16).position(|window| known.binary_search(&window).is_ok());
        assert_eq!(found, None, "{file} holds a block of the disk's at this byte");
    }
}

/// Files of cryptsetup, of both versions and with larger sectors, are written and read; `luksDump` reads ours.
#[test]
fn files_of_cryptsetup_are_written_and_read() {
    let Some(_) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    let cryptsetup = |line: &str| cryptsetup(dir, line);
    std::fs::write(dir.join("one"), "first").unwrap();
    std::fs::write(dir.join("two"), "second").unwrap();
    let plain = random_bytes(7, MIB);
    std::fs::write(dir.join("plain"), &plain).unwrap();
    for options in [
        "--type luks1",
        "--type luks1 --cipher aes-cbc-essiv:sha256 --key-size 256 --hash sha512",
        "--type luks2 --pbkdf pbkdf2",
        "--type luks2 --pbkdf argon2id --pbkdf-memory 32768 --pbkdf-force-iterations 4",
        "--type luks2 --pbkdf pbkdf2 --sector-size 4096",
    ] {
        std::fs::File::create(dir.join("c.luks")).unwrap().set_len(20 << 20).unwrap();
        let fast = if options.contains("argon2id") { "" } else { "--pbkdf-force-iterations 1000" };
        cryptsetup(&format!("luksFormat -q --key-file one {fast} {options} c.luks"));
        cryptsetup("luksAddKey -q --key-file one --pbkdf pbkdf2 --pbkdf-force-iterations 1000 c.luks two");
        let name = of("c.luks", "two");
        let io = ["-c", "write -s plain 0 1M", "-c", "write -P 9 1000 3", "-c", "write -z 5000 10000"];
        let mut words = with_objects(&format!("io --image-opts {name}"));
        words.extend(io.map(str::to_owned));
        zebu(dir, words).ok();
        let mut expected = plain.clone();
        expected[1000..1003].fill(9);
        expected[5000..15_000].fill(0);
        run_zebu(dir, &format!("dd --image-opts if={} of=read bs=1M count=1 -O raw", of("c.luks", "one")))
            .ok();
        assert!(std::fs::read(dir.join("read")).unwrap() == expected, "{options}");
        let dump = cryptsetup("luksDump --dump-master-key -q --key-file one c.luks");
        assert!(dump.contains("MK dump"), "{dump}");
    }
    run_zebu(dir, "create -q -f luks -o key-secret=one,iter-time=10 z.luks 1M").ok();
    let dump = cryptsetup("luksDump z.luks");
    assert!(dump.contains("Version:       \t1"), "{dump}");
    cryptsetup("luksAddKey -q --key-file one --pbkdf-force-iterations 1000 z.luks two");
    run_zebu(dir, &format!("map --output=json --image-opts {}", of("z.luks", "two"))).ok();
    cryptsetup("open --test-passphrase --key-file one z.luks");
}

/// A slot that cryptsetup leaves out by its priority is not tried, and the error says so.
#[test]
fn a_slot_of_the_priority_ignore_is_named() {
    let Some(_) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    std::fs::write(dir.join("one"), "first").unwrap();
    std::fs::write(dir.join("two"), "second").unwrap();
    std::fs::File::create(dir.join("c.luks")).unwrap().set_len(20 << 20).unwrap();
    let fast = "--pbkdf pbkdf2 --pbkdf-force-iterations 1000";
    cryptsetup(dir, &format!("luksFormat -q --type luks2 --key-file one {fast} c.luks"));
    cryptsetup(dir, &format!("luksAddKey -q --key-file one {fast} c.luks two"));
    let map = |key: &str| run_zebu(dir, &format!("map --output=json --image-opts {}", of("c.luks", key)));
    map("two").ok();
    cryptsetup(dir, "config --key-slot 1 --priority ignore c.luks");
    map("one").ok();
    let refused = map("two").exits(1);
    assert!(refused.stderr.contains("key slot 1 is of the priority \"ignore\""), "{refused}");
    cryptsetup(dir, "config --key-slot 1 --priority normal c.luks");
    map("two").ok();
}

/// Plain text gets over an encrypted disk on nobody's oversight: not over a block device, and not by a base that an overlay calls raw.
#[test]
fn encrypted_disks_are_not_overwritten_by_an_oversight() {
    let Some(_) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    std::fs::write(dir.join("plain"), random_bytes(8, MIB)).unwrap();
    run_zebu(dir, "convert -O luks -o key-secret=one,iter-time=10 plain base.luks").ok();
    let before = std::fs::read(dir.join("base.luks")).unwrap();
    zebu(dir, ["create", "-q", "-f", "qcow2", "-b", "base.luks", "-F", "raw", "top.qcow2"]).ok();
    zebu(dir, ["io", "top.qcow2", "-c", "write -P 7 0 64k"]).ok();
    let finished = zebu(dir, ["commit", "top.qcow2"]).exits(1);
    assert!(
        finished.stderr.contains("encrypted disk") && finished.stderr.contains("backing.driver=luks"),
        "{finished}"
    );
    assert!(std::fs::read(dir.join("base.luks")).unwrap() == before);
    if let Some(device) = LoopDevice::over(&dir.join("base.luks")) {
        for words in
            [["convert", "plain", device.name()], ["dd", "if=plain", &format!("of={}", device.name())]]
        {
            let finished = zebu(dir, words).exits(1);
            assert!(finished.stderr.contains("plain text"), "{finished}");
            assert!(std::fs::read(dir.join("base.luks")).unwrap() == before, "{finished}");
        }
    }
    let named = "driver=qcow2,file.filename=top.qcow2,backing.driver=raw,backing.file.filename=base.luks";
    zebu(dir, ["commit", "--image-opts", named]).ok();
    assert!(std::fs::read(dir.join("base.luks")).unwrap()[..65536].iter().all(|byte| *byte == 7));
}

/// A pipe gives a secret once, and a command opens several images.
#[test]
fn a_key_from_a_pipe_is_that_of_every_image_of_a_command() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    let plain = random_bytes(7, MIB);
    std::fs::write(dir.join("plain"), &plain).unwrap();
    let run = |line: &str, code: i32| {
        let mut command = Command::new(required("bash"));
        let zebu = zebu_program().display();
        let line = line.replace("zebu", &format!("{zebu}")).replace("SECRET", "secret,id=one,file=/dev/fd/3");
        command.args(["-c", &format!("{line} 3< <(printf first)")]).current_dir(dir);
        finish(command).exits(code)
    };
    let options = "-o encrypt.format=luks,encrypt.key-secret=one,encrypt.iter-time=10";
    run(&format!("zebu convert --object SECRET -f raw -O qcow2 {options} plain a.qcow2"), 0);
    all_read(&qemu, dir, "a.qcow2", "one", &plain);
    let of = |name: &str| format!("driver=qcow2,encrypt.key-secret=one,file.filename={name}");
    run(
        &format!("zebu convert --object SECRET -O qcow2 {options} --image-opts {} b.qcow2", of("a.qcow2")),
        0,
    );
    all_read(&qemu, dir, "b.qcow2", "one", &plain);
    run(&format!("zebu compare --object SECRET --image-opts {} {}", of("a.qcow2"), of("b.qcow2")), 0);
    let isolated = "zebu serve --isolate --nbd unix:a --nbd unix:b --object SECRET --image-opts";
    let out = run(&format!("{isolated} {} {}", of("a.qcow2"), of("b.qcow2")), 1);
    assert!(out.stderr.contains("--isolate"), "{out}");
}

/// An image that is said to be encrypted is, or is not opened; no plain text is written into one that is.
#[test]
fn what_is_said_to_be_encrypted_must_be() {
    let scratch = Scratch::new("encryption");
    let dir = scratch.path();
    std::fs::write(dir.join("plain"), vec![7; MIB]).unwrap();
    zebu(dir, ["create", "-q", "-f", "qcow2", "plain.qcow2", "1M"]).ok();
    let luks = "create -f luks -o key-secret=one,iter-time=10 disk.luks 1M";
    run_zebu(dir, luks).ok();
    let before = std::fs::read(dir.join("disk.luks")).unwrap();
    for (target, reason) in [
        (
            "driver=qcow2,encrypt.format=luks,encrypt.key-secret=one,file.filename=plain.qcow2",
            "No encryption in image header",
        ),
        (
            "driver=raw,encrypt.format=luks,encrypt.key-secret=one,file.filename=disk.luks",
            "encrypt.key-secret",
        ),
        ("driver=raw,key-secret=one,file.filename=disk.luks", "does not support the option 'key-secret'"),
        (
            "driver=qcow2,encrypt.format=luks,encrypt.format=aes,encrypt.key-secret=one,file.filename=plain.qcow2",
            "twice",
        ),
    ] {
        let line = format!("convert -n -f raw --target-image-opts plain {target}");
        let out = run_zebu(dir, &line).exits(1);
        assert!(out.stderr.contains(reason) || out.stderr.contains("encrypt.format"), "{target}: {out}");
    }
    assert!(std::fs::read(dir.join("disk.luks")).unwrap() == before);
    let out = zebu(dir, ["dd", "-f", "raw", "-O", "luks", "if=plain", "of=disk.luks"]).exits(1);
    assert!(out.stderr.contains("convert -O luks"), "{out}");
    assert!(std::fs::read(dir.join("disk.luks")).unwrap() == before);
    // A clone with a key is encrypted, whatever it stands on.
    run_zebu(dir, "clone --mode overlay --key-secret one plain.qcow2 clone.qcow2").ok();
    let info: Value =
        serde_json::from_str(&zebu(dir, ["info", "--output", "json", "clone.qcow2"]).ok().stdout).unwrap();
    assert_eq!(info["encrypted"], true);
    // An encrypted image that an overlay calls raw keeps its header.
    run_zebu(
        dir,
        "create -f qcow2 -o encrypt.format=luks,encrypt.key-secret=one,encrypt.iter-time=10 base.qcow2 1M",
    )
    .ok();
    let before = std::fs::read(dir.join("base.qcow2")).unwrap();
    zebu(dir, ["create", "-q", "-u", "-f", "qcow2", "-b", "base.qcow2", "-F", "raw", "top.qcow2", "1M"]).ok();
    zebu(dir, ["io", "top.qcow2", "-c", "write -P 9 64k 64k"]).ok();
    let out = zebu(dir, ["commit", "top.qcow2"]).exits(1);
    assert!(out.stderr.contains("encrypted disk"), "{out}");
    assert!(std::fs::read(dir.join("base.qcow2")).unwrap() == before);
}
