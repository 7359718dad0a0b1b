//! Names of images in messages, without what may be secret in them.

use std::ffi::OsStr;
use zebu_remote::http::HttpUrl;

/// The text of a name on the command line: a path, a URL, image options or JSON. Users, passwords and queries of web URLs are
/// left out, and so is all that follows the key of a cookie.
pub(crate) fn without_secrets(name: &OsStr) -> String {
    let name = name.to_string_lossy();
    let lower = name.to_ascii_lowercase();
    let cookie = ["cookie=", "cookie\""].iter().filter_map(|key| lower.find(key)).min();
    let (name, end) = match cookie {
        // Lower case has the same length in bytes.
        Some(at) => (&name[..at], "cookie..."),
        None => (&*name, ""),
    };
    let mut shown = String::with_capacity(name.len());
    let is_border = |c: char| matches!(c, ',' | '"' | '\'' | ' ');
    for piece in name.split_inclusive(is_border) {
        let url = piece.trim_end_matches(is_border);
        let key = url.find("://").and_then(|end| url[..end].rfind('=')).map_or(0, |at| at + 1);
        if !HttpUrl::is_name(&url[key..]) {
            shown.push_str(piece);
            continue;
        }
        shown.push_str(&url[..key]);
        shown.push_str(&HttpUrl::hide(&url[key..]));
        shown.push_str(&piece[url.len()..]);
    }
    shown + end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_left_out_wherever_they_stand() {
        for (name, shown) in [
            ("disk.qcow2", "disk.qcow2"),
            ("http://u:PW@h:0/x?sig=S", "http://h:0/x?..."),
            ("driver=https,url=https://u:PW@h/x?sig=S,foo=bar", "driver=https,url=https://h/x?...,foo=bar"),
            (
                "json:{\"driver\":\"https\",\"url\":\"https://u:PW@h/x\"}",
                "json:{\"driver\":\"https\",\"url\":\"https://h/x\"}",
            ),
            ("driver=http,url=http://h/,cookie=PW", "driver=http,url=http://h/,cookie..."),
            ("nbd+unix:///x?socket=/s", "nbd+unix:///x?socket=/s"),
            ("cookies.raw", "cookies.raw"),
        ] {
            assert_eq!(without_secrets(OsStr::new(name)), shown);
        }
    }
}
