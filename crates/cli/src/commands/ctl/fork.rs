//! `zebu ctl fork` and `zebu ctl reset`.

use super::server::Server;
use super::upload::{self, FORKED, PushTo, Sealed, Upload};
use crate::failure::Failure;
use crate::output::{json, stderr, stdout};
use crate::serve::control_request::{AlsoForked, Command, ForkStart};
use crate::values::{OutputFormat, Rate, rate_argument};
use crate::watch::{ProgressArg, ProgressMode, Watch};
use serde_json::{Value, json};
use std::fs::{File, OpenOptions, Permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::process::Command as Program;
use zebu_disks::errno_text;
use zebu_store::points::PointMoment;

/// Arguments of `zebu ctl fork`.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct ForkArgs {
    /// The export; may be left out if there is one
    export: Option<String>,

    /// The new overlay, in which the disk goes on
    #[arg(long, value_name = "FILE", value_parser = crate::local_argument::path_argument())]
    to: PathBuf,

    /// One more export that is forked at the same moment, and its overlay; may be given more than once
    #[arg(long, value_name = "EXPORT=FILE", value_parser = also_argument)]
    also: Vec<AlsoForked>,

    /// Run this command by the shell, with the argument freeze before the fork, and thaw after it
    #[arg(long, value_name = "CMD")]
    freeze_hook: Option<String>,

    /// Upload the sealed image: as the next point of this store, or as this image of a registry; of several disks, as
    /// STORE/EXPORT or REGISTRY/NAME/EXPORT:TAG. A process in the background does it, unless -w is given
    #[arg(long, value_name = "STORE|IMAGE", value_parser = PushTo::parse)]
    push: Option<PushTo>,

    /// Upload at most so many bytes a second (0: no limit)
    #[arg(short, long, requires = "push", value_name = "RATE", value_parser = rate_argument)]
    rate: Option<Rate>,

    /// Wait until the image is uploaded; SIGINT and SIGTERM end that, and the fork stands
    #[arg(short, long, requires = "push")]
    wait: bool,

    #[command(flatten)]
    progress: ProgressArg,

    /// How the result is printed
    #[arg(long, value_enum, default_value_t, value_name = "human|json", hide_possible_values = true)]
    output: OutputFormat,
}

fn also_argument(text: &str) -> Result<AlsoForked, String> {
    match text.split_once('=') {
        Some((export, file)) if !file.is_empty() => {
            Ok(AlsoForked { export: export.to_owned(), to: PathBuf::from(file) })
        }
        _ => Err("an export and the file of its overlay are needed: EXPORT=FILE".to_owned()),
    }
}

/// Forks disks into overlays that are made here: the server itself may not be able to make any.
pub(super) fn fork(server: &mut Server, args: &ForkArgs) -> Result<u8, Failure> {
    let first = server.export(args.export.clone())?;
    let mut disks = vec![AlsoForked { export: first, to: args.to.clone() }];
    disks.extend(args.also.iter().cloned());
    let mut made = Overlays::default();
    let mut images = Vec::new();
    for disk in &disks {
        images.push(server.ask(Command::Stats { export: Some(disk.export.clone()) })?);
    }
    let names = images.iter().zip(&disks).map(|(image, disk)| image["name"].as_str().unwrap_or(&disk.export));
    let names: Vec<String> = names.map(str::to_owned).collect();
    // Before anything is done that can't be undone.
    let targets = args.push.as_ref().map(|to| to.targets(&server.context, &names)).transpose()?;
    for (disk, image) in disks.iter_mut().zip(&images) {
        made.make(&disk.to, image["filename"].as_str().map(Path::new))?;
        disk.to = std::path::absolute(&disk.to).unwrap_or_else(|_| disk.to.clone());
    }
    let overlays: Vec<PathBuf> = disks.iter().map(|disk| disk.to.clone()).collect();
    // Whoever has frozen something thaws it, whatever comes.
    let watch = Watch::start(ProgressMode::None)?;
    let frozen = run_hook(args.freeze_hook.as_deref(), "freeze");
    let moment = PointMoment::begin();
    let asked = match frozen {
        Ok(()) if watch.cancel().is_cancelled() => Err(Failure::interrupted()),
        Ok(()) => ask(server, disks, &mut made),
        Err(failure) => Err(failure),
    };
    let thawed = run_hook(args.freeze_hook.as_deref(), "thaw");
    drop(watch);
    match asked {
        Ok(answer) => {
            let Some(targets) = targets else {
                tell(server, args.output, &answer)?;
                return thawed.map(|()| 0);
            };
            let forked = Forked { names, overlays, targets, moment };
            let code = forked.push(server, args, answer)?;
            thawed.map(|()| code)
        }
        Err(failure) => {
            if let Err(also) = thawed {
                stderr::tell(server.context.dialect, also.message.as_deref().unwrap_or_default());
            }
            Err(failure)
        }
    }
}

/// Disks that are forked, and whose sealed images are to be uploaded.
struct Forked {
    names: Vec<String>,
    overlays: Vec<PathBuf>,
    targets: Vec<String>,
    moment: PointMoment,
}

impl Forked {
    /// Uploads the images, or begins to, and tells of all.
    fn push(self, server: &Server, args: &ForkArgs, mut answer: Value) -> Result<u8, Failure> {
        let context = &server.context;
        let stands = |failure: Failure| failure.with_exit(FORKED);
        if args.output == OutputFormat::Human {
            tell(server, args.output, &answer).map_err(stands)?;
        }
        let first = self.overlays.first().cloned().unwrap_or_default();
        let upload = self.upload(server, args).map_err(|failure| {
            stands(failure).adding(" (the fork stands, and guests go on, but nothing is uploaded)")
        })?;
        let (text, failed) = if args.wait {
            let mut watch = Watch::start(args.progress.beside(args.output).mode(false)).map_err(stands)?;
            let uploaded = upload.run(context, &mut watch);
            let failed = upload.told(&uploaded);
            answer["push"] = upload::report(uploaded.reports, failed.as_deref());
            (uploaded.text, failed)
        } else {
            let mut log = first.into_os_string();
            log.push(".push.log");
            let log = PathBuf::from(log);
            match upload.begin(&log) {
                Ok(process) => {
                    let log = log.display().to_string();
                    answer["push"] = json!({ "process": process, "log": log });
                    let log = zebu_disks::printable(&log).into_owned();
                    (format!("Process {process} uploads, and tells of its end in '{log}'.\n"), None)
                }
                Err(failure) => {
                    let failed = upload.failed_at_all(failure.message.as_deref().unwrap_or_default());
                    answer["push"] = upload::report(Vec::new(), Some(&failed));
                    (String::new(), Some(failed))
                }
            }
        };
        if let Some(failed) = &failed {
            stderr::tell(context.dialect, failed);
        }
        match args.output {
            OutputFormat::Human => stdout::print(&text),
            OutputFormat::Json => tell(server, args.output, &answer),
        }
        .map_err(stands)?;
        Ok(if failed.is_some() { FORKED } else { 0 })
    }

    fn upload(self, server: &Server, args: &ForkArgs) -> Result<Upload, Failure> {
        let all = self.names.into_iter().zip(&self.overlays).zip(self.targets);
        let sealed = |((export, overlay), target): ((String, &PathBuf), String)| {
            upload::sealed_below(&server.context, overlay).map(|image| Sealed { export, image, target })
        };
        let disks = all.map(sealed).collect::<Result<Vec<_>, _>>()?;
        Ok(Upload { disks, moment: self.moment, rate: args.rate.and_then(|rate| rate.0) })
    }
}

fn ask(server: &mut Server, mut disks: Vec<AlsoForked>, made: &mut Overlays) -> Result<Value, Failure> {
    let first = disks.remove(0);
    let start = ForkStart { export: first.export, to: first.to, also: disks };
    let descriptors: Vec<_> = made.files.iter().map(|(_, file)| file.as_fd()).collect();
    let asked = server.ask_with(Command::Fork(start), &descriptors);
    match asked {
        Ok(answer) => {
            made.keep();
            match answer["failed"].as_str() {
                Some(message) => Err(Failure::new(message)),
                None => Ok(answer),
            }
        }
        Err(failure) => {
            // Without the server's word, an overlay may hold what guests write.
            if !server.has_refused() {
                made.keep();
            }
            Err(failure)
        }
    }
}

fn tell(server: &Server, output: OutputFormat, answer: &Value) -> Result<(), Failure> {
    let text = match output {
        OutputFormat::Json => json::to_text(server.context.dialect, answer)?,
        OutputFormat::Human => {
            let disks = answer["disks"].as_array().map(Vec::as_slice).unwrap_or_default();
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let line = |disk: &Value| {
                let (export, overlay) = (text(&disk["export"]), text(&disk["overlay"]));
                format!(
                    "'{}' continues in '{}'\n",
                    zebu_disks::printable(&export),
                    zebu_disks::printable(&overlay)
                )
            };
            let lines: String = disks.iter().map(line).collect();
            format!("{lines}Writes waited for {} us.\n", answer["gap-us"].as_u64().unwrap_or_default())
        }
    };
    stdout::print(&text)
}

/// Runs a hook to its end.
fn run_hook(hook: Option<&str>, what: &str) -> Result<(), Failure> {
    let Some(hook) = hook else { return Ok(()) };
    let ended = Program::new("sh").arg("-c").arg(format!("{hook} \"$1\"")).arg("sh").arg(what).status();
    match ended {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Failure::new(format!("the hook '{hook} {what}' failed: {status}"))),
        Err(error) => Err(Failure::new(format!("could not run the hook '{hook} {what}': {error}"))),
    }
}

/// Files that were made for overlays. Those that are not kept are removed.
#[derive(Default)]
struct Overlays {
    files: Vec<(PathBuf, File)>,
    is_kept: bool,
}

impl Overlays {
    /// Makes a file, with a durable name, for those who may use the image `base`.
    fn make(&mut self, path: &Path, base: Option<&Path>) -> Result<(), Failure> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path);
        let file = file.map_err(|error| {
            let reason = errno_text(error.raw_os_error().unwrap_or_default());
            Failure::new(format!("could not make '{}': {reason}", path.display()))
        })?;
        // The server that starts next may be another user's than this command.
        if let Some(owned) = base.filter(|base| base.is_absolute()).and_then(|base| base.metadata().ok()) {
            let _ = file.set_permissions(Permissions::from_mode(owned.mode() & 0o777));
            let _ = fchown(&file, Some(owned.uid()), Some(owned.gid()));
        }
        self.files.push((path.to_owned(), file));
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new("."))).and_then(|directory| directory.sync_all()).map_err(
            |error| Failure::new(format!("could not make the name '{}' durable: {error}", path.display())),
        )
    }

    fn keep(&mut self) {
        self.is_kept = true;
    }
}

impl Drop for Overlays {
    fn drop(&mut self) {
        if !self.is_kept {
            for (path, _) in &self.files {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}
