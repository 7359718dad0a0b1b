//! The matrix of encrypted images beside QEMU: ciphers, modes, hashes, layouts of qcow2 and LUKS by itself. Each side makes images, and
//! the other reads, changes and snapshots them, byte for byte.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Instant;
use zebu_tests::encrypted::{
    OBJECTS, all_read, cryptsetup, encrypt_options, of, run_qemu, run_zebu, with_objects,
};
use zebu_tests::program::{Finished, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;
use zebu_tests::tenth;

const MIB: usize = 1 << 20;
const CIPHERS: [&str; 3] = ["aes", "serpent", "twofish"];
const KEY_BITS: [u32; 3] = [128, 192, 256];
/// Modes with their vectors; the first three are in the whole matrix.
const MODES: [&str; 5] = [
    "cipher-mode=xts,ivgen-alg=plain64",
    "cipher-mode=cbc,ivgen-alg=plain64",
    "cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256",
    "cipher-mode=xts,ivgen-alg=essiv,ivgen-hash-alg=sha256",
    "cipher-mode=xts,ivgen-alg=plain",
];
const HASHES: [&str; 3] = ["sha1", "sha256", "sha512"];
/// LUKS by itself, and options of qcow2 without the encryption.
const LAYOUTS: [&str; 9] = [
    "luks",
    "cluster_size=512",
    "cluster_size=4k",
    "cluster_size=4k,compat=0.10",
    "cluster_size=16k,extended_l2=on,refcount_bits=2",
    "cluster_size=64k",
    "cluster_size=64k,extended_l2=on",
    "cluster_size=2M",
    "cluster_size=2M,extended_l2=on",
];

/// An image of the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    cipher: &'static str,
    key_bits: u32,
    mode: &'static str,
    hash: &'static str,
    layout: &'static str,
}

impl Cell {
    fn at(cipher: usize, key: usize, mode: usize, hash: usize, layout: usize) -> Self {
        Self {
            cipher: CIPHERS[cipher],
            key_bits: KEY_BITS[key],
            mode: MODES[mode],
            hash: HASHES[hash],
            layout: LAYOUTS[layout],
        }
    }

    /// Whether QEMU can't make or open it: its key material is no multiple of a sector, and QEMU aborts.
    fn is_refused(&self) -> bool {
        self.key_bits == 192 && self.mode.contains("cbc")
    }

    fn parts(&self) -> [String; 5] {
        let Self { cipher, key_bits, mode, hash, layout } = *self;
        [cipher.to_owned(), key_bits.to_string(), mode.to_owned(), hash.to_owned(), layout.to_owned()]
    }

    /// Creation options of the cipher, without their prefix.
    fn cipher_options(&self) -> String {
        format!("cipher-alg={}-{},{},hash-alg={}", self.cipher, self.key_bits, self.mode, self.hash)
    }

    fn format(&self) -> &'static str {
        if self.layout == "luks" { "luks" } else { "qcow2" }
    }

    /// The command that makes it of the file `plain`.
    fn convert(&self, file: &str) -> String {
        let options = match self.format() {
            "luks" => encrypt_options(&self.cipher_options(), ""),
            _ => format!(
                "{},encrypt.format=luks,{}",
                self.layout,
                encrypt_options(&self.cipher_options(), "encrypt.")
            ),
        };
        format!("convert -O {} -o {options} plain {file}", self.format())
    }
}

/// Every image of the matrix that can be made.
fn whole() -> Vec<Cell> {
    let mut cells = Vec::new();
    for layout in 0..LAYOUTS.len() {
        for number in 0..CIPHERS.len() * KEY_BITS.len() * 3 * HASHES.len() {
            cells.push(Cell::at(number % 3, number / 3 % 3, number / 9 % 3, number / 27, layout));
        }
    }
    for mode in [3, 4] {
        cells.extend((0..9).map(|number| Cell::at(number % 3, number / 3, mode, number % 3, number)));
    }
    cells.retain(|cell| !cell.is_refused());
    cells
}

/// The images of this run.
fn chosen() -> impl Iterator<Item = Cell> {
    let numbered = whole().into_iter().enumerate();
    numbered.filter(|(number, _)| tenth::has(*number)).map(|(_, cell)| cell)
}

/// One of the two programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Zebu,
    Qemu,
}

impl Side {
    fn other(self) -> Self {
        if self == Self::Zebu { Self::Qemu } else { Self::Zebu }
    }

    /// Runs a command of `qemu-img`, which zebu has as well, with the secrets.
    fn run(self, qemu: &Qemu, dir: &Path, line: &str) -> Finished {
        if self == Self::Zebu { run_zebu(dir, line) } else { run_qemu(qemu, dir, line) }
    }

    /// Runs commands of `qemu-io` on the image.
    fn io(self, qemu: &Qemu, dir: &Path, file: &str, commands: &[&str]) -> Finished {
        let name = of(file, "one");
        if self == Self::Zebu {
            let mut words = with_objects(&format!("io --image-opts {name}"));
            words.extend(commands.iter().flat_map(|command| ["-c".to_owned(), (*command).to_owned()]));
            return zebu(dir, words);
        }
        qemu.io(dir, &format!("{} --image-opts", OBJECTS.join(" ")), &name, commands)
    }
}

/// Three MiB with zeroes in them, and with pieces that no cluster ends with.
fn plain() -> Vec<u8> {
    let mut plain = vec![0; 3 * MIB];
    Random::new(1).fill(&mut plain);
    plain[MIB / 2..MIB].fill(0);
    plain[2 * MIB + 700..2 * MIB + 900_000].fill(0);
    plain
}

/// Has `maker` make the image, and both read and change it.
fn try_cell(qemu: &Qemu, dir: &Path, cell: &Cell, maker: Side, plain: &[u8]) {
    let other = maker.other();
    let file = format!("made.{}", cell.format());
    let name = of(&file, "one");
    maker.run(qemu, dir, &cell.convert(&file)).ok();
    all_read(qemu, dir, &file, "one", plain);
    let has_snapshots = cell.format() == "qcow2";
    if has_snapshots {
        other.run(qemu, dir, &format!("snapshot --image-opts -c before {name}")).ok();
    }
    let mut changed = plain.to_vec();
    other.io(qemu, dir, &file, &["write -P 0x5a 5 69995", "write -z 1049576 2000"]).ok();
    changed[5..70_000].fill(0x5a);
    changed[MIB + 1000..MIB + 3000].fill(0);
    all_read(qemu, dir, &file, "one", &changed);
    maker.io(qemu, dir, &file, &["write -P 0x17 2097052 200", "write -P 0x33 600k 3000"]).ok();
    changed[2 * MIB - 100..2 * MIB + 100].fill(0x17);
    changed[600 << 10..(600 << 10) + 3000].fill(0x33);
    all_read(qemu, dir, &file, "one", &changed);
    if has_snapshots {
        for side in [maker, other] {
            side.run(qemu, dir, &format!("check --image-opts {name}")).ok();
            side.run(qemu, dir, &format!("convert -l before --image-opts {name} -O raw read.before")).ok();
            assert!(std::fs::read(dir.join("read.before")).unwrap() == plain, "{side:?}: the snapshot");
        }
        maker.run(qemu, dir, &format!("snapshot --image-opts -a before {name}")).ok();
        all_read(qemu, dir, &file, "one", plain);
    }
    std::fs::remove_file(dir.join(file)).unwrap();
}

/// Tries images that `maker` makes; all of them whose text has `ZEBU_CELLS` in it, and then tells what failed.
fn try_all(maker: Side, mut cells: Vec<Cell>) {
    let Some(qemu) = Qemu::find() else { return };
    let some = std::env::var("ZEBU_CELLS").unwrap_or_default();
    cells.retain(|cell| format!("{cell:?}").contains(&some));
    let scratch = Scratch::new("encryption-matrix");
    let plain = plain();
    std::fs::write(scratch.path().join("plain"), &plain).unwrap();
    let mut failed = String::new();
    let since = Instant::now();
    for (number, cell) in cells.iter().enumerate() {
        let tried = std::panic::catch_unwind(|| try_cell(&qemu, scratch.path(), cell, maker, &plain));
        if tried.is_err() {
            writeln!(failed, "{cell:?}").unwrap();
        }
        let seconds = since.elapsed().as_secs();
        eprintln!("{maker:?}: {} of {}, {seconds} s: {cell:?}: {}", number + 1, cells.len(), tried.is_ok());
    }
    assert!(failed.is_empty(), "made by {maker:?}:\n{failed}");
}

#[test]
fn images_of_zebu() {
    try_all(Side::Zebu, chosen().collect());
}

/// QEMU measures for seconds how fast it hashes whenever it makes a key: of a tenth, it makes every tenth image.
#[test]
fn images_of_qemu() {
    try_all(Side::Qemu, chosen().step_by(if tenth::is_whole() { 1 } else { 10 }).collect());
}

/// The matrix has no image twice, and each tenth of it every layout, cipher, key, mode and hash that ten images have.
#[test]
fn a_tenth_leaves_nothing_out() {
    let whole = whole();
    for (at, cell) in whole.iter().enumerate() {
        assert!(!whole[..at].contains(cell), "{cell:?} is there twice");
    }
    for tenth in 0..10 {
        let cells: Vec<&Cell> = whole.iter().skip(tenth).step_by(10).collect();
        for cell in &whole {
            for (index, part) in cell.parts().iter().enumerate() {
                let has_part = |other: &Cell| other.parts()[index] == *part;
                assert!(
                    whole.iter().filter(|other| has_part(other)).count() < 10
                        || cells.iter().any(|other| has_part(other)),
                    "tenth {tenth}, {cell:?}: {part}"
                );
            }
        }
    }
}

/// Images that QEMU does not make are not made. It refuses ciphers and hashes that do not fit. It aborts, at opening too, where the key
/// material is no multiple of a sector: keys of 192 bits in CBC mode. Such a disk of cryptsetup's is read.
#[test]
fn what_qemu_does_not_make_is_refused() {
    let Some(qemu) = Qemu::find() else { return };
    let scratch = Scratch::new("encryption-matrix");
    let dir = scratch.path();
    let mut refused: Vec<String> = [
        "cipher-alg=des,cipher-mode=cbc",
        "cipher-alg=3des,cipher-mode=cbc",
        "cipher-alg=cast5-128,cipher-mode=xts",
        "cipher-alg=sm4",
        "cipher-alg=aes-512",
        "cipher-alg=aes-256,cipher-mode=gcm",
        "cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha1",
        "cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha512",
        "ivgen-alg=random",
        "hash-alg=whirlpool",
    ]
    .map(str::to_owned)
    .to_vec();
    // QEMU measures its speed before it aborts.
    let aborting = CIPHERS.iter().enumerate().filter(|(number, _)| tenth::has(*number));
    for (_, cipher) in aborting {
        refused.push(format!("cipher-alg={cipher}-192,cipher-mode=cbc,ivgen-alg=plain64"));
        refused.push(format!("cipher-alg={cipher}-192,cipher-mode=cbc,ivgen-alg=essiv"));
    }
    for options in refused {
        for (format, prefix) in [("luks", ""), ("qcow2", "encrypt.")] {
            let named: Vec<String> = options.split(',').map(|option| format!("{prefix}{option}")).collect();
            let format_option = if format == "qcow2" { "encrypt.format=luks," } else { "" };
            let line = format!(
                "create -f {format} -o {format_option}{prefix}key-secret=one,{} out 1M",
                named.join(",")
            );
            let finished = run_zebu(dir, &line).exits(1);
            assert_eq!(finished.stderr.trim_end().lines().count(), 1, "{finished}");
            assert!(!dir.join("out").exists(), "{finished}");
            if format == "luks" || !options.contains("192") {
                let theirs = run_qemu(&qemu, dir, &line);
                assert_ne!(theirs.code, Some(0), "QEMU makes it: {theirs}");
                let _ = std::fs::remove_file(dir.join("out"));
            }
        }
    }
    std::fs::write(dir.join("key"), "first").unwrap();
    std::fs::File::create(dir.join("c.luks")).unwrap().set_len(4 << 20).unwrap();
    let cheap = "--pbkdf-force-iterations 1000 --key-file key";
    let cipher = "--cipher aes-cbc-plain64 --key-size 192";
    cryptsetup(dir, &format!("luksFormat -q --type luks1 {cipher} {cheap} c.luks"));
    Side::Zebu.io(&qemu, dir, "c.luks", &["write -P 7 1000 3000", "read -P 7 1000 3000"]).ok();
}
