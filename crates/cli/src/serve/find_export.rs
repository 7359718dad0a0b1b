//! Exports by the names in requests.

use crate::suggestion::most_similar;
use std::sync::Arc;
use zebu_disks::printable;
use zebu_export::{Export, Exports};

/// Exports that are told of where another one is asked for.
const MOST_NAMES: usize = 8;

/// The export of that name.
pub(crate) fn find(exports: &Exports, name: &str) -> Result<Arc<Export>, String> {
    exports.find(name).ok_or_else(|| {
        let names: Vec<String> = exports.iter().map(|export| export.name().to_owned()).collect();
        not_found(name, &names)
    })
}

/// The message where no export has that name: the one that was probably meant, else those that there are.
fn not_found(name: &str, names: &[String]) -> String {
    let known: Vec<&str> = names.iter().map(String::as_str).collect();
    let name = printable(name);
    if let Some(similar) = most_similar(&name, &known) {
        return format!("there is no export '{name}' (did you mean '{}'?)", printable(similar));
    }
    let told: Vec<String> =
        known.iter().take(MOST_NAMES).map(|name| format!("'{}'", printable(name))).collect();
    let more = if known.len() > MOST_NAMES { ", and more" } else { "" };
    format!("there is no export '{name}' (there are {}{more}; '' is the first one)", told.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(name: &str, names: &[&str]) -> String {
        not_found(name, &names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn an_export_that_was_probably_meant_is_told() {
        assert_eq!(told("wbe", &["db", "web"]), "there is no export 'wbe' (did you mean 'web'?)");
        let listed = "there is no export 'x' (there are 'db', 'web'; '' is the first one)";
        assert_eq!(told("x", &["db", "web"]), listed);
        assert!(told("x", &["disk"; 9]).contains("'disk', and more;"));
    }
}
