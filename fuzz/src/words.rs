//! The parsers of the command: image options, sizes, the lines of `zebu io`.

use arbitrary::{Result, Unstructured};
use zebu_engine::{Access, OpenOptions};
use zebu_cli::fuzzing::{
    MAX_REQUEST, control_request, image_options, io_options, lengths, offset, pattern, size, split_words,
};

/// Words that the parsers look for.
const WORDS: [&str; 32] = [
    "driver",
    "qcow2",
    "raw",
    "file",
    "file.filename",
    "filename",
    "cache.direct",
    "cache.no-flush",
    "read-only",
    "on",
    "off",
    "force-share",
    "cache-size",
    "l2-cache-size",
    "l2-cache-entry-size",
    "cache-clean-interval",
    "backing.driver",
    "backing.file.filename",
    "data-file.filename",
    "discard",
    "unmap",
    "zero-policy",
    "aio",
    "=",
    ",",
    ",,",
    "0x",
    "k",
    "1.5",
    "18446744073709551615",
    "-",
    "--",
];
/// The letters of the options of `read` and `write`.
const LETTERS: &str = "abBcCdfhnpP:qrs:uvzl:";

/// A line of known words, and of any characters.
fn line(u: &mut Unstructured<'_>) -> Result<String> {
    let mut line = String::new();
    for _ in 0..u.int_in_range(0..=16)? {
        match u.int_in_range(0..=3)? {
            0 | 1 => line.push_str(u.choose(&WORDS)?),
            2 => line.push(*u.choose(&[' ', '=', ',', '-', '.', '\t', '0', '7', 'e', 'E', 'T'])?),
            _ => line.push(u.arbitrary()?),
        }
    }
    Ok(line)
}

/// Any line is understood or refused in words, and what is understood is within its limits.
///
/// # Errors
/// The input is used up.
pub fn command(u: &mut Unstructured<'_>) -> Result<()> {
    let line = line(u)?;
    let access = if u.arbitrary()? { Access::ReadWrite } else { Access::ReadOnly };
    for disk in [None, Some("disk".as_ref())] {
        let options = OpenOptions::default().access(access);
        match image_options(&line, disk, options) {
            Ok(options) => assert_eq!(options.access, access, "{line:?}"),
            Err(message) => assert!(!message.is_empty(), "{line:?}"),
        }
    }
    let words = split_words(&line);
    for word in &words {
        if let Some(bytes) = size(word) {
            let exact: std::result::Result<u64, _> = word.parse();
            assert!(exact.is_err() || exact == Ok(bytes), "{word:?} is {bytes}");
        }
        assert!(offset(word).is_err() || offset(word) <= Ok(i64::MAX as u64), "{word:?}");
        let _ = pattern(word);
    }
    if let Some((operands, value)) = io_options(&words, LETTERS, 'P') {
        assert!(operands <= words.len());
        assert!(value.is_none_or(|value| line.contains(value)));
    }
    if let Ok(lengths) = lengths(&words) {
        assert!(lengths.iter().map(|len| *len as u64).sum::<u64>() <= MAX_REQUEST, "{line:?}");
    }
    Ok(())
}

/// Pieces of a line to a server.
const PIECES: [&str; 40] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    "\\u0000",
    ":",
    ",",
    "null",
    "true",
    "-1",
    "1e400",
    "512",
    "18446744073709551616",
    "\"id\":",
    "\"command\":",
    "\"export\":",
    "\"name\":",
    "\"size\":",
    "\"granularity\":",
    "\"target\":",
    "\"compression\":",
    "\"cluster-size\":",
    "\"bitmap\":",
    "\"previous\":",
    "\"on-error\":",
    "\"rate-limit\":",
    "\"stats\"",
    "\"resize\"",
    "\"cache-size\"",
    "\"flush\"",
    "\"snapshot-create\"",
    "\"snapshot-list\"",
    "\"backup-start\"",
    "\"backup-query\"",
    "\"bitmaps\"",
    "\"bitmap-add\"",
    "\"zstd\"",
    "\"request\"",
    "\"a\"",
];

/// Any line of the control socket is understood or refused in words; what is understood can be said again.
///
/// # Errors
/// The input is used up.
pub fn control(u: &mut Unstructured<'_>) -> Result<()> {
    let mut line: Vec<u8> = if u.arbitrary()? { br#"{"command":"#.to_vec() } else { Vec::new() };
    for _ in 0..u.int_in_range(0..=40)? {
        if u.ratio(7, 8)? {
            line.extend_from_slice(u.choose(&PIECES)?.as_bytes());
        } else {
            line.push(u.arbitrary()?);
        }
    }
    match control_request(&line) {
        Err(message) => assert!(!message.is_empty()),
        Ok((request, said)) => {
            let (again, _) = control_request(&said).expect("it was understood before");
            assert_eq!(again, request);
        }
    }
    Ok(())
}
