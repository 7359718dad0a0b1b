//! All servers as they are now, in the order that was asked for.

use super::rates::{Rate, Row, rows};
use super::sample::Sample;
use std::path::{Path, PathBuf};

/// The order of the lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Order {
    /// As the command line and the servers have them.
    #[default]
    Given,
    Reads,
    Writes,
    Bytes,
    Latency,
    Name,
}

impl Order {
    /// The next one, round and round.
    pub(crate) fn next(self) -> Self {
        match self {
            Self::Given => Self::Reads,
            Self::Reads => Self::Writes,
            Self::Writes => Self::Bytes,
            Self::Bytes => Self::Latency,
            Self::Latency => Self::Name,
            Self::Name => Self::Given,
        }
    }

    /// Its name for people.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Given => "as given",
            Self::Reads => "reads",
            Self::Writes => "writes",
            Self::Bytes => "bytes",
            Self::Latency => "latency",
            Self::Name => "name",
        }
    }
}

/// A line: an export, or a server that does not answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) socket: PathBuf,
    /// The export, or what is wrong with the server.
    pub(crate) row: Result<Row, String>,
}

impl Line {
    /// A figure by which lines are ordered, the largest first.
    fn weight(&self, order: Order) -> f64 {
        let Ok(row) = &self.row else { return -1.0 };
        let rates = [row.reads, row.writes];
        let of = |rate: Option<Rate>, value: fn(Rate) -> f64| rate.map_or(0.0, value);
        match order {
            Order::Reads => of(row.reads, |rate| rate.requests),
            Order::Writes => of(row.writes, |rate| rate.requests),
            Order::Bytes => rates.into_iter().map(|rate| of(rate, |rate| rate.bytes)).sum(),
            Order::Latency => {
                let seconds = |rate: Rate| rate.latency.map_or(0.0, |time| time.as_secs_f64());
                rates.into_iter().map(|rate| of(rate, seconds)).fold(0.0, f64::max)
            }
            Order::Given | Order::Name => 0.0,
        }
    }
}

/// The last two samples of each server.
#[derive(Debug)]
pub(crate) struct Board {
    servers: Vec<Server>,
}

#[derive(Debug)]
struct Server {
    socket: PathBuf,
    before: Option<Sample>,
    now: Option<Sample>,
}

impl Board {
    /// Servers that nothing is known of.
    pub(crate) fn new(sockets: &[PathBuf]) -> Self {
        let server = |socket: &PathBuf| Server { socket: socket.clone(), before: None, now: None };
        Self { servers: sockets.iter().map(server).collect() }
    }

    /// Takes a sample of the server of that number.
    pub(crate) fn note(&mut self, number: usize, sample: Sample) {
        if let Some(server) = self.servers.get_mut(number) {
            server.before = server.now.replace(sample);
        }
    }

    /// Whether rates are known of every server that answers.
    pub(crate) fn is_complete(&self) -> bool {
        self.servers.iter().all(|server| match &server.now {
            Some(now) => now.found.is_err() || server.before.as_ref().is_some_and(|old| old.found.is_ok()),
            None => false,
        })
    }

    /// The servers, and why those that do not answer can't be asked.
    pub(crate) fn servers(&self) -> impl Iterator<Item = (&Path, Option<&str>)> {
        self.servers.iter().map(|server| {
            let error = server.now.as_ref().and_then(|now| now.found.as_ref().err());
            (server.socket.as_path(), error.map(String::as_str))
        })
    }

    /// The lines in an order.
    pub(crate) fn lines(&self, order: Order) -> Vec<Line> {
        let mut lines: Vec<Line> = self.servers.iter().flat_map(|server| self.of_server(server)).collect();
        match order {
            Order::Given => {}
            Order::Name => lines.sort_by(|a, b| a.name.cmp(&b.name)),
            _ => lines.sort_by(|a, b| b.weight(order).total_cmp(&a.weight(order))),
        }
        lines
    }

    fn of_server(&self, server: &Server) -> Vec<Line> {
        let socket = &server.socket;
        let stem = socket.file_stem().unwrap_or_default().to_string_lossy();
        let trouble = |what: &str| {
            let name = socket.file_name().unwrap_or_default().to_string_lossy().into_owned();
            vec![Line { name, socket: socket.clone(), row: Err(what.to_owned()) }]
        };
        let Some(now) = &server.now else { return trouble("connecting") };
        if let Err(error) = &now.found {
            return trouble(error);
        }
        let name = |row: &Row| {
            let file = Path::new(&row.export.file).file_name().unwrap_or_default().to_string_lossy();
            let own = if row.export.name.is_empty() { file.as_ref() } else { row.export.name.as_str() };
            if self.servers.len() > 1 { format!("{stem}:{own}") } else { own.to_owned() }
        };
        let line = |row: Row| Line { name: name(&row), socket: socket.clone(), row: Ok(row) };
        rows(server.before.as_ref(), now).into_iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::{Counter, Export};
    use super::*;
    use std::time::{Duration, Instant};

    fn sample(at: Instant, exports: &[(&str, u64, u64)]) -> Sample {
        let export = |(name, reads, writes): &(&str, u64, u64)| Export {
            name: (*name).to_owned(),
            file: "/vm/disk.qcow2".to_owned(),
            reads: Counter { requests: *reads, ..Counter::default() },
            writes: Counter { requests: *writes, ..Counter::default() },
            ..Export::default()
        };
        Sample { at, found: Ok(exports.iter().map(export).collect()) }
    }

    fn names(board: &Board, order: Order) -> Vec<String> {
        board.lines(order).into_iter().map(|line| line.name).collect()
    }

    #[test]
    fn lines_are_ordered_as_asked() {
        let start = Instant::now();
        let mut board = Board::new(&["/run/vm.ctl".into()]);
        assert_eq!(names(&board, Order::Given), ["vm.ctl"]);
        board.note(0, sample(start, &[("b", 0, 0), ("a", 0, 0), ("", 0, 0)]));
        assert!(!board.is_complete());
        board.note(0, sample(start + Duration::from_secs(1), &[("b", 5, 1), ("a", 9, 0), ("", 1, 7)]));
        assert!(board.is_complete());
        assert_eq!(names(&board, Order::Given), ["b", "a", "disk.qcow2"]);
        assert_eq!(names(&board, Order::Reads), ["a", "b", "disk.qcow2"]);
        assert_eq!(names(&board, Order::Writes), ["disk.qcow2", "b", "a"]);
        assert_eq!(names(&board, Order::Name), ["a", "b", "disk.qcow2"]);
    }

    #[test]
    fn a_server_that_goes_is_a_line_and_comes_back() {
        let start = Instant::now();
        let mut board = Board::new(&["/run/one.ctl".into(), "/run/two.ctl".into()]);
        board.note(0, sample(start, &[("a", 0, 0)]));
        board.note(1, Sample { at: start, found: Err("No such file or directory".into()) });
        assert_eq!(names(&board, Order::Given), ["one:a", "two.ctl"]);
        board.note(0, Sample { at: start, found: Err("Connection refused".into()) });
        assert_eq!(names(&board, Order::Reads), ["one.ctl", "two.ctl"]);
        assert_eq!(board.lines(Order::Given)[0].row, Err("Connection refused".to_owned()));
        assert!(board.is_complete(), "there is nothing to wait for");
        board.note(0, sample(start, &[("a", 0, 0)]));
        assert_eq!(names(&board, Order::Given), ["one:a", "two.ctl"]);
        assert!(!board.is_complete());
    }

    #[test]
    fn orders_go_round() {
        let mut order = Order::default();
        for _ in 0..6 {
            order = order.next();
        }
        assert_eq!(order, Order::Given);
    }
}
