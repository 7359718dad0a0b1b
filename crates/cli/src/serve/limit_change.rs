//! Changes of limits, as users write them: `iops=N,bps=SIZE,burst=N,group=NAME`, where `none` takes one away.

use serde_json::{Map, Value};
use std::num::NonZeroU64;
use zebu_disks::size::parse_size;
use zebu_export::Limits;

/// The word that takes a limit away, or all.
const NONE: &str = "none";
/// The name of the field of a group.
const GROUP: &str = "group";

/// The group of an export after a change.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum GroupChange {
    /// The same.
    #[default]
    Stays,
    /// None.
    Leaves,
    /// The one of that name.
    Joins(String),
}

/// A change of the limits of an export or of a group. What it does not name stays.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct LimitChange {
    /// All that is there is taken away first.
    clears: bool,
    values: Vec<(String, Option<NonZeroU64>)>,
    pub(crate) group: GroupChange,
}

impl LimitChange {
    /// Reads the words of a command line.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if text == NONE {
            return Ok(Self { clears: true, values: Vec::new(), group: GroupChange::Leaves });
        }
        let mut change = Self::default();
        for word in text.split(',') {
            let (name, value) = word.split_once('=').ok_or_else(|| {
                format!(
                    "'{word}' is no limit: write iops=N, bps=SIZE, burst=N or group=NAME, or {NONE} alone"
                )
            })?;
            change.add(name, value)?;
        }
        Ok(change)
    }

    /// Reads the object of a request.
    pub(crate) fn of_object(fields: &Map<String, Value>) -> Result<Self, String> {
        let mut change = Self::default();
        if fields.get("all").is_some_and(|all| *all == NONE) {
            change = Self::parse(NONE)?;
        }
        for (name, value) in fields.iter().filter(|(name, _)| *name != "all") {
            match value {
                Value::String(text) => change.add(name, text)?,
                Value::Number(number) => change.add(name, &number.to_string())?,
                _ => return Err(format!("the limit {name} needs a number, or \"{NONE}\"")),
            }
        }
        Ok(change)
    }

    /// The object of a request.
    pub(crate) fn to_object(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        if self.clears {
            fields.insert("all".to_owned(), NONE.into());
        }
        for (name, value) in &self.values {
            fields.insert(name.clone(), value.map_or_else(|| NONE.into(), |value| value.get().into()));
        }
        let group = match &self.group {
            GroupChange::Joins(name) => Some(name.as_str()),
            GroupChange::Leaves if !self.clears => Some(NONE),
            GroupChange::Leaves | GroupChange::Stays => None,
        };
        if let Some(group) = group {
            fields.insert(GROUP.to_owned(), group.into());
        }
        fields
    }

    fn add(&mut self, name: &str, value: &str) -> Result<(), String> {
        if name == GROUP {
            if self.group != GroupChange::Stays {
                return Err(format!("{GROUP} is given twice"));
            }
            if value.is_empty() {
                return Err(format!("{GROUP}= needs a name, or {GROUP}={NONE} to leave the group"));
            }
            self.group =
                if value == NONE { GroupChange::Leaves } else { GroupChange::Joins(value.to_owned()) };
            return Ok(());
        }
        if Limits::default().by_name_mut(name).is_none() {
            return Err(format!("there is no limit '{name}' (there are {})", names()));
        }
        if self.values.iter().any(|(other, _)| other == name) {
            return Err(format!("{name} is given twice"));
        }
        let value = if value == NONE {
            None
        } else {
            Some(limit_of(name, parse_size(value).map_err(|error| format!("{name}={value}: {error}"))?)?)
        };
        self.values.push((name.to_owned(), value));
        Ok(())
    }

    /// The limits that come of `before`.
    ///
    /// # Errors
    /// A burst of what is not limited.
    pub(crate) fn apply(&self, before: &Limits) -> Result<Limits, String> {
        let mut limits = if self.clears { Limits::default() } else { *before };
        for (name, value) in &self.values {
            if let Some(field) = limits.by_name_mut(name) {
                *field = *value;
            }
        }
        let sets = |name: &str| self.values.iter().any(|(other, value)| other == name && value.is_some());
        for (burst, kind, has_limit) in
            [("burst", "iops=N", limits.has_iops()), ("bps-burst", "bps=SIZE", limits.has_bps())]
        {
            if !has_limit && sets(burst) {
                return Err(format!("{burst} needs a limit: give {kind} as well"));
            }
            // It goes with the last limit that it is of.
            if !has_limit && let Some(field) = limits.by_name_mut(burst) {
                *field = None;
            }
        }
        Ok(limits)
    }
}

/// A limit of this number.
///
/// # Errors
/// It is zero.
pub(crate) fn limit_of(name: &str, number: u64) -> Result<NonZeroU64, String> {
    NonZeroU64::new(number).ok_or_else(|| {
        format!("a limit of zero ({name}) would let nothing through: {name}={NONE} takes the limit away")
    })
}

/// The names of all limits.
pub(crate) fn names() -> String {
    let mut names: Vec<&str> = Limits::default().named().iter().map(|(name, _)| *name).collect();
    names.push(GROUP);
    names.join(", ")
}

/// Limits in words, as a command line would have them; `none` if there are none.
pub(crate) fn in_words(limits: &Limits, group: Option<&str>) -> String {
    let set = limits.named().into_iter().filter_map(|(name, value)| Some(format!("{name}={}", value?)));
    let words: Vec<String> = set.chain(group.map(|group| format!("{GROUP}={group}"))).collect();
    if words.is_empty() { NONE.to_owned() } else { words.join(",") }
}

/// Limits as an object: those that are set.
pub(crate) fn described(limits: &Limits) -> Value {
    let set = limits.named().into_iter();
    set.filter_map(|(name, value)| Some((name.to_owned(), Value::from(value?.get()))))
        .collect::<Map<_, _>>()
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(number: u64) -> Option<NonZeroU64> {
        NonZeroU64::new(number)
    }

    #[test]
    fn changes_are_read_and_told_as_they_were_meant() {
        let change = LimitChange::parse("iops=100,bps=2M,burst=7,group=tenant").unwrap();
        assert_eq!(change.group, GroupChange::Joins("tenant".to_owned()));
        let limits = change.apply(&Limits::default()).unwrap();
        assert_eq!((limits.iops, limits.bps, limits.burst), (some(100), some(2 << 20), some(7)));
        assert_eq!(in_words(&limits, Some("tenant")), "iops=100,bps=2097152,burst=7,group=tenant");
        assert_eq!(LimitChange::of_object(&change.to_object()).unwrap(), change);
        let less = LimitChange::parse("iops-total=none,bps-read=1k").unwrap().apply(&limits).unwrap();
        assert_eq!((less.iops, less.burst, less.bps, less.bps_read), (None, None, some(2 << 20), some(1024)));
        let none = LimitChange::parse("none").unwrap();
        assert_eq!(LimitChange::of_object(&none.to_object()).unwrap(), none);
        assert_eq!((none.apply(&limits).unwrap(), none.group), (Limits::default(), GroupChange::Leaves));
        assert_eq!(in_words(&Limits::default(), None), "none");
    }

    #[test]
    fn mistakes_are_named() {
        for (text, expected) in [
            ("iops=0", "iops=none takes the limit away"),
            ("bps=0", "bps=none"),
            ("burst=0", "burst=none"),
            ("iops", "is no limit"),
            ("", "is no limit"),
            ("iops=", "iops="),
            ("iops=x", "iops=x"),
            ("iops=-1", "not negative"),
            ("iops=99999999999999999999", "below 2^64"),
            ("iops=1,iops=2", "twice"),
            ("group=a,group=b", "twice"),
            ("group=", "needs a name"),
            ("speed=1", "there is no limit 'speed' (there are iops, "),
        ] {
            let message = LimitChange::parse(text).unwrap_err();
            assert!(message.contains(expected), "{text}: {message}");
        }
        for (text, expected) in [("burst=5", "iops=N"), ("iops=1,bps-burst=5", "bps=SIZE")] {
            let message = LimitChange::parse(text).unwrap().apply(&Limits::default()).unwrap_err();
            assert!(message.contains(expected), "{text}: {message}");
        }
        let most = format!("iops={},bps={},burst={}", u64::MAX, u64::MAX, u64::MAX);
        assert!(LimitChange::parse(&most).is_ok());
        assert!(LimitChange::of_object(&Map::from_iter([("iops".to_owned(), Value::Null)])).is_err());
    }
}
