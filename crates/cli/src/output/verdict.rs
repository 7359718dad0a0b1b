//! Output of `info --verdict`.

use super::json::path_text;
use serde::Serialize;
use zebu_disks::printable;
use zebu_engine::verdict::{Concern, ConcernLevel, Verdict};

/// The verdict in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct VerdictNode<'a> {
    filename: String,
    format: &'static str,
    safe: bool,
    concerns: Vec<ConcernNode<'a>>,
}

#[derive(Debug, Serialize)]
struct ConcernNode<'a> {
    code: &'static str,
    severity: &'static str,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    traits: Vec<&'static str>,
}

impl<'a> VerdictNode<'a> {
    pub(crate) fn new(verdict: &'a Verdict) -> Self {
        let node = |concern: &'a Concern| ConcernNode {
            code: concern.code(),
            severity: severity(concern),
            message: concern.to_string(),
            name: concern.name(),
            traits: concern.traits().iter().map(|word| word.code()).collect(),
        };
        Self {
            filename: path_text(&verdict.filename),
            format: verdict.format.name(),
            safe: verdict.is_safe(),
            concerns: verdict.concerns.iter().map(node).collect(),
        }
    }
}

fn severity(concern: &Concern) -> &'static str {
    match concern.severity() {
        ConcernLevel::Note => "note",
        ConcernLevel::Unsafe => "unsafe",
    }
}

/// The verdict as text: a line for each concern.
pub(crate) fn verdict_text(verdict: &Verdict) -> String {
    let name = path_text(&verdict.filename);
    let mut text = format!("image: {}\nfile format: {}\n", printable(&name), verdict.format.name());
    text += if verdict.is_safe() { "verdict: safe\n" } else { "verdict: unsafe\n" };
    for concern in &verdict.concerns {
        text += &format!("{}: the image {}\n", severity(concern), printable(&concern.to_string()));
    }
    text
}
