//! The end of an upload that must replace nothing.

use crate::access::Access;
use crate::name::StoreName;
use http::HeaderValue;
use http::header::IF_NONE_MATCH;
use object_store::Error;
use object_store::signer::{Method, SignedUrlOptions};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;
use zebu_remote::http::HttpClient;

/// How long the signature is good.
const GOOD_FOR: Duration = Duration::from_secs(300);

/// A failure in words that `describe` reads.
fn failed(reason: String) -> Error {
    Error::Generic { store: "S3", source: reason.into() }
}

/// The list of an object's parts. Their names are ETags, which have no characters that XML gives a meaning but quotes.
fn list(parts: &[String]) -> String {
    let mut text = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">".to_owned();
    for (number, etag) in (1..).zip(parts) {
        let etag: String = etag.chars().filter(|c| !matches!(c, '<' | '>' | '&')).collect();
        let _ = write!(text, "<Part><PartNumber>{number}</PartNumber><ETag>{etag}</ETag></Part>");
    }
    text + "</CompleteMultipartUpload>"
}

/// Has S3 make the object of its parts, if there is none of that name.
///
/// # Errors
/// `AlreadyExists`: there is one, or another is being made. `NotImplemented`: the store can't promise it.
pub(super) async fn complete(
    access: &Access,
    client: &Arc<HttpClient>,
    name: &StoreName,
    id: &str,
    parts: &[String],
) -> Result<(), Error> {
    let any = HeaderValue::from_static("*");
    let options =
        SignedUrlOptions::new().with_query([("uploadId", id)]).with_signed_header(IF_NONE_MATCH, any.clone());
    let url = access.signer().signed_url_opts(Method::POST, name.key(), GOOD_FOR, &options).await?;
    let request = http::Request::post(url.as_str()).header(IF_NONE_MATCH, any).body(());
    let request = request.map_err(|error| failed(error.to_string()))?;
    let (client, body) = (Arc::clone(client), list(parts));
    let answer = tokio::task::spawn_blocking(move || client.exchange(request, &[body.as_bytes()]))
        .await?
        .map_err(|error| failed(error.reason))?;
    judge(answer.status().as_u16(), &String::from_utf8_lossy(answer.body()), name)
}

/// The meaning of an answer.
fn judge(status: u16, document: &str, name: &StoreName) -> Result<(), Error> {
    let path = name.key().to_string();
    // The store may find that it fails after it has begun to answer.
    let is_error = document.contains("<Error>");
    let source = || format!("status code: {}: {document}", if status == 200 { 500 } else { status }).into();
    match status {
        200..=299 if !is_error => Ok(()),
        409 | 412 => Err(Error::AlreadyExists { path, source: source() }),
        401 => Err(Error::Unauthenticated { path, source: source() }),
        403 => Err(Error::PermissionDenied { path, source: source() }),
        404 => Err(Error::NotFound { path, source: source() }),
        501 => {
            Err(Error::NotImplemented { operation: "If-None-Match".to_owned(), implementer: "S3".to_owned() })
        }
        _ => Err(Error::Generic { store: "S3", source: source() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_judged() {
        let name = StoreName::parse("s3://b/k").unwrap();
        assert!(judge(200, "<CompleteMultipartUploadResult/>", &name).is_ok());
        let late = judge(200, "<Error><Code>InternalError</Code></Error>", &name).unwrap_err();
        assert!(crate::failure::is_passing(&late), "{late}");
        assert!(matches!(judge(412, "", &name), Err(Error::AlreadyExists { .. })));
        assert!(crate::failure::is_denial(&judge(403, "", &name).unwrap_err()));
        assert!(crate::failure::is_passing(&judge(503, "", &name).unwrap_err()));
        assert_eq!(
            list(&["\"a\"".to_owned(), "b".to_owned()]).matches("<PartNumber>2</PartNumber><ETag>b<").count(),
            1
        );
    }
}
