//! Defaults of `--allow-refs`: the environment and a file widen what images may name.

use crate::error::DiskError;
use crate::program::Program;
use crate::words::{ReferenceRule, reference_argument, reference_policy};
use std::path::Path;
use zebu_engine::{RefPolicy, RemoteRefs};

/// Variable with rules, separated by commas.
const VARIABLE: &str = "ZEBU_ALLOW_REFS";
/// File with a rule a line. Empty lines, and lines that begin with `#`, say nothing.
const FILE: &str = "/etc/zebu/refs";

/// Policy of a command line whose `--allow-refs` are `given`.
///
/// # Errors
/// The rules contradict each other, or one of the variable or the file can't be read.
pub fn allowed_references(dialect: Program, given: &[ReferenceRule]) -> Result<RefPolicy, DiskError> {
    let rules = if given.is_empty() { default_rules(dialect)? } else { given.to_vec() };
    reference_policy(&rules).map_err(|reason| DiskError::Contradiction(reason.to_owned()))
}

/// Names with a protocol that images may name, where the `--allow-refs` of the command line are `given`.
///
/// Under QEMU's names plain paths are open by default, but nothing in an image leads to the network unless a rule says so.
///
/// # Errors
/// As [`default_rules`].
pub(crate) fn remote_references(given: &[ReferenceRule]) -> Result<RemoteRefs, DiskError> {
    let rules = if given.is_empty() { own_rules()? } else { given.to_vec() };
    if rules.contains(&ReferenceRule::All) {
        return Ok(RemoteRefs::All);
    }
    let prefix = |rule| if let ReferenceRule::Prefix(url) = rule { Some(url) } else { None };
    let prefixes: Vec<String> = rules.into_iter().filter_map(prefix).collect();
    Ok(if prefixes.is_empty() { RemoteRefs::None } else { RemoteRefs::Prefixes(prefixes) })
}

/// Rules where the command line has none.
///
/// Under QEMU's names every plain path may be opened, as QEMU does, unless a rule is `none` or `local`. Under its own name
/// zebu starts from `local`.
///
/// # Errors
/// A rule of the variable or of the file can't be read. The message names the place.
fn default_rules(dialect: Program) -> Result<Vec<ReferenceRule>, DiskError> {
    let rules = own_rules()?;
    let is_narrow = rules.iter().any(|rule| matches!(rule, ReferenceRule::None | ReferenceRule::Local));
    if dialect.is_qemu() && !is_narrow {
        return Ok(vec![ReferenceRule::All]);
    }
    Ok(rules)
}

/// Rules of the variable and of the file.
fn own_rules() -> Result<Vec<ReferenceRule>, DiskError> {
    let mut rules = match std::env::var_os(VARIABLE) {
        None => Vec::new(),
        Some(text) => {
            let text =
                text.to_str().ok_or_else(|| DiskError::Settings(format!("{VARIABLE} is not valid UTF-8")))?;
            rules_of(text.split(','), |_| VARIABLE.to_owned())?
        }
    };
    match std::fs::read_to_string(FILE) {
        Ok(text) => rules.extend(rules_of_file(&text, Path::new(FILE))?),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(DiskError::Settings(format!("{FILE}: {error}"))),
    }
    Ok(rules)
}

fn rules_of_file(text: &str, file: &Path) -> Result<Vec<ReferenceRule>, DiskError> {
    let lines = text.lines().map(|line| if line.trim_start().starts_with('#') { "" } else { line });
    rules_of(lines, |index| format!("{}:{}", file.display(), index + 1))
}

/// The rules among `items`; `place` names where an item stands.
fn rules_of<'a>(
    items: impl Iterator<Item = &'a str>,
    place: impl Fn(usize) -> String,
) -> Result<Vec<ReferenceRule>, DiskError> {
    let mut rules = Vec::new();
    for (index, item) in items.enumerate() {
        let item = item.trim();
        if item.is_empty() {
            continue;
        }
        // Only a whole path says which directory is meant, wherever the command is run.
        let rule = match reference_argument(item) {
            _ if item.starts_with('/') => ReferenceRule::Directory(item.into()),
            Ok(ReferenceRule::Directory(path)) if path.is_relative() => {
                return Err(DiskError::Settings(format!(
                    "{}: '{item}': the directory must be absolute",
                    place(index)
                )));
            }
            Ok(rule) => rule,
            Err(reason) => return Err(DiskError::Settings(format!("{}: '{item}': {reason}", place(index)))),
        };
        rules.push(rule);
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> Result<Vec<ReferenceRule>, String> {
        rules_of_file(text, Path::new("refs")).map_err(|error| error.to_string())
    }

    #[test]
    fn a_line_is_a_rule_or_a_directory() {
        let directory = |path: &str| ReferenceRule::Directory(path.into());
        assert_eq!(
            rules("# bases\n/srv/images\n\ndir=/var/lib/nova/_base\nlocal\n"),
            Ok(vec![directory("/srv/images"), directory("/var/lib/nova/_base"), ReferenceRule::Local])
        );
        assert_eq!(rules(""), Ok(vec![]));
    }

    #[test]
    fn a_wrong_line_is_named() {
        assert!(rules("/a\nanything\n").unwrap_err().starts_with("refs:2: 'anything': expected none, local"));
        assert!(rules("dir=base").unwrap_err().contains("must be absolute"));
    }
}
