//! An image that is made anew, unmeasured, before each run.

use crate::Outcome;
use crate::lab::{Lab, remove, settle};
use crate::mount::Mounted;
use crate::process::run;
use crate::programs::{LARGE, Load, Program};
use crate::run::Side;
use std::path::{Path, PathBuf};

#[derive(Clone)]
pub(super) struct Fresh<'a> {
    mounted: &'a Mounted,
    pub(super) path: PathBuf,
    size: u64,
    options: String,
    /// The file below, and its format; without one, the file system is made anew with the image.
    backing: Option<(&'a Path, &'a str)>,
}

impl<'a> Fresh<'a> {
    pub(super) fn on(mounted: &'a Mounted, size: u64, options: &str) -> Self {
        let path = mounted.path().join("fresh");
        Self { mounted, path, size, options: options.to_owned(), backing: None }
    }

    /// An overlay.
    pub(super) fn over(mounted: &'a Mounted, backing: (&'a Path, &'a str), size: u64, options: &str) -> Self {
        Self { backing: Some(backing), ..Self::on(mounted, size, options) }
    }

    /// Makes it by the program that will write to it; by QEMU for those that make none.
    pub(super) fn create(&self, lab: &Lab, program: Program) -> Outcome {
        if self.backing.is_none() {
            self.mounted.renew()?;
        }
        remove(&self.path)?;
        let mut command = program.img(lab);
        command.args(["create", "-q", "-f", "qcow2", "-o", &self.options]);
        if let Some((file, format)) = self.backing {
            command.arg("-b").arg(file).args(["-F", format]);
        }
        run(command.arg(&self.path).arg(self.size.to_string()))?;
        settle()
    }

    /// The load on it, by a program.
    pub(super) fn side(self, who: &str, program: Program, lab: &'a Lab, load: Load) -> Side<'a> {
        Side::new(who, move || {
            self.create(lab, program)?;
            load.run(program, lab, &self.path)
        })
    }

    /// The load by QEMU, which believes that the file has no zero-range for so little: it writes whole clusters then.
    pub(super) fn without_zero_range(self, lab: &'a Lab, load: Load) -> Side<'a> {
        Side::new("QEMU, no zero-range", move || {
            self.create(lab, Program::Qemu)?;
            let mut command = load.bench(Program::Qemu, lab, "io_uring");
            command.arg("--image-opts").arg(format!(
                "driver=qcow2,file.driver=blkdebug,file.opt-write-zero={LARGE},file.image.driver=file,file.image.filename={}",
                self.path.display()
            ));
            load.timed(&mut command)
        })
    }
}

/// The load on a fresh image, by each of the programs.
pub(super) fn sides<'a>(
    lab: &'a Lab,
    programs: &'a [Program],
    image: &Fresh<'a>,
    load: Load,
) -> impl Iterator<Item = Side<'a>> {
    let image = image.clone();
    programs.iter().map(move |program| image.clone().side(program.name(), *program, lab, load))
}
