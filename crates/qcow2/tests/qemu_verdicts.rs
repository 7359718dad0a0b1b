//! Damaged images: our verdict and message against QEMU's, check by check, in pairs, and at random.

mod common;

use std::path::Path;

use common::Scratch;
use zebu_qcow2::header::DataFileOption;
use zebu_qcow2::snapshot::{self, ParsedTable};
use zebu_qcow2::{FormatError, Header, Purpose, bitmap};

/// A change to the bytes of an image.
type Patch = fn(&mut Vec<u8>);

struct Damage {
    /// Number of the check in the order of opening, or what is tried.
    name: &'static str,
    /// Options of `qemu-img create`.
    options: &'static str,
    patch: Patch,
}

fn put(bytes: &mut Vec<u8>, at: usize, value: &[u8]) {
    if bytes.len() < at + value.len() {
        bytes.resize(at + value.len(), 0);
    }
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn u8_at(bytes: &mut Vec<u8>, at: usize, value: u8) {
    put(bytes, at, &[value]);
}

fn u32_at(bytes: &mut Vec<u8>, at: usize, value: u32) {
    put(bytes, at, &value.to_be_bytes());
}

fn u64_at(bytes: &mut Vec<u8>, at: usize, value: u64) {
    put(bytes, at, &value.to_be_bytes());
}

/// Puts an extension in front of the others of a version 3 image.
fn extension(bytes: &mut Vec<u8>, kind: u32, len: u32, data: &[u8]) {
    let mut new = [kind.to_be_bytes(), len.to_be_bytes()].concat();
    new.extend_from_slice(data);
    new.resize(new.len().next_multiple_of(8), 0);
    // The feature name table is all that a fresh image has: its place is taken, and the area ends after the new one.
    put(bytes, 112, &new);
    put(bytes, 112 + new.len(), &[0; 400]);
}

fn bitmaps_extension(bytes: &mut Vec<u8>, fields: (u32, u32, u64, u64)) {
    u64_at(bytes, 88, 1);
    let mut data = [fields.0.to_be_bytes(), fields.1.to_be_bytes()].concat();
    data.extend_from_slice(&fields.2.to_be_bytes());
    data.extend_from_slice(&fields.3.to_be_bytes());
    extension(bytes, 0x2385_2875, 24, &data);
}

fn luks(bytes: &mut Vec<u8>, method: u32, len: u32, offset: u64) {
    u32_at(bytes, 32, method);
    extension(bytes, 0x0537_be77, len, &[offset.to_be_bytes(), 4096u64.to_be_bytes()].concat());
}

const fn damage(name: &'static str, options: &'static str, patch: Patch) -> Damage {
    Damage { name, options, patch }
}

/// One or more damages for each check that depends on the file's bytes alone.
const DAMAGES: &[Damage] = &[
    damage("intact", "", |_| {}),
    damage("intact v2", "compat=0.10", |_| {}),
    damage("02 magic", "", |b| u8_at(b, 0, b'X')),
    damage("02 empty file", "", Vec::clear),
    damage("03 version 1", "", |b| u32_at(b, 4, 1)),
    damage("03 version 4", "", |b| u32_at(b, 4, 4)),
    damage("04 cluster 2^8", "", |b| u32_at(b, 20, 8)),
    damage("04 cluster 2^22", "", |b| u32_at(b, 20, 22)),
    damage("04 cluster 2^4294967295", "", |b| u32_at(b, 20, u32::MAX)),
    damage("05 header length 103", "", |b| u32_at(b, 100, 103)),
    damage("06 header length past cluster", "cluster_size=512", |b| u32_at(b, 100, 513)),
    damage("header length 104", "cluster_size=512", |b| u32_at(b, 100, 104)),
    damage("header length 106", "cluster_size=512", |b| u32_at(b, 100, 106)),
    damage("header length a whole cluster", "cluster_size=512", |b| u32_at(b, 100, 512)),
    damage("08 backing offset", "", |b| u64_at(b, 8, 65537)),
    damage("08 backing offset huge", "", |b| u64_at(b, 8, u64::MAX)),
    damage("backing offset at the end", "", |b| u64_at(b, 8, 65536)),
    damage("09 compression type 2", "", |b| u8_at(b, 104, 2)),
    damage("10 type zlib, bit set", "", |b| u64_at(b, 72, 8)),
    damage("11 type zstd, bit clear", "compression_type=zstd", |b| u64_at(b, 72, 0)),
    damage("12 unknown feature", "", |b| u64_at(b, 72, 1 << 63)),
    damage("12 two unknown features", "", |b| u64_at(b, 72, 0x60)),
    damage("12 named in the table", "", |b| {
        u64_at(b, 72, 0x300);
        put(b, 120, &[0, 9]);
        put(b, 122, b"shiny\0");
    }),
    damage("13 corrupt bit", "", |b| u64_at(b, 72, 2)),
    damage("14 small subclusters", "cluster_size=8192", |b| u64_at(b, 72, 16)),
    damage("14 smallest subclusters", "cluster_size=512", |b| u64_at(b, 72, 16)),
    damage("15 refcount order 7", "", |b| u32_at(b, 96, 7)),
    damage("17 no reftable", "", |b| u32_at(b, 56, 0)),
    damage("18 reftable of 129 clusters", "", |b| u32_at(b, 56, 129)),
    damage("19 reftable unaligned", "", |b| u64_at(b, 48, 0x10200)),
    damage("19 reftable past 2^63", "", |b| u64_at(b, 48, (1 << 63) - 0x10000)),
    damage("20 snapshots", "", |b| u32_at(b, 60, 65537)),
    damage("21 snapshots unaligned", "", |b| u64_at(b, 64, 1)),
    damage("21 snapshots past 2^63", "", |b| u64_at(b, 64, 1 << 63)),
    damage("22 L1 too large", "", |b| u32_at(b, 36, (4 << 20) + 1)),
    damage("23 L1 unaligned", "", |b| u64_at(b, 40, 0x30008)),
    damage("23 L1 past 2^63", "", |b| u64_at(b, 40, !0xffff)),
    damage("24 too big", "cluster_size=512", |b| u64_at(b, 24, 1 << 62)),
    damage("25 L1 too small", "", |b| u64_at(b, 24, (1 << 30) + 1)),
    damage("25 L1 empty", "", |b| u32_at(b, 36, 0)),
    damage("size not in sectors", "", |b| u64_at(b, 24, 1001)),
    damage("29 extension too large", "", |b| extension(b, 0x1234, 65536, &[])),
    damage("29 extension of 2^32-1 bytes", "", |b| extension(b, 0x1234, u32::MAX, &[])),
    damage("29 end marker too large", "", |b| extension(b, 0, 65536, &[])),
    damage("29 cut by the backing name", "backing_file=b,backing_fmt=raw", |b| u64_at(b, 8, 116)),
    damage("end marker with a length", "", |b| extension(b, 0, 8, &[0; 8])),
    damage("unknown extension", "", |b| extension(b, 0x1234, 5, b"12345")),
    damage("30 backing format", "", |b| extension(b, 0xe279_2aca, 16, &[b'x'; 16])),
    damage("backing format of 15", "", |b| extension(b, 0xe279_2aca, 15, &[b'x'; 15])),
    damage("31 LUKS pointer, no LUKS", "", |b| luks(b, 0, 16, 0x40000)),
    damage("31 LUKS pointer, AES", "", |b| luks(b, 1, 16, 0x40000)),
    damage("32 LUKS pointer length", "", |b| luks(b, 2, 15, 0x40000)),
    damage("33 LUKS offset", "", |b| luks(b, 2, 16, 0x40200)),
    damage("34 bitmaps length", "", |b| {
        u64_at(b, 88, 1);
        extension(b, 0x2385_2875, 23, &[0; 23]);
    }),
    damage("35 bitmaps, bit clear", "", |b| {
        bitmaps_extension(b, (0, 1, u64::MAX, 1));
        u64_at(b, 88, 0);
    }),
    damage("36 bitmaps reserved", "", |b| bitmaps_extension(b, (1, 1, 32, 0x40000))),
    damage("37 bitmaps", "", |b| bitmaps_extension(b, (65536, 0, 32, 0x40000))),
    damage("38 no bitmaps", "", |b| bitmaps_extension(b, (0, 0, 32, 0x40000))),
    damage("39 bitmap directory unaligned", "", |b| bitmaps_extension(b, (1, 0, 32, 0x40200))),
    damage("40 bitmap directory", "", |b| bitmaps_extension(b, (1, 0, 67_107_841, 0x40000))),
    damage("41 data file", "", |b| u64_at(b, 72, 4)),
    damage("42 raw without data file", "", |b| u64_at(b, 88, 2)),
    damage("43 LUKS without pointer", "", |b| u32_at(b, 32, 2)),
    damage("44 encryption method 3", "", |b| u32_at(b, 32, 3)),
    damage("45 backing name of 1024", "backing_file=b,backing_fmt=raw", |b| u32_at(b, 16, 1024)),
    damage("45 backing name past the cluster", "cluster_size=512,backing_file=b,backing_fmt=raw", |b| {
        u32_at(b, 16, 400);
    }),
    damage("unknown autoclear bit", "", |b| u64_at(b, 88, 1 << 40)),
    damage("bitmaps bit without extension", "", |b| u64_at(b, 88, 1)),
    damage("unknown compatible bit", "", |b| u64_at(b, 80, 1 << 40)),
    damage("dirty bit", "lazy_refcounts=on", |b| u64_at(b, 72, 1)),
];

/// Our verdict on an image: the header, then what it points at, as an engine would go on.
fn our_verdict(file: &[u8], purpose: Purpose) -> Result<(), FormatError> {
    let (header, _warnings) = Header::parse(file, purpose)?;
    if purpose != Purpose::Inspect {
        header.check_data_file(DataFileOption::NotGiven)?;
    }
    let start = (header.snapshots_offset.0 as usize).min(file.len());
    if purpose != Purpose::Check {
        let mut table = file[start..].to_vec();
        while let ParsedTable::NeedsBytes { at_least } =
            snapshot::parse_table(&table, header.nb_snapshots, purpose)?
        {
            table.resize(at_least.max(2 * table.len() as u64) as usize, 0);
        }
    }
    if let Some(bitmaps) = header.bitmaps() {
        let start = (bitmaps.directory_offset.0 as usize).min(file.len());
        let mut directory = file[start..].to_vec();
        directory.resize(bitmaps.directory_size as usize, 0);
        for entry in bitmap::parse_directory(&directory, bitmaps.bitmap_count)? {
            entry.validate(&header.geometry(), header.virtual_size())?;
        }
    }
    Ok(())
}

/// QEMU's verdict when it opens the image; `Err` has its text.
fn qemu_verdict(path: &Path, purpose: Purpose) -> Result<(), String> {
    let output = match purpose {
        Purpose::ReadOnly => common::run("qemu-io", &["-r", "-f", "qcow2", "-c", "length"], &[path], &[]),
        Purpose::ReadWrite => common::run("qemu-io", &["-f", "qcow2", "-c", "length"], &[path], &[]),
        Purpose::Check => common::run("qemu-img", &["check", "-f", "qcow2"], &[path], &[]),
        Purpose::Inspect => common::run("qemu-img", &["info", "-f", "qcow2"], &[path], &[]),
    };
    let text = String::from_utf8_lossy(&output.stderr);
    let name = path.display().to_string();
    if let Some(error) = refusal(&text, &name) {
        return Err(error);
    }
    // A check that ran found errors perhaps, but it opened the image.
    let opened = output.status.success() || purpose == Purpose::Check;
    assert!(opened, "unexpected answer of QEMU: {text}");
    Ok(())
}

/// Why a tool of QEMU did not open an image. The reason may follow a warning that does not end its line.
fn refusal(text: &str, name: &str) -> Option<String> {
    let prefixes =
        [format!("qemu-io: can't open device {name}: "), format!("qemu-img: Could not open '{name}': ")];
    let reason = prefixes.iter().find_map(|prefix| text.split_once(prefix.as_str()))?.1;
    reason.lines().next().map(str::to_owned)
}

const PURPOSES: [Purpose; 4] = [Purpose::ReadOnly, Purpose::ReadWrite, Purpose::Check, Purpose::Inspect];

#[test]
fn each_damage_gets_qemus_verdict() {
    let Some(scratch) = Scratch::new() else { return };
    let mut wrong = Vec::new();
    for damage in DAMAGES {
        let mut bytes = scratch.create(damage.options, "1G");
        (damage.patch)(&mut bytes);
        for purpose in PURPOSES {
            let path = scratch.write("damaged.qcow2", &bytes);
            let ours = our_verdict(&bytes, purpose).map_err(|error| error.to_string());
            let theirs = qemu_verdict(&path, purpose);
            if ours != theirs {
                wrong.push(format!("{} {purpose:?}: ours {ours:?}, QEMU {theirs:?}", damage.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Two damages at once: the message tells which check comes first.
#[test]
fn checks_come_in_qemus_order() {
    let Some(scratch) = Scratch::new() else { return };
    let intact = scratch.create("", "1G");
    let mut single: Vec<&Damage> = Vec::new();
    for damage in DAMAGES.iter().filter(|damage| damage.options.is_empty()) {
        let numbered = damage.name.as_bytes()[0].is_ascii_digit();
        let new = single.last().is_none_or(|last| last.name[..2] != damage.name[..2]);
        if numbered && new {
            single.push(damage);
        }
    }
    assert!(single.len() >= 30, "only {} checks are paired", single.len());
    // Whether a data file is at hand is the engine's to ask, after the header was parsed.
    let not_comparable = ["41 data file", "43 LUKS without pointer"];
    let mut wrong = Vec::new();
    for (at, first) in single.iter().enumerate() {
        for second in &single[at + 1..] {
            if [first.name, second.name] == not_comparable {
                continue;
            }
            let mut bytes = intact.clone();
            (second.patch)(&mut bytes);
            (first.patch)(&mut bytes);
            let path = scratch.write("damaged.qcow2", &bytes);
            let ours = our_verdict(&bytes, Purpose::ReadOnly).map_err(|error| error.to_string());
            let theirs = qemu_verdict(&path, Purpose::ReadOnly);
            if ours != theirs {
                wrong.push(format!("{} and {}: ours {ours:?}, QEMU {theirs:?}", first.name, second.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A small generator of repeatable random numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Random bytes in header and extensions: both sides give the same verdict, in the same words.
#[test]
fn random_damage_gets_qemus_verdict() {
    let Some(scratch) = Scratch::new() else { return };
    let bases: Vec<Vec<u8>> = [
        "",
        "compat=0.10",
        "cluster_size=512",
        "cluster_size=2M,refcount_bits=1",
        "extended_l2=on,cluster_size=16k",
        "compression_type=zstd",
        "backing_file=b,backing_fmt=raw",
        "backing_file=b,backing_fmt=raw,compat=0.10,cluster_size=512",
    ]
    .iter()
    .map(|options| scratch.create(options, "1M"))
    .collect();
    // What QEMU finds only when it reads what the header points at: for us, the engine's part.
    let not_of_the_header = ["Could not read L1 table", "Could not initialize refcount handling"];
    let rounds = std::env::var("ZEBU_RANDOM_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(400);
    let mut refused = 0;
    for seed in 1..=rounds {
        let mut random = Random(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
        let mut bytes = bases[random.below(bases.len() as u64) as usize].clone();
        for _ in 0..=random.below(3) {
            let end = if random.below(2) == 0 { 112 } else { 512 };
            let at = random.below(end) as usize;
            let value = match random.below(4) {
                0 => 0,
                1 => 0xff,
                2 => bytes[at] ^ 1 << random.below(8),
                _ => random.below(256) as u8,
            };
            // Magic and version are the least interesting, and refused at once.
            if at >= 8 || random.below(8) == 0 {
                bytes[at] = value;
            }
        }
        let path = scratch.write("random.qcow2", &bytes);
        let name = path.display();
        // Without the backing file, which does not exist.
        let open = format!(
            r#"json:{{"driver":"qcow2","backing":null,"file":{{"driver":"file","filename":"{name}"}}}}"#
        );
        let output = common::run("qemu-io", &["-r", "-c", "length", &open], &[], &[]);
        let theirs = refusal(&String::from_utf8_lossy(&output.stderr), &open).map_or(Ok(()), Err);
        if let Err(text) = &theirs
            && not_of_the_header.iter().any(|known| text.starts_with(known))
        {
            continue;
        }
        let ours = our_verdict(&bytes, Purpose::ReadOnly).map_err(|error| error.to_string());
        assert_eq!(ours, theirs, "seed {seed}: ours, QEMU's");
        refused += u64::from(theirs.is_err());
    }
    assert!(refused > rounds / 10, "only {refused} of {rounds} images were refused: the damage is too mild");
}
