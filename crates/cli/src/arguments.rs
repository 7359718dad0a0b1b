//! The options that several commands share, and the words that their values are.

use crate::failure::Failure;
use crate::lock_patience::lock_wait;
use crate::passphrase_prompt::with_prompt;
use crate::registry_args::RegistryArgs;
use crate::secrets::{ENCRYPTION, SecretArgs};
use crate::values::{
    Aio, NamedFormat, OutputFormat, ReferenceRule, aio_argument, reference_argument, slice_size_argument,
    zero_policy_argument,
};
use clap::Args;
use std::ffi::OsStr;
use std::path::PathBuf;
use zebu_disks::size::size_argument;
use zebu_disks::{
    CacheChoice, Context, Disks, ForceShare, ImageOpts, ImageSpec, NetworkOptions, Program, Secrets, Sources,
    with_backing_keys, with_names,
};
use zebu_engine::{Access, CacheMode, HeaderCosts, Keys, OpenOptions, Sharing, ZeroPolicy};
use zebu_remote::http::Redirects;

/// Heading of options about how images are opened, in the help.
const OPENING: &str = "Opening images";
/// Heading of options about what runs the I/O.
const RUNNING: &str = "Running I/O";
/// Heading of options about disks over the network.
const NETWORK: &str = "Disks over the network";

/// Options that open an image: how the name is read, how the mapping is cached, which files the image may refer to.
#[derive(Debug, Clone, Args)]
pub(crate) struct ImageArgs {
    /// The file name is a list of options, such as `driver=qcow2,file.filename=disk.qcow2,l2-cache-size=1M`
    #[arg(long, alias = "source-image-opts", help_heading = OPENING, hide_short_help = true)]
    pub(crate) image_opts: bool,

    /// Memory for cached metadata of the image and its whole backing chain [default: by the disk's size]
    #[arg(long, help_heading = OPENING, hide_short_help = true, value_name = "SIZE", value_parser = size_argument)]
    pub(crate) cache_size: Option<u64>,

    /// Bytes of one piece of an L2 table in the cache: a power of two from 512 to the cluster size
    #[arg(long, help_heading = OPENING, hide_short_help = true, value_name = "SIZE", value_parser = slice_size_argument)]
    pub(crate) slice_size: Option<u32>,

    /// How the rest of a recycled cluster is zeroed, of which a request writes a part
    #[arg(long, help_heading = OPENING, hide_short_help = true, value_name = "auto|write|fallocate", value_parser = zero_policy_argument)]
    pub(crate) zero_policy: Option<ZeroPolicy>,

    /// Which files that an image names (backing file, data file) may be opened; may be given more than once.
    ///
    /// `local`, the default: plain paths within the directory of the image that names them. `dir=PATH`: within that
    /// directory too. `prefix=URL`: disks over the network whose name begins so. `all`: any plain path, and any disk over
    /// the network. `none`: no file.
    #[arg(long, help_heading = OPENING, hide_short_help = true, value_name = "none|local|dir=PATH|prefix=URL|all", value_parser = reference_argument)]
    pub(crate) allow_refs: Vec<ReferenceRule>,

    #[command(flatten)]
    pub(crate) secrets: SecretArgs,

    #[command(flatten)]
    pub(crate) costs: CostsArgs,

    #[command(flatten)]
    pub(crate) network: NetworkArgs,
}

/// `--header-costs`, of every command that opens encrypted images.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct CostsArgs {
    /// How long the header of an encrypted image may let the computer try a passphrase: `bounded` refuses more than 50 million
    /// iterations of PBKDF2, and more than 1 GiB of memory or 64 passes over it for Argon2
    #[arg(long, help_heading = ENCRYPTION, hide_short_help = true, value_name = "bounded|unbounded", value_parser = costs_argument, default_value = "bounded")]
    header_costs: HeaderCosts,
}

/// `--backing-key-secret`.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct BackingKeyArgs {
    /// ID of the secret that is the passphrase of the backing file; given again, of the image below it, and so on. An empty ID is
    /// for one that is not encrypted
    #[arg(long, help_heading = ENCRYPTION, hide_short_help = true, value_name = "ID", action = clap::ArgAction::Append)]
    backing_key_secret: Vec<String>,
}

impl BackingKeyArgs {
    /// Whether any was given.
    pub(crate) fn is_given(&self) -> bool {
        !self.backing_key_secret.is_empty()
    }

    /// Adds these keys; the first is for the image at `depth`.
    pub(crate) fn over(&self, keys: Keys, depth: u32, secrets: &Secrets) -> Result<Keys, Failure> {
        with_backing_keys(keys, &self.backing_key_secret, depth, secrets).map_err(Failure::new)
    }
}

/// Options of disks over the network.
#[derive(Debug, Clone, Args)]
pub(crate) struct NetworkArgs {
    /// Certificates of the authorities by which servers of https:// names must be signed, a PEM file [default: the file of
    /// SSL_CERT_FILE, or the system's]
    #[arg(long, help_heading = NETWORK, hide_short_help = true, value_name = "FILE")]
    tls_ca: Option<PathBuf>,

    /// Memory of each disk on a web server for its cache, read-ahead and connections, at least 4M [default: 64M]
    #[arg(long, help_heading = NETWORK, hide_short_help = true, value_name = "SIZE", value_parser = http_memory_argument)]
    http_memory: Option<u64>,

    /// Keep what is read of disks on web servers in this directory, for this command and others
    ///
    /// It is made if it is not there. Several processes may share it. Only versions that the server marks with a strong ETag
    /// are kept; -v says which are not.
    #[arg(long, help_heading = NETWORK, hide_short_help = true, value_name = "DIR")]
    cache_dir: Option<PathBuf>,

    /// The most bytes of that directory, at least 16M; the least recently used data is removed first [default: 10G]
    #[arg(long, help_heading = NETWORK, hide_short_help = true, value_name = "SIZE", value_parser = remote_cache_argument, requires = "cache_dir")]
    remote_cache_size: Option<u64>,

    /// Redirects of web servers that are followed
    ///
    /// `safe`: none from https to http, and none from a public address to a private one. `any`: these as well.
    #[arg(long, help_heading = NETWORK, hide_short_help = true, value_name = "safe|any", value_parser = redirects_argument, default_value = "safe")]
    redirects: Redirects,

    #[command(flatten)]
    registries: RegistryArgs,
}

fn costs_argument(text: &str) -> Result<HeaderCosts, String> {
    match text {
        "bounded" => Ok(HeaderCosts::Bounded),
        "unbounded" => Ok(HeaderCosts::Unbounded),
        _ => Err("expected bounded or unbounded".to_owned()),
    }
}

fn http_memory_argument(text: &str) -> Result<u64, String> {
    match size_argument(text).map_err(|error| error.to_string())? {
        bytes @ 0x40_0000.. => Ok(bytes),
        _ => Err("at least 4M are needed".to_owned()),
    }
}

fn remote_cache_argument(text: &str) -> Result<u64, String> {
    match size_argument(text).map_err(|error| error.to_string())? {
        bytes @ 0x100_0000.. => Ok(bytes),
        _ => Err("at least 16M are needed".to_owned()),
    }
}

fn redirects_argument(text: &str) -> Result<Redirects, String> {
    match text {
        "safe" => Ok(Redirects::Safe),
        "any" => Ok(Redirects::Any),
        _ => Err("expected safe or any".to_owned()),
    }
}

/// The option for the engine of the I/O.
#[derive(Debug, Clone, Args)]
pub(crate) struct EngineArgs {
    /// Engine of the I/O; io_uring falls back to threads where the kernel refuses it (`native`: the same as io_uring)
    #[arg(short = 'i', long, help_heading = RUNNING, hide_short_help = true, value_name = "io_uring|threads|native", value_parser = aio_argument)]
    pub(crate) aio: Option<Aio>,

    /// Say on standard error what runs the I/O, and why it is not io_uring
    #[arg(short, long, help_heading = RUNNING, hide_short_help = true)]
    pub(crate) verbose: bool,
}

/// `-U`.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct ForceShareArg {
    /// Open without locks, to look at an image that another program is writing; what is read may be inconsistent
    #[arg(short = 'U', long, help_heading = OPENING, hide_short_help = true)]
    force_share: bool,
}

impl ForceShareArg {
    /// As if the option was given.
    pub(crate) const GIVEN: Self = Self { force_share: true };

    /// Whether the option is given.
    pub(crate) fn is_given(self) -> bool {
        self.force_share
    }

    /// Opens an image without locks if the option says so. Image options may have said it already.
    pub(crate) fn apply(self, spec: &mut ImageSpec) {
        spec.force_share = ForceShare::Offered;
        if self.force_share {
            spec.options.sharing = Sharing::Unlocked;
        }
    }
}

/// Options of commands that look at images and report: how these are opened, what runs the I/O, the report's format.
#[derive(Debug, Clone, Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) force_share: ForceShareArg,

    /// Format of the report
    #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
    pub(crate) output: OutputFormat,

    #[command(flatten)]
    pub(crate) image: ImageArgs,

    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

impl NetworkArgs {
    /// Whether what is read is kept in a directory.
    pub(crate) fn keeps_reads(&self) -> bool {
        self.cache_dir.is_some()
    }

    /// From now on, names are read with these.
    pub(crate) fn apply(&self, disks: &Disks) {
        let network = NetworkOptions {
            authorities: self.tls_ca.clone(),
            memory: self.http_memory,
            redirects: self.redirects,
            cache: self
                .cache_dir
                .clone()
                .map(|directory| CacheChoice { directory, size: self.remote_cache_size }),
            oci: self.registries.options(),
        };
        disks.remote.use_options(network);
    }
}

impl CostsArgs {
    /// The limits on the costs of an image's header.
    pub(crate) fn bounds(self) -> HeaderCosts {
        self.header_costs
    }

    /// Keys of a chain of which no option tells any: those that names have, and those that are typed.
    pub(crate) fn keys(self, dialect: Program, secrets: &Secrets) -> Keys {
        with_prompt(dialect, with_names(Keys::default().with_costs(self.header_costs), secrets))
    }
}

impl ImageArgs {
    /// Keys of a chain of which no option tells any.
    pub(crate) fn keys(&self, dialect: Program, secrets: &Secrets) -> Keys {
        self.costs.keys(dialect, secrets)
    }

    /// Reads `name` as a file name or, with `--image-opts`, as a list of options, and joins it with the rest of the
    /// command line.
    pub(crate) fn resolve(
        &self,
        context: &Context,
        name: &OsStr,
        format: Option<&NamedFormat>,
        cache: CacheMode,
        access: Access,
    ) -> Result<ImageSpec, Failure> {
        self.resolve_with(context, name, format, cache, access, Sources::All)
    }

    /// The same with secrets from `sources` alone.
    pub(crate) fn resolve_with(
        &self,
        context: &Context,
        name: &OsStr,
        format: Option<&NamedFormat>,
        cache: CacheMode,
        access: Access,
        sources: Sources,
    ) -> Result<ImageSpec, Failure> {
        self.network.apply(&context.disks);
        let secrets = self.secrets.read(&context.disks, sources)?;
        let options = OpenOptions::default()
            .format(format.map(|named| named.format))
            .access(access)
            .cache(cache)
            .lock_wait(lock_wait(context.dialect))
            .keys(self.keys(context.dialect, &secrets));
        let options = context.with_references(options, &self.allow_refs)?;
        let mut spec = ImageSpec { secrets, ..ImageSpec::new(PathBuf::from(name), options) };
        if let Some(format) = format.filter(|_| !self.image_opts) {
            format.check(name).map_err(|reason| Failure::opening_name(name, &reason))?;
        }
        if self.image_opts {
            if format.is_some() {
                return Err(Failure::usage("--image-opts and --format are mutually exclusive"));
            }
            name.to_str()
                .ok_or_else(|| "image options must be valid UTF-8".to_owned())
                .and_then(|text| ImageOpts::parse(context, text))
                .and_then(|opts| opts.apply(context, &mut spec))
                .map_err(|reason| Failure::opening_name(name, &reason))?;
            spec.is_described = true;
        } else {
            let described = context.describe_in(&mut spec, name);
            described.map_err(|reason| Failure::opening_name(name, &reason))?;
        }
        if let Some(bytes) = self.cache_size {
            spec.options.cache_size = Some(bytes);
        }
        if let Some(bytes) = self.slice_size {
            spec.options.slice_size = Some(bytes);
        }
        if let Some(policy) = self.zero_policy {
            spec.options.zero_policy = policy;
        }
        Ok(spec)
    }
}
