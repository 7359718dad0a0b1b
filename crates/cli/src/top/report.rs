//! `zebu top --once`: the state as text or JSON.

use super::board::{Board, Line, Order};
use super::columns::{ALL, Column, cell, fitting, state};
use super::rates::Rate;
use crate::output::terminal::Charset;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// A table, as wide as it has to be. If there is `room` for less, columns are left out as on the screen, and cells are cut.
pub(crate) fn table(board: &Board, charset: Charset, room: Option<usize>) -> String {
    let lines = board.lines(Order::Given);
    let cells = |column: Column| {
        let cells = lines.iter().map(move |line| cell(line, column, charset));
        std::iter::once(column.title().to_owned()).chain(cells).collect::<Vec<String>>()
    };
    let natural =
        ALL.map(|column| (column, cells(column).iter().map(|cell| cell.chars().count()).max().unwrap_or(0)));
    let width = natural.iter().map(|(_, width)| width + 1).sum::<usize>() - 1;
    let widths = room.filter(|room| *room < width).map_or_else(|| natural.to_vec(), fitting);
    let columns: Vec<(Column, usize, Vec<String>)> =
        widths.into_iter().map(|(column, width)| (column, width, cells(column))).collect();
    let mut text = String::new();
    for index in 0..=lines.len() {
        let mut line = String::new();
        for (column, width, cells) in &columns {
            let cell: String = cells[index].chars().take(*width).collect();
            let _ = if column.is_text() {
                write!(line, "{cell:<width$} ")
            } else {
                write!(line, "{cell:>width$} ")
            };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// The same for programs. Rates are by the second, latencies in microseconds; null is what is not known.
pub(crate) fn document(board: &Board) -> Value {
    let lines = board.lines(Order::Given);
    let server = |(socket, error): (&std::path::Path, Option<&str>)| {
        let own = lines.iter().filter(|line| line.socket == socket);
        json!({
            "socket": socket.to_string_lossy(),
            "error": error,
            "exports": own.filter_map(export).collect::<Vec<_>>(),
        })
    };
    json!({ "servers": board.servers().map(server).collect::<Vec<_>>() })
}

fn export(line: &Line) -> Option<Value> {
    let row = line.row.as_ref().ok()?;
    let of = |rate: Option<Rate>| {
        json!({
            "requests-per-second": rate.map(|rate| rounded(rate.requests)),
            "bytes-per-second": rate.map(|rate| rounded(rate.bytes)),
            "latency-us": rate.and_then(|rate| rate.latency).map(|time| rounded(time.as_secs_f64() * 1e6)),
        })
    };
    let jobs =
        row.export.jobs.iter().map(|job| json!({ "kind": job.kind, "done": job.done, "total": job.total }));
    Some(json!({
        "name": row.export.name,
        "filename": row.export.file,
        "virtual-size": row.export.size,
        "read-only": row.export.is_read_only,
        "clients": row.export.clients,
        "in-flight": row.export.in_flight,
        "reads": of(row.reads),
        "writes": of(row.writes),
        "cache-hit-percent": row.cache_hits.map(rounded),
        "jobs": jobs.collect::<Vec<_>>(),
        "waits": row.export.waits,
        "state": state(row),
    }))
}

/// With one decimal.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::super::sample::{Counter, Export, Sample};
    use super::*;
    use std::time::{Duration, Instant};

    fn board() -> Board {
        let mut board = Board::new(&["/run/a.ctl".into(), "/run/b.ctl".into()]);
        let start = Instant::now();
        for second in 0..2 {
            let writes = Counter { requests: second * 8, bytes: second * 4096, nanoseconds: second * 8000 };
            let export = Export { name: "root".into(), writes, ..Export::default() };
            board.note(0, Sample { at: start + Duration::from_secs(second), found: Ok(vec![export]) });
        }
        board.note(1, Sample { at: start, found: Err("gone".into()) });
        board
    }

    #[test]
    fn a_document_has_every_server() {
        let document = document(&board());
        let servers = document["servers"].as_array().unwrap();
        assert_eq!((&servers[0]["error"], &servers[1]["error"]), (&Value::Null, &"gone".into()));
        let export = &servers[0]["exports"][0];
        assert_eq!(export["name"], "root");
        assert_eq!(
            export["writes"],
            json!({ "requests-per-second": 8.0, "bytes-per-second": 4096.0, "latency-us": 1.0 })
        );
        assert_eq!(export["reads"]["latency-us"], Value::Null);
        assert_eq!(servers[1]["exports"], json!([]));
    }

    #[test]
    fn a_table_has_a_line_for_each() {
        let table = table(&board(), Charset::Ascii, None);
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines.len(), 3, "{table}");
        assert!(lines[1].starts_with("a:root") && lines[1].ends_with(" ok"), "{table}");
        assert!(lines[2].starts_with("b.ctl") && lines[2].ends_with(" gone"), "{table}");
    }

    #[test]
    fn a_table_fits_a_terminal() {
        let board = board();
        for room in 20..120 {
            let table = table(&board, Charset::Ascii, Some(room));
            assert!(table.lines().all(|line| line.chars().count() <= room), "{room}: {table}");
            assert_eq!(table.lines().count(), 3, "{table}");
        }
        let narrow = table(&board, Charset::Ascii, Some(40));
        assert!(
            narrow.starts_with("EXPORT") && narrow.contains("STATE") && !narrow.contains("CACHE"),
            "{narrow}"
        );
    }
}
