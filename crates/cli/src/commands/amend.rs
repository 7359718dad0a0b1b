//! `zebu amend`: changes properties of an image in place.

use crate::arguments::{EngineArgs, ImageArgs};
use crate::failure::Failure;
use crate::image_failure::image_failure;
use crate::key_slot_opts::{KeySlotOpts, NAMES as KEY_SLOTS};
use crate::output::stdout;
use crate::qemu_names::option_lists;
use crate::session::Session;
use crate::values::{NamedFormat, amended_formats, caches};
use crate::watch::{ProgressArg, Watch};
use std::ffi::OsString;
use std::path::Path;
use zebu_disks::keyval::{asks_for_help, parse_options, parse_size_value, parse_switch};
use zebu_disks::{Context, ImageSpec};
use zebu_engine::jobs::{AmendOptions, Unsealing, amend, change_key_slots, unseal};
use zebu_engine::{Access, CacheMode, Chain, ErrorKind, Format, KeySlotGuard, OpenOptions, Purpose};

/// Arguments of `zebu amend`.
#[derive(Debug, clap::Args)]
pub(crate) struct AmendArgs {
    /// Say nothing but errors
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    progress: ProgressArg,

    /// Format of the image [default: probed]
    #[arg(short, long, value_name = "FMT", value_parser = amended_formats())]
    format: Option<NamedFormat>,

    /// Cache mode of the image
    #[arg(short = 't', long, value_name = "CACHE", value_parser = caches(), default_value = "writeback")]
    cache: CacheMode,

    /// Let the last key of an encrypted image go, overwrite a key that is in use, or unseal an image whose overlay is there
    #[arg(long)]
    force: bool,

    /// Let a sealed image be written again, whose disk went on in an overlay (with --force: although that is there)
    #[arg(long, conflicts_with = "options")]
    unseal: bool,

    /// Changes, as key=value,... (-o help lists the keys)
    #[arg(short, long, value_name = "OPTIONS")]
    options: Vec<String>,

    #[command(flatten)]
    image: ImageArgs,

    #[command(flatten)]
    engine: EngineArgs,

    /// The image file (or options with --image-opts)
    #[arg(value_name = "FILENAME", required_unless_present = "options")]
    filename: Option<OsString>,
}

const HELP: &str = "\
Amend options for 'qcow2':
  backing_file=<str>     - May be given as it is (zebu rebase changes it)
  backing_fmt=<str>      - May be given as it is (zebu rebase changes it)
  compat=<str>           - Compatibility level (v2 [0.10] or v3 [1.1])
  data_file=<str>        - File name of an external data file
  data_file_raw=<bool (on/off)> - The external data file must stay valid as a raw image (off only)
  encrypt.iter-time=<num> - Milliseconds that it takes to try the new passphrase (default 2000)
  encrypt.keyslot=<num>  - The key slot, from 0 to 7
  encrypt.new-secret=<str> - ID of the secret that is the new passphrase
  encrypt.old-secret=<str> - ID of the secret whose key slots are to be erased
  encrypt.state=<str>    - active: a key is added; inactive: keys are erased
  lazy_refcounts=<bool (on/off)> - The flag for other programs; zebu never postpones refcount updates
  refcount_bits=<num>    - Width of a reference count entry in bits
  size=<size>            - Virtual disk size (larger only; zebu resize --shrink makes disks smaller)
";

const LUKS_HELP: &str = "\
Amend options for 'luks':
  iter-time=<num>        - Milliseconds that it takes to try the new passphrase (default 2000)
  keyslot=<num>          - The key slot, from 0 to 7
  new-secret=<str>       - ID of the secret that is the new passphrase
  old-secret=<str>       - ID of the secret whose key slots are to be erased
  state=<str>            - active: a key is added; inactive: keys are erased
";

/// The properties that are asked for.
#[derive(Debug, Default)]
struct Wanted {
    options: AmendOptions,
    backing_file: Option<String>,
    backing_format: Option<String>,
    key_slots: KeySlotOpts,
    /// Whether anything but key slots is to be changed.
    changes_more: bool,
}

impl Wanted {
    fn parse(texts: &[String]) -> Result<Self, String> {
        let mut wanted = Self::default();
        for text in texts {
            for (key, value) in parse_options(text).map_err(|error| error.to_string())? {
                let name = key.strip_prefix("encrypt.").unwrap_or(&key);
                if !(KEY_SLOTS.contains(&name) && wanted.key_slots.set(name, &value)?) {
                    wanted.set(&key, &value)?;
                    wanted.changes_more = true;
                }
            }
        }
        Ok(wanted)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let options = &mut self.options;
        match key {
            "compat" => {
                options.version = Some(match value {
                    "0.10" | "v2" => 2,
                    "1.1" | "v3" => 3,
                    _ => return Err(format!("Invalid compatibility level: '{value}'")),
                });
            }
            "size" => options.size = Some(parse_size_value(key, value)?),
            "refcount_bits" => {
                options.refcount_bits = Some(
                    value
                        .parse()
                        .map_err(|_| format!("Parameter '{key}' expects a number, not '{value}'"))?,
                );
            }
            "lazy_refcounts" => options.lazy_refcounts = Some(parse_switch(key, value)?),
            "data_file" => options.data_file = Some(value.to_owned()),
            "data_file_raw" => options.data_file_raw = Some(parse_switch(key, value)?),
            "backing_file" => self.backing_file = Some(value.to_owned()),
            "backing_fmt" => self.backing_format = Some(value.to_owned()),
            "cluster_size" | "preallocation" | "extended_l2" | "compression_type" | "encryption"
            | "extent_size_hint" | "nocow" => {
                return Err(format!(
                    "Invalid parameter '{key}': this option is only supported for image creation"
                ));
            }
            _ if key.starts_with("encrypt.") => {
                return Err(format!("Parameter '{key}' is not supported: zebu does not change encryption"));
            }
            _ => return Err(format!("Invalid parameter '{key}'")),
        }
        Ok(())
    }
}

/// Runs the command.
pub(crate) fn run(args: &AmendArgs, context: &Context) -> Result<u8, Failure> {
    option_lists::check(context.dialect, &args.options)?;
    if args.options.iter().any(|text| asks_for_help(text)) {
        if context.dialect.is_qemu() && args.format.is_none() && args.filename.is_none() {
            return Err(Failure::new("Expecting one image file name"));
        }
        stdout::print(&match args.format.as_ref().map(|named| named.format) {
            Some(Format::Luks) => LUKS_HELP.to_owned(),
            _ if context.dialect.is_qemu() => option_lists::amend(),
            _ => HELP.to_owned(),
        })?;
        return Ok(0);
    }
    if args.unseal {
        return take_seal_away(args, context);
    }
    if args.options.is_empty() {
        return Err(Failure::usage("Must specify options (-o)"));
    }
    let Some(filename) = &args.filename else {
        return Err(Failure::usage("Must specify image file name"));
    };
    let wanted = Wanted::parse(&args.options).map_err(Failure::new)?;
    let spec = args.image.resolve(context, filename, args.format.as_ref(), args.cache, Access::ReadWrite)?;
    let session = Session::start(context, &args.engine, spec.aio)?;
    let mut watch = Watch::start(args.progress.mode(args.quiet))?;
    if wanted.key_slots.is_given() {
        let changed = change_keys(args, &session, &spec, &wanted);
        watch.finish();
        return changed.map(|()| 0);
    }
    check_backing(&session, &spec.path, &spec.options, &wanted)?;
    let options = wanted.options.control(watch.control());
    let worker = session.worker();
    let done = worker.block_on(amend(worker, &spec.path, &spec.options, &options));
    watch.finish();
    done.map_err(|error| Failure::during("could not amend", &error))?;
    Ok(0)
}

/// Lets a sealed image be written again.
fn take_seal_away(args: &AmendArgs, context: &Context) -> Result<u8, Failure> {
    let Some(filename) = &args.filename else {
        return Err(Failure::usage("Must specify image file name"));
    };
    let spec = args.image.resolve(context, filename, args.format.as_ref(), args.cache, Access::ReadWrite)?;
    let session = Session::start(context, &args.engine, spec.aio)?;
    let how = if args.force { Unsealing::Force } else { Unsealing::Unused };
    let worker = session.worker();
    worker
        .block_on(unseal(worker, &spec.path, &spec.options, how))
        .map_err(|error| Failure::during("could not unseal", &error))?;
    if !args.quiet {
        stdout::print("Image unsealed.\n")?;
    }
    Ok(0)
}

/// Changes key slots, and nothing else.
fn change_keys(
    args: &AmendArgs,
    session: &Session,
    spec: &ImageSpec,
    wanted: &Wanted,
) -> Result<(), Failure> {
    if wanted.changes_more {
        return Err(Failure::new("keys and other properties need a command each"));
    }
    let change = wanted.key_slots.change(&spec.secrets).map_err(Failure::new)?;
    let guard = match (args.force, session.dialect().is_qemu()) {
        (true, _) => KeySlotGuard::Force,
        (false, true) => KeySlotGuard::KeepLast,
        (false, false) => KeySlotGuard::Keep,
    };
    let worker = session.worker();
    worker.block_on(change_key_slots(worker, &spec.path, &spec.options, &change, guard)).map_err(|error| {
        match error.kind() {
            ErrorKind::KeyMissing | ErrorKind::WrongKey => image_failure(spec, session.context(), &error),
            _ => Failure::during("could not amend", &error),
        }
    })
}

/// The backing file can be given, but not changed.
fn check_backing(
    session: &Session,
    path: &Path,
    options: &OpenOptions,
    wanted: &Wanted,
) -> Result<(), Failure> {
    if wanted.backing_file.is_none() && wanted.backing_format.is_none() {
        return Ok(());
    }
    let options = options.clone().access(Access::ReadOnly).purpose(Purpose::Inspect).chain(Chain::TopOnly);
    let worker = session.worker();
    let info = worker.block_on(async {
        let image = zebu_engine::Image::open(worker, path, &options).await?;
        let info = image.info();
        let _ = image.close(worker).await;
        info
    });
    let info = info.map_err(|error| Failure::opening(session.context(), path, &error))?;
    let differs = |wanted: &Option<String>, now: &Option<String>| wanted.is_some() && wanted != now;
    if differs(&wanted.backing_file, &info.backing_file)
        || differs(&wanted.backing_format, &info.backing_format)
    {
        return Err(if session.dialect().is_qemu() {
            Failure::new("Cannot amend the backing file").with_hint("You can use 'qemu-img rebase' instead.")
        } else {
            Failure::new("Cannot amend the backing file: use zebu rebase instead")
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_qemu_img() {
        let texts = ["compat=1.1,size=1M".to_owned(), "refcount_bits=8,lazy_refcounts=on".to_owned()];
        let options = Wanted::parse(&texts).unwrap().options;
        assert_eq!((options.version, options.size), (Some(3), Some(1 << 20)));
        assert_eq!((options.refcount_bits, options.lazy_refcounts), (Some(8), Some(true)));
    }

    #[test]
    fn other_keys_are_refused_by_name() {
        for key in
            ["cluster_size", "preallocation", "encrypt.nosuch", "nosuch", "compat", "size", "refcount_bits"]
        {
            let error = Wanted::parse(&[format!("{key}=x")]).unwrap_err();
            assert!(error.contains(key) || error.contains("compatibility"), "{error}");
        }
    }
}
