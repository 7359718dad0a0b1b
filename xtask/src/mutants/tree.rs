//! A copy of the tree with all changes in it, and its test programs.

use super::verdict::Verdict;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use zebu_bench::Outcome;
use zebu_bench::process::{output, shown};
use zebu_bench::workspace::cargo;
use zebu_bench::workspace::root;
use zebu_source::schema::{Change, Schema, schema};

/// The crate that is changed, and where it says which change is active.
const CRATE: &str = "crates/engine/src";
const CHANGED: &str = "crates/engine/src/changed.rs";
const ACTIVE: &str = include_str!("active.rs");
/// The program with the simulated tests, and its modules that judge a change, each by itself. The deliberate faults are
/// left out: they ask what a seed does without them.
const SIMULATED: &str = "simulated";
const JUDGES: [&str; 3] = ["crash::", "faults::", "torture::"];

/// A test program, or a part of one.
#[derive(Clone)]
pub(super) struct TestProgram {
    pub(super) name: String,
    pub(super) path: PathBuf,
    /// Runs tests alone whose names have this in them.
    pub(super) filter: &'static str,
}

/// The copy, built.
pub(super) struct ChangedTree {
    unviable: BTreeSet<u32>,
    left_out: BTreeSet<u32>,
    programs: Vec<TestProgram>,
}

impl ChangedTree {
    /// Copies the tree to `place`, changes and builds it; what does not compile is taken out, and known the next time.
    pub(super) fn build(place: &Path, changes: &BTreeMap<u32, Change>) -> Outcome<Self> {
        let tree = place.join("tree");
        let refused = Refused { path: place.join("refused.json") };
        let lib = Path::new(CRATE).join("lib.rs");
        let changed = changes.values().map(|change| Path::new(&change.file)).chain([lib.as_path()]).collect();
        let sources = copy(&tree, &changed)?;
        let text = read(&root().join(&lib))?;
        write(&tree.join(lib), &format!("{text}\nmod changed;\n"))?;
        write(&tree.join(CHANGED), ACTIVE)?;
        let mut unviable = refused.of(sources, changes);
        loop {
            let schemas = schemas(&tree, changes, &unviable)?;
            let found = do_not_compile(place, &tree, &schemas)?;
            if found.is_empty() {
                refused.keep(sources, &unviable, changes)?;
                let left_out = schemas.values().flat_map(|schema| schema.left_out.iter().copied()).collect();
                return Ok(Self { unviable, left_out, programs: programs(place, &tree)? });
            }
            println!("{} changes do not compile", found.len());
            unviable.extend(found);
        }
    }

    /// The verdict on a change that is not in the programs.
    pub(super) fn outcome_of_building(&self, number: u32) -> Option<Verdict> {
        if self.unviable.contains(&number) {
            Some(Verdict::Unviable)
        } else {
            self.left_out.contains(&number).then_some(Verdict::LeftOut)
        }
    }

    pub(super) fn programs(&self) -> &[TestProgram] {
        &self.programs
    }
}

/// The changes of these sources that the compiler refused.
struct Refused {
    path: PathBuf,
}

impl Refused {
    fn of(&self, sources: u64, changes: &BTreeMap<u32, Change>) -> BTreeSet<u32> {
        let text = std::fs::read(&self.path).unwrap_or_default();
        let kept = serde_json::from_slice::<(u64, BTreeSet<String>)>(&text).ok();
        let Some((_, refused)) = kept.filter(|(of, _)| *of == sources) else { return BTreeSet::new() };
        changes
            .iter()
            .filter(|(_, change)| refused.contains(&change.name))
            .map(|(number, _)| *number)
            .collect()
    }

    fn keep(&self, sources: u64, refused: &BTreeSet<u32>, changes: &BTreeMap<u32, Change>) -> Outcome {
        let names: BTreeSet<&String> =
            refused.iter().filter_map(|number| Some(&changes.get(number)?.name)).collect();
        write(&self.path, &serde_json::to_string(&(sources, names)).map_err(|e| e.to_string())?)
    }
}

fn read(path: &Path) -> Outcome<String> {
    std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// Writes what is not there yet: what stays the same is not built again.
fn write(path: &Path, text: &str) -> Outcome {
    if std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}

/// The files of the tree but for those that git ignores, with the changes that are not committed.
///
/// `changed` files get their text later. Returns a number that stands for the sources of the crates, without their tests,
/// and for what decides which changes there are.
fn copy(tree: &Path, changed: &BTreeSet<&Path>) -> Outcome<u64> {
    let list = output(Command::new("git").current_dir(root()).args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    let mut sources = DefaultHasher::new();
    let mut there = HashSet::from([tree.join(CHANGED)]);
    for name in list.split('\0').filter(|name| !name.is_empty()) {
        let (from, to) = (root().join(name), tree.join(name));
        let said = |e: std::io::Error| format!("{}: {e}", to.display());
        let Ok(bytes) = std::fs::read(&from) else { continue };
        there.insert(to.clone());
        if name.contains("/src/") || Path::new(name).extension().is_some_and(|extension| extension == "toml")
        {
            (name, &bytes).hash(&mut sources);
        }
        let is_changed = changed.contains(Path::new(name)) && to.exists();
        if is_changed || std::fs::read(&to).is_ok_and(|old| old == bytes) {
            continue;
        }
        if let Some(folder) = to.parent() {
            std::fs::create_dir_all(folder).map_err(said)?;
        }
        std::fs::write(&to, bytes).map_err(said)?;
    }
    remove_all_but(&there, tree)?;
    Ok(sources.finish())
}

/// Removes files of `folder`: cargo takes whatever it finds for a test.
fn remove_all_but(there: &HashSet<PathBuf>, folder: &Path) -> Outcome {
    let said = |e: std::io::Error| format!("{}: {e}", folder.display());
    for entry in std::fs::read_dir(folder).map_err(said)? {
        let path = entry.map_err(said)?.path();
        if path.is_dir() {
            remove_all_but(there, &path)?;
        } else if !there.contains(&path) {
            std::fs::remove_file(&path).map_err(said)?;
        }
    }
    Ok(())
}

/// Changes the sources; by their names.
fn schemas(
    tree: &Path,
    changes: &BTreeMap<u32, Change>,
    unviable: &BTreeSet<u32>,
) -> Outcome<BTreeMap<String, Schema>> {
    let mut files = BTreeMap::<&str, Vec<(u32, &Change)>>::new();
    for (number, change) in changes {
        let of_file = files.entry(&change.file).or_default();
        if !unviable.contains(number) {
            of_file.push((*number, change));
        }
    }
    let mut schemas = BTreeMap::new();
    for (file, changes) in files {
        let schema = schema(&read(&root().join(file))?, &changes).map_err(|e| format!("{file}: {e}"))?;
        write(&tree.join(file), &schema.text)?;
        schemas.insert(file.to_owned(), schema);
    }
    Ok(schemas)
}

fn cargo_in(place: &Path, tree: &Path, command: &str) -> Command {
    let mut cargo = cargo();
    cargo.current_dir(tree).args([command, "--locked", "--message-format=json"]);
    cargo.args(["--package", "zebu-engine", "--target-dir"]).arg(place.join("build"));
    // Changed code is not tidy.
    cargo.env("RUSTFLAGS", "--cap-lints=allow").stdin(Stdio::null());
    cargo
}

/// The numbers of the changes that the compiler refuses.
fn do_not_compile(place: &Path, tree: &Path, schemas: &BTreeMap<String, Schema>) -> Outcome<BTreeSet<u32>> {
    let mut check = cargo_in(place, tree, "check");
    let out = check.arg("--lib").output().map_err(|e| format!("cannot run {}: {e}", shown(&check)))?;
    let (mut found, mut other) = (BTreeSet::new(), Vec::new());
    for line in String::from_utf8_lossy(&out.stdout).lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
        let message = &message["message"];
        if message["level"] != "error" {
            continue;
        }
        // Where the error is; only if no change lies there, what it has to do with.
        let spans = |primary: bool| {
            let spans = message["spans"].as_array().into_iter().flatten();
            let chosen = spans.filter(move |span| span["is_primary"] == primary);
            chosen.filter_map(|span| changed_at(span, schemas)).collect::<Vec<u32>>()
        };
        let mut numbers = spans(true);
        if numbers.is_empty() {
            numbers = spans(false);
        }
        if numbers.is_empty() && message["spans"].as_array().is_some_and(|spans| !spans.is_empty()) {
            other.push(message["rendered"].as_str().unwrap_or_default().to_owned());
        }
        found.extend(numbers);
    }
    if found.is_empty() && !out.status.success() {
        return Err(format!("the changed engine does not compile:\n{}", other.join("\n")));
    }
    Ok(found)
}

/// The change whose code a span lies in.
fn changed_at(span: &Value, schemas: &BTreeMap<String, Schema>) -> Option<u32> {
    let file = span["file_name"].as_str()?;
    let (_, schema) = schemas.iter().find(|(name, _)| file.ends_with(name.as_str()))?;
    let start = usize::try_from(span["byte_start"].as_u64()?).ok()?;
    schema.changed.iter().find(|(range, _)| range.contains(&start)).map(|(_, number)| *number)
}

/// Builds the test programs; cargo says where they are.
fn programs(place: &Path, tree: &Path) -> Outcome<Vec<TestProgram>> {
    let mut test = cargo_in(place, tree, "test");
    test.args(["--no-run", "--lib", "--tests"]).stderr(Stdio::inherit());
    let out = test.output().map_err(|e| format!("cannot run {}: {e}", shown(&test)))?;
    if !out.status.success() {
        return Err(format!("{}: {}", shown(&test), out.status));
    }
    let mut programs = Vec::new();
    for line in String::from_utf8_lossy(&out.stdout).lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
        let (Some(name), Some(path)) =
            (message["target"]["name"].as_str(), message["executable"].as_str().map(PathBuf::from))
        else {
            continue;
        };
        if name == SIMULATED {
            programs.extend(JUDGES.map(|filter| TestProgram {
                name: filter.trim_end_matches(':').to_owned(),
                path: path.clone(),
                filter,
            }));
        } else {
            programs.push(TestProgram { name: name.to_owned(), path, filter: "" });
        }
    }
    Ok(programs)
}
