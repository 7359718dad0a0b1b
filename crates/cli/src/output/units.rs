//! Sizes for people, in the two ways of QEMU's programs.

/// Three significant digits and a unit, as `qemu-img` prints sizes: `64 MiB`, `1.28 MiB`, `0 B`.
pub(crate) fn size_short(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    // A value of 1000 and more would need a fourth digit: it goes to the next unit, as 0.977.
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}", three_digits(value), UNITS[unit])
}

/// `%.3g` of 0, or of a value from 0.1 to below 10^6, without an exponent. (`log10` would be the only use of the library of
/// mathematics, half a megabyte.)
fn three_digits(value: f64) -> String {
    // Digits before the point decide how many follow it.
    let decimals = match value {
        0.0 => 0,
        ..1.0 => 3,
        ..10.0 => 2,
        ..100.0 => 1,
        _ => 0,
    };
    trim_zeroes(&format!("{value:.decimals$}"))
}

/// Up to three decimals and a unit, as `qemu-io` prints sizes: `64 KiB`, `1.500 MiB`, `512 bytes`.
pub(crate) fn size_exact(bytes: f64) -> String {
    const UNITS: [(&str, i32); 6] =
        [("EiB", 60), ("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (unit, power) in UNITS {
        let one = 2f64.powi(power);
        if bytes >= one {
            let text = format!("{:.3}", bytes / one);
            return format!("{} {unit}", text.strip_suffix(".000").unwrap_or(&text));
        }
    }
    let text = format!("{bytes:.6}");
    format!("{} bytes", text.strip_suffix(".000000").unwrap_or(&text))
}

fn trim_zeroes(text: &str) -> String {
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    } else {
        text.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Expected texts are qemu-img's and qemu-io's, version 10.0, for these sizes.
    #[test]
    fn three_significant_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (999, "999 B"),
            (1000, "0.977 KiB"),
            (1024, "1 KiB"),
            (197120, "192 KiB"),
            (200704, "196 KiB"),
            (1339392, "1.28 MiB"),
            (1638912, "1.56 MiB"),
            (67108864, "64 MiB"),
            (1572864, "1.5 MiB"),
            (1 << 60, "1 EiB"),
        ] {
            assert_eq!(size_short(bytes), text);
        }
    }

    #[test]
    fn up_to_three_decimals() {
        for (bytes, text) in [
            (0.0, "0 bytes"),
            (32.0, "32 bytes"),
            (43.324562, "43.324562 bytes"),
            (512.0, "512 bytes"),
            (1024.0, "1 KiB"),
            (1572864.0, "1.500 MiB"),
            (8323072.0, "7.938 MiB"),
            (67108864.0, "64 MiB"),
        ] {
            assert_eq!(size_exact(bytes), text);
        }
    }
}
