//! Signed URLs, by which objects are read.

use crate::access::Access;
use crate::environment::{Environment, of_process};
use crate::failure::{credentials_of, describe};
use crate::name::{StoreKind, StoreName};
use crate::runtime;
use object_store::signer::{Method, SignedUrlOptions};
use std::sync::Arc;
use std::time::Duration;
use zebu_remote::SignedText;
use zebu_remote::http::{HttpOptions, HttpUrl, SignedUrl, SignedUrls, Signing, SigningError};
use zebu_storage::sync::Mutex;

/// How long a URL is good. Temporary credentials may end sooner; the store's denial shows that.
const GOOD_FOR: Duration = Duration::from_secs(3600);

/// The URLs of an object for [`zebu_remote::http::HttpDisk::open_signed`]. Credentials are read when the first one is asked
/// for, and again after a denial. In a sandbox, the broker of the network signs ([`sign_for_broker`]).
pub fn signed_urls(name: StoreName, options: HttpOptions) -> SignedUrls {
    let known: Mutex<Option<Arc<Access>>> = Mutex::default();
    SignedUrls::new(name.to_string(), move |why| {
        if let Some(signed) = options.network.signed(&name.to_string()) {
            let (url, good_for) = signed.map_err(|(errno, reason)| SigningError::new(errno, reason))?;
            let url = HttpUrl::parse(&url).map_err(|reason| SigningError::new(libc::EINVAL, reason))?;
            return Ok(SignedUrl::new(url, good_for));
        }
        let access = {
            let mut known = known.lock();
            if why == Signing::AfterDenial {
                *known = None;
            }
            if let Some(access) = &*known {
                Arc::clone(access)
            } else {
                let made = Access::new(&name, &options, Environment(&of_process));
                let made = made.map_err(|e| SigningError::new(e.errno(), e.reason()))?;
                Arc::clone(known.insert(Arc::new(made)))
            }
        };
        sign(&access, &name)
    })
}

/// A URL of an object, for [`zebu_remote::Broker::serve`]. Credentials are read each time.
pub fn sign_for_broker(name: &str, options: &HttpOptions) -> SignedText {
    let fail = |error: SigningError| (error.errno, error.reason);
    let name = StoreName::parse(name).map_err(|reason| (libc::EINVAL, reason))?;
    let access = Access::new(&name, options, Environment(&of_process));
    let access = access.map_err(|error| (error.errno(), error.reason().to_owned()))?;
    let (url, good_for) = text(&access, &name).map_err(fail)?;
    Ok((url, good_for))
}

fn sign(access: &Access, name: &StoreName) -> Result<SignedUrl, SigningError> {
    let (url, good_for) = text(access, name)?;
    let url = HttpUrl::parse(&url).map_err(|reason| SigningError::new(libc::EINVAL, reason))?;
    Ok(SignedUrl::new(url, good_for))
}

/// A URL as it is sent, and how long it is good.
fn text(access: &Access, name: &StoreName) -> Result<(String, Duration), SigningError> {
    let url = if let Access::GsEmulator(_, bucket) = access {
        // The path of a URL is escaped as in a signed one.
        let key: Vec<String> = name.key().as_ref().split('/').map(escaped).collect();
        format!("{bucket}/{}", key.join("/"))
    } else {
        let mut options = SignedUrlOptions::new();
        if let Some(version) = name.version() {
            options = options.with_query([("versionId", version)]);
        }
        let made =
            runtime::wait(access.signer().signed_url_opts(Method::GET, name.key(), GOOD_FOR, &options));
        let made = made.map_err(|error| SigningError::new(libc::EAGAIN, error.to_string()))?;
        made.map_err(|error| unsigned(name.kind(), &error))?.to_string()
    };
    Ok((url, GOOD_FOR))
}

/// Signing computes; what fails is getting the credentials.
fn unsigned(kind: StoreKind, error: &object_store::Error) -> SigningError {
    let (_, reason) = describe(error);
    let reason = format!("there are no credentials: {} ({reason})", credentials_of(kind));
    SigningError::new(libc::EACCES, reason)
}

fn escaped(part: &str) -> String {
    let mut text = String::new();
    for byte in part.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~') {
            text.push(byte as char);
        } else {
            text += &format!("%{byte:02X}");
        }
    }
    text
}
