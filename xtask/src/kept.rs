//! What is kept of long runs: a line of JSON for each, and a place in a document for what all of them have done.

use crate::process::output;
use crate::{Outcome, root};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::Write;
use std::process::Command;

/// What was run, and on which day (UTC).
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub(crate) date: String,
    /// With `-dirty` if files below the folders had been changed since.
    pub(crate) commit: String,
}

impl Origin {
    /// Now, of what is in `folders`.
    pub(crate) fn now(folders: &[&str]) -> Self {
        let said = |command: &mut Command| output(command.current_dir(root())).ok();
        let commit = said(Command::new("git").args(["rev-parse", "--short=12", "HEAD"]));
        let mut status = Command::new("git");
        let changed =
            said(status.args(["status", "--porcelain", "--untracked-files=no", "--"]).args(folders));
        let dirty = if changed.is_some_and(|text| !text.trim().is_empty()) { "-dirty" } else { "" };
        let date = said(Command::new("date").args(["-u", "+%F"]));
        Self {
            date: date.unwrap_or_default().trim().to_owned(),
            commit: commit.map_or("unknown".to_owned(), |text| text.trim().to_owned() + dirty),
        }
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
    /// Adds a run, and writes the sums anew.
    pub(crate) fn add<T: Serialize + DeserializeOwned>(
        &self,
        run: &T,
        sums: impl FnOnce(&[T]) -> String,
    ) -> Outcome {
        let runs = self.append(run)?;
        let page = root().join(self.page);
        let said = |e: std::io::Error| format!("{}: {e}", page.display());
        let old = std::fs::read_to_string(&page).map_err(said)?;
        std::fs::write(&page, self.replace(&old, &sums(&runs))?).map_err(said)?;
        println!("added to {} and {}", self.runs, self.page);
        Ok(())
    }

    /// Adds a run; all there are then.
    fn append<T: Serialize + DeserializeOwned>(&self, run: &T) -> Outcome<Vec<T>> {
        let path = root().join(self.runs);
        let said = |e: std::io::Error| format!("{}: {e}", path.display());
        let line = serde_json::to_string(run).map_err(|e| e.to_string())?;
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(said)?;
        }
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(&path).map_err(said)?;
        writeln!(file, "{line}").map_err(said)?;
        let text = std::fs::read_to_string(&path).map_err(said)?;
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_markers_changes() {
        let kept = Kept { runs: "", page: "", begin: "<!-- begin -->", end: "<!-- end -->" };
        let page = "a\n<!-- begin -->\nold\n<!-- end -->\nb\n";
        let new = kept.replace(page, "new\n").unwrap();
        assert_eq!(new, "a\n<!-- begin -->\n\nnew\n\n<!-- end -->\nb\n");
        assert!(kept.replace("nothing", "new").is_err());
    }
}
