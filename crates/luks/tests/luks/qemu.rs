//! Images that QEMU makes are read here, and those made here by QEMU, byte for byte.

use crate::support::{Scratch, apply, cheap, open_luks1, random_bytes, read};
use zebu_luks::{BlockCipher, CipherSpec, HashName, LastKey, Luks1Header, Mode, SystemRandom, legacy_aes};

const LEN: usize = 1 << 20;
const SECRETS: [&str; 4] = ["--object", "secret,id=one,data=one", "--object", "secret,id=two,data=two"];

/// QEMU 10.0 aborts when it makes AES-192 in CBC mode, whose key material is no
/// whole number of sectors; cryptsetup makes it.
const CIPHERS: [(BlockCipher, Mode, usize, HashName); 10] = [
    (BlockCipher::Aes, Mode::XtsPlain64, 64, HashName::Sha256),
    (BlockCipher::Aes, Mode::XtsPlain64, 32, HashName::Sha1),
    (BlockCipher::Aes, Mode::XtsEssivSha256, 64, HashName::Sha256),
    (BlockCipher::Serpent, Mode::XtsEssivSha256, 32, HashName::Sha1),
    (BlockCipher::Aes, Mode::CbcPlain64, 32, HashName::Sha512),
    (BlockCipher::Aes, Mode::CbcEssivSha256, 16, HashName::Sha256),
    (BlockCipher::Aes, Mode::CbcPlain, 32, HashName::Sha256),
    (BlockCipher::Serpent, Mode::XtsPlain64, 64, HashName::Sha256),
    (BlockCipher::Serpent, Mode::CbcEssivSha256, 16, HashName::Sha256),
    (BlockCipher::Twofish, Mode::XtsPlain64, 64, HashName::Sha256),
];

fn of(secret: &str, file: &str) -> String {
    format!("driver=luks,key-secret={secret},file.driver=file,file.filename={file}")
}

#[test]
fn payloads_each_way() {
    let Some(scratch) = Scratch::new() else { return };
    let plain = random_bytes(LEN);
    std::fs::write(scratch.path("plain"), &plain).unwrap();
    for (cipher, mode, key_len, hash) in CIPHERS {
        let spec = CipherSpec::new(cipher, mode, key_len).unwrap();
        let (header, key, mut disk) =
            Luks1Header::create(&cheap(spec, hash), b"two", &mut SystemRandom).unwrap();
        assert_eq!(disk.len() as u64, header.payload_offset());
        let at = disk.len();
        let cipher = key.sector_cipher(spec).unwrap();
        disk.extend(&plain);
        cipher.encrypt(0, &mut disk[at..]).unwrap();
        std::fs::write(scratch.path("disk"), &disk).unwrap();
        let args = ["convert", "--image-opts", &of("two", "disk"), "-O", "raw", "read"];
        scratch.run("qemu-img", &[&args[..1], &SECRETS, &args[1..]].concat());
        assert!(read(&scratch.path("read")) == plain, "{spec}: QEMU reads another payload");

        disk[at..].fill(0);
        std::fs::write(scratch.path("disk"), &disk).unwrap();
        let args = ["convert", "-n", "-f", "raw", "plain", "--target-image-opts", &of("two", "disk")];
        scratch.run("qemu-img", &[&args[..1], &SECRETS, &args[1..]].concat());
        let mut disk = read(&scratch.path("disk"));
        cipher.decrypt(0, &mut disk[at..]).unwrap();
        assert!(disk[at..] == plain, "{spec}: QEMU wrote another payload");
    }
}

/// QEMU measures for seconds how fast it hashes whenever it makes a key, whatever `iter-time` says.
#[test]
fn headers_of_qemu() {
    let Some(scratch) = Scratch::new() else { return };
    for (options, name, key_len, hash) in [
        ("cipher-alg=aes-256", "aes-xts-plain64", 64, HashName::Sha256),
        (
            "cipher-alg=aes-128,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256,hash-alg=sha1",
            "aes-cbc-essiv:sha256",
            16,
            HashName::Sha1,
        ),
    ] {
        let options = format!("key-secret=one,iter-time=10,{options}");
        let create = ["create", "-f", "luks", "-o", &options, "new", "1M"];
        scratch.run("qemu-img", &[&create[..3], &SECRETS, &create[3..]].concat());
        let theirs = read(&scratch.path("new"));
        let (header, ..) = open_luks1(&theirs, b"one").unwrap();
        let spec = CipherSpec::parse_joined(name, key_len).unwrap();
        assert_eq!((header.cipher(), header.hash()), (spec, hash));
        assert_eq!(header.encode(), theirs[..592], "{name}: the header is written back byte for byte");
        assert_eq!(cheap(spec, hash).header_len(), header.payload_offset(), "{name}: ours is as long");
    }
}

#[test]
fn key_slots_changed_by_one_are_opened_by_the_other() {
    let Some(scratch) = Scratch::new() else { return };
    let create = ["create", "-f", "luks", "-o", "key-secret=one,iter-time=10", "disk", "1M"];
    scratch.run("qemu-img", &[&create[..3], &SECRETS, &create[3..]].concat());
    let amend = [
        "amend",
        "-o",
        "state=active,new-secret=two,keyslot=7,iter-time=10",
        "--image-opts",
        &of("one", "disk"),
    ];
    scratch.run("qemu-img", &[&amend[..1], &SECRETS, &amend[1..]].concat());

    let mut bytes = read(&scratch.path("disk"));
    let (mut header, key, slot) = open_luks1(&bytes, b"two").unwrap();
    assert_eq!(slot, 7);
    apply(&mut bytes, &header.remove_key(0, LastKey::Keep, &mut SystemRandom).unwrap());
    std::fs::write(scratch.path("disk"), &bytes).unwrap();
    let opens = |secret: &str| {
        let read = ["-r", "-c", "read 0 4k", "--image-opts", &of(secret, "disk")];
        scratch.ask("qemu-io", &[&SECRETS[..], &read].concat()).0
    };
    assert!(opens("two") && !opens("one"));

    apply(&mut bytes, &header.add_key(None, &key, b"one", 1000, &mut SystemRandom).unwrap());
    std::fs::write(scratch.path("disk"), &bytes).unwrap();
    assert!(opens("two") && opens("one"));
}

/// A qcow2 image with one written cluster at guest offset 5 MiB, its plain bytes, and the host offset of the cluster: what
/// neither header nor table is, so the last one.
fn qcow2(scratch: &Scratch, options: &str) -> (Vec<u8>, Vec<u8>) {
    let create = ["create", "-f", "qcow2", "-o", options, "image", "8M"];
    scratch.run("qemu-img", &[&create[..3], &SECRETS, &create[3..]].concat());
    let image = "driver=qcow2,encrypt.key-secret=one,file.driver=file,file.filename=image";
    let write = ["-c", "write -P 0x5a 5M 64k", "--image-opts", image];
    scratch.run("qemu-io", &[&SECRETS[..], &write].concat());
    (read(&scratch.path("image")), vec![0x5a; 65536])
}

#[test]
fn in_qcow2_luks_counts_the_sectors_of_the_host() {
    let Some(scratch) = Scratch::new() else { return };
    let (image, plain) = qcow2(&scratch, "encrypt.format=luks,encrypt.key-secret=one,encrypt.iter-time=10");
    let at = image.chunks(65536).position(|cluster| cluster.starts_with(b"LUKS\xba\xbe")).unwrap() * 65536;
    let (header, key, _) = open_luks1(&image[at..], b"one").unwrap();
    let cipher = key.sector_cipher(header.cipher()).unwrap();
    let found = image.chunks(65536).enumerate().filter(|(index, cluster)| {
        let mut cluster = cluster.to_vec();
        cluster.len() == 65536
            && cipher.decrypt(*index as u64 * 128, &mut cluster).is_ok()
            && cluster == plain
    });
    assert_eq!(found.count(), 1, "one cluster is the written one, by its host offset");
}

#[test]
fn the_old_scheme_counts_the_sectors_of_the_guest() {
    let Some(scratch) = Scratch::new() else { return };
    let (image, plain) = qcow2(&scratch, "encrypt.format=aes,encrypt.key-secret=one");
    let cipher = legacy_aes(b"one").unwrap();
    let found = image.chunks(65536).filter(|cluster| {
        let mut cluster = cluster.to_vec();
        cluster.len() == 65536 && cipher.decrypt((5 << 20) / 512, &mut cluster).is_ok() && cluster == plain
    });
    assert_eq!(found.count(), 1, "one cluster is the written one, by its guest offset");
}
