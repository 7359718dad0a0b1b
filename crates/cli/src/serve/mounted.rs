//! Images that are mounted as files.

use crate::failure::Failure;
use crate::serve::serve_args::ServeArgs;
use crate::serve::unmounter::Unmounter;
use std::path::PathBuf;
use zebu_export::fuse::{FuseConfig, FuseMount};
use zebu_export::{ExportError, Exports, Level, MemoryBudget, WorkerPool};

/// The images that are mounted as files, until this is dropped.
pub(crate) struct Mounted<'a> {
    args: &'a ServeArgs,
    files: Vec<FuseMount>,
    /// The process that unmounts them, if the server itself may not in the end.
    unmounter: Option<Unmounter>,
}

impl<'a> Mounted<'a> {
    /// Mounts the images over their files.
    pub(crate) fn start(
        args: &'a ServeArgs,
        exports: &Exports,
        memory: &MemoryBudget,
    ) -> Result<Self, Failure> {
        let mut mounted = Self { args, files: Vec::new(), unmounter: None };
        for (path, export) in args.fuse.iter().zip(exports.iter()) {
            // To look at what is mounted there already would wait for it to be served.
            let is_there = |real: PathBuf| mounted.files.iter().any(|file| file.path() == real);
            if std::fs::canonicalize(path).is_ok_and(is_there) {
                return Err(Failure::usage(format!("'{}' is given twice with --fuse", path.display())));
            }
            let config = FuseConfig::default().memory(memory.clone()).log(args.log());
            mounted.files.push(FuseMount::over(path, export, config)?);
        }
        if !args.no_sandbox && !mounted.files.is_empty() {
            let started = Unmounter::start(&mounted.files);
            mounted.unmounter = Some(started.map_err(|error| {
                let why = format!("could not start what unmounts in the end: {error}");
                Failure::new(format!("{why} (--no-sandbox does without)"))
            })?);
        }
        Ok(mounted)
    }

    /// Has the threads of `pool` serve them.
    pub(crate) fn serve(&mut self, pool: &WorkerPool) -> Result<(), ExportError> {
        self.files.iter_mut().try_for_each(|file| file.serve(pool))
    }
}

impl Drop for Mounted<'_> {
    fn drop(&mut self) {
        let files = std::mem::take(&mut self.files);
        if let Some(unmounter) = self.unmounter.take() {
            files.iter().for_each(FuseMount::expect_unmount);
            for line in unmounter.unmount() {
                self.args.log().write(Level::Warning, format_args!("{line}"));
            }
            files.into_iter().for_each(FuseMount::stop_unmounted);
        }
    }
}
