//! A container image of one program, as an archive of an OCI image layout
//! (<https://github.com/opencontainers/image-spec/blob/main/image-layout.md>).

use super::Release;
use super::archives::tar;
use super::binaries::Program;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;
use zebu_bench::Outcome;
use zebu_bench::process::{output, run};

fn said(path: &Path, error: std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

/// Puts a file among the blobs; its descriptor.
fn add(layout: &Path, file: &Path, media_type: &str) -> Outcome<Value> {
    let sum = output(Command::new("sha256sum").arg(file))?;
    let digest = sum.split_whitespace().next().unwrap_or_default().to_owned();
    let size = fs::metadata(file).map_err(|e| said(file, e))?.len();
    let blob = layout.join("blobs/sha256").join(&digest);
    fs::copy(file, &blob).map_err(|e| said(&blob, e))?;
    Ok(json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size }))
}

fn add_json(layout: &Path, value: &Value, media_type: &str) -> Outcome<Value> {
    let file = tempfile::NamedTempFile::new().map_err(|e| e.to_string())?;
    fs::write(file.path(), value.to_string()).map_err(|e| said(file.path(), e))?;
    add(layout, file.path(), media_type)
}

/// One image for all machines.
pub(super) fn image(release: &Release, programs: &[Program]) -> Outcome {
    let scratch = tempfile::tempdir().map_err(|e| e.to_string())?;
    let layout = scratch.path().join("layout");
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).map_err(|e| said(&blobs, e))?;
    let mut manifests = Vec::new();
    for program in programs {
        let root = scratch.path().join(program.machine.name());
        fs::create_dir_all(&root).map_err(|e| said(&root, e))?;
        fs::copy(&program.stripped, root.join("zebu")).map_err(|e| said(&root, e))?;
        let packed = scratch.path().join("layer.tar.gz");
        tar(&root, "./zebu", "", &packed)?;
        let plain = format!("gzip -dc {} | sha256sum", packed.display());
        let plain = output(Command::new("sh").arg("-c").arg(plain))?;
        let plain = plain.split_whitespace().next().unwrap_or_default().to_owned();
        let layer = add(&layout, &packed, "application/vnd.oci.image.layer.v1.tar+gzip")?;
        let platform = json!({ "architecture": program.machine.debian(), "os": "linux" });
        let labels = json!({
            "org.opencontainers.image.version": release.version,
            "org.opencontainers.image.source": release.place,
            "org.opencontainers.image.licenses": "MIT OR Apache-2.0",
        });
        let config = json!({
            "architecture": program.machine.debian(), "os": "linux",
            "config": { "Entrypoint": ["/zebu"], "Labels": labels },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{plain}")] },
        });
        let config = add_json(&layout, &config, "application/vnd.oci.image.config.v1+json")?;
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({ "schemaVersion": 2, "mediaType": kind, "config": config, "layers": [layer] });
        let mut descriptor = add_json(&layout, &manifest, kind)?;
        descriptor["platform"] = platform;
        manifests.push(descriptor);
    }
    let kind = "application/vnd.oci.image.index.v1+json";
    let index = json!({ "schemaVersion": 2, "mediaType": kind, "manifests": manifests });
    let mut whole = add_json(&layout, &index, kind)?;
    whole["annotations"] = json!({ "org.opencontainers.image.ref.name": release.version });
    let index = json!({ "schemaVersion": 2, "mediaType": kind, "manifests": [whole] });
    let write = |name: &str, text: String| {
        let place = layout.join(name);
        fs::write(&place, text).map_err(|e| said(&place, e))
    };
    write("index.json", index.to_string())?;
    write("oci-layout", json!({ "imageLayoutVersion": "1.0.0" }).to_string())?;
    let to = release.path(&format!("zebu-{}-oci.tar", release.version));
    let mut command = Command::new("tar");
    command.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0"]);
    run(command.arg("-C").arg(&layout).arg("-cf").arg(to).args(["blobs", "index.json", "oci-layout"]))
}
