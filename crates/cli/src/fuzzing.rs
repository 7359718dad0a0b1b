//! The parsers of the command, as the project's fuzz targets call them.

use crate::io::words;
use crate::serve::control_request::Request;
use std::path::Path;
use zebu_disks::{Context, ImageOpts, ImageSpec};
use zebu_engine::OpenOptions;

pub use crate::io::numbers::{MAX_REQUEST, lengths, offset, pattern};
pub use crate::io::words::split_words;

/// Applies the image options in `text` to `options`. With `disk` it is as for a command that names its file beside them.
///
/// # Errors
/// The message for the user.
pub fn image_options(text: &str, disk: Option<&Path>, options: OpenOptions) -> Result<OpenOptions, String> {
    let context = Context::default();
    let parsed = disk.map_or_else(
        || ImageOpts::parse(&context, text),
        |disk| ImageOpts::parse_for(&context, text, disk),
    )?;
    let mut spec = ImageSpec::new("disk".into(), options);
    parsed.apply(&context, &mut spec)?;
    Ok(spec.options)
}

/// Bytes, from a number with or without a unit.
pub fn size(text: &str) -> Option<u64> {
    zebu_disks::size::parse_size(text).ok()
}

/// Reads the options of a line of `zebu io`: how many words are no option, and the value of the option `letter`.
pub fn io_options<'a>(words: &[&'a str], letters: &str, letter: char) -> Option<(usize, Option<&'a str>)> {
    let parsed = words::parse_options(words, letters).ok()?;
    Some((parsed.operands.len(), parsed.value(letter)))
}

/// Reads a line of the control socket: the request for people, and as a line again.
///
/// # Errors
/// The message for the client.
///
/// # Panics
/// If a request can't be written.
pub fn control_request(line: &[u8]) -> Result<(String, Vec<u8>), String> {
    let request = Request::parse(line).map_err(|refusal| refusal.message)?;
    let again = serde_json::to_vec(&request).expect("requests have strings for keys");
    Ok((format!("{request:?}"), again))
}
