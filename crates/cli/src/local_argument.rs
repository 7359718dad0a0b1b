//! Arguments that are names of local files, or of targets that may be elsewhere.

use clap::builder::{OsStringValueParser, TypedValueParser};
use std::path::PathBuf;
use zebu_disks::{is_on_server, local_path};

/// A parser of paths. What QEMU takes for a protocol is refused.
pub(crate) fn path_argument() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(|name| local_path(&name))
}

/// The same for a target that may be elsewhere as well, such as an object in a store: its name stays what it is.
pub(crate) fn target_argument() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().try_map(|name| {
        let is_elsewhere = name.to_str().is_some_and(is_on_server);
        if is_elsewhere { Ok(PathBuf::from(name)) } else { local_path(&name) }
    })
}
