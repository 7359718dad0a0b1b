//! Repositories of apt and dnf, as folders that a person uploads and signs.

use super::Release;
use std::fs;
use std::path::Path;
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::{output, run};

fn said(path: &Path, error: std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// Copies the packages of this ending into a folder.
fn gather(release: &Release, ending: &str, folder: &Path) -> Outcome {
    fs::create_dir_all(folder).map_err(|e| said(folder, e))?;
    for entry in fs::read_dir(&release.out).map_err(|e| said(&release.out, e))? {
        let package = entry.map_err(|e| said(&release.out, e))?;
        if package.file_name().to_string_lossy().ends_with(ending) {
            fs::copy(package.path(), folder.join(package.file_name())).map_err(|e| said(folder, e))?;
        }
    }
    Ok(())
}

/// `deb [trusted=yes] URL/apt ./` before it is signed.
pub(super) fn apt(release: &Release) -> Outcome {
    let folder = release.path("apt");
    gather(release, ".deb", &folder)?;
    let packages =
        output(Command::new("dpkg-scanpackages").args(["--multiversion", "."]).current_dir(&folder))?;
    let place = folder.join("Packages");
    fs::write(&place, packages).map_err(|e| said(&place, e))?;
    run(Command::new("gzip").args(["-9nk", "Packages"]).current_dir(&folder))?;
    let list = output(
        Command::new("sh")
            .arg("-c")
            .arg(
                "for f in Packages Packages.gz; do
            printf ' %s %s %s\\n' \"$(sha256sum $f | cut -d' ' -f1)\" \"$(stat -c %s $f)\" $f; done",
            )
            .current_dir(&folder),
    )?;
    let text = format!(
        "Origin: zebu\nLabel: zebu\nSuite: stable\nArchitectures: amd64 arm64\nComponents: main\nDate: {}\nSHA256:\n{list}",
        output(Command::new("date").args(["-u", "-R"]))?.trim(),
    );
    let place = folder.join("Release");
    fs::write(&place, text).map_err(|e| said(&place, e))
}

pub(super) fn dnf(release: &Release) -> Outcome {
    let folder = release.path("dnf");
    gather(release, ".rpm", &folder)?;
    run(Command::new("createrepo_c").arg("--quiet").arg(&folder))
}
