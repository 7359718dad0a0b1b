//! Which addresses belong to the network at large.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The addresses that may be connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// All.
    Any,
    /// Public ones.
    #[cfg_attr(not(feature = "http"), expect(dead_code))]
    Public,
}

impl Reach {
    pub(super) fn has(self, address: IpAddr) -> bool {
        self == Self::Any || is_public(address)
    }
}

/// The refusal of a host whose addresses are all out of reach.
#[derive(Debug)]
pub(crate) struct OutOfReach {
    host: String,
}

impl OutOfReach {
    pub(super) fn new(host: &str) -> Self {
        Self { host: host.to_owned() }
    }
}

impl fmt::Display for OutOfReach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' is at a private address, and what was named is at a public one", self.host)
    }
}

impl std::error::Error for OutOfReach {}

/// Whether an address is one of the network at large, by the registries of special addresses (RFC 6890 and its updates).
pub(crate) fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

/// The address that a host name is by itself, in any spelling that resolvers read: `127.1`, `0x7f000001`, `017700000001`.
#[cfg(any(test, feature = "http"))]
pub(crate) fn written_address(host: &str) -> Option<IpAddr> {
    if let Ok(address) = host.parse() {
        return Some(address);
    }
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(if hex.is_empty() { "0" } else { hex }, 16).ok(),
        None if text.len() > 1 && text.starts_with('0') => u32::from_str_radix(text, 8).ok(),
        None => text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten(),
    };
    let parts: Vec<u32> = host.split('.').map(number).collect::<Option<_>>()?;
    let (last, first) = parts.split_last()?;
    if first.len() > 3 || first.iter().any(|part| *part > 255) {
        return None;
    }
    // The last part fills what the others leave.
    let room = 32 - 8 * first.len() as u32;
    let high = first.iter().fold(0u64, |address, part| address << 8 | u64::from(*part));
    let address = (u64::from(*last) < 1 << room).then(|| high << room | u64::from(*last))?;
    u32::try_from(address).ok().map(|address| Ipv4Addr::from(address).into())
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let special = match address.octets() {
        [0 | 10 | 127, ..] | [169, 254, ..] | [192, 168, ..] | [192, 0, 0 | 2, _]
        // Benchmarks, documentation.
        | [198, 18 | 19, ..] | [198, 51, 100, _] | [203, 0, 113, _] => true,
        // Shared by the customers of a provider; 172.16/12.
        [100, second, ..] if second & 0xc0 == 64 => true,
        [172, second, ..] if second & 0xf0 == 16 => true,
        // Multicast, reserved, broadcast.
        [first, ..] => first >= 224,
    };
    !special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    let [.., a, b] = segments;
    let embedded = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        is_public_v4(Ipv4Addr::new(a, b, c, d))
    };
    match segments {
        // IPv4 in other clothes: mapped, compatible, translated (NAT64, RFC 6052), 6to4.
        [0, 0, 0, 0, 0, 0xffff, ..] | [0x64, 0xff9b, 0, 0, 0, 0, ..] => embedded(a, b),
        [0x2002, high, low, ..] => embedded(high, low),
        // Teredo hides an address; documentation; IETF's own.
        [0x2001, 0..=0x1ff | 0xdb8, ..] | [0x3fff, 0..=0xfff, ..] => false,
        // Only this part is given out.
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_addresses_in_all_their_clothes_are_known() {
        for private in [
            "0.0.0.0",
            "10.1.2.3",
            "100.64.0.1",
            "127.9.9.9",
            "169.254.169.254",
            "172.31.255.255",
            "192.168.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::1",
            "2002:7f00:1::1",
            "2001:0:1::1",
            "fc00::1",
            "fd12::1",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!is_public(private.parse().unwrap()), "{private}");
        }
        for public in [
            "1.1.1.1",
            "100.128.0.1",
            "172.32.0.1",
            "192.0.1.1",
            "8.8.8.8",
            "::ffff:8.8.8.8",
            "2606:4700::1",
            "2a00::1",
            "64:ff9b::808:808",
        ] {
            assert!(is_public(public.parse().unwrap()), "{public}");
        }
    }

    #[test]
    fn addresses_are_read_in_every_spelling() {
        let local = Some(IpAddr::from([127, 0, 0, 1]));
        for host in ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "017700000001", "0x7f.0.1", "127.0.1"]
        {
            assert_eq!(written_address(host), local, "{host}");
        }
        assert_eq!(written_address("::1"), Some(IpAddr::from(Ipv6Addr::LOCALHOST)));
        for host in
            ["", "host", "1.2.3.4.5", "256.1", "127.0.0.256", "4294967296", "1.host", "08", "1..2", "-1"]
        {
            assert_eq!(written_address(host), None, "{host}");
        }
    }
}
