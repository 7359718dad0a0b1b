//! Trials: each part of a release is installed, used and removed, in a clean Debian where it is a package.

use super::Release;
use super::binaries::{Machine, Program};
use crate::built_tools;
use crate::setup;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use zebu_bench::Outcome;
use zebu_bench::process::{find, is_root, output, run};

/// The release of Debian that is installed.
const SUITE: &str = "bookworm";
/// Packages that it has beside the least.
const INSTALLED: &str = "systemd,qemu-utils,man-db,bash-completion";
const FUNCTIONS: &str = include_str!("trial/functions.sh");

/// The program that runs those of the other machine.
const EMULATOR: &str = "qemu-aarch64-static";

/// Why nothing can be tried here, or `None`.
pub(crate) fn obstacle() -> Option<String> {
    if !is_root() {
        return Some("packages are tried as root".to_owned());
    }
    setup::sources_of(SUITE).is_none().then(|| format!("no entry of apt to derive {SUITE} from"))
}

pub(super) fn command(release: &Release, programs: &[Program]) -> Outcome {
    sums_and_list(release)?;
    let clean = clean_system()?;
    for Program { machine, .. } in programs {
        println!("trial: packages for {}", machine.name());
        System::unpack(&clean, release, *machine)?.script(include_str!("trial/deb.sh"))?;
        rpm(&clean, release, *machine)?;
        image(release, *machine)?;
        tarball(release, *machine)?;
    }
    println!("trial: names of QEMU's");
    let own = programs.iter().find(|program| is_own(program.machine)).ok_or("no program of this machine")?;
    System::unpack(&clean, release, own.machine)?.script(include_str!("trial/names.sh"))?;
    println!("trial: install.sh");
    install_script(release, own.machine)
}

fn said(path: &Path, error: std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

fn scratch() -> Outcome<TempDir> {
    tempfile::tempdir().map_err(|e| e.to_string())
}

/// An archive of a clean system, made once.
pub(super) fn clean_system() -> Outcome<PathBuf> {
    let cache = built_tools::cache()?;
    let kept = cache.join(format!("{SUITE}-{}.tar", INSTALLED.replace(',', "-")));
    if kept.is_file() {
        return Ok(kept);
    }
    fs::create_dir_all(&cache).map_err(|e| said(&cache, e))?;
    let sources = tempfile::Builder::new().suffix(".sources").tempfile().map_err(|e| e.to_string())?;
    let text = setup::sources_of(SUITE).ok_or("apt has no entry to derive one from")?;
    fs::write(sources.path(), text).map_err(|e| said(sources.path(), e))?;
    let new = kept.with_extension("new.tar");
    let mut command = Command::new("mmdebstrap");
    command.args(["--quiet", "--variant=minbase", &format!("--include={INSTALLED}"), SUITE]);
    run(command.arg(&new).arg(sources.path()))?;
    fs::rename(&new, &kept).map_err(|e| said(&kept, e))?;
    Ok(kept)
}

/// A clean system in a folder.
struct System<'a> {
    folder: TempDir,
    release: &'a Release,
    machine: Machine,
}

impl<'a> System<'a> {
    fn unpack(clean: &Path, release: &'a Release, machine: Machine) -> Outcome<Self> {
        let system = Self { folder: scratch()?, release, machine };
        run(Command::new("tar").arg("-C").arg(system.path()).arg("-xf").arg(clean))?;
        // Its own user has to come to its files.
        run(Command::new("chmod").arg("755").arg(system.path()))?;
        let emulator = find(EMULATOR).ok_or("no emulator")?;
        let to = system.path().join("opt").join(EMULATOR);
        fs::copy(&emulator, &to).map_err(|e| said(&to, e))?;
        Ok(system)
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Runs a program of this machine that installs something in it.
    fn install(&self, command: &Command) -> Outcome {
        const ENTER: &str = "mount -t proc proc \"$1/proc\" && shift && exec \"$@\"";
        let mut inside = Command::new("unshare");
        inside.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh"]).arg(self.path());
        run(inside.arg(command.get_program()).args(command.get_args()))
    }

    /// Runs a script in it, which finds the release at `/mnt`. Mounts and processes end with it.
    fn script(&self, text: &str) -> Outcome {
        const ENTER: &str = "mount -t proc proc \"$1/proc\" && mount --rbind /dev \"$1/dev\" && \
            mount --bind \"$2\" \"$1/mnt\" && exec chroot \"$1\" /bin/sh /root/trial.sh";
        let emulator = if is_own(self.machine) { String::new() } else { format!("/opt/{EMULATOR}") };
        let head = format!(
            "VERSION={}\nARCH={}\nEMULATOR={emulator}\n",
            self.release.version,
            self.machine.debian()
        );
        let script = self.path().join("root/trial.sh");
        fs::write(&script, head + FUNCTIONS + text).map_err(|e| said(&script, e))?;
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c", ENTER, "sh"]);
        command.arg(self.path()).arg(&self.release.out);
        command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        run(&mut command)
    }
}

fn is_own(machine: Machine) -> bool {
    machine.name() == std::env::consts::ARCH
}

/// The packages of RPM, by rpm and by dnf.
fn rpm(clean: &Path, release: &Release, machine: Machine) -> Outcome {
    let system = System::unpack(clean, release, machine)?;
    system.script("remember\ndpkg --purge qemu-utils\nfiles >/tmp/before\n")?;
    let package = |name: &str| release.path(&format!("{name}-{}-1.{}.rpm", release.version, machine.name()));
    let (own, names) = (package("zebu"), package("zebu-qemu-utils"));
    let rpm = |verb: &str| {
        let mut command = Command::new("rpm");
        command.arg(format!("--root={}", system.path().display())).arg(verb);
        command
    };
    let install = |what: &[&Path]| {
        // Nothing of Debian's is known to RPM.
        system.install(rpm("--install").args(["--nodeps", "--ignorearch"]).args(what))
    };
    install(&[&own, &names])?;
    system.script(include_str!("trial/rpm.sh"))?;
    system.install(rpm("--erase").args(["zebu", "zebu-qemu-utils"]))?;
    system.script("images_stay\n")?;
    install(&[&own])?;
    system.install(rpm("--erase").arg("zebu"))?;
    system.script("nothing_is_left\n")?;
    if !is_own(machine) {
        return Ok(());
    }
    let shell = shell_of_rpm()?;
    install(&[&shell.path().join("RPMS/noarch/shell-1-1.noarch.rpm")])?;
    let dnf = |what: &[&str]| {
        let mut command = Command::new("dnf");
        command.args(["--quiet", "--assumeyes", "--releasever=1", "--nogpgcheck", "--repo=zebu"]);
        command.arg(format!("--installroot={}", system.path().display()));
        command.arg(format!("--repofrompath=zebu,file://{}", release.path("dnf").display()));
        system.install(command.args(what))
    };
    dnf(&["install", "zebu", "zebu-qemu-utils"])?;
    system.script(include_str!("trial/rpm.sh"))?;
    dnf(&["remove", "zebu"])?;
    system.script("test ! -e /usr/bin/zebu && test ! -L /usr/bin/qemu-img\nimages_stay\n")
}

/// A package that says that there is a shell, which scripts of packages need.
fn shell_of_rpm() -> Outcome<TempDir> {
    let folder = scratch()?;
    let spec = folder.path().join("shell.spec");
    let text = "Name: shell\nVersion: 1\nRelease: 1\nSummary: a shell\nLicense: MIT\nBuildArch: noarch\n\
                Provides: /bin/sh\n%description\nIt is there.\n%files\n";
    fs::write(&spec, text).map_err(|e| said(&spec, e))?;
    let top = format!("_topdir {}", folder.path().display());
    run(Command::new("rpmbuild").args(["-bb", "--quiet", "--define", &top]).arg(&spec))?;
    Ok(folder)
}

/// Runs a program of this machine, or by the emulator, and wants the version of it.
fn states_version(release: &Release, machine: Machine, program: &Path) -> Outcome {
    let mut command = if is_own(machine) { Command::new(program) } else { Command::new(EMULATOR) };
    if !is_own(machine) {
        command.arg(program);
    }
    let text = output(command.arg("--version"))?;
    if text.contains(&release.version) {
        Ok(())
    } else {
        Err(format!("{} says it is '{}'", program.display(), text.trim()))
    }
}

/// The image for containers, as skopeo unpacks it.
fn image(release: &Release, machine: Machine) -> Outcome {
    let folder = scratch()?;
    let name = format!("zebu-{}-oci.tar", release.version);
    let from = format!("oci-archive:{}:{}", release.path(&name).display(), release.version);
    let to = folder.path().join("image");
    let mut command = Command::new("skopeo");
    command.args(["--insecure-policy", "--override-os=linux"]);
    command.arg(format!("--override-arch={}", machine.debian())).args(["copy", "--quiet", &from]);
    run(command.arg(format!("dir:{}", to.display())))?;
    let manifest = read_json(&to.join("manifest.json"))?;
    let digest = manifest["layers"][0]["digest"].as_str().unwrap_or_default();
    let layer = to.join(digest.trim_start_matches("sha256:"));
    run(Command::new("tar").arg("-C").arg(folder.path()).arg("-xzf").arg(layer))?;
    states_version(release, machine, &folder.path().join("zebu"))
}

fn tarball(release: &Release, machine: Machine) -> Outcome {
    let folder = scratch()?;
    let name = format!("zebu-{}-{}", release.version, machine.target());
    let archive = release.path(&format!("{name}.tar.gz"));
    run(Command::new("tar").arg("-C").arg(folder.path()).arg("-xzf").arg(archive))?;
    states_version(release, machine, &folder.path().join(name).join("bin/zebu"))
}

fn read_json(path: &Path) -> Outcome<serde_json::Value> {
    let text = fs::read(path).map_err(|e| said(path, e))?;
    serde_json::from_slice(&text).map_err(|e| format!("{}: {e}", path.display()))
}

/// The sums of all files, and the list of what the command is made of.
fn sums_and_list(release: &Release) -> Outcome {
    run(Command::new("sha256sum")
        .args(["--check", "--strict", "--quiet", "SHA256SUMS"])
        .current_dir(&release.out))?;
    let list = read_json(&release.path(&format!("zebu-{}.cdx.json", release.version)))?;
    let components = list["components"].as_array().map(Vec::as_slice).unwrap_or_default();
    let has = |name: &str| components.iter().any(|component| component["name"] == name);
    if list["bomFormat"] == "CycloneDX" && has("zebu-qcow2") && has("zstd-sys") {
        Ok(())
    } else {
        Err(format!("the list has {} parts", components.len()))
    }
}

/// The install script: from a folder, with another archive than the sums say, and from a server that breaks off.
fn install_script(release: &Release, own: Machine) -> Outcome {
    let folder = scratch()?;
    let prefix = folder.path().join("prefix");
    let install = |from: &str| {
        let mut command = Command::new("sh");
        command.arg(release.path("install.sh")).args(["--from", from, "--prefix"]).arg(&prefix);
        output(&mut command)
    };
    let refused = |from: &str, why: &str| match install(from) {
        Ok(_) => Err(format!("install.sh takes what {from} has")),
        Err(_) if prefix.exists() => Err(format!("install.sh leaves something of what {from} has")),
        Err(error) if error.contains(why) => Ok(()),
        Err(error) => Err(format!("install.sh does not say '{why}': {error}")),
    };
    let broken = folder.path().join("broken");
    fs::create_dir(&broken).map_err(|e| said(&broken, e))?;
    let name = format!("zebu-{}-{}.tar.gz", release.version, own.target());
    let archive = broken.join(&name);
    let from = broken.display().to_string();
    refused(&from, "there is no")?;
    let mut bytes = fs::read(release.path(&name)).map_err(|e| said(&archive, e))?;
    fs::copy(release.path("SHA256SUMS"), broken.join("SHA256SUMS")).map_err(|e| said(&broken, e))?;
    fs::write(&archive, &bytes[..bytes.len() / 2]).map_err(|e| said(&archive, e))?;
    refused(&from, "the download is broken, or was changed")?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&archive, &bytes).map_err(|e| said(&archive, e))?;
    refused(&from, "the download is broken, or was changed")?;
    fs::write(broken.join("SHA256SUMS"), "").map_err(|e| said(&broken, e))?;
    refused(&from, "does not name")?;
    refused(&server_that_breaks_off()?, "can't get")?;
    install(&release.out.display().to_string())?;
    states_version(release, own, &prefix.join("bin/zebu"))?;
    let unit = prefix.join("lib/systemd/system/zebu-nbd@.service");
    let text = fs::read_to_string(&unit).map_err(|e| said(&unit, e))?;
    if text.contains(&format!("ExecStart={}/bin/zebu serve", prefix.display())) {
        Ok(())
    } else {
        Err(format!("{} starts another program", unit.display()))
    }
}

/// The address of a server that promises more than it sends.
fn server_that_breaks_off() -> Outcome<String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|e| e.to_string())?;
    let address = listener.local_addr().map_err(|e| e.to_string())?;
    std::thread::spawn(move || {
        for mut client in listener.incoming().flatten() {
            // A client that is gone has what it wanted.
            let _ = client.read(&mut [0; 4096]);
            let _ = client.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nabc");
        }
    });
    Ok(format!("http://{address}"))
}
