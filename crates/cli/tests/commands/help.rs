//! `zebu help`.

use crate::common::{Scratch, words};

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
