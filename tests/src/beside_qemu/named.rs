//! Differences that are meant: the rows of the guide's page, which is the only list of them.

use std::path::Path;

/// The page, in the repository.
pub const PAGE: &str = "docs/guide/qemu-differences.md";

/// The kind of differences between stacks of drivers.
pub const STACK: &str = "stack";

/// A row: lines of these patterns differ in this respect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// The number in the page.
    pub number: u32,
    patterns: Vec<String>,
    kinds: Vec<String>,
}

impl Named {
    /// Tells whether the row is one of stacks of drivers.
    pub fn is_of_stacks(&self) -> bool {
        self.kinds.iter().any(|kind| kind == STACK)
    }

    /// Tells whether a line's difference of this kind is meant.
    pub fn names(&self, line: &str, kind: &str) -> bool {
        self.kinds.iter().any(|other| other == kind)
            && self.patterns.iter().any(|pattern| fits(pattern, line))
    }
}

/// The rows of the page.
///
/// # Panics
/// If the page is not there, or a row has no number.
pub fn rows() -> Vec<Named> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(PAGE);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.lines().filter_map(row).collect()
}

/// A row `| 7 | exit code | `pattern`, `pattern` | reason |`.
fn row(line: &str) -> Option<Named> {
    let mut cells = line.strip_prefix('|')?.split('|').map(str::trim);
    let number = cells.next()?.parse().ok()?;
    let kinds = cells.next()?.split(',').map(|kind| kind.trim().to_owned()).collect();
    let patterns = cells.next()?.split('`').skip(1).step_by(2).map(str::to_owned).collect();
    let reason = cells.next()?;
    assert!(!reason.is_empty(), "row {number} has no reason");
    Some(Named { number, patterns, kinds })
}

/// Tells whether a text fits a pattern, in which `*` is any text.
fn fits(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let mut parts = parts.peekable();
    if parts.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return rest.ends_with(part);
        }
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_name_lines() {
        let row = row("| 7 | code, stderr | `qemu-img info * a.raw`, `x` | because |").unwrap();
        assert!(row.names("qemu-img info -f raw a.raw", "code") && row.names("x", "stderr"));
        assert!(!row.names("qemu-img info -f raw a.raw b", "code") && !row.names("x", "stdout"));
        assert!(fits("*a*b*", "xaxbx") && !fits("*a*b", "xbxa") && fits("", "") && !fits("a", "ab"));
    }
}
