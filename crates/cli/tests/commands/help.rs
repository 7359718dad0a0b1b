//! `zebu help`.

use crate::common::{Scratch, words};

/// Lines of a short help: some more than a usual terminal has.
const MOST_LINES: usize = 64;

#[test]
fn commands_and_topics_are_told_about() {
    let scratch = Scratch::new();
    let all = scratch.zebu(&words("help")).ok().stdout;
    assert_eq!(all, scratch.zebu(&words("--help")).ok().stdout);
    let convert = scratch.zebu(&words("help convert")).ok().stdout;
    assert_eq!(convert, scratch.zebu(&words("convert --help")).ok().stdout);
    let topics = scratch.zebu(&words("help topics")).ok().stdout;
    for line in topics.lines().skip(1) {
        let topic = line.split_whitespace().next().unwrap();
        let text = scratch.zebu(&["help", topic]).ok().stdout;
        assert!(text.lines().count() > 4, "{topic}: {text}");
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{topic}: {text}");
    }
    scratch.zebu(&words("help nosuch")).fails_naming(1, &["'nosuch'", "help topics"]);
    scratch.zebu(&words("help convrt")).fails_naming(1, &["'convrt'", "did you mean 'convert'?"]);
}

/// The short help fits a screen, and says where the rest is.
#[test]
fn short_help_is_short() {
    let scratch = Scratch::new();
    let all = scratch.zebu(&words("-h")).ok().stdout;
    let listed = all.lines().skip_while(|line| *line != "Commands:").skip(1);
    let commands: Vec<&str> = listed
        .take_while(|line| !line.is_empty())
        // Others go on with what is said of a command.
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(commands.contains(&"convert") && commands.contains(&"top"), "{commands:?}");
    for command in commands {
        let help = scratch.zebu(&[command, "-h"]).ok().stdout;
        assert!(help.lines().count() <= MOST_LINES, "{command}: {} lines", help.lines().count());
        assert!(help.ends_with("(everything)\n") && help.contains("zebu help options"), "{help}");
    }
    let options = scratch.zebu(&words("help options")).ok().stdout;
    for option in ["--image-opts", "--allow-refs", "--object", "--cache-dir", "--force-share", "--aio"] {
        assert!(options.contains(option), "{option}: {options}");
    }
}
