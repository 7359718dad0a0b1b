//! Control groups that bound the memory of what runs in them, page cache included. Need root.

use crate::program::is_root;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A group; gone when dropped, if nothing runs in it any more.
#[derive(Debug)]
pub struct MemoryGroup {
    place: PathBuf,
    /// The file that tells how often the kernel killed something.
    kills: &'static str,
}

impl MemoryGroup {
    /// A group with so many bytes; `None` where groups are not allowed, with a note.
    pub fn new(name: &str, bytes: u64) -> Option<Self> {
        if !is_root() {
            eprintln!("skipped: a control group needs root");
            return None;
        }
        let name = format!("zebu-{name}-{}", std::process::id());
        match Self::make(&name, bytes) {
            Ok(group) => Some(group),
            Err(error) => {
                eprintln!("skipped: no control group: {error}");
                None
            }
        }
    }

    fn make(name: &str, bytes: u64) -> io::Result<Self> {
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let of = |controllers: &str| {
            let mut fields = own.lines().map(|line| line.splitn(3, ':').skip(1));
            fields.find_map(|mut field| (field.next()? == controllers).then(|| field.next())?)
        };
        let root = Path::new("/sys/fs/cgroup");
        // The first version has a tree for each controller.
        if let Some(own) = of("memory") {
            let place = root.join("memory").join(own.trim_start_matches('/')).join(name);
            let group = Self { place, kills: "memory.oom_control" };
            group.begin("memory.limit_in_bytes", bytes)?;
            return Ok(group);
        }
        // A group with processes gives no controllers to those below it, unless it is the root.
        let own = root.join(of("").ok_or(ErrorKind::NotFound)?.trim_start_matches('/'));
        let parent = own.parent().filter(|parent| parent.starts_with(root)).unwrap_or(root);
        let _ = fs::write(parent.join("cgroup.subtree_control"), "+memory");
        let group = Self { place: parent.join(name), kills: "memory.events" };
        group.begin("memory.max", bytes)?;
        Ok(group)
    }

    fn begin(&self, limit: &str, bytes: u64) -> io::Result<()> {
        fs::create_dir(&self.place)?;
        fs::write(self.place.join(limit), bytes.to_string())
    }

    /// Has a program run in the group.
    pub fn hold(&self, command: &mut Command) {
        let processes = self.place.join("cgroup.procs");
        // SAFETY: after fork, the child only writes a byte to a file; the path was made before.
        unsafe {
            command.pre_exec(move || fs::write(&processes, "0"));
        }
    }

    /// How often the kernel killed something in the group for want of memory.
    ///
    /// # Panics
    /// If the group does not tell.
    pub fn kills(&self) -> u64 {
        let told = fs::read_to_string(self.place.join(self.kills)).expect("a group tells");
        let line = told.lines().find_map(|line| line.strip_prefix("oom_kill ")).expect("one of the lines");
        line.trim().parse().expect("a number")
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.place);
    }
}
