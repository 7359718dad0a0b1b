//! QEMU's drivers of a host's files, and the kinds of file that each takes.

use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;
use zebu_engine::Access;

/// A driver of a host's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileDriver {
    /// Regular files.
    File,
    /// Block and character devices.
    HostDevice,
    /// Drives.
    HostCdrom,
}

/// The kind of a file, as far as it matters how it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FileKind {
    Any,
    CharacterDevice,
}

impl FileDriver {
    /// The driver of that name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        [Self::File, Self::HostDevice, Self::HostCdrom].into_iter().find(|driver| driver.name() == name)
    }

    /// The driver that the option `key` names.
    ///
    /// # Errors
    /// It is none of these.
    pub(crate) fn of_option(key: &str, name: &str) -> Result<Self, String> {
        Self::named(name).ok_or_else(|| {
            let servers =
                if key == "data-file.driver" { "" } else { ", nbd, rbd, http, https, s3, gs, az" };
            format!(
                "Parameter '{key}': there is no driver '{name}' (there are file, host_device, host_cdrom{servers})"
            )
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::HostDevice => "host_device",
            Self::HostCdrom => "host_cdrom",
        }
    }

    /// The kind of the file at `path`. What can't be looked at is left to its opening.
    ///
    /// # Errors
    /// In QEMU's words: the driver does not take it.
    pub(crate) fn check(self, path: &Path, access: Access) -> Result<FileKind, String> {
        let Ok(metadata) = std::fs::metadata(path) else { return Ok(FileKind::Any) };
        let (kind, shown, name) = (metadata.file_type(), path.display(), self.name());
        if kind.is_dir() && access == Access::ReadWrite {
            return Err(format!("Could not open '{shown}': Is a directory"));
        }
        match self {
            Self::File if !kind.is_file() => {
                Err(format!("'{name}' driver requires '{shown}' to be a regular file"))
            }
            Self::HostDevice | Self::HostCdrom if !kind.is_block_device() && !kind.is_char_device() => {
                Err(format!("'{name}' driver requires '{shown}' to be either a character or block device"))
            }
            _ if !kind.is_char_device() => Ok(FileKind::Any),
            _ => {
                let writes = access == Access::ReadWrite;
                let opened = std::fs::OpenOptions::new().read(true).write(writes).open(path);
                opened
                    .map(|_| FileKind::CharacterDevice)
                    .map_err(|error| format!("Could not open '{shown}': {}", error_text(&error)))
            }
        }
    }
}

fn error_text(error: &std::io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), crate::errno_text::errno_text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_driver_takes_its_kind_of_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        std::fs::write(&file, "x").unwrap();
        let check = |name: &str, path: &Path| FileDriver::named(name).unwrap().check(path, Access::ReadOnly);
        assert_eq!(check("file", &file), Ok(FileKind::Any));
        assert!(check("file", dir.path()).is_err_and(|e| e.contains("'file' driver requires")));
        assert!(check("host_device", &file).is_err_and(|e| e.contains("either a character or block device")));
        assert_eq!(check("host_cdrom", Path::new("/dev/null")), Ok(FileKind::CharacterDevice));
        assert!(check("file", Path::new("/dev/null")).is_err());
        assert_eq!(check("file", Path::new("/nonexistent")), Ok(FileKind::Any));
        let written = FileDriver::File.check(dir.path(), Access::ReadWrite);
        assert!(written.is_err_and(|e| e.ends_with("Is a directory")));
    }
}
