//! Credential helpers: programs `docker-credential-NAME` that know users and passwords.

use super::secret::Secret;
use crate::failure::Failure;
use serde::Deserialize;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

/// The longest answer, in bytes.
const LONGEST: u64 = 64 << 10;
/// The user that a token has in place of a name.
const TOKEN_USER: &str = "<token>";

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    #[serde(default)]
    username: String,
    secret: String,
}

/// Asks a helper for the credentials of a registry.
///
/// # Errors
/// It can't be started, fails, or says what can't be read.
pub(super) fn ask(name: &str, registry: &str) -> Result<Option<Secret>, Failure> {
    let program = format!("docker-credential-{name}");
    let fail =
        |reason: String| Failure::new(libc::EACCES, format!("the credential helper '{program}' {reason}"));
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    if name.is_empty() || !name.bytes().all(fits) {
        return Err(Failure::new(
            libc::EINVAL,
            "the name of a credential helper has letters, digits, '-', '_' and '.'",
        ));
    }
    let mut command = Command::new(&program);
    command.arg("get").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| fail(format!("can't be started: {error}")))?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that does not read it says why by its end.
        let _ = writeln!(stdin, "{registry}");
    }
    let mut text = Vec::new();
    if let Some(stdout) = child.stdout.take() {
        let _ = stdout.take(LONGEST).read_to_end(&mut text);
    }
    let status = child.wait().map_err(|error| fail(error.to_string()))?;
    if !status.success() {
        // These words are those of all helpers.
        if String::from_utf8_lossy(&text).contains("credentials not found") {
            return Ok(None);
        }
        return Err(fail(format!("fails for '{registry}' ({status})")));
    }
    // The words of the error could show the secret.
    let Answer { username, secret } = serde_json::from_slice(&text)
        .map_err(|_| fail(format!("says for '{registry}' what can't be read")))?;
    Ok(Some(match username.as_str() {
        TOKEN_USER => Secret::Identity(secret),
        _ => Secret::Password { user: username, password: secret },
    }))
}
