//! A real guest: QEMU boots Debian's cloud kernel with an initramfs made here, which works on its first disk.

use crate::program::{Finished, find, finish, run_in};
use rustix::fs::FlockOperation;
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

/// The package whose dependency is the kernel.
const META_PACKAGE: &str = "linux-image-cloud-amd64";
/// In the order in which they need each other; those that a kernel has built in are no files.
const MODULES: [&str; 6] =
    ["virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci", "virtio_blk"];
/// The guest's message when its work went well.
pub const PASSED: &str = "GUEST-PASSED";

/// The first process of the guest. `step` is on the kernel's command line.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
for module in /modules/*; do insmod $module; done
fail() { echo "GUEST-FAILED: $1"; poweroff -f; }
for try in $(seq 600); do [ -b /dev/vda ] && break; sleep 1; done
[ -b /dev/vda ] || fail "no disk"
echo "disk: $(cat /sys/block/vda/size) sectors, queues: $(ls /sys/block/vda/mq | wc -l), serial: $(cat /sys/block/vda/serial)"
mkdir -p /mnt
if grep -q step=write /proc/cmdline; then
    mkfs.ext4 -q -F /dev/vda || fail "mkfs"
    mount -t ext4 -o discard /dev/vda /mnt || fail "mount"
    for file in 1 2 3 4 5 6 7 8; do
        dd if=/dev/urandom of=/mnt/file$file bs=64k count=$((file * 8)) 2>/dev/null || fail "write"
        mkdir -p /mnt/dir$file/below
        seq 1 $((file * 1000)) > /mnt/dir$file/below/numbers
    done
    dd if=/dev/urandom of=/mnt/gone bs=1M count=16 2>/dev/null
    sync
    rm /mnt/gone
    fstrim /mnt || fail "trim"
    cd /mnt && find . -type f -exec md5sum {} + > /sums || fail "sums"
    cp /sums /mnt/sums
    cd /
    sync
    umount /mnt || fail "unmount"
else
    mount -t ext4 -o ro /dev/vda /mnt || fail "mount"
    [ "$(wc -l < /mnt/sums)" = 16 ] || fail "files are missing"
    cd /mnt && md5sum -c sums > /tmp-result || fail "sums differ: $(cat /tmp-result)"
    cd /
    umount /mnt || fail "unmount"
fi
echo "GUEST-PASSED"
poweroff -f
"#;

/// A kernel and its initramfs.
#[derive(Debug)]
pub struct Guest {
    kernel: PathBuf,
    initramfs: PathBuf,
}

impl Guest {
    /// Gets the kernel (once; it is kept in `cache`) and makes the initramfs.
    ///
    /// # Errors
    /// Something is missing, in words that say what.
    pub fn prepare(cache: &Path) -> Result<Self, String> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let root = cache.join("root");
        get_kernel(cache, &root, META_PACKAGE)?;
        let kernel = only(&root.join("boot"), "vmlinuz-")?;
        let modules = only(&root.join("lib/modules"), "")?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let initramfs = cache.join(format!("initramfs-{}-{number}", std::process::id()));
        build(&initramfs, &modules).map_err(|e| format!("{}: {e}", initramfs.display()))?;
        Ok(Self { kernel, initramfs })
    }

    /// Boots, with these options of QEMU for the disk, and waits until the guest powers off.
    ///
    /// # Errors
    /// What the guest said, unless that its work went well.
    pub fn boot(&self, step: &str, disk: &[&str]) -> Result<String, String> {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "1800"]).arg(program("qemu-system-x86_64")?);
        command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-nodefaults", "-no-reboot"]);
        // vhost-user needs memory that can be shared.
        command.args(["-object", "memory-backend-memfd,id=ram,size=512M,share=on"]);
        command.args([
            "-machine",
            "q35,memory-backend=ram",
            "-m",
            "512M",
            "-display",
            "none",
            "-serial",
            "stdio",
        ]);
        command.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(&self.initramfs);
        command.arg("-append").arg(format!("console=ttyS0 panic=-1 quiet step={step}"));
        command.args(disk);
        let out = finish(command);
        if out.code == Some(0) && out.stdout.contains(PASSED) { Ok(out.stdout) } else { Err(out.to_string()) }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.initramfs);
    }
}

pub(crate) fn program(name: &str) -> Result<PathBuf, String> {
    find(name).ok_or_else(|| format!("{name} is missing: `cargo xtask setup` installs it"))
}

fn succeed(finished: Finished) -> Result<Finished, String> {
    if finished.code == Some(0) { Ok(finished) } else { Err(finished.to_string()) }
}

/// Gets the kernel that the package `meta` means and unpacks it at `root`, unless it is there. The tests of a program do so one
/// after another.
pub(crate) fn get_kernel(cache: &Path, root: &Path, meta: &str) -> Result<(), String> {
    let told = |e: io::Error| format!("{}: {e}", cache.display());
    fs::create_dir_all(cache).map_err(told)?;
    let lock = fs::File::create(cache.join("lock")).map_err(told)?;
    rustix::fs::flock(&lock, FlockOperation::LockExclusive).map_err(|e| told(e.into()))?;
    if root.join("boot").is_dir() {
        return Ok(());
    }
    let fresh = cache.join("fresh");
    let mut failures = String::new();
    for kernel in kernels(cache, meta)? {
        // What an earlier attempt left is not in the way, and not taken for a package.
        let _ = fs::remove_dir_all(&fresh);
        fs::create_dir(&fresh).map_err(told)?;
        match unpack(&fresh, &kernel) {
            // Complete or not there.
            Ok(unpacked) => return fs::rename(unpacked, root).map_err(told),
            Err(failure) => failures = failures + &failure + "\n",
        }
    }
    Err(failures)
}

/// Downloads a kernel's package into an empty directory and unpacks it; where to.
fn unpack(dir: &Path, kernel: &str) -> Result<PathBuf, String> {
    succeed(run_in(dir, &program("apt-get")?, ["-o", "Acquire::Retries=3", "download", kernel]))?;
    let package = only(dir, &format!("{kernel}_"))?;
    let unpacked = dir.join("unpacked");
    succeed(run_in(dir, &program("dpkg-deb")?, [Path::new("-x"), &package, &unpacked]))?;
    Ok(unpacked)
}

/// Packages of kernels: the one that the release means, and a few of the same series for a time when that one can't be
/// had (an archive in the middle of an update).
fn kernels(dir: &Path, meta: &str) -> Result<Vec<String>, String> {
    let apt_cache = program("apt-cache")?;
    let depends = succeed(run_in(dir, &apt_cache, ["depends", "--important", meta]))?;
    let meant =
        depends.stdout.lines().find_map(|line| line.trim().strip_prefix("Depends: ")).ok_or_else(|| {
            format!("apt knows no kernel: {meta} depends on nothing (is `apt-get update` due?)")
        })?;
    let series = meant.rfind('.').map_or(meant, |at| &meant[..=at]);
    let pattern = format!("^{}.*-cloud-amd64$", series.replace('.', "\\."));
    let known = succeed(run_in(dir, &apt_cache, ["search", "--names-only", &pattern]))?;
    let mut others: Vec<&str> = known
        .stdout
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| *name != meant)
        .collect();
    others.sort_unstable_by(|a, b| b.cmp(a));
    Ok([meant].into_iter().chain(others.into_iter().take(4)).map(str::to_owned).collect())
}

/// The only entry of a directory whose name begins so.
pub(crate) fn only(dir: &Path, prefix: &str) -> Result<PathBuf, String> {
    let entries = fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut found = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path());
    found.next().ok_or_else(|| format!("nothing in {} is named {prefix}...", dir.display()))
}

/// Writes an initramfs with busybox, mkfs.ext4, the modules and the first process.
fn build(path: &Path, modules: &Path) -> io::Result<()> {
    let mut archive = Archive::create(path)?;
    for dir in ["bin", "sbin", "dev", "proc", "sys", "modules", "etc"] {
        archive.directory(dir)?;
    }
    archive.entry("init", 0o100_755, INIT.as_bytes())?;
    archive.entry("etc/mke2fs.conf", 0o100_644, &fs::read("/etc/mke2fs.conf").unwrap_or_default())?;
    let busybox = find("busybox").ok_or_else(|| io::Error::other("busybox is missing (busybox-static)"))?;
    archive.file("bin/busybox", &busybox)?;
    let mkfs = find("mkfs.ext4").ok_or_else(|| io::Error::other("mkfs.ext4 is missing (e2fsprogs)"))?;
    archive.file("sbin/mkfs.ext4", &fs::canonicalize(&mkfs)?)?;
    let mut made = Vec::new();
    for library in libraries(&mkfs)? {
        archive.parents(&library, &mut made)?;
        archive.file(library.trim_start_matches('/'), Path::new(&library))?;
    }
    for (index, name) in MODULES.iter().enumerate() {
        if let Some(file) = find_file(modules, &format!("{name}.ko"))? {
            archive.file(&format!("modules/{index}-{name}.ko"), &file)?;
        }
    }
    archive.end()
}

/// The libraries of a program, by their paths.
pub(crate) fn libraries(program: &Path) -> io::Result<Vec<String>> {
    let out =
        run_in(Path::new("/"), &find("ldd").ok_or_else(|| io::Error::other("ldd is missing"))?, [program]);
    Ok(out.stdout.split_whitespace().filter(|word| word.starts_with('/')).map(str::to_owned).collect())
}

pub(crate) fn find_file(dir: &Path, name: &str) -> io::Result<Option<PathBuf>> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            if let Some(found) = find_file(&entry.path(), name)? {
                return Ok(Some(found));
            }
        } else if entry.file_name() == name {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

/// A cpio archive in the form of the kernel's initramfs ("newc").
pub(crate) struct Archive<W> {
    out: W,
    number: u32,
}

impl Archive<io::BufWriter<fs::File>> {
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        Ok(Self { out: io::BufWriter::new(fs::File::create(path)?), number: 1 })
    }
}

impl<W: Write> Archive<W> {
    pub(crate) fn directory(&mut self, name: &str) -> io::Result<()> {
        self.entry(name, 0o040_755, &[])
    }

    /// The directories of a path, unless they were made before.
    pub(crate) fn parents(&mut self, path: &str, made: &mut Vec<String>) -> io::Result<()> {
        let path = path.trim_start_matches('/');
        for (at, _) in path.match_indices('/') {
            let dir = path[..at].to_owned();
            if !made.contains(&dir) {
                self.directory(&dir)?;
                made.push(dir);
            }
        }
        Ok(())
    }

    pub(crate) fn file(&mut self, name: &str, from: &Path) -> io::Result<()> {
        let mode = 0o100_000 | fs::metadata(from)?.permissions().mode() & 0o777;
        self.entry(name, mode, &fs::read(from)?)
    }

    pub(crate) fn entry(&mut self, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
        let name_len = name.len() + 1;
        let fields = [self.number, mode, 0, 0, 1, 0, content.len() as u32, 0, 0, 0, 0, name_len as u32, 0];
        self.number += 1;
        let mut head = b"070701".to_vec();
        for field in fields {
            head.extend(format!("{field:08x}").bytes());
        }
        head.extend(name.bytes());
        head.push(0);
        head.resize(head.len().next_multiple_of(4), 0);
        self.out.write_all(&head)?;
        self.out.write_all(content)?;
        let padding = content.len().next_multiple_of(4) - content.len();
        self.out.write_all(&[0; 3][..padding])
    }

    pub(crate) fn end(mut self) -> io::Result<()> {
        self.entry("TRAILER!!!", 0, &[])?;
        self.out.flush()
    }
}
