//! Why an image can't be opened, and which option of the command line is a remedy.

use crate::failure::Failure;
use zebu_disks::{Context, ForceShare, ImageSpec, Program};
use zebu_engine::{Access, ErrorKind, Remedy};

/// The option of a command that gives the key of a backing file, where one is missing or wrong.
pub(crate) fn backing_key_remedy(dialect: Program, error: &zebu_engine::Error) -> Option<&'static str> {
    let is_one =
        matches!(error.kind(), ErrorKind::KeyMissing | ErrorKind::WrongKey) && error.remedy().is_none();
    (is_one && !dialect.is_qemu()).then_some(
        " (--object secret,id=KEY,file=PATH gives a key, and --backing-key-secret KEY names it, once for each image down the chain)",
    )
}

/// The key is missing of an image of the chain.
fn key_missing(spec: &ImageSpec, context: &Context, error: &zebu_engine::Error) -> Failure {
    if context.dialect.is_qemu() {
        return Failure::opening(context, &spec.path, error);
    }
    let backing = if error.image() == Some(&spec.path) { "" } else { ", with backing. before it" };
    let remedy = format!(
        " (the image is encrypted: --object secret,id=KEY,file=PATH gives a key, and this parameter names it in \
         --image-opts{backing})"
    );
    Failure::opening_with_remedy(context, &spec.path, error, &remedy)
}

/// Why the image can't be opened, and which option of this command line is a remedy.
pub(crate) fn image_failure(spec: &ImageSpec, context: &Context, error: &zebu_engine::Error) -> Failure {
    let is_named = error.image() == Some(&spec.path);
    let remedy = match error.kind() {
        ErrorKind::ForeignFormat
            if is_named
                && context.disks.names.is_remote(&spec.path)
                && error.message().contains("packed") =>
        {
            format!(" ({}); packed files on servers are not unpacked: download it first", spec.called_raw)
        }
        ErrorKind::ForeignFormat if is_named => format!(" ({})", spec.called_raw),
        _ if is_named && error.remedy() == Some(&Remedy::NameFormatRaw) => {
            format!(" ({})", spec.called_raw)
        }
        ErrorKind::ForeignFormat => {
            " (zebu rebase -u -F raw names the format in the image above it)".to_owned()
        }
        ErrorKind::Locked
            if error.remedy() != Some(&Remedy::WaitForWrites)
                && spec.force_share == ForceShare::Offered
                && spec.options.access == Access::ReadOnly =>
        {
            " (stop that program first; to read all the same, there is -U)".to_owned()
        }
        ErrorKind::KeyMissing => return key_missing(spec, context, error),
        _ => return Failure::opening(context, &spec.path, error),
    };
    Failure::opening_with_remedy(context, &spec.path, error, &remedy)
}
