//! Names of images that are JSON: `json:{"driver": "qcow2", "file": {"filename": "disk.qcow2"}}`.
//!
//! Nested objects are brought into the dotted names of `--image-opts`. As in QEMU, strings may stand in single quotes.

use serde_json::Value;
use std::collections::BTreeMap;

/// The start of such a name.
const PREFIX: &str = "json:";
/// Nested objects at most.
const MAX_DEPTH: usize = 32;

/// The pairs of a name, or `None` if it is no JSON name.
///
/// # Errors
/// The text is no JSON object.
pub(crate) fn parse_json_name(name: &str) -> Option<Result<Vec<(String, String)>, String>> {
    name.strip_prefix(PREFIX).map(pairs)
}

fn pairs(text: &str) -> Result<Vec<(String, String)>, String> {
    let pairs = json_scalars(text)?.into_iter();
    Ok(pairs.map(|(key, value)| (key, shown(&value))).collect())
}

/// Numbers and switches of names that are JSON, by their dotted names: QEMU shows them as they were given, not as text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TypedValues(BTreeMap<String, Value>);

impl TypedValues {
    /// The values in a name; none if it is no JSON name.
    pub(crate) fn of_name(name: &str) -> Self {
        let scalars = name.strip_prefix(PREFIX).and_then(|text| json_scalars(text).ok()).unwrap_or_default();
        Self(scalars.into_iter().filter(|(_, value)| value.is_number() || value.is_boolean()).collect())
    }

    /// Forgets the value of a key that is given otherwise.
    pub(crate) fn remove(&mut self, key: &str) {
        self.0.remove(key);
    }

    /// The values of the node `child`, with their names in it.
    pub(crate) fn below(&self, child: &str) -> Self {
        let strip = |key: &str| Some(key.strip_prefix(child)?.strip_prefix('.')?.to_owned());
        Self(self.0.iter().filter_map(|(key, value)| Some((strip(key)?, value.clone()))).collect())
    }

    /// The keys with their values.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }
}

/// The values in a JSON object that have none below them, by their dotted names.
///
/// # Errors
/// The text is no JSON object, or one with too many others inside; the reason has no part of a value.
pub(crate) fn json_scalars(text: &str) -> Result<Vec<(String, Value)>, String> {
    let value: Value = serde_json::from_str(&double_quoted(text))
        .map_err(|error| format!("Could not parse the JSON options: {error}"))?;
    if !value.is_object() {
        return Err("Invalid JSON object given".to_owned());
    }
    let mut scalars = Vec::new();
    flatten(&mut scalars, "", value, 0)?;
    Ok(scalars)
}

/// A value as options have it.
fn shown(value: &Value) -> String {
    match value {
        Value::Bool(true) => "on".to_owned(),
        Value::Bool(false) => "off".to_owned(),
        Value::String(text) => text.clone(),
        // Without this node.
        Value::Null => String::new(),
        other => other.to_string(),
    }
}

/// The text with all strings in double quotes.
fn double_quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    let mut quote = None;
    while let Some(c) = chars.next() {
        match (quote, c) {
            (None, '"' | '\'') => {
                quote = Some(c);
                out.push('"');
            }
            (Some(end), _) if c == end => {
                quote = None;
                out.push('"');
            }
            (Some('\''), '"') => out.push_str("\\\""),
            (Some(_), '\\') => match chars.next() {
                Some('\'') => out.push('\''),
                Some(escaped) => out.extend([c, escaped]),
                None => out.push(c),
            },
            _ => out.push(c),
        }
    }
    out
}

fn flatten(scalars: &mut Vec<(String, Value)>, name: &str, value: Value, depth: usize) -> Result<(), String> {
    if depth > MAX_DEPTH {
        return Err(format!("Parameter '{name}': more than {MAX_DEPTH} objects are nested"));
    }
    let below = |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
    match value {
        Value::Object(members) => {
            members.into_iter().try_for_each(|(key, value)| flatten(scalars, &below(&key), value, depth + 1))
        }
        Value::Array(items) => (0..).zip(items).try_for_each(|(index, value): (usize, _)| {
            flatten(scalars, &below(&index.to_string()), value, depth + 1)
        }),
        scalar => {
            scalars.push((name.to_owned(), whole(scalar)));
            Ok(())
        }
    }
}

/// A number without a fraction that is written with one, as an integer.
fn whole(value: Value) -> Value {
    const EXACT: f64 = (1u64 << 53) as f64;
    match value.as_f64().filter(|number| value.is_f64() && number.fract() == 0.0 && number.abs() < EXACT) {
        Some(number) => (number as i64).into(),
        None => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(String, String)> {
        parse_json_name(text).unwrap().unwrap()
    }

    #[test]
    fn nested_objects_become_dotted_names() {
        let expected = [("driver", "qcow2"), ("file.driver", "file"), ("file.filename", "a'\"b")];
        let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
        for text in [
            r#"json:{"driver": "qcow2", "file": {"driver": "file", "filename": "a'\"b"}}"#,
            r#"json:{"driver": "qcow2", "file.driver": "file", "file.filename": "a'\"b"}"#,
            r#"json:{'driver': 'qcow2', 'file': {'driver': 'file', 'filename': 'a\'"b'}}"#,
        ] {
            assert_eq!(found(text), expected, "{text}");
        }
        let flags = found("json:{'backing': null, 'read-only': true, 'size': 65536}");
        let flags: Vec<_> = flags.iter().map(|(key, value)| format!("{key}={value}")).collect();
        assert_eq!(flags, ["backing=", "read-only=on", "size=65536"]);
        assert_eq!(found("json:{'size': 1e3}")[0].1, "1000");
    }

    #[test]
    fn only_objects_are_names() {
        assert!(parse_json_name("disk.qcow2").is_none());
        for text in ["json:", "json:[]", "json:{", "json:{'a': ", "json:1"] {
            assert!(parse_json_name(text).unwrap().is_err(), "{text}");
        }
        let deep = format!("json:{}{}", "{\"a\":".repeat(100), "}".repeat(100));
        assert!(parse_json_name(&deep).unwrap().is_err());
    }
}
