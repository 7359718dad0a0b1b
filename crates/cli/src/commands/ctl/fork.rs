//! `zebu ctl fork` and `zebu ctl reset`.

use super::server::Server;
use crate::failure::Failure;
use crate::output::{json, stderr, stdout};
use crate::serve::control_request::{AlsoForked, Command, ForkStart};
use crate::values::OutputFormat;
use crate::watch::{ProgressMode, Watch};
use serde_json::Value;
use std::fs::{File, OpenOptions, Permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::process::Command as Program;
use zebu_disks::errno_text;

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
    for disk in &mut disks {
        let image = server.ask(Command::Stats { export: Some(disk.export.clone()) })?;
        made.make(&disk.to, image["filename"].as_str().map(Path::new))?;
        disk.to = std::path::absolute(&disk.to).unwrap_or_else(|_| disk.to.clone());
    }
    // Whoever has frozen something thaws it, whatever comes.
    let watch = Watch::start(ProgressMode::None)?;
    let asked = match run_hook(args.freeze_hook.as_deref(), "freeze") {
        Ok(()) if watch.cancel().is_cancelled() => Err(Failure::interrupted()),
        Ok(()) => ask(server, disks, &mut made),
        Err(failure) => Err(failure),
    };
    let thawed = run_hook(args.freeze_hook.as_deref(), "thaw");
    drop(watch);
    match asked {
        Ok(answer) => {
            tell(server, args.output, &answer)?;
            thawed.map(|()| 0)
        }
        Err(failure) => {
            if let Err(also) = thawed {
                stderr::tell(server.context.dialect, also.message.as_deref().unwrap_or_default());
            }
            Err(failure)
        }
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
