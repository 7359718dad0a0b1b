//! The two formats of `map`: QEMU's table, and its JSON with one line per extent.

use std::fmt::Write as _;
use zebu_engine::jobs::MapEntry;

/// The header of the table.
pub(crate) const TABLE_HEADER: &str = "Offset          Length          Mapped to       File\n";

/// Adds the row of an extent that is stored in `file`. `None` if the table has no way to show it: compressed data, or
/// data without an offset.
pub(crate) fn table_row(out: &mut String, entry: &MapEntry, file: &str) -> Option<()> {
    if !entry.data || entry.zero {
        // Only what is stored has a row; but data without an offset can't even be left out.
        return if entry.data && entry.offset.is_none() { None } else { Some(()) };
    }
    let offset = entry.offset.filter(|_| !entry.compressed)?;
    let _ = writeln!(out, "{:<16}{:<16}{:<16}{file}", hex(entry.start), hex(entry.length), hex(offset));
    Some(())
}

/// Adds an extent to the JSON array. `first` says whether it opens the array.
pub(crate) fn json_line(out: &mut String, entry: &MapEntry, position: LinePosition) {
    out.push_str(match position {
        LinePosition::First => "[",
        LinePosition::Later => ",\n",
    });
    let _ = write!(
        out,
        "{{ \"start\": {}, \"length\": {}, \"depth\": {}, \"present\": {}, \"zero\": {}, \"data\": {}, \
         \"compressed\": {}",
        entry.start, entry.length, entry.depth, entry.present, entry.zero, entry.data, entry.compressed
    );
    if let Some(offset) = entry.offset {
        let _ = write!(out, ", \"offset\": {offset}");
    }
    out.push('}');
}

/// Where in the JSON array an extent stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinePosition {
    /// At its beginning.
    First,
    /// Behind another.
    Later,
}

/// The end of the JSON array, after at least one extent or none.
pub(crate) fn json_end(position: LinePosition) -> &'static str {
    match position {
        LinePosition::First => "[]\n",
        LinePosition::Later => "]\n",
    }
}

/// As C's `%#x`: zero has no prefix.
fn hex(value: u64) -> String {
    if value == 0 { "0".to_owned() } else { format!("{value:#x}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mebibyte of data, changed.
    fn entry(change: impl FnOnce(&mut MapEntry)) -> MapEntry {
        let mut entry = MapEntry::default();
        entry.length = 0x100000;
        (entry.present, entry.data) = (true, true);
        entry.offset = Some(0x50000);
        change(&mut entry);
        entry
    }

    fn data() -> MapEntry {
        entry(|_| ())
    }

    #[test]
    fn rows_show_stored_data_only() {
        let mut out = String::new();
        assert!(table_row(&mut out, &data(), "a.qcow2").is_some());
        assert!(
            table_row(&mut out, &entry(|entry| (entry.zero, entry.data) = (true, false)), "a.qcow2")
                .is_some()
        );
        assert_eq!(out, "0               0x100000        0x50000         a.qcow2\n");
    }

    #[test]
    fn compressed_data_has_no_row() {
        let compressed = entry(|entry| (entry.compressed, entry.offset) = (true, None));
        assert!(table_row(&mut String::new(), &compressed, "a").is_none());
    }

    #[test]
    fn json_is_laid_out_line_by_line() {
        let mut out = String::new();
        json_line(&mut out, &data(), LinePosition::First);
        let hole = entry(|entry| {
            (entry.start, entry.offset) = (5, None);
            (entry.zero, entry.data, entry.present) = (true, false, false);
        });
        json_line(&mut out, &hole, LinePosition::Later);
        out.push_str(json_end(LinePosition::Later));
        assert_eq!(
            out,
            "[{ \"start\": 0, \"length\": 1048576, \"depth\": 0, \"present\": true, \"zero\": false, \
             \"data\": true, \"compressed\": false, \"offset\": 327680},\n\
             { \"start\": 5, \"length\": 1048576, \"depth\": 0, \"present\": false, \"zero\": true, \
             \"data\": false, \"compressed\": false}]\n"
        );
        assert!(serde_json::from_str::<serde_json::Value>(&out).is_ok());
    }
}
