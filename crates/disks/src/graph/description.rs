//! Nodes in QEMU's words: a plain name where one says everything, and `json:` with nested objects otherwise.

use super::debug_options::split_name;
use super::pairs::Pair;
use crate::json_name::{TypedValues, parse_json_name};
use crate::qemu_json;
use serde_json::{Map, Value};

/// Nodes below a node.
const CHILDREN: [&str; 4] = ["file", "image", "raw", "test"];

/// Options that are texts, whatever they look like.
const TEXTS: [&str; 3] = ["driver", "filename", "config"];

/// A node with its options, and the nodes below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description(Map<String, Value>);

impl Description {
    /// The node that options describe.
    pub(super) fn of_pairs(pairs: &[Pair]) -> Self {
        let mut node = Map::new();
        for (key, value) in pairs {
            insert(&mut node, key, value);
        }
        name_files(&mut node);
        Self(node)
    }

    /// The same with numbers and switches in place of their texts.
    pub(super) fn typed(mut self, values: &TypedValues) -> Self {
        for (key, value) in values.iter() {
            set_type(&mut self.0, key, value);
        }
        self
    }

    /// The node that a name describes.
    pub fn of_name(name: &str) -> Self {
        if let Some(Ok(pairs)) = parse_json_name(name) {
            return Self::of_pairs(&pairs).typed(&TypedValues::of_name(name));
        }
        let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        if let Some((config, image)) = split_name(name).ok().filter(|_| name.starts_with("blkdebug:")) {
            let config = (!config.is_empty()).then(|| pair("config", config));
            let own = [pair("driver", "blkdebug"), pair("image.filename", image)];
            return Self::of_pairs(&own.into_iter().chain(config).collect::<Vec<_>>());
        }
        if let Some((raw, test)) = name.strip_prefix("blkverify:").and_then(|names| names.split_once(':')) {
            let own = [pair("driver", "blkverify"), pair("raw.filename", raw), pair("test.filename", test)];
            return Self::of_pairs(&own);
        }
        match ["null-co", "null-aio"].into_iter().find(|driver| name.starts_with(&format!("{driver}:"))) {
            Some(driver) => Self::of_pairs(&[pair("driver", driver)]),
            None => Self::of_pairs(&[pair("filename", name)]),
        }
    }

    /// The driver.
    pub fn driver(&self) -> &str {
        self.text("driver")
    }

    /// Whether it is a part of a disk.
    pub fn is_part(&self) -> bool {
        self.driver() == "raw" && (self.0.contains_key("offset") || self.0.contains_key("size"))
    }

    /// The node below it under that name.
    pub fn child(&self, name: &str) -> Self {
        let child = self.0.get(name).and_then(Value::as_object).cloned();
        let Some(mut child) = child else { return Self(Map::new()) };
        name_files(&mut child);
        Self(child)
    }

    /// The name that QEMU has for an image in this node.
    pub fn name_of_image(&self, format: &str) -> String {
        let plain = self.name();
        if !plain.starts_with("json:") {
            return plain;
        }
        let members = [("driver", format.into()), ("file", Value::Object(self.0.clone()))];
        json(&members.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }

    /// The name that QEMU has for it.
    pub fn name(&self) -> String {
        self.plain_name().unwrap_or_else(|| json(&self.0))
    }

    /// A name that is no JSON and says everything.
    fn plain_name(&self) -> Option<String> {
        let only = |keys: &[&str]| self.0.keys().all(|key| key == "driver" || keys.contains(&key.as_str()));
        match self.driver() {
            "file" | "host_device" if only(&["filename"]) => Some(self.text("filename").to_owned()),
            "null-co" | "null-aio" if only(&[]) => Some(format!("{}://", self.driver())),
            "blkdebug" if only(&["config", "image"]) => {
                Some(format!("blkdebug:{}:{}", self.text("config"), self.child("image").plain_name()?))
            }
            "blkverify" if only(&["raw", "test"]) => {
                let [raw, test] = ["raw", "test"].map(|name| self.child(name).plain_name());
                Some(format!("blkverify:{}:{}", raw?, test?))
            }
            "preallocate" | "copy-on-read" | "compress" => None,
            _ if only(&["file"]) => self.child("file").plain_name(),
            _ => None,
        }
    }

    fn text(&self, key: &str) -> &str {
        self.0.get(key).and_then(Value::as_str).unwrap_or_default()
    }
}

/// Puts an option into the node that its dotted name leads to.
fn insert(node: &mut Map<String, Value>, key: &str, value: &str) {
    let below = key.split_once('.').filter(|(child, _)| CHILDREN.contains(child));
    let Some((child, own)) = below else {
        node.insert(key.to_owned(), value.into());
        return;
    };
    let entry = node.entry(child).or_insert_with(|| Value::Object(Map::new()));
    if !entry.is_object() {
        *entry = Value::Object(Map::new());
    }
    if let Value::Object(members) = entry {
        insert(members, own, value);
    }
}

/// Puts a number or a switch in place of an option's text.
fn set_type(node: &mut Map<String, Value>, key: &str, value: &Value) {
    let below = key.split_once('.').filter(|(child, _)| CHILDREN.contains(child));
    if let Some((child, own)) = below {
        if let Some(Value::Object(members)) = node.get_mut(child) {
            set_type(members, own, value);
        }
    } else if !TEXTS.contains(&key)
        && let Some(text) = node.get_mut(key)
    {
        *text = value.clone();
    }
}

fn json(members: &Map<String, Value>) -> String {
    format!("json:{}", qemu_json::line(&Value::Object(members.clone())))
}

/// Gives each node without a driver that has a file's name the driver of files.
fn name_files(node: &mut Map<String, Value>) {
    if !node.contains_key("driver") && node.contains_key("filename") {
        node.insert("driver".to_owned(), "file".into());
    }
    for child in CHILDREN {
        if let Some(Value::Object(members)) = node.get_mut(child) {
            name_files(members);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keyval::parse_keyval;

    // As qemu-img 10.0 prints them.
    #[test]
    fn names_are_as_qemu_has_them() {
        for (options, name) in [
            ("driver=blkdebug,image.filename=a", "blkdebug::a"),
            ("driver=blkdebug,config=c,image.filename=a", "blkdebug:c:a"),
            ("driver=null-co,size=64k", r#"json:{"driver": "null-co", "size": "64k"}"#),
            ("driver=null-aio", "null-aio://"),
            ("driver=qcow2,file.driver=blkdebug,file.image.filename=a", "blkdebug::a"),
            ("driver=blkverify,raw.filename=r,test.driver=qcow2,test.file.filename=t", "blkverify:r:t"),
            (
                "driver=raw,offset=1024,size=65536,file.filename=b",
                r#"json:{"offset": "1024", "driver": "raw", "size": "65536", "file": {"driver": "file", "filename": "b"}}"#,
            ),
            (
                "driver=blkdebug,align=4k,inject-error.0.event=l2_load,image.filename=b",
                r#"json:{"image": {"driver": "file", "filename": "b"}, "driver": "blkdebug", "inject-error.0.event": "l2_load", "align": "4k"}"#,
            ),
        ] {
            let description = Description::of_pairs(&parse_keyval(options).unwrap());
            assert_eq!(description.name(), name);
            assert_eq!(Description::of_name(name).name(), name);
        }
        for name in [
            r#"json:{"read-zeroes": true, "driver": "null-co", "size": 65536}"#,
            r#"json:{"offset": "1k", "driver": "raw", "size": 512, "file": {"driver": "file", "filename": "b"}}"#,
        ] {
            assert_eq!(Description::of_name(name).name(), name);
        }
        let below = Description::of_name(r#"json:{"driver":"preallocate","file":{"filename":"a"}}"#);
        let name = r#"json:{"driver": "qcow2", "file": {"driver": "preallocate", "file": {"driver": "file", "filename": "a"}}}"#;
        assert_eq!(below.name_of_image("qcow2"), name);
    }
}
