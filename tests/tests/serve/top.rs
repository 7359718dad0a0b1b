//! `zebu top`, once for programs, and on a terminal that is read as people see it.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use zebu_tests::nbd_client::Client;
use zebu_tests::patience::Patience;
use zebu_tests::program::{zebu, zebu_program};
use zebu_tests::scratch::Scratch;
use zebu_tests::server::{Server, end_of};
use zebu_tests::terminal::{resize, start_at, terminal};

fn serve(dir: &Path) -> Server {
    Server::start(dir, "--control ctl.sock --export-name root -f qcow2 disk.qcow2")
}

fn place() -> Scratch {
    let scratch = Scratch::new("top");
    zebu(scratch.path(), ["create", "-q", "disk.qcow2", "64M"]).ok();
    scratch
}

#[test]
fn once_is_for_programs() {
    let scratch = place();
    let dir = scratch.path();
    let server = serve(dir);
    let mut client = Client::open(server.socket(), "root").unwrap();
    assert_eq!(client.write(0, 0, &[1; 4096]).unwrap(), 0);
    let out = zebu(dir, ["top", "--once", "--output", "json", "--delay", "0.1", "ctl.sock"]).ok();
    let state: serde_json::Value = serde_json::from_str(&out.stdout).unwrap();
    let found = &state["servers"][0];
    assert_eq!((&found["socket"], &found["error"]), (&"ctl.sock".into(), &serde_json::Value::Null));
    let export = &found["exports"][0];
    assert_eq!((&export["name"], &export["clients"]), (&"root".into(), &1.into()), "{state:#}");
    assert_eq!(export["virtual-size"], 64 << 20);
    // Nothing happened between the two looks.
    assert_eq!(export["writes"]["requests-per-second"], 0.0, "{state:#}");
    let table = zebu(dir, ["top", "--once", "--delay", "0.1", "ctl.sock"]).ok().stdout;
    assert!(table.starts_with("EXPORT") && table.lines().nth(1).unwrap().starts_with("root"), "{table}");

    // A server that is not there is told of, and the others are shown.
    let out =
        zebu(dir, ["top", "--once", "--output", "json", "--delay", "0.1", "ctl.sock", "gone.sock"]).exits(1);
    let state: serde_json::Value = serde_json::from_str(&out.stdout).unwrap();
    assert_eq!(state["servers"][0]["exports"][0]["name"], "root", "{state:#}");
    assert!(state["servers"][1]["error"].as_str().unwrap().contains("No such file"), "{state:#}");
    drop(client);
    server.stop();
}

#[test]
fn a_pipe_is_no_screen() {
    let scratch = Scratch::new("top");
    let refused = zebu(scratch.path(), ["top", "ctl.sock"]).exits(1);
    assert!(refused.stderr.contains("--once"), "{refused}");
    let refused = zebu(scratch.path(), ["top", "--output", "json", "ctl.sock"]).exits(1);
    assert!(refused.stderr.contains("--once"), "{refused}");
}

/// A terminal as somebody sees it who looks at it.
struct Screen {
    shown: vt100::Parser,
    pieces: Receiver<Vec<u8>>,
}

impl Screen {
    /// Reads what a program sends to the terminal whose other end is this.
    fn of(mut ours: File, columns: u16, rows: u16) -> Self {
        let (sender, pieces) = channel();
        std::thread::spawn(move || {
            let mut piece = [0; 4096];
            // A terminal that nobody has open any more reads as EIO.
            while let Ok(len @ 1..) = ours.read(&mut piece) {
                if sender.send(piece[..len].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { shown: vt100::Parser::new(rows, columns, 0), pieces }
    }

    /// Looks until the screen has `text`; what it shows then.
    #[track_caller]
    fn shows(&mut self, text: &str) -> String {
        let patience = Patience::begin();
        loop {
            loop {
                match self.pieces.try_recv() {
                    Ok(piece) => self.shown.process(&piece),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => {
                        let screen = self.shown.screen().contents();
                        assert!(screen.contains(text), "it ended without '{text}':\n{screen}");
                        return screen;
                    }
                }
            }
            let screen = self.shown.screen().contents();
            if screen.contains(text) {
                return screen;
            }
            patience.pause(format_args!("'{text}' on the screen:\n{screen}"));
        }
    }
}

#[test]
fn a_narrow_terminal_shows_a_server_that_goes_and_comes_back() {
    let scratch = place();
    let dir = scratch.path();
    let server = serve(dir);
    let (mut ours, theirs) = terminal();
    resize(&ours, 40, 12);
    let mut command = Command::new(zebu_program());
    command.args(["top", "--delay", "0.1", "ctl.sock"]).current_dir(dir);
    command.env("TERM", "xterm").env("LC_ALL", "C").env("NO_COLOR", "1");
    let mut child = start_at(theirs, command);
    let mut screen = Screen::of(ours.try_clone().unwrap(), 40, 12);
    let seen = screen.shows("root");
    assert!(seen.contains("1 server, 1 export"), "{seen}");
    assert!(seen.is_ascii() && seen.lines().all(|line| line.len() <= 40), "{seen}");
    screen.shows("ok");
    ours.write_all(b"s").unwrap();
    screen.shows("sort: reads");
    server.stop();
    screen.shows("1 not answering");
    let server = serve(dir);
    let seen = screen.shows("root");
    assert!(!seen.contains("not answering"), "{seen}");
    ours.write_all(b"q").unwrap();
    assert_eq!(end_of(&mut child).code(), Some(0));
    let modes = rustix::termios::tcgetattr(&ours).unwrap().local_modes;
    let usual = rustix::termios::LocalModes::ECHO | rustix::termios::LocalModes::ICANON;
    assert!(modes.contains(usual), "the terminal is not as before: {modes:?}");
    server.stop();
}
