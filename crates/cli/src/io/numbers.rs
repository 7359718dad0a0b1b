//! Numbers in commands, and what is said of wrong ones.

use zebu_disks::size::{SizeError, parse_size};

/// Most bytes of one request: QEMU's limit, 2^31 less a sector and a bit.
pub const MAX_REQUEST: u64 = 2_147_483_136;

/// An offset or a length, below 2^63.
pub fn offset(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        Ok(bytes) if i64::try_from(bytes).is_ok() => Ok(bytes),
        Ok(_) | Err(SizeError::TooLarge) => Err(format!("Parsing error: argument too large -- {text}")),
        Err(SizeError::Malformed) => {
            Err(format!("Parsing error: non-numeric argument, or extraneous/unrecognized suffix -- {text}"))
        }
    }
}

/// A byte to fill with or to look for; decimal, hexadecimal with `0x`, octal with `0`.
pub fn pattern(text: &str) -> Result<u8, String> {
    let number = if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        u8::from_str_radix(hex, 16)
    } else if text.len() > 1 && text.starts_with('0') {
        u8::from_str_radix(text, 8)
    } else {
        text.parse()
    };
    number.map_err(|_| format!("{text} is not a valid pattern byte"))
}

/// The lengths of a vectored request, together at most [`MAX_REQUEST`].
pub fn lengths(texts: &[&str]) -> Result<Vec<usize>, String> {
    let mut total = 0;
    texts
        .iter()
        .map(|text| {
            let bytes = offset(text)?;
            if bytes > MAX_REQUEST {
                return Err(format!("Argument '{text}' exceeds maximum size {MAX_REQUEST}"));
            }
            total += bytes;
            if total > MAX_REQUEST {
                return Err(format!("The total number of bytes exceed the maximum size {MAX_REQUEST}"));
            }
            Ok(bytes as usize)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_bytes() {
        assert_eq!(pattern("0xab"), Ok(0xab));
        assert_eq!(pattern("205"), Ok(205));
        assert_eq!(pattern("017"), Ok(15));
        assert_eq!(pattern("0"), Ok(0));
        for text in ["256", "-1", "x", "", "08"] {
            assert_eq!(pattern(text), Err(format!("{text} is not a valid pattern byte")));
        }
    }

    #[test]
    fn offsets_end_below_two_to_the_63() {
        assert_eq!(offset("1.5k"), Ok(1536));
        assert!(offset("8E").unwrap_err().starts_with("Parsing error: argument too large"));
        assert!(offset("-1").unwrap_err().ends_with("-- -1"));
        assert!(offset("1x").unwrap_err().starts_with("Parsing error: non-numeric"));
    }

    #[test]
    fn vectors_have_a_limit_together() {
        assert_eq!(lengths(&["4k", "16"]), Ok(vec![4096, 16]));
        assert!(lengths(&["3G"]).unwrap_err().starts_with("Argument '3G'"));
        assert!(lengths(&["2000M", "100M"]).is_err());
    }
}
