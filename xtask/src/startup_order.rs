//! The order of functions in the program: those that short commands run lie together.
//!
//! The kernel maps 64 KiB of a program around each page that is touched. The functions of a short command are some hundred
//! of 25,000, and scattered: they make it map half of the program, which costs memory and page faults.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use zebu_bench::Outcome;
use zebu_bench::process::{find, output, run};
use zebu_bench::workspace::cargo;

/// The linker's script. Names that are not there are passed over, so that an old script costs memory only.
const SCRIPT: &str = "crates/cli/startup.ld";

/// Where Valgrind loads programs that may lie anywhere.
const BASE: u64 = 0x10_8000;

/// Functions that Valgrind does not see: it has no io_uring.
const UNSEEN: [&str; 2] = ["_ZN12zebu_storage5uring*", "_ZN*8io_uring*"];

/// Commands that services call thousands of times a minute: the program's name, and its arguments.
const COMMANDS: [(&str, &str); 7] = [
    ("qemu-img", "--version"),
    ("qemu-img", "create -f qcow2 a.qcow2 64M"),
    ("qemu-img", "create -f qcow2 -b a.qcow2 -F qcow2 b.qcow2"),
    ("qemu-img", "info b.qcow2"),
    ("qemu-img", "info --output json b.qcow2"),
    ("zebu", "info b.qcow2"),
    ("zebu", "create -f qcow2 c.qcow2 64M"),
];

/// A function of the program.
struct Function {
    start: u64,
    end: u64,
    name: String,
}

/// Writes the linker's script anew.
pub(crate) fn command() -> Outcome {
    if find("valgrind").is_none() {
        return Err("valgrind is missing: install it, it sees which functions run".to_owned());
    }
    run(cargo().args(["build", "--release", "--locked", "-p", "zebu-cli"]))?;
    let program = std::env::current_dir().map_err(|e| e.to_string())?.join("target/release/zebu");
    let functions = functions(&program)?;
    let used = used(&program, &functions)?;
    std::fs::write(SCRIPT, script(&functions, &used)).map_err(|e| format!("{SCRIPT}: {e}"))?;
    println!("{} of {} functions are in {SCRIPT}; build again", used.len(), functions.len());
    Ok(())
}

/// All functions, by their places.
fn functions(program: &Path) -> Outcome<Vec<Function>> {
    let text = output(Command::new("nm").arg("-S").arg(program))?;
    let function = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [start, len, kind, name] = words[..] else { return None };
        let start = u64::from_str_radix(start, 16).ok()?;
        let end = start + u64::from_str_radix(len, 16).ok()?;
        "tTwW".contains(kind).then(|| Function { start, end, name: name.to_owned() })
    };
    let mut functions: Vec<Function> = text.lines().filter_map(function).collect();
    functions.sort_by_key(|function| function.start);
    Ok(functions)
}

/// Names of the functions that the commands run.
fn used(program: &Path, functions: &[Function]) -> Outcome<BTreeSet<String>> {
    let scratch = tempfile::tempdir().map_err(|e| e.to_string())?;
    let mut used = BTreeSet::new();
    for (name, arguments) in COMMANDS {
        let link = scratch.path().join(name);
        if !link.exists() {
            std::os::unix::fs::symlink(program, &link).map_err(|e| e.to_string())?;
        }
        let log = scratch.path().join("trace");
        let mut traced = Command::new("valgrind");
        traced.args(["--tool=lackey", "--trace-mem=yes", "--trace-children=no"]);
        traced.arg(format!("--log-file={}", log.display())).arg(&link).args(arguments.split(' '));
        run(traced.current_dir(scratch.path()).stdout(Stdio::null()))?;
        let before = used.len();
        for line in BufReader::new(File::open(&log).map_err(|e| e.to_string())?).split(b'\n') {
            let line = line.map_err(|e| e.to_string())?;
            used.extend(executed(&line).and_then(|at| function_at(functions, at)).map(str::to_owned));
        }
        if !used.contains("main") {
            return Err(format!("the trace of '{name} {arguments}' does not show where the program lies"));
        }
        println!("{name} {arguments}: {} functions more", used.len() - before);
    }
    Ok(used)
}

/// The place in the program of an instruction that was executed.
fn executed(line: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(line.strip_prefix(b"I  ")?).ok()?;
    u64::from_str_radix(text.split(',').next()?, 16).ok()?.checked_sub(BASE)
}

fn function_at(functions: &[Function], at: u64) -> Option<&str> {
    let index = functions.partition_point(|function| function.start <= at).checked_sub(1)?;
    let function = functions.get(index)?;
    (at < function.end).then_some(&*function.name)
}

/// A name without what changes from build to build.
fn lasting(name: &str) -> String {
    let name = name.split(".llvm.").next().unwrap_or(name);
    match name.rsplit_once("17h") {
        Some((path, hash)) if name.starts_with("_ZN") && hash.len() == 17 => format!("{path}17h*"),
        _ => format!("{name}*"),
    }
}

/// The script: first the functions of which there are many of one name, each with its hash, then the others; last, for
/// programs whose hashes are others, all of those names.
fn script(functions: &[Function], used: &BTreeSet<String>) -> String {
    let mut sizes: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for function in functions {
        let size = function.end - function.start;
        let (own, all) = sizes.entry(lasting(&function.name)).or_default();
        *own += if used.contains(&function.name) { size } else { 0 };
        *all += size;
    }
    let is_narrow =
        |pattern: &String| sizes.get(pattern).is_some_and(|(own, all)| all - own <= (own / 4).max(2048));
    let patterns: BTreeSet<String> = used.iter().map(|name| lasting(name)).collect();
    let (narrow, broad): (Vec<String>, Vec<String>) = patterns.into_iter().partition(is_narrow);
    let exact = used.iter().filter(|name| !is_narrow(&lasting(name)));
    let exact = exact.map(|name| format!("{}*", name.split(".llvm.").next().unwrap_or(name)));
    let unseen = UNSEEN.map(str::to_owned);
    let mut text =
        "/* Functions that short commands run. Written by `cargo xtask startup-order`. */\n".to_owned();
    text += "SECTIONS\n{\n  .text_startup :\n  {\n";
    for pattern in exact.chain(narrow).chain(unseen).chain(broad) {
        let _ = writeln!(text, "    *(.text.{pattern} .text.unlikely.{pattern})");
    }
    text + "  }\n}\nINSERT BEFORE .text;\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_again_in_other_builds() {
        let name = "_ZN4core3fmt5write17h0123456789abcdefE";
        assert_eq!(lasting(name), "_ZN4core3fmt5write17h*");
        assert_eq!(lasting(&format!("{name}.llvm.77")), "_ZN4core3fmt5write17h*");
        assert_eq!(lasting("_RNvCs123_3std4exit.llvm.7"), "_RNvCs123_3std4exit*");
    }

    #[test]
    fn functions_of_one_name_are_told_apart_while_their_hashes_last() {
        let function = |start, len, name: &str| Function { start, end: start + len, name: name.to_owned() };
        let (one, other) = ("_ZN1a17h0123456789abcdefE", "_ZN1a17hfedcba9876543210E");
        let functions = [function(0, 100, one), function(100, 9000, other), function(9100, 10, "_ZN1b17h0E")];
        assert_eq!(function_at(&functions, 99), Some(one));
        assert_eq!(function_at(&functions, 9110), None);
        let script = script(&functions, &BTreeSet::from([one.to_owned()]));
        let (exact, all) = (script.find(".text._ZN1a17h0123456789abcdefE*"), script.find(".text._ZN1a17h* "));
        assert!(exact.unwrap() < all.unwrap() && !script.contains("fedcba") && !script.contains("_ZN1b"));
    }
}
