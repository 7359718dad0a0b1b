//! JSON as QEMU lays it out: an indent of 4 spaces.

use crate::failure::Failure;
use serde::Serialize;

/// `value` as text, with a line end.
pub(crate) fn to_text(value: &impl Serialize) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    let formatter = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    value
        .serialize(&mut serializer)
        .map_err(|error| Failure::new(format!("could not put the result into JSON: {error}")))?;
    bytes.push(b'\n');
    String::from_utf8(bytes)
        .map_err(|error| Failure::new(format!("could not put the result into JSON: {error}")))
}

/// A path as a JSON string; bytes that are not UTF-8 are replaced.
pub(crate) fn path_text(path: &std::path::Path) -> String {
    path.to_string_lossy().into_owned()
}
