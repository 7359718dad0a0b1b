//! Headers that cryptsetup makes are opened here, and those made here by cryptsetup. It is never asked for a device mapper.

use crate::support::{Scratch, apply, cheap, open_luks1, read};
use std::path::Path;
use zebu_luks::{
    BlockCipher, CipherSpec, HashName, HeaderCopy, Kdf, LastKey, Limits, Luks1Header, Luks2Header, LuksError,
    MasterKey, Mode, SystemRandom,
};

/// The master key as cryptsetup gives it out.
fn dumped_key(scratch: &Scratch, device: &Path) -> Vec<u8> {
    let key = scratch.path("volume-key");
    let _ = std::fs::remove_file(&key);
    let device = device.to_str().unwrap();
    let args = [
        "luksDump",
        "-q",
        "--dump-volume-key",
        "--volume-key-file",
        "volume-key",
        "--key-file",
        "one",
        device,
    ];
    scratch.run("cryptsetup", &args);
    read(&key)
}

fn format(scratch: &Scratch, name: &str, options: &[&str]) -> std::path::PathBuf {
    let device = scratch.device(name);
    let mut args = vec!["luksFormat", "-q"];
    args.extend(options);
    args.extend([device.to_str().unwrap(), "one"]);
    scratch.run("cryptsetup", &args);
    device
}

fn open_luks2(bytes: &[u8], passphrase: &[u8]) -> Option<(u32, MasterKey)> {
    let header = Luks2Header::parse(bytes, &Limits::default()).unwrap();
    let metadata = header.metadata();
    metadata.slots().find_map(|slot| {
        let range = slot.material();
        let material = &bytes[range.start as usize..range.end as usize];
        let key = metadata.unlock(slot.number(), passphrase, material).unwrap();
        key.map(|key| (slot.number(), key))
    })
}

fn fits(scratch: &Scratch, device: &Path, passphrase: &str) -> bool {
    let device = device.to_str().unwrap();
    scratch.ask("cryptsetup", &["open", "--test-passphrase", "--key-file", passphrase, device]).0
}

#[test]
fn luks1_of_cryptsetup() {
    let Some(scratch) = Scratch::new() else { return };
    for (cipher, key_bits, hash) in [
        ("aes-xts-plain64", "512", "sha256"),
        ("aes-xts-plain64", "256", "sha512"),
        ("aes-cbc-essiv:sha256", "128", "sha1"),
        ("aes-cbc-plain64", "192", "sha256"),
    ] {
        let options = [
            "--type",
            "luks1",
            "--cipher",
            cipher,
            "--key-size",
            key_bits,
            "--hash",
            hash,
            "--pbkdf-force-iterations",
            "1000",
        ];
        let device = format(&scratch, "luks1", &options);
        let add =
            ["luksAddKey", "-q", "--key-file", "one", "--key-slot", "5", "--pbkdf-force-iterations", "1000"];
        scratch.run("cryptsetup", &[&add[..], &[device.to_str().unwrap(), "two"]].concat());
        let bytes = read(&device);
        let (header, key, slot) = open_luks1(&bytes, b"one").unwrap();
        assert_eq!(slot, 0);
        assert_eq!(header.cipher().to_string(), cipher);
        assert_eq!(key.bytes(), dumped_key(&scratch, &device), "{cipher}");
        assert_eq!(header.encode(), bytes[..592], "the header is written back byte for byte");
        let (_, again, slot) = open_luks1(&bytes, b"two").unwrap();
        assert_eq!((again.bytes(), slot), (key.bytes(), 5));
        assert!(open_luks1(&bytes, b"three").is_none());
    }
}

#[test]
fn luks2_of_cryptsetup() {
    let Some(scratch) = Scratch::new() else { return };
    let argon = |kind| {
        let cost = ["--pbkdf-force-iterations", "4", "--pbkdf-memory", "64", "--pbkdf-parallel", "2"];
        [&["--sector-size", "512", "--pbkdf", kind][..], &cost].concat()
    };
    let pbkdf2 = |hash| {
        let cost = ["--pbkdf-force-iterations", "1000", "--hash", hash];
        [&["--sector-size", "4096", "--pbkdf", "pbkdf2"][..], &cost].concat()
    };
    for options in [argon("argon2id"), argon("argon2i"), pbkdf2("sha512"), pbkdf2("sha1")] {
        let device = format(&scratch, "luks2", &[&["--type", "luks2"], &options[..]].concat());
        let add = [
            "luksAddKey",
            "-q",
            "--key-file",
            "one",
            "--pbkdf",
            "argon2id",
            "--pbkdf-force-iterations",
            "4",
            "--pbkdf-memory",
            "32",
        ];
        scratch.run("cryptsetup", &[&add[..], &[device.to_str().unwrap(), "two"]].concat());
        let bytes = read(&device);
        let (slot, key) = open_luks2(&bytes, b"one").unwrap();
        assert_eq!((slot, key.bytes()), (0, &dumped_key(&scratch, &device)[..]), "{options:?}");
        let (slot, again) = open_luks2(&bytes, b"two").unwrap();
        assert_eq!((slot, again.bytes()), (1, key.bytes()));
        assert!(open_luks2(&bytes, b"three").is_none());

        let header = Luks2Header::parse(&bytes, &Limits::default()).unwrap();
        assert_eq!(header.metadata().segment().offset, 16 << 20);
        let is_large = options.contains(&"4096");
        assert_eq!(header.metadata().segment().sector_size, if is_large { 4096 } else { 512 });
        assert_eq!(header.metadata().sector_cipher(&key).unwrap().spec(), CipherSpec::AES_256_XTS);
        assert_eq!(is_large, matches!(header.metadata().slots().next().unwrap().kdf(), Kdf::Pbkdf2 { .. }));
    }
}

#[test]
fn the_second_copy_of_a_luks2_header_stands_in_for_the_first() {
    let Some(scratch) = Scratch::new() else { return };
    let options = ["--type", "luks2", "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000"];
    let device = format(&scratch, "luks2", &options);
    let good = read(&device);
    let header = Luks2Header::parse(&good, &Limits::default()).unwrap();
    assert_eq!((header.copy(), header.copy_len()), (HeaderCopy::First, 16384));
    // The magic number, the length, the checksum and the JSON of the first copy.
    for at in [0, 9, 450, 4096 + 30] {
        let mut bytes = good.clone();
        bytes[at] ^= 0x55;
        let second = Luks2Header::parse(&bytes, &Limits::default()).unwrap();
        assert_eq!((second.copy(), second.uuid()), (HeaderCopy::Second, header.uuid()), "byte {at}");
        assert!(open_luks2(&bytes, b"one").is_some());
        bytes[16384 + 4096 + 30] ^= 0x55;
        let error = Luks2Header::parse(&bytes, &Limits::default()).unwrap_err();
        assert!(
            matches!(error, LuksError::BothCopiesDamaged { .. } | LuksError::NotLuks),
            "byte {at}: {error}"
        );
    }
}

#[test]
fn cryptsetup_opens_what_is_made_and_changed_here() {
    let Some(scratch) = Scratch::new() else { return };
    let cbc = CipherSpec::new(BlockCipher::Aes, Mode::CbcEssivSha256, 24).unwrap();
    for (cipher, hash) in [(CipherSpec::AES_256_XTS, HashName::Sha256), (cbc, HashName::Sha1)] {
        let (mut header, key, mut bytes) =
            Luks1Header::create(&cheap(cipher, hash), b"one", &mut SystemRandom).unwrap();
        bytes.resize(20 << 20, 0);
        let device = scratch.path("made");
        std::fs::write(&device, &bytes).unwrap();
        assert!(fits(&scratch, &device, "one") && !fits(&scratch, &device, "two"));
        assert_eq!(dumped_key(&scratch, &device), key.bytes());

        apply(&mut bytes, &header.add_key(Some(6), &key, b"two", 1000, &mut SystemRandom).unwrap());
        std::fs::write(&device, &bytes).unwrap();
        assert!(fits(&scratch, &device, "one") && fits(&scratch, &device, "two"));

        apply(&mut bytes, &header.remove_key(0, LastKey::Keep, &mut SystemRandom).unwrap());
        std::fs::write(&device, &bytes).unwrap();
        assert!(!fits(&scratch, &device, "one") && fits(&scratch, &device, "two"));
    }
}
