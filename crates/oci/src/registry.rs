//! One repository of a registry: its manifests and blobs, as its protocol (the distribution specification) has them.

use crate::auth::{Access, Challenge, Tokens};
use crate::client::{Answer, Ask, Client, header, refusal};
use crate::digest::Digest;
use crate::document::{ACCEPTED, Descriptor, LONGEST, shown};
use crate::failure::Failure;
use crate::hosts::Place;
use crate::name::Reference;
use crate::options::OciOptions;
use http::Method;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use std::sync::Arc;
use std::time::Duration;
use zebu_remote::RemoteRemedy;
use zebu_remote::http::{
    ClientErrorKind, HttpDisk, HttpOptions, HttpUrl, Redirects, ServersWithoutRanges, Signing,
};

/// The most redirects to a manifest.
const MOST_REDIRECTS: usize = 5;
/// How long a registry of this machine may take to begin with TLS before it is asked without.
const LONGEST_GREETING: Duration = Duration::from_secs(3);

/// A document as it came.
pub(crate) struct Told {
    pub(crate) digest: Digest,
    pub(crate) bytes: Vec<u8>,
    pub(crate) media_type: Option<String>,
}

/// A repository at one place.
pub(crate) struct Registry {
    api: String,
    /// `?ns=REGISTRY`, by which a mirror of several registries knows which is meant.
    namespace: String,
    repository: String,
    client: Client,
    tokens: Arc<Tokens>,
    http: HttpOptions,
}

impl Registry {
    /// The repository at a place. Nothing is asked yet, but of a place that may be without TLS.
    pub(crate) fn new(
        place: &Place,
        repository: &str,
        access: Access,
        options: &OciOptions,
    ) -> Result<Self, Failure> {
        let client = Client::new(options.http.clone());
        let mut api = place.api.clone();
        if place.may_be_plain && is_without_tls(&options.http, &api) {
            api = api.replacen("https://", "http://", 1);
        }
        let url = HttpUrl::parse(&api).map_err(|reason| Failure::new(libc::EINVAL, reason))?;
        let host = api.split("://").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or_default();
        let namespace = place
            .mirror_of
            .as_ref()
            .map(|registry| format!("?ns={}", utf8_percent_encode(registry, NON_ALPHANUMERIC)));
        Ok(Self {
            tokens: Arc::new(Tokens::new(!url.is_secure(), host, repository, access, &options.http)),
            api,
            namespace: namespace.unwrap_or_default(),
            repository: repository.to_owned(),
            client,
            http: options.http.clone(),
        })
    }

    /// The URL of a part of the repository.
    pub(crate) fn url(&self, rest: &str) -> String {
        format!("{}/{}/{rest}{}", self.api, self.repository, self.namespace)
    }

    /// Sends a request, with what the registry wants to be shown; again if that has ended.
    pub(crate) fn ask(&self, ask: Ask) -> Result<Answer, Failure> {
        // What is for the registry goes to no other.
        let is_own = origin(ask.url()) == origin(&self.api);
        let authorized = |ask: Ask, why| -> Result<Ask, Failure> {
            let value = if is_own { self.tokens.get(why)? } else { None };
            Ok(match value {
                Some(value) => ask.header("authorization", &value),
                None => ask,
            })
        };
        let ask = authorized(ask, Signing::InTime)?;
        let answer = self.client.send(&ask)?;
        if answer.status().as_u16() != 401 || !is_own {
            return Ok(answer);
        }
        let Some(challenge) = challenge_of(&answer) else { return Ok(answer) };
        self.tokens.note(challenge);
        self.client.send(&authorized(ask, Signing::AfterDenial)?)
    }

    /// The manifest or index that a reference leads to. Its digest is compared.
    pub(crate) fn manifest(&self, reference: &Reference) -> Result<Told, Failure> {
        let mut url = self.url(&format!("manifests/{reference}"));
        for _ in 0..=MOST_REDIRECTS {
            let mut ask = Ask::new(Method::GET, &url).most(LONGEST);
            for media_type in ACCEPTED {
                ask = ask.header("accept", media_type);
            }
            let answer = self.ask(ask)?;
            if answer.status().is_redirection() {
                let next = location(&url, &answer)?;
                if origin(&next) != origin(&self.api) {
                    let place = HttpUrl::hide(&next);
                    return Err(Failure::new(
                        libc::EACCES,
                        format!("the manifest is redirected to another server: {place}"),
                    ));
                }
                url = next;
                continue;
            }
            if !answer.status().is_success() {
                return Err(refusal(&answer).during(format!("manifest {reference}")));
            }
            return judge(answer, reference);
        }
        Err(Failure::new(libc::ELOOP, format!("there are more than {MOST_REDIRECTS} redirects")))
    }

    /// A blob, to be read by ranges, or in order if the registry has none and `without_ranges` lets it.
    pub(crate) fn blob(
        &self,
        blob: &Descriptor,
        without_ranges: ServersWithoutRanges,
    ) -> Result<HttpDisk, Failure> {
        let url = HttpUrl::parse(&self.url(&format!("blobs/{}", blob.digest)))
            .map_err(|reason| Failure::new(libc::EINVAL, reason))?;
        let options = self
            .http
            .clone()
            .authorizations(self.tokens.authorizations())
            .mark(blob.digest.to_string())
            .without_ranges(without_ranges);
        let disk = HttpDisk::open(url, options).map_err(|error| {
            let remedy = match error.remedy() {
                Some(RemoteRemedy::FollowAnyRedirect) => " (--redirects any follows it)",
                _ => "",
            };
            Failure::new(error.errno(), format!("{}{remedy}", error.reason()))
        })?;
        let len = zebu_storage::Storage::len(&disk);
        if len != blob.size {
            return Err(Failure::wrong(format!("it has {len} bytes, and the manifest says {}", blob.size)));
        }
        Ok(disk)
    }

    /// Gives a manifest or index to the registry, by a tag or its digest.
    pub(crate) fn put_manifest(
        &self,
        reference: &Reference,
        media_type: &str,
        bytes: Vec<u8>,
    ) -> Result<Answer, Failure> {
        let digest = Digest::of(&bytes);
        let ask = Ask::new(Method::PUT, &self.url(&format!("manifests/{reference}")))
            .header("content-type", media_type)
            .body(bytes);
        let answer = self.ask(ask)?;
        if !answer.status().is_success() {
            return Err(refusal(&answer).during(format!("manifest {digest}")));
        }
        match header(&answer, "docker-content-digest") {
            Some(told) if told != digest.to_string() => {
                let told = shown(told);
                Err(Failure::wrong(format!("manifest {digest}: the registry says that it has {told}")))
            }
            _ => Ok(answer),
        }
    }

    /// Refuses to leave TLS.
    pub(crate) fn check_step(&self, from: &str, to: &str) -> Result<(), Failure> {
        let leaves_tls = from.starts_with("https://") && to.starts_with("http://");
        if leaves_tls && self.http.redirects == Redirects::Safe {
            let to = HttpUrl::hide(to);
            return Err(Failure::new(
                libc::EACCES,
                format!("the registry leads from https to '{to}' (--redirects any follows it)"),
            ));
        }
        Ok(())
    }
}

/// The worth of an answer that should be a manifest.
fn judge(answer: Answer, reference: &Reference) -> Result<Told, Failure> {
    let media_type = header(&answer, "content-type").map(str::to_owned);
    let told: Option<Digest> = header(&answer, "docker-content-digest").and_then(|text| text.parse().ok());
    let bytes = answer.into_body();
    let digest = match (reference, told) {
        (Reference::Digest(digest), _) => digest.clone(),
        (Reference::Tag(_), Some(digest)) => digest,
        (Reference::Tag(_), None) => Digest::of(&bytes),
    };
    if !digest.fits(&bytes) {
        return Err(Failure::wrong(format!("manifest {digest}: what the registry sends has another digest")));
    }
    Ok(Told { digest, bytes, media_type })
}

/// Whether a registry of this machine speaks no TLS, and answers without it.
fn is_without_tls(options: &HttpOptions, api: &str) -> bool {
    // Some servers wait for the end of a request that begins like TLS.
    let time = options.connect_timeout.min(LONGEST_GREETING);
    let client = Client::new(options.clone().connect_timeout(time));
    let Err(error) = client.send_once(&Ask::new(Method::GET, &format!("{api}/"))) else { return false };
    if !matches!(error.kind, ClientErrorKind::Connecting | ClientErrorKind::Broken) {
        return false;
    }
    let plain = api.replacen("https://", "http://", 1);
    let answer = client.send_once(&Ask::new(Method::GET, &format!("{plain}/")));
    // A server of TLS answers as well: that this is none of its requests.
    answer.is_ok_and(|answer| matches!(answer.status().as_u16(), 200 | 401))
}

/// The proof that the registry wants to be shown.
fn challenge_of(answer: &Answer) -> Option<Challenge> {
    let all = answer.headers().get_all("www-authenticate");
    let mut wishes = all.iter().filter_map(|value| Challenge::parse(value.to_str().ok()?));
    let first = wishes.next()?;
    // Tokens first, by whichever header they come.
    Some(wishes.find(|wish| matches!(wish, Challenge::Bearer { .. })).unwrap_or(first))
}

/// Scheme, host and port of a URL.
pub(crate) fn origin(url: &str) -> Option<(bool, String, u16)> {
    let url = HttpUrl::parse(url).ok()?;
    Some((url.is_secure(), url.host().to_owned(), url.port()))
}

/// The URL that an answer to a request for `from` leads to.
///
/// # Errors
/// There is none, or none that can be followed.
pub(crate) fn location(from: &str, answer: &Answer) -> Result<String, Failure> {
    let wrong = || Failure::wrong("the server leads to what is no URL (Location)");
    let to = header(answer, "location").ok_or_else(wrong)?;
    let joined = if HttpUrl::is_name(to) {
        to.to_owned()
    } else if to.starts_with('/') && !to.starts_with("//") {
        let (scheme, rest) = from.split_once("://").ok_or_else(wrong)?;
        let host = rest.split(['/', '?']).next().unwrap_or_default();
        format!("{scheme}://{host}{to}")
    } else {
        return Err(wrong());
    };
    let url = HttpUrl::parse(&joined).map_err(|_| wrong())?;
    if url.has_credentials() {
        return Err(wrong());
    }
    Ok(joined)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Response;

    #[test]
    fn places_that_an_answer_leads_to() {
        let to = |text: &str| {
            let answer = Response::builder().header("location", text).body(Vec::new()).unwrap();
            location("https://h:5000/v2/x/blobs/uploads/", &answer).ok()
        };
        assert_eq!(to("/v2/x?y=1").as_deref(), Some("https://h:5000/v2/x?y=1"));
        assert_eq!(to("http://o/x").as_deref(), Some("http://o/x"));
        for wrong in ["", "x", "//o/x", "ftp://o/x", "https://u:p@o/x", "file:///etc/passwd"] {
            assert_eq!(to(wrong), None, "{wrong}");
        }
        assert_eq!(origin("https://H/x"), Some((true, "h".to_owned(), 443)));
    }

    #[test]
    fn a_manifest_of_another_digest_is_no_answer() {
        let digest = Digest::of(b"{}").to_string();
        let answer = |told: &str| {
            Response::builder().header("docker-content-digest", told).body(b"{}".to_vec()).unwrap()
        };
        let tag = Reference::Tag("t".to_owned());
        assert_eq!(
            judge(answer(&digest), &tag).map(|told| told.digest.to_string()).ok(),
            Some(digest.clone())
        );
        let other = Digest::of(b"x");
        assert!(
            judge(answer(&other.to_string()), &tag).is_err_and(|e| e.reason.contains(&other.to_string()))
        );
        assert!(judge(answer(&digest), &Reference::Digest(other)).is_err());
    }
}
