//! `qemu-nbd`: its command line, brought into that of `zebu serve`.

use super::nbd_objects::Objects;
use super::{VERSION, object_help, parse, trace_argument, usage, with_qemu_grammar};
use crate::cli;
use crate::commands::serve;
use crate::failure::{EXIT_FAILURE, Failure};
use crate::nbd_list::{self, Server};
use crate::output::stdout;
use crate::secrets::SecretArgs;
use crate::serve::device_number::nbd_device_argument;
use crate::serve::serve_args::{Announce, READY, ServeArgs};
use crate::temporary_overlay::TemporaryOverlay;
use clap::{ArgAction, Args, FromArgMatches};
use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};
use zebu_disks::tls_objects::{End, NO_HOSTNAME, TlsObject};
use zebu_disks::{Context, Sources};
use zebu_export::kernel_nbd::disconnect_device;
use zebu_export::nbd::Authorization;
use zebu_remote::nbd::TlsClient;

/// Port of NBD (IANA).
const PORT: u16 = 10809;
/// Option of a server that `--fork` has started.
const DETACHED: &str = "detached";
/// Clients at once of `-e 0`, which sets no limit.
const WITHOUT_LIMIT: u32 = 1_000_000;

/// Arguments of `qemu-nbd`.
#[derive(Debug, Args)]
struct NbdArgs {
    /// Port to listen on [default: 10809]
    #[arg(short, long, value_name = "PORT")]
    port: Option<u16>,

    /// Interface to bind to [default: 0.0.0.0]
    #[arg(short, long, value_name = "IFACE")]
    bind: Option<String>,

    /// Unix socket to listen on, an absolute path
    #[arg(short = 'k', long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Clients at the same time; further ones wait (0: no limit) [default: 1]
    #[arg(short = 'e', long, value_name = "NUM")]
    shared: Option<String>,

    /// Don't exit on the last connection
    #[arg(short = 't', long)]
    persistent: bool,

    /// Say more on standard error
    #[arg(short, long)]
    verbose: bool,

    /// Name of the export [default: empty]
    #[arg(short = 'x', long, value_name = "NAME")]
    export_name: Option<String>,

    /// Text for people about the export
    #[arg(short = 'D', long, value_name = "TEXT")]
    description: Option<String>,

    /// Seconds that a client's handshake may take (0: no limit) [default: 10]
    #[arg(long, value_name = "N")]
    handshake_limit: Option<u32>,

    /// Expose the allocation depth, which is always done
    #[arg(short = 'A', long)]
    allocation_depth: bool,

    /// Expose a persistent dirty bitmap; may be given more than once
    #[arg(short = 'B', long, value_name = "NAME", action = ArgAction::Append)]
    bitmap: Vec<String>,

    /// List the exports of another server
    #[arg(short = 'L', long)]
    list: bool,

    /// Object for the other options: tls-creds-x509, tls-creds-psk, authz-simple, authz-list, authz-list-file, secret
    #[arg(long, value_name = "TYPE,ID=ID,...", action = ArgAction::Append)]
    object: Vec<String>,

    /// Serve over TLS, with the object of this id
    #[arg(long, value_name = "ID")]
    tls_creds: Option<String>,

    /// Let in only clients whose certificate the authz object of this id allows
    #[arg(long, value_name = "ID")]
    tls_authz: Option<String>,

    /// Name in the certificate of the server that is listed, if it is not its host's
    #[arg(long, value_name = "HOSTNAME")]
    tls_hostname: Option<String>,

    /// Start the server in the background and exit once clients can connect
    #[arg(long)]
    fork: bool,

    /// This process is the server that another one has started
    #[arg(long = DETACHED, hide = true)]
    detached: bool,

    /// File for the server's process ID
    #[arg(long, value_name = "PATH")]
    pid_file: Option<PathBuf>,

    /// Connect FILE to a device of the kernel, such as /dev/nbd0, in the background (with -v: not)
    #[arg(short, long, value_name = "DEV")]
    connect: Option<String>,

    /// Disconnect a device of the kernel
    #[arg(short, long, value_name = "DEV")]
    disconnect: Option<String>,

    /// Expose one partition, which is not supported
    #[arg(short = 'P', long, value_name = "NUM")]
    partition: Option<String>,

    /// Image format
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<String>,

    /// Export read-only
    #[arg(short, long)]
    read_only: bool,

    /// Keep what clients write in a temporary file, and FILE as it is
    #[arg(short, long)]
    snapshot: bool,

    /// Export an internal snapshot, read-only: 'snapshot.id=ID', 'snapshot.name=NAME' or 'ID_OR_NAME'
    #[arg(short, long, value_name = "SNAPSHOT_PARAM")]
    load_snapshot: Option<String>,

    /// Leave the host's page cache out
    #[arg(short, long)]
    nocache: bool,

    /// Cache mode: none, writeback (default), writethrough, directsync, unsafe
    #[arg(long, value_name = "MODE")]
    cache: Option<String>,

    /// Engine of the I/O: io_uring, threads, native
    #[arg(long, value_name = "MODE")]
    aio: Option<String>,

    /// Treatment of clients' trims: ignore (default), unmap
    #[arg(long, value_name = "MODE")]
    discard: Option<String>,

    /// Zeroes in clients' writes are written (off), zeroed (on), or given back (unmap)
    #[arg(long, value_name = "MODE")]
    detect_zeroes: Option<String>,

    /// FILE is a full set of image options
    #[arg(long)]
    image_opts: bool,

    /// The image
    #[arg(value_name = "FILE")]
    files: Vec<OsString>,
}

/// Reads the command line as qemu-nbd does, and runs it.
pub(crate) fn main(arguments: Vec<OsString>, context: &Context) -> ExitCode {
    if let Some(code) = object_help::answer(context.dialect, &arguments) {
        return code;
    }
    let matches = match parse(&command(), arguments.clone()) {
        Ok(matches) => matches,
        Err(error) => return cli::report_usage_as(context.dialect, &error, usage::failure),
    };
    let outcome = NbdArgs::from_arg_matches(&matches)
        .map_err(|error| Failure::usage(cli::usage_message(&error)))
        .and_then(|args| run(&args, &arguments, context));
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(failure) => cli::report(context.dialect, &failure, None),
    }
}

fn command() -> clap::Command {
    with_qemu_grammar(NbdArgs::augment_args(clap::Command::new("qemu-nbd").bin_name("qemu-nbd")))
        .about(format!("qemu-nbd {VERSION}\nQEMU Disk Network Block Device Utility, by zebu"))
        .override_usage("qemu-nbd [OPTIONS] FILE\n       qemu-nbd -L [OPTIONS]")
        .arg(trace_argument())
}

fn run(args: &NbdArgs, arguments: &[OsString], context: &Context) -> Result<u8, Failure> {
    if args.partition.is_some() {
        return Err(Failure::new(
            "-P is not supported: connect the whole disk (-c /dev/nbd0), and use the kernel's partitions (/dev/nbd0p1)",
        ));
    }
    if let Some(device) = &args.disconnect {
        disconnect_device(number_of(device)?)?;
        stdout::print(&format!("{device} disconnected\n"))?;
        return Ok(0);
    }
    check_device(args)?;
    if args.socket.as_ref().is_some_and(|path| path.is_relative()) {
        return Err(Failure::new("socket path must be absolute"));
    }
    let objects = Objects::read(&args.object)?;
    check_tls(args)?;
    if args.list {
        return list(args, context, &objects);
    }
    let [file] = args.files.as_slice() else { return Err(Failure::usage("Invalid number of arguments")) };
    let is_forked = args.fork || args.connect.is_some() && !args.verbose;
    if args.fork && sockets_were_passed_on() {
        return Err(Failure::new(
            "--fork can't be used when using socket activation: the sockets are this process's",
        ));
    }
    if is_forked && !args.detached {
        return start_detached(arguments, &objects);
    }
    if args.detached {
        // Fails only where this process leads a session already.
        let _ = rustix::process::setsid();
    }
    let overlay = args.snapshot.then(|| overlay(args, context, file)).transpose()?;
    let mut words = words(args, &objects)?;
    if let Some(overlay) = &overlay {
        words.extend(["--format", "qcow2", "--allow-refs", "all", "--"].map(OsString::from));
        words.push(overlay.path().into());
    } else {
        words.extend(args.format.iter().flat_map(|format| ["--format".into(), format.into()]));
        words.extend(args.image_opts.then(|| "--image-opts".into()));
        words.push("--".into());
        words.push(file.clone());
    }
    let serve =
        ServeArgs::augment_args(clap::Command::new("qemu-nbd").bin_name("qemu-nbd").args_override_self(true));
    let matches = serve.try_get_matches_from(words).map_err(|error| usage::failure(&error, None))?;
    let mut serve =
        ServeArgs::from_arg_matches(&matches).map_err(|error| Failure::usage(cli::usage_message(&error)))?;
    serve.tls_authorization = authorization(args, &objects)?;
    serve.until_last_client = !args.persistent;
    serve.announce = if args.detached { Announce::Ready } else { Announce::Nothing };
    serve::run(&serve, context)
}

fn list(args: &NbdArgs, context: &Context, objects: &Objects) -> Result<u8, Failure> {
    if !args.files.is_empty() {
        return Err(Failure::new("List mode is incompatible with a file name"));
    }
    if args.export_name.is_some() || args.description.is_some() {
        return Err(Failure::new("List mode is incompatible with export settings"));
    }
    let server = if let Some(path) = &args.socket {
        Server::Unix(path.clone())
    } else {
        let host = args.bind.clone().unwrap_or_else(|| "localhost".to_owned());
        Server::Tcp(host, args.port.unwrap_or(PORT))
    };
    // Secrets are not needed, and must be right all the same.
    SecretArgs { object: args.object.clone() }.read(&context.disks, Sources::All)?;
    let tls = args.tls_creds.as_ref().map(|id| client(args, objects, id, &server)).transpose()?;
    nbd_list::run(&server, tls.as_ref())
}

/// The command line of `zebu serve`, without the image.
fn words(args: &NbdArgs, objects: &Objects) -> Result<Vec<OsString>, Failure> {
    let mut words: Vec<OsString> = match &args.connect {
        Some(device) => vec!["serve".into(), "--nbd-device".into(), device.into()],
        None => vec!["serve".into(), "--nbd".into(), address(args)?],
    };
    let shared: u32 = match args.shared.as_deref() {
        None => 1,
        Some(text) => {
            text.parse().map_err(|_| Failure::new(format!("Invalid shared device number '{text}'")))?
        }
    };
    let shared = if shared == 0 { WITHOUT_LIMIT } else { shared.min(WITHOUT_LIMIT) };
    let mut add = |name: &str, value: &OsStr| {
        words.push(format!("--{name}").into());
        words.push(value.to_owned());
    };
    add("max-clients", shared.to_string().as_ref());
    add("discard", args.discard.as_deref().unwrap_or("ignore").as_ref());
    if let Some(seconds) = args.handshake_limit {
        add("handshake-timeout", if seconds == 0 { u32::MAX } else { seconds }.to_string().as_ref());
    }
    match (args.nocache, &args.cache) {
        (true, Some(_)) => return Err(Failure::new("-n and --cache can only be specified once")),
        (true, None) => add("cache", "none".as_ref()),
        (false, Some(mode)) => add("cache", mode.as_ref()),
        (false, None) => {}
    }
    let given = [
        ("export-name", &args.export_name),
        ("description", &args.description),
        ("snapshot", &args.load_snapshot),
        ("aio", &args.aio),
        ("detect-zeroes", &args.detect_zeroes),
    ];
    for (name, value) in given {
        if let Some(value) = value {
            add(name, value.as_ref());
        }
    }
    if let Some(path) = &args.pid_file {
        add("pid-file", path.as_ref());
    }
    for name in &args.bitmap {
        add("bitmap", name.as_ref());
    }
    if args.verbose {
        add("log-level", "info".as_ref());
    }
    if let Some(id) = &args.tls_creds {
        let credentials = TlsObject::find(&objects.tls, id, End::Server).map_err(no_credentials)?;
        for (name, path) in credentials.server_options() {
            add(name, path.as_ref());
        }
    }
    for object in &args.object {
        words.push("--object".into());
        words.push(object.into());
    }
    let unmaps = matches!(args.discard.as_deref(), Some("unmap" | "on"));
    if args.detect_zeroes.as_deref() == Some("unmap") && !unmaps {
        return Err(Failure::new(
            "setting detect-zeroes to unmap is not allowed without setting discard operation to unmap",
        ));
    }
    words.push("--queue-clients".into());
    words.extend(args.read_only.then(|| "--read-only".into()));
    Ok(words)
}

/// The number of a device of the kernel's NBD client.
fn number_of(device: &str) -> Result<u32, Failure> {
    nbd_device_argument(device).map_err(|_| {
        Failure::new(format!(
            "Failed to open {device}: it is no device of the kernel's NBD client (/dev/nbd0)"
        ))
    })
}

/// Refuses what a device of the kernel does not go with.
fn check_device(args: &NbdArgs) -> Result<(), Failure> {
    let Some(device) = &args.connect else { return Ok(()) };
    number_of(device)?;
    if args.list {
        return Err(Failure::new("List mode is incompatible with a device"));
    }
    if args.tls_creds.is_some() {
        return Err(Failure::new("TLS is not supported with a host device"));
    }
    if args.socket.is_some() || args.port.is_some() || args.bind.is_some() {
        return Err(Failure::new("A device has no address: give either -c, or -k, -b and -p"));
    }
    Ok(())
}

fn address(args: &NbdArgs) -> Result<OsString, Failure> {
    if sockets_were_passed_on() {
        let places = [
            (args.socket.is_some(), "Unix socket"),
            (args.bind.is_some(), "Interface"),
            (args.port.is_some(), "TCP port number"),
        ];
        if let Some((_, what)) = places.into_iter().find(|(is_set, _)| *is_set) {
            return Err(Failure::new(format!("{what} can't be set when using socket activation")));
        }
        return Ok("systemd".into());
    }
    let Some(path) = &args.socket else {
        let host = args.bind.as_deref().unwrap_or("0.0.0.0");
        let port = args.port.unwrap_or(PORT);
        let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        return Ok(address.into());
    };
    if args.port.is_some() || args.bind.is_some() {
        return Err(Failure::new("-k can't be used with -p or -b"));
    }
    let mut address = OsString::from("unix:");
    address.push(path);
    Ok(address)
}

/// Whether a service manager has passed sockets on to this process (sd_listen_fds(3)).
fn sockets_were_passed_on() -> bool {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u32>().ok());
    number("LISTEN_PID") == Some(std::process::id())
        && number("LISTEN_FDS").is_some_and(|sockets| sockets > 0)
}

/// Refuses options of TLS that contradict each other.
fn check_tls(args: &NbdArgs) -> Result<(), Failure> {
    for (name, option) in [("--tls-authz", &args.tls_authz), ("--tls-hostname", &args.tls_hostname)] {
        if option.is_some() && args.tls_creds.is_none() {
            return Err(Failure::new(format!("{name} is not permitted without --tls-creds")));
        }
    }
    if args.tls_authz.is_some() && args.list {
        return Err(Failure::new("TLS authorization is incompatible with export list"));
    }
    if args.tls_hostname.is_some() && !args.list {
        return Err(Failure::new("TLS hostname is only supported with export list"));
    }
    Ok(())
}

fn no_credentials(reason: String) -> Failure {
    Failure::new(format!("Failed to get TLS creds: {reason}"))
}

/// Rules of `--tls-authz`.
fn authorization(args: &NbdArgs, objects: &Objects) -> Result<Option<Authorization>, Failure> {
    let Some(id) = &args.tls_authz else { return Ok(None) };
    let credentials = args.tls_creds.as_ref().map(|id| TlsObject::find(&objects.tls, id, End::Server));
    if credentials.is_some_and(|found| found.is_ok_and(TlsObject::is_psk)) {
        return Err(Failure::new(
            "--tls-authz needs tls-creds-x509: its rules are on certificates, and a client of tls-creds-psk has none",
        ));
    }
    let found = objects.authorizations.iter().find(|(known, _)| known == id);
    let (_, rules) = found.ok_or_else(|| Failure::new(format!("No authorization object with id '{id}'")))?;
    Ok(Some(rules.clone()))
}

/// A client's side of TLS for `-L`.
fn client(args: &NbdArgs, objects: &Objects, id: &str, server: &Server) -> Result<TlsClient, Failure> {
    let object = TlsObject::find(&objects.tls, id, End::Client).map_err(no_credentials)?;
    let mut files = object.client_files();
    files.server_name.clone_from(&args.tls_hostname);
    let host = match server {
        Server::Tcp(host, _) => host,
        Server::Unix(_) if files.psk.is_none() && files.server_name.is_none() => {
            return Err(Failure::new(NO_HOSTNAME));
        }
        // Keys have no name.
        Server::Unix(_) => "localhost",
    };
    TlsClient::load(&files, host).map_err(no_credentials)
}

/// The temporary overlay of `-s`.
fn overlay(args: &NbdArgs, context: &Context, file: &OsStr) -> Result<TemporaryOverlay, Failure> {
    if args.image_opts {
        return Err(Failure::new("-s can't be used with --image-opts"));
    }
    TemporaryOverlay::over(context, file, args.format.as_deref())
}

/// Starts the server as a process of its own, and waits until clients can connect.
fn start_detached(arguments: &[OsString], objects: &Objects) -> Result<u8, Failure> {
    let fail = |error: std::io::Error| Failure::new(format!("Failed to fork: {error}"));
    let name = arguments.first().cloned().unwrap_or_else(|| "qemu-nbd".into());
    // Without /proc, the program is found as the caller has found it.
    let binary = std::env::current_exe().unwrap_or_else(|_| PathBuf::from(&name));
    let mut child = Command::new(binary)
        .arg0(name)
        .arg(format!("--{DETACHED}"))
        .args(arguments.iter().skip(1))
        .stdin(if objects.need_standard_input { Stdio::inherit() } else { Stdio::null() })
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(fail)?;
    // The server must not hold the caller's standard error open: who reads it waits for its end.
    let errors = child.stderr.take().map(|mut errors| {
        std::thread::spawn(move || drop(std::io::copy(&mut errors, &mut std::io::stderr())))
    });
    let mut said = String::new();
    if let Some(stdout) = child.stdout.take() {
        // At its end the server has failed, and has said why.
        let _ = BufReader::new(stdout).read_line(&mut said);
    }
    if said.trim_end() == READY {
        return Ok(0);
    }
    let ended = child.wait().map_err(fail)?;
    // It has told all that there was, or panicked, which has been told as well.
    let _ = errors.map(std::thread::JoinHandle::join);
    Err(Failure::silent(ended.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(EXIT_FAILURE)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> NbdArgs {
        let matches = parse(&command(), line.split(' ').map(OsString::from).collect()).unwrap();
        NbdArgs::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn options_become_those_of_serve() {
        command().debug_assert();
        let line = "qemu-nbd -t -k /s -e 4 -x name -D text -r -n --aio=threads -f qcow2 -B b0 -B b1 a";
        let args = args(line);
        let words = words(&args, &Objects::read(&args.object).unwrap()).unwrap();
        let mut line: Vec<&str> = words.iter().map(|word| word.to_str().unwrap()).collect();
        line.push("a");
        let serve = ServeArgs::augment_args(clap::Command::new("serve"));
        assert!(serve.try_get_matches_from(&line).is_ok(), "{line:?}");
        for pair in [["--nbd", "unix:/s"], ["--max-clients", "4"], ["--cache", "none"], ["--bitmap", "b1"]] {
            assert!(line.windows(2).any(|found| found == pair), "{pair:?}: {line:?}");
        }
        assert!(!line.contains(&"--until-last-client"));
    }
}
