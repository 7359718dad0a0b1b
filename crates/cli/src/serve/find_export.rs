//! Exports by the names in requests.

use crate::suggestion::most_similar;
use std::sync::Arc;
use zebu_disks::printable;
use zebu_export::{Export, Exports};

/// Exports that are told of where another one is asked for.
const MOST_NAMES: usize = 8;

/// The export of that name.
pub(crate) fn find(exports: &Exports, name: &str) -> Result<Arc<Export>, String> {
    exports.find(name).ok_or_else(|| not_found(name, &names(exports), "'' is the first one"))
}

/// The export that has this name itself: '' is that of the first one only if that has no other name.
pub(crate) fn find_named(exports: &Exports, name: &str) -> Result<Arc<Export>, String> {
    let named = exports.find(name).filter(|export| export.name() == name);
    named.ok_or_else(|| not_found(name, &names(exports), "name the one that is meant"))
}

fn names(exports: &Exports) -> Vec<String> {
    exports.iter().map(|export| export.name().to_owned()).collect()
}

/// The message where no export has that name: the one that was probably meant, else those that there are, and `advice`.
fn not_found(name: &str, names: &[String], advice: &str) -> String {
    let known: Vec<&str> = names.iter().map(String::as_str).collect();
    let name = printable(name);
    if let Some(similar) = most_similar(&name, &known) {
        return format!("there is no export '{name}' (did you mean '{}'?)", printable(similar));
    }
    if known.is_empty() {
        return format!("there is no export '{name}' (there are none)");
    }
    let told: Vec<String> =
        known.iter().take(MOST_NAMES).map(|name| format!("'{}'", printable(name))).collect();
    let more = if known.len() > MOST_NAMES { ", and more" } else { "" };
    format!("there is no export '{name}' (there are {}{more}; {advice})", told.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(name: &str, names: &[&str]) -> String {
        not_found(
            name,
            &names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>(),
            "'' is the first one",
        )
    }

    #[test]
    fn an_export_that_was_probably_meant_is_told() {
        assert_eq!(told("wbe", &["db", "web"]), "there is no export 'wbe' (did you mean 'web'?)");
        let listed = "there is no export 'x' (there are 'db', 'web'; '' is the first one)";
        assert_eq!(told("x", &["db", "web"]), listed);
        assert!(told("x", &["disk"; 9]).contains("'disk', and more;"));
        assert_eq!(told("x", &[]), "there is no export 'x' (there are none)");
    }
}
