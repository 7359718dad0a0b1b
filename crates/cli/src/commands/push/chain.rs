//! The files of an overlay and of what it stands on, as they are pushed.

use super::SECTOR;
use std::fs::File;
use zebu_disks::Context;
use zebu_engine::{Format, Image};
use zebu_oci::{LayerFormat, StackFile};

/// The files of the chain of `image`, the lowest first; `title` is the name of the top in the image.
///
/// # Errors
/// A file is not of this machine, is of another format than qcow2 and raw, encrypted, or not all that its image needs.
pub(super) fn files(context: &Context, image: &Image, title: &str) -> Result<Vec<StackFile>, String> {
    let mut files = Vec::new();
    let mut next = Some(image.clone());
    while let Some(image) = next {
        let path = image.path().to_owned();
        let shown = path.display();
        if context.disks.names.named(&path).is_some() || !path.exists() {
            return Err(format!(
                "'{shown}' in its chain is no local file: convert it, which makes one file of the chain"
            ));
        }
        let info = image.info().map_err(|error| error.to_string())?;
        let format = match image.format() {
            Format::Qcow2 => LayerFormat::Qcow2,
            Format::Raw => LayerFormat::Raw,
            other => {
                let other = other.name();
                return Err(format!(
                    "'{shown}' in its chain is {other}, and a chain of blobs has only qcow2 and raw images: \
                     convert it, which makes one file of the chain"
                ));
            }
        };
        let has_data_file = info.qcow2.as_ref().is_some_and(|qcow2| qcow2.data_file.is_some());
        let is_part = format == LayerFormat::Raw && info.virtual_size.abs_diff(info.file_length) >= SECTOR;
        if has_data_file || is_part || image.is_encrypted() {
            let why = if image.is_encrypted() {
                "is encrypted"
            } else if has_data_file {
                "has its data in another file"
            } else {
                "is only a part of its file"
            };
            return Err(format!(
                "'{shown}' in its chain {why}: convert it, which makes one file of the chain"
            ));
        }
        let own = path.file_name().map_or_else(|| "disk".into(), |name| name.to_string_lossy());
        let title = if files.is_empty() { title.to_owned() } else { own.into_owned() };
        let file = File::open(&path).map_err(|error| format!("'{shown}': {error}"))?;
        files.push(StackFile { file, format, title });
        next = image.backing();
    }
    files.reverse();
    Ok(files)
}
