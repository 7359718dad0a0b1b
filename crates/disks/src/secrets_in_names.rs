//! Names of images in messages, without what may be secret in them.

use std::ffi::OsStr;
use zebu_remote::http::HttpUrl;
use zebu_remote::nbd::NbdAddress;

/// The text of a name on the command line: a path, a URL, image options or JSON. Users, passwords and queries of URLs are left
/// out, and so is all that follows the key of a cookie. The name may be one that can't be read.
pub fn without_secrets(name: &OsStr) -> String {
    let name = name.to_string_lossy();
    let lower = name.to_ascii_lowercase();
    let cookie = ["cookie=", "cookie\""].iter().filter_map(|key| lower.find(key)).min();
    let (name, end) = match cookie {
        // Lower case has the same length in bytes.
        Some(at) => (&name[..at], "cookie..."),
        None => (&*name, ""),
    };
    let shown = if name.starts_with("json:") {
        // Slashes may be escaped there.
        hide_within(&name.replace("\\/", "/"), Some('"'))
    } else if name.find("://").is_some_and(|at| name[..at].contains('=')) {
        // A comma within a value is written twice.
        hide_within(&name.replace(",,", "\0"), Some(',')).replace('\0', ",,")
    } else {
        hide_within(name, None)
    };
    shown + end
}

/// Leaves out the secrets of the URLs of a text that ends at `border`, each at one of them.
fn hide_within(text: &str, border: Option<char>) -> String {
    let mut shown = String::with_capacity(text.len());
    for piece in text.split_inclusive(|c| Some(c) == border) {
        let url = piece.trim_end_matches(|c| Some(c) == border);
        let is_of_scheme = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
        let start = url.find("://").map(|end| url[..end].trim_end_matches(is_of_scheme).len());
        match start {
            // Of a disk on an NBD server, the query says where the server is.
            Some(start) if !NbdAddress::is_name(&url[start..]) => {
                shown.push_str(&url[..start]);
                shown.push_str(&HttpUrl::hide(&url[start..]));
            }
            _ => shown.push_str(url),
        }
        shown.push_str(&piece[url.len()..]);
    }
    shown
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
            // A comma, a quote and a blank in a password or a query; a slash that should have been escaped.
            ("http://u:P,W@h:0/x?sig=S,S", "http://h:0/x?..."),
            ("http://u:P'W \"@h:0/x", "http://h:0/x"),
            ("http://u:P/W@h/x", "http://h/x"),
            ("driver=http,url=http://u:P,,W@h:0/x?sig=S,,S,a=b", "driver=http,url=http://h:0/x?...,a=b"),
            (
                "json:{\"url\":\"http:\\/\\/u:P,W@h:0\\/x?S,S\",\"a\":1}",
                "json:{\"url\":\"http://h:0/x?...\",\"a\":1}",
            ),
            // Schemes that are not known.
            ("htps://u:PW@h/x?sig=S", "htps://h/x?..."),
            ("./htps://u:PW@h/x", "./htps://h/x"),
            (" http://u:PW@h/x", " http://h/x"),
            ("cookies.raw", "cookies.raw"),
        ] {
            assert_eq!(without_secrets(OsStr::new(name)), shown);
        }
    }
}
