//! The program that this process stands for, by the name it was called by.

use std::ffi::OsStr;
use std::path::Path;
use zebu_engine::Probe;

/// A program whose command line the one binary reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Program {
    /// zebu under its own name, and under every name that is not one of the others.
    #[default]
    Zebu,
    /// `qemu-img`.
    QemuImg,
    /// `qemu-io`.
    QemuIo,
    /// `qemu-nbd`.
    QemuNbd,
}

impl Program {
    /// All names that a link to the binary can have, but its own.
    pub const LINKS: [Program; 3] = [Program::QemuImg, Program::QemuIo, Program::QemuNbd];

    /// Program that is called by `path`: the file's name counts.
    pub fn by_path(path: &OsStr) -> Self {
        let name = Path::new(path).file_name().unwrap_or(path);
        Self::LINKS.into_iter().find(|program| name == program.name()).unwrap_or(Program::Zebu)
    }

    /// Name that the program is called by, and that its messages begin with.
    pub fn name(self) -> &'static str {
        match self {
            Program::Zebu => "zebu",
            Program::QemuImg => "qemu-img",
            Program::QemuIo => "qemu-io",
            Program::QemuNbd => "qemu-nbd",
        }
    }

    /// Bytes by which it finds out the format of an image.
    pub fn probe(self) -> Probe {
        if self.is_qemu() { Probe::Start } else { Probe::BothEnds }
    }

    /// Whether QEMU's own grammar, defaults and messages are asked for.
    pub fn is_qemu(self) -> bool {
        self != Program::Zebu
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_file_counts() {
        for (path, program) in [
            ("/usr/local/bin/qemu-img", Program::QemuImg),
            ("qemu-io", Program::QemuIo),
            ("bin/qemu-nbd", Program::QemuNbd),
            ("./zebu", Program::Zebu),
            ("qemu-img.real", Program::Zebu),
            ("", Program::Zebu),
        ] {
            assert_eq!(Program::by_path(OsStr::new(path)), program, "{path}");
        }
    }
}
