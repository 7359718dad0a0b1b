//! The screen of `zebu top`.

use super::board::{Board, Line, Order};
use super::columns::{cell, fitting};
use crate::output::terminal::{Charset, Colours};
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line as Text, Span};
use ratatui::widgets::Paragraph;

/// The choices of whoever looks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Looks {
    pub(crate) order: Order,
    /// Lines above the first one that is shown.
    pub(crate) first: usize,
    pub(crate) charset: Charset,
    pub(crate) colours: Colours,
}

impl Looks {
    fn coloured(self, colour: Color) -> Style {
        match self.colours {
            Colours::Shown => Style::new().fg(colour),
            Colours::None => Style::new(),
        }
    }
}

/// Draws all of it.
pub(crate) fn draw(frame: &mut Frame<'_>, board: &Board, looks: Looks) {
    let parts = [Constraint::Length(1), Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)];
    let [top, head, body, foot] = Layout::vertical(parts).areas(frame.area());
    let lines = board.lines(looks.order);
    let bold = Style::new().add_modifier(Modifier::BOLD);
    frame.render_widget(Paragraph::new(summary(board, &lines, top.width.into())).style(bold), top);
    let columns = fitting(usize::from(head.width));
    let titles = columns.iter().map(|(column, width)| aligned(column.title(), *width, column.is_text()));
    let reversed = Style::new().add_modifier(Modifier::REVERSED);
    let title = titles.collect::<Vec<_>>().join(" ");
    frame.render_widget(Paragraph::new(padded(&title, head)).style(reversed), head);
    let height = usize::from(body.height);
    let first = looks.first.min(lines.len().saturating_sub(height));
    let rows: Vec<Text<'_>> =
        lines.iter().skip(first).take(height).map(|line| row(line, &columns, looks)).collect();
    frame.render_widget(Paragraph::new(rows), body);
    let more = lines.len().saturating_sub(first + height);
    frame.render_widget(Paragraph::new(keys(looks, more)).alignment(Alignment::Left), foot);
}

fn row<'a>(line: &Line, columns: &[(super::columns::Column, usize)], looks: Looks) -> Text<'a> {
    let mut spans = Vec::new();
    for (index, (column, width)) in columns.iter().enumerate() {
        let blank = if index == 0 { "" } else { " " };
        let text =
            format!("{blank}{}", aligned(&cell(line, *column, looks.charset), *width, column.is_text()));
        let style = match &line.row {
            Err(_) => looks.coloured(Color::Red),
            Ok(row) if !row.export.waits.is_empty() => looks.coloured(Color::Yellow),
            Ok(_) => Style::new(),
        };
        spans.push(Span::styled(text, style));
    }
    Text::from(spans)
}

/// A line about all servers. Where it does not fit, the name of the program is left out.
fn summary(board: &Board, lines: &[Line], width: usize) -> String {
    let servers = board.servers().count();
    let silent = board.servers().filter(|(_, error)| error.is_some()).count();
    let exports = lines.iter().filter(|line| line.row.is_ok()).count();
    let plural =
        |count: usize, one: &str| if count == 1 { format!("1 {one}") } else { format!("{count} {one}s") };
    let mut text = format!("{}, {}", plural(servers, "server"), plural(exports, "export"));
    if silent > 0 {
        text += &format!(", {silent} not answering");
    }
    let named = format!("zebu top: {text}");
    if named.len() > width { text } else { named }
}

/// The line at the bottom.
fn keys(looks: Looks, more: usize) -> String {
    let more = if more > 0 { format!("  {more} more below") } else { String::new() };
    format!("q quit  s sort: {}{more}", looks.order.name())
}

/// Text in so many columns, cut or filled with blanks.
fn aligned(text: &str, width: usize, is_left: bool) -> String {
    let cut: String = text.chars().take(width).collect();
    if is_left { format!("{cut:<width$}") } else { format!("{cut:>width$}") }
}

fn padded(text: &str, area: Rect) -> String {
    let width = usize::from(area.width);
    format!("{text:<width$}")
}

#[cfg(test)]
mod tests {
    use super::super::sample::{Counter, Export, Job, Sample};
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use std::time::{Duration, Instant};

    fn looks() -> Looks {
        Looks { order: Order::Given, first: 0, charset: Charset::Ascii, colours: Colours::None }
    }

    fn board(exports: usize) -> Board {
        let mut board = Board::new(&["/run/vms.ctl".into(), "/run/gone.ctl".into()]);
        let start = Instant::now();
        for (second, factor) in [(0, 0), (1, 100)] {
            let export = |number: usize| Export {
                name: format!("disk{number}"),
                clients: 1,
                reads: Counter { requests: factor, bytes: factor << 20, nanoseconds: factor * 20_000 },
                jobs: vec![Job { kind: "backup", done: 3, total: 4 }],
                ..Export::default()
            };
            let found = Ok((0..exports).map(export).collect());
            board.note(0, Sample { at: start + Duration::from_secs(second), found });
        }
        board.note(1, Sample { at: start, found: Err("Connection refused (os error 111)".into()) });
        board
    }

    /// The lines of a screen of that size.
    fn screen(board: &Board, looks: Looks, columns: u16, rows: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
        terminal.draw(|frame| draw(frame, board, looks)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let line = |y: u16| (0..columns).map(|x| buffer[(x, y)].symbol().to_owned()).collect::<String>();
        (0..rows).map(|y| line(y).trim_end().to_owned()).collect()
    }

    #[test]
    fn a_narrow_screen_tells_who_does_not_answer() {
        let lines = screen(&board(2), looks(), 40, 6);
        assert_eq!(lines[0], "2 servers, 2 exports, 1 not answering");
    }

    #[test]
    fn a_wide_screen_shows_all() {
        let lines = screen(&board(2), looks(), 120, 10);
        assert_eq!(lines[0], "zebu top: 2 servers, 2 exports, 1 not answering");
        for title in ["EXPORT", "READ/S", "WRITE B/S", "CACHE", "CLIENTS", "STATE"] {
            assert!(lines[1].contains(title), "{lines:#?}");
        }
        for part in ["vms:disk0", " 100 ", "100 MiB", "20 us", "backup 75%"] {
            assert!(lines[2].contains(part), "{part}: {lines:#?}");
        }
        assert!(lines[4].contains("gone.ctl") && lines[4].contains("Connection refused"), "{lines:#?}");
        assert_eq!(lines[9], "q quit  s sort: as given");
    }

    #[test]
    fn a_narrow_screen_shows_what_counts() {
        let lines = screen(&board(2), looks(), 40, 8);
        assert!(lines.iter().all(|line| line.chars().count() <= 40 && line.is_ascii()), "{lines:#?}");
        assert!(lines[1].starts_with("EXPORT") && lines[1].contains("WRITE/S STATE"), "{lines:#?}");
        assert!(lines[2].contains("vms:disk0") && lines[2].ends_with("backup 75%"), "{lines:#?}");
    }

    #[test]
    fn more_exports_than_lines_can_be_reached() {
        let board = board(20);
        let lines = screen(&board, looks(), 80, 10);
        assert!(lines[9].ends_with("14 more below"), "{lines:#?}");
        let lines = screen(&board, Looks { first: 100, ..looks() }, 80, 10);
        assert!(lines[8].contains("gone.ctl") && !lines[9].contains("more"), "{lines:#?}");
    }

    #[test]
    fn no_size_is_too_small() {
        for columns in 1..60 {
            for rows in 1..6 {
                screen(&board(3), looks(), columns, rows);
            }
        }
    }

    #[test]
    fn without_colours_none_are_used() {
        let styles = |colours: Colours| {
            let mut terminal = Terminal::new(TestBackend::new(80, 8)).unwrap();
            let board = board(1);
            terminal.draw(|frame| draw(frame, &board, Looks { colours, ..looks() })).unwrap();
            let cells = terminal.backend().buffer().content.clone();
            cells.iter().any(|cell| cell.fg != Color::Reset)
        };
        assert!(!styles(Colours::None));
        assert!(styles(Colours::Shown));
    }
}
