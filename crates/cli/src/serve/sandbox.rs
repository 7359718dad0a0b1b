//! Giving up what a server does not need any more once everything is open: rights to files by Landlock (since Linux
//! 5.13), then system calls by seccomp.

use super::system_calls;
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, RestrictionStatus,
    Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
};
use std::path::Path;

/// The newest rights that are given up, as far as the kernel knows them: files, TCP.
const NEWEST: ABI = ABI::V4;

/// From now on, the process has the system calls of `system_calls` only, and this thread and those that it makes can't
/// open, make or remove files, but for removing `sockets`; nor
/// bind or connect TCP sockets, nor gain rights by running programs. What is open stays usable.
///
/// # Errors
/// Why the kernel does not do a part of that, in words; the other part is done.
pub(crate) fn enter<'a>(sockets: impl Iterator<Item = &'a Path>) -> Result<(), String> {
    let files = give_up_files(sockets);
    let calls = system_calls::restrict().map_err(|reason| format!("system calls are not filtered: {reason}"));
    files.and(calls)
}

fn give_up_files<'a>(sockets: impl Iterator<Item = &'a Path>) -> Result<(), String> {
    let restrict = || -> Result<RestrictionStatus, Box<dyn std::error::Error>> {
        let mut rules = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(NEWEST))?
            .handle_access(AccessNet::from_all(NEWEST))?
            .create()?;
        for socket in sockets {
            let directory = match socket.parent() {
                Some(parent) if !parent.as_os_str().is_empty() => parent,
                _ => Path::new("."),
            };
            rules = rules.add_rule(PathBeneath::new(PathFd::new(directory)?, AccessFs::RemoveFile))?;
        }
        Ok(rules.restrict_self()?)
    };
    match restrict() {
        Ok(status) if status.ruleset == RulesetStatus::NotEnforced => {
            Err("the kernel has no Landlock".to_owned())
        }
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::{ErrorKind, Read};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixListener;

    #[test]
    fn what_is_open_stays_and_nothing_else_can_be_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (file, socket) = (dir.path().join("file"), dir.path().join("socket"));
        fs::write(&file, "content").unwrap();
        let mut open = fs::File::open(&file).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let tcp = TcpListener::bind("localhost:0").unwrap();
        let address = tcp.local_addr().unwrap();
        // A thread of its own, since there is no way back.
        std::thread::spawn(move || {
            if let Err(reason) = give_up_files([socket.as_path()].into_iter()) {
                eprintln!("skipped: {reason}");
                return;
            }
            let mut content = String::new();
            open.read_to_string(&mut content).unwrap();
            assert_eq!(content, "content");
            for refused in [
                fs::File::open(&file).map(drop),
                fs::File::create(file.with_extension("new")).map(drop),
                fs::File::open("/etc/passwd").map(drop),
                fs::create_dir(file.with_extension("dir")),
            ] {
                assert_eq!(refused.unwrap_err().kind(), ErrorKind::PermissionDenied);
            }
            if TcpStream::connect(address).is_ok() {
                // Before Linux 6.7.
                eprintln!("this kernel's Landlock knows no TCP");
            }
            drop(listener);
            fs::remove_file(&socket).unwrap();
        })
        .join()
        .unwrap();
    }
}
