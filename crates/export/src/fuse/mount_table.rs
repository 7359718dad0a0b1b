//! The mount over a path (proc_pid_mountinfo(5)).

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::time::Duration;

/// How often is looked whether a mount is still in use, and how long is waited in between.
const LOOKS: u32 = 25;
const STEP: Duration = Duration::from_millis(20);

/// The file system that is mounted last over a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedOver {
    /// Its number.
    pub device: String,
    /// Its type, as `fuse.zebu`.
    pub file_system: String,
    /// Its source; of an image that is mounted, the image.
    pub source: String,
    /// The number of the mount, which no other gets until the system starts anew; since Linux 6.8.
    pub unique: Option<u64>,
}

/// Looks what is mounted over a path without symbolic links. Nobody is asked who would have to serve it.
pub fn mounted_over(path: &Path) -> Option<MountedOver> {
    let mounts = fs::read("/proc/self/mountinfo").ok()?;
    let found = mounts.split(|byte| *byte == b'\n').filter_map(|line| entry(line, path)).next_back()?;
    Some(MountedOver { unique: unique_number(path), ..found })
}

/// The number of the mount over a path that no other mount had or will have. The numbers of mounts and devices are given anew.
fn unique_number(path: &Path) -> Option<u64> {
    const MNT_ID_UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
    // Nothing is asked for that only the file system knows.
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC | AtFlags::SYMLINK_NOFOLLOW, MNT_ID_UNIQUE).ok()?;
    (found.stx_mask & MNT_ID_UNIQUE.bits() != 0).then_some(found.stx_mnt_id)
}

/// Unmounts what is mounted over a path. Programs that only look at it, as `df` does, are waited for.
///
/// # Errors
/// EBUSY: somebody uses it for longer than half a second; or what umount(2) says.
pub fn unmount_unless_used(path: &Path) -> Result<(), Errno> {
    for _ in 1..LOOKS {
        match unmount(path, UnmountFlags::empty()) {
            Err(Errno::BUSY) => std::thread::sleep(STEP),
            done => return done,
        }
    }
    unmount(path, UnmountFlags::empty())
}

/// The mount of a line, if it is over this path.
fn entry(line: &[u8], path: &Path) -> Option<MountedOver> {
    let text = |field: &[u8]| unescaped(field).to_string_lossy().into_owned();
    let mut fields = line.split(|byte| *byte == b' ');
    let device = text(fields.nth(2)?);
    if unescaped(fields.nth(1)?).as_bytes() != path.as_os_str().as_bytes() {
        return None;
    }
    // Behind fields that may be there or not.
    let mut behind = fields.skip_while(|field| *field != b"-").skip(1);
    Some(MountedOver {
        device,
        file_system: text(behind.next()?),
        source: text(behind.next()?),
        unique: None,
    })
}

/// Without the octal escapes of blanks and backslashes.
fn unescaped(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, behind @ ..] = rest {
        let escaped = match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] => {
                Some((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'))
            }
            _ => None,
        };
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { rest.get(4..).unwrap_or_default() } else { behind };
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_read_as_they_are() {
        assert_eq!(unescaped(b"/a\\040b\\134040/\\011\\08"), "/a b\\040/\t\\08");
        assert_eq!(mounted_over("/proc".as_ref()).unwrap().file_system, "proc");
        assert_eq!(mounted_over("/no such/place".as_ref()), None);
        let line = b"36 35 0:98 / /mnt/a\\040b rw,nosuid shared:1 master:2 - fuse.zebu disk.qcow2 rw";
        let mounted = MountedOver {
            device: "0:98".into(),
            file_system: "fuse.zebu".into(),
            source: "disk.qcow2".into(),
            unique: None,
        };
        assert_eq!(entry(line, "/mnt/a b".as_ref()), Some(mounted));
        assert_eq!(entry(line, "/mnt/a".as_ref()), None);
        assert_eq!(entry(b"36 35 0:98 / /mnt", "/mnt".as_ref()), None);
    }
}
