//! Help, completions, manual pages, and command lines that make no sense.

mod common;

use common::{Scratch, words};

const COMMANDS: &[&str] =
    &["create", "info", "check", "convert", "map", "measure", "compare", "resize", "clone", "bench", "io"];

#[test]
fn every_command_has_help_with_examples() {
    let scratch = Scratch::new();
    let overview = scratch.zebu(&["--help"]).ok().stdout;
    for command in COMMANDS {
        assert!(overview.contains(&format!("  {command}")), "{command} is not listed");
        for flag in ["--help", "-h"] {
            let help = scratch.zebu(&[command, flag]).ok();
            assert!(help.stdout.contains("Examples:\n"), "{command}");
            assert!(help.stdout.contains(&format!("zebu {command} ")), "{command}");
            assert_eq!(help.stderr, "");
        }
    }
    for hidden in ["completions", "manpage"] {
        assert!(!overview.contains(hidden), "{hidden} is listed");
    }
    assert!(scratch.zebu(&["--version"]).ok().stdout.starts_with("zebu "));
}

#[test]
fn wrong_command_lines_point_at_the_help() {
    let scratch = Scratch::new();
    for (line, hint) in [
        ("", "Try 'zebu --help' for more information"),
        ("nosuch", "Try 'zebu --help' for more information"),
        ("--nosuch", "Try 'zebu --help' for more information"),
        ("create --nosuch", "Try 'zebu create --help' for more information"),
        ("info", "Try 'zebu info --help' for more information"),
        ("resize a", "Try 'zebu resize --help' for more information"),
        ("info --allow-refs some a", "Try 'zebu info --help' for more information"),
        ("info --allow-refs none --allow-refs all a", "Try 'zebu info --help' for more information"),
        ("info --slice-size 3k a", "Try 'zebu info --help' for more information"),
        ("convert --zero-policy never a b", "Try 'zebu convert --help' for more information"),
        ("io -U a", "Try 'zebu io --help' for more information"),
    ] {
        let ran = scratch.zebu(&words(line));
        ran.fails_naming(1, &[]);
        assert_eq!(ran.stderr.lines().nth(1), Some(hint), "{line}: {ran:#?}");
        assert_eq!(ran.stderr.lines().count(), 2, "{line}: {ran:#?}");
        assert_eq!(ran.stdout, "", "{line}");
    }
}

#[test]
fn completions_exist_for_shells() {
    let scratch = Scratch::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = scratch.zebu(&["completions", shell]).ok().stdout;
        for command in COMMANDS {
            assert!(script.contains(command), "{shell}: {command}");
        }
    }
    let script = scratch.zebu(&["completions", "bash"]).ok().stdout;
    scratch.write("zebu.bash", script.as_bytes());
    assert_eq!(scratch.run("bash", &["-n", "zebu.bash"]).code, Some(0));
}

#[test]
fn there_is_a_manual_page_for_every_command() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.file("man")).unwrap();
    scratch.zebu(&["manpage", "man"]).ok();
    for name in COMMANDS.iter().map(|command| format!("zebu-{command}")).chain(["zebu".to_owned()]) {
        let page = String::from_utf8(scratch.read(&format!("man/{name}.1"))).unwrap();
        assert!(page.contains(".TH") && page.contains(".SH SYNOPSIS"), "{name}");
    }
    assert!(scratch.zebu(&["manpage"]).ok().stdout.contains(".TH zebu"));
    scratch.zebu(&["manpage", "nodir"]).fails_naming(1, &["nodir"]);
}

#[test]
fn verbose_tells_what_runs_the_io() {
    let scratch = Scratch::new();
    scratch.zebu(&words("create -q -f qcow2 a.qcow2 1M")).ok();
    let ran = scratch.zebu(&words("info -v --aio threads a.qcow2")).ok();
    assert_eq!(ran.stderr, "zebu: I/O runs on threads\n");
    let ran = scratch.zebu(&words("info -v a.qcow2")).ok();
    let fallback = ran.stderr.contains("I/O runs on threads; io_uring is not used: ");
    assert!(fallback || ran.stderr == "zebu: I/O runs on io_uring\n", "{ran:#?}");
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let scratch = Scratch::new();
    let script = format!(
        "{} --help | head -c 1 > /dev/null; {0} completions bash | head -c 1",
        env!("CARGO_BIN_EXE_zebu")
    );
    let ran = scratch.run("bash", &["-c", &script]);
    assert_eq!(ran.stderr, "", "{ran:#?}");
}
