//! `zebu convert` into an image of a registry or of an OCI layout: a file in a temporary directory, which is pushed.

use super::args::ConvertArgs;
use crate::arguments::{ForceShareArg, InspectArgs};
use crate::commands::push::{self, PushArgs};
use crate::failure::Failure;
use crate::temporary_directory::TemporaryDirectory;
use zebu_disks::{Context, Program};
use zebu_engine::Format;
use zebu_oci::OciName;

/// The image of a registry that the target is.
///
/// # Errors
/// The name can't be read, or an option is for other targets.
pub(super) fn target(dialect: Program, args: &ConvertArgs) -> Result<Option<OciName>, Failure> {
    let name = args.files.last().and_then(|target| target.to_str()).filter(|name| OciName::is_name(name));
    let Some(name) = name.filter(|_| !dialect.is_qemu() && !args.target_image_opts && args.files.len() > 1)
    else {
        return Ok(None);
    };
    let parsed = OciName::parse(name).map_err(|reason| Failure::usage(format!("'{name}': {reason}")))?;
    let refused = [
        (args.no_create, "-n: it is always a new one"),
        (args.backing.is_some(), "a backing file (-B): it stands alone"),
        (args.target_cache.is_some(), "a cache mode (-t)"),
        (args.dry_run, "--dry-run"),
        (
            !matches!(args.target_format(), Format::Raw | Format::Qcow2),
            "another format than qcow2 and raw (-O)",
        ),
    ];
    match refused.iter().find(|(is_given, _)| *is_given) {
        Some((_, what)) => Err(Failure::usage(format!("an image of a registry can't have {what}"))),
        None => Ok(Some(parsed)),
    }
}

/// Converts into a file, and pushes it. Where no format is asked for, it is qcow2 in zstd.
pub(super) fn run(args: &mut ConvertArgs, context: &Context, name: OciName) -> Result<u8, Failure> {
    let directory = TemporaryDirectory::new()?;
    if args.target_format.is_none() {
        args.target_format = Some(Format::Qcow2.into());
        if !args.compress {
            args.compress = true;
            args.target_options.insert(0, "compression_type=zstd".to_owned());
        }
    }
    let file = directory.path().join(format!("disk.{}", args.target_format().name()));
    if let Some(target) = args.files.last_mut() {
        *target = file.clone().into_os_string();
    }
    let output = args.output.take().unwrap_or_default();
    match super::run(args, context)? {
        0 => {}
        // What could not be read is zero in the file.
        code => return Ok(code),
    }
    let inspect = InspectArgs {
        force_share: ForceShareArg::default(),
        output,
        image: args.image.clone(),
        engine: args.engine.clone(),
    };
    let push = PushArgs {
        quiet: args.quiet,
        progress: args.progress,
        format: args.target_format.clone(),
        kind: None,
        title: None,
        annotation: Vec::new(),
        rate_limit: None,
        inspect,
        file: file.into(),
        name,
    };
    push::run(&push, context)
}
