//! Help, completions, manual pages, and command lines that make no sense.

use crate::common::{Scratch, words};

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
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = scratch.zebu(&["completions", shell]).ok().stdout;
        for hidden in ["clean-up-in-the-end", "manpage"] {
            assert!(!script.contains(hidden), "{shell} lists {hidden}");
        }
    }
    // What bash offers after an option that takes one of a few words.
    let read = words("qcow2 raw luks vmdk vhdx vpc vdi qed parallels qcow cloop dmg");
    let made = words("qcow2 raw luks vmdk vhdx vpc vdi");
    for (line, offered) in [
        ("zebu convert -f", read.clone()),
        ("zebu convert -O", made.clone()),
        ("zebu create -F", read),
        ("zebu convert -t", vec!["none", "writeback", "writethrough", "directsync", "unsafe"]),
        ("zebu dd --output-format", made),
    ] {
        let script = format!(
            "source <({} completions bash); COMP_WORDS=({line} ''); COMP_CWORD=3; _zebu zebu '' '{}'; echo ${{COMPREPLY[@]}}",
            env!("CARGO_BIN_EXE_zebu"),
            line.split(' ').next_back().unwrap()
        );
        let ran = scratch.run("bash", &["-c", &script]);
        assert_eq!(words(&ran.stdout), offered, "{line}: {ran:#?}");
    }
    let script = scratch.zebu(&["completions", "bash"]).ok().stdout;
    scratch.write("zebu.bash", script.as_bytes());
    assert_eq!(scratch.run("bash", &["-n", "zebu.bash"]).code, Some(0));
}

#[test]
fn there_is_a_manual_page_for_every_command() {
    let scratch = Scratch::new();
    scratch.zebu(&["manpage", "share/man"]).ok();
    for name in COMMANDS.iter().map(|command| format!("zebu-{command}")).chain(["zebu".to_owned()]) {
        let page = String::from_utf8(scratch.read(&format!("share/man/{name}.1"))).unwrap();
        assert!(page.contains(".TH") && page.contains(".SH SYNOPSIS"), "{name}");
    }
    assert!(scratch.zebu(&["manpage"]).ok().stdout.contains(".TH zebu"));
    scratch.zebu(&["manpage", "share/man"]).ok();
    scratch.write("file", b"");
    scratch.zebu(&["manpage", "file/man"]).fails_naming(1, &["file/man"]);
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

#[test]
fn help_lists_no_option_that_is_refused() {
    let scratch = Scratch::new();
    let help = scratch.zebu(&words("rebase --help")).ok().stdout;
    assert!(!help.contains("-U") && !help.contains("force-share"), "{help}");
    scratch.zebu(&words("rebase -U -b '' a.qcow2")).fails_naming(1, &["-U can't be used"]);
    assert!(!scratch.zebu(&words("--help")).ok().stdout.contains("any format"));
}

/// Runs a line of shell on a terminal of so many columns. Gives what the terminal got.
fn on_terminal(scratch: &Scratch, columns: u16, line: &str) -> String {
    let script = format!("stty cols {columns} rows 24; {line}");
    let ran = scratch.run("script", &["-q", "-e", "-c", &script, "/dev/null"]);
    assert_eq!(ran.code, Some(0), "{ran:#?}");
    ran.stdout
}

#[test]
fn the_bar_fits_the_terminal() {
    let scratch = Scratch::new();
    scratch.write("disk.raw", &crate::common::noise(4, 48 << 20));
    let zebu = env!("CARGO_BIN_EXE_zebu");
    for columns in [20, 40, 80, 200] {
        let line = format!("{zebu} convert -p --copy buffers -r 24M -f raw -O raw disk.raw out");
        let screen = on_terminal(&scratch, columns, &line);
        let lines: Vec<&str> =
            screen.split(['\r', '\n']).map(str::trim_end).filter(|l| !l.is_empty()).collect();
        assert!(lines.len() > 2, "{screen:?}");
        let (done, bars) = if columns >= 80 {
            lines.split_last().map(|(last, bars)| (Some(*last), bars)).unwrap()
        } else {
            (None, &lines[..])
        };
        // What was done, below the bar.
        if let Some(done) = done {
            assert!(done.starts_with("48 MiB -> 48 MiB in ") && done.ends_with("MiB/s"), "{screen:?}");
        }
        for line in bars.iter().filter(|line| line.contains('%')) {
            assert!(line.chars().count() < columns.into(), "{columns}: {line:?}");
            assert!(
                !line.contains("0 B/s") && !line.contains(" MB/s") && !line.contains(" 0s left"),
                "{line:?}"
            );
        }
        // Each is drawn over the one before, in one line of the screen.
        assert!(screen.matches('\n').count() <= 2, "{screen:?}");
        assert!(!screen.contains('\u{1b}'), "{screen:?}");
        assert!(lines[lines.len() - 2..].iter().any(|line| line.contains("100%")), "{screen:?}");
        assert_eq!(columns >= 40, screen.contains("iB/s"), "{screen:?}");
        std::fs::remove_file(scratch.file("out")).unwrap();
    }
}

#[test]
fn percentages_go_to_the_program_that_reads_them() {
    let scratch = Scratch::new();
    scratch.write("disk.raw", &crate::common::noise(4, 1 << 20));
    let zebu = env!("CARGO_BIN_EXE_zebu");
    let screen =
        on_terminal(&scratch, 80, &format!("{zebu} convert -p -f raw -O raw disk.raw out | cat > read"));
    assert_eq!(screen, "");
    assert!(String::from_utf8(scratch.read("read")).unwrap().ends_with("    (100.00/100%)\r\n"));
    // A report for programs is not mixed with them.
    let line = format!("{zebu} convert --force -p --output=json -f raw -O raw disk.raw out | cat > read");
    assert!(on_terminal(&scratch, 80, &line).contains("100%"));
    let report: serde_json::Value = serde_json::from_slice(&scratch.read("read")).unwrap();
    assert_eq!(report["total"], 1 << 20);
    let ran = scratch.zebu(&words("convert -p --output=json -f raw -O raw disk.raw out")).ok();
    assert_eq!(ran.json()["total"], 1 << 20);
    assert!(ran.stderr.contains("\"percent\":100.0"), "{ran:#?}");
}
