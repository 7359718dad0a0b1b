//! Names of images that are JSON: `json:{"driver": "qcow2", "file": {"filename": "disk.qcow2"}}`.
//!
//! Nested objects are brought into the dotted names of `--image-opts`. As in QEMU, strings may stand in single quotes.

use serde_json::Value;

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
    let value: Value = serde_json::from_str(&double_quoted(text))
        .map_err(|error| format!("Could not parse the JSON options: {error}"))?;
    if !value.is_object() {
        return Err("Invalid JSON object given".to_owned());
    }
    let mut pairs = Vec::new();
    flatten(&mut pairs, "", &value, 0)?;
    Ok(pairs)
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

fn flatten(pairs: &mut Vec<(String, String)>, name: &str, value: &Value, depth: usize) -> Result<(), String> {
    if depth > MAX_DEPTH {
        return Err(format!("Parameter '{name}': more than {MAX_DEPTH} objects are nested"));
    }
    let below = |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
    let text = match value {
        Value::Object(members) => {
            return members.iter().try_for_each(|(key, value)| flatten(pairs, &below(key), value, depth + 1));
        }
        Value::Array(items) => {
            let items = items.iter().enumerate();
            return items
                .map(|(index, value)| (index.to_string(), value))
                .try_for_each(|(key, value)| flatten(pairs, &below(&key), value, depth + 1));
        }
        Value::Bool(true) => "on".to_owned(),
        Value::Bool(false) => "off".to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        // Without this node.
        Value::Null => String::new(),
    };
    pairs.push((name.to_owned(), text));
    Ok(())
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
