//! A guest whose kernel has what this machine's may lack: ublk and nbd. It runs zebu, and a program of the tests that uses the
//! devices, both as they were built for this machine, with their libraries.

use crate::guest::{Archive, PASSED, find_file, get_kernel, libraries, only, program};
use crate::program::{find, finish, zebu_program};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The package whose dependency is the kernel. (The release's own is older and has no ublk.)
const META_PACKAGE: &str = "linux-image-6.12-cloud-amd64";
/// Modules that are loaded at the start, each after those that it needs.
const MODULES: &[&str] = &["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"];
/// Modules that the program loads when it is their turn.
const LATER: &[&str] = &["ublk_drv", "nbd"];
/// Programs of this machine that the guest has.
const PROGRAMS: &[&str] = &["mkfs.ext4", "e2fsck", "resize2fs", "fstrim"];

/// The first process of the guest. What its program does is on the kernel's command line.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mount -t tmpfs none /tmp
for module in $(cat /modules/order); do insmod /modules/$module.ko; done
words=$(sed 's/.*guest=//; s/,/ /g' /proc/cmdline)
/bin/in_guest $words && echo "GUEST-PASSED"
poweroff -f
"#;

/// A kernel and its initramfs.
#[derive(Debug)]
pub struct DeviceGuest {
    kernel: PathBuf,
    initramfs: PathBuf,
}

impl DeviceGuest {
    /// Gets the kernel (once; it is kept in `cache`) and makes the initramfs in `scratch`. `in_guest` is the program that uses
    /// devices there.
    ///
    /// # Errors
    /// Something is missing, in words that say what.
    pub fn prepare(cache: &Path, scratch: &Path, in_guest: &Path) -> Result<Self, String> {
        let root = cache.join("root");
        get_kernel(cache, &root, META_PACKAGE)?;
        let kernel = only(&root.join("boot"), "vmlinuz-")?;
        let modules = only(&root.join("lib/modules"), "")?;
        let initramfs = scratch.join("initramfs");
        build(&initramfs, &modules, in_guest).map_err(|e| format!("{}: {e}", initramfs.display()))?;
        Ok(Self { kernel, initramfs })
    }

    /// Boots and has the program do what `words` say; `disk` is the guest's only one (`/dev/vda`), a raw file. What the guest
    /// said.
    ///
    /// # Errors
    /// The same, unless its work went well.
    pub fn run(&self, words: &[&str], disk: Option<&Path>) -> Result<String, String> {
        let mut command = self.command(words, disk)?;
        command.stdin(Stdio::null());
        let out = finish(command);
        if out.code == Some(0) && out.stdout.contains(PASSED) { Ok(out.stdout) } else { Err(out.to_string()) }
    }

    /// QEMU, which boots it.
    ///
    /// # Errors
    /// It is missing.
    pub fn command(&self, words: &[&str], disk: Option<&Path>) -> Result<Command, String> {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "1800"]).arg(program("qemu-system-x86_64")?);
        command.args([
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-smp",
            "2",
            "-m",
            "1G",
            "-machine",
            "q35",
        ]);
        command.args(["-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"]);
        command.arg("-kernel").arg(&self.kernel).arg("-initrd").arg(&self.initramfs);
        let words = words.join(",");
        command.arg("-append").arg(format!("console=ttyS0 panic=-1 quiet guest={words}"));
        if let Some(disk) = disk {
            let drive = format!("file={},format=raw,if=virtio,cache=none", disk.display());
            command.arg("-drive").arg(drive);
        }
        Ok(command)
    }
}

fn build(path: &Path, modules: &Path, in_guest: &Path) -> io::Result<()> {
    let mut archive = Archive::create(path)?;
    for dir in ["bin", "sbin", "dev", "proc", "sys", "tmp", "mnt", "modules", "etc"] {
        archive.directory(dir)?;
    }
    archive.entry("init", 0o100_755, INIT.as_bytes())?;
    archive.entry("etc/mke2fs.conf", 0o100_644, &fs::read("/etc/mke2fs.conf").unwrap_or_default())?;
    // e2fsck looks where file systems are mounted.
    archive.entry("etc/fstab", 0o100_644, &[])?;
    let busybox = find("busybox").ok_or_else(|| io::Error::other("busybox is missing (busybox-static)"))?;
    archive.file("bin/busybox", &busybox)?;
    let mut made = Vec::new();
    let mut there = Vec::new();
    let mut add = |archive: &mut Archive<_>, name: &str, file: &Path| -> io::Result<()> {
        archive.entry(name, 0o100_755, &without_symbols(path, file)?)?;
        for library in libraries(file)? {
            if !there.contains(&library) {
                archive.parents(&library, &mut made)?;
                archive.file(library.trim_start_matches('/'), Path::new(&library))?;
                there.push(library);
            }
        }
        Ok(())
    };
    add(&mut archive, "bin/zebu", zebu_program())?;
    add(&mut archive, "bin/in_guest", in_guest)?;
    for name in PROGRAMS {
        let file = find(name)
            .ok_or_else(|| io::Error::other(format!("{name} is missing (e2fsprogs, util-linux)")))?;
        add(&mut archive, &format!("sbin/{name}"), &fs::canonicalize(file)?)?;
    }
    let mut order = Vec::new();
    for name in MODULES {
        add_module(&mut archive, modules, name, &mut order)?;
    }
    archive.entry("modules/order", 0o100_644, order.join("\n").as_bytes())?;
    for name in LATER {
        // Those that they need would be missing when they are loaded.
        let before = order.len();
        add_module(&mut archive, modules, name, &mut order)?;
        if order.len() > before + 1 {
            return Err(io::Error::other(format!("the module {name} needs others")));
        }
    }
    archive.end()
}

/// A program without what debuggers need, which is most of it.
fn without_symbols(scratch: &Path, file: &Path) -> io::Result<Vec<u8>> {
    let Some(strip) = find("strip") else { return fs::read(file) };
    let stripped = scratch.with_extension("stripped");
    let mut command = Command::new(strip);
    command.arg("-o").arg(&stripped).arg(file);
    if finish(command).code != Some(0) {
        return fs::read(file);
    }
    let bytes = fs::read(&stripped);
    fs::remove_file(&stripped)?;
    bytes
}

/// Adds a module, after those that it needs. What a kernel has built in is no module.
fn add_module<W: Write>(
    archive: &mut Archive<W>,
    modules: &Path,
    name: &str,
    order: &mut Vec<String>,
) -> io::Result<()> {
    if order.iter().any(|other| other == name) {
        return Ok(());
    }
    let Some(file) = module_file(modules, name)? else { return Ok(()) };
    let bytes = if file.extension().is_some_and(|extension| extension == "xz") {
        let mut xz = Command::new(find("xz").ok_or_else(|| io::Error::other("xz is missing (xz-utils)"))?);
        xz.arg("-dc").arg(&file).output()?.stdout
    } else {
        fs::read(file)?
    };
    for needed in needs(&bytes) {
        add_module(archive, modules, &needed, order)?;
    }
    archive.entry(&format!("modules/{name}.ko"), 0o100_644, &bytes)?;
    order.push(name.to_owned());
    Ok(())
}

/// The file of a module, whose name has `-` where it likes.
fn module_file(modules: &Path, name: &str) -> io::Result<Option<PathBuf>> {
    for name in [name.to_owned(), name.replace('_', "-"), name.replace('-', "_")] {
        for ending in ["ko", "ko.xz"] {
            if let Some(file) = find_file(modules, &format!("{name}.{ending}"))? {
                return Ok(Some(file));
            }
        }
    }
    Ok(None)
}

/// Modules that a module needs, as it says itself.
fn needs(module: &[u8]) -> Vec<String> {
    const FIELD: &[u8] = b"\0depends=";
    let Some(at) = module.windows(FIELD.len()).position(|bytes| bytes == FIELD) else { return Vec::new() };
    let list = module[at + FIELD.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let list = String::from_utf8_lossy(list);
    list.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}
