//! Headers of LUKS, on any bytes.

use arbitrary::{Result, Unstructured};
use zebu_luks::{
    CipherSpec, HashName, Limits, Luks1Header, Luks1Options, Luks2Header, Luks2Metadata, LuksError, Random,
};

/// Keys are tried too, so they may cost little.
fn limits() -> Limits {
    Limits::default().pbkdf2_iterations(50).argon2_memory(64).argon2_work(256)
}

/// The same bytes each time, so that an input alone replays a fault.
struct Counting(u8);

impl Random for Counting {
    fn fill(&mut self, bytes: &mut [u8]) -> std::result::Result<(), LuksError> {
        for byte in bytes {
            *byte = self.0;
            self.0 = self.0.wrapping_mul(5).wrapping_add(3);
        }
        Ok(())
    }
}

/// A good device, made once.
fn good() -> &'static [u8] {
    static GOOD: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    GOOD.get_or_init(|| {
        let options = Luks1Options::new(CipherSpec::AES_256_XTS, HashName::Sha256, 1);
        Luks1Header::create(&options, b"one", &mut Counting(1)).expect("a good device").2
    })
}

/// A LUKS1 header: what is taken is written back the same, its areas lie between header and payload, and keys can be tried.
///
/// # Errors
/// The input is used up.
pub fn luks1(u: &mut Unstructured<'_>) -> Result<()> {
    let mut header = good()[..592].to_vec();
    for _ in 0..u.int_in_range(0..=8)? {
        let at = u.choose_index(header.len())?;
        header[at] = u.arbitrary()?;
    }
    let Ok(header) = Luks1Header::parse(&header, &limits()) else { return Ok(()) };
    let again = Luks1Header::parse(&header.encode(), &limits()).expect("what was taken is taken again");
    assert_eq!(again, header);
    for slot in header.active_slots() {
        let range = header.material(slot).expect("an active slot");
        assert!(range.start >= 1024 && range.end <= header.payload_offset());
        let material = vec![7; (range.end - range.start) as usize];
        let _ = header.unlock(slot, b"one", &material);
    }
    Ok(())
}

/// Metadata of a good LUKS2 header, with cheap keys.
const METADATA: &str = r#"{"keyslots":{
"0":{"type":"luks2","key_size":64,"af":{"type":"luks1","stripes":4000,"hash":"sha256"},
"area":{"type":"raw","offset":"32768","size":"258048","encryption":"aes-xts-plain64","key_size":64},
"kdf":{"type":"argon2id","time":1,"memory":32,"cpus":1,"salt":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}},
"1":{"type":"luks2","key_size":64,"priority":2,"af":{"type":"luks1","stripes":7,"hash":"sha512"},
"area":{"type":"raw","offset":"290816","size":"258048","encryption":"serpent-xts-plain64","key_size":64},
"kdf":{"type":"pbkdf2","hash":"sha256","iterations":2,"salt":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}}},
"tokens":{},"segments":{"0":{"type":"crypt","offset":"1048576","size":"dynamic","iv_tweak":"0",
"encryption":"aes-xts-plain64","sector_size":512}},
"digests":{"0":{"type":"pbkdf2","keyslots":["0","1"],"segments":["0"],"hash":"sha256","iterations":2,
"salt":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=","digest":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}},
"config":{"json_size":"12288","keyslots_size":"1015808"}}"#;

/// Numbers at the edges of what fields hold.
const EDGES: [&str; 10] = [
    "0",
    "1",
    "511",
    "4096",
    "65537",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "99999999999999999999",
];

/// Good metadata with up to 6 changes: a number becomes another one, or a byte any byte.
fn changed_metadata(u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    let mut text = METADATA.as_bytes().to_vec();
    for _ in 0..u.int_in_range(0..=6)? {
        if u.ratio(1, 3)? {
            let at = u.choose_index(text.len())?;
            text[at] = u.arbitrary()?;
            continue;
        }
        let is_first = |at: usize| text[at].is_ascii_digit() && (at == 0 || !text[at - 1].is_ascii_digit());
        let numbers: Vec<usize> = (0..text.len()).filter(|at| is_first(*at)).collect();
        if numbers.is_empty() {
            continue;
        }
        let start = *u.choose(&numbers)?;
        let len = text[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let number = if u.arbitrary()? {
            (*u.choose(&EDGES)?).to_owned()
        } else {
            u.int_in_range(0..=1u64 << 21)?.to_string()
        };
        text.splice(start..start + len, number.bytes());
    }
    Ok(text)
}

/// A LUKS2 header, whole and its JSON alone: no checksum stands before the JSON.
///
/// # Errors
/// The input is used up.
pub fn luks2(u: &mut Unstructured<'_>) -> Result<()> {
    let changed = if u.ratio(3, 4)? { changed_metadata(u)? } else { Vec::new() };
    let bytes = if changed.is_empty() { u.bytes(u.len())? } else { &changed };
    let _ = Luks2Header::parse(bytes, &limits());
    let Ok(metadata) = Luks2Metadata::parse(bytes, 16384, &limits()) else { return Ok(()) };
    for slot in metadata.slots() {
        let range = slot.material();
        assert!(range.start >= 32768 && range.end <= metadata.segment().offset);
        let material = vec![7; (range.end - range.start) as usize];
        let _ = metadata.unlock(slot.number(), b"one", &material);
    }
    Ok(())
}
