//! The page docs/tutorial/embedder.md: its program, and its commands as they stand there.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The blocks of a language in the page.
fn blocks(language: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/tutorial/embedder.md");
    let page = std::fs::read_to_string(path).unwrap();
    let begin = format!("```{language}\n");
    page.split(&begin).skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

#[test]
fn the_program_of_the_page_is_the_one_that_is_compiled() {
    let program = include_str!("../examples/embedder.rs");
    let (_, program) = program.split_once("\n\n").unwrap();
    assert_eq!(blocks("rust"), [program]);
}

/// The commands work, with the compiled program in the place of `cargo run`, and the command that lies beside it.
#[test]
fn the_commands_of_the_page_work() {
    let own = std::env::current_exe().unwrap();
    let built = own.parent().and_then(Path::parent).unwrap().to_owned();
    let (program, zebu): (PathBuf, PathBuf) = (built.join("examples/embedder"), built.join("zebu"));
    assert!(zebu.is_file(), "{} is missing: cargo build -p zebu-cli", zebu.display());
    let scratch = tempfile::tempdir().unwrap();
    let lines = format!(
        "cargo() {{ test $1 = build || exec '{}'; }}\ntrap 'test -z \"$!\" || kill $! 2> /dev/null || :' EXIT\n{}",
        program.display(),
        blocks("sh").concat()
    );
    let path = format!("{}:{}", built.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new("sh");
    command.args(["-e", "-c", &lines]).current_dir(scratch.path()).env("PATH", path);
    let out = command.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    for words in ["No errors were found", "first", "read 65536/65536 bytes at offset 1048576"] {
        assert!(text.contains(words), "{words} is missing: {text}");
    }
}
