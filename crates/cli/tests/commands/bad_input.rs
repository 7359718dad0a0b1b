//! Files that are no images, or can't be used now: one line that names the file and what to do, and qemu-img's code.

use crate::common::{Background, Scratch, noise, qemu, words};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::Command;

/// Commands that read the image `FILE`.
const READERS: &[&str] = &[
    "info FILE",
    "info --output=json FILE",
    "map FILE",
    "measure -O qcow2 FILE",
    "convert -O raw FILE out",
    "compare FILE FILE",
    "bench -c 1 FILE",
    "check FILE",
];

#[track_caller]
fn same_code(scratch: &Scratch, line: &str, file: &str, named: &[&str]) {
    let line = line.replace("FILE", file);
    let ran = scratch.zebu(&words(&line));
    let code = scratch.qemu_img(&words(&line)).code.unwrap();
    assert_ne!(code, 0, "{line}: QEMU has nothing against it");
    ran.fails_naming(code, named);
    assert!(!scratch.file("out").exists(), "{line} left something behind");
}

#[test]
fn names_that_lead_to_no_image() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.file("directory")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(scratch.file("socket")).unwrap();
    assert!(Command::new("mkfifo").arg(scratch.file("fifo")).status().unwrap().success());
    for (file, words) in [
        ("missing.qcow2", "No such file or directory"),
        ("directory", "directory"),
        ("socket", "socket"),
        ("fifo", "FIFO"),
        ("missing/a.qcow2", "No such file or directory"),
    ] {
        for line in READERS {
            // QEMU waits for somebody to write into a FIFO; nobody does.
            if file == "fifo" {
                let ran = scratch.zebu(&crate::common::words(&line.replace("FILE", file)));
                let code = if line.starts_with("compare") { 2 } else { 1 };
                ran.fails_naming(code, &[file, words]);
            } else {
                same_code(&scratch, line, file, &[file, words]);
            }
        }
        for line in ["resize FILE 1M", "io -c length FILE", "clone FILE out"] {
            let ran = scratch.zebu(&crate::common::words(&line.replace("FILE", file)));
            ran.fails_naming(1, &[file, words]);
        }
    }
}

#[test]
fn a_file_of_no_bytes() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("empty", b"");
    for line in READERS.iter().filter(|line| !line.starts_with("check")) {
        let line = line.replace("FILE", "empty");
        let (ours, theirs) = (scratch.zebu(&words(&line)), scratch.qemu_img(&words(&line)));
        assert_eq!(ours.code, theirs.code, "{line}: {ours:#?} {theirs:#?}");
    }
    std::fs::remove_file(scratch.file("out")).unwrap();
    for line in ["info -f qcow2 FILE", "convert -f qcow2 -O raw FILE out", "check -f qcow2 FILE"] {
        same_code(&scratch, line, "empty", &["empty", "not in qcow2 format"]);
    }
}

#[test]
fn files_without_permission() {
    // To root, permissions mean nothing: the command runs as nobody then.
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.write("readable.qcow2", &scratch.read("a.qcow2"));
    std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(scratch.file("a.qcow2"), std::fs::Permissions::from_mode(0o000)).unwrap();
    std::fs::set_permissions(scratch.file("readable.qcow2"), std::fs::Permissions::from_mode(0o444)).unwrap();
    let copy = scratch.file("zebu-copy");
    // Not copied here: what another test starts meanwhile would have the copy open for writing, and it could not be run.
    scratch.run("cp", &[env!("CARGO_BIN_EXE_zebu"), "zebu-copy"]).ok();
    let copy = copy.to_str().unwrap();
    let is_root = Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout == b"0\n");
    let run = |line: &str| {
        let arguments = words(line);
        if is_root {
            let all =
                [&["--reuid=65534", "--regid=65534", "--clear-groups", copy], arguments.as_slice()].concat();
            scratch.run("setpriv", &all)
        } else {
            scratch.run(copy, &arguments)
        }
    };
    run("info a.qcow2").fails_naming(1, &["a.qcow2", "Permission denied"]);
    run("check a.qcow2").fails_naming(1, &["a.qcow2", "Permission denied"]);
    run("convert -O raw a.qcow2 out").fails_naming(1, &["a.qcow2", "Permission denied"]);
    run("compare a.qcow2 a.qcow2").fails_naming(2, &["a.qcow2", "Permission denied"]);
    run("info readable.qcow2").ok();
    run("resize readable.qcow2 2M").fails_naming(1, &["readable.qcow2", "Permission denied"]);
    run("check -r all readable.qcow2").fails_naming(1, &["readable.qcow2", "Permission denied"]);
    run("convert -O raw readable.qcow2 out").fails_naming(1, &["out", "Permission denied"]);
    run("create -q -f qcow2 out 1M").fails_naming(1, &["out", "Permission denied"]);
}

#[test]
fn an_image_that_qemu_writes_is_left_alone() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 used.qcow2 1M")).ok();
    let _machine = Background::with_prompt(scratch.command("qemu-io", &words("used.qcow2")), "qemu-io> ");
    let writers = ["resize FILE 2M", "check -r all FILE", "create -f qcow2 FILE 2M"];
    for line in READERS.iter().chain(&writers) {
        same_code(&scratch, line, "used.qcow2", &["used.qcow2", "nother process"]);
    }
    // Looking at it all the same is allowed, on request.
    for line in [
        "info -U FILE",
        "map -U FILE",
        "check -U FILE",
        "measure -U -O qcow2 FILE",
        "convert -U -O raw FILE out",
    ] {
        scratch.zebu(&words(&line.replace("FILE", "used.qcow2"))).ok();
    }
    let info = scratch.qemu_img(&words("info -U --output=json used.qcow2")).ok().json();
    assert_eq!(info["virtual-size"], 1 << 20);
}

#[test]
fn an_image_that_zebu_writes_is_left_alone_by_qemu() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 used.qcow2 1M")).ok();
    let writer = scratch.command(env!("CARGO_BIN_EXE_zebu"), &words("io used.qcow2"));
    let _writer = Background::with_prompt(writer, "zebu> ");
    let ran = scratch.qemu_img(&words("resize used.qcow2 2M"));
    assert!(ran.stderr.contains("lock"), "{ran:#?}");
    scratch.zebu(&words("resize used.qcow2 2M")).fails_naming(1, &["used.qcow2"]);
}

/// A snapshot of a hostile image says that the header, a refcount block and the active L1 table are its own.
#[test]
fn a_deleted_snapshot_gives_back_no_metadata() {
    const CLUSTER: u64 = 64 << 10;
    for (compat, what) in [("v3", "entries"), ("v2", "entries"), ("v3", "table"), ("v2", "table")] {
        let scratch = Scratch::new();
        scratch.zebu(&words(&format!("create -q -f qcow2 -o compat={compat} a.qcow2 8M"))).ok();
        scratch.zebu(&["io", "a.qcow2", "-c", "write -P 1 0 64k"]).ok();
        scratch.zebu(&words("snapshot -c s a.qcow2")).ok();
        scratch.zebu(&["io", "a.qcow2", "-c", "write -P 2 0 64k"]).ok();
        let file = std::fs::OpenOptions::new().read(true).write(true).open(scratch.file("a.qcow2")).unwrap();
        let word = |at: u64| {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, at).unwrap();
            u64::from_be_bytes(bytes)
        };
        let (l1, refcounts, snapshot) = (word(40), word(word(48)), word(64));
        if what == "entries" {
            // A compressed cluster at the header, and data in the refcount block.
            let l2 = word(word(snapshot)) & ((1 << 56) - 512);
            file.write_all_at(&(1_u64 << 62).to_be_bytes(), l2 + 16 * 8).unwrap();
            file.write_all_at(&refcounts.to_be_bytes(), l2 + 17 * 8).unwrap();
        } else {
            file.write_all_at(&l1.to_be_bytes(), snapshot).unwrap();
        }
        let ran = scratch.zebu(&words("snapshot -d s a.qcow2"));
        if what == "table" {
            ran.fails_naming(1, &["a.qcow2", "inactive L1 table"]);
        } else {
            ran.ok();
        }
        // What the snapshot named is not used for anything else.
        scratch.zebu(&["io", "a.qcow2", "-c", "write -P 3 1M 2M"]).ok();
        let content = std::fs::read(scratch.file("a.qcow2")).unwrap();
        for at in [0, refcounts, l1] {
            let cluster = &content[at as usize..][..CLUSTER as usize];
            let is_data = cluster.iter().all(|byte| *byte == 0) || cluster.starts_with(&[3; 512]);
            assert!(!is_data, "{compat} {what}: {at:#x}");
        }
        assert_eq!(&content[..4], b"QFI\xfb", "{compat} {what}");
        scratch.zebu(&["io", "-r", "a.qcow2", "-c", "read -P 2 0 64k", "-c", "read -P 3 1M 2M"]).ok();
    }
}

/// Memory for what is noted of tables is bounded, although a sparse file may be of any size.
#[test]
fn snapshots_that_claim_huge_tables_are_not_written_beside() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 -o cluster_size=512 a.qcow2 1M")).ok();
    scratch.zebu(&["io", "a.qcow2", "-c", "write -P 1 0 64k"]).ok();
    scratch.zebu(&words("snapshot -c s a.qcow2")).ok();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(scratch.file("a.qcow2")).unwrap();
    let mut snapshots = [0; 8];
    file.read_exact_at(&mut snapshots, 64).unwrap();
    // Entries of an L1 table: 32 GiB of it.
    file.write_all_at(&u32::MAX.to_be_bytes(), u64::from_be_bytes(snapshots) + 8).unwrap();
    file.set_len(64 << 30).unwrap();
    let ran = scratch.zebu(&["io", "a.qcow2", "-c", "write -P 2 0 64k"]);
    ran.fails_naming(1, &["a.qcow2", "L1 tables of snapshots"]);
    scratch.zebu(&["io", "-r", "a.qcow2", "-c", "read -P 1 0 64k"]).ok();
    // As many as an opening takes, elsewhere: no further snapshot is made.
    file.write_all_at(&(1_u64 << 30).to_be_bytes(), u64::from_be_bytes(snapshots)).unwrap();
    file.write_all_at(&(1_u32 << 27).to_be_bytes(), u64::from_be_bytes(snapshots) + 8).unwrap();
    scratch.zebu(&["io", "a.qcow2", "-c", "write -P 2 0 64k"]).ok();
    scratch.zebu(&words("snapshot -c t a.qcow2")).fails_naming(1, &["a.qcow2", "L1 tables of snapshots"]);
}

#[test]
fn an_image_that_claims_a_huge_luks_header_is_only_read() {
    let scratch = Scratch::new();
    let secret = "--object secret,id=s,data=x";
    scratch
        .zebu(&words(&format!(
            "create -q -f qcow2 {secret} -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 a.qcow2 1M"
        )))
        .ok();
    let file = std::fs::OpenOptions::new().read(true).write(true).open(scratch.file("a.qcow2")).unwrap();
    let mut header = [0; 512];
    file.read_exact_at(&mut header, 0).unwrap();
    let extension = header.windows(4).position(|bytes| bytes == [0x05, 0x37, 0xbe, 0x77]).unwrap();
    file.write_all_at(&(1_u64 << 40).to_be_bytes(), extension as u64 + 16).unwrap();
    file.set_len(2 << 40).unwrap();
    let image = "--image-opts driver=qcow2,file.filename=a.qcow2,encrypt.key-secret=s";
    let io = |what: &str, command: &str| {
        let line = format!("io {what} {secret} {image} -c");
        scratch.zebu(&[words(&line), vec![command]].concat())
    };
    io("", "write 0 64k").fails_naming(1, &["a.qcow2", "LUKS header"]);
    io("-r", "read -P 0 0 64k").ok();
}

#[test]
fn damaged_headers() {
    if !qemu() {
        return;
    }
    for (what, offset, bytes) in [
        ("magic", 0, &[0u8; 4][..]),
        ("version", 4, &[0, 0, 0, 9]),
        ("cluster bits", 20, &[0, 0, 0, 40]),
        ("L1 size", 36, &[0xff, 0xff, 0xff, 0xff]),
        ("refcount order", 96, &[0, 0, 0, 7]),
        ("header length", 100, &[0xff, 0xff, 0xff, 0xff]),
        ("incompatible features", 72, &[0x80, 0, 0, 0, 0, 0, 0, 0]),
    ] {
        let scratch = Scratch::new();
        scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 1M")).ok();
        let file = std::fs::OpenOptions::new().write(true).open(scratch.file("a.qcow2")).unwrap();
        file.write_all_at(bytes, offset).unwrap();
        for line in [
            "info -f qcow2 FILE",
            "convert -f qcow2 -O raw FILE out",
            "check -f qcow2 FILE",
            "compare -f qcow2 FILE FILE",
        ] {
            same_code(&scratch, line, "a.qcow2", &["a.qcow2"]);
        }
        let ran = scratch.zebu(&words("info -f qcow2 a.qcow2"));
        assert!(!ran.stderr.contains("panicked"), "{what}: {ran:#?}");
    }
}

#[test]
fn truncated_images() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.qemu_io(&["-c", "write -P 1 0 1M", "a.qcow2"]).ok();
    let whole = scratch.read("a.qcow2");
    for length in [3, 4, 71, 72, 103, 104, 512, 65536, 131_072, 196_608, 262_144, whole.len() - 70_000] {
        scratch.write("a.qcow2", &whole[..length]);
        for line in ["info -f qcow2 a.qcow2", "convert -f qcow2 -O raw a.qcow2 out", "check -f qcow2 a.qcow2"]
        {
            let (ours, theirs) = (scratch.zebu(&words(line)), scratch.qemu_img(&words(line)));
            assert!(ours.code.is_some(), "{line} at {length}: {ours:#?}");
            assert!(!ours.stderr.contains("panicked"), "{line} at {length}: {ours:#?}");
            // What QEMU takes for zeroes, zebu may take for what it is: lost.
            assert!(
                ours.code != Some(0) || theirs.code == Some(0),
                "{line} at {length}: {ours:#?} {theirs:#?}"
            );
        }
    }
}

#[test]
fn chains_that_bite_their_tail() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 -u -b b.qcow2 -F qcow2 a.qcow2 1M")).ok();
    scratch.qemu_img(&words("create -q -f qcow2 -u -b a.qcow2 -F qcow2 b.qcow2 1M")).ok();
    scratch.zebu(&words("info a.qcow2")).ok();
    for line in ["info --backing-chain a.qcow2", "convert -O raw a.qcow2 out", "map a.qcow2"] {
        scratch.zebu(&words(line)).fails_naming(1, &["qcow2"]);
    }
}

#[test]
fn full_disks() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.qemu_img(&words("create -q -f qcow2 a.qcow2 4M")).ok();
    scratch.qemu_io(&["-c", "write -P 1 0 4M", "a.qcow2"]).ok();
    // A limit on the size of files stands for a full disk: the write fails with EFBIG.
    let script = format!(
        "trap '' XFSZ; ulimit -f 1024; exec {} convert -O raw a.qcow2 out",
        env!("CARGO_BIN_EXE_zebu")
    );
    scratch.run("bash", &["-c", &script]).fails_naming(1, &["out"]);
    assert!(!scratch.file("out").exists());
}

/// A file, and the words that tell what it is.
type Foreign = (&'static str, &'static str);

/// Images of other formats and packed files, made by the programs that they belong to.
fn foreign_files(scratch: &Scratch) -> Vec<Foreign> {
    scratch.write("disk.raw", &[noise(3, 64 << 10), vec![0; 960 << 10]].concat());
    let mut files = vec![];
    for (program, name) in
        [("gzip", "gzip"), ("xz", "xz"), ("zstd", "zstd"), ("bzip2", "bzip2"), ("lz4", "lz4")]
    {
        let output = scratch.command(program, &["-c", "disk.raw"]).output();
        // What is not installed has its magic number at least.
        let bytes = match output {
            Ok(output) if output.status.success() => output.stdout,
            _ => match name {
                "lz4" => b"\x04\x22\x4d\x18\x64\x40\xa7".to_vec(),
                "zstd" => b"\x28\xb5\x2f\xfd\x04\x58".to_vec(),
                "bzip2" => b"BZh91AY&SY\0\0\0\0".to_vec(),
                _ => panic!("{program} is needed"),
            },
        };
        scratch.write(name, &bytes);
        files.push((name, name));
    }
    // No program here writes this.
    scratch.write("bochs", &[b"Bochs Virtual HD Image\0\0".as_slice(), &[0; 4096]].concat());
    files.push(("bochs", "bochs"));
    files
}

#[test]
fn images_of_other_formats_are_not_taken_for_raw() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    for (file, format) in foreign_files(&scratch) {
        let before = scratch.read(file);
        for line in READERS.iter().chain(&[
            "map --output=json FILE",
            "convert -O qcow2 disk.raw FILE out",
            "dd -O raw if=FILE of=out",
            "backup FILE out",
            "clone FILE out",
            "resize FILE 8M",
            "io -c length FILE",
            "io -r -c length FILE",
            "snapshot -l FILE",
            "verify FILE",
            "serve --nbd unix:socket FILE",
            "serve --read-only --nbd unix:socket FILE",
        ]) {
            let is_packed = matches!(format, "gzip" | "xz" | "zstd" | "bzip2" | "lz4");
            // These unpack their sources.
            if is_packed && (line.starts_with("convert") || line.starts_with("backup")) {
                continue;
            }
            let code = match line.split(' ').next() {
                Some("compare") => 2,
                Some("check") => 63,
                _ => 1,
            };
            let ran = scratch.zebu(&words(&line.replace("FILE", file)));
            let remedy = if is_packed { "convert it" } else { "another tool" };
            ran.fails_naming(code, &[file, format, remedy, "-f raw"]);
            assert!(!scratch.file("out").exists(), "{line} left something behind");
        }
        assert_eq!(scratch.read(file), before, "{file} was changed");
        // The bytes are the disk, if the user says so.
        scratch.zebu(&words(&format!("info -f raw {file}"))).ok();
        scratch.zebu(&words(&format!("convert -f raw -O raw {file} out"))).ok();
        scratch.qemu_img(&words(&format!("compare -f raw -F raw {file} out"))).ok();
        scratch.zebu(&words(&format!("info --image-opts driver=raw,file.filename={file}"))).ok();
        std::fs::remove_file(scratch.file("out")).unwrap();
    }
    let ran = scratch.zebu(&words("compare disk.raw gzip"));
    ran.fails_naming(2, &["gzip", "-F raw"]);
    let ran = scratch.zebu(&words("info --image-opts file.filename=gzip"));
    ran.fails_naming(1, &["gzip", "driver=raw"]);
}

#[test]
fn a_backing_file_of_another_format_is_not_taken_for_raw() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.write("disk.raw", &noise(5, 1 << 20));
    scratch.write("packed", &[b"\x1f\x8b\x08\0".as_slice(), &noise(6, 1 << 20)].concat());
    scratch.zebu(&words("create -q -f qcow2 -F raw -b disk.raw top.qcow2")).ok();
    // An image without the format of its backing file: QEMU does not make one any more.
    let mut top = scratch.read("top.qcow2");
    let at = top.windows(4).position(|bytes| bytes == 0xe279_2acau32.to_be_bytes()).unwrap();
    top[at..at + 4].copy_from_slice(&0x1234_5678u32.to_be_bytes());
    scratch.write("top.qcow2", &top);
    scratch.zebu(&words("convert -O raw top.qcow2 out")).ok();
    std::fs::remove_file(scratch.file("out")).unwrap();
    std::fs::rename(scratch.file("packed"), scratch.file("disk.raw")).unwrap();
    for line in ["convert -O raw top.qcow2 out", "map top.qcow2", "io -c length top.qcow2"] {
        scratch.zebu(&words(line)).fails_naming(1, &["disk.raw", "gzip", "rebase -u"]);
        assert!(!scratch.file("out").exists());
    }
    // As its own format asks for, and as `create` tells.
    scratch.zebu(&words("create -q -f qcow2 -b disk.raw b.qcow2")).fails_naming(1, &["disk.raw", "gzip"]);
    scratch.zebu(&words("rebase -u -b disk.raw -F raw top.qcow2")).ok();
    scratch.zebu(&words("convert -O raw top.qcow2 out")).ok();
}

#[test]
fn disks_with_a_boot_sector_stay_raw() {
    let scratch = Scratch::new();
    let mut sector = vec![0; 1 << 20];
    sector[510..512].copy_from_slice(&[0x55, 0xaa]);
    let end = sector.len() - 512;
    let mut gpt = sector.clone();
    gpt[512..520].copy_from_slice(b"EFI PART");
    gpt[end..end + 8].copy_from_slice(b"EFI PART");
    let text = b"# a file of text\nversions=1\nBZhip\n".to_vec();
    for (name, bytes) in [
        ("mbr", sector.clone()),
        ("gpt", gpt),
        ("zeroes", vec![0; 1 << 20]),
        ("empty", vec![]),
        ("text", text),
        ("fat", [b"\xeb\x3c\x90MSDOS5.0".as_slice(), &sector].concat()),
        ("gz", [b"\x1f\x8b\xff".as_slice(), &sector].concat()),
        ("bz", [b"BZh9something".as_slice(), &sector].concat()),
        ("koly", [b"koly".as_slice(), &sector].concat()),
        ("inside", [&sector[..4096], b"conectix", &sector].concat()),
    ] {
        scratch.write(name, &bytes);
        let info = scratch.zebu(&words(&format!("info --output=json {name}"))).ok();
        assert_eq!(info.json()["format"], "raw", "{name}");
    }
}

#[test]
fn names_with_a_protocol_are_no_local_files() {
    if !qemu() {
        return;
    }
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    scratch.zebu(&words("create -q -f qcow2 -b a.qcow2 -F qcow2 top.qcow2")).ok();
    scratch.zebu(&words("bitmap --add top.qcow2 one")).ok();
    let names = ["gluster:image", "ssh:x", "iscsi:x", "ftp://host/x", "nosuch:file"];
    for name in names {
        let protocol = name.split(':').next().unwrap();
        // A file of that name is no reason to open it.
        if !name.contains('/') {
            scratch.write(name, &scratch.read("a.qcow2"));
        }
        for line in [
            "info NAME",
            "info -f qcow2 NAME",
            "check NAME",
            "map NAME",
            "measure -O qcow2 NAME",
            "compare NAME a.qcow2",
            "compare a.qcow2 NAME",
            "convert -O raw NAME out",
            "convert a.qcow2 NAME",
            "convert -n a.qcow2 NAME",
            "convert -O qcow2 -B NAME -F qcow2 top.qcow2 out",
            "convert -O qcow2 -o data_file=NAME a.qcow2 out",
            "create -f raw NAME 1M",
            "create -f qcow2 -b NAME -F qcow2 out",
            "create -f qcow2 -o backing_file=NAME,backing_fmt=raw out",
            "create -f qcow2 -o data_file=NAME out 1M",
            "dd -O raw if=NAME of=out",
            "dd if=a.qcow2 of=NAME",
            "rebase -b NAME -F qcow2 top.qcow2",
            "rebase -u -b a.qcow2 -F qcow2 NAME",
            "commit NAME",
            "commit -b NAME top.qcow2",
            "amend -o compat=1.1 NAME",
            "resize NAME 2M",
            "snapshot -l NAME",
            "bitmap --add NAME two",
            "bitmap --merge one -b NAME -F qcow2 top.qcow2 two",
            "clone NAME out",
            "clone a.qcow2 NAME",
            "backup NAME out",
            "backup a.qcow2 NAME",
            "verify NAME",
            "bench -c 1 NAME",
            "io -c length NAME",
            "serve --nbd unix:socket NAME",
            "info --image-opts driver=qcow2,file.filename=NAME",
        ] {
            let ran = scratch.zebu(&words(&line.replace("NAME", name)));
            let code = if line.starts_with("compare") { 2 } else { 1 };
            ran.fails_naming(code, &[&format!("protocol '{protocol}'"), &format!("'./{name}'")]);
            assert!(!scratch.file("out").exists(), "{line}");
        }
        assert_eq!(scratch.file(name).exists(), !name.contains('/'));
        if !name.contains('/') {
            assert!(scratch.read(name) == scratch.read("a.qcow2"));
            // The remedy.
            scratch.zebu(&words(&format!("info ./{name}"))).ok();
            let plain = format!("driver=qcow2,file.driver=file,file.filename={name}");
            scratch.zebu(&["info", "--image-opts", &plain]).ok();
            std::fs::remove_file(scratch.file(name)).unwrap();
        }
        // Only written down, for a program that has the protocol.
        let made = scratch.zebu(&["create", "-q", "-f", "qcow2", "-u", "-b", name, "-F", "raw", "out", "1M"]);
        made.ok();
        let info = scratch.zebu(&words("info --output=json out")).ok().json();
        assert_eq!(info["backing-filename"], *name);
        std::fs::remove_file(scratch.file("out")).unwrap();
    }
}

#[test]
fn the_protocol_of_files_is_left_out() {
    if !qemu() {
        return;
    }
    let (ours, theirs) = (Scratch::new(), Scratch::new());
    for line in [
        "create -q -f qcow2 file:a:b.qcow2 1M",
        "info file:a:b.qcow2",
        "convert -O raw ./a:b.qcow2 file:out.raw",
        "convert -O qcow2 -n file:out.raw file:a:b.qcow2",
        "create -q -f qcow2 -b file:out.raw -F raw top.qcow2",
        "convert -O raw top.qcow2 file:second.raw",
        "compare file:out.raw second.raw",
    ] {
        ours.zebu(&words(line)).ok();
        theirs.qemu_img(&words(line)).ok();
    }
    let names = |scratch: &Scratch| {
        let mut names: Vec<_> =
            std::fs::read_dir(scratch.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&ours), names(&theirs));
}

#[test]
fn names_in_json_lead_to_no_file_of_that_name() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    for (name, told) in [
        ("json:{}", "A file must be specified"),
        ("json:{", "Could not parse the JSON options"),
        ("json:[]", "Invalid JSON object given"),
        ("json:{\"driver\":\"nbd\"}", "nbd"),
        ("json:{\"file.filename\":\"a.qcow2\",\"nosuch\":1}", "'nosuch'"),
        ("json:{\"file.filename\":{\"a\":1}}", "'file.filename.a'"),
    ] {
        scratch.write(name, b"something");
        scratch.zebu(&["info", name]).fails_naming(1, &[told]);
        scratch.zebu(&["convert", "a.qcow2", name]).fails_naming(1, &["protocol 'json'"]);
        assert_eq!(scratch.read(name), b"something");
    }
    let name = "json:{\"driver\":\"qcow2\",\"file\":{\"driver\":\"file\",\"filename\":\"a.qcow2\"},\"backing\":null}";
    assert_eq!(scratch.zebu(&["info", "--output=json", name]).ok().json()["virtual-size"], 1 << 20);
}

/// Words that led people astray: the name of a temporary file, a name said twice, a reason that is not true.
#[test]
fn failures_are_told_once_and_as_they_are() {
    let scratch = Scratch::new();
    scratch.write("disk", &noise(1 << 20, 1));
    for (line, has, has_not) in [
        (
            "convert -f raw -O vdi -o block_size=3 disk out",
            &["'out'", "VDI block size 3"][..],
            &[".zebu-"][..],
        ),
        ("convert -f raw -O vhdx -o log_size=3 disk out", &["'out'", "VHDX log size 3"], &[".zebu-"]),
        ("convert -f raw -O qcow2 disk disk", &["'disk'", "would destroy"], &["reading"]),
        ("convert -f raw -O raw disk no/out", &["'no/out'", "No such file"], &["(os error", ": no/out"]),
        ("snapshot -c a disk", &["'disk'", "no snapshots", "convert it to qcow2"], &[]),
        ("bitmap --add disk b", &["'disk'", "no bitmaps", "convert it to qcow2"], &[]),
        ("check disk", &["'disk' was taken for raw"], &[]),
        ("info htp://h/x", &["'htp'", "http"], &["local files only"]),
        (
            "info --image-opts driver=throttle,file.filename=disk",
            &["Unknown driver 'throttle'"],
            &["file format"],
        ),
        ("covnert disk out", &["did you mean 'convert'?"], &[]),
        ("serve disk", &["--nbd", "--fuse", "--vhost-user-blk"], &[]),
    ] {
        let ran = scratch.zebu(&words(line));
        let first = ran.stderr.lines().next().unwrap_or_default();
        assert!(ran.code != Some(0) && has.iter().all(|word| first.contains(word)), "{line}: {ran:#?}");
        assert!(has_not.iter().all(|word| !first.contains(word)), "{line}: {ran:#?}");
    }
}
