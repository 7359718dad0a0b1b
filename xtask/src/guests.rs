//! The command `guests`: libguestfs and virt-v2v at work on disks of guests, through zebu under QEMU's names.
//!
//! The guest that reads and writes the images is QEMU's emulator, so that its own block layer judges them.

use crate::iotests::links;
use clap::Args;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use zebu_bench::Outcome;
use zebu_bench::process::{find, run};
use zebu_bench::workspace::{cargo, target_dir};

#[derive(Args)]
#[command(
    after_help = "Needs Debian's libguestfs-tools, virt-v2v, debootstrap and a kernel (linux-image-cloud-amd64), as root.
Without KVM, QEMU computes the guests: twenty minutes."
)]
pub(crate) struct GuestsArgs {
    /// Directory of the programs qemu-img, qemu-io and qemu-nbd [default: links to a zebu that is built first]
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Raw disk of an installed Linux for virt-v2v [default: Debian, made once by debootstrap]
    #[arg(long, value_name = "DISK")]
    guest: Option<PathBuf>,
    /// Have QEMU compute the guests even if there is a /dev/kvm, which may be of no use in a virtual machine
    #[arg(long)]
    force_tcg: bool,
    /// Only the steps whose names contain this
    #[arg(long)]
    step: Option<String>,
}

/// A step: shell commands, what the last one prints, and the programs of QEMU's names that they call.
struct Step {
    name: &'static str,
    script: &'static str,
    printed: &'static str,
    called: &'static [&'static str],
}

/// Each goes on with the images of those before it.
const STEPS: &[Step] = &[
    Step {
        name: "guestfish makes a disk and an overlay",
        script: "guestfish <<'END'
disk-create base.qcow2 qcow2 256M preallocation:metadata
add base.qcow2 format:qcow2
run
part-disk /dev/sda mbr
mkfs ext4 /dev/sda1
mount /dev/sda1 /
write /hello base
umount-all
shutdown
disk-create over.qcow2 qcow2 -1 backingfile:base.qcow2 backingformat:qcow2
disk-format over.qcow2
disk-virtual-size over.qcow2
disk-has-backing-file over.qcow2
END",
        printed: "qcow2\n268435456\ntrue\n",
        called: &["qemu-img create", "qemu-img info"],
    },
    Step {
        name: "guestfish writes to the overlay",
        script: "guestfish -a over.qcow2 run : mount /dev/sda1 / : write /hello overlay
guestfish --ro -a base.qcow2 -a over.qcow2 run : mount /dev/sda1 / : cat /hello : umount / : mount /dev/sdb1 / : cat /hello",
        printed: "base\noverlay\n",
        called: &["qemu-img create"],
    },
    Step {
        name: "virt-make-fs",
        script: "mkdir made && echo hello >made/file
virt-make-fs --format=qcow2 --type=ext4 --partition=mbr --size=+16M made made.qcow2
guestfish --ro -a made.qcow2 -m /dev/sda1 cat /file",
        printed: "hello\n\n",
        called: &["qemu-img create"],
    },
    Step {
        name: "virt-sparsify",
        script: "virt-sparsify --quiet over.qcow2 sparse.qcow2
virt-sparsify --quiet --compress --convert qcow2 over.qcow2 packed.qcow2
guestfish --ro -a sparse.qcow2 -a packed.qcow2 run : mount /dev/sda1 / : cat /hello : umount / : mount /dev/sdb1 / : cat /hello",
        printed: "overlay\noverlay\n",
        called: &["qemu-img info", "qemu-img create", "qemu-img convert"],
    },
    Step {
        name: "virt-sparsify in place",
        script: "virt-sparsify --quiet --in-place sparse.qcow2
guestfish --ro -a sparse.qcow2 -m /dev/sda1 cat /hello",
        printed: "overlay\n",
        called: &["qemu-img info"],
    },
    Step {
        name: "virt-resize",
        script: "qemu-img create -q -f qcow2 large.qcow2 512M
virt-resize --quiet --expand /dev/sda1 over.qcow2 large.qcow2
guestfish --ro -a large.qcow2 -m /dev/sda1 cat /hello : blockdev-getsize64 /dev/sda",
        printed: "overlay\n536870912\n",
        called: &["qemu-img create", "qemu-img info"],
    },
    Step {
        name: "virt-v2v converts an installed Debian",
        script: "virt-v2v --quiet -i disk \"$GUEST\" -o local -os . -on v2v -of qcow2
guestfish --ro -a v2v-sda -i cat /etc/hostname",
        printed: "guest\n\n",
        called: &["qemu-img create", "qemu-nbd"],
    },
];

/// Packages of the guest that virt-v2v converts.
const PACKAGES: &str = "linux-image-cloud-amd64,grub2-common,initramfs-tools,e2fsprogs,systemd-sysv";

pub(crate) fn command(args: &GuestsArgs) -> Outcome {
    for (program, package) in
        [("guestfish", "libguestfs-tools"), ("virt-v2v", "virt-v2v"), ("qemu-img", "qemu-utils")]
    {
        find(program).ok_or_else(|| format!("{program} is missing: apt-get install {package}"))?;
    }
    let home = target_dir()?.join("guests");
    fs::create_dir_all(&home).map_err(|e| format!("{}: {e}", home.display()))?;
    let programs = if let Some(directory) = &args.programs {
        fs::canonicalize(directory).map_err(|e| format!("{}: {e}", directory.display()))?
    } else {
        run(cargo().args(["build", "--locked", "--release", "--package", "zebu-cli"]))?;
        links(&home, &target_dir()?.join("release/zebu"))?
    };
    let is_wanted = |step: &&Step| args.step.as_ref().is_none_or(|part| step.name.contains(part.as_str()));
    let steps: Vec<&Step> = STEPS.iter().filter(is_wanted).collect();
    let guest = match &args.guest {
        Some(disk) => fs::canonicalize(disk).map_err(|e| format!("{}: {e}", disk.display()))?,
        None if steps.iter().any(|step| step.script.contains("$GUEST")) => debian(&home)?,
        None => PathBuf::new(),
    };
    let has_kvm = Path::new("/dev/kvm").exists() && !args.force_tcg;
    let settings = if has_kvm { "" } else { "force_tcg" };
    let scratch = tempfile::TempDir::with_prefix_in("run-", &home).map_err(|e| e.to_string())?;
    let place = Place {
        work: scratch.path().join("work"),
        watched: scratch.path().join("bin"),
        guest,
        home,
        settings,
    };
    place.watch(&programs)?;
    let mut failed = 0;
    for step in steps {
        let begun = Instant::now();
        let outcome = place.run(step);
        println!(
            "{:40} {:5.0} s  {}",
            step.name,
            begun.elapsed().as_secs_f64(),
            match &outcome {
                Ok(()) => "passed",
                Err(why) => why,
            }
        );
        failed += usize::from(outcome.is_err());
    }
    if failed == 0 { Ok(()) } else { Err(format!("{failed} steps failed")) }
}

/// The directories of a run.
struct Place {
    /// Kept from one run to the next: libguestfs's appliance.
    home: PathBuf,
    work: PathBuf,
    /// Scripts of QEMU's names that note each call.
    watched: PathBuf,
    guest: PathBuf,
    /// Settings of libguestfs's backend.
    settings: &'static str,
}

impl Place {
    /// Makes the scripts, which start `programs`.
    fn watch(&self, programs: &Path) -> Outcome {
        let said = |e: std::io::Error| format!("{}: {e}", self.watched.display());
        fs::create_dir_all(&self.watched).map_err(said)?;
        fs::create_dir_all(&self.work).map_err(said)?;
        for name in ["qemu-img", "qemu-io", "qemu-nbd"] {
            let script = format!(
                "#!/bin/sh\necho \"{name} $*\" >>'{}'\nexec '{}' \"$@\"\n",
                self.calls().display(),
                programs.join(name).display()
            );
            let path = self.watched.join(name);
            fs::write(&path, script).map_err(said)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).map_err(said)?;
        }
        Ok(())
    }

    fn calls(&self) -> PathBuf {
        self.work.join("calls")
    }

    fn run(&self, step: &Step) -> Outcome {
        fs::write(self.calls(), "").map_err(|e| e.to_string())?;
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", "1200", "sh", "-e", "-c", step.script]).current_dir(&self.work);
        command.env("PATH", format!("{}:{path}", self.watched.display())).env("GUEST", &self.guest);
        command.env("LIBGUESTFS_BACKEND", "direct").env("LIBGUESTFS_CACHEDIR", &self.home);
        command.env("LIBGUESTFS_BACKEND_SETTINGS", self.settings);
        let output = command.env("TMPDIR", &self.work).stdin(Stdio::null()).output();
        let output = output.map_err(|e| format!("cannot run timeout: {e}"))?;
        let (stdout, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        if !output.status.success() {
            return Err(format!("{}: {stdout}{stderr}", output.status));
        }
        if !stdout.ends_with(step.printed) {
            return Err(format!("it printed '{stdout}', not '{}'", step.printed));
        }
        let calls = fs::read_to_string(self.calls()).map_err(|e| e.to_string())?;
        match step.called.iter().find(|call| !calls.lines().any(|line| line.starts_with(**call))) {
            Some(missing) => Err(format!("nothing called {missing}, but:\n{calls}")),
            None => Ok(()),
        }
    }
}

/// The disk of a Debian with a kernel, made by debootstrap the first time.
fn debian(home: &Path) -> Outcome<PathBuf> {
    let disk = home.join("debian.raw");
    if disk.is_file() {
        return Ok(disk);
    }
    for program in ["debootstrap", "sfdisk", "mke2fs"] {
        find(program)
            .ok_or_else(|| format!("{program} is missing: apt-get install debootstrap fdisk e2fsprogs"))?;
    }
    let tree = tempfile::TempDir::with_prefix_in("debian-", home).map_err(|e| e.to_string())?;
    let root = tree.path().join("root");
    let include = format!("--include={PACKAGES}");
    run(Command::new("debootstrap").args(["--variant=minbase", &include, "stable"]).arg(&root))?;
    let write = |name: &str, text: &str| {
        let path = root.join(name);
        fs::create_dir_all(path.parent().unwrap_or(&root))
            .and_then(|()| fs::write(&path, text))
            .map_err(|e| format!("{}: {e}", path.display()))
    };
    write("etc/fstab", "/dev/sda1 / ext4 defaults 0 1\n")?;
    write("etc/hostname", "guest\n")?;
    let names = fs::read_dir(root.join("boot")).map_err(|e| e.to_string())?.flatten();
    let kernel = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let kernel = kernel.into_iter().find_map(|name| Some(name.strip_prefix("vmlinuz-")?.to_owned()));
    let kernel = kernel.ok_or("debootstrap brought no kernel")?;
    let entry = format!("linux /boot/vmlinuz-{kernel} root=/dev/sda1 ro\n  initrd /boot/initrd.img-{kernel}");
    write("boot/grub/grub.cfg", &format!("menuentry 'Debian' {{\n  {entry}\n}}\n"))?;
    let new = tree.path().join("disk");
    let script = "truncate -s 1G \"$1\" && echo 'start=2048, type=83, bootable' | sfdisk -q \"$1\" &&
        mke2fs -q -t ext4 -d \"$2\" -E offset=1048576 \"$1\" 1022M";
    run(Command::new("sh").args(["-c", script, "sh"]).arg(&new).arg(&root))?;
    fs::rename(&new, &disk).map_err(|e| format!("{}: {e}", disk.display()))?;
    Ok(disk)
}
