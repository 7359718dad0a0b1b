//! Manifests that refer to an image: by the registry's list of them, or by a tag that clients keep (the referrers tag schema).

use crate::client::header;
use crate::digest::Digest;
use crate::document::{Descriptor, INDEX, MANIFEST};
use crate::failure::Failure;
use crate::hashes::HASHES;
use crate::name::Reference;
use crate::registry::Registry;
use serde_json::{Value, json};

/// How often the list is written where others write it, too.
const MOST_TRIES: usize = 8;

/// Attaches hashes to an image, whose configuration is `config`.
pub(crate) fn attach(
    registry: &Registry,
    image: &Descriptor,
    config: &Descriptor,
    hashes: &[&Descriptor],
) -> Result<(), Failure> {
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "artifactType": HASHES,
        "config": config,
        "layers": hashes,
        "subject": image,
    });
    let bytes = manifest.to_string().into_bytes();
    let own = Descriptor::new(MANIFEST, Digest::of(&bytes), bytes.len() as u64);
    let reference = Reference::Digest(own.digest.clone());
    let answer = registry.put_manifest(&reference, MANIFEST, bytes)?;
    // A registry that keeps the list says so.
    if header(&answer, "oci-subject").is_some() {
        return Ok(());
    }
    let tag = Reference::Tag(format!("{}-{}", image.digest.algorithm(), image.digest.hex()));
    for _ in 0..MOST_TRIES {
        let mut index = listed(registry, &tag)?;
        let Some(entries) = index.get_mut("manifests").and_then(Value::as_array_mut) else {
            return Err(Failure::wrong(format!("the list of what refers to the image, {tag}, is no index")));
        };
        let told = own.digest.to_string();
        if entries.iter().any(|entry| entry["digest"] == told.as_str()) {
            return Ok(());
        }
        entries.push(json!({
            "mediaType": MANIFEST,
            "digest": own.digest,
            "size": own.size,
            "artifactType": HASHES,
        }));
        // The next look tells whether another's list has replaced it.
        registry.put_manifest(&tag, INDEX, index.to_string().into_bytes())?;
    }
    Err(Failure::new(libc::EBUSY, format!("others write the list of what refers to the image, {tag}")))
}

fn listed(registry: &Registry, tag: &Reference) -> Result<Value, Failure> {
    match registry.manifest(tag) {
        Ok(told) => serde_json::from_slice(&told.bytes)
            .map_err(|error| Failure::wrong(format!("the list of what refers to the image: {error}"))),
        Err(failure) if failure.errno == libc::ENOENT => {
            Ok(json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [] }))
        }
        Err(failure) => Err(failure),
    }
}
