//! The same line run by two programs in copies of the same files, and compared.

use super::lines::Line;
use super::states::{self, Holder};
use crate::program::{Finished, finish, required};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Keys of reports that depend on the directory, the allocator, the file system or the time.
const OWN_AFFAIRS: [&str; 8] = [
    "actual-size",
    "image-end-offset",
    "offset",
    "date-sec",
    "date-nsec",
    "children",
    "filename",
    "full-backing-filename",
];

/// A respect in which the programs differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Its kind: `crash` of QEMU's program, `option` that it does not know, `code`, `stdout`, `stderr`, `json`, `files`, `disk`,
    /// `map`, `check`.
    pub kind: &'static str,
    /// The evidence, in words of both programs.
    pub what: String,
}

/// QEMU's programs, and zebu's under their names.
#[derive(Debug)]
pub struct Judge {
    /// Files in all states.
    made: PathBuf,
    /// Where the links are.
    names: PathBuf,
    home: tempfile::TempDir,
}

impl Judge {
    /// Makes the files.
    ///
    /// # Panics
    /// If QEMU's programs are missing.
    pub fn new() -> Self {
        let home = tempfile::Builder::new().prefix("beside").tempdir().expect("a directory");
        let made = home.path().join("made");
        states::make(&made);
        crate::both_programs::install_names(home.path());
        Self { made, names: home.path().join("names"), home }
    }

    /// Runs a line by both programs.
    ///
    /// # Panics
    /// If a program can't be started.
    pub fn differences(&self, line: &Line) -> Vec<Difference> {
        let place = tempfile::tempdir_in(self.home.path()).expect("a directory");
        let dirs = ["ours", "theirs"].map(|name| place.path().join(name));
        let program = &line.words[0];
        let programs = [self.names.join(program), required(program)];
        let ran: Vec<(Finished, BTreeSet<PathBuf>)> = dirs
            .iter()
            .zip(&programs)
            .map(|(dir, program)| {
                states::copy(&self.made, dir, &line.state);
                let before = names(dir);
                let holder = Holder::of(dir, &line.state);
                let mut command = states::command(program, &line.state);
                command.args(&line.words[1..]).current_dir(dir).env_remove("ZEBU_ALLOW_REFS");
                let finished = finish(command);
                drop(holder);
                (finished, before)
            })
            .collect();
        let [(ours, before), (theirs, _)] = &ran[..] else { return Vec::new() };
        let mut found = outputs(line, ours, theirs);
        let is_whole = ours.code == Some(0) && theirs.code == Some(0);
        if !found.iter().any(|difference| ["crash", "option"].contains(&difference.kind)) {
            disks(&dirs, (!is_whole).then_some(before), &mut found);
        }
        found
    }
}

impl Default for Judge {
    fn default() -> Self {
        Self::new()
    }
}

fn names(dir: &Path) -> BTreeSet<PathBuf> {
    states::files(dir).iter().filter_map(|path| Some(path.file_name()?.into())).collect()
}

fn outputs(line: &Line, ours: &Finished, theirs: &Finished) -> Vec<Difference> {
    let mut found = Vec::new();
    let mut differ = |kind, what: String| found.push(Difference { kind, what });
    if theirs.code.is_none() && ours.code.is_some() {
        differ("crash", first(&theirs.stderr).to_owned());
        return found;
    }
    let is_unknown = |ran: &Finished| {
        ran.code != Some(0)
            && ["unrecognized option", "invalid option"].iter().any(|words| ran.stderr.contains(words))
    };
    if is_unknown(theirs) && !is_unknown(ours) {
        differ("option", first(&theirs.stderr).to_owned());
        return found;
    }
    if ours.code != theirs.code {
        differ(
            "code",
            format!(
                "{:?}, QEMU {:?}: {} / {}",
                ours.code,
                theirs.code,
                first(&ours.stderr),
                first(&theirs.stderr)
            ),
        );
    }
    let is_json = line.words.iter().any(|word| word == "--output=json" || word == "json");
    if is_json && ours.code == Some(0) && theirs.code == Some(0) {
        let reports = [report(&ours.stdout), report(&theirs.stdout)];
        if reports[0] != reports[1] {
            differ("json", format!("{}\nQEMU {}", reports[0], reports[1]));
        }
    } else if word(&ours.stdout) != word(&theirs.stdout) {
        differ("stdout", format!("{:?}, QEMU {:?}", first(&ours.stdout), first(&theirs.stdout)));
    }
    if word(&ours.stderr) != word(&theirs.stderr) {
        differ("stderr", format!("{:?}, QEMU {:?}", first(&ours.stderr), first(&theirs.stderr)));
    }
    found
}

fn first(text: &str) -> &str {
    text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default()
}

fn word(text: &str) -> &str {
    let word = text.split_whitespace().next().unwrap_or_default();
    // Figures with commas between them have times behind the first one.
    word.split(',').next().unwrap_or_default()
}

/// A report without what is a program's own affair.
fn report(text: &str) -> Value {
    fn leave_out(value: &mut Value) {
        match value {
            Value::Object(members) => {
                for key in OWN_AFFAIRS {
                    members.remove(key);
                }
                members.values_mut().for_each(leave_out);
            }
            Value::Array(items) => items.iter_mut().for_each(leave_out),
            _ => {}
        }
    }
    let mut value = serde_json::from_str(text).unwrap_or(Value::String(text.to_owned()));
    leave_out(&mut value);
    value
}

/// Compares the files that are left. After a failure only those that were there before.
fn disks(dirs: &[PathBuf; 2], of_before: Option<&BTreeSet<PathBuf>>, found: &mut Vec<Difference>) {
    let left = dirs.each_ref().map(|dir| {
        let mut names = names(dir);
        names.retain(|name| of_before.is_none_or(|before| before.contains(name)));
        names
    });
    if left[0] != left[1] {
        let odd: Vec<_> = left[0].symmetric_difference(&left[1]).collect();
        found.push(Difference { kind: "files", what: format!("only one program left {odd:?}") });
    }
    for name in left[0].intersection(&left[1]) {
        let paths = dirs.each_ref().map(|dir| dir.join(name));
        let bytes = paths.each_ref().map(|path| fs::read(path).unwrap_or_default());
        if bytes[0] == bytes[1] {
            continue;
        }
        let name = name.display();
        let compared = compare(&paths);
        let codes = paths.each_ref().map(|path| qemu_img(&[OsStr::new("info"), path.as_os_str()]).code);
        // More than 1: QEMU can read neither of them.
        if codes[0] != codes[1] || compared.code == Some(1) {
            found.push(Difference {
                kind: "disk",
                what: format!("{name}: {}{}", first(&compared.stdout), first(&compared.stderr)),
            });
            continue;
        }
        let maps = paths.each_ref().map(|path| map(path));
        if maps[0] != maps[1] {
            found.push(Difference { kind: "map", what: format!("{name}: {}\nQEMU {}", maps[0], maps[1]) });
        }
        let checks = paths.each_ref().map(|path| qemu_img(&[OsStr::new("check"), path.as_os_str()]).code);
        if checks[0] != checks[1] {
            found.push(Difference {
                kind: "check",
                what: format!("{name}: {:?}, QEMU {:?}", checks[0], checks[1]),
            });
        }
    }
}

fn qemu_img(words: &[&OsStr]) -> Finished {
    let mut command = Command::new(required("qemu-img"));
    command.args(words);
    finish(command)
}

fn compare(paths: &[PathBuf; 2]) -> Finished {
    let mut words: Vec<_> = ["compare"].iter().map(|word| (*word).to_owned()).collect();
    if paths[0].ends_with("luks.qcow2") {
        words.extend(["--object", "secret,id=k,data=key", "--image-opts"].map(str::to_owned));
        words.extend(
            paths
                .iter()
                .map(|path| format!("driver=qcow2,encrypt.key-secret=k,file.filename={}", path.display())),
        );
    } else {
        words.extend(paths.iter().map(|path| path.display().to_string()));
    }
    qemu_img(&words.iter().map(OsStr::new).collect::<Vec<_>>())
}

/// The map of a disk, where ranges that are alike are one.
fn map(path: &Path) -> Value {
    let told = qemu_img(
        &["map", "-U", "--output=json"].iter().map(OsStr::new).chain([path.as_os_str()]).collect::<Vec<_>>(),
    );
    let entries = report(&told.stdout);
    let mut merged: Vec<BTreeMap<String, Value>> = Vec::new();
    for entry in entries.as_array().into_iter().flatten() {
        let mut entry: BTreeMap<String, Value> = entry
            .as_object()
            .into_iter()
            .flatten()
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect();
        let (start, length) = (entry.remove("start"), entry["length"].as_u64().unwrap_or(0));
        entry.remove("length");
        match merged.last_mut() {
            Some(last)
                if last
                    .iter()
                    .filter(|(key, _)| !matches!(key.as_str(), "start" | "length"))
                    .eq(entry.iter()) =>
            {
                let sum = last["length"].as_u64().unwrap_or(0) + length;
                last.insert("length".to_owned(), sum.into());
            }
            _ => {
                entry.insert("start".to_owned(), start.unwrap_or_default());
                entry.insert("length".to_owned(), length.into());
                merged.push(entry);
            }
        }
    }
    serde_json::to_value(merged).unwrap_or_default()
}
