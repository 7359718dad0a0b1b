//! `--object authz-simple,...` and `authz-list,...`: rules on the clients of `qemu-nbd --tls-authz`.

use serde::Deserialize;
use std::fs::File;
use std::io::{self, Read};
use zebu_disks::errno_text;
use zebu_disks::objects::Object;
use zebu_export::nbd::{Authorization, Permission, Rule};

/// Rules of one object at most.
const MOST_RULES: usize = 10_000;

/// Bytes of a file of rules at most.
const MOST_BYTES: u64 = 1 << 20;

/// Whether an object is of this kind.
pub(crate) fn is_authorization(object: &Object) -> bool {
    object.kind().starts_with("authz-")
}

/// The file of `authz-list-file`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ListFile {
    policy: Option<String>,
    #[serde(default)]
    rules: Vec<Described>,
}

/// A rule.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Described {
    #[serde(rename = "match")]
    pattern: Option<String>,
    policy: Option<String>,
    format: Option<String>,
}

impl Described {
    fn rule(&self) -> Result<Rule, String> {
        let pattern = self.pattern.clone().ok_or("Parameter 'match' of a rule is missing")?;
        let permission =
            permission(self.policy.as_deref().ok_or("Parameter 'policy' of a rule is missing")?)?;
        match self.format.as_deref() {
            None | Some("exact") => Ok(Rule::exact(pattern, permission)),
            Some("glob") => Ok(Rule::glob(pattern, permission)),
            Some(other) => Err(format!("Parameter 'format' does not accept value '{other}'")),
        }
    }
}

/// Reads an object, and its file once.
///
/// # Errors
/// A parameter that is missing, unknown, or has a value that it can't have; a file that has no rules.
pub(crate) fn read_authorization(object: &Object) -> Result<Authorization, String> {
    let mut object = object.clone();
    let rules = match object.kind() {
        "authz-simple" => {
            let identity = object.required("identity")?;
            Authorization::new(vec![Rule::exact(identity, Permission::Allow)], Permission::Deny)
        }
        "authz-list" => list(&mut object)?,
        _ => list_file(&mut object)?,
    };
    object.finish()?;
    Ok(rules)
}

fn list(object: &mut Object) -> Result<Authorization, String> {
    let policy = object.plain("policy")?;
    let mut rules = Vec::new();
    while rules.len() < MOST_RULES && object.has(&format!("rules.{}", rules.len())) {
        let mut take = |key: &str| object.plain(&format!("rules.{}.{key}", rules.len()));
        let described =
            Described { pattern: take("match")?, policy: take("policy")?, format: take("format")? };
        rules.push(described.rule()?);
    }
    Ok(Authorization::new(rules, otherwise(policy.as_deref())?))
}

fn list_file(object: &mut Object) -> Result<Authorization, String> {
    if object.switch("refresh")? != Some(false) {
        return Err("--object: give refresh=off: the file of authz-list-file is read once".to_owned());
    }
    let name = object.required("filename")?;
    let wrong = |reason: String| format!("{name}: {reason}");
    let text = read_rules(&name).map_err(|error| wrong(io_text(&error)))?;
    let file: ListFile = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let rules = file.rules.iter().map(Described::rule).collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    Ok(Authorization::new(rules, otherwise(file.policy.as_deref())?))
}

/// The text of a file of rules, which may be a pipe that never ends.
fn read_rules(name: &str) -> io::Result<String> {
    let mut text = String::new();
    File::open(name)?.take(MOST_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MOST_BYTES {
        return Err(io::Error::other(format!("the file of rules has more than {MOST_BYTES} bytes")));
    }
    Ok(text)
}

fn io_text(error: &io::Error) -> String {
    error.raw_os_error().map_or_else(|| error.to_string(), errno_text)
}

/// The policy on everybody else.
fn otherwise(policy: Option<&str>) -> Result<Permission, String> {
    policy.map_or(Ok(Permission::Deny), permission)
}

fn permission(text: &str) -> Result<Permission, String> {
    match text {
        "allow" => Ok(Permission::Allow),
        "deny" => Ok(Permission::Deny),
        _ => Err(format!("Parameter 'policy' does not accept value '{text}'")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zebu_disks::objects::parse_objects;

    fn found(object: &str) -> Result<Authorization, String> {
        read_authorization(&parse_objects(&[object.to_owned()])?[0])
    }

    #[test]
    fn objects_are_rules() {
        let rules = found(
            "authz-list,id=a,policy=deny,rules.0.match=CN=a,rules.0.policy=deny,rules.1.match=CN=*,rules.1.policy=allow,\
             rules.1.format=glob",
        );
        let expected = Authorization::new(
            vec![Rule::exact("CN=a", Permission::Deny), Rule::glob("CN=*", Permission::Allow)],
            Permission::Deny,
        );
        assert_eq!(rules, Ok(expected));
        let simple = found("authz-simple,id=a,identity=C=GB,,CN=a").unwrap();
        assert_eq!(simple.permission("C=GB,CN=a"), Permission::Allow);
        assert_eq!(simple.permission("C=GB,CN=b"), Permission::Deny);
    }

    #[test]
    fn a_file_has_the_same_rules() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let object = format!("authz-list-file,id=a,refresh=off,filename={}", file.path().display());
        let rules =
            r#"{"rules": [{"match": "CN=*", "policy": "allow", "format": "glob"}], "policy": "deny"}"#;
        std::fs::write(file.path(), rules).unwrap();
        assert_eq!(found(&object).unwrap().permission("CN=x"), Permission::Allow);
        let endless = "authz-list-file,id=a,refresh=off,filename=/dev/zero";
        assert!(found(endless).unwrap_err().contains("more than 1048576 bytes"));
        for wrong in ["{", r#"{"rules": [{"policy": "allow"}]}"#, r#"{"polices": "allow"}"#] {
            std::fs::write(file.path(), wrong).unwrap();
            assert!(found(&object).unwrap_err().contains(&file.path().display().to_string()));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (object, reason) in [
            ("authz-simple,id=a", "'identity' is missing"),
            ("authz-simple,id=a,identity=x,y=z", "'y'"),
            ("authz-list,id=a,policy=maybe", "'maybe'"),
            ("authz-list,id=a,rules.0.match=x", "'policy' of a rule"),
            ("authz-list,id=a,rules.1.match=x,rules.1.policy=allow", "'rules.1.match'"),
            ("authz-list,id=a,rules.0.match=x,rules.0.policy=allow,rules.0.format=regex", "'regex'"),
            ("authz-list-file,id=a,filename=f", "refresh=off"),
        ] {
            let error = found(object).unwrap_err();
            assert!(error.contains(reason), "{object}: {error}");
        }
    }
}
