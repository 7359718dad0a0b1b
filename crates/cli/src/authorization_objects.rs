//! `--object authz-simple,...` and `authz-list,...`: rules on the clients of `qemu-nbd --tls-authz`.

use crate::keyval::{parse_keyval, parse_switch};
use crate::tls_objects::kind;
use serde::Deserialize;
use std::collections::BTreeMap;
use zebu_export::nbd::{Authorization, Permission, Rule};

/// Rules of one object at most.
const MOST_RULES: usize = 10_000;

/// Whether an `--object` is of this kind.
pub(crate) fn is_authorization_object(object: &str) -> bool {
    kind(object).starts_with("authz-")
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

/// Reads the object of an ID.
///
/// # Errors
/// There is none; another type; a parameter that is missing, unknown, or has a value that it can't have.
pub(crate) fn find(objects: &[String], id: &str) -> Result<Authorization, String> {
    let mut found = None;
    for object in objects.iter().filter(|object| is_authorization_object(object)) {
        let (its_id, rules) = parse(object)?;
        if its_id == id {
            found = Some(rules);
        }
    }
    found.ok_or_else(|| format!("No authorization object with id '{id}'"))
}

fn parse(object: &str) -> Result<(String, Authorization), String> {
    let options = object.split_once(',').map_or("", |(_, options)| options);
    let mut pairs: BTreeMap<_, _> =
        parse_keyval(options).map_err(|error| format!("--object: {error}"))?.into_iter().collect();
    let id = pairs.remove("id").ok_or("Parameter 'id' is missing")?;
    let rules = match kind(object) {
        "authz-simple" => {
            let identity = pairs.remove("identity").ok_or("Parameter 'identity' is missing")?;
            Authorization::new(vec![Rule::exact(identity, Permission::Allow)], Permission::Deny)
        }
        "authz-list" => list(&mut pairs)?,
        "authz-list-file" => list_file(&mut pairs)?,
        other => {
            return Err(format!(
                "--object {other} is not supported (there are authz-simple, authz-list and authz-list-file)"
            ));
        }
    };
    match pairs.keys().next() {
        None => Ok((id, rules)),
        Some(key) => Err(format!("--object: Parameter '{key}' is not supported")),
    }
}

fn list(pairs: &mut BTreeMap<String, String>) -> Result<Authorization, String> {
    let policy = pairs.remove("policy");
    let mut rules = Vec::new();
    while rules.len() < MOST_RULES {
        let mut take = |key: &str| pairs.remove(&format!("rules.{}.{key}", rules.len()));
        let described = Described { pattern: take("match"), policy: take("policy"), format: take("format") };
        if described.pattern.is_none() && described.policy.is_none() && described.format.is_none() {
            break;
        }
        rules.push(described.rule()?);
    }
    Ok(Authorization::new(rules, otherwise(policy.as_deref())?))
}

fn list_file(pairs: &mut BTreeMap<String, String>) -> Result<Authorization, String> {
    let refresh = pairs.remove("refresh");
    if refresh.is_none_or(|value| parse_switch("refresh", &value) != Ok(false)) {
        return Err("--object: give refresh=off: the file of authz-list-file is read once".to_owned());
    }
    let name = pairs.remove("filename").ok_or("Parameter 'filename' is missing")?;
    let text = std::fs::read_to_string(&name).map_err(|error| format!("{name}: {error}"))?;
    let file: ListFile = serde_json::from_str(&text).map_err(|error| format!("{name}: {error}"))?;
    let rules = file.rules.iter().map(Described::rule).collect::<Result<Vec<_>, _>>();
    let rules = rules.map_err(|reason| format!("{name}: {reason}"))?;
    Ok(Authorization::new(rules, otherwise(file.policy.as_deref())?))
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

    fn found(object: &str) -> Result<Authorization, String> {
        find(&[object.to_owned()], "a")
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
        for wrong in ["{", r#"{"rules": [{"policy": "allow"}]}"#, r#"{"polices": "allow"}"#] {
            std::fs::write(file.path(), wrong).unwrap();
            assert!(found(&object).unwrap_err().contains(&file.path().display().to_string()));
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (object, reason) in [
            ("authz-pam,id=a,service=s", "authz-pam"),
            ("authz-simple,id=a", "'identity' is missing"),
            ("authz-simple,id=b,identity=x", "No authorization object with id 'a'"),
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
