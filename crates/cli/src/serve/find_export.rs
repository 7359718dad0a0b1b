//! Exports by the names in requests.

use std::sync::Arc;
use zebu_export::{Export, Exports};

/// Exports that are told of where another one is asked for.
const MOST_NAMES: usize = 8;

/// The export of that name.
pub(crate) fn find(exports: &Exports, name: &str) -> Result<Arc<Export>, String> {
    exports.find(name).ok_or_else(|| {
        let names: Vec<String> = exports.iter().map(|export| format!("'{}'", export.name())).collect();
        let more = if names.len() > MOST_NAMES { ", and more" } else { "" };
        let told = names[..names.len().min(MOST_NAMES)].join(", ");
        format!("there is no export '{name}' (there are {told}{more}; '' is the first one)")
    })
}
