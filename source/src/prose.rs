//! Checks of prose: how doc comments begin, and whether links between documents lead to a file.

use std::fs;
use std::path::{Path, PathBuf};
use zebu_bench::Outcome;
use zebu_bench::workspace::root;

/// Folders with code.
const CODE: [&str; 6] = ["crates", "tests", "fuzz", "bench", "source", "xtask"];
/// Crates whose messages reach users that have no command line. (`remote` still names options of the command.)
const LIBRARY: [&str; 6] = ["qcow2", "luks", "foreign", "storage", "engine", "export"];
/// Words that hide the noun which a reader looks for.
const FORBIDDEN: [&str; 8] =
    ["What", "Who", "Whoever", "Whom", "Whose", "Those", "That which", "See the module"];

/// Fails with the place of each doc comment that begins with a forbidden word, and of each link that leads nowhere.
pub fn check() -> Outcome {
    let mut faults = Vec::new();
    for folder in CODE {
        walk(&root().join(folder), "rs", &mut |path, text| {
            faults.extend(bad_starts(text).map(|(line, start)| {
                format!("{}:{line}: a doc comment begins with a noun or a verb: {start}", shown(path))
            }));
        })?;
    }
    for crate_name in LIBRARY {
        let visit = &mut |path: &Path, text: &str| {
            faults.extend(named_options(text).map(|(line, word)| {
                format!(
                    "{}:{line}: a message of the library names an option of the command: {word}",
                    shown(path)
                )
            }));
        };
        walk(&root().join("crates").join(crate_name).join("src"), "rs", visit)?;
    }
    for folder in ["docs", "bench"] {
        walk(&root().join(folder), "md", &mut |path, text| faults.extend(dead_links(path, text)))?;
    }
    for page in ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"] {
        let path = root().join(page);
        let text = fs::read_to_string(&path).map_err(|e| format!("{page}: {e}"))?;
        faults.extend(dead_links(&path, &text));
    }
    if faults.is_empty() { Ok(()) } else { Err(faults.join("\n")) }
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

fn walk(dir: &Path, extension: &str, visit: &mut dyn FnMut(&Path, &str)) -> Outcome {
    let fail = |path: &Path, e: std::io::Error| format!("{}: {e}", path.display());
    for entry in fs::read_dir(dir).map_err(|e| fail(dir, e))?.flatten() {
        let path = entry.path();
        if path.is_dir() && !path.ends_with("target") {
            walk(&path, extension, visit)?;
        } else if path.extension().is_some_and(|found| found == extension) {
            visit(&path, &fs::read_to_string(&path).map_err(|e| fail(&path, e))?);
        }
    }
    Ok(())
}

/// The text of a line that is a doc comment.
fn doc(line: &str) -> Option<&str> {
    let line = line.trim_start();
    line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).map(str::trim)
}

/// Lines, from 1 on, on which a paragraph of a doc comment begins with a forbidden word.
fn bad_starts(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let before = std::iter::once("").chain(text.lines());
    text.lines().zip(before).enumerate().filter_map(|(index, (line, before))| {
        let start = doc(line)?;
        let continues = doc(before).is_some_and(|text| !text.is_empty());
        let forbidden = FORBIDDEN.iter().any(|word| {
            start.strip_prefix(word).is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric()))
        });
        (!continues && forbidden).then_some((index + 1, start))
    })
}

/// Lines, from 1 on, before the tests of a file, with a text in quotes that names an option: `--shrink`, `-f raw`, `(-U)`.
/// Texts that go on on a further line are looked at in their first line only.
fn named_options(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let product = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = product.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"));
    lines.filter_map(|(index, line)| {
        // `ulimit -n` is a command of the shell.
        let quoted = line.split('"').skip(1).step_by(2).filter(|text| !text.contains("ulimit"));
        let mut words = quoted.flat_map(|text| text.split([' ', '(', ')', '\\', '=', ',', ';', ':']));
        words.find(|word| is_option(word)).map(|word| (index + 1, word))
    })
}

fn is_option(word: &str) -> bool {
    let is_name = |name: &str| name.starts_with(|c: char| c.is_ascii_alphabetic());
    match word.strip_prefix("--") {
        Some(name) => is_name(name),
        None => word.strip_prefix('-').is_some_and(|name| name.len() == 1 && is_name(name)),
    }
}

/// Links of a document to files that are not there.
fn dead_links(path: &Path, text: &str) -> Vec<String> {
    let folder = path.parent().unwrap_or(path);
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
    targets
        .filter(|target| !target.contains("://") && !target.starts_with('#'))
        .map(|target| target.split_once('#').map_or(target, |(file, _)| file))
        .filter(|target| !folder.join(PathBuf::from(target)).exists())
        .map(|target| format!("{}: a link to {target}, which is not there", shown(path)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paragraph_that_begins_with_a_forbidden_word_is_found() {
        let text = "/// What it is.\n\n/// Whatever.\n/// What goes on.\n///\n/// Those.\n\n    //! Who.";
        let lines: Vec<usize> = bad_starts(text).map(|(line, _)| line).collect();
        assert_eq!(lines, [1, 6, 8]);
    }

    #[test]
    fn an_option_in_a_message_is_found() {
        let text = "/// \"--a\"\nf(\"use --shrink=on\");\ng(\"x - y, a--b, -1\", --c);\nh(\"lock (-U)\");\nf(\"on \\\n  --e\");\n#[cfg(test)]\nf(\"--d\");";
        let found: Vec<_> = named_options(text).collect();
        assert_eq!(found, [(2, "--shrink"), (4, "-U")]);
    }

    #[test]
    fn a_link_that_leads_nowhere_is_found() {
        let page = root().join("docs/README.md");
        let text = "[a](../README.md#start) [b](missing.md) [c](https://example.org) [d](#here)";
        assert_eq!(dead_links(&page, text), ["docs/README.md: a link to missing.md, which is not there"]);
    }
}
