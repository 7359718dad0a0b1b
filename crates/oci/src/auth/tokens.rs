//! Values of the header `Authorization` for a repository, which are got anew when they end.
//!
//! In a sandbox the broker gets them (`zebu_remote::Network::signed`): it reads files and runs helpers, which a server in its
//! sandbox can't.

use super::challenge::Challenge;
use super::files;
use super::secret::Secret;
use crate::client::{Ask, Client, refusal};
use crate::failure::Failure;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::Method;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use zebu_remote::SignedText;
use zebu_remote::http::{Authorizations, HttpOptions, HttpUrl, Signing, SigningError};
use zebu_storage::sync::Mutex;

/// The beginning of names by which a broker knows what to get.
const NAME: &str = "oci-token ";
/// How long a token is good that does not say it.
const DEFAULT_LIFE: Duration = Duration::from_secs(60);
/// How long a password is taken for good.
const PASSWORD_LIFE: Duration = Duration::from_secs(24 * 3600);
/// A value that is younger was not yet known to whoever was denied.
const JUST_NOW: Duration = Duration::from_secs(1);
/// The longest answer of a server of tokens, in bytes.
const LONGEST_ANSWER: usize = 256 << 10;

/// The use that is made of a repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Pull,
    Push,
}

/// The repository that values are for, and what its registry wants to be shown.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    /// Without TLS, secrets may go to a realm without TLS, too.
    is_plain: bool,
    /// The registry under whose name credentials are looked for.
    registry: String,
    repository: String,
    access: Access,
    challenge: Challenge,
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tls = if self.is_plain { "plain" } else { "tls" };
        let access = if self.access == Access::Push { "push" } else { "pull" };
        write!(f, "{NAME}{tls} {} {} {access} ", self.registry, self.repository)?;
        match &self.challenge {
            Challenge::Basic => f.write_str("basic"),
            Challenge::Bearer { realm, service } => write!(f, "bearer {realm} {service}"),
        }
    }
}

impl Wanted {
    /// Reads the text form.
    fn parse(name: &str) -> Option<Self> {
        let mut words = name.strip_prefix(NAME)?.splitn(5, ' ');
        let is_plain = words.next()? == "plain";
        let (registry, repository) = (words.next()?.to_owned(), words.next()?.to_owned());
        let access = if words.next()? == "push" { Access::Push } else { Access::Pull };
        let challenge = match words.next()?.split_once(' ') {
            None => Challenge::Basic,
            Some((_, bearer)) => {
                let (realm, service) = bearer.split_once(' ')?;
                Challenge::Bearer { realm: realm.to_owned(), service: service.to_owned() }
            }
        };
        Some(Self { is_plain, registry, repository, access, challenge })
    }

    fn scope(&self) -> String {
        let actions = if self.access == Access::Push { "pull,push" } else { "pull" };
        format!("repository:{}:{actions}", self.repository)
    }
}

/// A value, and how long it is good.
type Value = (String, Duration);

/// Values for one repository.
pub(crate) struct Tokens {
    is_plain: bool,
    registry: String,
    repository: String,
    access: Access,
    options: HttpOptions,
    client: Client,
    /// Held while a value is got: others wait for it.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    challenge: Option<Challenge>,
    value: Option<Known>,
}

struct Known {
    text: String,
    since: Instant,
    until: Instant,
}

impl Tokens {
    /// Values for a repository of the registry `registry`, which is asked without TLS if `is_plain`.
    pub(crate) fn new(
        is_plain: bool,
        registry: &str,
        repository: &str,
        access: Access,
        options: &HttpOptions,
    ) -> Self {
        Self {
            is_plain,
            registry: registry.to_owned(),
            repository: repository.to_owned(),
            access,
            client: Client::new(options.clone()),
            options: options.clone(),
            state: Mutex::default(),
        }
    }

    /// Notes what the registry wants to be shown.
    pub(crate) fn note(&self, challenge: Challenge) {
        let mut state = self.state.lock();
        if state.challenge.as_ref() != Some(&challenge) {
            *state = State { challenge: Some(challenge), value: None };
        }
    }

    /// A value; `None` as long as the registry wants none.
    ///
    /// # Errors
    /// There are no credentials where they are needed, or no token is given for them.
    pub(crate) fn get(&self, why: Signing) -> Result<Option<String>, Failure> {
        let mut state = self.state.lock();
        let Some(challenge) = state.challenge.clone() else { return Ok(None) };
        let now = Instant::now();
        if let Some(known) = &state.value
            && now < known.until
            && (why == Signing::InTime || now.duration_since(known.since) < JUST_NOW)
        {
            return Ok(Some(known.text.clone()));
        }
        let wanted = Wanted {
            is_plain: self.is_plain,
            registry: self.registry.clone(),
            repository: self.repository.clone(),
            access: self.access,
            challenge,
        };
        let (text, life) = match self.options.network.signed(&wanted.to_string()) {
            Some(signed) => signed.map_err(|(errno, reason)| Failure::new(errno, reason))?,
            None => make(&wanted, &self.client)?,
        };
        // A request that is sent shortly before its end should still be in time.
        let until = now + life.saturating_sub((life / 4).min(Duration::from_secs(15)));
        state.value = Some(Known { text: text.clone(), since: Instant::now(), until });
        Ok(Some(text))
    }

    /// The same for disks on web servers.
    pub(crate) fn authorizations(self: &Arc<Self>) -> Authorizations {
        let tokens = Arc::clone(self);
        Authorizations::new(format!("{}/{}", self.registry, self.repository), move |why| {
            tokens.get(why).map_err(|failure| SigningError::new(failure.errno, failure.reason))
        })
    }
}

/// Whether a broker is asked for a value of [`token_for_broker`].
pub fn is_token_name(name: &str) -> bool {
    name.starts_with(NAME)
}

/// A value of the header `Authorization`, for [`zebu_remote::Broker::serve`]. Credentials are read each time.
pub fn token_for_broker(name: &str, options: &HttpOptions) -> SignedText {
    let wanted = Wanted::parse(name).ok_or((libc::EINVAL, "no repository is named".to_owned()))?;
    make(&wanted, &Client::new(options.clone())).map_err(|failure| (failure.errno, failure.reason))
}

fn make(wanted: &Wanted, client: &Client) -> Result<Value, Failure> {
    let registry = &wanted.registry;
    let secret = files::find(registry, &wanted.repository, &|name| std::env::var(name).ok())?;
    if let Some(Secret::Token(token)) = &secret {
        return Ok((checked(format!("Bearer {token}"))?, PASSWORD_LIFE));
    }
    match (&wanted.challenge, secret) {
        (Challenge::Basic, Some(Secret::Password { user, password })) => {
            Ok((checked(basic(&user, &password))?, PASSWORD_LIFE))
        }
        (Challenge::Basic, Some(_)) => Err(Failure::new(
            libc::EACCES,
            format!("{registry} wants a password, and the credentials are a token"),
        )),
        (Challenge::Basic, None) => Err(Failure::new(
            libc::EACCES,
            format!(
                "{registry} wants a user and a password: docker login, podman login or REGISTRY_AUTH_FILE give them"
            ),
        )),
        (Challenge::Bearer { realm, service }, secret) => bearer(wanted, realm, service, secret, client)
            .map_err(|failure| failure.during("no token is given")),
    }
}

#[derive(Deserialize)]
struct Token {
    token: Option<String>,
    access_token: Option<String>,
    expires_in: Option<u64>,
}

fn bearer(
    wanted: &Wanted,
    realm: &str,
    service: &str,
    secret: Option<Secret>,
    client: &Client,
) -> Result<Value, Failure> {
    let url = HttpUrl::parse(realm).map_err(|reason| {
        Failure::wrong(format!("the registry names a server of tokens that can't be one: {reason}"))
    })?;
    if !url.is_secure() && !wanted.is_plain {
        return Err(Failure::new(
            libc::EACCES,
            format!("the registry has TLS, and its server of tokens '{url}' has not"),
        ));
    }
    let encoded = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
    let about = format!("service={}&scope={}", encoded(service), encoded(&wanted.scope()));
    let ask = match secret {
        Some(Secret::Identity(token)) => {
            let body =
                format!("grant_type=refresh_token&client_id=zebu&{about}&refresh_token={}", encoded(&token));
            Ask::new(Method::POST, realm)
                .header("content-type", "application/x-www-form-urlencoded")
                .body(body.into_bytes())
        }
        secret => {
            let sign = if realm.contains('?') { '&' } else { '?' };
            let ask = Ask::new(Method::GET, &format!("{realm}{sign}{about}"));
            match secret {
                Some(Secret::Password { user, password }) => {
                    ask.header("authorization", &checked(basic(&user, &password))?)
                }
                _ => ask,
            }
        }
    };
    let answer = client.send(&ask.most(LONGEST_ANSWER))?;
    if !answer.status().is_success() {
        return Err(refusal(&answer).during(url));
    }
    // The words of the error could show the token.
    let token: Token = serde_json::from_slice(answer.body())
        .map_err(|_| Failure::wrong(format!("the answer of '{url}' can't be read")))?;
    let life = token.expires_in.map_or(DEFAULT_LIFE, Duration::from_secs).min(PASSWORD_LIFE);
    let text = token.token.or(token.access_token).filter(|text| !text.is_empty());
    let text = text.ok_or_else(|| Failure::wrong(format!("the answer of '{url}' has no token")))?;
    Ok((checked(format!("Bearer {text}"))?, life))
}

fn basic(user: &str, password: &str) -> String {
    format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}")))
}

/// A value that may stand in a header.
fn checked(value: String) -> Result<String, Failure> {
    if value.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
        Ok(value)
    } else {
        Err(Failure::wrong("a token has characters that no header has"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_broker_is_asked_for_is_read_again() {
        let bearer =
            Challenge::Bearer { realm: "https://a/t?x=1".to_owned(), service: "the service".to_owned() };
        for (challenge, access) in [(Challenge::Basic, Access::Pull), (bearer, Access::Push)] {
            let wanted = Wanted {
                is_plain: true,
                registry: "h:5000".to_owned(),
                repository: "a/b".to_owned(),
                access,
                challenge,
            };
            let name = wanted.to_string();
            assert!(is_token_name(&name));
            assert_eq!(Wanted::parse(&name), Some(wanted));
        }
        for wrong in ["", "oci-token", "oci-token plain h", "s3://b/k"] {
            assert_eq!(Wanted::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_realm_without_tls_gets_no_secret() {
        let wanted = Wanted {
            is_plain: false,
            registry: "h".to_owned(),
            repository: "x".to_owned(),
            access: Access::Pull,
            challenge: Challenge::Basic,
        };
        let secret = Secret::Password { user: "u".to_owned(), password: "secret".to_owned() };
        let client = Client::new(HttpOptions::default());
        let error = bearer(&wanted, "http://a/t", "", Some(secret), &client).unwrap_err();
        assert!(error.reason.contains("http://a/t") && !error.reason.contains("secret"), "{error}");
        let error = bearer(&wanted, "file:///etc/passwd", "", None, &client).unwrap_err();
        assert!(error.reason.contains("scheme"), "{error}");
    }
}
