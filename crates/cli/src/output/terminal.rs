//! Abilities of what standard output is shown on.

use std::io::IsTerminal;

/// The characters that are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Charset {
    Ascii,
    Unicode,
}

/// Whether colours are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Colours {
    Shown,
    None,
}

/// Characters, colours and columns that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Terminal {
    pub(crate) charset: Charset,
    pub(crate) colours: Colours,
    pub(crate) columns: usize,
}

impl Terminal {
    /// Columns where standard output is no terminal.
    const COLUMNS: usize = 80;

    /// Standard output, by the environment: the locale of characters, `NO_COLOR`, `TERM`.
    pub(crate) fn of_standard_output() -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(variable).unwrap_or_default();
        let locale = locale.to_ascii_lowercase();
        let is_dumb = variable("NO_COLOR").is_some() || variable("TERM").is_none_or(|term| term == "dumb");
        let out = std::io::stdout();
        let size = rustix::termios::tcgetwinsize(&out).ok().map(|size| usize::from(size.ws_col));
        Self {
            charset: if locale.contains("utf-8") || locale.contains("utf8") {
                Charset::Unicode
            } else {
                Charset::Ascii
            },
            colours: if is_dumb || !out.is_terminal() { Colours::None } else { Colours::Shown },
            columns: size.filter(|columns| *columns > 0).unwrap_or(Self::COLUMNS),
        }
    }
}
