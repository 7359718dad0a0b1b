//! JSON as QEMU lays it out: an indent of 4 spaces.

use crate::failure::Failure;
use serde::Serialize;
use zebu_disks::qemu_json;
use zebu_disks::{Program, is_control};

/// `value` as text, with a line end.
///
/// Under QEMU's names it has QEMU's layout to the letter.
pub(crate) fn to_text(dialect: Program, value: &impl Serialize) -> Result<String, Failure> {
    if dialect.is_qemu() {
        let value = serde_json::to_value(value)
            .map_err(|error| Failure::new(format!("could not put the result into JSON: {error}")))?;
        return Ok(escape(&(qemu_json::text(&value) + "\n")));
    }
    let mut bytes = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    value
        .serialize(&mut serializer)
        .map_err(|error| Failure::new(format!("could not put the result into JSON: {error}")))?;
    bytes.push(b'\n');
    String::from_utf8(bytes)
        .map(|text| escape(&text))
        .map_err(|error| Failure::new(format!("could not put the result into JSON: {error}")))
}

/// JSON with escapes for control characters that it may hold as they are, so that no name sends them to a terminal. They
/// stand in strings only: the layout has none but line ends.
fn escape(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        if is_control(c) && c != '\n' {
            text.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            text.push(c);
        }
    }
    text
}

/// A path as a JSON string; bytes that are not UTF-8 are replaced.
pub(crate) fn path_text(path: &std::path::Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_whole_and_send_nothing_to_a_terminal() {
        let name = "a\u{9b}31m\u{7f}\u{1b}[2J\n\u{202e}gr\u{f6}\u{df}e \u{1f9a7}";
        let text = to_text(Program::Zebu, &[name]).unwrap();
        assert_eq!(text, "[\n    \"a\\u009b31m\\u007f\\u001b[2J\\n\\u202egr\u{f6}\u{df}e \u{1f9a7}\"\n]\n");
        assert_eq!(serde_json::from_str::<Vec<String>>(&text).unwrap(), [name]);
    }
}
