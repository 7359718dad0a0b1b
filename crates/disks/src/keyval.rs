//! `key=value,key=value` lists, as `-o` and `--image-opts` take them. A comma within a value is written twice.

use crate::secrets_in_names::without_secrets;
use std::ffi::OsStr;

/// Why a list can't be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyvalError {
    /// An item without `=`.
    NoValue(String),
    /// An item without a name.
    NoKey(String),
}

impl std::fmt::Display for KeyvalError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            KeyvalError::NoValue(item) => {
                let item = without_secrets(OsStr::new(item));
                write!(f, "Expected '=' after parameter '{item}' (a comma within a value is written ',,')")
            }
            KeyvalError::NoKey(item) => write!(f, "Parameter name missing before '{item}'"),
        }
    }
}

impl std::error::Error for KeyvalError {}

/// The pairs of a list in their order. Empty items are skipped.
pub fn parse_keyval(text: &str) -> Result<Vec<(String, String)>, KeyvalError> {
    split_pairs(text, |item| Err(KeyvalError::NoValue(item)))
}

fn split_pairs(
    text: &str,
    without_value: impl Fn(String) -> Result<(String, String), KeyvalError>,
) -> Result<Vec<(String, String)>, KeyvalError> {
    let mut pairs = Vec::new();
    for item in split_items(text) {
        if item.is_empty() {
            continue;
        }
        match item.split_once('=') {
            Some(("", _)) => return Err(KeyvalError::NoKey(item)),
            Some((key, value)) => pairs.push((key.to_owned(), value.to_owned())),
            None => pairs.push(without_value(item)?),
        }
    }
    Ok(pairs)
}

/// The pairs of a list of options: one without `=` is a switch that is on, as with qemu-img.
pub fn parse_options(text: &str) -> Result<Vec<(String, String)>, KeyvalError> {
    split_pairs(text, |switch| Ok((switch, "on".to_owned())))
}

/// Whether a `-o` argument asks for the list of options instead of giving some.
pub fn asks_for_help(text: &str) -> bool {
    split_items(text).iter().any(|item| item == "help" || item == "?")
}

fn split_items(text: &str) -> Vec<String> {
    let mut items = Vec::new();
    let mut item = String::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == ',' {
            if chars.next_if_eq(&',').is_some() {
                item.push(',');
            } else {
                items.push(std::mem::take(&mut item));
            }
        } else {
            item.push(c);
        }
    }
    items.push(item);
    items
}

/// `on` or `off` of the parameter `key`.
pub fn parse_switch(key: &str, value: &str) -> Result<bool, String> {
    match value {
        "on" | "yes" | "true" | "y" => Ok(true),
        "off" | "no" | "false" | "n" => Ok(false),
        _ => Err(format!("Parameter '{key}' expects 'on' or 'off', not '{value}'")),
    }
}

/// A size as value of the parameter `key`.
pub fn parse_size_value(key: &str, value: &str) -> Result<u64, String> {
    crate::size::parse_size(value).map_err(|error| format!("Parameter '{key}': '{value}': {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &str) -> Vec<(String, String)> {
        parse_keyval(text).unwrap()
    }

    #[test]
    fn doubled_commas_belong_to_the_value() {
        assert_eq!(
            pairs("file.filename=a,,b,driver=raw"),
            [("file.filename".into(), "a,b".into()), ("driver".into(), "raw".into())]
        );
        assert_eq!(pairs("a=1,,,b=2"), [("a".into(), "1,".into()), ("b".into(), "2".into())]);
    }

    #[test]
    fn values_may_hold_equal_signs_and_be_empty() {
        assert_eq!(pairs("a=b=c,d="), [("a".into(), "b=c".into()), ("d".into(), String::new())]);
        assert!(pairs("").is_empty());
    }

    #[test]
    fn items_without_name_or_value_are_refused() {
        assert_eq!(parse_keyval("a=1,b"), Err(KeyvalError::NoValue("b".into())));
        assert_eq!(parse_keyval("=1"), Err(KeyvalError::NoKey("=1".into())));
    }

    #[test]
    fn an_option_without_a_value_is_on() {
        let pairs = parse_options("compat=1.1,lazy_refcounts").unwrap();
        assert_eq!(pairs[1], ("lazy_refcounts".to_owned(), "on".to_owned()));
        assert_eq!(parse_options("=1"), Err(KeyvalError::NoKey("=1".into())));
    }

    #[test]
    fn help_is_seen_among_options() {
        assert!(asks_for_help("help"));
        assert!(asks_for_help("cluster_size=4k,?"));
        assert!(!asks_for_help("backing_file=help"));
    }

    #[test]
    fn switches() {
        assert_eq!(parse_switch("a", "on"), Ok(true));
        assert_eq!(parse_switch("a", "off"), Ok(false));
        assert!(parse_switch("nocow", "perhaps").unwrap_err().contains("'nocow' expects 'on' or 'off'"));
    }
}
