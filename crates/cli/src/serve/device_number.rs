//! Numbers of block devices of this machine, as the command line has them.

use std::str::FromStr;

/// The number of a device, as `--ublk` takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceNumber {
    /// One that is free.
    Any,
    This(u32),
}

impl FromStr for DeviceNumber {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "any" => Ok(Self::Any),
            number => number
                .parse()
                .map(Self::This)
                .map_err(|_| "a device has a number, as in --ublk=0 for /dev/ublkb0".to_owned()),
        }
    }
}

/// The number of a device of the kernel's NBD client.
pub(crate) fn nbd_device_argument(text: &str) -> Result<u32, String> {
    let number = text.strip_prefix("/dev/nbd").and_then(|number| number.parse().ok());
    number.ok_or_else(|| "not a device of the kernel's NBD client, such as /dev/nbd0".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_numbers() {
        assert_eq!("any".parse(), Ok(DeviceNumber::Any));
        assert_eq!("12".parse(), Ok(DeviceNumber::This(12)));
        for wrong in ["", "-1", "/dev/ublkb0", "4294967296"] {
            assert!(wrong.parse::<DeviceNumber>().is_err(), "{wrong}");
        }
        assert_eq!(nbd_device_argument("/dev/nbd15"), Ok(15));
        for wrong in ["0", "/dev/nbd", "/dev/nbd0p1", "/dev/sda"] {
            assert!(nbd_device_argument(wrong).is_err(), "{wrong}");
        }
    }
}
