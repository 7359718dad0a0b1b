//! The origin of a connection, as far as the kernel knows it.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// A party whose connections are counted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Origin {
    /// The user of a process at a Unix socket.
    User(u32),
    /// An address of IPv4.
    Address(IpAddr),
    /// The first 64 bits of an address of IPv6: whoever has one of these addresses usually has all.
    Network(Ipv6Addr),
    /// Unknown to the kernel.
    Unknown,
}

impl From<SocketAddr> for Origin {
    fn from(address: SocketAddr) -> Self {
        match address.ip().to_canonical() {
            IpAddr::V6(address) => {
                Self::Network(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)))
            }
            address @ IpAddr::V4(_) => Self::Address(address),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(user) => write!(f, "user {user}"),
            Self::Address(address) => write!(f, "{address}"),
            Self::Network(network) => write!(f, "{network}/64"),
            Self::Unknown => f.write_str("strangers at a Unix socket"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_host_are_one_origin() {
        let of = |text: &str| Origin::from(text.parse::<SocketAddr>().unwrap());
        assert_eq!(of("192.0.2.1:1"), of("192.0.2.1:2"));
        assert_eq!(of("[::ffff:192.0.2.1]:1"), of("192.0.2.1:2"));
        assert_ne!(of("192.0.2.1:1"), of("192.0.2.2:1"));
        assert_eq!(of("[2001:db8::1]:1"), of("[2001:db8::2:3]:9"));
        assert_ne!(of("[2001:db8::1]:1"), of("[2001:db8:0:1::1]:1"));
        assert_eq!(of("[2001:db8::1]:1").to_string(), "2001:db8::/64");
    }
}
