//! `zebu top`: what the exports of running servers do.

use crate::failure::{EXIT_FAILURE, Failure};
use crate::output::terminal::Terminal;
use crate::output::{json, stdout};
use crate::top::asker::{Askers, Message};
use crate::top::board::{Board, Order};
use crate::top::report::{document, table};
use crate::top::screen::{Looks, draw};
use crate::values::OutputFormat;
use crate::watch::{ProgressMode, Watch};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;
use zebu_disks::Context;

/// How long a key, or a signal, may go unnoticed.
const LOOK: Duration = Duration::from_millis(100);

/// Arguments of `zebu top`.
#[derive(Debug, clap::Args)]
pub(crate) struct TopArgs {
    /// Print the state once, over one interval, instead of showing it on the whole terminal
    #[arg(long)]
    once: bool,

    /// Form of what is printed
    #[arg(
        long,
        value_enum,
        value_name = "human|json",
        hide_possible_values = true,
        default_value_t,
        requires = "once"
    )]
    output: OutputFormat,

    /// Seconds between two looks at a server, from 0.1
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = interval_argument)]
    delay: Duration,

    /// The sockets given to `zebu serve` with --control
    #[arg(value_name = "SOCKET", required = true)]
    sockets: Vec<PathBuf>,
}

fn interval_argument(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("expected a number of seconds from 0.1 to 3600".to_owned()),
    }
}

/// Runs the command.
pub(crate) fn run(args: &TopArgs, context: &Context) -> Result<u8, Failure> {
    let is_drawable = std::env::var("TERM").is_ok_and(|term| !term.is_empty() && term != "dumb");
    if !args.once && (!std::io::stdout().is_terminal() || !is_drawable) {
        return Err(Failure::usage(
            "standard output is no terminal that can show a screen; --once prints the state",
        ));
    }
    let watch = Watch::start(ProgressMode::None)?;
    let (samples, noted) = channel();
    let askers = Askers::start(&args.sockets, args.delay, &samples);
    drop(samples);
    let board = Board::new(&args.sockets);
    debug_assert_eq!(askers.count(), args.sockets.len());
    if args.once { once(args, context, &watch, &noted, board) } else { show(&watch, &noted, board) }
}

/// Prints the state when rates are known.
fn once(
    args: &TopArgs,
    context: &Context,
    watch: &Watch,
    noted: &Receiver<Message>,
    mut board: Board,
) -> Result<u8, Failure> {
    while !board.is_complete() {
        match noted.recv_timeout(LOOK) {
            Ok((number, sample)) => board.note(number, sample),
            Err(RecvTimeoutError::Timeout) if watch.cancel().is_cancelled() => {
                return Err(Failure::interrupted());
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::new("no thread could be started"));
            }
        }
    }
    stdout::print(&match args.output {
        OutputFormat::Json => json::to_text(context.dialect, &document(&board))?,
        OutputFormat::Human => {
            let terminal = Terminal::of_standard_output();
            let room = std::io::stdout().is_terminal().then_some(terminal.columns);
            table(&board, terminal.charset, room)
        }
    })?;
    let is_silent = board.servers().any(|(_, error)| error.is_some());
    Ok(if is_silent { EXIT_FAILURE } else { 0 })
}

/// Shows the state until a key or a signal ends it.
fn show(watch: &Watch, noted: &Receiver<Message>, board: Board) -> Result<u8, Failure> {
    let fail = |error: std::io::Error| Failure::new(format!("the terminal: {error}"));
    let mut terminal = ratatui::try_init().map_err(fail)?;
    let ended = look(&mut terminal, watch, noted, board);
    let restored = ratatui::try_restore();
    let is_over = ended.map_err(fail)?;
    restored.map_err(fail)?;
    match is_over {
        End::Key => Ok(0),
        End::Signal => Err(Failure::interrupted()),
    }
}

/// The end of the command, by its cause.
enum End {
    Key,
    Signal,
}

fn look(
    terminal: &mut DefaultTerminal,
    watch: &Watch,
    noted: &Receiver<Message>,
    mut board: Board,
) -> std::io::Result<End> {
    let abilities = Terminal::of_standard_output();
    let mut looks =
        Looks { order: Order::default(), first: 0, charset: abilities.charset, colours: abilities.colours };
    let mut is_stale = true;
    loop {
        for (number, sample) in noted.try_iter() {
            board.note(number, sample);
            is_stale = true;
        }
        if is_stale {
            terminal.draw(|frame| draw(frame, &board, looks))?;
            is_stale = false;
        }
        if watch.cancel().is_cancelled() {
            return Ok(End::Signal);
        }
        if !event::poll(LOOK)? {
            continue;
        }
        is_stale = true;
        match event::read()? {
            Event::Key(key) if is_end(key) => return Ok(End::Key),
            Event::Key(key) if key.kind != KeyEventKind::Release => {
                let most = board.lines(looks.order).len().saturating_sub(1);
                looks = after(looks, key.code, most);
            }
            _ => {}
        }
    }
}

fn is_end(key: KeyEvent) -> bool {
    let is_control = key.modifiers.contains(KeyModifiers::CONTROL);
    matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) || (key.code == KeyCode::Char('c') && is_control)
}

/// The choices after a key.
fn after(looks: Looks, key: KeyCode, most: usize) -> Looks {
    let to = |first: usize| Looks { first: first.min(most), ..looks };
    match key {
        KeyCode::Char('s') => Looks { order: looks.order.next(), ..looks },
        KeyCode::Down | KeyCode::Char('j') => to(looks.first + 1),
        KeyCode::Up | KeyCode::Char('k') => to(looks.first.saturating_sub(1)),
        KeyCode::PageDown => to(looks.first + 10),
        KeyCode::PageUp => to(looks.first.saturating_sub(10)),
        KeyCode::Home => to(0),
        KeyCode::End => to(most),
        _ => looks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::terminal::{Charset, Colours};

    #[test]
    fn keys_sort_and_scroll_within_the_lines() {
        let looks = Looks { order: Order::Given, first: 0, charset: Charset::Ascii, colours: Colours::None };
        assert_eq!(after(looks, KeyCode::Char('s'), 3).order, Order::Reads);
        assert_eq!(after(looks, KeyCode::Up, 3).first, 0);
        assert_eq!(after(looks, KeyCode::PageDown, 3).first, 3);
        assert_eq!(after(Looks { first: 2, ..looks }, KeyCode::Home, 3).first, 0);
        assert_eq!(after(looks, KeyCode::Char('x'), 3).first, 0);
    }

    #[test]
    fn intervals_are_bounded() {
        assert_eq!(interval_argument("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "nan", "1e9", "x"] {
            assert!(interval_argument(text).is_err(), "{text}");
        }
    }
}
