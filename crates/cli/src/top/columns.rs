//! The columns of the table: which fit, and what is in them.

use super::board::Line;
use super::rates::{Rate, Row};
use crate::output::terminal::Charset;
use crate::output::units::size_short;
use std::time::Duration;
use zebu_disks::printable;

/// A column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Column {
    Export,
    Reads,
    Writes,
    ReadBytes,
    WrittenBytes,
    ReadLatency,
    WriteLatency,
    CacheHits,
    Clients,
    State,
}

/// Columns as they stand beside each other.
pub(crate) const ALL: [Column; 10] = [
    Column::Export,
    Column::Reads,
    Column::Writes,
    Column::ReadBytes,
    Column::WrittenBytes,
    Column::ReadLatency,
    Column::WriteLatency,
    Column::CacheHits,
    Column::Clients,
    Column::State,
];

/// Columns by what they are worth: those that come last go first where there is no room.
const BY_WORTH: [Column; 10] = [
    Column::Export,
    Column::Reads,
    Column::Writes,
    Column::State,
    Column::ReadBytes,
    Column::WrittenBytes,
    Column::ReadLatency,
    Column::WriteLatency,
    Column::Clients,
    Column::CacheHits,
];

impl Column {
    /// Its head.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Export => "EXPORT",
            Self::Reads => "READ/S",
            Self::Writes => "WRITE/S",
            Self::ReadBytes => "READ B/S",
            Self::WrittenBytes => "WRITE B/S",
            Self::ReadLatency => "READ",
            Self::WriteLatency => "WRITE",
            Self::CacheHits => "CACHE",
            Self::Clients => "CLIENTS",
            Self::State => "STATE",
        }
    }

    /// The columns of the screen that it needs at least.
    fn least(self) -> usize {
        match self {
            Self::Export => 12,
            Self::Reads | Self::Writes | Self::Clients | Self::ReadLatency | Self::WriteLatency => 7,
            Self::ReadBytes | Self::WrittenBytes => 9,
            Self::CacheHits => 6,
            Self::State => 10,
        }
    }

    /// Whether it begins at the left, and takes what room there is.
    pub(crate) fn is_text(self) -> bool {
        matches!(self, Self::Export | Self::State)
    }
}

/// Columns that fit into `width`, with their widths; a blank stands between them.
pub(crate) fn fitting(width: usize) -> Vec<(Column, usize)> {
    let mut chosen: Vec<Column> = Vec::new();
    let mut used = 0;
    for column in BY_WORTH {
        let with = used + column.least() + usize::from(!chosen.is_empty());
        if with > width && !chosen.is_empty() {
            break;
        }
        chosen.push(column);
        used = with;
    }
    let rest = width.saturating_sub(used);
    let has_state = chosen.contains(&Column::State);
    let room = |column: Column| match column {
        Column::Export if has_state => rest / 2,
        Column::Export => rest,
        Column::State => rest - rest / 2,
        _ => 0,
    };
    let least = |column: Column| column.least().min(width);
    ALL.into_iter()
        .filter(|column| chosen.contains(column))
        .map(|column| (column, least(column) + room(column)))
        .collect()
}

/// The text of a line in a column.
pub(crate) fn cell(line: &Line, column: Column, charset: Charset) -> String {
    let shown = |text: &str| {
        let text = printable(text);
        match charset {
            Charset::Unicode => text.into_owned(),
            Charset::Ascii => text.chars().map(|c| if c.is_ascii() { c } else { '?' }).collect(),
        }
    };
    let row = match (&line.row, column) {
        (_, Column::Export) => return shown(&line.name),
        (Err(trouble), Column::State) => return shown(trouble),
        (Err(_), _) => return "-".to_owned(),
        (Ok(row), _) => row,
    };
    let of = |rate: Option<Rate>, text: fn(Rate) -> String| rate.map_or_else(|| "-".to_owned(), text);
    match column {
        Column::Reads => of(row.reads, |rate| count(rate.requests)),
        Column::Writes => of(row.writes, |rate| count(rate.requests)),
        Column::ReadBytes => of(row.reads, |rate| size_short(rate.bytes as u64)),
        Column::WrittenBytes => of(row.writes, |rate| size_short(rate.bytes as u64)),
        Column::ReadLatency => of(row.reads, |rate| latency(rate.latency)),
        Column::WriteLatency => of(row.writes, |rate| latency(rate.latency)),
        Column::CacheHits => row.cache_hits.map_or_else(|| "-".to_owned(), |part| format!("{part:.0}%")),
        Column::Clients => row.export.clients.to_string(),
        Column::Export | Column::State => shown(&state(row)),
    }
}

/// Words on an export beside its figures.
pub(crate) fn state(row: &Row) -> String {
    let jobs = row.export.jobs.iter().map(|job| format!("{} {}%", job.kind, job.percent()));
    let waits = row.export.waits.iter().map(|wait| format!("waits for {wait}"));
    let is_read_only = row.export.is_read_only.then(|| "read-only".to_owned());
    let all: Vec<String> = jobs.chain(waits).chain(is_read_only).collect();
    if all.is_empty() { "ok".to_owned() } else { all.join(", ") }
}

/// A number of requests in at most six characters.
fn count(requests: f64) -> String {
    match requests {
        ..10.0 if requests.fract() > 0.05 => format!("{requests:.1}"),
        ..100_000.0 => format!("{requests:.0}"),
        _ => format!("{:.0}k", requests / 1000.0),
    }
}

/// A time in at most seven characters.
fn latency(time: Option<Duration>) -> String {
    let Some(time) = time else { return "-".to_owned() };
    let micros = time.as_secs_f64() * 1e6;
    match micros {
        ..1000.0 => format!("{micros:.0} us"),
        ..10_000.0 => format!("{:.1} ms", micros / 1e3),
        ..1e6 => format!("{:.0} ms", micros / 1e3),
        _ => format!("{:.1} s", micros / 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::{Export, Job};
    use super::*;

    #[test]
    fn columns_fit_every_width() {
        for width in 0..300 {
            let columns = fitting(width);
            let used: usize = columns.iter().map(|(_, width)| width + 1).sum::<usize>() - 1;
            assert!(used <= width.max(1), "{width}: {columns:?}");
            assert_eq!(columns[0].0, Column::Export);
        }
        let names: Vec<Column> = fitting(40).into_iter().map(|(column, _)| column).collect();
        assert_eq!(names, [Column::Export, Column::Reads, Column::Writes, Column::State]);
        assert_eq!(fitting(120).len(), ALL.len());
    }

    #[test]
    fn figures_are_short() {
        for (requests, text) in
            [(0.0, "0"), (0.5, "0.5"), (12.3, "12"), (99_999.0, "99999"), (1.5e6, "1500k")]
        {
            assert_eq!(count(requests), text);
        }
        for (micros, text) in [(7, "7 us"), (1500, "1.5 ms"), (25_000, "25 ms"), (2_500_000, "2.5 s")] {
            assert_eq!(latency(Some(Duration::from_micros(micros))), text);
        }
        assert_eq!(latency(None), "-");
    }

    #[test]
    fn names_are_shown_as_the_terminal_can() {
        let line = Line { name: "d\u{1b}é".into(), socket: "a".into(), row: Err("gone".into()) };
        assert_eq!(cell(&line, Column::Export, Charset::Unicode), "d\\u{1b}é");
        assert_eq!(cell(&line, Column::Export, Charset::Ascii), "d\\u{1b}?");
        assert_eq!(cell(&line, Column::State, Charset::Ascii), "gone");
        assert_eq!(cell(&line, Column::Reads, Charset::Ascii), "-");
    }

    #[test]
    fn jobs_come_first_in_the_state() {
        let mut row = Row { export: Export::default(), reads: None, writes: None, cache_hits: None };
        assert_eq!(state(&row), "ok");
        row.export.is_read_only = true;
        row.export.jobs = vec![Job { kind: "backup", done: 1, total: 2 }];
        assert_eq!(state(&row), "backup 50%, read-only");
    }
}
