//! Image options below `backing`: backing files in place of those that images name, at any depth of the chain.

use crate::context::Context;
use crate::file_driver::FileDriver;
use crate::program::Program;
use crate::remote_opts::RemoteOpts;
use crate::words::format_argument;
use std::path::PathBuf;
use zebu_engine::{Format, OpenOptions};

/// Steps down a chain that options can describe.
const MAX_DEPTH: usize = 32;

/// Options about the images below the top, the next one first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct BackingOpts {
    steps: Vec<Step>,
}

/// One image of the chain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Step {
    format: Option<Format>,
    file: Option<PathBuf>,
    remote: RemoteOpts,
    /// The driver is named: the file's name is a path, whatever it looks like.
    is_plain: bool,
    /// The disk is shown as if the image above named no backing file.
    is_none: bool,
}

impl BackingOpts {
    /// The name of an option without the steps down the chain before it.
    pub(crate) fn own_key(key: &str) -> &str {
        split(key).1
    }

    /// Takes an option; false if it is about something else.
    pub(crate) fn take(&mut self, dialect: Program, key: &str, value: &str) -> Result<bool, String> {
        let (depth, own) = split(key);
        let is_end = own == "backing" && value.is_empty();
        let index = if is_end { Some(depth) } else { depth.checked_sub(1) };
        let Some(index) = index else { return Ok(false) };
        if index >= MAX_DEPTH {
            return Err(format!("Parameter '{key}': more than {MAX_DEPTH} backing files are nested"));
        }
        if self.steps.len() <= index {
            self.steps.resize_with(index + 1, Step::default);
        }
        let step = &mut self.steps[index];
        match own {
            _ if is_end => step.is_none = true,
            "driver" => step.format = Some(format_argument(dialect, value)?),
            "file.driver" if step.remote.name(value) => {}
            "file.driver" => step.is_plain = FileDriver::of_option(key, value).map(|_| true)?,
            "filename" | "file.filename" => {
                if step.file.is_some() {
                    return Err(format!("Parameter '{key}' is given twice"));
                }
                step.file = Some(PathBuf::from(value));
            }
            _ => {
                let Some(of_file) = own.strip_prefix("file.") else { return Ok(false) };
                return step.remote.take(dialect, of_file, value);
            }
        }
        Ok(true)
    }

    /// Reads what was taken as a whole.
    pub(crate) fn finish(&mut self, context: &Context) -> Result<(), String> {
        for (depth, step) in self.steps.iter_mut().enumerate() {
            let above = "backing.".repeat(depth + 1);
            for name in std::mem::take(&mut step.remote).finish(context)? {
                if step.file.is_some() {
                    return Err(format!("Parameter '{above}file.filename' is given twice"));
                }
                step.file = Some(context.disks.names.note_remote(name)?);
                step.is_plain = true;
            }
            match &mut step.file {
                Some(path) if !step.is_plain => {
                    *path = context
                        .image_path(path.as_os_str())
                        .map_err(|reason| format!("Parameter '{above}file.filename': {reason}"))?;
                }
                None if step.format.is_some() && step.is_none => {
                    return Err(format!(
                        "Parameter '{above}driver' contradicts the end of the chain there ('backing=')"
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Puts what was given over what the command wants.
    pub(crate) fn apply(self, options: &mut OpenOptions) {
        // Of an image that is given by its driver alone, the image above has the name.
        options.backing_formats =
            self.steps.iter().map(|step| step.format.filter(|_| step.file.is_none())).collect();
        let mut steps = self.steps.into_iter().map(|step| match step.file {
            Some(path) => Some((path, step.format)),
            None => step.is_none.then(|| (PathBuf::new(), None)),
        });
        if let Some(next) = steps.next().flatten() {
            options.backing = Some(next);
        }
        options.backing_below = steps.collect();
    }
}

/// Whether options say something of a backing file but that there is none.
pub fn describes_backing(options: &OpenOptions) -> bool {
    options.backing.as_ref().is_some_and(|(path, _)| !path.as_os_str().is_empty())
        || options.backing_below.iter().any(Option::is_some)
        || options.backing_formats.iter().any(Option::is_some)
}

/// Steps down the chain before the name of an option, and that name.
fn split(key: &str) -> (usize, &str) {
    let (mut depth, mut own) = (0, key);
    while let Some(below) = own.strip_prefix("backing.") {
        (depth, own) = (depth + 1, below);
    }
    (depth, own)
}
