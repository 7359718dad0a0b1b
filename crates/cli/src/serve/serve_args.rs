//! Options of `zebu serve`.

use crate::arguments::{EngineArgs, ImageArgs};
use crate::local_argument::path_argument;
use crate::serve::address::{Address, SocketAccess, group_argument, mode_argument};
use crate::serve::device_number::{DeviceNumber, nbd_device_argument};
use crate::serve::isolate;
use crate::serve::log_lines::LogLines;
use crate::values::{Discard, NamedFormat, caches, discard_argument, formats};
use clap::ArgGroup;
use std::ffi::OsString;
use std::path::PathBuf;
use zebu_disks::size::size_argument;
use zebu_disks::{Program, printable};
use zebu_engine::{CacheMode, ZeroMode};
use zebu_export::nbd::Authorization;
use zebu_export::{Discards, Export, Level, Log};

/// Heading of options about clients, in the help.
const CLIENTS: &str = "Clients";

/// Arguments of `zebu serve`.
#[derive(Debug, Clone, clap::Args)]
#[command(group(ArgGroup::new("way").required(true).multiple(true).args(["nbd", "vhost_user_blk", "fuse", "ublk", "nbd_device", "config"])))]
pub(crate) struct ServeArgs {
    /// Serve NBD clients at this address, or at the sockets of a systemd socket unit; may be given more than once
    #[arg(long, value_name = "unix:PATH|HOST:PORT|systemd", help_heading = CLIENTS)]
    pub(crate) nbd: Vec<Address>,

    /// Attach an image to a virtual machine monitor as a vhost-user-blk device with this socket; may be given more than
    /// once, in the order of the images
    #[arg(long, value_name = "PATH", help_heading = CLIENTS)]
    pub(crate) vhost_user_blk: Vec<PathBuf>,

    /// Mount an image over this file, which then has the bytes of the disk; may be given more than once, in the order of
    /// the images
    #[arg(long, value_name = "PATH", help_heading = CLIENTS)]
    pub(crate) fuse: Vec<PathBuf>,

    /// Make an image a block device of this machine, /dev/ublkbID (Linux 6.5 or newer, as root); may be given more than once, in the
    /// order of the images [default ID: a free one, which is printed]
    ///
    /// A device in use stays when its server ends, and its requests wait for --recover.
    #[arg(long, value_name = "ID", help_heading = CLIENTS, num_args = 0..=1, require_equals = true, default_missing_value = "any")]
    pub(crate) ublk: Vec<DeviceNumber>,

    /// Connect this device of the kernel's NBD client (as root) to an image; may be given more than once, in the order of the images
    ///
    /// As for --ublk, which does with less, a device in use stays when its server ends.
    #[arg(hide_short_help = true, long, value_name = "/dev/nbdN", help_heading = CLIENTS, value_parser = nbd_device_argument, conflicts_with_all = ["idle_timeout", "tls_certificate", "tls_psk_file"])]
    pub(crate) nbd_device: Vec<u32>,

    /// Take over the devices of --ublk=ID or --nbd-device, whose server has ended
    #[arg(hide_short_help = true, long, help_heading = CLIENTS)]
    pub(crate) recover: bool,

    /// Name of an image for clients, in the order of the images [default: empty for one image, else the file name]
    #[arg(long, value_name = "NAME", help_heading = CLIENTS)]
    pub(crate) export_name: Vec<String>,

    /// Description of the images that NBD clients show to people
    #[arg(hide_short_help = true, long, value_name = "TEXT", help_heading = CLIENTS)]
    pub(crate) description: Option<String>,

    /// End when the last NBD client has left, as on SIGTERM
    #[arg(hide_short_help = true, long, help_heading = CLIENTS, requires = "nbd", conflicts_with = "isolate")]
    pub(crate) until_last_client: bool,

    /// Let NBD clients beyond --max-clients wait instead of closing their connections
    #[arg(hide_short_help = true, long, help_heading = CLIENTS)]
    pub(crate) queue_clients: bool,

    /// Write the number of the server's process into this file when clients can connect
    #[arg(hide_short_help = true, long, value_name = "FILE", conflicts_with = "isolate")]
    pub(crate) pid_file: Option<PathBuf>,

    /// Treatment of trims by NBD clients
    #[arg(hide_short_help = true, long, value_name = "ignore|unmap", value_parser = discard_argument, default_value = "unmap", help_heading = CLIENTS)]
    pub(crate) discard: Discard,

    /// Look for zeroes in what NBD clients write, and zero the range instead (unmap: giving its space back)
    #[arg(hide_short_help = true, long, value_enum, value_name = "off|on|unmap", hide_possible_values = true, default_value_t, help_heading = CLIENTS)]
    pub(crate) detect_zeroes: DetectZeroes,

    /// Let NBD clients look at this persistent dirty bitmap (qemu:dirty-bitmap:NAME); may be given more than once
    #[arg(hide_short_help = true, long, value_name = "NAME", help_heading = CLIENTS, conflicts_with = "snapshot")]
    pub(crate) bitmap: Vec<String>,

    /// Serve NBD clients over TLS only, with the certificate (and its chain) in this PEM file
    #[arg(long, value_name = "FILE", help_heading = CLIENTS, requires = "tls_key")]
    pub(crate) tls_certificate: Option<PathBuf>,

    /// The certificate's key, a PEM file
    #[arg(long, value_name = "FILE", help_heading = CLIENTS, requires = "tls_certificate")]
    pub(crate) tls_key: Option<PathBuf>,

    /// Serve only clients with a certificate that an authority in this PEM file signed
    #[arg(hide_short_help = true, long, value_name = "FILE", help_heading = CLIENTS, requires = "tls_certificate")]
    pub(crate) tls_client_ca: Option<PathBuf>,

    /// Serve no clients whose certificate a list (CRL) in this PEM file revokes
    #[arg(hide_short_help = true, long, value_name = "FILE", help_heading = CLIENTS, requires = "tls_client_ca")]
    pub(crate) tls_client_crl: Option<PathBuf>,

    /// Keys of clients, in a file as psktool writes it: TLS with pre-shared keys (needs the system's OpenSSL)
    #[arg(hide_short_help = true, long, value_name = "FILE", help_heading = CLIENTS, conflicts_with = "tls_certificate")]
    pub(crate) tls_psk_file: Option<PathBuf>,

    /// Rules on the clients' certificates (`qemu-nbd --tls-authz`).
    #[arg(skip)]
    pub(crate) tls_authorization: Option<Authorization>,

    /// Permissions of the Unix sockets that are made for clients and for --metrics, in octal, whatever the umask is; the
    /// socket of --control is for the server's user alone
    #[arg(hide_short_help = true, long, value_name = "MODE", help_heading = CLIENTS, value_parser = mode_argument, default_value = "0600")]
    pub(crate) socket_mode: u32,

    /// Group of these sockets, a number or a name in /etc/group [default: the server's]
    #[arg(hide_short_help = true, long, value_name = "GROUP", help_heading = CLIENTS, value_parser = group_argument)]
    pub(crate) socket_group: Option<u32>,

    /// Clients can't write
    #[arg(short, long)]
    pub(crate) read_only: bool,

    /// Write what clients write into this overlay of the image, a qcow2 file that is made if it is not there; may be given
    /// more than once, in the order of the images
    ///
    /// The image itself is only read, so it can be a disk on a web server. An overlay that is there must stand on it.
    #[arg(long, value_name = "PATH", value_parser = path_argument(), conflicts_with_all = ["read_only", "snapshot", "image_opts"])]
    pub(crate) overlay: Vec<PathBuf>,

    /// Compare what is read of an image with this manifest of `zebu backup`, and fail reads of anything else; may be
    /// given more than once, in the order of the images. With --overlay, it is of the base, else clients can't write
    #[arg(hide_short_help = true, long, value_name = "MANIFEST", value_parser = path_argument())]
    pub(crate) verify: Vec<PathBuf>,

    /// Copy what clients read from backing images into the images
    #[arg(hide_short_help = true, long, conflicts_with_all = ["read_only", "snapshot"])]
    pub(crate) copy_on_read: bool,

    /// Show this internal snapshot (id or name, snapshot.id=ID, snapshot.name=NAME) instead of the active state; clients can't write
    #[arg(hide_short_help = true, short = 'l', long, value_name = "NAME")]
    pub(crate) snapshot: Option<String>,

    /// Threads that serve clients, each with an I/O worker of its own; a connection belongs to one of them, and a
    /// vhost-user-blk device has a ring on each
    #[arg(hide_short_help = true, long, value_name = "NUM", value_parser = clap::value_parser!(u32).range(1..=256), default_value = "1")]
    pub(crate) queues: u32,

    /// Connections at the same time; further ones are closed immediately
    #[arg(hide_short_help = true, long, value_name = "NUM", help_heading = CLIENTS, value_parser = clap::value_parser!(u32).range(1..=1_000_000), default_value = "1024")]
    pub(crate) max_clients: u32,

    /// Connections of one user (at Unix sockets) or from one address (TCP; IPv6: one /64 network) at the same time; further
    /// ones are closed immediately [default: all but a sixteenth of --max-clients]
    #[arg(hide_short_help = true, long, value_name = "NUM", help_heading = CLIENTS, value_parser = clap::value_parser!(u32).range(1..=1_000_000), conflicts_with = "queue_clients")]
    pub(crate) max_clients_per_peer: Option<u32>,

    /// Requests of one connection under way at once; further ones wait in the socket
    #[arg(hide_short_help = true, long, value_name = "NUM", help_heading = CLIENTS, value_parser = clap::value_parser!(u32).range(1..=65536), default_value = "512")]
    pub(crate) max_requests: u32,

    /// Memory for the data of these requests, per connection
    #[arg(hide_short_help = true, long, value_name = "SIZE", help_heading = CLIENTS, value_parser = size_argument, default_value = "32M")]
    pub(crate) max_request_memory: u64,

    /// Memory for all clients and their requests: connections of NBD, rings of vhost-user-blk, files, devices; divided fairly, at
    /// least 64M
    #[arg(hide_short_help = true, long, value_name = "SIZE", help_heading = CLIENTS, value_parser = size_argument, default_value = "512M")]
    pub(crate) max_memory: u64,

    /// Close connections that have not chosen an export after so long
    #[arg(hide_short_help = true, long, value_name = "SECONDS", help_heading = CLIENTS, value_parser = clap::value_parser!(u32).range(1..), default_value = "10")]
    pub(crate) handshake_timeout: u32,

    /// Close connections that send nothing for so long [default: never]
    #[arg(hide_short_help = true, long, value_name = "SECONDS", help_heading = CLIENTS, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) idle_timeout: Option<u32>,

    /// Read exports, sockets, TLS and limits from this file (TOML), and again on SIGHUP, in addition to what the command line names
    #[arg(long, value_name = "FILE", value_parser = path_argument(), conflicts_with = "isolate")]
    pub(crate) config: Option<PathBuf>,

    /// Serve counters to Prometheus, over HTTP, at this address
    #[arg(long, value_name = "unix:PATH|HOST:PORT")]
    pub(crate) metrics: Option<Address>,

    /// Take commands of `zebu ctl` on this socket
    #[arg(long, value_name = "PATH")]
    pub(crate) control: Option<PathBuf>,

    /// Serve each image by a process of its own. The addresses of --nbd are in the order of the images then, too; the
    /// sockets of --control and --metrics get .1, .2 and so on behind their paths, or the ports from the given one on
    #[arg(long)]
    pub(crate) isolate: bool,

    /// The image that this process serves, of those that --isolate has
    #[arg(long = isolate::ONLY_IMAGE, value_name = "NUM", hide = true, requires = "isolate")]
    pub(crate) only_image: Option<usize>,

    /// Keep the right to open files and to connect to others while clients are served
    #[arg(hide_short_help = true, long)]
    pub(crate) no_sandbox: bool,

    /// Take secrets from the text of the command line (--object secret,data=...), which other users of the machine can see
    #[arg(hide_short_help = true, long)]
    pub(crate) allow_secret_data: bool,

    /// Amount of messages on standard error
    #[arg(
        hide_short_help = true,
        long,
        value_enum,
        value_name = "error|warning|info|debug",
        hide_possible_values = true,
        default_value_t
    )]
    pub(crate) log_level: LogLevel,

    /// Format of the images [default: probed; writing to a raw image needs it]
    #[arg(short, long, value_name = "FMT", value_parser = formats())]
    pub(crate) format: Option<NamedFormat>,

    /// Cache mode of the images
    #[arg(
        short = 't',
        long,
        value_name = "CACHE",
        value_parser = caches(),
        default_value = "writeback"
    )]
    pub(crate) cache: CacheMode,

    #[command(flatten)]
    pub(crate) image: ImageArgs,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    /// The image files (or options with --image-opts)
    #[arg(value_name = "FILENAME", required_unless_present = "config")]
    pub(crate) filenames: Vec<OsString>,

    /// The line on standard output when clients can connect
    #[arg(skip)]
    pub(crate) announce: Announce,
}

/// The line on standard output when clients can connect.
pub(crate) const READY: &str = "ready";

/// Whether standard output is told that clients can connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Announce {
    /// It is, by the line [`READY`].
    #[default]
    Ready,
    /// It is not.
    Nothing,
}

/// Whether zeroes are looked for in writes, and what becomes of the space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum DetectZeroes {
    /// They are not.
    #[default]
    Off,
    /// They are; the space stays allocated.
    On,
    /// They are; the space is given back.
    Unmap,
}

/// How much is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum LogLevel {
    Error,
    #[default]
    Warning,
    Info,
    Debug,
}

impl LogLevel {
    fn level(self) -> Level {
        match self {
            LogLevel::Error => Level::Error,
            LogLevel::Warning => Level::Warning,
            LogLevel::Info => Level::Info,
            LogLevel::Debug => Level::Debug,
        }
    }
}

impl ServeArgs {
    /// Permissions of the sockets that are made.
    pub(crate) fn socket_access(&self) -> SocketAccess {
        SocketAccess { mode: self.socket_mode, group: self.socket_group }
    }

    /// The export with what the command line says of all of them.
    pub(crate) fn configured(&self, mut export: Export) -> Export {
        if self.cache.is_direct() {
            export = export.without_page_cache();
        }
        if self.copy_on_read {
            export = export.with_copy_on_read();
        }
        if self.discard == Discard::Ignore {
            export = export.with_discards(Discards::Ignore);
        }
        export = match self.detect_zeroes {
            DetectZeroes::Off => export,
            DetectZeroes::On => export.with_zero_detection(ZeroMode::Keep),
            DetectZeroes::Unmap => export.with_zero_detection(ZeroMode::Unmap),
        };
        match &self.description {
            Some(text) => export.with_description(text),
            None => export,
        }
    }

    /// The log of the server.
    pub(crate) fn log(&self, dialect: Program, lines: &LogLines) -> Log {
        let lines = lines.clone();
        Log::new(self.log_level.level(), move |level, message| {
            // Names in it may be a client's; a message stays one line.
            let message = message.to_string();
            lines.say(format!("{}: {}: {}\n", dialect.name(), level.name(), printable(&message)));
        })
    }
}
