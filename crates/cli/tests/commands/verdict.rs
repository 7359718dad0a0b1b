//! `zebu info --verdict` on hostile and on harmless images. The images are made here, byte by byte or by `zebu create`.

use crate::common::{Ran, Scratch, words};

const NAME: &str = "a.qcow2";

/// Writes bytes at an offset of a file.
fn patch(scratch: &Scratch, name: &str, offset: usize, bytes: &[u8]) {
    let mut contents = scratch.read(name);
    contents.resize(contents.len().max(offset + bytes.len()), 0);
    contents[offset..offset + bytes.len()].copy_from_slice(bytes);
    scratch.write(name, &contents);
}

/// A fresh image in a fresh directory.
fn fresh(options: &str) -> Scratch {
    let scratch = Scratch::new();
    scratch.zebu(&words(&format!("create -q -f qcow2 {options} {NAME} 1M"))).ok();
    scratch
}

/// A fresh image that names a backing file of the format `format`.
fn backed(name: &str, format: &str) -> Scratch {
    let scratch = fresh("");
    // The extensions go: only the format's name is left.
    let mut extensions = Vec::new();
    if !format.is_empty() {
        extensions.extend(0xe279_2acau32.to_be_bytes());
        extensions.extend((format.len() as u32).to_be_bytes());
        extensions.extend(format.as_bytes());
        extensions.resize(extensions.len().next_multiple_of(8), 0);
    }
    extensions.extend([0; 8]);
    patch(&scratch, NAME, 112, &extensions);
    patch(&scratch, NAME, 2048, name.as_bytes());
    patch(&scratch, NAME, 8, &2048u64.to_be_bytes());
    patch(&scratch, NAME, 16, &(name.len() as u32).to_be_bytes());
    scratch
}

fn verdict(scratch: &Scratch, arguments: &str) -> Ran {
    scratch.zebu(&words(&format!("info --verdict --output json {arguments}")))
}

/// The codes of all concerns of a severity.
fn codes(ran: &Ran, severity: &str) -> Vec<String> {
    let json = ran.json();
    let concerns = json["concerns"].as_array().expect("a list").clone();
    let of_severity = concerns.iter().filter(|concern| concern["severity"] == severity);
    of_severity.map(|concern| concern["code"].as_str().expect("text").to_owned()).collect()
}

/// The image is unsafe for exactly these reasons, in JSON, in words, and by the exit code.
#[track_caller]
fn is_unsafe(scratch: &Scratch, arguments: &str, expected: &[&str]) {
    let ran = verdict(scratch, arguments);
    assert_eq!(ran.code, Some(2), "{ran:#?}");
    assert_eq!(ran.json()["safe"], false);
    assert_eq!(codes(&ran, "unsafe"), expected, "{ran:#?}");
    let human = scratch.zebu(&words(&format!("info --verdict {arguments}")));
    assert_eq!(human.code, Some(2), "{human:#?}");
    assert!(human.stdout.contains("verdict: unsafe\n"), "{human:#?}");
    assert_eq!(human.stdout.matches("\nunsafe: ").count(), expected.len(), "{human:#?}");
}

#[test]
fn a_plain_image_is_safe() {
    for options in
        ["", "-o compat=0.10", "-o extended_l2=on", "-o compression_type=zstd", "-o preallocation=metadata"]
    {
        let scratch = fresh(options);
        let ran = verdict(&scratch, &format!("-f qcow2 {NAME}")).ok();
        assert_eq!(
            ran.json(),
            serde_json::json!({
                "filename": NAME, "format": "qcow2", "safe": true, "concerns": [],
            })
        );
        assert!(scratch.zebu(&["info", "--verdict", NAME]).ok().stdout.contains("verdict: safe\n"));
        assert_eq!(codes(&verdict(&scratch, NAME).ok(), "note"), ["format-guessed"]);
    }
    let scratch = Scratch::new();
    scratch.write("disk.raw", &[0x55; 4096]);
    verdict(&scratch, "-f raw disk.raw").ok();
}

#[test]
fn names_of_other_files_are_unsafe() {
    for (name, traits) in [
        ("base.raw", vec![]),
        ("/etc/passwd", vec!["absolute"]),
        ("../base.raw", vec!["parent-directory"]),
        ("/proc/self/fd/3", vec!["absolute", "system-directory"]),
        ("nbd://127.0.0.1:1/x", vec!["protocol"]),
        ("json:{\"driver\":\"file\",\"filename\":\"/etc/passwd\"}", vec!["json"]),
        ("a\u{1b}[2J", vec!["malformed"]),
    ] {
        let scratch = backed(name, "raw");
        is_unsafe(&scratch, &format!("-f qcow2 {NAME}"), &["backing-file"]);
        let json = verdict(&scratch, NAME).json();
        assert_eq!(json["concerns"][0]["name"], name);
        let told = json["concerns"][0]["traits"].as_array().cloned().unwrap_or_default();
        assert_eq!(told, traits, "{name}");
        let human = scratch.zebu(&["info", "--verdict", NAME]).stdout;
        assert!(!human.contains('\u{1b}'), "control characters reach the terminal: {human:?}");
    }
    is_unsafe(&backed("base", ""), NAME, &["backing-file", "backing-format-missing"]);
    is_unsafe(&backed("base", "vmdk"), NAME, &["backing-file", "backing-format"]);
}

#[test]
fn data_files_are_unsafe_and_not_opened() {
    let scratch = fresh("-o data_file=data.raw");
    std::fs::remove_file(scratch.file("data.raw")).expect("created with the image");
    is_unsafe(&scratch, NAME, &["data-file"]);
    // The bit without a name.
    let scratch = fresh("");
    patch(&scratch, NAME, 79, &[4]);
    is_unsafe(&scratch, NAME, &["data-file"]);
}

#[test]
fn flags_of_the_header_are_unsafe() {
    for (offset, value, expected) in [
        (79, 1u8, "dirty"),
        (79, 2, "corrupt"),
        (72, 0x80, "unknown-features"),
        (79, 0x20, "unknown-features"),
        (35, 1, "encrypted"),
        (35, 9, "invalid"),
        (7, 9, "invalid"),
        (23, 63, "invalid"),
        (99, 7, "invalid"),
        (103, 9, "invalid"),
        (40, 1, "invalid"),
        (55, 1, "invalid"),
        (48, 0x80, "invalid"),
        (41, 1, "invalid"),
        (64, 0x40, "safe"),
    ] {
        let scratch = fresh("");
        patch(&scratch, NAME, offset, &[value]);
        if expected == "safe" {
            // No snapshots: the offset of their table means nothing.
            verdict(&scratch, NAME).ok();
        } else {
            let codes = codes(&verdict(&scratch, NAME), "unsafe");
            assert!(codes.iter().any(|code| code == expected), "{offset}: {codes:?}");
            is_unsafe(&scratch, NAME, &codes.iter().map(String::as_str).collect::<Vec<_>>());
        }
    }
}

#[test]
fn unknown_features_do_not_hide_the_names() {
    let scratch = backed("/etc/passwd", "raw");
    patch(&scratch, NAME, 72, &[0x40]);
    is_unsafe(&scratch, NAME, &["unknown-features", "backing-file"]);
}

#[test]
fn other_formats_in_a_raw_image_are_unsafe() {
    let vmdk = b"# Disk DescriptorFile\nversion=1\nCID=fffffffe\nRW 8 FLAT \"/etc/passwd\" 0\n".as_slice();
    let bare = b"\nVERSION=1\nRW 8 FLAT \"/etc/passwd\" 0\n".as_slice();
    for start in [b"QFI\xfb\0\0\0\x03".as_slice(), b"KDMV", b"QED\0", b"vhdxfile", vmdk, bare] {
        let scratch = Scratch::new();
        scratch.write("disk.raw", start);
        patch(&scratch, "disk.raw", 65535, &[0]);
        is_unsafe(&scratch, "-f raw disk.raw", &["looks-like-another-format"]);
    }
    let scratch = Scratch::new();
    scratch.write("disk.raw", &[0; 8192]);
    patch(&scratch, "disk.raw", 8192 - 512, b"conectix");
    is_unsafe(&scratch, "-f raw disk.raw", &["looks-like-another-format"]);
}

#[test]
fn other_formats_on_the_disk_of_a_qcow2_image_are_unsafe() {
    let scratch = fresh("");
    scratch.write("inner", b"QFI\xfb\0\0\0\x03");
    scratch.zebu(&["io", "-f", "qcow2", "-c", "write -s inner 0 512", NAME]).ok();
    is_unsafe(&scratch, NAME, &["looks-like-another-format"]);
}

#[test]
fn a_gigantic_disk_in_a_small_file_is_unsafe() {
    let scratch = Scratch::new();
    scratch.zebu(&words(&format!("create -q -f qcow2 -o cluster_size=2M {NAME} 1P"))).ok();
    is_unsafe(&scratch, NAME, &["gigantic"]);
    let scratch = Scratch::new();
    scratch.zebu(&words(&format!("create -q -f qcow2 {NAME} 10T"))).ok();
    verdict(&scratch, NAME).ok();
}

/// Each entry describes 512 MiB.
#[test]
fn a_table_that_stands_for_many_is_unsafe() {
    let scratch = Scratch::new();
    scratch.zebu(&words(&format!("create -q -f qcow2 {NAME} 2G"))).ok();
    let data = |guest: &str| format!("write {guest} 64k");
    scratch.zebu(&["io", "-f", "qcow2", "-c", &data("0"), "-c", &data("1G"), NAME]).ok();
    verdict(&scratch, NAME).ok();
    let file = scratch.read(NAME);
    let l1 = u64::from_be_bytes(file[40..48].try_into().expect("eight bytes")) as usize;
    let first = file[l1..l1 + 8].to_vec();
    patch(&scratch, NAME, l1 + 8, &first);
    is_unsafe(&scratch, NAME, &["shared-tables"]);
}

#[test]
fn a_table_outside_of_the_file_is_unsafe() {
    let scratch = fresh("");
    let half = scratch.read(NAME)[..65536].to_vec();
    scratch.write(NAME, &half);
    let codes = codes(&verdict(&scratch, NAME), "unsafe");
    assert!(!codes.is_empty() && codes.iter().all(|code| code == "invalid"), "{codes:?}");
}

#[test]
fn what_is_no_qcow2_image_is_a_verdict_and_a_missing_file_an_error() {
    let scratch = Scratch::new();
    scratch.write("text", b"hello");
    is_unsafe(&scratch, "-f qcow2 text", &["invalid"]);
    scratch.write("empty", b"");
    is_unsafe(&scratch, "-f qcow2 empty", &["invalid"]);
    verdict(&scratch, "-f qcow2 missing").fails_naming(1, &["missing"]);
}
