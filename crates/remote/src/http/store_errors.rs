//! Errors of object stores, which say in a document of XML what the status leaves open.

use ureq_proto::http::HeaderMap;

/// The most bytes of an error's document that are looked at.
pub(super) const MOST: usize = 16 << 10;
/// The longest code that is shown.
const LONGEST_CODE: usize = 64;

/// The reason in words for the error of a store, and its errno; `None` if the document has no code.
pub(super) fn explain(status: u16, headers: &HeaderMap, document: &[u8]) -> Option<(i32, String)> {
    let text = String::from_utf8_lossy(document);
    let code = header(headers, "x-ms-error-code").or_else(|| element(&text, "Code"));
    let region = header(headers, "x-amz-bucket-region").or_else(|| element(&text, "Region"));
    if let Some(region) = &region
        && (matches!(status, 301 | 307)
            || matches!(code.as_deref(), Some("AuthorizationHeaderMalformed" | "PermanentRedirect")))
    {
        let reason = format!("the bucket is in another region: AWS_REGION={region} names it");
        return Some((libc::EINVAL, reason));
    }
    let code = code?;
    let words = match code.as_str() {
        "NoSuchKey" | "BlobNotFound" => "there is no such object",
        "NoSuchBucket" | "ContainerNotFound" => "there is no such bucket",
        "NoSuchVersion" => "there is no such version of the object",
        "InvalidAccessKeyId" => {
            "the store does not know the access key: AWS_ACCESS_KEY_ID or the profile is wrong"
        }
        "SignatureDoesNotMatch" => {
            "the secret key does not belong to the access key: AWS_SECRET_ACCESS_KEY or the profile is wrong"
        }
        "ExpiredToken" | "InvalidToken" | "InvalidTokenId" | "TokenRefreshRequired" => {
            "the temporary credentials are over: renew AWS_SESSION_TOKEN or the profile"
        }
        "AccessDenied" | "AuthorizationFailure" | "AuthorizationPermissionMismatch" => {
            "the credentials give no right to read the object, or it does not exist"
        }
        "AuthenticationFailed" => "the store does not believe the credentials",
        "RequestTimeTooSkewed" | "ExpiredPresignRequest" | "RequestNotReadyYet" => {
            "the clock of this machine is wrong"
        }
        "PermanentRedirect" => "the bucket is at another endpoint, perhaps of another region (AWS_REGION)",
        _ => return Some((errno_of(status), format!("the store answers {status} {code}"))),
    };
    Some((errno_of(status), format!("{words} ({status} {code})")))
}

/// The errno and the reason in words for the error of an object store, from its status and its document; `None` if the
/// document has no code.
pub fn explain_store_error(status: u16, document: &str) -> Option<(i32, String)> {
    explain(status, &HeaderMap::new(), document.as_bytes())
}

fn errno_of(status: u16) -> i32 {
    match status {
        401 | 403 => libc::EACCES,
        404 | 410 => libc::ENOENT,
        _ => libc::EIO,
    }
}

fn header(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().and_then(plain)
}

/// The text of the first element of that name.
fn element(text: &str, name: &str) -> Option<String> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    plain(rest.split_once("</")?.0)
}

/// A word that can't be anything secret, or harm a terminal.
fn plain(word: &str) -> Option<String> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    (!word.is_empty() && word.len() <= LONGEST_CODE && word.bytes().all(fits)).then(|| word.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_become_words_and_a_region_is_told() {
        let none = HeaderMap::new();
        let say = |status, text: &str| explain(status, &none, text.as_bytes());
        let missing = "<?xml version=\"1.0\"?><Error><Code>NoSuchKey</Code><Key>secret</Key></Error>";
        let (errno, reason) = say(404, missing).unwrap();
        assert!(errno == libc::ENOENT && reason.contains("no such object") && !reason.contains("secret"));
        assert!(
            say(403, "<Code>Odd</Code>")
                .is_some_and(|(errno, reason)| { errno == libc::EACCES && reason.ends_with("403 Odd") })
        );
        let elsewhere = "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-north-1</Region></Error>";
        assert!(say(400, elsewhere).is_some_and(|(_, reason)| reason.contains("AWS_REGION=eu-north-1")));
        let mut headers = HeaderMap::new();
        headers.insert("x-amz-bucket-region", "eu-west-2".parse().unwrap());
        assert!(explain(301, &headers, b"").is_some_and(|(_, reason)| reason.contains("eu-west-2")));
        for odd in ["", "<Code>", "<Code></Code>", "<Code>\u{1b}[31m</Code>", "<Code>a b</Code>"] {
            assert_eq!(say(403, odd), None, "{odd}");
        }
    }
}
