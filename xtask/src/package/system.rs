//! Packages of systems: Debian's and RPM's.

use super::Release;
use super::binaries::Program;
use super::tree::Tree;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::run;

const SUMMARY: &str = "disk images of virtual machines: convert, check, back up, serve";
const DROP_IN_SUMMARY: &str = "zebu under the names qemu-img, qemu-io and qemu-nbd";
const MAINTAINER: &str = "zebu maintainers <maintainers@example.org>";
/// Names of QEMU's that the second package has.
const NAMES: [&str; 3] = ["qemu-img", "qemu-io", "qemu-nbd"];

/// A step after the files are there: the user and the folders of servers. Running servers are left alone.
const AFTER_INSTALLATION: &str = "\
if command -v systemd-sysusers >/dev/null; then
    systemd-sysusers zebu.conf
elif ! getent passwd zebu >/dev/null; then
    groupadd --system zebu 2>/dev/null || true
    useradd --system --gid zebu --home-dir /var/lib/zebu --no-create-home --shell /usr/sbin/nologin zebu
fi
if command -v systemd-tmpfiles >/dev/null; then
    systemd-tmpfiles --create zebu.conf || true
else
    for dir in /var/lib/zebu /run/zebu; do
        mkdir -p $dir && chown zebu:zebu $dir
    done
    chmod 750 /var/lib/zebu
fi
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || true
fi
";

/// A step before the files go, which is left out when newer ones replace them.
const BEFORE_REMOVAL: &str = "\
if [ -d /run/systemd/system ]; then
    systemctl stop 'zebu-nbd@*.socket' 'zebu-nbd@*.service' 'zebu-serve@*.service' 'zebu-vhost-user@*.service' 'zebu-fuse@*.service' 'zebu-ublk@*.service' || true
fi
";

/// A step after all files of the package have gone. Images stay, and their owner with them.
const AFTER_REMOVAL: &str = "\
rm -rf /run/zebu
if [ -d /var/lib/zebu ]; then
    rmdir /var/lib/zebu 2>/dev/null || true
fi
if [ ! -d /var/lib/zebu ] && getent passwd zebu >/dev/null; then
    userdel zebu || true
fi
";
const RELOAD: &str = "\
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || true
fi
";

fn said(path: &Path, error: std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

fn write(path: &Path, text: &str, mode: u32) -> Outcome {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|e| said(folder, e))?;
    }
    fs::write(path, text).map_err(|e| said(path, e))?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(|e| said(path, e))
}

fn copy_tree(from: &Path, to: &Path) -> Outcome {
    fs::create_dir_all(to).map_err(|e| said(to, e))?;
    run(Command::new("cp").args(["-a", "--no-preserve=ownership"]).arg(from.join(".")).arg(to))
}

/// Debian's two packages.
pub(super) fn deb(release: &Release, program: &Program, tree: &Tree) -> Outcome {
    let scratch = tempfile::tempdir().map_err(|e| e.to_string())?;
    let (version, machine) = (&release.version, program.machine.debian());
    let control = |name: &str, summary: &str, more: &str| {
        format!(
            "Package: {name}\nVersion: {version}\nArchitecture: {machine}\nMaintainer: {MAINTAINER}\nSection: admin\n\
             Priority: optional\nHomepage: {}\n{more}Description: {summary}\n zebu reads and writes qcow2, raw and other \
             disk images, with the habits of qemu-img,\n and attaches them to virtual machines.\n",
            release.place
        )
    };
    let build = |name: &str, folder: &Path| {
        let to = release.path(&format!("{name}_{version}_{machine}.deb"));
        run(Command::new("chmod").args(["-R", "u=rwX,go=rX"]).arg(folder))?;
        run(Command::new("dpkg-deb").args(["--root-owner-group", "-Zxz", "--build"]).arg(folder).arg(to))
    };
    let own = scratch.path().join("zebu");
    copy_tree(tree.path(), &own.join("usr"))?;
    // Debian's zsh looks for those of packages in a folder of its own.
    let zsh = own.join("usr/share/zsh");
    let (from, to) = (zsh.join("site-functions"), zsh.join("vendor-completions"));
    fs::rename(&from, &to).map_err(|e| said(&from, e))?;
    write(&own.join("DEBIAN/control"), &control("zebu", SUMMARY, "Recommends: fuse3\n"), 0o644)?;
    let script = |name: &str, text: &str| {
        write(&own.join("DEBIAN").join(name), &format!("#!/bin/sh\nset -e\n{text}"), 0o755)
    };
    script("postinst", &format!("if [ \"$1\" = configure ]; then\n{AFTER_INSTALLATION}fi\n"))?;
    script("prerm", &format!("if [ \"$1\" = remove ]; then\n{BEFORE_REMOVAL}fi\n"))?;
    script("postrm", &format!("{RELOAD}if [ \"$1\" = purge ]; then\n{AFTER_REMOVAL}fi\n"))?;
    build("zebu", &own)?;
    let names = scratch.path().join("names");
    link_names(&names.join("usr/bin"))?;
    let more = format!(
        "Depends: zebu (= {version})\nProvides: qemu-utils\nConflicts: qemu-utils\nReplaces: qemu-utils\n"
    );
    write(&names.join("DEBIAN/control"), &control("zebu-qemu-utils", DROP_IN_SUMMARY, &more), 0o644)?;
    build("zebu-qemu-utils", &names)
}

fn link_names(bin: &Path) -> Outcome {
    fs::create_dir_all(bin).map_err(|e| said(bin, e))?;
    for name in NAMES {
        symlink("zebu", bin.join(name)).map_err(|e| said(bin, e))?;
    }
    Ok(())
}

/// RPM's two packages.
pub(super) fn rpm(release: &Release, program: &Program, tree: &Tree) -> Outcome {
    let scratch = tempfile::tempdir().map_err(|e| e.to_string())?;
    let root = scratch.path().join("root");
    copy_tree(tree.path(), &root.join("usr"))?;
    link_names(&root.join("usr/bin"))?;
    let spec = scratch.path().join("zebu.spec");
    let (version, place) = (&release.version, &release.place);
    let links = NAMES.map(|name| format!("/usr/bin/{name}\n")).concat();
    let text = format!(
        "Name: zebu\nVersion: {version}\nRelease: 1\nSummary: {SUMMARY}\nLicense: MIT OR Apache-2.0\nURL: {place}\n\
         AutoReqProv: no\n%define __os_install_post %{{nil}}\n%define debug_package %{{nil}}\n%define _build_id_links none\n\n\
         %description\nzebu reads and writes qcow2, raw and other disk images, and attaches them to virtual machines.\n\n\
         %package qemu-utils\nSummary: {DROP_IN_SUMMARY}\nRequires: zebu = %{{version}}-%{{release}}\nProvides: qemu-img\n\
         Conflicts: qemu-img\n\n%description qemu-utils\n{DROP_IN_SUMMARY}.\n\n\
         %install\ncp -a {}/. %{{buildroot}}/\n\n%post\nset -e\n{AFTER_INSTALLATION}\n\
         %preun\nif [ \"$1\" = 0 ]; then\n{BEFORE_REMOVAL}fi\n\n\
         %postun\n{RELOAD}if [ \"$1\" = 0 ]; then\n{AFTER_REMOVAL}fi\n\n\
         %files\n%defattr(-,root,root)\n/usr/bin/zebu\n/usr/lib/systemd/system/*\n/usr/lib/sysusers.d/zebu.conf\n/usr/lib/tmpfiles.d/zebu.conf\n\
         /usr/share/man/man1/*\n/usr/share/bash-completion/completions/zebu\n/usr/share/zsh/site-functions/_zebu\n\
         /usr/share/fish/vendor_completions.d/zebu.fish\n/usr/share/doc/zebu\n%dir /usr/share/zsh\n%dir /usr/share/zsh/site-functions\n%dir /usr/share/fish\n\
         %dir /usr/share/fish/vendor_completions.d\n\n%files qemu-utils\n%defattr(-,root,root)\n{links}",
        root.display()
    );
    write(&spec, &text, 0o644)?;
    let top = scratch.path().join("rpmbuild");
    let mut command = Command::new("rpmbuild");
    command.args(["-bb", "--quiet", "--target", program.machine.name()]);
    command.arg("--define").arg(format!("_topdir {}", top.display()));
    run(command.arg(&spec))?;
    let made = top.join("RPMS").join(program.machine.name());
    for entry in fs::read_dir(&made).map_err(|e| said(&made, e))? {
        let package = entry.map_err(|e| said(&made, e))?;
        let to = release.out.join(package.file_name());
        fs::copy(package.path(), &to).map_err(|e| said(&to, e))?;
    }
    Ok(())
}
