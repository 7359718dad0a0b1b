//! Which commands there are, how many arguments they take, and their help.

use std::fmt::Write as _;

/// A command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Name {
    Abort,
    AioFlush,
    AioRead,
    AioWrite,
    Alloc,
    Break,
    Close,
    Discard,
    Flush,
    Help,
    Info,
    Length,
    Map,
    Open,
    Quit,
    Read,
    Readv,
    RemoveBreak,
    Reopen,
    Resume,
    Sigraise,
    Sleep,
    Truncate,
    WaitBreak,
    Write,
    Writev,
}

/// Whether a command needs an open image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// It does not.
    Nothing,
    /// An open image.
    Image,
    /// An image that is open for writing.
    WritableImage,
}

/// Properties of a command, known before it runs.
#[derive(Debug)]
pub(crate) struct CommandInfo {
    pub(crate) name: Name,
    pub(crate) text: &'static str,
    alias: Option<&'static str>,
    arguments: &'static str,
    min: usize,
    max: Option<usize>,
    pub(crate) needs: Needs,
    summary: &'static str,
    details: &'static str,
}

const REPORT_FLAGS: &str = "\
 -C  report in one line of numbers
 -q  report nothing
 -r  take the buffer from the worker's own pool, which is always done
";
const READ_FLAGS: &str = " -P  compare what is read with this byte\n -v  dump what is read\n";
const WRITE_FLAGS: &str =
    " -P  fill the buffer with this byte instead of 0xcd\n -f  the data is durable when the command ends\n";

macro_rules! command {
    ($name:ident, $text:literal, $alias:expr, $arguments:literal, $min:literal, $max:expr, $needs:ident, $summary:literal, $details:expr) => {
        CommandInfo {
            name: Name::$name,
            text: $text,
            alias: $alias,
            arguments: $arguments,
            min: $min,
            max: $max,
            needs: Needs::$needs,
            summary: $summary,
            details: $details,
        }
    };
}

/// All commands, in the order of their names.
const COMMANDS: &[CommandInfo] = &[
    command!(Abort, "abort", None, "", 0, Some(0), Nothing, "crash, with a core dump where these are on", ""),
    command!(AioFlush, "aio_flush", None, "", 0, Some(0), Image, "wait for all asynchronous requests", ""),
    command!(
        AioRead,
        "aio_read",
        None,
        "[-Cqrv] [-P pattern] off len [len..]",
        2,
        None,
        Image,
        "begin to read, and go on with the next command",
        READ_FLAGS
    ),
    command!(
        AioWrite,
        "aio_write",
        None,
        "[-Cfqruz] [-P pattern] off len [len..]",
        2,
        None,
        WritableImage,
        "begin to write, and go on with the next command",
        " -P  fill the buffer with this byte instead of 0xcd\n -f  the data is durable at the end\n -z  write zeroes\n -u  with -z, space may be given back\n"
    ),
    command!(
        Alloc,
        "alloc",
        Some("a"),
        "offset [count]",
        1,
        Some(2),
        Image,
        "count what is allocated in a range",
        ""
    ),
    command!(
        Break,
        "break",
        None,
        "event tag",
        2,
        Some(2),
        Image,
        "stop the next request of an event of blkdebug, under the name tag",
        ""
    ),
    command!(Close, "close", Some("c"), "", 0, Some(0), Image, "close the image", ""),
    command!(Discard, "discard", Some("d"), "[-Cq] off len", 2, None, WritableImage, "give a range up", ""),
    command!(Flush, "flush", Some("f"), "", 0, Some(0), Image, "make everything written durable", ""),
    command!(Help, "help", Some("?"), "[command]", 0, Some(1), Nothing, "tell about one or all commands", ""),
    command!(Info, "info", Some("i"), "", 0, Some(0), Image, "tell about the image", ""),
    command!(Length, "length", Some("l"), "", 0, Some(0), Image, "tell the size of the disk", ""),
    command!(Map, "map", None, "", 0, Some(1), Image, "tell which ranges are allocated", ""),
    command!(
        Open,
        "open",
        Some("o"),
        "[-rsnCU] [-t cache] [-d discard] [-o options] [path]",
        0,
        None,
        Nothing,
        "open an image",
        " -r  for reading only\n -n  without the page cache, as -t none\n -s  changes go into a temporary image and are lost in the end\n -C  what is read from backing files stays in the image\n -U  without locks\n -t  with this cache mode\n -d  discards: ignore or unmap\n -o  with these image options\n"
    ),
    command!(Quit, "quit", Some("q"), "", 0, Some(0), Nothing, "end", ""),
    command!(
        Read,
        "read",
        Some("r"),
        "[-bCqrv] [-P pattern [-s off] [-l len]] off len",
        2,
        None,
        Image,
        "read a range",
        " -P  compare what is read with this byte\n -s  begin to compare there (with -P)\n -l  compare so many bytes (with -P)\n -v  dump what is read\n -b  read from the VM state\n -p  has no meaning\n"
    ),
    command!(
        Readv,
        "readv",
        None,
        "[-Cqrv] [-P pattern] off len [len..]",
        2,
        None,
        Image,
        "read a range into several buffers",
        READ_FLAGS
    ),
    command!(
        RemoveBreak,
        "remove_break",
        None,
        "tag",
        1,
        Some(1),
        Image,
        "take a breakpoint away, and resume what it has stopped",
        ""
    ),
    command!(
        Reopen,
        "reopen",
        None,
        "[-r|-w] [-c cache] [-o options]",
        0,
        None,
        Image,
        "open the image again, in another way",
        " -r  for reading only\n -w  for reading and writing\n -c  with this cache mode\n -o  with these image options\n"
    ),
    command!(Resume, "resume", None, "tag", 1, Some(1), Image, "let a stopped request go on", ""),
    command!(
        Sigraise,
        "sigraise",
        None,
        "signal",
        1,
        Some(1),
        Nothing,
        "raise a signal, given by its number",
        ""
    ),
    command!(Sleep, "sleep", None, "milliseconds", 1, Some(1), Nothing, "wait", ""),
    command!(
        Truncate,
        "truncate",
        Some("t"),
        "[-m mode] off",
        1,
        Some(3),
        WritableImage,
        "change the size of the disk",
        " -m  preallocation: off, metadata, falloc, full\n"
    ),
    command!(
        WaitBreak,
        "wait_break",
        None,
        "tag",
        1,
        Some(1),
        Image,
        "wait until a request is stopped under this name",
        ""
    ),
    command!(
        Write,
        "write",
        Some("w"),
        "[-bcCfnqruz] [-P pattern | -s source_file] off len",
        2,
        None,
        WritableImage,
        "write a range",
        " -P  fill the buffer with this byte instead of 0xcd\n -s  fill the buffer with the content of this file\n -b  write into the VM state\n -c  write compressed clusters\n -z  write zeroes\n -u  with -z, space may be given back\n -n  with -z, fail where it would take as long as writing\n -f  the data is durable when the command ends\n -p  has no meaning\n"
    ),
    command!(
        Writev,
        "writev",
        None,
        "[-Cfqr] [-P pattern] off len [len..]",
        2,
        None,
        WritableImage,
        "write a range from several buffers",
        WRITE_FLAGS
    ),
];

/// Commands of qemu-io that are refused, with the reason.
const REFUSED: &[(&str, &str)] = &[
    ("zone_append", "zoned devices are not supported"),
    ("zone_close", "zoned devices are not supported"),
    ("zone_finish", "zoned devices are not supported"),
    ("zone_open", "zoned devices are not supported"),
    ("zone_report", "zoned devices are not supported"),
    ("zone_reset", "zoned devices are not supported"),
];

/// The command of that name or alias.
pub(crate) fn find(word: &str) -> Option<&'static CommandInfo> {
    COMMANDS.iter().find(|command| command.text == word || command.alias == Some(word))
}

/// The message about a word that is no command.
pub(crate) fn unknown(word: &str) -> String {
    match REFUSED.iter().find(|(name, _)| *name == word) {
        Some((_, reason)) => format!("command \"{word}\" is not supported: {reason}"),
        None => format!("command \"{word}\" not found"),
    }
}

impl CommandInfo {
    /// The line of the command in the list of commands.
    pub(crate) fn line(&self) -> String {
        let mut line = self.text.to_owned();
        if !self.arguments.is_empty() {
            let _ = write!(line, " {}", self.arguments);
        }
        let _ = writeln!(line, " -- {}", self.summary);
        line
    }

    /// Everything about the command.
    pub(crate) fn help(&self) -> String {
        let mut text = self.line();
        if !self.details.is_empty() {
            text.push('\n');
            text.push_str(self.details);
            if self.arguments.contains('C') && self.arguments.contains('r') {
                text.push_str(REPORT_FLAGS);
            }
            text.push('\n');
        }
        text
    }

    /// Whether so many words may follow the command; else what is said of them.
    pub(crate) fn check_count(&self, count: usize) -> Result<(), String> {
        if count >= self.min && self.max.is_none_or(|max| count <= max) {
            return Ok(());
        }
        let expected = match self.max {
            None => format!("at least {}", self.min),
            Some(max) if max == self.min => max.to_string(),
            Some(max) => format!("between {} and {max}", self.min),
        };
        Err(format!("bad argument count {count} to {}, expected {expected} arguments", self.text))
    }
}

/// The list of all commands.
pub(crate) fn help_all() -> String {
    let mut text: String = COMMANDS.iter().map(CommandInfo::line).collect();
    text.push_str("\nUse 'help commandname' for extended help.\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_sorted_and_found_by_alias_too() {
        assert!(COMMANDS.is_sorted_by_key(|command| command.text));
        assert_eq!(find("w").map(|command| command.name), Some(Name::Write));
        assert_eq!(find("?").map(|command| command.name), Some(Name::Help));
        assert!(find("zone_open").is_none());
    }

    #[test]
    fn wrong_numbers_of_arguments_are_told() {
        let told = |name: &str, count| find(name).unwrap().check_count(count).unwrap_err();
        assert_eq!(told("read", 1), "bad argument count 1 to read, expected at least 2 arguments");
        assert_eq!(told("flush", 1), "bad argument count 1 to flush, expected 0 arguments");
        assert_eq!(told("alloc", 3), "bad argument count 3 to alloc, expected between 1 and 2 arguments");
        assert!(find("read").unwrap().check_count(9).is_ok());
    }

    #[test]
    fn commands_that_do_not_exist_here_say_why() {
        assert_eq!(unknown("nosuch"), "command \"nosuch\" not found");
        assert!(unknown("zone_open").contains("zoned"));
    }
}
