//! Limits of exports and of groups of them, while they are served.

use super::limit_change::{GroupChange, LimitChange, described, in_words};
use serde_json::{Map, Value, json};
use std::cell::RefCell;
use std::collections::BTreeMap;
use zebu_export::{Export, Exports, LimitGroup, Limits};

/// The most groups of a server.
const MOST_GROUPS: usize = 4096;
/// Bytes of the longest name of a group.
const LONGEST_NAME: usize = 128;

/// The groups of a server, by their names.
#[derive(Default)]
pub(crate) struct Groups(RefCell<BTreeMap<String, LimitGroup>>);

impl Groups {
    /// The group of a name.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn find(&self, name: &str) -> Result<LimitGroup, String> {
        let groups = self.0.borrow();
        groups.get(name).cloned().ok_or_else(|| {
            let there = match groups.len() {
                0 => "there are none yet".to_owned(),
                _ => format!("there are {}", some_of(groups.keys())),
            };
            format!("there is no group '{name}' ({there}): limit --group {name} iops=N makes it")
        })
    }

    /// Sets the limits of a group, which is made if it is not there.
    pub(crate) fn set(&self, name: &str, limits: &Limits) {
        let mut groups = self.0.borrow_mut();
        match groups.get(name) {
            Some(group) => group.set_limits(limits),
            None => drop(groups.insert(name.to_owned(), LimitGroup::new(name, limits))),
        }
    }

    /// Removes a group. Exports that are in it leave it.
    pub(crate) fn remove(&self, name: &str, exports: &Exports) {
        self.0.borrow_mut().remove(name);
        for export in exports.iter().filter(|export| group_name(export).as_deref() == Some(name)) {
            export.set_limit_group(None);
        }
    }

    /// Removes the groups that limit nothing, and that no export is in.
    pub(crate) fn remove_empty(&self) {
        self.0.borrow_mut().retain(|_, group| !group.limits().is_empty() || group.members() > 0);
    }

    /// All, in the order of their names.
    pub(crate) fn all(&self) -> Vec<LimitGroup> {
        self.0.borrow().values().cloned().collect()
    }

    fn has_room_for(&self, name: &str) -> bool {
        let groups = self.0.borrow();
        groups.len() < MOST_GROUPS || groups.contains_key(name)
    }
}

/// Judges the name of a group.
///
/// # Errors
/// It is empty, longer than 128 bytes, `none`, or has other characters than ASCII letters, digits, `-`, `_` and `.`.
pub(crate) fn check_group_name(name: &str) -> Result<(), String> {
    let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || name.len() > LONGEST_NAME || name == "none" || !name.bytes().all(is_known) {
        return Err(format!(
            "'{}' can't be the name of a group: use letters, digits, '-', '_' and '.', at most {LONGEST_NAME} of them, and not \
             'none'",
            zebu_disks::printable(name)
        ));
    }
    Ok(())
}

/// The first names of a list, quoted.
pub(crate) fn some_of<'a>(names: impl Iterator<Item = &'a String>) -> String {
    const MOST: usize = 8;
    let names: Vec<String> = names.map(|name| format!("'{name}'")).collect();
    let more = if names.len() > MOST { ", and more" } else { "" };
    format!("{}{more}", names[..names.len().min(MOST)].join(", "))
}

/// The name of the group that an export is in.
pub(crate) fn group_name(export: &Export) -> Option<String> {
    export.limit_group().map(|group| group.name().to_owned())
}

/// Changes the limits of an export, all of the change or nothing.
pub(crate) fn change_export(groups: &Groups, export: &Export, change: &LimitChange) -> Result<(), String> {
    let limits = change.apply(&export.limits())?;
    let group = match &change.group {
        GroupChange::Joins(name) => Some(groups.find(name)?),
        GroupChange::Leaves => None,
        GroupChange::Stays => export.limit_group(),
    };
    export.set_limits(&limits);
    if group.as_ref().map(|group| group.name().to_owned()) != group_name(export) {
        export.set_limit_group(group.as_ref());
        groups.remove_empty();
    }
    Ok(())
}

/// Changes the limits of a group, which is made if it is not there. Without any limit left it goes when no export is in it.
pub(crate) fn change_group(groups: &Groups, name: &str, change: &LimitChange) -> Result<(), String> {
    if matches!(change.group, GroupChange::Joins(_)) {
        return Err("a group is in no other group: group=NAME is for exports".to_owned());
    }
    check_group_name(name)?;
    if !groups.has_room_for(name) {
        return Err(format!("there are {MOST_GROUPS} groups already: remove one (limit --group NAME none)"));
    }
    let known = groups.find(name);
    let before = known.as_ref().map(LimitGroup::limits).unwrap_or_default();
    let limits = change.apply(&before)?;
    match known {
        Err(_) if limits.is_empty() => return known.map(drop),
        _ => groups.set(name, &limits),
    }
    groups.remove_empty();
    Ok(())
}

/// The limits of an export, and who waits for them.
pub(crate) fn of_export(export: &Export) -> Value {
    let stats = export.throttle_stats();
    json!({
        "export": export.name(),
        "limits": described(&export.limits()),
        "group": group_name(export),
        "waiting": stats.waiting,
        "waited": stats.waited,
        "waited-ns": stats.nanoseconds,
    })
}

/// The limits of a group, and who shares them.
pub(crate) fn of_group(group: &LimitGroup, exports: &Exports) -> Value {
    let members = exports.iter().filter(|export| group_name(export).as_deref() == Some(group.name()));
    json!({
        "group": group.name(),
        "limits": described(&group.limits()),
        "exports": members.map(|export| export.name().to_owned()).collect::<Vec<_>>(),
        "waiting": group.waiting(),
    })
}

/// The limits of everything.
pub(crate) fn of_all(groups: &Groups, exports: &Exports) -> Value {
    json!({
        "exports": exports.iter().map(|export| of_export(&export)).collect::<Vec<_>>(),
        "groups": groups.all().iter().map(|group| of_group(group, exports)).collect::<Vec<_>>(),
    })
}

/// The lines of `ctl limit`, of what [`of_export`], [`of_group`] or [`of_all`] tells.
pub(crate) fn lines(told: &Value) -> String {
    let list = |key: &str| told[key].as_array().map(Vec::as_slice).unwrap_or_default();
    if told["export"].is_null() && told["group"].is_null() {
        return list("groups").iter().chain(list("exports")).map(line).collect();
    }
    line(told)
}

fn line(told: &Value) -> String {
    let empty = Map::new();
    let mut limits = Limits::default();
    for (name, value) in told["limits"].as_object().unwrap_or(&empty) {
        if let Some(field) = limits.by_name_mut(name) {
            *field = value.as_u64().and_then(std::num::NonZeroU64::new);
        }
    }
    let (kind, name, group) = match told["export"].as_str() {
        Some(export) => ("export", export, told["group"].as_str()),
        None => ("group", told["group"].as_str().unwrap_or_default(), None),
    };
    let number = |key: &str| told[key].as_u64().unwrap_or_default();
    let waiting = match (number("waiting"), number("waited")) {
        (0, 0) => String::new(),
        (waiting, 0) => format!("; {waiting} wait"),
        (waiting, waited) => {
            let seconds = number("waited-ns") as f64 / 1e9;
            format!("; {waiting} wait, {waited} have waited {seconds:.3} s")
        }
    };
    format!("{kind} '{}': {}{waiting}\n", zebu_disks::printable(name), in_words(&limits, group))
}
