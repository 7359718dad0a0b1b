//! Pairs of options with dotted names.

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
    // Without effect in any node: the engine opens files as the command needs them, and names no nodes.
    const IDLE: [&str; 4] = ["driver", "node-name", "read-only", "auto-read-only"];
    for (key, _) in pairs {
        let is_child = key.contains('.') && children.contains(&first(key));
        if !is_child && !keys.contains(&key.as_str()) && !IDLE.contains(&key.as_str()) {
            return Err(format!("Block protocol '{driver}' doesn't support the option '{key}'"));
        }
    }
    Ok(())
}
