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

/// A LUKS2 header, whole and its JSON alone: no checksum stands before the JSON.
///
/// # Errors
/// The input is used up.
pub fn luks2(u: &mut Unstructured<'_>) -> Result<()> {
    let bytes = u.bytes(u.len())?;
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
