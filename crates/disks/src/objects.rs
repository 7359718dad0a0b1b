//! `--object`: objects that options name by their IDs, as QEMU's programs take them: `TYPE,id=ID,...`, or JSON.

use crate::json_name::json_scalars;
use crate::keyval::parse_keyval;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use zeroize::Zeroizing;

/// Types of objects, with their parameters.
const TYPES: [(&str, &[&str]); 6] = [
    ("authz-list", &["policy=<allow|deny>", "rules=<list of match, policy, format>"]),
    ("authz-list-file", &["filename=<string>", "refresh=<off>"]),
    ("authz-simple", &["identity=<string>"]),
    ("secret", &["data=<string>", "file=<string>", "format=<raw|base64>", "iv=<string>", "keyid=<string>"]),
    (
        "tls-creds-psk",
        &["dir=<string>", "endpoint=<client|server>", "username=<string>", "verify-peer=<bool>"],
    ),
    ("tls-creds-x509", &["dir=<string>", "endpoint=<client|server>", "verify-peer=<bool>"]),
];
/// Parameters that QEMU has as well.
const UNSUPPORTED: [&str; 4] = ["loaded", "passwordid", "priority", "sanity-check"];
/// The refusal of an item that can't be shown: it may be a part of a secret.
const BAD_ITEM: &str = "--object: an item is no known option=value; a comma within a value is doubled";

/// One object: its type, its ID, and the parameters that nobody has taken yet.
///
/// It may be a secret, so that it is not to be shown.
#[derive(Clone)]
pub struct Object {
    kind: String,
    id: String,
    parameters: BTreeMap<String, Parameter>,
    /// The names of its parameters may be parts of a secret.
    hides_names: bool,
}

/// The value of a parameter.
#[derive(Clone)]
enum Parameter {
    /// A pair's, of any type.
    Word(Zeroizing<String>),
    /// A string in JSON.
    Text(Zeroizing<String>),
    /// A switch in JSON.
    Switch(bool),
    /// A value in JSON that no parameter can have.
    Other,
}

/// Reads the objects of a command line.
///
/// # Errors
/// An object can't be read; two have the same ID.
pub fn parse_objects(texts: &[String]) -> Result<Vec<Object>, String> {
    let objects = texts.iter().map(|text| Object::parse(text)).collect::<Result<Vec<_>, _>>()?;
    let mut ids = BTreeSet::new();
    match objects.iter().find(|object| !ids.insert(object.id())) {
        None => Ok(objects),
        Some(Object { id, .. }) => {
            Err(format!("attempt to add duplicate property '{id}' to object (type 'container')"))
        }
    }
}

/// The answer to an `--object` that asks for help in place of giving one.
pub fn object_help(text: &str) -> Option<String> {
    let items: Vec<&str> = text.split(',').collect();
    if text.starts_with('{') || !items.iter().any(|item| matches!(*item, "help" | "?")) {
        return None;
    }
    let kind = items.iter().rev().find_map(|item| item.strip_prefix("qom-type=")).unwrap_or(items[0]);
    let known = TYPES.iter().find(|(known, _)| *known == kind);
    Some(known.map_or_else(
        || format!("List of user creatable objects:\n  {}\n", TYPES.map(|(known, _)| known).join("\n  ")),
        |(_, parameters)| format!("{kind} options:\n  {}\n", parameters.join("\n  ")),
    ))
}

impl Object {
    fn parse(text: &str) -> Result<Self, String> {
        let parameters = if text.starts_with('{') { of_json(text) } else { of_pairs(text) }?;
        let hides_names = parameters.contains_key("data");
        let mut object = Self { kind: String::new(), id: String::new(), parameters, hides_names };
        object.kind = object.required("qom-type")?;
        if !TYPES.iter().any(|(known, _)| *known == object.kind) {
            let known = TYPES.map(|(known, _)| known).join(", ");
            return Err(format!(
                "Parameter 'qom-type' does not accept value '{}' (there are {known})",
                object.kind
            ));
        }
        object.id = object.required("id")?;
        if !is_identifier(&object.id) {
            return Err("Parameter 'id' expects an identifier: letters, digits, '-', '.', '_', starting with a letter"
                .to_owned());
        }
        Ok(object)
    }

    /// Its type, one of those that there are.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Its ID.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Takes a parameter that is text.
    ///
    /// # Errors
    /// It has another type.
    pub fn text(&mut self, name: &str) -> Result<Option<Zeroizing<String>>, String> {
        match self.parameters.remove(name) {
            None => Ok(None),
            Some(Parameter::Word(text) | Parameter::Text(text)) => Ok(Some(text)),
            Some(Parameter::Switch(_) | Parameter::Other) => Err(wrong_type(name, "string")),
        }
    }

    /// Takes a parameter that is text and no secret.
    ///
    /// # Errors
    /// It has another type.
    pub fn plain(&mut self, name: &str) -> Result<Option<String>, String> {
        Ok(self.text(name)?.map(|text| text.as_str().to_owned()))
    }

    /// Takes a parameter that must be there.
    ///
    /// # Errors
    /// It is missing, or has another type.
    pub fn required(&mut self, name: &str) -> Result<String, String> {
        self.plain(name)?.ok_or_else(|| format!("Parameter '{name}' is missing"))
    }

    /// Takes a parameter that is a switch.
    ///
    /// # Errors
    /// It has another value.
    pub fn switch(&mut self, name: &str) -> Result<Option<bool>, String> {
        match self.parameters.remove(name) {
            None => Ok(None),
            Some(Parameter::Switch(is_on)) => Ok(Some(is_on)),
            Some(Parameter::Word(word)) => match word.as_str() {
                "on" | "yes" | "true" | "y" => Ok(Some(true)),
                "off" | "no" | "false" | "n" => Ok(Some(false)),
                _ => Err(format!("Parameter '{name}' expects 'on' or 'off'")),
            },
            Some(Parameter::Text(_) | Parameter::Other) => Err(wrong_type(name, "boolean")),
        }
    }

    /// Whether a parameter, or one below it, was given and not taken yet.
    pub fn has(&self, name: &str) -> bool {
        self.parameters
            .keys()
            .any(|key| key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
    }

    /// Refuses what nobody has taken.
    ///
    /// # Errors
    /// There is a parameter that its type does not have.
    pub fn finish(self) -> Result<(), String> {
        match self.parameters.keys().next() {
            None => Ok(()),
            Some(_) if self.hides_names => Err(BAD_ITEM.to_owned()),
            Some(name) if UNSUPPORTED.contains(&name.as_str()) => {
                Err(format!("--object {}: Parameter '{name}' is not supported", self.kind))
            }
            Some(name) => Err(format!("Parameter '{name}' is unexpected")),
        }
    }
}

fn wrong_type(name: &str, expected: &str) -> String {
    format!("Invalid parameter type for '{name}', expected: {expected}")
}

/// Whether QEMU would take this for an ID.
fn is_identifier(id: &str) -> bool {
    id.starts_with(|c: char| c.is_ascii_alphabetic())
        && id.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_'))
}

/// Parameters of pairs, of which the first may be the type alone. Of those with one name, the last counts.
fn of_pairs(text: &str) -> Result<BTreeMap<String, Parameter>, String> {
    let end = text.find(['=', ',']).unwrap_or(text.len());
    let has_bare_type = end > 0 && !text[end..].starts_with('=');
    let pairs =
        parse_keyval(&Zeroizing::new(format!("{}{text}", if has_bare_type { "qom-type=" } else { "" })));
    let pairs = pairs.map_err(|error| {
        // What is no pair may be the rest of a secret that has a comma.
        if text.contains("secret") || text.contains("data") { BAD_ITEM.to_owned() } else { error.to_string() }
    })?;
    Ok(pairs.into_iter().map(|(name, value)| (name, Parameter::Word(value.into()))).collect())
}

/// Parameters of a JSON object, with the dotted names of what is below it.
fn of_json(text: &str) -> Result<BTreeMap<String, Parameter>, String> {
    let values = json_scalars(text).map_err(|error| format!("--object: {error}"))?;
    let parameter = |value| match value {
        Value::String(text) => Parameter::Text(text.into()),
        Value::Bool(is_on) => Parameter::Switch(is_on),
        _ => Parameter::Other,
    };
    Ok(values.into_iter().map(|(name, value)| (name, parameter(value))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Object {
        Object::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn refusal(texts: &[&str]) -> String {
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        parse_objects(&texts).err().unwrap_or_default()
    }

    #[test]
    fn one_object_has_many_forms() {
        for text in [
            "secret,id=a,data=x,,y",
            "qom-type=secret,id=a,data=x,,y",
            "data=x,,y,id=a,qom-type=secret",
            "authz-simple,id=b,id=a,qom-type=secret,data=x,,y",
            r#"{"qom-type": "secret", "id": "a", "data": "x,y"}"#,
            "{'data': 'x,y', 'qom-type': 'secret', 'id': 'a'}",
        ] {
            let mut object = parsed(text);
            assert_eq!((object.kind(), object.id()), ("secret", "a"), "{text}");
            assert_eq!(object.text("data").unwrap().unwrap().as_str(), "x,y", "{text}");
            assert_eq!(object.finish(), Ok(()), "{text}");
        }
    }

    #[test]
    fn lists_and_switches_are_the_same_in_both_forms() {
        for text in [
            "authz-list,id=a,rules.0.match=x,refresh=off",
            r#"{"qom-type": "authz-list", "id": "a", "rules": [{"match": "x"}], "refresh": false}"#,
        ] {
            let mut object = parsed(text);
            assert!(object.has("rules.0") && object.has("rules") && !object.has("rule"));
            assert_eq!(object.plain("rules.0.match").unwrap().as_deref(), Some("x"));
            assert_eq!(object.switch("refresh"), Ok(Some(false)));
        }
    }

    /// Each message is that of QEMU 10.0, as far as it goes.
    #[test]
    fn what_is_no_object_is_refused_as_by_qemu() {
        for (text, message) in [
            ("", "Parameter 'qom-type' is missing"),
            ("id=k", "Parameter 'qom-type' is missing"),
            ("{'id': 'k'}", "Parameter 'qom-type' is missing"),
            ("secret,data=x", "Parameter 'id' is missing"),
            ("foo,id=k", "Parameter 'qom-type' does not accept value 'foo'"),
            ("authz-simple,,id=k", "Parameter 'qom-type' does not accept value 'authz-simple,id=k'"),
            ("[]", "Parameter 'qom-type' does not accept value '[]'"),
            ("authz-simple,id=k,on", "Expected '=' after parameter 'on'"),
            ("{'qom-type': 5}", "Invalid parameter type for 'qom-type', expected: string"),
        ] {
            let error = refusal(&[text]);
            assert!(error.starts_with(message), "{text}: {error}");
        }
        for id in ["", "1a", "a/b", "-a", "é"] {
            assert!(refusal(&[&format!("secret,id={id},data=x")]).contains("expects an identifier"), "{id}");
        }
        assert_eq!(refusal(&["secret,id=a.b-c_D9,data=x"]), "");
    }

    #[test]
    fn an_id_is_that_of_one_object() {
        let message = "attempt to add duplicate property 'a' to object (type 'container')";
        let simple = "authz-simple,id=a,identity=x";
        for other in [simple, "secret,id=a,data=x", "{'qom-type': 'tls-creds-psk', 'id': 'a'}"] {
            assert_eq!(refusal(&[simple, other]), message);
        }
        assert_eq!(refusal(&[simple, "authz-simple,id=b,identity=x"]), "");
    }

    #[test]
    fn no_part_of_a_secret_is_told() {
        for text in [
            "data=hunter2,id=k",
            "secretdata=hunter2,id=k",
            "secret,data=a,hunter2",
            "data=a,hunter2,qom-type=secret,id=k",
            r#"{"data": "hunter2"}"#,
            r#"{"data": "hunter2", "id": 1}"#,
            r#"{"data": "hunter2", "qom-type": "other", "id": "k"}"#,
            r#"{"data": "hunter2""#,
            r#"{"data": hunter2}"#,
            r#"{"qom-type": "secret", "id": "k", "data": "a", "hunter2"}"#,
        ] {
            let error = refusal(&[text]);
            assert!(!error.is_empty() && !error.contains("hunter2"), "{text}: {error}");
        }
        let error = parsed("data=a,hunter2=b,qom-type=secret,id=k").finish().unwrap_err();
        assert_eq!(error, BAD_ITEM);
    }

    #[test]
    fn parameters_that_a_type_does_not_have_are_named() {
        let error = |text: &str| parsed(text).finish().unwrap_err();
        assert_eq!(error("authz-simple,id=a,y=z"), "Parameter 'y' is unexpected");
        assert!(error("tls-creds-x509,id=a,priority=NORMAL").contains("'priority' is not supported"));
        let mut object =
            parsed("{'qom-type': 'tls-creds-x509', 'id': 'a', 'dir': true, 'verify-peer': 'off'}");
        assert_eq!(object.text("dir").err().unwrap(), "Invalid parameter type for 'dir', expected: string");
        assert_eq!(
            object.switch("verify-peer"),
            Err("Invalid parameter type for 'verify-peer', expected: boolean".to_owned())
        );
        let mut object = parsed("tls-creds-x509,id=a,verify-peer=maybe");
        assert_eq!(
            object.switch("verify-peer"),
            Err("Parameter 'verify-peer' expects 'on' or 'off'".to_owned())
        );
    }

    #[test]
    fn help_is_the_list_of_types_or_of_parameters() {
        assert!(object_help("help").unwrap().contains("\n  secret\n"));
        for text in ["secret,help", "secret,id=a,?", "qom-type=secret,help"] {
            assert!(object_help(text).unwrap().starts_with("secret options:\n  data=<string>\n"), "{text}");
        }
        for text in ["secret,id=help,data=x", "{'help': 1}", "secret,id=a,data=helpful"] {
            assert_eq!(object_help(text), None, "{text}");
        }
    }
}
