//! Traces of a server in the file system while it serves: the files of its sockets, and images that are mounted as files.

use crate::failure::Failure;
use crate::serve::address::SocketFile;
use crate::serve::cleaner::Cleaner;
use crate::serve::serve_args::ServeArgs;
use std::path::PathBuf;
use zebu_export::fuse::{FuseConfig, FuseMount};
use zebu_export::{ExportError, Exports, Level, Log, MemoryBudget, WorkerPool};

/// The files and mounts, until this is dropped.
pub(crate) struct Footprint {
    log: Log,
    sockets: Vec<SocketFile>,
    mounts: Vec<FuseMount>,
    /// The process that removes them, if the server itself may not in the end.
    cleaner: Option<Cleaner>,
}

impl Footprint {
    /// With the files of these sockets; mounts the images over their files.
    pub(crate) fn start(
        args: &ServeArgs,
        log: &Log,
        sockets: Vec<SocketFile>,
        exports: &Exports,
        memory: &MemoryBudget,
    ) -> Result<Self, Failure> {
        let mut footprint = Self { log: log.clone(), sockets, mounts: Vec::new(), cleaner: None };
        for (path, export) in args.fuse.iter().zip(exports.iter()) {
            // To look at what is mounted there already would wait for it to be served.
            let is_there = |real: PathBuf| footprint.mounts.iter().any(|mount| mount.path() == real);
            if std::fs::canonicalize(path).is_ok_and(is_there) {
                return Err(Failure::usage(format!("'{}' is given twice with --fuse", path.display())));
            }
            let config = FuseConfig::default().memory(memory.clone()).log(log.clone());
            footprint.mounts.push(FuseMount::over(path, &export, config)?);
        }
        Ok(footprint)
    }

    /// Has another process remove all of it, since this one enters its sandbox.
    pub(crate) fn leave_to_cleaner(&mut self) -> Result<(), Failure> {
        if self.sockets.is_empty() && self.mounts.is_empty() {
            return Ok(());
        }
        let started = Cleaner::start(&self.sockets, &self.mounts);
        self.cleaner = Some(started.map_err(|error| {
            let why = format!("could not start the process that removes sockets and mounts: {error}");
            Failure::new(format!("{why} (--no-sandbox needs none)"))
        })?);
        Ok(())
    }

    /// Has the threads of `pool` serve the mounted images.
    pub(crate) fn serve(&mut self, pool: &WorkerPool) -> Result<(), ExportError> {
        self.mounts.iter_mut().try_for_each(|mount| mount.serve(pool))
    }

    /// Removes the files of the sockets, so that no client finds the way to a server that ends.
    pub(crate) fn remove_sockets(&mut self) {
        let sockets = std::mem::take(&mut self.sockets);
        if let Some(cleaner) = &mut self.cleaner
            && !sockets.is_empty()
            && let Some(warning) = cleaner.remove_sockets()
        {
            self.log.write(Level::Warning, format_args!("{warning}"));
        }
    }
}

impl Drop for Footprint {
    fn drop(&mut self) {
        self.remove_sockets();
        let mounts = std::mem::take(&mut self.mounts);
        if let Some(cleaner) = self.cleaner.take() {
            mounts.iter().for_each(FuseMount::expect_unmount);
            for line in cleaner.unmount() {
                self.log.write(Level::Warning, format_args!("{line}"));
            }
            mounts.into_iter().for_each(FuseMount::stop_unmounted);
        }
    }
}
