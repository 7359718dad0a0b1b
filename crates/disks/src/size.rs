//! Sizes on the command line: decimal, optional fraction, suffix in powers of 1024, as qemu-img takes them.

/// Why a text is not a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SizeError {
    /// Not a number, or a suffix that does not exist.
    Malformed,
    /// A number that does not fit (2^64 and more, or negative).
    TooLarge,
}

impl std::fmt::Display for SizeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            SizeError::Malformed => "expected a number of bytes, with an optional suffix k, M, G, T, P or E",
            SizeError::TooLarge => "the size must be below 2^64 and not negative",
        })
    }
}

impl std::error::Error for SizeError {}

/// Bytes of a text such as `64k`, `1.5G`, `4096`, `10b`, `0x200`.
///
/// Suffixes `b k K M G T P E` (either case) multiply by powers of 1024. A fraction needs a suffix other than `b`
/// (there is no half byte) and is rounded down to whole bytes. Hexadecimal numbers take neither.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let text = text.trim_start();
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        if hex.is_empty() || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(SizeError::Malformed);
        }
        return u64::from_str_radix(hex, 16).map_err(|_| SizeError::TooLarge);
    }
    let (negative, digits) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let whole_len = digits.bytes().take_while(u8::is_ascii_digit).count();
    let (whole_text, rest) = digits.split_at(whole_len);
    let (fraction_text, suffix) = match rest.strip_prefix('.') {
        Some(after) => after.split_at(after.bytes().take_while(u8::is_ascii_digit).count()),
        None => ("", rest),
    };
    if whole_text.is_empty() && fraction_text.is_empty() {
        return Err(SizeError::Malformed);
    }
    let shift = match suffix {
        "" | "b" | "B" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        "p" | "P" => 50,
        "e" | "E" => 60,
        _ => return Err(SizeError::Malformed),
    };
    if negative {
        return Err(SizeError::TooLarge);
    }
    let whole: u64 =
        if whole_text.is_empty() { 0 } else { whole_text.parse().map_err(|_| SizeError::TooLarge)? };
    let base = whole.checked_mul(1 << shift).ok_or(SizeError::TooLarge)?;
    if fraction_text.bytes().any(|b| b != b'0') && shift == 0 {
        return Err(SizeError::Malformed);
    }
    base.checked_add(fraction_bytes(fraction_text, shift)).ok_or(SizeError::TooLarge)
}

/// `0.DIGITS << shift`, rounded down. 20 digits are below 2^67 and `shift` is at most 60, so nothing overflows; further
/// digits are worth less than a byte.
fn fraction_bytes(digits: &str, shift: u32) -> u64 {
    let mut numerator: u128 = 0;
    let mut denominator: u128 = 1;
    for digit in digits.bytes().take(20) {
        numerator = numerator * 10 + u128::from(digit - b'0');
        denominator *= 10;
    }
    ((numerator << shift) / denominator) as u64
}

/// For clap: a size, or why not.
pub fn size_argument(text: &str) -> Result<u64, SizeError> {
    parse_size(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_are_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("10b", 10),
            ("10B", 10),
            ("64k", 64 << 10),
            ("64K", 64 << 10),
            ("1M", 1 << 20),
            ("3g", 3 << 30),
            ("2T", 2 << 40),
            ("1P", 1 << 50),
            ("15E", 15 << 60),
            ("18446744073709551615", u64::MAX),
            ("0x200", 512),
            ("0XfF", 255),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn fractions_are_exact_and_rounded_down() {
        for (text, bytes) in [
            ("1.5M", 3 << 19),
            ("1.5k", 1536),
            (".5k", 512),
            ("1.k", 1024),
            ("0.1k", 102),
            ("7.999999999999999999999999E", (8 << 60) - 1),
            ("4.0", 4),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_not_a_size_is_refused() {
        for text in
            ["", "k", "x", "1x", "1kk", "1 k", "1.5", "0.5b", "1e3", "0x", "0x1k", "--1", "1.2.3k", "."]
        {
            assert_eq!(parse_size(text), Err(SizeError::Malformed), "{text}");
        }
        for text in ["-1", "16E", "18446744073709551616", "0x10000000000000000"] {
            assert_eq!(parse_size(text), Err(SizeError::TooLarge), "{text}");
        }
    }
}
