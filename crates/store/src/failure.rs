//! Failures of `object_store` in the words of zebu: one line, without secrets.

use crate::name::StoreKind;
use object_store::Error;
use std::error::Error as _;
use zebu_remote::http::explain_store_error;

/// The ways to give credentials.
pub(crate) fn credentials_of(kind: StoreKind) -> &'static str {
    match kind {
        StoreKind::S3 => {
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE, ~/.aws/credentials), \
             AWS_WEB_IDENTITY_TOKEN_FILE with AWS_ROLE_ARN, or the instance's"
        }
        StoreKind::Gs => {
            "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT_PATH name a file, or the instance's"
        }
        StoreKind::Az => {
            "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_CONNECTION_STRING, AZURE_CLIENT_ID \
             with AZURE_CLIENT_SECRET and AZURE_TENANT_ID, or the instance's"
        }
    }
}

/// Answers of a store to an upload whose parts are not those that were sent.
const TAKEN: [&str; 2] = ["<Code>NoSuchUpload<", "<Code>InvalidPart<"];

/// The errno and the reason of a failed request.
pub(crate) fn describe(error: &Error) -> (i32, String) {
    let text = error.to_string();
    let status = match error {
        Error::NotFound { .. } => 404,
        Error::PermissionDenied { .. } => 403,
        Error::Unauthenticated { .. } => 401,
        _ => status_in(&text).unwrap_or(400),
    };
    if TAKEN.iter().any(|code| text.contains(code)) {
        let reason = "another upload to the same object has ended this one or taken its parts, or the store has given it up: \
                      have one run at a time, and start it again";
        return (libc::EBUSY, format!("{reason} (the store answers {status})"));
    }
    if let Some(told) = explain_store_error(status, &text) {
        return told;
    }
    match status {
        404 => (libc::ENOENT, innermost(error)),
        // A request for the head of an object is answered without a document.
        401 | 403 => {
            let reason = format!(
                "the store denies access: the credentials are wrong or over, or give no right to it (it \
                 answers {status})"
            );
            (libc::EACCES, reason)
        }
        _ => (libc::EIO, innermost(error)),
    }
}

/// Whether another try with fresh credentials may help.
pub(crate) fn is_denial(error: &Error) -> bool {
    matches!(error, Error::PermissionDenied { .. } | Error::Unauthenticated { .. })
        || error.to_string().contains("<Code>ExpiredToken")
}

/// Whether another try may help after a pause.
pub(crate) fn is_passing(error: &Error) -> bool {
    let Error::Generic { .. } = error else { return false };
    let text = error.to_string();
    match status_in(&text) {
        Some(status) => {
            matches!(status, 408 | 425 | 429 | 500 | 502..=599) || text.contains("<Code>RequestTimeout")
        }
        None => !text.contains("another region") && !text.contains("redirect"),
    }
}

fn status_in(text: &str) -> Option<u16> {
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// The text of the failure at the bottom, which is shorter than that of those above it and has no URL.
fn innermost(error: &Error) -> String {
    let mut lowest = error.source();
    while let Some(below) = lowest.and_then(|error| error.source()) {
        lowest = Some(below);
    }
    let text = lowest.map_or_else(|| error.to_string(), ToString::to_string);
    let line = text.lines().next().unwrap_or_default();
    // What a server sends may have anything in it.
    match status_in(line) {
        Some(status) => format!("the store answers {status}"),
        None => line.chars().filter(|c| !c.is_control()).take(200).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_denial_without_a_document_says_where_to_look() {
        let error = Error::PermissionDenied { path: "a".to_owned(), source: "denied".into() };
        let (errno, reason) = describe(&error);
        assert_eq!(errno, libc::EACCES);
        assert!(reason.contains("credentials") && reason.contains("403"), "{reason}");
    }
}
