//! Records of long runs: a line of JSON for each, and a place in a document for what all of them have done.

use rustix::fs::FlockOperation;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::output;
use zebu_bench::workspace::root;

/// The commit that was run, and the day (UTC).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Origin {
    pub(crate) date: String,
    /// With `-dirty` if something that is built or run had been changed since.
    pub(crate) commit: String,
}

/// Paths that no run depends on, and seeds: a run goes on from what earlier ones have found.
const NOT_RUN: [&str; 4] = [":!docs", ":!bench/results", ":!fuzz/seeds", ":!*.md"];

impl Origin {
    /// Now: to be asked before anything is built.
    pub(crate) fn now() -> Outcome<Self> {
        let git = |args: &[&str]| output(Command::new("git").current_dir(root()).args(args));
        let commit = git(&["rev-parse", "--short=12", "HEAD"])?;
        let changed = git(&[&["status", "--porcelain", "--", "."], &NOT_RUN[..]].concat())?;
        let dirty = if changed.trim().is_empty() { "" } else { "-dirty" };
        let date = output(Command::new("date").args(["-u", "+%F"]))?;
        Ok(Self { date: date.trim().to_owned(), commit: format!("{}{dirty}", commit.trim()) })
    }

    /// The same, of a run that is not kept: the tree may be without git.
    pub(crate) fn or_unknown() -> Self {
        Self::now().unwrap_or_else(|_| Self { date: "unknown".into(), commit: "unknown".into() })
    }
}

/// A file of runs, and the place of their sums in a document.
pub(crate) struct Kept {
    /// One line of JSON for each run.
    pub(crate) runs: &'static str,
    pub(crate) page: &'static str,
    pub(crate) begin: &'static str,
    pub(crate) end: &'static str,
}

impl Kept {
    /// Adds a run, and writes the sums anew. Others that do the same wait.
    pub(crate) fn add<T: Serialize + DeserializeOwned + Clone>(
        &self,
        run: &T,
        sums: impl FnOnce(&[T]) -> String,
    ) -> Outcome {
        self.add_below(&root(), run, sums)?;
        println!("added to {} and {}", self.runs, self.page);
        Ok(())
    }

    /// Nothing is written until all that is to be written is known.
    fn add_below<T: Serialize + DeserializeOwned + Clone>(
        &self,
        root: &Path,
        run: &T,
        sums: impl FnOnce(&[T]) -> String,
    ) -> Outcome {
        let (path, page) = (root.join(self.runs), root.join(self.page));
        let said = |e: std::io::Error| format!("{}: {e}", path.display());
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(said)?;
        }
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.read(true).append(true).create(true).open(&path).map_err(said)?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive).map_err(|e| said(e.into()))?;
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(said)?;
        let mut runs = self.parse::<T>(&text)?;
        runs.push(run.clone());
        let said_of_page = |e: std::io::Error| format!("{}: {e}", page.display());
        let old = std::fs::read_to_string(&page).map_err(said_of_page)?;
        let new = self.replace(&old, &sums(&runs))?;
        let newline = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
        let line = format!("{newline}{}\n", serde_json::to_string(run).map_err(|e| e.to_string())?);
        file.write_all(line.as_bytes()).map_err(said)?;
        let folder = page.parent().unwrap_or(root);
        let mut whole = tempfile::NamedTempFile::new_in(folder).map_err(said_of_page)?;
        whole.write_all(new.as_bytes()).map_err(said_of_page)?;
        let readable = std::os::unix::fs::PermissionsExt::from_mode(0o644);
        whole.as_file().set_permissions(readable).map_err(said_of_page)?;
        whole.persist(&page).map_err(|e| said_of_page(e.error))?;
        Ok(())
    }

    fn parse<T: DeserializeOwned>(&self, text: &str) -> Outcome<Vec<T>> {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        lines.map(|line| serde_json::from_str(line).map_err(|e| format!("{}: {e}", self.runs))).collect()
    }

    fn replace(&self, page: &str, text: &str) -> Outcome<String> {
        let Self { begin, end, .. } = self;
        let missing = || format!("{} has no place for the sums, between {begin:?} and {end:?}", self.page);
        let (before, rest) = page.split_once(begin).ok_or_else(missing)?;
        let (_, after) = rest.split_once(end).ok_or_else(missing)?;
        Ok(format!("{before}{begin}\n\n{text}\n{end}{after}"))
    }

    /// Fails unless the page says what the runs add up to.
    #[cfg(test)]
    pub(crate) fn assert_up_to_date<T: DeserializeOwned>(&self, sums: impl FnOnce(&[T]) -> String) {
        let read = |name: &str| std::fs::read_to_string(root().join(name)).expect(name);
        let (runs, page) = (self.parse(&read(self.runs)).expect(self.runs), read(self.page));
        let is_up_to_date = self.replace(&page, &sums(&runs)).is_ok_and(|new| new == page);
        assert!(is_up_to_date, "{}: what is between the markers is not of {}", self.page, self.runs);
    }
}

/// The runs of each commit on each day, in the order of the first of each.
pub(crate) fn by_origin<T>(runs: &[T], origin: impl Fn(&T) -> &Origin) -> Vec<(&Origin, Vec<&T>)> {
    let mut groups = Vec::<(&Origin, Vec<&T>)>::new();
    for run in runs {
        match groups.iter_mut().find(|(of, _)| *of == origin(run)) {
            Some((_, group)) => group.push(run),
            None => groups.push((origin(run), vec![run])),
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: Kept =
        Kept { runs: "runs.jsonl", page: "page.md", begin: "<!-- begin -->", end: "<!-- end -->" };

    fn count(runs: &[u64]) -> String {
        format!("{} runs, {} in sum\n", runs.len(), runs.iter().sum::<u64>())
    }

    #[test]
    fn only_what_is_between_the_markers_changes() {
        let page = "a\n<!-- begin -->\nold\n<!-- end -->\nb\n";
        let new = HERE.replace(page, "new\n").unwrap();
        assert_eq!(new, "a\n<!-- begin -->\n\nnew\n\n<!-- end -->\nb\n");
    }

    #[test]
    fn a_run_that_has_no_place_on_the_page_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("page.md"), "nothing").unwrap();
        assert!(HERE.add_below(dir.path(), &7_u64, count).is_err());
        assert_eq!(std::fs::read_to_string(dir.path().join("runs.jsonl")).unwrap(), "");
    }

    #[test]
    fn runs_that_are_added_at_once_are_all_kept() {
        let dir = tempfile::tempdir().unwrap();
        // The last line was written by hand, without an end.
        std::fs::write(dir.path().join("runs.jsonl"), "1\n2").unwrap();
        std::fs::write(dir.path().join("page.md"), "<!-- begin --><!-- end -->").unwrap();
        std::thread::scope(|scope| {
            for number in 3..11_u64 {
                let dir = dir.path();
                scope.spawn(move || HERE.add_below(dir, &number, count).unwrap());
            }
        });
        let page = std::fs::read_to_string(dir.path().join("page.md")).unwrap();
        assert!(page.contains("10 runs, 55 in sum"), "{page}");
        assert_eq!(std::fs::read_to_string(dir.path().join("runs.jsonl")).unwrap().lines().count(), 10);
    }

    #[test]
    fn runs_are_told_apart_by_day_and_commit() {
        let of = |date: &str, commit: &str| Origin { date: date.into(), commit: commit.into() };
        let runs = [of("1", "a"), of("1", "b"), of("2", "a"), of("1", "a")];
        let counts: Vec<usize> =
            by_origin(&runs, |run| run).into_iter().map(|(_, group)| group.len()).collect();
        assert_eq!(counts, [2, 1, 1]);
    }
}
