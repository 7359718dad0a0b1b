//! Pairs of options with dotted names.

use crate::keyval::parse_switch;
use zebu_engine::Access;

/// A key and its value.
pub(super) type Pair = (String, String);

/// The value of a key; the last one counts.
pub(super) fn get<'a>(pairs: &'a [Pair], key: &str) -> Option<&'a str> {
    pairs.iter().rev().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
}

/// The pairs of the node `child`, with their names in it.
pub(super) fn below(pairs: &[Pair], child: &str) -> Vec<Pair> {
    let strip = |key: &str| Some(key.strip_prefix(child)?.strip_prefix('.')?.to_owned());
    pairs.iter().filter_map(|(key, value)| Some((strip(key)?, value.clone()))).collect()
}

/// The pairs without those of the node `child`.
pub(super) fn without(pairs: &[Pair], child: &str) -> Vec<Pair> {
    let is_below = |key: &str| key.strip_prefix(child).is_some_and(|rest| rest.starts_with('.'));
    pairs.iter().filter(|(key, _)| !is_below(key)).cloned().collect()
}

/// The first part of a dotted name.
pub(super) fn first(key: &str) -> &str {
    key.split('.').next().unwrap_or_default()
}

/// Refuses keys that the driver does not have. `children` are nodes and lists.
pub(super) fn refuse_others(
    pairs: &[Pair],
    driver: &str,
    keys: &[&str],
    children: &[&str],
) -> Result<(), String> {
    for (key, _) in pairs {
        let is_child = key.contains('.') && children.contains(&first(key));
        if !is_child && !keys.contains(&key.as_str()) && key != "driver" {
            return Err(format!("Block protocol '{driver}' doesn't support the option '{key}'"));
        }
    }
    Ok(())
}

/// The pairs of a node without those that every node has, and whether the node may be written.
///
/// # Errors
/// A value that can't be read.
pub(super) fn take_common(pairs: &[Pair]) -> Result<(Vec<Pair>, Access), String> {
    let (mut own, mut access) = (Vec::new(), Access::ReadWrite);
    for (key, value) in pairs {
        match key.as_str() {
            "read-only" if parse_switch(key, value)? => access = Access::ReadOnly,
            "read-only" => {}
            // A file is opened as the command needs it in any case.
            "auto-read-only" => drop(parse_switch(key, value)?),
            "node-name" => check_node_name(value)?,
            _ => own.push((key.clone(), value.clone())),
        }
    }
    Ok((own, access))
}

/// Refuses what can't be the name of a node. Names lead nowhere: there is no graph that would have them.
fn check_node_name(name: &str) -> Result<(), String> {
    const LONGEST: usize = 31;
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    if !name.starts_with(|c: char| c.is_ascii_alphabetic()) || !name.chars().all(is_of_name) {
        return Err(format!("Invalid node-name: '{name}'"));
    }
    if name.len() > LONGEST {
        return Err("Node name too long".to_owned());
    }
    Ok(())
}
