//! One line of commands, taken apart: words, options and operands.

/// The words of a line.
pub fn split_words(line: &str) -> Vec<&str> {
    line.split(' ')
        .map(|word| word.trim_matches(['\t', '\r', '\n']))
        .filter(|word| !word.is_empty())
        .collect()
}

/// The options and operands of one command.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Parsed<'a> {
    options: Vec<(char, &'a str)>,
    /// Words that are no options, in order.
    pub(crate) operands: Vec<&'a str>,
}

/// Why options can't be read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum OptionError {
    /// There is no such option.
    Invalid(char),
    /// The option has no argument.
    MissingArgument(char),
}

impl<'a> Parsed<'a> {
    /// Whether a letter was given.
    pub(crate) fn has(&self, letter: char) -> bool {
        self.options.iter().any(|(option, _)| *option == letter)
    }

    /// The argument of a letter; the last one counts.
    pub(crate) fn value(&self, letter: char) -> Option<&'a str> {
        self.options.iter().rev().find(|(option, _)| *option == letter).map(|(_, value)| *value)
    }
}

/// Reads options wherever they stand among the operands, as getopt of glibc does. `letters` has a `:` behind each
/// letter that takes an argument. `--` ends the options.
pub(crate) fn parse_options<'a>(words: &[&'a str], letters: &str) -> Result<Parsed<'a>, OptionError> {
    let mut parsed = Parsed::default();
    let mut words = words.iter();
    while let Some(word) = words.next() {
        if *word == "--" {
            parsed.operands.extend(words.by_ref());
            break;
        }
        let Some(group) = word.strip_prefix('-').filter(|group| !group.is_empty()) else {
            parsed.operands.push(word);
            continue;
        };
        let mut chars = group.chars();
        while let Some(letter) = chars.next() {
            let known = letters.find(letter).filter(|_| letter != ':').ok_or(OptionError::Invalid(letter))?;
            if letters[known + letter.len_utf8()..].starts_with(':') {
                let rest = chars.as_str();
                let value = if rest.is_empty() {
                    words.next().copied().ok_or(OptionError::MissingArgument(letter))?
                } else {
                    rest
                };
                parsed.options.push((letter, value));
                break;
            }
            parsed.options.push((letter, ""));
        }
    }
    Ok(parsed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_at_blanks() {
        assert_eq!(split_words("read  -q    0   1k "), ["read", "-q", "0", "1k"]);
        assert!(split_words("").is_empty());
    }

    #[test]
    fn options_may_be_joined_and_stand_anywhere() {
        let parsed = parse_options(&["-qP", "1", "0", "4k", "-v"], "CP:qv").unwrap();
        assert_eq!(parsed.operands, ["0", "4k"]);
        assert!(parsed.has('q') && parsed.has('v') && !parsed.has('C'));
        assert_eq!(parsed.value('P'), Some("1"));
        assert_eq!(parse_options(&["-P7", "-P8"], "P:").unwrap().value('P'), Some("8"));
    }

    #[test]
    fn two_dashes_end_the_options() {
        let parsed = parse_options(&["0", "--", "-1"], "q").unwrap();
        assert_eq!(parsed.operands, ["0", "-1"]);
        assert_eq!(parse_options(&["-"], "q").unwrap().operands, ["-"]);
    }

    #[test]
    fn wrong_options_are_named() {
        assert_eq!(parse_options(&["-z"], "q"), Err(OptionError::Invalid('z')));
        assert_eq!(parse_options(&["-:"], "P:"), Err(OptionError::Invalid(':')));
        assert_eq!(parse_options(&["-P"], "P:"), Err(OptionError::MissingArgument('P')));
    }
}
