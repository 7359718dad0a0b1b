//! The command `structure`: circles of files that import each other, which no crate may have, and what the driver of qcow2
//! may not have: circles of folders whose methods call each other, and fields that are open to the crate.

use crate::attributes::is_for_tests;
use crate::{calls, fields};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};
use zebu_bench::Outcome;
use zebu_bench::workspace::root;

/// Fails with the names of the files or folders of each circle.
pub fn command() -> Outcome {
    let (mut circles, mut circles_of_calls, mut open_fields) = (Vec::new(), Vec::new(), Vec::new());
    for place in crates()? {
        let sources = Sources::read(&place)?;
        let graph = sources.imports();
        let arrows: usize = graph.values().map(BTreeSet::len).sum();
        let found = in_circles(&graph);
        println!(
            "{}: {} files, {arrows} imports, {} files in circles",
            sources.name,
            graph.len(),
            found.iter().map(Vec::len).sum::<usize>()
        );
        for circle in found {
            let arrows = arrows_within(&graph, &circle);
            circles.push(format!("{}: {}\n{arrows}", sources.name, circle.join(", ")));
        }
        if sources.name == "engine" {
            circles_of_calls.extend(sources.circles_of_calls("qcow2"));
            let files = sources.files.iter().map(|(name, (_, file))| (name, file));
            open_fields.extend(fields::open_fields("qcow2/", files));
        }
    }
    let mut message = Vec::new();
    if !circles.is_empty() {
        message.push(format!("files that import each other in circles:\n{}", circles.join("\n")));
    }
    if !circles_of_calls.is_empty() {
        let circles = circles_of_calls.join("\n");
        message.push(format!("folders and files whose methods call each other in circles:\n{circles}"));
    }
    if !open_fields.is_empty() {
        message.push(format!(
            "fields that are open to the whole crate, or too many of them:\n{}",
            open_fields.join("\n")
        ));
    }
    if message.is_empty() { Ok(()) } else { Err(message.join("\n")) }
}

fn crates() -> Outcome<Vec<PathBuf>> {
    let list = |dir: PathBuf| -> Outcome<Vec<PathBuf>> {
        let entries = fs::read_dir(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        Ok(entries.flatten().map(|entry| entry.path()).collect())
    };
    let mut places: Vec<PathBuf> = list(root().join("crates"))?;
    places.extend(["bench", "bindings/python", "source", "xtask"].map(|name| root().join(name)));
    places.retain(|place| place.join("src").is_dir());
    places.sort();
    Ok(places)
}

/// From each file to those that it names.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// A module: its file, and where the names lead that it exports from other modules.
#[derive(Default)]
struct Module {
    file: String,
    exports: BTreeMap<String, Vec<String>>,
    globs: Vec<Vec<String>>,
}

/// The source of one crate.
struct Sources {
    name: String,
    files: BTreeMap<String, (Vec<String>, syn::File)>,
    modules: BTreeMap<Vec<String>, Module>,
}

impl Sources {
    fn read(place: &Path) -> Outcome<Self> {
        let src = place.join("src");
        let name = place.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut sources = Self { name, files: BTreeMap::new(), modules: BTreeMap::new() };
        sources.read_dir(&src, &src)?;
        let mut modules = BTreeMap::new();
        for (file, (path, parsed)) in &sources.files {
            collect_modules(&mut modules, file, path.clone(), &parsed.items);
        }
        sources.modules = modules;
        Ok(sources)
    }

    fn read_dir(&mut self, src: &Path, dir: &Path) -> Outcome {
        let fail = |path: &Path, e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        for entry in fs::read_dir(dir).map_err(|e| fail(dir, &e))?.flatten() {
            let path = entry.path();
            if path.is_dir() {
                self.read_dir(src, &path)?;
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                let text = fs::read_to_string(&path).map_err(|e| fail(&path, &e))?;
                let parsed = syn::parse_file(&text).map_err(|e| fail(&path, &e))?;
                if is_for_tests(&parsed.attrs) {
                    continue;
                }
                let relative = path.strip_prefix(src).map_err(|e| fail(&path, &e))?;
                let name = relative.to_string_lossy().into_owned();
                self.files.insert(name.clone(), (module_path(&name), parsed));
            }
        }
        Ok(())
    }

    fn imports(&self) -> Graph {
        let tests = self.modules_for_tests();
        let is_test = |path: &[String]| tests.iter().any(|test| path.starts_with(test));
        let mut graph = Graph::new();
        for (file, (path, parsed)) in self.files.iter().filter(|(_, (path, _))| !is_test(path)) {
            let mut names = Names { module: path.clone(), found: Vec::new() };
            names.visit_file(parsed);
            let targets = names.found.iter().filter_map(|name| self.file_of(name, 0));
            let others = targets.filter(|target| target != file);
            graph.insert(file.clone(), others.collect());
        }
        graph
    }

    /// Circles of folders of `part` that call each other's methods, and how.
    fn circles_of_calls(&self, part: &str) -> Vec<String> {
        let files = self.files.iter().map(|(name, (_, parsed))| (name, parsed));
        let calls = calls::between_folders(part, files);
        let graph: Graph =
            calls.iter().map(|(from, to)| (from.clone(), to.keys().cloned().collect())).collect();
        let found = in_circles(&graph);
        println!(
            "{part}: {} folders and files, {} of them in circles by calls of methods",
            graph.len(),
            found.concat().len()
        );
        let describe = |circle: Vec<String>| {
            let arrows = circle.iter().flat_map(|from| {
                let within = calls[from].iter().filter(|(to, _)| circle.contains(to));
                within.map(move |(to, methods)| {
                    let methods: Vec<&str> = methods.iter().map(String::as_str).collect();
                    format!("    {from} -> {to}: {}", methods.join(", "))
                })
            });
            format!("{part}: {}\n{}", circle.join(", "), arrows.collect::<Vec<_>>().join("\n"))
        };
        found.into_iter().map(describe).collect()
    }

    fn modules_for_tests(&self) -> Vec<Vec<String>> {
        let mut found = Vec::new();
        for (path, parsed) in self.files.values() {
            for item in &parsed.items {
                if let syn::Item::Mod(module) = item
                    && is_for_tests(&module.attrs)
                {
                    found.push([path.as_slice(), &[module.ident.to_string()]].concat());
                }
            }
        }
        found
    }

    /// The file that has what `name` leads to, through what modules export from others.
    fn file_of(&self, name: &[String], depth: usize) -> Option<String> {
        let known = (0..=name.len()).rev().find(|len| self.modules.contains_key(&name[..*len]))?;
        let module = &self.modules[&name[..known]];
        let rest = &name[known..];
        if depth > 8 || rest.is_empty() {
            return Some(module.file.clone());
        }
        if let Some(target) = module.exports.get(&rest[0]) {
            return self.file_of(&[target.as_slice(), &rest[1..]].concat(), depth + 1);
        }
        Some(module.file.clone())
    }
}

fn module_path(file: &str) -> Vec<String> {
    let mut path: Vec<String> = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if path.last().is_some_and(|last| last == "mod") || path == ["lib"] || path == ["main"] {
        path.pop();
    }
    path
}

fn collect_modules(
    modules: &mut BTreeMap<Vec<String>, Module>,
    file: &str,
    path: Vec<String>,
    items: &[syn::Item],
) {
    let mut module = Module { file: file.to_owned(), ..Module::default() };
    for item in items {
        match item {
            // Also what it imports for itself: modules below see it.
            syn::Item::Use(item) => {
                let mut leaves = Vec::new();
                flatten(&item.tree, &mut Vec::new(), &mut leaves);
                for (name, exported) in leaves {
                    let name = resolve(&path, &name);
                    match exported {
                        Some(exported) => drop(module.exports.insert(exported, name)),
                        None => module.globs.push(name),
                    }
                }
            }
            syn::Item::Mod(inner) if !is_for_tests(&inner.attrs) => {
                if let Some((_, items)) = &inner.content {
                    let inner = [path.as_slice(), &[inner.ident.to_string()]].concat();
                    collect_modules(modules, file, inner, items);
                }
            }
            _ => {}
        }
    }
    modules.insert(path, module);
}

/// The leaves of a tree of imports, with the name that each gets; none for a glob.
fn flatten(tree: &syn::UseTree, at: &mut Vec<String>, leaves: &mut Vec<(Vec<String>, Option<String>)>) {
    let leaf = |at: &[String], last: &syn::Ident| {
        let last = last.to_string();
        if last == "self" { at.to_vec() } else { [at, &[last]].concat() }
    };
    match tree {
        syn::UseTree::Path(path) => {
            at.push(path.ident.to_string());
            flatten(&path.tree, at, leaves);
            at.pop();
        }
        syn::UseTree::Name(name) => {
            let whole = leaf(at, &name.ident);
            let exported = whole.last().cloned();
            leaves.push((whole, exported));
        }
        syn::UseTree::Rename(name) => leaves.push((leaf(at, &name.ident), Some(name.rename.to_string()))),
        syn::UseTree::Glob(_) => leaves.push((at.clone(), None)),
        syn::UseTree::Group(group) => {
            for tree in &group.items {
                flatten(tree, at, leaves);
            }
        }
    }
}

/// A path from the root of the crate. One that begins with a name is taken for a module's below, and leads to the module
/// itself if there is none.
fn resolve(module: &[String], name: &[String]) -> Vec<String> {
    let mut at = module.to_vec();
    let mut rest = name;
    match rest.first().map(String::as_str) {
        Some("crate") => {
            at.clear();
            rest = &rest[1..];
        }
        Some("self") => rest = &rest[1..],
        _ => {}
    }
    while rest.first().is_some_and(|first| first == "super") {
        at.pop();
        rest = &rest[1..];
    }
    [at.as_slice(), rest].concat()
}

/// Collects the paths that a module names.
struct Names {
    module: Vec<String>,
    found: Vec<Vec<String>>,
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_for_tests(&item.attrs) && item.content.is_some() {
            self.module.push(item.ident.to_string());
            visit::visit_item_mod(self, item);
            self.module.pop();
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // What a module exports from those below it, it does not use.
        let exports = !matches!(item.vis, syn::Visibility::Inherited);
        let mut leaves = Vec::new();
        flatten(&item.tree, &mut Vec::new(), &mut leaves);
        let names = leaves.iter().map(|(name, _)| resolve(&self.module, name));
        let below = |name: &Vec<String>| exports && name.starts_with(&self.module);
        let names: Vec<_> = names.filter(|name| !below(name)).collect();
        self.found.extend(names);
    }

    /// That something is visible to a module above is no import of it.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let name: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        // A module may call those that it declares by their names.
        if name.first().is_some_and(|first| first == "crate" || first == "super") {
            self.found.push(resolve(&self.module, &name));
        }
        visit::visit_path(self, path);
    }
}

/// The strongly connected parts of more than one file.
fn in_circles(graph: &Graph) -> Vec<Vec<String>> {
    let reach = |from: &String| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(file) = next.pop() {
            for target in graph.get(file).into_iter().flatten() {
                if seen.insert(target) {
                    next.push(target);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&String, BTreeSet<&String>> =
        graph.keys().map(|file| (file, reach(file))).collect();
    let mut circles: BTreeSet<Vec<String>> = BTreeSet::new();
    for (file, others) in reached.iter().filter(|(file, others)| others.contains(*file)) {
        let circle = others.iter().filter(|other| reached.get(*other).is_some_and(|set| set.contains(file)));
        circles.insert(circle.map(|other| (*other).clone()).collect());
    }
    circles.into_iter().collect()
}

fn arrows_within(graph: &Graph, circle: &[String]) -> String {
    let lines = circle.iter().map(|file| {
        let targets = graph[file].iter().filter(|target| circle.contains(target));
        format!("    {file} -> {}", targets.cloned().collect::<Vec<_>>().join(" "))
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(files: &[(&str, &str)]) -> Sources {
        let parse = |(file, text): &(&str, &str)| {
            ((*file).to_owned(), (module_path(file), syn::parse_file(text).unwrap()))
        };
        let mut sources = Sources {
            name: "x".to_owned(),
            files: files.iter().map(parse).collect(),
            modules: BTreeMap::new(),
        };
        let mut modules = BTreeMap::new();
        for (file, (path, parsed)) in &sources.files {
            collect_modules(&mut modules, file, path.clone(), &parsed.items);
        }
        sources.modules = modules;
        sources
    }

    #[test]
    fn a_circle_through_an_export_is_found_and_tests_are_left_out() {
        let found = sources(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use crate::b::Thing; pub struct Other;"),
            ("b/mod.rs", "mod inner; pub use inner::Thing; pub use self::inner::Thing as Same;"),
            ("b/inner.rs", "pub struct Thing(crate::a::Other);"),
            ("c.rs", "#[cfg(test)] mod tests { use crate::d::X; } pub struct Y;"),
            ("d.rs", "pub struct X(super::c::Y);"),
        ]);
        let graph = found.imports();
        assert_eq!(in_circles(&graph), [["a.rs", "b/inner.rs"]]);
        assert!(graph["c.rs"].is_empty() && graph["d.rs"].contains("c.rs"));
    }

    #[test]
    fn a_circle_of_calls_is_told_with_its_calls() {
        let up = "pub struct A { b: B } impl A { fn go(&self) { self.b.run(); } }";
        let down = ("p/b/y.rs", "pub struct B; impl B { fn run(&self) {} }");
        assert!(sources(&[("p/a/x.rs", up), down]).circles_of_calls("p").is_empty());
        let back = ("p/b/y.rs", "pub struct B; impl B { fn run(&self, a: &A) { a.go(); } }");
        let told = "p: a, b\n    a -> b: p/a/x.rs: run\n    b -> a: p/b/y.rs: go";
        assert_eq!(sources(&[("p/a/x.rs", up), back]).circles_of_calls("p"), [told]);
    }
}
