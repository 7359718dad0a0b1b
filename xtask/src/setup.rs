//! Installing what tests and measurements need, or saying what is missing and how to get it.

use crate::built_tools;
use crate::tenth::Tenth;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::{find, is_root, qemu_version, run};

/// The purpose of the set-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// The demo: only what makes a file system image.
    Demo,
    /// The tests.
    Tests,
    /// Tests, measurements and the static binary.
    Everything,
    /// A Ceph cluster of one node, and QEMU's driver for it.
    Ceph,
    /// The packages of a release.
    Release,
    /// Clean systems that packages are installed in.
    Trial,
}

impl Need {
    /// Whether all tests are to run.
    fn is_of_tests(self) -> bool {
        matches!(self, Self::Tests | Self::Everything)
    }
}

/// A program, and the Debian package that has it.
struct Tool {
    program: &'static str,
    package: &'static str,
    needs: &'static [Need],
}

const TOOLS: &[Tool] = &[
    Tool { program: "mkfs.ext4", package: "e2fsprogs", needs: &[Need::Demo, Need::Tests, Need::Everything] },
    Tool { program: "qemu-img", package: "qemu-utils", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "qemu-io", package: "qemu-utils", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "mkfs.xfs", package: "xfsprogs", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "mkfs.btrfs", package: "btrfs-progs", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "strace", package: "strace", needs: &[Need::Tests, Need::Everything] },
    Tool {
        program: "musl-gcc",
        package: "musl-tools",
        needs: &[Need::Tests, Need::Everything, Need::Release],
    },
    Tool { program: "fio", package: "fio", needs: &[Need::Tests, Need::Everything] },
    Tool {
        program: "qemu-system-x86_64",
        package: "qemu-system-x86",
        needs: &[Need::Tests, Need::Everything],
    },
    Tool { program: "cryptsetup", package: "cryptsetup-bin", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "busybox", package: "busybox-static", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "fusermount3", package: "fuse3", needs: &[Need::Tests, Need::Everything] },
    // For the library of the fuzz targets, and programs of C.
    Tool { program: "c++", package: "g++", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "valgrind", package: "valgrind", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "pkg-config", package: "pkg-config", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "kill", package: "procps", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "openssl", package: "openssl", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "nbdinfo", package: "libnbd-bin", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "nbdkit", package: "nbdkit", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "nginx", package: "nginx-light", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "docker-registry", package: "docker-registry", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "skopeo", package: "skopeo", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "tinyproxy", package: "tinyproxy-bin", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "curl", package: "curl", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "ip", package: "iproute2", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "nbdsh", package: "python3-libnbd", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "7zz", package: "7zip", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "xz", package: "xz-utils", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "zstd", package: "zstd", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "lz4", package: "lz4", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "bzip2", package: "bzip2", needs: &[Need::Tests, Need::Everything] },
    Tool { program: "qemu-img", package: "qemu-utils", needs: &[Need::Ceph] },
    Tool { program: "ceph-mon", package: "ceph-mon", needs: &[Need::Ceph] },
    Tool { program: "ceph-osd", package: "ceph-osd", needs: &[Need::Ceph] },
    Tool { program: "rbd", package: "ceph-common", needs: &[Need::Ceph] },
    Tool { program: "llvm-objcopy", package: "llvm", needs: &[Need::Release] },
    Tool { program: "dpkg-scanpackages", package: "dpkg-dev", needs: &[Need::Release] },
    Tool { program: "rpmbuild", package: "rpm", needs: &[Need::Release] },
    Tool { program: "createrepo_c", package: "createrepo-c", needs: &[Need::Release] },
    Tool { program: "dnf", package: "dnf", needs: &[Need::Trial] },
    Tool { program: "skopeo", package: "skopeo", needs: &[Need::Trial] },
    Tool { program: "mmdebstrap", package: "mmdebstrap", needs: &[Need::Trial] },
    Tool { program: "qemu-aarch64-static", package: "qemu-user-static", needs: &[Need::Trial] },
];

/// QEMU's driver for RBD, below a directory of `/usr/lib`, and its package.
const QEMU_RBD: (&str, &str) = ("qemu/block-rbd.so", "qemu-block-extra");

/// The package of Go, which fetches a newer one of itself where a module wants that: from 1.21 on.
const GO: &str = "golang-go";
/// Modules of Debian's Python, and their packages: second readers of images.
const MODULES: [(&str, &str); 2] = [("pyvhdi", "python3-libvhdi"), ("pyvmdk", "python3-libvmdk")];
/// Debian's Python: modules of packages are none of another's.
const PYTHON: &str = "/usr/bin/python3";

/// Packages of QEMU, which must be of one version.
const QEMU: [&str; 3] = ["qemu-utils", "qemu-system-x86", QEMU_RBD.1];

const BACKPORTS: &str = "/etc/apt/sources.list.d/zebu-backports.sources";

/// Installs what `need` lacks. Without the right to, or without apt: an error that names the packages.
pub(crate) fn ensure(need: Need) -> Outcome {
    install(need, &missing(need))?;
    if !need.is_of_tests() {
        return Ok(());
    }
    name_localhost()?;
    built_tools::servers(go)?;
    built_tools::nextest().map(drop)
}

/// Installs what only a tenth of the tests needs.
pub(crate) fn ensure_of_tenth(tenth: Tenth) {
    built_tools::registry_clients(tenth, go);
}

/// Sees to it that the name localhost leads to this machine: certificates and URLs of tests hold it. The smallest
/// installations of Debian have no file of names.
fn name_localhost() -> Outcome {
    const HOSTS: &str = "/etc/hosts";
    const LINE: &str = "127.0.0.1 localhost";
    let found = ("localhost", 0).to_socket_addrs().map(|mut found| found.any(|at| at.ip().is_loopback()));
    if found.unwrap_or_default() {
        return Ok(());
    }
    if !is_root() {
        return Err(format!("the name localhost leads nowhere. Add a line to {HOSTS}: {LINE}"));
    }
    println!("adding to {HOSTS}: {LINE}");
    let hosts = OpenOptions::new().create(true).append(true).open(HOSTS);
    hosts.and_then(|mut hosts| writeln!(hosts, "{LINE}")).map_err(|e| format!("{HOSTS}: {e}"))
}

/// Go, installed if it is not here.
pub(crate) fn go() -> Outcome<PathBuf> {
    if find("go").is_none() {
        if !is_root() {
            return Err(format!("there is no Go (Debian: {GO})"));
        }
        println!("installing {GO}");
        if let Some(suite) = Release::read().backports() {
            install_from(&[GO], &suite)?;
        }
        if find("go").is_none() {
            install_anew(&[GO], None)?;
        }
    }
    find("go").ok_or_else(|| format!("still missing after the installation of {GO}: go"))
}

/// The command `setup`: as [`ensure`], and says what there is.
pub(crate) fn command() -> Outcome {
    ensure(Need::Everything)?;
    println!("all there: {}", qemu_version().unwrap_or_else(|| "no QEMU".into()));
    Ok(())
}

fn missing(need: Need) -> Vec<&'static str> {
    let mut packages: Vec<&str> = TOOLS
        .iter()
        .filter(|tool| tool.needs.contains(&need) && find(tool.program).is_none())
        .map(|tool| tool.package)
        .collect();
    packages.dedup();
    if need == Need::Ceph && !has_qemu_rbd() {
        packages.push(QEMU_RBD.1);
    }
    if need.is_of_tests() {
        packages
            .extend(MODULES.iter().filter(|(module, _)| !has_module(module)).map(|(_, package)| *package));
    }
    packages
}

fn has_qemu_rbd() -> bool {
    let libraries = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    libraries.map(|entry| entry.path().join(QEMU_RBD.0)).any(|file| file.exists())
}

fn has_module(module: &str) -> bool {
    let import = Command::new(PYTHON).args(["-c", &format!("import {module}")]).output();
    import.is_ok_and(|out| out.status.success())
}

fn install(need: Need, packages: &[&'static str]) -> Outcome {
    if packages.is_empty() {
        return Ok(());
    }
    let by_hand = format!("apt-get install {}", packages.join(" "));
    if find("apt-get").is_none() {
        return Err(format!("missing packages (Debian's names): {}. Install them", packages.join(" ")));
    }
    if !is_root() {
        return Err(format!(
            "missing packages: {}. Install them with: sudo {by_hand}\n       (for QEMU 10 on Debian 12: from \
             bookworm-backports, sudo apt-get install -t bookworm-backports qemu-utils qemu-system-x86 qemu-block-extra; `cargo xtask setup` as root \
             does it all)",
            packages.join(" ")
        ));
    }
    println!("installing {}", packages.join(" "));
    let release = Release::read();
    let of_qemu: Vec<&'static str> = match need {
        Need::Ceph => QEMU.into_iter().filter(|package| packages.contains(package)).collect(),
        _ if packages.iter().any(|package| QEMU.contains(package)) => vec![QEMU[0], QEMU[1]],
        _ => Vec::new(),
    };
    if !of_qemu.is_empty()
        && let Some(suite) = release.backports()
    {
        install_from(&of_qemu, &suite)?;
    }
    let rest = missing(need);
    if !rest.is_empty() {
        install_anew(&rest, None).map_err(|e| format!("{e}\n       By hand: {by_hand}"))?;
    }
    match missing(need).as_slice() {
        [] => Ok(()),
        still => Err(format!("still missing after the installation: {}", still.join(" "))),
    }
}

/// Debian 12 has QEMU 7.2 and Go 1.19; its backports have newer ones. Falls back to the release's own where they can't be had.
fn install_from(packages: &[&'static str], suite: &str) -> Outcome {
    let configured = sources().iter().any(|file| fs::read_to_string(file).is_ok_and(|t| t.contains(suite)));
    if !configured {
        let Some(stanza) = sources_of(suite) else {
            println!("note: no entry to derive {suite} from; the packages come from the release itself");
            return Ok(());
        };
        println!("writing {BACKPORTS}");
        fs::write(BACKPORTS, stanza).map_err(|e| format!("{BACKPORTS}: {e}"))?;
    }
    if let Err(error) = install_anew(packages, Some(suite)) {
        println!("note: {error}; the packages come from the release itself");
        if !configured {
            // A suite that can't be read would make every later update fail.
            fs::remove_file(BACKPORTS).map_err(|e| format!("{BACKPORTS}: {e}"))?;
        }
    }
    Ok(())
}

/// Installs packages by a new index.
fn install_anew(packages: &[&str], suite: Option<&str>) -> Outcome {
    update();
    apt_get(packages, suite).or_else(|error| {
        // An archive that is being updated has other packages than the index said a moment ago.
        println!("note: {error}; once more with a new index");
        update();
        apt_get(packages, suite)
    })
}

/// A command of apt. It asks servers again, and waits for others that install something.
fn apt() -> Command {
    let mut command = Command::new("apt-get");
    command.args(["-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300"]);
    command
}

/// An index that can't be fetched (another repository's, perhaps) matters only if the packages can't be had then.
fn update() {
    if let Err(error) = run(apt().args(["update", "-qq"])) {
        println!("note: {error}");
    }
}

fn apt_get(packages: &[&str], suite: Option<&str>) -> Outcome {
    let mut command = apt();
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command.args(["install", "-y", "-qq", "--no-install-recommends"]);
    if let Some(suite) = suite {
        command.args(["-t", suite]);
    }
    run(command.args(packages))
}

fn sources() -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(entries.flatten().map(|e| e.path()));
    }
    files.retain(|f| f.extension().is_some_and(|e| e == "sources" || e == "list"));
    files.sort();
    files
}

/// A deb822 stanza for the suite `wanted` (`bookworm-backports`), derived from the entry of this machine's own release.
pub(crate) fn sources_of(wanted: &str) -> Option<String> {
    let Release { codename } = Release::read();
    sources().iter().find_map(|file| entry(file, &codename, wanted))
}

fn entry(file: &Path, release: &str, wanted: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    if file.extension()? == "sources" {
        from_stanzas(&text, release, wanted)
    } else {
        from_lines(&text, release, wanted)
    }
}

fn from_stanzas(text: &str, release: &str, wanted: &str) -> Option<String> {
    let holds_release = |stanza: &&str| {
        let suites = stanza.lines().find_map(|l| l.strip_prefix("Suites:"));
        suites.is_some_and(|s| s.split_whitespace().any(|suite| suite == release))
    };
    let stanza = text.split("\n\n").find(holds_release)?;
    let lines = stanza
        .lines()
        .filter(|l| !l.starts_with('#'))
        .map(|l| if l.starts_with("Suites:") { format!("Suites: {wanted}") } else { l.to_owned() });
    Some(lines.collect::<Vec<_>>().join("\n") + "\n")
}

fn from_lines(text: &str, release: &str, wanted: &str) -> Option<String> {
    text.lines().find_map(|line| {
        // deb [options] URI suite component...
        let rest = line.strip_prefix("deb ")?.trim_start();
        let (options, rest) = match rest.strip_prefix('[') {
            Some(inner) => inner.split_once(']').map(|(o, r)| (o.trim(), r))?,
            None => ("", rest),
        };
        let mut words = rest.split_whitespace();
        let (uri, suite) = (words.next()?, words.next()?);
        if suite != release {
            return None;
        }
        let components = words.collect::<Vec<_>>().join(" ");
        let mut stanza = format!("Types: deb\nURIs: {uri}\nSuites: {wanted}\nComponents: {components}\n");
        for option in options.split_whitespace() {
            if let Some(key) = option.strip_prefix("signed-by=") {
                stanza.push_str(&format!("Signed-By: {key}\n"));
            }
        }
        Some(stanza)
    })
}

/// The release of this machine.
struct Release {
    codename: String,
}

impl Release {
    fn read() -> Self {
        let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let codename = text.lines().find_map(|l| l.strip_prefix("VERSION_CODENAME=")).unwrap_or_default();
        Self { codename: codename.trim_matches('"').to_owned() }
    }

    /// Where a newer QEMU is; later releases have one themselves.
    fn backports(&self) -> Option<String> {
        (self.codename == "bookworm").then(|| "bookworm-backports".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rewrites_the_stanza_of_the_release_and_no_other() {
        let text = "Types: deb\n# a comment\nURIs: http://a.example/sec\nSuites: bookworm-security\nComponents: main\n\n\
                    Types: deb\n# another\nURIs: http://a.example/debian\nSuites: bookworm bookworm-updates\nComponents: main\nSigned-By: /k\n";
        assert_eq!(
            from_stanzas(text, "bookworm", "bookworm-backports").as_deref(),
            Some(
                "Types: deb\nURIs: http://a.example/debian\nSuites: bookworm-backports\nComponents: main\nSigned-By: /k\n"
            )
        );
        assert_eq!(from_stanzas("Types: deb\nSuites: trixie\n", "bookworm", "bookworm-backports"), None);
    }

    #[test]
    fn rewrites_a_line() {
        let text = "# deb http://x bookworm main\ndeb [arch=amd64 signed-by=/k] http://a.example/debian bookworm main contrib\n";
        assert_eq!(
            from_lines(text, "bookworm", "bookworm-backports").as_deref(),
            Some(
                "Types: deb\nURIs: http://a.example/debian\nSuites: bookworm-backports\nComponents: main contrib\nSigned-By: /k\n"
            )
        );
        assert_eq!(from_lines("deb http://a.example/debian bookworm-updates main\n", "bookworm", "x"), None);
    }
}
