//! Payloads that cryptsetup itself encrypts and decrypts: `cryptsetup reencrypt` works on plain files without the device mapper. It has AES
//! there; other ciphers it leaves to the kernel.

use std::path::Path;
use zebu_tests::encrypted::{cryptsetup, of, run_zebu, with_objects};
use zebu_tests::program::{required, run_in, zebu};
use zebu_tests::qemu::Qemu;
use zebu_tests::random::Random;
use zebu_tests::scratch::Scratch;

const FILE: &str = "disk.luks";
const MIB: usize = 1 << 20;
/// Bytes of known plain text.
const LEN: usize = 2 * MIB;
/// Bytes that cryptsetup is given for its header, of which it takes half.
const SPARE: usize = 32 * MIB;
/// Options of all calls.
const CHEAP: &str = "-q --disable-locks --key-file one --pbkdf pbkdf2 --pbkdf-force-iterations 1000";

/// Ciphers and sectors, in the words of cryptsetup.
const SECTORS: [&str; 10] = [
    "--cipher aes-xts-plain64 --key-size 512 --sector-size 512",
    "--cipher aes-xts-plain64 --key-size 512 --sector-size 4096",
    "--cipher aes-xts-plain64 --key-size 256 --sector-size 2048",
    "--cipher aes-xts-plain --key-size 256 --sector-size 512",
    "--cipher aes-cbc-essiv:sha256 --key-size 256 --sector-size 512",
    "--cipher aes-cbc-essiv:sha256 --key-size 128 --sector-size 4096",
    "--cipher aes-cbc-plain64 --key-size 256 --sector-size 1024",
    "--cipher aes-cbc-plain --key-size 192 --sector-size 512",
    "--cipher serpent-xts-plain64 --key-size 512 --sector-size 512",
    "--cipher twofish-xts-plain64 --key-size 256 --sector-size 4096",
];

/// Ciphers that need the kernel.
fn is_kernels(cipher: &str) -> bool {
    !cipher.contains(" aes-")
}

fn plain() -> Vec<u8> {
    let mut plain = vec![0; LEN];
    Random::new(5).fill(&mut plain);
    plain[MIB + 1000..MIB + 500_000].fill(0);
    plain
}

/// A directory with the passphrase and the plain text.
fn begin(plain: &[u8]) -> Option<Scratch> {
    Qemu::find()?;
    let scratch = Scratch::new("cryptsetup-payloads");
    std::fs::write(scratch.path().join("one"), "first").unwrap();
    std::fs::write(scratch.path().join("plain"), plain).unwrap();
    Some(scratch)
}

/// Requires that zebu reads these bytes first. Behind them may be what cryptsetup had no use for.
fn zebu_reads(dir: &Path, expected: &[u8]) {
    run_zebu(dir, &format!("convert --image-opts {} -O raw read", of(FILE, "one"))).ok();
    let read = std::fs::read(dir.join("read")).unwrap();
    assert!(read.len() >= expected.len() && read[..expected.len()] == *expected, "zebu reads other bytes");
}

/// Makes a container with cryptsetup, and has zebu fill it.
fn fill(dir: &Path, options: &str, len: usize) {
    std::fs::File::create(dir.join(FILE)).unwrap().set_len((16 * MIB + len) as u64).unwrap();
    cryptsetup(dir, &format!("luksFormat --type luks2 {CHEAP} {options} {FILE}"));
    let mut words = with_objects(&format!("io --image-opts {}", of(FILE, "one")));
    words.extend(["-c".to_owned(), format!("write -s plain 0 {len}")]);
    words.extend(["-c", "write -P 7 1000 5000", "-c", "write -z 70000 3"].map(str::to_owned));
    zebu(dir, words).ok();
}

/// Requires the plain text, with the changes of [`fill`].
fn filled(plain: &[u8]) -> Vec<u8> {
    let mut filled = plain.to_vec();
    filled[1000..6000].fill(7);
    filled[70_000..70_003].fill(0);
    filled
}

/// A file in plain text that cryptsetup encrypts where it is.
#[test]
fn zebu_reads_what_cryptsetup_encrypted() {
    let plain = plain();
    for sectors in SECTORS {
        let Some(scratch) = begin(&plain) else { return };
        let dir = scratch.path();
        let mut file = plain.clone();
        file.resize(LEN + SPARE, 0);
        std::fs::write(dir.join(FILE), &file).unwrap();
        let line =
            format!("reencrypt --encrypt --type luks2 --reduce-device-size 32M {CHEAP} {sectors} {FILE}");
        let finished = run_in(dir, &required("cryptsetup"), line.split_whitespace());
        if is_kernels(sectors) && finished.code != Some(0) {
            assert!(finished.stderr.contains("device-mapper"), "{finished}");
            eprintln!("skipped: cryptsetup has no {sectors} here");
            continue;
        }
        finished.ok();
        let bytes = std::fs::read(dir.join(FILE)).unwrap();
        assert!(bytes.chunks(512).all(|sector| *sector != plain[..512]), "{sectors}: plain text is left");
        zebu_reads(dir, &plain);
        let mut words = with_objects(&format!("io --image-opts {}", of(FILE, "one")));
        words.extend(["-c", "write -P 9 3000 9000"].map(str::to_owned));
        zebu(dir, words).ok();
        let mut changed = plain.clone();
        changed[3000..12_000].fill(9);
        zebu_reads(dir, &changed);
        // And back, by cryptsetup.
        let line = "reencrypt --decrypt --force-offline-reencrypt";
        cryptsetup(dir, &format!("{line} {CHEAP} --header taken {FILE}"));
        let decrypted = std::fs::read(dir.join(FILE)).unwrap();
        assert!(decrypted[..LEN] == changed, "{sectors}: cryptsetup reads other bytes");
    }
}

/// Data that zebu wrote into a container, which cryptsetup decrypts where it is. (Of LUKS1, cryptsetup does so with the device mapper only.)
#[test]
fn cryptsetup_decrypts_what_zebu_wrote() {
    let plain = plain();
    for sectors in SECTORS.into_iter().filter(|sectors| !is_kernels(sectors)) {
        let Some(scratch) = begin(&plain) else { return };
        let dir = scratch.path();
        fill(dir, sectors, LEN);
        zebu_reads(dir, &filled(&plain));
        let line = "reencrypt --decrypt --force-offline-reencrypt";
        cryptsetup(dir, &format!("{line} {CHEAP} --header taken {FILE}"));
        let decrypted = std::fs::read(dir.join(FILE)).unwrap();
        assert!(decrypted[..LEN] == filled(&plain), "{sectors}: cryptsetup reads other bytes");
    }
}

/// A container that cryptsetup encrypts anew, with another key, cipher and sector size.
#[test]
fn zebu_reads_what_cryptsetup_encrypted_anew() {
    let plain = plain();
    let pairs = [(0, 1), (1, 5), (4, 0), (6, 2)];
    for (before, after) in pairs.map(|(before, after)| (SECTORS[before], SECTORS[after])) {
        let Some(scratch) = begin(&plain) else { return };
        let dir = scratch.path();
        fill(dir, before, LEN);
        cryptsetup(dir, &format!("reencrypt --force-offline-reencrypt {CHEAP} {after} {FILE}"));
        zebu_reads(dir, &filled(&plain));
        let info = zebu(dir, ["info", FILE]).ok().stdout;
        assert!(!after.ends_with("4096") || info.contains("sector size: 4096"), "{info}");
    }
}

/// A container that is half encrypted anew is refused: it has two keys.
#[test]
fn a_change_of_keys_that_is_not_over_is_refused() {
    let plain = plain();
    let Some(scratch) = begin(&plain) else { return };
    let dir = scratch.path();
    fill(dir, SECTORS[0], LEN);
    cryptsetup(dir, &format!("reencrypt --init-only --force-offline-reencrypt {CHEAP} {FILE}"));
    let before = std::fs::read(dir.join(FILE)).unwrap();
    for line in ["convert --image-opts NAME -O raw out", "io --image-opts NAME -c write"] {
        let finished = run_zebu(dir, &line.replace("NAME", &of(FILE, "one"))).exits(1);
        assert!(finished.stderr.contains("reencrypt"), "{finished}");
        assert!(!dir.join("out").exists() && std::fs::read(dir.join(FILE)).unwrap() == before);
    }
}
