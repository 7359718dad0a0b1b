//! The name by which a new overlay finds the image that it stands on.

use super::staging::{directory_of, from_io};
use crate::{Error, ErrorKind, Result};
use std::path::Path;

/// The name of `image` for an overlay at `target`: relative if it lies in or below the overlay's directory, so that both
/// can be moved together and the default policy for references lets it be opened; absolute otherwise.
///
/// # Errors
/// One of the directories can't be found; [`ErrorKind::Unsupported`]: the name is not UTF-8.
pub fn backing_name(image: &Path, target: &Path) -> Result<String> {
    let lost = |path| move |error| from_io(path, "can't find out where it lies", &error);
    let whole = std::fs::canonicalize(image).map_err(lost(image))?;
    let directory = std::fs::canonicalize(directory_of(target)).map_err(lost(target))?;
    let name = whole.strip_prefix(&directory).unwrap_or(&whole).to_str().ok_or_else(|| {
        let message = "the name is not UTF-8, so an image can't refer to it";
        Error::new(ErrorKind::Unsupported, message).on(image)
    })?;
    // QEMU takes what is in front of a colon for a protocol, unless a slash comes first.
    Ok(if name.contains(':') && !name.starts_with('/') { format!("./{name}") } else { name.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backing_files_nearby_get_relative_names() {
        let root = tempfile::tempdir().unwrap();
        let root = std::fs::canonicalize(root.path()).unwrap();
        std::fs::create_dir(root.join("sub")).unwrap();
        for name in ["base", "sub/base", "a:b"] {
            std::fs::write(root.join(name), b"").unwrap();
        }
        let name = |image: &str, target: &str| backing_name(&root.join(image), &root.join(target)).unwrap();
        assert_eq!(name("base", "new"), "base");
        assert_eq!(name("sub/base", "new"), "sub/base");
        assert_eq!(name("a:b", "new"), "./a:b");
        assert_eq!(name("sub/../base", "new"), "base");
        assert_eq!(name("base", "sub/new"), root.join("base").to_str().unwrap());
        assert!(backing_name(&root.join("missing"), &root.join("new")).is_err());
    }
}
