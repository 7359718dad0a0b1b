//! Giving up what a server does not need any more once everything is open: rights to files by Landlock (since Linux
//! 5.13), then system calls by seccomp. Both hold for all threads, whenever they were made.

use super::system_calls;
use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, Scope,
};
use std::error::Error;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use zebu_storage::{landlock_version, restrict_all_threads};

/// The newest rights that are given up, as far as the kernel knows them.
const NEWEST: ABI = ABI::V9;
/// Rights that older kernels can't take away, by the version of Landlock that can.
const SINCE: [(u32, &str); 4] = [
    (3, "cutting files that are open (Linux 6.2)"),
    (4, "binding and connecting TCP sockets through an io_uring (Linux 6.7)"),
    (5, "ioctl on devices (Linux 6.10)"),
    (6, "abstract Unix sockets, and signals to other processes by other ways than kill (Linux 6.12)"),
];

/// The result of giving up rights.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Why a part is missing that this kernel should have.
    pub(crate) failures: Vec<String>,
    /// Rights that this kernel is too old to take away.
    pub(crate) missing: Vec<&'static str>,
}

/// From now on, the process has the system calls of `system_calls.rs` only, and no thread of it can open, make or remove
/// files, but open those of `cache`, the objects of a cache, and read `devices`, its own; nor bind or connect TCP sockets,
/// send signals to other processes, nor gain rights by running programs. What is open stays usable.
pub(crate) fn enter(cache: Option<&Path>, devices: &[&Path]) -> Outcome {
    let mut outcome = Outcome::default();
    let version = landlock_version();
    if version == 0 {
        outcome.failures.push("files can still be opened: the kernel has no Landlock".to_owned());
    } else if let Err(reason) = give_up_files(cache, devices) {
        outcome.failures.push(format!("files can still be opened: {reason}"));
    } else {
        outcome.missing = SINCE.iter().filter(|(since, _)| version < *since).map(|(_, what)| *what).collect();
    }
    if let Err(reason) = system_calls::restrict() {
        outcome.failures.push(format!("system calls are not filtered: {reason}"));
    }
    outcome
}

fn give_up_files(cache: Option<&Path>, devices: &[&Path]) -> Result<(), Box<dyn Error>> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    if let Some(directory) = cache {
        // What others store there later is evicted by this process, too.
        let rights = AccessFs::ReadDir | AccessFs::ReadFile | AccessFs::WriteFile;
        rules = rules.add_rule(PathBeneath::new(PathFd::new(directory)?, rights))?;
    }
    for device in devices {
        // In the end is looked whether somebody else uses it. Without its file, that counts as so.
        if let Ok(file) = PathFd::new(device) {
            rules = rules.add_rule(PathBeneath::new(file, AccessFs::ReadFile))?;
        }
    }
    let rules = Option::<OwnedFd>::from(rules).ok_or("the kernel has no Landlock")?;
    Ok(restrict_all_threads(rules.as_fd())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::io::{ErrorKind, Read};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixListener;

    /// Not a test: what the next one runs in a process of its own, since there is no way back.
    #[test]
    #[ignore = "gives up the rights of the whole process"]
    fn gives_up_files() {
        let dir = tempfile::tempdir().unwrap();
        let (file, socket) = (dir.path().join("file"), dir.path().join("socket"));
        fs::write(&file, "content").unwrap();
        let mut open = fs::File::open(&file).unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        let (cache, of_cache) = (dir.path().join("cache"), dir.path().join("cache/map"));
        fs::create_dir(&cache).unwrap();
        fs::write(&of_cache, "ranges").unwrap();
        let of_devices = dir.path().join("device");
        fs::write(&of_devices, "disk").unwrap();
        give_up_files(Some(&cache), &[&of_devices]).unwrap();
        drop(fs::File::open(&of_devices).unwrap());
        assert!(fs::OpenOptions::new().write(true).open(&of_devices).is_err());
        assert_eq!(fs::read_dir(&cache).unwrap().count(), 1);
        drop(fs::OpenOptions::new().read(true).write(true).open(&of_cache).unwrap());
        let mut content = String::new();
        open.read_to_string(&mut content).unwrap();
        assert_eq!(content, "content");
        for refused in [
            fs::File::open(&file).map(drop),
            fs::File::create(file.with_extension("new")).map(drop),
            fs::File::open("/etc/passwd").map(drop),
            fs::create_dir(file.with_extension("dir")),
            fs::remove_file(&of_cache),
            fs::write(cache.join("new"), ""),
            fs::remove_file(&socket),
            fs::remove_file(&file),
        ] {
            assert_eq!(refused.unwrap_err().kind(), ErrorKind::PermissionDenied);
        }
        assert_eq!(TcpStream::connect(address).is_err(), landlock_version() >= 4);
        if landlock_version() >= 6 {
            let parent = rustix::process::getppid().unwrap();
            assert!(rustix::process::test_kill_process(parent).is_err(), "signals");
        }
        drop(listener);
        // The directory can't be removed any more.
        std::mem::forget(dir);
    }

    #[test]
    fn what_is_open_stays_and_nothing_else_can_be_opened() {
        if landlock_version() == 0 {
            eprintln!("skipped: the kernel has no Landlock");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        let name = "serve::sandbox::tests::gives_up_files";
        let ended = command.args(["--exact", name, "--ignored"]).env("TMPDIR", dir.path()).output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
    }
}
