//! The command line as a whole: which commands there are, and what becomes of their results.

use crate::commands::{
    amend, attach, backup, bench, bitmap, check, checkpoint, clone, commit, compare, convert, create, ctl,
    dd, devices, info, install_names, io, map, measure, mount, pull, push, rebase, resize, serve, snapshot,
    stores, top, verify,
};
use crate::deferred::Deferred;
use crate::examples;
use crate::failure::Failure;
use crate::manual;
use crate::output::stdout;
use crate::output::terminal::{Colours, Terminal};
use crate::qemu_names;
use crate::serve::serve_args::ServeArgs;
use crate::serve::{cleaner, connector, opener, service_manager};
use crate::suggestion::most_similar;
use crate::topics;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser, Subcommand};
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;
use zebu_disks::{Context, Program, printable, without_secrets};

/// Create, convert, check, back up, serve and attach disk images of virtual machines.
///
/// The commands, their options, output and exit codes are those of qemu-img and qemu-io where these have them.
#[derive(Debug, Parser)]
#[command(
    name = "zebu",
    version,
    disable_help_subcommand = true,
    after_help = examples::ZEBU,
    max_term_width = 100
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
enum Command {
    /// Make a new image
    #[command(after_help = examples::CREATE)]
    Create(Deferred<create::CreateArgs>),
    /// Tell what an image is, without opening any file that it names
    #[command(after_help = examples::INFO)]
    Info(Deferred<info::InfoArgs>),
    /// Check an image's metadata, and repair it
    ///
    /// Exit codes: 0 no errors, 1 the check could not be done, 2 errors, 3 leaks only, 63 the format has no checks.
    #[command(after_help = examples::CHECK)]
    Check(Deferred<check::CheckArgs>),
    /// Copy a disk into a new image, or into one that exists
    #[command(after_help = examples::CONVERT, override_usage = "zebu convert [OPTIONS] SOURCE... TARGET")]
    Convert(Box<Deferred<convert::ConvertArgs>>),
    /// Tell what each range of a disk is made of
    #[command(after_help = examples::MAP)]
    Map(Deferred<map::MapArgs>),
    /// Tell how large an image file would become
    #[command(after_help = examples::MEASURE)]
    Measure(Deferred<measure::MeasureArgs>),
    /// Tell whether two images show a guest the same bytes
    ///
    /// Exit codes: 0 identical, 1 different (or a wrong command line), 2 an image can't be opened, 3 it can't be found
    /// out what is allocated, 4 an image can't be read.
    #[command(after_help = examples::COMPARE)]
    Compare(Deferred<compare::CompareArgs>),
    /// Put an image onto another backing file
    ///
    /// The disk shows the same afterwards: what the two chains do not share is copied into the image first.
    #[command(after_help = examples::REBASE)]
    Rebase(Box<Deferred<rebase::RebaseArgs>>),
    /// Write what an image holds into its backing file
    #[command(after_help = examples::COMMIT)]
    Commit(Deferred<commit::CommitArgs>),
    /// Copy a part of a disk into a new image
    #[command(after_help = examples::DD)]
    Dd(Deferred<dd::DdArgs>),
    /// Change properties of an image in place: version, refcount width, flags
    #[command(after_help = examples::AMEND)]
    Amend(Deferred<amend::AmendArgs>),
    /// Change the size of a disk
    #[command(after_help = examples::RESIZE)]
    Resize(Deferred<resize::ResizeArgs>),
    /// List, take, apply or delete internal snapshots
    #[command(
        after_help = examples::SNAPSHOT,
        override_usage = "zebu snapshot [-l | -c NAME | -a NAME | -d NAME] [OPTIONS] FILENAME"
    )]
    Snapshot(Deferred<snapshot::SnapshotArgs>),
    /// Add, remove, clear, switch on and off, or merge persistent dirty bitmaps; `zebu info` lists them
    #[command(after_help = examples::BITMAP)]
    Bitmap(Deferred<bitmap::BitmapArgs>),
    /// Begin a dirty bitmap in several images at once, in all or none; for disks in use: `zebu ctl SOCKET checkpoint`
    #[command(after_help = examples::CHECKPOINT)]
    Checkpoint(Deferred<checkpoint::CheckpointArgs>),
    /// Make a writable copy of an image at once
    #[command(after_help = examples::CLONE)]
    Clone(Deferred<clone::CloneArgs>),
    /// Back a disk up into a compressed image, past the page cache
    #[command(after_help = examples::BACKUP)]
    Backup(Box<Deferred<backup::BackupArgs>>),
    /// List the points in time of a store, the oldest first
    #[command(after_help = examples::POINTS)]
    Points(Deferred<stores::points::PointsArgs>),
    /// Forget points of a store by rules, and remove what no point needs any more
    #[command(after_help = examples::FORGET)]
    Forget(Deferred<stores::forget::ForgetArgs>),
    /// Copy a point in time of a disk out of a store, compared with its hashes
    #[command(after_help = examples::RESTORE)]
    Restore(Deferred<stores::restore::RestoreArgs>),
    /// Merge layers of a store that no point needs alone
    #[command(after_help = examples::COMPACT)]
    Compact(Box<Deferred<stores::compact::CompactArgs>>),
    /// List the ranges in which two points or images differ
    ///
    /// Two points are compared by their hashes: nothing else of them is read.
    #[command(after_help = examples::DELTA)]
    Delta(Box<Deferred<stores::delta::DeltaArgs>>),
    /// Make an image of an OCI registry or layout of a file
    ///
    /// The file goes as it is, in chunks that are not sent twice. The tag leads to it when all is there.
    #[command(after_help = examples::PUSH)]
    Push(Box<Deferred<push::PushArgs>>),
    /// Make a file of an image of an OCI registry or layout, and compare it with its digest
    ///
    /// The next run goes on with what an interrupted one has fetched.
    #[command(after_help = examples::PULL)]
    Pull(Box<Deferred<pull::PullArgs>>),
    /// Read every cluster of an image and compare it with a manifest, or all of a store of points
    #[command(after_help = examples::VERIFY)]
    Verify(Deferred<verify::VerifyArgs>),
    /// Send many requests to an image and report how fast they were served
    #[command(after_help = examples::BENCH)]
    Bench(Box<Deferred<bench::BenchArgs>>),
    /// Read, write and look at an image by commands, as qemu-io does
    #[command(after_help = examples::IO, override_usage = "zebu io [-c COMMAND]... [OPTIONS] [FILENAME]")]
    Io(Deferred<io::IoArgs>),
    /// Attach images to virtual machines and other clients, over NBD, vhost-user-blk, FUSE and ublk
    ///
    /// Prints the line `ready` when clients can connect. SIGTERM or SIGINT: takes no more requests, finishes those under
    /// way, closes the images and exits with 0.
    #[command(after_help = examples::SERVE)]
    Serve(Box<Deferred<ServeArgs>>),
    /// Look at and change a running `zebu serve`, through the socket of its --control
    #[command(after_help = examples::CTL)]
    Ctl(Deferred<ctl::CtlArgs>),
    /// Show what the exports of running servers do, through the sockets of their --control
    #[command(after_help = examples::TOP)]
    Top(Deferred<top::TopArgs>),
    /// Make an image a block device of this machine, by a server in the background
    ///
    /// Prints the device. `zebu detach` ends it; `zebu serve` has more options, and other doors.
    #[command(after_help = examples::ATTACH)]
    Attach(Deferred<attach::AttachArgs>),
    /// Mount the file system of an image, until Ctrl-C or umount(8)
    ///
    /// Needs root, and ublk or the NBD client of the kernel. Prints the line `ready` when it is mounted.
    #[command(after_help = examples::MOUNT)]
    Mount(Deferred<mount::MountArgs>),
    /// List the block devices of this machine that `zebu serve --ublk` has made
    #[command(after_help = examples::DEVICES)]
    Devices(Deferred<devices::DevicesArgs>),
    /// Remove a block device of `zebu attach`, or one of `zebu serve --ublk` whose server has ended
    #[command(after_help = examples::DETACH)]
    Detach(Deferred<devices::DetachArgs>),
    /// Make links of the names `qemu-img`, `qemu-io` and `qemu-nbd` to this binary
    ///
    /// Called by such a name, it behaves as that program does: its grammar, its messages, its exit codes.
    #[command(after_help = examples::INSTALL_NAMES)]
    InstallNames(Deferred<install_names::InstallNamesArgs>),
    /// Wait for the end of the server that started this, then remove its sockets and unmount its files
    #[command(hide = true)]
    CleanUpInTheEnd(Deferred<cleaner::CleanUpArgs>),
    /// Connect to servers for a server in its sandbox, which started this
    #[command(hide = true)]
    ConnectForAServer(Deferred<connector::ConnectArgs>),
    /// Tell the service manager of the server that started this
    #[command(hide = true)]
    TellAServiceManager(Deferred<service_manager::TellArgs>),
    /// Open the files of a configuration for a server in its sandbox, which started this
    #[command(hide = true)]
    OpenForAServer(Deferred<opener::OpenArgs>),
    /// Upload the sealed images of a fork, for `zebu ctl fork --push`, which started this
    #[command(hide = true)]
    UploadAFork(Deferred<ctl::upload::UploadArgs>),
    /// Tell about a command, or about a topic (`zebu help topics`)
    #[command(after_help = examples::HELP)]
    Help {
        /// A command, a topic, or `topics`
        #[arg(value_name = "COMMAND|TOPIC")]
        about: Option<String>,
    },
    /// Print a completion script for a shell
    #[command(hide = true)]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page of zebu, or write all manual pages into a directory
    #[command(hide = true)]
    Manpage {
        /// The directory; it is made if it is missing
        directory: Option<std::path::PathBuf>,
    },
}

impl Command {
    fn name(&self) -> &'static str {
        match self {
            Command::Create(_) => "create",
            Command::Info(_) => "info",
            Command::Check(_) => "check",
            Command::Convert(_) => "convert",
            Command::Map(_) => "map",
            Command::Measure(_) => "measure",
            Command::Compare(_) => "compare",
            Command::Amend(_) => "amend",
            Command::Rebase(_) => "rebase",
            Command::Commit(_) => "commit",
            Command::Dd(_) => "dd",
            Command::Resize(_) => "resize",
            Command::Snapshot(_) => "snapshot",
            Command::Bitmap(_) => "bitmap",
            Command::Checkpoint(_) => "checkpoint",
            Command::Clone(_) => "clone",
            Command::Backup(_) => "backup",
            Command::Points(_) => "points",
            Command::Forget(_) => "forget",
            Command::Restore(_) => "restore",
            Command::Compact(_) => "compact",
            Command::Delta(_) => "delta",
            Command::Push(_) => "push",
            Command::Pull(_) => "pull",
            Command::Verify(_) => "verify",
            Command::Bench(_) => "bench",
            Command::Io(_) => "io",
            Command::Serve(_) => "serve",
            Command::Ctl(_) => "ctl",
            Command::Top(_) => "top",
            Command::Attach(_) => "attach",
            Command::Mount(_) => "mount",
            Command::Devices(_) => "devices",
            Command::Detach(_) => "detach",
            Command::InstallNames(_) => "install-names",
            Command::CleanUpInTheEnd(_) => "clean-up-in-the-end",
            Command::ConnectForAServer(_) => "connect-for-a-server",
            Command::TellAServiceManager(_) => "tell-a-service-manager",
            Command::OpenForAServer(_) => "open-for-a-server",
            Command::UploadAFork(_) => "upload-a-fork",
            Command::Help { .. } => "help",
            Command::Completions { .. } => "completions",
            Command::Manpage { .. } => "manpage",
        }
    }

    fn run(&mut self, context: &Context) -> Result<u8, Failure> {
        match self {
            Command::Create(args) => create::run(args, context),
            Command::Info(args) => info::run(args, context),
            Command::Check(args) => check::run(args, context),
            Command::Convert(args) => convert::run(args, context),
            Command::Map(args) => map::run(args, context),
            Command::Measure(args) => measure::run(args, context),
            Command::Compare(args) => compare::run(args, context),
            Command::Amend(args) => amend::run(args, context),
            Command::Rebase(args) => rebase::run(args, context),
            Command::Commit(args) => commit::run(args, context),
            Command::Dd(args) => dd::run(args, context),
            Command::Resize(args) => resize::run(args, context),
            Command::Snapshot(args) => snapshot::run(args, context),
            Command::Bitmap(args) => bitmap::run(args, context),
            Command::Checkpoint(args) => checkpoint::run(args, context),
            Command::Clone(args) => clone::run(args, context),
            Command::Backup(args) => backup::run(args, context),
            Command::Points(args) => stores::points::run(args, context),
            Command::Forget(args) => stores::forget::run(args, context),
            Command::Restore(args) => stores::restore::run(args, context),
            Command::Compact(args) => stores::compact::run(args, context),
            Command::Delta(args) => stores::delta::run(args, context),
            Command::Push(args) => push::run(args, context),
            Command::Pull(args) => pull::run(args, context),
            Command::Verify(args) => verify::run(args, context),
            Command::Bench(args) => bench::run(args, context),
            Command::Io(args) => io::run(args, context),
            Command::Serve(args) => serve::run(args, context),
            Command::Ctl(args) => ctl::run(args, context),
            Command::Top(args) => top::run(args, context),
            Command::Attach(args) => attach::run(args),
            Command::Mount(args) => mount::run(args, context),
            Command::Devices(args) => devices::list(args, context),
            Command::Detach(args) => devices::detach(args),
            Command::InstallNames(args) => install_names::run(args),
            Command::CleanUpInTheEnd(args) => Ok(cleaner::run(args)),
            Command::ConnectForAServer(args) => connector::run(args, context),
            Command::TellAServiceManager(args) => service_manager::run(args),
            Command::OpenForAServer(args) => opener::run(args),
            Command::UploadAFork(args) => ctl::upload::run(args, context),
            Command::Help { about } => help(about.as_deref()),
            Command::Completions { shell } => manual::completions(Cli::command(), *shell),
            Command::Manpage { directory } => manual::pages(Cli::command(), directory.as_deref()),
        }
    }
}

/// Reads the command line of the program that was called, runs the command, prints what went wrong.
pub(crate) fn main(arguments: Vec<OsString>, context: &Context) -> ExitCode {
    match context.dialect {
        Program::Zebu => match Cli::try_parse_from(arguments) {
            Ok(cli) => cli.finish(context),
            Err(error) => report_usage(&error),
        },
        Program::QemuImg => qemu_names::qemu_img(arguments, context),
        Program::QemuIo => qemu_names::qemu_io(arguments, context),
        Program::QemuNbd => qemu_names::qemu_nbd(arguments, context),
    }
}

impl Cli {
    /// Runs the command and prints what went wrong.
    pub(crate) fn finish(mut self, context: &Context) -> ExitCode {
        match self.command.run(context) {
            Ok(code) => ExitCode::from(code),
            Err(failure) => report(context.dialect, &failure, Some(self.command.name())),
        }
    }
}

/// Tells about a command or a topic, or about the program.
fn help(about: Option<&str>) -> Result<u8, Failure> {
    let words = std::iter::once("zebu").chain(about).chain(["--help"]);
    let is_command = about.is_none_or(|name| Cli::command().find_subcommand(name).is_some());
    let text = match about {
        Some("topics") => topics::list(),
        Some("options") => topics::options(),
        _ if is_command => {
            Cli::try_parse_from(words).map_or_else(|error| help_text(&error), |_| String::new())
        }
        Some(name) => match topics::find(name) {
            Some(topic) => format!("{}\n", topic.text),
            None => return Err(no_help(name)),
        },
        None => String::new(),
    };
    stdout::print(&text)?;
    Ok(0)
}

/// The failure where there is no help of this name.
fn no_help(name: &str) -> Failure {
    let command = Cli::command();
    let commands = command.get_subcommands().filter(|command| !command.is_hide_set());
    let commands = commands.map(clap::Command::get_name);
    let known: Vec<&str> = commands.chain(topics::TOPICS.iter().map(|topic| topic.name)).collect();
    let meant = most_similar(name, &known);
    let meant = meant.map_or_else(String::new, |name| format!(" (did you mean '{name}'?)"));
    let message =
        format!("no command or topic '{}'{meant}; 'zebu help topics' lists the topics", printable(name));
    Failure::new(message)
}

/// Help as it is shown: in colours on a terminal.
fn help_text(error: &clap::Error) -> String {
    let text = error.render();
    match Terminal::of_standard_output().colours {
        Colours::Shown => text.ansi().to_string(),
        Colours::None => text.to_string(),
    }
}

/// Prints what went wrong; the exit code is the failure's.
pub(crate) fn report(dialect: Program, failure: &Failure, command: Option<&str>) -> ExitCode {
    // There is nobody left to tell if standard error is gone.
    let _ = std::io::stderr().write_all(failure.text(dialect, command).as_bytes());
    ExitCode::from(failure.exit)
}

/// Help and version go to standard output; a wrong command line is told as every failure is.
fn report_usage(error: &clap::Error) -> ExitCode {
    report_usage_as(Program::Zebu, error, |error, _| Failure::usage(own_usage_message(error)))
}

/// The end of the short help of a command.
const LEFT_OUT: &str =
    "\nMore: 'zebu help options' (what commands share), 'zebu COMMAND --help' (everything)\n";

/// Whether the help of a command is asked for by `-h`.
fn is_short() -> bool {
    let words = || std::env::args_os().skip(1);
    words().count() > 1 && !words().any(|word| word == "--help")
}

/// The same, where a wrong command line has the words of `failure`.
pub(crate) fn report_usage_as(
    dialect: Program,
    error: &clap::Error,
    failure: impl FnOnce(&clap::Error, Option<&str>) -> Failure,
) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // At once: a reader who has found what he looks for is not there for the rest.
        let mut text = help_text(error);
        if dialect == Program::Zebu && error.kind() == ErrorKind::DisplayHelp && is_short() {
            text.push_str(LEFT_OUT);
        }
        return match stdout::print(&text) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => report(dialect, &failure, None),
        };
    }
    let command = std::env::args().nth(1).filter(|name| Cli::command().find_subcommand(name).is_some());
    let mut failure = failure(error, command.as_deref());
    // Another exit code would say that the images differ.
    if command.as_deref() == Some("compare") && error.kind() == ErrorKind::ValueValidation {
        failure = failure.with_exit(compare::EXIT_OPEN);
    }
    report(dialect, &failure, command.as_deref())
}

/// A text about a wrong command line, without the secrets of the values that it quotes.
pub(crate) fn hide_secrets(error: &clap::Error, mut text: String) -> String {
    for (_, value) in error.context() {
        let values = match value {
            ContextValue::String(value) => std::slice::from_ref(value),
            ContextValue::Strings(values) => values,
            _ => &[],
        };
        for value in values.iter().filter(|value| !value.is_empty()) {
            text = text.replace(value.as_str(), &without_secrets(value.as_ref()));
        }
    }
    text
}

/// clap's message without its prefix, its usage and its tips: they take several lines, and the help has them.
pub(crate) fn usage_message(error: &clap::Error) -> String {
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        || error.kind() == ErrorKind::MissingSubcommand
    {
        return "Not enough arguments: a command is needed".to_owned();
    }
    let text = hide_secrets(error, error.render().to_string());
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .take_while(|line| !line.is_empty() && !line.starts_with("Usage:"))
        .collect();
    lines.join(" ").trim_start_matches("error: ").to_owned()
}

/// The same, with what was probably meant.
fn own_usage_message(error: &clap::Error) -> String {
    let told = unknown_command(error);
    let is_command = told.is_some();
    let mut message = told.unwrap_or_else(|| no_door(error).unwrap_or_else(|| usage_message(error)));
    if let Some(remedy) = remedy_in_ctl(error) {
        let _ = write!(message, " ({remedy})");
    } else if let Some(topic) = topic_of(error) {
        let _ = write!(message, " (see 'zebu help {topic}')");
    } else if let Some(name) = suggestion(error) {
        let _ = write!(message, " (did you mean '{name}'?)");
    } else if let (false, Some(usage)) = (is_command, usage_around(error)) {
        let _ = write!(message, " (usage: {usage})");
    }
    message
}

/// The topic about a word that is no command, such as one of another program's.
fn topic_of(error: &clap::Error) -> Option<&'static str> {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else { return None };
    topics::find(word).map(|topic| topic.name)
}

/// The message where a server is told of no way in: those that there are, as they are typed most.
fn no_door(error: &clap::Error) -> Option<String> {
    let is_missing = error.kind() == ErrorKind::MissingRequiredArgument;
    let Some(ContextValue::Strings(missing)) = error.get(ContextKind::InvalidArg) else { return None };
    let is_door = is_missing && missing.iter().any(|argument| argument.contains("--vhost-user-blk"));
    is_door.then(|| {
        "clients need a way in: --nbd unix:PATH, --vhost-user-blk PATH, --fuse FILE, --ublk, --nbd-device /dev/nbdN, or a \
         --config FILE that has one"
            .to_owned()
    })
}

/// Words in the place of a command of `ctl`, and what does what they ask for.
const WORDS_IN_CTL: [(&str, &str); 5] = [
    ("exports", "`zebu top SOCKET` shows the exports"),
    ("help", "`zebu ctl --help` lists the commands"),
    ("list", "`zebu top SOCKET` shows the exports"),
    ("reload", "SIGHUP has the server read the file of --config again"),
    ("top", "`zebu top SOCKET`"),
];

fn remedy_in_ctl(error: &clap::Error) -> Option<&'static str> {
    let Some(ContextValue::StyledStr(usage)) = error.get(ContextKind::Usage) else { return None };
    let usage = usage.to_string();
    let word = error.get(ContextKind::InvalidSubcommand).or_else(|| error.get(ContextKind::InvalidArg));
    let Some(ContextValue::String(word)) = word else { return None };
    let is_for_command = usage.contains(" ctl ") && usage.contains("<COMMAND>");
    let known = WORDS_IN_CTL.iter().filter(|_| is_for_command).find(|(known, _)| known == word);
    known.map(|(_, remedy)| *remedy)
}

/// The usage of the command that was given a word too many.
fn usage_around(error: &clap::Error) -> Option<String> {
    let (Some(ContextValue::String(word)), Some(ContextValue::StyledStr(usage))) =
        (error.get(ContextKind::InvalidArg), error.get(ContextKind::Usage))
    else {
        return None;
    };
    let is_word = error.kind() == ErrorKind::UnknownArgument && !word.starts_with('-');
    let usage = usage.to_string();
    let words: Vec<&str> = usage.split_whitespace().filter(|word| *word != "Usage:").collect();
    is_word.then(|| words.join(" "))
}

/// The message about a word in the place of a command of `ctl`: to clap it is an argument too many.
fn unknown_command(error: &clap::Error) -> Option<String> {
    let (Some(ContextValue::String(word)), Some(ContextValue::StyledStr(usage))) =
        (error.get(ContextKind::InvalidArg), error.get(ContextKind::Usage))
    else {
        return None;
    };
    let is_command = error.kind() == ErrorKind::UnknownArgument
        && !word.starts_with('-')
        && usage.to_string().contains("<COMMAND>");
    is_command.then(|| format!("unrecognized subcommand '{}'", without_secrets(word.as_ref())))
}

/// The word that was probably meant by an unknown one.
fn suggestion(error: &clap::Error) -> Option<&str> {
    let kinds = [ContextKind::SuggestedSubcommand, ContextKind::SuggestedArg, ContextKind::SuggestedValue];
    kinds.into_iter().filter_map(|kind| error.get(kind)).find_map(|found| match found {
        ContextValue::String(name) => Some(name.as_str()),
        // The most similar one is the last.
        ContextValue::Strings(names) => names.last().map(String::as_str),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_command_line_is_told_without_the_secrets_of_its_names() {
        for line in [
            &["zebu", "info", "a", "http://u:PW@h/x?sig=PW"][..],
            &["zebu", "http://u:P'W@h/x"],
            &["zebu", "convert", "--size", "https://u:PW@h/x", "a", "b"],
            &["zebu", "info", "--cookie=PW", "a"],
        ] {
            let message = usage_message(&Cli::command().try_get_matches_from(line).unwrap_err());
            assert!(!message.contains("PW") && !message.contains("P'W"), "{message}");
        }
    }

    #[test]
    fn what_was_probably_meant_is_told() {
        for (line, meant) in [
            (&["zebu", "covnert"][..], "convert"),
            (&["zebu", "convert", "--compres"], "--compress"),
            (&["zebu", "ctl", "disk.ctl", "satus"], "stats"),
            (&["zebu", "ctl", "disk.ctl", "snapshot-lst", "web"], "snapshot-list"),
        ] {
            let message = own_usage_message(&Cli::command().try_get_matches_from(line).unwrap_err());
            assert!(message.ends_with(&format!("(did you mean '{meant}'?)")), "{message}");
        }
    }

    #[test]
    fn words_of_other_programs_lead_to_a_topic() {
        for (line, end) in [
            (&["zebu", "shrink", "a"][..], "'shrink' (see 'zebu help tasks')"),
            (&["zebu", "fuse"], "'fuse' (see 'zebu help serving')"),
            (&["zebu", "serve", "a"], "or a --config FILE that has one"),
            (&["zebu", "ctl", "a.ctl", "list"], "'list' (`zebu top SOCKET` shows the exports)"),
            (
                &["zebu", "snapshot", "create", "a"],
                "(usage: zebu snapshot [-l | -c NAME | -a NAME | -d NAME] [OPTIONS] FILENAME)",
            ),
        ] {
            let message = own_usage_message(&Cli::command().try_get_matches_from(line).unwrap_err());
            assert!(message.ends_with(end), "{message}");
        }
    }

    #[test]
    fn a_command_of_ctl_that_is_like_none_is_called_a_command() {
        let line = ["zebu", "ctl", "disk.ctl", "nosuch"];
        let message = own_usage_message(&Cli::command().try_get_matches_from(line).unwrap_err());
        assert_eq!(message, "unrecognized subcommand 'nosuch'");
        let line = ["zebu", "ctl", "disk.ctl", "flush", "web", "more"];
        let message = own_usage_message(&Cli::command().try_get_matches_from(line).unwrap_err());
        assert!(message.contains("unexpected argument 'more'"), "{message}");
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_option_with_a_letter_has_a_long_name() {
        let mut cli = Cli::command();
        cli.build();
        for command in cli.get_subcommands() {
            for argument in command.get_arguments() {
                assert!(
                    argument.get_short().is_none() || argument.get_long().is_some(),
                    "{} {argument}",
                    command.get_name()
                );
            }
        }
    }

    #[test]
    fn options_that_are_described_later_leave_the_text_of_a_command_alone() {
        let before = Cli::command();
        let mut built = before.clone();
        built.build();
        for (before, built) in before.get_subcommands().zip(built.get_subcommands()) {
            let texts = |command: &clap::Command| {
                let texts = [command.get_about(), command.get_long_about(), command.get_after_help()];
                texts.map(|text| text.map(ToString::to_string))
            };
            assert_eq!(texts(before), texts(built));
            assert!(before.get_arguments().count() < built.get_arguments().count(), "{}", built.get_name());
        }
    }

    #[test]
    fn every_visible_command_has_examples() {
        for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
            let text = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(text.contains(&format!("zebu {}", command.get_name())), "{}", command.get_name());
        }
    }

    #[test]
    fn wrong_command_lines_take_one_line() {
        for arguments in [
            vec!["zebu"],
            vec!["zebu", "nosuch"],
            vec!["zebu", "create", "--nosuch"],
            vec!["zebu", "create"],
            vec!["zebu", "compare", "a"],
            vec!["zebu", "info", "-f", "nosuch", "a"],
            vec!["zebu", "bench", "--native", "--aio", "threads", "a"],
        ] {
            let error = Cli::try_parse_from(&arguments).unwrap_err();
            let message = usage_message(&error);
            assert!(!message.is_empty() && !message.contains('\n'), "{arguments:?}: {message}");
            assert!(!message.starts_with("error"), "{message}");
        }
    }
}
