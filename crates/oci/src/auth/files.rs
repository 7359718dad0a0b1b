//! Files of credentials: podman's `auth.json` and docker's `config.json` (containers-auth.json(5)).

use super::helper;
use super::secret::Secret;
use crate::failure::Failure;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The largest file of credentials that is read, in bytes.
const LARGEST: u64 = 1 << 20;
/// The names of docker's own registry.
const DOCKER: [&str; 3] = ["docker.io", "index.docker.io", "registry-1.docker.io"];

/// A reader of the environment.
pub(super) type Variable<'a> = &'a dyn Fn(&str) -> Option<String>;

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct File {
    auths: HashMap<String, Entry>,
    cred_helpers: HashMap<String, String>,
    creds_store: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

/// The secret that the user's files have for a repository of a registry: that of the first file that has one.
///
/// # Errors
/// A file or a helper can't be read.
pub(super) fn find(
    registry: &str,
    repository: &str,
    variable: Variable<'_>,
) -> Result<Option<Secret>, Failure> {
    for path in places(variable) {
        let Some(file) = read(&path)? else { continue };
        let found = file.find(registry, repository).map_err(|failure| failure.during(path.display()))?;
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// The files in the order in which they are asked.
fn places(variable: Variable<'_>) -> Vec<PathBuf> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(only) = set("REGISTRY_AUTH_FILE") {
        return vec![only];
    }
    let home = set("HOME");
    let config = set("XDG_CONFIG_HOME").or_else(|| home.as_ref().map(|home| home.join(".config")));
    let docker = set("DOCKER_CONFIG").or_else(|| home.as_ref().map(|home| home.join(".docker")));
    let of_podman = [set("XDG_RUNTIME_DIR"), config];
    let mut places: Vec<PathBuf> =
        of_podman.into_iter().flatten().map(|folder| folder.join("containers/auth.json")).collect();
    places.extend(docker.map(|folder| folder.join("config.json")));
    places
}

fn read(path: &Path) -> Result<Option<File>, Failure> {
    let shown = path.display();
    let mut text = Vec::new();
    match std::fs::File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_end(&mut text)) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => return Ok(None),
        Err(error) => return Err(Failure::of_file(&shown.to_string(), &error)),
        Ok(_) if text.len() as u64 > LARGEST => {
            return Err(Failure::new(
                libc::EFBIG,
                format!("{shown}: it is too large for a file of credentials"),
            ));
        }
        Ok(_) => {}
    }
    // The words of the error could show what stands there.
    serde_json::from_slice(&text).map(Some).map_err(|error| {
        let place = format!("line {}, column {}", error.line(), error.column());
        Failure::new(libc::EINVAL, format!("{shown}: it is no file of credentials ({place})"))
    })
}

/// A registry, or a part of one, as it is named in files.
fn key(name: &str) -> &str {
    let name = name.split_once("://").map_or(name, |(_, rest)| rest).trim_end_matches('/');
    let name = name.strip_suffix("/v1").or_else(|| name.strip_suffix("/v2")).unwrap_or(name);
    if DOCKER.contains(&name) { DOCKER[0] } else { name }
}

impl File {
    fn find(&self, registry: &str, repository: &str) -> Result<Option<Secret>, Failure> {
        let registry = key(registry);
        if let Some((name, helper)) = self.cred_helpers.iter().find(|(name, _)| key(name) == registry) {
            return helper::ask(helper, name);
        }
        // The longest name that has the repository in it.
        let whole = format!("{registry}/{repository}");
        let has = |name: &str| {
            whole.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let entries = self.auths.iter().filter(|(name, _)| has(key(name)));
        let entry = entries.max_by_key(|(name, _)| key(name).len());
        if let Some((name, entry)) = entry
            && let Some(secret) = entry.secret().map_err(|reason| {
                // The name of an entry is no secret.
                Failure::new(libc::EINVAL, format!("the entry of {}: {reason}", key(name)))
            })?
        {
            return Ok(Some(secret));
        }
        match &self.creds_store {
            None => Ok(None),
            Some(store) if registry == DOCKER[0] => helper::ask(store, "https://index.docker.io/v1/"),
            Some(store) => helper::ask(store, registry),
        }
    }
}

impl Entry {
    fn secret(&self) -> Result<Option<Secret>, &'static str> {
        let given = |value: &Option<String>| value.clone().filter(|value| !value.is_empty());
        if let Some(token) = given(&self.registrytoken) {
            return Ok(Some(Secret::Token(token)));
        }
        if let Some(token) = given(&self.identitytoken) {
            return Ok(Some(Secret::Identity(token)));
        }
        if let Some(auth) = given(&self.auth) {
            let decoded = BASE64_STANDARD.decode(auth.trim()).ok();
            let text = decoded
                .and_then(|bytes| String::from_utf8(bytes).ok())
                .ok_or("'auth' is no text in base64")?;
            // Some programs end it with zeroes.
            let text = text.trim_end_matches('\0');
            let (user, password) = text.split_once(':').ok_or("'auth' has no colon in it")?;
            return Ok(Some(Secret::Password { user: user.to_owned(), password: password.to_owned() }));
        }
        Ok(given(&self.username)
            .map(|user| Secret::Password { user, password: self.password.clone().unwrap_or_default() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str, registry: &str, repository: &str) -> Option<String> {
        let file: File = serde_json::from_str(text).unwrap();
        file.find(registry, repository).unwrap_or_else(|failure| panic!("{failure}")).map(|secret| {
            match secret {
                Secret::Password { user, password } => format!("{user}:{password}"),
                Secret::Identity(token) => format!("identity {token}"),
                Secret::Token(token) => format!("token {token}"),
            }
        })
    }

    #[test]
    fn the_longest_name_decides() {
        let text = "{\"auths\":{\"h:5000\":{\"auth\":\"dTpw\"},\"h:5000/team\":{\"auth\":\"dDpx\"},\
                    \"https://index.docker.io/v1/\":{\"auth\":\"ZDpy\"},\"i\":{\"identitytoken\":\"s\"},\"e\":{}}}";
        assert_eq!(found(text, "h:5000", "x").as_deref(), Some("u:p"));
        assert_eq!(found(text, "h:5000", "team/x").as_deref(), Some("t:q"));
        assert_eq!(found(text, "h:5000", "teams/x").as_deref(), Some("u:p"));
        assert_eq!(found(text, "docker.io", "library/x").as_deref(), Some("d:r"));
        assert_eq!(found(text, "i", "x").as_deref(), Some("identity s"));
        assert_eq!(found(text, "h", "x"), None);
        assert_eq!(found(text, "e", "x"), None);
        assert_eq!(found("{}", "e", "x"), None);
    }

    #[test]
    fn files_are_looked_for_as_podman_and_docker_do() {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_str().unwrap().to_owned();
        let only_home = |name: &str| (name == "HOME").then(|| home.clone());
        assert!(find("h", "x", &only_home).is_ok_and(|found| found.is_none()));
        std::fs::create_dir_all(dir.path().join(".docker")).unwrap();
        let docker = dir.path().join(".docker/config.json");
        std::fs::write(&docker, "{\"auths\":{\"h\":{\"auth\":\"dTpw\"}}}").unwrap();
        assert!(find("h", "x", &only_home).is_ok_and(|found| found.is_some()));
        std::fs::write(&docker, "{\"auths\":{\"h\":{\"auth\":[\"secret\"]}}}").unwrap();
        let error = find("h", "x", &only_home).err().unwrap();
        assert!(error.reason.contains("config.json") && !error.reason.contains("secret"), "{error}");
        std::fs::write(&docker, "{\"auths\":{\"h\":{\"auth\":\"secret!\"}}}").unwrap();
        let error = find("h", "x", &only_home).err().unwrap();
        assert!(error.reason.contains("entry of h") && !error.reason.contains("secret"), "{error}");
        let other = dir.path().join("other.json");
        std::fs::write(&other, "{\"auths\":{\"h\":{\"username\":\"a\",\"password\":\"b\"}}}").unwrap();
        let other = other.to_str().unwrap().to_owned();
        let named = |name: &str| match name {
            "REGISTRY_AUTH_FILE" => Some(other.clone()),
            name => only_home(name),
        };
        assert!(find("h", "x", &named).is_ok_and(|found| found.is_some()));
    }
}
