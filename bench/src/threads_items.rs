//! The page `docs/threads-items.md`: each point has a state and a place, and what it names is there.

use crate::tables::named;
use crate::workspace::root;
use std::path::Path;

/// Points of the five discussions.
const POINTS: usize = 152;

fn page() -> String {
    std::fs::read_to_string(root().join("docs/threads-items.md")).unwrap()
}

/// Appends the text of each Rust file below `dir`.
fn read_sources(dir: &Path, text: &mut String) {
    for path in std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            read_sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&std::fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn no_point_is_without_a_state_and_a_place_or_a_reason() {
    let page = page();
    let is_point = |line: &&str| {
        line.strip_prefix("| ").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    let points: Vec<&str> = page.lines().filter(is_point).collect();
    assert_eq!(points.len(), POINTS);
    for point in points {
        let cells: Vec<&str> = point.trim_end_matches(" |").split(" | ").collect();
        let [_, _, state, place] = cells[..] else { panic!("not four cells: {point}") };
        assert!(["done", "partly", "missing", "\u{2013}"].contains(&state), "{point}");
        assert!(!place.trim().is_empty(), "{point}");
    }
}

#[test]
fn files_tests_and_tables_that_points_name_are_there() {
    let page = page();
    let mut sources = String::new();
    for dir in ["crates", "tests"] {
        read_sources(&root().join(dir), &mut sources);
    }
    for name in page.split('`').skip(1).step_by(2) {
        let is_test = name.matches('_').count() > 2
            && name.chars().all(|c| c == '_' || c.is_ascii_lowercase() || c.is_ascii_digit());
        if name.contains('/') && !name.contains(' ') {
            assert!(root().join(name).exists(), "{name}");
        } else if is_test {
            assert!(sources.contains(&format!("fn {name}(")), "{name}");
        }
    }
    for rest in ["table `", "tables `"].iter().flat_map(|word| page.split(*word).skip(1)) {
        let name = rest.split('`').next().unwrap_or_default();
        assert!(named(name).is_some(), "{name}");
    }
}
