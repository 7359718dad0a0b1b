//! JSON in the layout of QEMU's programs: their indent, their empty lists, their order of keys.
//!
//! QEMU keeps an object's members in a table of buckets and prints them bucket by bucket. So the order depends on nothing
//! but the keys, and programs that compare text see it. The hash is that of tdb (Trivial Database).

use serde_json::Value;

/// Buckets of QEMU's table.
const BUCKETS: u32 = 512;

/// `value` as text, without a line end.
pub fn text(value: &Value) -> String {
    let mut text = String::new();
    push(&mut text, value, 0);
    text
}

/// `value` on one line, as in names that begin with `json:`.
pub fn line(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("[{}]", items.iter().map(line).collect::<Vec<_>>().join(", ")),
        Value::Object(members) => {
            let member = |key: &String| format!("{}: {}", Value::from(key.as_str()), line(&members[key]));
            format!("{{{}}}", in_order(members).into_iter().map(member).collect::<Vec<_>>().join(", "))
        }
        _ => value.to_string(),
    }
}

/// Keys in the order of QEMU's table, where the last one of a bucket comes first.
fn in_order(members: &serde_json::Map<String, Value>) -> Vec<&String> {
    let mut keys: Vec<&String> = members.keys().rev().collect();
    keys.sort_by_key(|key| hash(key) % BUCKETS);
    keys
}

fn push(text: &mut String, value: &Value, depth: usize) {
    match value {
        Value::Array(items) => {
            text.push('[');
            for (index, item) in items.iter().enumerate() {
                begin_item(text, index, depth + 1);
                push(text, item, depth + 1);
            }
            end_items(text, depth, ']');
        }
        Value::Object(members) => {
            text.push('{');
            for (index, key) in in_order(members).into_iter().enumerate() {
                begin_item(text, index, depth + 1);
                text.push_str(&Value::from(key.as_str()).to_string());
                text.push_str(": ");
                push(text, &members[key], depth + 1);
            }
            end_items(text, depth, '}');
        }
        _ => text.push_str(&value.to_string()),
    }
}

fn begin_item(text: &mut String, index: usize, depth: usize) {
    if index > 0 {
        text.push(',');
    }
    new_line(text, depth);
}

fn end_items(text: &mut String, depth: usize, end: char) {
    new_line(text, depth);
    text.push(end);
}

fn new_line(text: &mut String, depth: usize) {
    text.push('\n');
    text.extend(std::iter::repeat_n("    ", depth));
}

/// Position of a key in the table, before the remainder is taken.
fn hash(key: &str) -> u32 {
    let start = 0x238f_13af_u32.wrapping_mul(key.len() as u32);
    let mixed = key
        .bytes()
        .enumerate()
        .fold(start, |sum, (at, byte)| sum.wrapping_add(u32::from(byte).wrapping_shl((at * 5 % 24) as u32)));
    mixed.wrapping_mul(1_103_515_243).wrapping_add(12_345)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn of_keys_in_one_bucket_the_last_comes_first() {
        assert_eq!(
            line(&json!({"backing-filename-format": 1, "children": [2, {}]})),
            r#"{"children": [2, {}], "backing-filename-format": 1}"#
        );
    }

    // As qemu-img 10.0 prints it.
    #[test]
    fn keys_have_qemus_order_and_empty_lists_two_lines() {
        let value = json!({"name": "file", "info": {"format": "file", "children": [], "virtual-size": 1,
            "dirty-flag": false, "format-specific": {"data": {}, "type": "file"}, "actual-size": 2,
            "filename": "a"}});
        let expected = r#"{
    "name": "file",
    "info": {
        "children": [
        ],
        "virtual-size": 1,
        "filename": "a",
        "format": "file",
        "actual-size": 2,
        "format-specific": {
            "type": "file",
            "data": {
            }
        },
        "dirty-flag": false
    }
}"#;
        assert_eq!(text(&value), expected);
    }
}
