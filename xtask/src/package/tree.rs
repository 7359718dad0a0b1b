//! The files of a package, as they lie below `/usr`.

use super::binaries::Program;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;
use zebu_bench::Outcome;
use zebu_bench::process::{output, run};
use zebu_bench::workspace::root;

/// Shells, and where their completions lie.
const SHELLS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/zebu"),
    ("zsh", "share/zsh/site-functions/_zebu"),
    ("fish", "share/fish/vendor_completions.d/zebu.fish"),
];

/// Files of the project that every package has, and their folder.
const DOCUMENTS: [&str; 4] = ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"];

fn said(path: &Path, error: std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// Manual pages and completions, as the program prints them.
pub(super) struct Pages {
    manual: TempDir,
    completions: Vec<(&'static str, String)>,
}

impl Pages {
    pub(super) fn make(program: &Path) -> Outcome<Self> {
        let manual = tempfile::tempdir().map_err(|e| e.to_string())?;
        output(Command::new(program).arg("manpage").arg(manual.path()))?;
        let print = |(shell, place)| Ok((place, output(Command::new(program).args(["completions", shell]))?));
        let completions = SHELLS.into_iter().map(print).collect::<Outcome<Vec<_>>>()?;
        Ok(Self { manual, completions })
    }
}

/// A folder that has the files.
pub(super) struct Tree {
    _scratch: TempDir,
    path: PathBuf,
}

impl Tree {
    pub(super) fn stage(program: &Program, pages: &Pages) -> Outcome<Self> {
        let scratch = tempfile::tempdir().map_err(|e| e.to_string())?;
        // That of the scratch folder is open to nobody else.
        let path = scratch.path().join("usr");
        let tree = Self { _scratch: scratch, path };
        tree.copy(&program.stripped, "bin/zebu", 0o755)?;
        for entry in fs::read_dir(pages.manual.path()).map_err(|e| said(pages.manual.path(), e))? {
            let page = entry.map_err(|e| said(pages.manual.path(), e))?;
            tree.copy(
                &page.path(),
                &format!("share/man/man1/{}", page.file_name().to_string_lossy()),
                0o644,
            )?;
        }
        for (place, text) in &pages.completions {
            tree.write(place, text)?;
        }
        run(Command::new("gzip").args(["-9nr"]).arg(tree.path().join("share/man")))?;
        let packaging = root().join("packaging");
        for entry in fs::read_dir(packaging.join("systemd")).map_err(|e| said(&packaging, e))? {
            let unit = entry.map_err(|e| said(&packaging, e))?;
            tree.copy(
                &unit.path(),
                &format!("lib/systemd/system/{}", unit.file_name().to_string_lossy()),
                0o644,
            )?;
        }
        tree.copy(&packaging.join("prometheus/zebu-alerts.yml"), "share/zebu/zebu-alerts.yml", 0o644)?;
        tree.copy(&packaging.join("sysusers/zebu.conf"), "lib/sysusers.d/zebu.conf", 0o644)?;
        tree.copy(&packaging.join("tmpfiles/zebu.conf"), "lib/tmpfiles.d/zebu.conf", 0o644)?;
        for name in DOCUMENTS {
            tree.copy(&root().join(name), &format!("share/doc/zebu/{name}"), 0o644)?;
        }
        run(Command::new("chmod").args(["-R", "u=rwX,go=rX"]).arg(tree.path()))?;
        Ok(tree)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn place(&self, name: &str) -> Outcome<PathBuf> {
        let place = self.path.join(name);
        if let Some(folder) = place.parent() {
            fs::create_dir_all(folder).map_err(|e| said(folder, e))?;
        }
        Ok(place)
    }

    fn copy(&self, from: &Path, name: &str, mode: u32) -> Outcome {
        let place = self.place(name)?;
        fs::copy(from, &place).map_err(|e| said(from, e))?;
        fs::set_permissions(&place, fs::Permissions::from_mode(mode)).map_err(|e| said(&place, e))
    }

    fn write(&self, name: &str, text: &str) -> Outcome {
        let place = self.place(name)?;
        fs::write(&place, text).map_err(|e| said(&place, e))
    }
}
