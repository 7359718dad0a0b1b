//! Checks of prose: how doc comments begin, and whether links between documents lead to a file.

use std::fs;
use std::path::{Path, PathBuf};
use zebu_bench::Outcome;
use zebu_bench::workspace::root;

/// Folders with code.
const CODE: [&str; 7] = ["bindings", "crates", "tests", "fuzz", "bench", "source", "xtask"];
/// Crates whose messages reach users that have no command line.
const LIBRARY: [&str; 8] = ["qcow2", "luks", "foreign", "storage", "engine", "remote", "drivers", "export"];
/// Other programs, whose options a message may name.
const OTHER_PROGRAMS: [&str; 3] = ["ulimit", "hdiutil", "openssl"];
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
            faults.extend(named_options(text).into_iter().map(|(line, word)| {
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
/// The line is that of the option, which may be a further one of the text.
fn named_options(text: &str) -> Vec<(usize, &str)> {
    const BETWEEN: [char; 12] = [' ', '\n', '(', ')', '\\', '=', ',', ';', ':', '\'', '`', '['];
    // Items for tests may stand before; their module comes last.
    let product = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let line_of = |part: &str| product[..part.as_ptr().addr() - product.as_ptr().addr()].lines().count();
    // `ulimit -n` and others are commands of other programs.
    let is_ours = |text: &&str| !OTHER_PROGRAMS.iter().any(|program| text.contains(program));
    let quoted = quoted(product).into_iter().filter(is_ours);
    quoted
        .filter_map(|text| text.split(BETWEEN).find(|word| is_option(word)))
        .map(|word| (line_of(word).max(1), word))
        .collect()
}

/// The texts in quotes of a source file, those that go on over several lines included.
fn quoted(source: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = source;
    while let Some(at) = rest.find(['"', '/', '\'']) {
        let from = &rest[at..];
        let len = if from.starts_with("//") {
            from.find('\n').unwrap_or(from.len())
        } else if from.starts_with("'\"'") || from.starts_with("'\\") {
            // A quote, or an escape, as a character.
            from[2..].find('\'').map_or(from.len(), |end| end + 3)
        } else if let Some(text) = from.strip_prefix('"') {
            let end = end_of_text(text);
            found.push(&text[..end]);
            (end + 2).min(from.len())
        } else {
            1
        };
        rest = &from[len..];
    }
    found
}

/// Where the closing quote is. (Texts of the form `r#".."#` have no escapes, but hardly a backslash before a quote.)
fn end_of_text(text: &str) -> usize {
    let mut escaped = false;
    let end = text.char_indices().find(|&(_, c)| {
        let closes = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        closes
    });
    end.map_or(text.len(), |(at, _)| at)
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
        let text = "#[cfg(test)]\nuse a::b;\n/// \"--a\"\nf(\"use --shrink=on\");\ng(\"x - y, a--b, -1\", --c);\nh(\"lock (-U)\");\nf('\"', '\\'', \
                    \"on \\\n  --e\", -y, \"\\\" -z\");\nf(\"ulimit -n\"); // \" -q\n#[cfg(test)]\nmod tests {\nf(\"--d\");";
        assert_eq!(named_options(text), [(4, "--shrink"), (6, "-U"), (8, "--e"), (8, "-z")]);
    }

    #[test]
    fn a_link_that_leads_nowhere_is_found() {
        let page = root().join("docs/README.md");
        let text = "[a](../README.md#start) [b](missing.md) [c](https://example.org) [d](#here)";
        assert_eq!(dead_links(&page, text), ["docs/README.md: a link to missing.md, which is not there"]);
    }
}
