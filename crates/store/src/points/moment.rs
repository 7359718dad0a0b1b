//! A moment that points of several disks share.

use super::manifest::LATEST;
use super::name::is_point;
use super::unique::{new_id, now};
use std::fmt;
use std::str::FromStr;

/// A moment at which disks were as their points show them. Its text is `TIME-ID`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PointMoment {
    time: u64,
    id: String,
}

impl PointMoment {
    /// A new one, which begins now, by this machine's clock.
    pub fn begin() -> Self {
        Self { time: now(), id: new_id() }
    }

    /// Seconds after the beginning of 1970.
    pub fn time(&self) -> u64 {
        self.time
    }

    /// A word that no other moment has.
    pub fn id(&self) -> &str {
        &self.id
    }
}

impl FromStr for PointMoment {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = text.split_once('-').and_then(|(time, id)| {
            let is_number = time.bytes().all(|byte| byte.is_ascii_digit());
            let time = time.parse().ok().filter(|time| is_number && *time <= LATEST)?;
            is_point(id).then(|| Self { time, id: id.to_owned() })
        });
        found.ok_or_else(|| "a moment is TIME-ID: seconds after the beginning of 1970, and a word".to_owned())
    }
}

impl fmt::Display for PointMoment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.time, self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_read_as_it_is_shown() {
        let moment = PointMoment::begin();
        assert_eq!(moment.to_string().parse(), Ok(moment.clone()));
        assert_ne!(PointMoment::begin().id(), moment.id());
        for wrong in ["", "1", "1-", "-a", "+1-a", "a-1", "1-a/b", "99999999999999999999-a"] {
            assert!(wrong.parse::<PointMoment>().is_err(), "{wrong}");
        }
    }
}
