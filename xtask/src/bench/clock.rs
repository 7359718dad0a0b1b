//! How long a run will still take, from how long each table took the last time that it was kept.

use super::lab::Extent;
use crate::Outcome;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Seconds by table.
type Seconds = BTreeMap<String, f64>;

pub(super) struct Clock {
    file: PathBuf,
    /// By extent, then by table.
    known: BTreeMap<String, Seconds>,
    extent: &'static str,
    begin: Instant,
    table: Option<(&'static str, Instant)>,
}

impl Clock {
    pub(super) fn new(results: &Path, extent: Extent) -> Self {
        let file = results.join("durations.json");
        let known = std::fs::read_to_string(&file).ok().and_then(|text| serde_json::from_str(&text).ok());
        let extent = extent.name();
        Self { file, known: known.unwrap_or_default(), extent, begin: Instant::now(), table: None }
    }

    /// Begins the first of `tables`, those that are left.
    pub(super) fn begin(&mut self, tables: &[&'static str]) -> String {
        let Some(first) = tables.first() else { return String::new() };
        self.table = Some((first, Instant::now()));
        let spent = self.begin.elapsed();
        let left: Option<f64> =
            tables.iter().map(|table| self.known.get(self.extent)?.get(*table).copied()).sum();
        match left {
            Some(left) => {
                format!("{} so far, about {} left", shown(spent), shown(Duration::from_secs_f64(left)))
            }
            None => format!("{} so far", shown(spent)),
        }
    }

    /// Notes how long the table took.
    pub(super) fn end(&mut self) {
        if let Some((table, begin)) = self.table.take() {
            let seconds = begin.elapsed().as_secs_f64().round();
            self.known.entry(self.extent.into()).or_default().insert(table.into(), seconds);
        }
    }

    /// Keeps what was noted.
    pub(super) fn save(&self) -> Outcome {
        let text = serde_json::to_string_pretty(&self.known).map_err(|e| e.to_string())?;
        std::fs::write(&self.file, text + "\n").map_err(|e| format!("{}: {e}", self.file.display()))
    }
}

fn shown(time: Duration) -> String {
    let seconds = time.as_secs();
    if seconds < 60 { format!("{seconds} s") } else { format!("{} min {:02} s", seconds / 60, seconds % 60) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_is_what_the_tables_took_before() {
        let folder = tempfile::TempDir::new().unwrap();
        let mut clock = Clock::new(folder.path(), Extent::Full);
        assert!(!clock.begin(&["a", "b"]).contains("left"), "nothing is known yet");
        clock.end();
        clock.begin(&["b"]);
        clock.end();
        clock.known.get_mut("full").unwrap().extend([("a".into(), 100.0), ("b".into(), 25.0)]);
        clock.save().unwrap();
        let mut again = Clock::new(folder.path(), Extent::Full);
        assert!(again.begin(&["a", "b"]).ends_with("about 2 min 05 s left"));
        assert!(!Clock::new(folder.path(), Extent::Quick).begin(&["a"]).contains("left"), "another extent");
    }
}
