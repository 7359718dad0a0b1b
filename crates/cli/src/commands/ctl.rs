//! `zebu ctl`: commands to a running `zebu serve`.

use crate::failure::Failure;
use crate::output::{json, stdout};
use crate::serve::control::{Command, Request};
use crate::size::{parse_size, size_argument};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

/// Arguments of `zebu ctl`.
#[derive(Debug, clap::Args)]
pub(crate) struct CtlArgs {
    /// The socket given to `zebu serve` with --control
    #[arg(value_name = "SOCKET")]
    socket: PathBuf,

    #[command(subcommand)]
    command: CtlCommand,
}

#[derive(Debug, clap::Subcommand)]
enum CtlCommand {
    /// Print what clients did and how the images are doing, as JSON
    Stats {
        /// Only this export
        export: Option<String>,
    },
    /// Make a disk larger, while clients use it
    Resize {
        /// The export; '' is the first one
        export: String,
        /// The new size, or what is added (+SIZE)
        #[arg(value_name = "[+]SIZE", value_parser = growth_argument)]
        size: Growth,
    },
    /// Change the memory of an image's mapping cache, its backing chain included
    CacheSize {
        /// The export; '' is the first one
        export: String,
        /// The new size
        #[arg(value_name = "SIZE", value_parser = size_argument)]
        size: u64,
    },
    /// Make durable what clients have written
    Flush {
        /// The export; '' is the first one
        export: String,
    },
}

/// What becomes of the size.
#[derive(Debug, Clone, Copy)]
enum Growth {
    To(u64),
    By(u64),
}

fn growth_argument(text: &str) -> Result<Growth, String> {
    match text.strip_prefix('+') {
        Some(by) => parse_size(by).map(Growth::By).map_err(|error| error.to_string()),
        None => size_argument(text).map(Growth::To).map_err(|error| error.to_string()),
    }
}

/// A connection to a server.
struct Server {
    stream: BufReader<UnixStream>,
    name: String,
}

impl Server {
    fn connect(args: &CtlArgs) -> Result<Self, Failure> {
        let name = args.socket.display().to_string();
        match UnixStream::connect(&args.socket) {
            Ok(stream) => Ok(Self { stream: BufReader::new(stream), name }),
            Err(error) => Err(Failure::new(format!("could not connect to '{name}': {error}"))),
        }
    }

    fn ask(&mut self, command: Command) -> Result<Value, Failure> {
        let name = &self.name;
        let fail = |error: std::io::Error| Failure::new(format!("'{name}': {error}"));
        let mut line = serde_json::to_string(&Request { id: None, command })
            .map_err(|error| Failure::new(error.to_string()))?;
        line.push('\n');
        self.stream.get_mut().write_all(line.as_bytes()).map_err(fail)?;
        let mut answer = String::new();
        self.stream.read_line(&mut answer).map_err(fail)?;
        let mut answer: Value = serde_json::from_str(&answer)
            .map_err(|error| Failure::new(format!("'{name}' does not answer as zebu does: {error}")))?;
        if let Some(message) = answer["error"]["message"].as_str() {
            return Err(Failure::new(message));
        }
        Ok(answer["result"].take())
    }
}

/// Runs the command.
pub(crate) fn run(args: &CtlArgs) -> Result<u8, Failure> {
    let mut server = Server::connect(args)?;
    match &args.command {
        CtlCommand::Stats { export } => {
            let stats = server.ask(Command::Stats { export: export.clone() })?;
            stdout::print(&json::to_text(&stats)?)?;
        }
        CtlCommand::Resize { export, size } => {
            let size = match *size {
                Growth::To(size) => size,
                Growth::By(by) => {
                    let stats = server.ask(Command::Stats { export: Some(export.clone()) })?;
                    let now = stats["virtual-size"].as_u64().unwrap_or_default();
                    now.checked_add(by).ok_or_else(|| Failure::new("the new size is too large"))?
                }
            };
            server.ask(Command::Resize { export: export.clone(), size })?;
            stdout::print("Image resized.\n")?;
        }
        CtlCommand::CacheSize { export, size } => {
            drop(server.ask(Command::CacheSize { export: export.clone(), size: *size })?);
        }
        CtlCommand::Flush { export } => drop(server.ask(Command::Flush { export: export.clone() })?),
    }
    Ok(0)
}
