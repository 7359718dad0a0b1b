//! Untrusted text for a terminal: an image can't send it control codes, nor write a line of its own.

use std::borrow::Cow;

/// `text` with escapes for control characters, line ends included, and for those that change the order of the rest.
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(is_control) {
        return Cow::Borrowed(text);
    }
    let mut line = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_control(c) {
            line.extend(c.escape_default());
        } else {
            line.push(c);
        }
    }
    Cow::Owned(line)
}

/// Control characters of both sets, separators of lines, and the marks of bidirectional text.
pub fn is_control(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_the_cursor_or_the_text_is_escaped() {
        for (text, shown) in [
            ("a name", "a name"),
            ("größe \u{1f9a7}", "größe \u{1f9a7}"),
            ("x\u{1b}[31m\nfake", "x\\u{1b}[31m\\nfake"),
            ("\u{9b}2J\r\t\u{7f}", "\\u{9b}2J\\r\\t\\u{7f}"),
            ("\u{202e}gpj", "\\u{202e}gpj"),
        ] {
            assert_eq!(printable(text), shown);
        }
    }
}
