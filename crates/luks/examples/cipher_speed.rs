//! The speed of a cipher alone, on one thread: `cipher_speed aes-xts-plain64 64 [SECTOR]` with the bytes of the key.

use std::time::{Duration, Instant};
use zebu_luks::{CipherSpec, SectorCipher};

/// Bytes that are encrypted at once, as by one piece of a large request.
const PIECE: usize = 128 << 10;
const LONG_ENOUGH: Duration = Duration::from_secs(1);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let name = arguments.first().map_or("aes-xts-plain64", String::as_str);
    let key_len: usize = arguments.get(1).map_or(Ok(64), |text| text.parse())?;
    let sector: u32 = arguments.get(2).map_or(Ok(512), |text| text.parse())?;
    let key: Vec<u8> = (0..key_len).map(|byte| byte as u8).collect();
    let cipher = SectorCipher::with_sector_size(CipherSpec::parse_joined(name, key_len)?, &key, sector)?;
    let mut data = vec![0x5a; PIECE];
    for (what, decrypts) in [("encrypted", false), ("decrypted", true)] {
        let (start, mut pieces) = (Instant::now(), 0u64);
        while start.elapsed() < LONG_ENOUGH {
            if decrypts {
                cipher.decrypt(pieces, &mut data)?;
            } else {
                cipher.encrypt(pieces, &mut data)?;
            }
            pieces += 1;
        }
        let bytes = pieces as f64 * PIECE as f64;
        println!("{:.1} MiB/s {what}", bytes / 1_048_576.0 / start.elapsed().as_secs_f64());
    }
    Ok(())
}
