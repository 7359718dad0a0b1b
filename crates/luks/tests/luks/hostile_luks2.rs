//! Metadata of LUKS2 that lies.

use proptest::prelude::*;
use zebu_luks::{Limits, Luks2Header, Luks2Metadata};

const GOOD: &str = r#"{"keyslots":{
"0":{"type":"luks2","key_size":64,"af":{"type":"luks1","stripes":4000,"hash":"sha256"},
"area":{"type":"raw","offset":"32768","size":"258048","encryption":"aes-xts-plain64","key_size":64},
"kdf":{"type":"argon2id","time":4,"memory":1048576,"cpus":4,"salt":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}},
"1":{"type":"luks2","key_size":64,"priority":2,"af":{"type":"luks1","stripes":4000,"hash":"sha512"},
"area":{"type":"raw","offset":"290816","size":"258048","encryption":"serpent-xts-plain64","key_size":64},
"kdf":{"type":"pbkdf2","hash":"sha256","iterations":1000,"salt":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}}},
"tokens":{},"segments":{"0":{"type":"crypt","offset":"16777216","size":"dynamic","iv_tweak":"0",
"encryption":"aes-xts-plain64","sector_size":512}},
"digests":{"0":{"type":"pbkdf2","keyslots":["0","1"],"segments":["0"],"hash":"sha256","iterations":1000,
"salt":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=","digest":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}},
"config":{"json_size":"12288","keyslots_size":"16744448"}}"#;

fn parse(json: &str, limits: &Limits) -> Result<Luks2Metadata, zebu_luks::LuksError> {
    let mut area = json.as_bytes().to_vec();
    area.resize(12288, 0);
    Luks2Metadata::parse(&area, 16384, limits)
}

#[test]
fn the_preferred_slot_comes_first() {
    let metadata = parse(GOOD, &Limits::default()).unwrap();
    assert_eq!(metadata.slots().map(|slot| slot.number()).collect::<Vec<_>>(), [1, 0]);
}

#[test]
fn each_lie_is_named_by_its_path() {
    for (from, to, words) in [
        ("{\"keyslots\"", "[\"keyslots\"", "field json"),
        (
            "\"memory\":1048576",
            "\"memory\":2097152",
            "keyslots.0.kdf.memory (KiB) is 2097152, more than the limit",
        ),
        ("\"time\":4,", "\"time\":4000000000,", "keyslots.0.kdf.time"),
        ("\"time\":4,", "\"time\":0,", "keyslots.0.kdf"),
        ("\"time\":4,", "", "keyslots.0.kdf.time: it is missing"),
        ("\"cpus\":4", "\"cpus\":99999999", "keyslots.0.kdf"),
        ("\"cpus\":4", "\"cpus\":4294967296", "keyslots.0.kdf.cpus"),
        ("argon2id", "scrypt", "key derivation \"scrypt\""),
        (
            "\"iterations\":1000,\"salt\":\"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\"}}}",
            "\"iterations\":9999999999,\"salt\":\"\"}}}",
            "keyslots.1.kdf.iterations is 9999999999",
        ),
        ("\"stripes\":4000", "\"stripes\":4000000000", "keyslots.0.af.stripes"),
        ("\"stripes\":4000", "\"stripes\":0", "keyslots.0.af.stripes"),
        ("\"size\":\"258048\"", "\"size\":\"4096\"", "keyslots.0.area.size"),
        (
            "\"offset\":\"32768\"",
            "\"offset\":\"4096\"",
            "keyslots.0.area.offset: 4096 lies inside the header",
        ),
        ("\"offset\":\"32768\"", "\"offset\":\"18446744073709551615\"", "keyslots.0.area.size"),
        (
            "\"offset\":\"290816\"",
            "\"offset\":\"40960\"",
            "keyslots.1.area.offset: the area overlaps that of key slot 0",
        ),
        ("\"offset\":\"290816\"", "\"offset\":\"16777216\"", "after the data's begin"),
        ("\"offset\":\"16777216\"", "\"offset\":\"512\"", "segments.offset: 512 lies inside the header"),
        ("\"offset\":\"16777216\"", "\"offset\":\"16777217\"", "segments.0.offset"),
        ("\"offset\":\"16777216\"", "\"offset\":\"-1\"", "segments.0.offset"),
        ("\"type\":\"crypt\"", "\"type\":\"linear\"", "segment type \"linear\""),
        ("\"sector_size\":512", "\"sector_size\":513", "segments.0.sector_size"),
        ("\"sector_size\":512", "\"sector_size\":512,\"integrity\":{}", "integrity"),
        ("\"sector_size\":512", "\"sector_size\":512,\"flags\":[\"in-reencryption\"]", "in-reencryption"),
        ("\"segments\":[\"0\"]", "\"segments\":[]", "digests: the segment has no digest"),
        (
            "\"segments\":{",
            "\"segments\":{\"1\":{\"type\":\"crypt\",\"offset\":\"0\",\"size\":\"0\"},",
            "2 segments",
        ),
        ("\"keyslots\":[\"0\",\"1\"]", "\"keyslots\":[\"0\",\"77\"]", "77"),
        ("\"priority\":2", "\"priority\":3", "keyslots.1.priority"),
        ("\"key_size\":64,\"priority\"", "\"key_size\":99,\"priority\"", "keyslots.1.key_size"),
        (
            "\"config\":{",
            "\"config\":{\"requirements\":{\"mandatory\":[\"online-reencrypt-v2\"]},",
            "requirement \"online-reencrypt-v2\"",
        ),
    ] {
        let json = GOOD.replacen(from, to, 1);
        assert_ne!(json, GOOD, "{from}");
        let error = match parse(&json, &Limits::default()) {
            Err(error) => error.to_string(),
            // The other slot can be tried.
            Ok(metadata) => {
                assert_eq!(metadata.slots().count(), 1, "{to}");
                metadata.unusable_slots().first().expect(to).reason.clone()
            }
        };
        assert!(error.contains(words), "{to}: {error}");
    }
}

#[test]
fn a_limit_of_memory_can_be_lifted() {
    let json = GOOD.replacen("\"memory\":1048576", "\"memory\":2097152", 1);
    let bounded = parse(&json, &Limits::default()).unwrap();
    assert!(bounded.unusable_slots()[0].is_over_limit);
    assert_eq!(bounded.slots().map(|slot| slot.number()).collect::<Vec<_>>(), [1]);
    let lifted = parse(&json, &Limits::default().argon2_memory(4 << 20)).unwrap();
    assert_eq!((lifted.slots().count(), lifted.unusable_slots().len()), (2, 0));
}

#[test]
fn depth_and_number_are_limited() {
    let deep = format!("{{\"tokens\":{}", "[".repeat(12000));
    assert!(parse(&deep, &Limits::default()).unwrap_err().to_string().contains("json"));
    let slots: Vec<String> = (0..40).map(|slot| format!("\"{slot}\":{{\"type\":\"reencrypt\"}}")).collect();
    let many = GOOD.replacen("\"keyslots\":{", &format!("\"keyslots\":{{{},", slots.join(",")), 1);
    assert!(parse(&many, &Limits::default()).unwrap_err().to_string().contains("keyslots is"));
}

proptest! {
    #[test]
    fn any_bytes_are_an_answer(changes in prop::collection::vec((0..GOOD.len(), 32u8..127), 1..4)) {
        let mut json = GOOD.as_bytes().to_vec();
        for (at, byte) in changes {
            json[at] = byte;
        }
        if let Ok(metadata) = Luks2Metadata::parse(&json, 16384, &Limits::default()) {
            for slot in metadata.slots() {
                let material = slot.material();
                prop_assert!(material.start >= 32768 && material.end <= metadata.segment().offset);
            }
        }
    }

    #[test]
    fn any_binary_part_is_an_answer(start in prop::collection::vec(any::<u8>(), 0..600), len in 0usize..40000) {
        let mut bytes = start;
        bytes.resize(len, 0);
        let _ = Luks2Header::parse(&bytes, &Limits::default());
        if bytes.len() > 264 {
            bytes[..16].copy_from_slice(b"LUKS\xba\xbe\0\x02\0\0\0\0\0\0\x40\0");
            bytes[256..264].fill(0);
            let _ = Luks2Header::parse(&bytes, &Limits::default());
        }
    }
}
