//! Why a command failed: what is printed, and the exit code.

use rustix::io::Errno;
use std::error::Error as _;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::Path;
use zebu_disks::{Context, DiskError, Program, Reference, errno_text, printable, without_secrets};
use zebu_engine::storage::{IoError, IoErrorKind, Op};
use zebu_engine::{ErrorKind, Remedy};

/// The exit code of everything that fails, usage errors included, as in qemu-img.
pub(crate) const EXIT_FAILURE: u8 = 1;
/// The exit code after SIGINT or SIGTERM.
pub(crate) const EXIT_INTERRUPTED: u8 = 130;

/// A failed command. Printed as one line on standard error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The event, the file and the remedy; nothing is printed if `None`.
    pub(crate) message: Option<String>,
    /// Exit code of the process.
    pub(crate) exit: u8,
    /// Whether the command line was wrong, so that the help is worth a hint.
    pub(crate) kind: FailureKind,
    /// A line of its own behind the message, as QEMU's programs have them.
    pub(crate) hint: Option<&'static str>,
}

/// Whether the user's command line or the world was wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailureKind {
    /// The command line can't be understood.
    Usage,
    /// An option is unknown, or lacks its value. QEMU's parser names the command in front of the message.
    Option,
    /// The command was understood and failed.
    Runtime,
}

impl Failure {
    /// A failure while running.
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self { message: Some(message.into()), exit: EXIT_FAILURE, kind: FailureKind::Runtime, hint: None }
    }

    /// A wrong command line.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self { message: Some(message.into()), exit: EXIT_FAILURE, kind: FailureKind::Usage, hint: None }
    }

    /// An option that is unknown, or lacks its value.
    pub(crate) fn option(message: impl Into<String>) -> Self {
        Self { message: Some(message.into()), exit: EXIT_FAILURE, kind: FailureKind::Option, hint: None }
    }

    /// A failure that needs no words any more.
    pub(crate) fn silent(exit: u8) -> Self {
        Self { message: None, exit, kind: FailureKind::Runtime, hint: None }
    }

    /// The same with a line behind it.
    pub(crate) fn with_hint(mut self, hint: &'static str) -> Self {
        self.hint = Some(hint);
        self
    }

    /// The same with `text` at the end of the message.
    pub(crate) fn adding(mut self, text: &str) -> Self {
        if let Some(message) = &mut self.message {
            message.push_str(text);
        }
        self
    }

    /// The same with another exit code.
    pub(crate) fn with_exit(mut self, exit: u8) -> Self {
        self.exit = exit;
        self
    }

    /// An image that can't be opened. The file that failed is named first, even where it is not `image` itself but
    /// one that it refers to.
    pub(crate) fn opening(context: &Context, image: &Path, error: &zebu_engine::Error) -> Self {
        Self::naming(context, "open", image, error, &remedy(error))
    }

    /// The same with a remedy that only the command line knows, such as " (-f raw)".
    pub(crate) fn opening_with_remedy(
        context: &Context,
        image: &Path,
        error: &zebu_engine::Error,
        remedy: &str,
    ) -> Self {
        Self::naming(context, "open", image, error, remedy)
    }

    /// A name that can't be the name of an image to open.
    pub(crate) fn opening_name(name: &OsStr, reason: &str) -> Self {
        Self::new(format!("Could not open '{}': {reason}", without_secrets(name)))
    }

    /// A name that can't be the name of an image to make.
    pub(crate) fn creating_name(name: &OsStr, reason: &str) -> Self {
        Self::new(format!("Could not create '{}': {reason}", without_secrets(name)))
    }

    /// An image that can't be made.
    pub(crate) fn creating(context: &Context, image: &Path, error: &zebu_engine::Error) -> Self {
        Self::naming(context, "create", image, error, &remedy(error))
    }

    fn naming(context: &Context, verb: &str, image: &Path, error: &zebu_engine::Error, remedy: &str) -> Self {
        if error.kind() == ErrorKind::Cancelled {
            return Self::interrupted();
        }
        let mut message = format!("Could not {verb} '{}': ", image.display());
        if error.image().is_some_and(|named| named != image) {
            let _ = write!(message, "{error}");
        } else {
            message.push_str(&reason(context, error, image));
        }
        message.push_str(remedy);
        Self::new(message)
    }

    /// A step on an open image that failed: `doing` says which, as in "reading".
    pub(crate) fn during(doing: &str, error: &zebu_engine::Error) -> Self {
        if error.kind() == ErrorKind::Cancelled {
            return Self::interrupted();
        }
        let mut message = format!("{doing}: {error}");
        message.push_str(&remedy(error));
        Self::new(message)
    }

    /// The same, where `doing` names `file` already, which has a temporary name until it is complete.
    pub(crate) fn during_on(context: &Context, doing: &str, file: &Path, error: &zebu_engine::Error) -> Self {
        match error.image() {
            Some(image) if error.kind() != ErrorKind::Cancelled && stands_for(image, file) => {
                Self::new(format!("{doing}: {}{}", reason(context, error, image), remedy(error)))
            }
            _ => Self::during(doing, error),
        }
    }

    /// SIGINT or SIGTERM arrived.
    pub(crate) fn interrupted() -> Self {
        Self::new("interrupted").with_exit(EXIT_INTERRUPTED)
    }

    /// An interruption while new images were made over files that were there before, and stay.
    pub(crate) fn interrupted_leaving(files: &[&Path]) -> Self {
        let mut message = "interrupted".to_owned();
        for file in files {
            let _ = write!(
                message,
                "; '{}' existed before and is kept: it may be overwritten in part, and no complete image",
                file.display()
            );
        }
        Self::new(message).with_exit(EXIT_INTERRUPTED)
    }

    /// The text for standard error, line ends included: one line, and the hint at the help after a usage error.
    pub(crate) fn text(&self, dialect: Program, command: Option<&str>) -> String {
        let Some(message) = &self.message else { return String::new() };
        let full = match command {
            Some(command) => format!("{} {command}", dialect.name()),
            None => dialect.name().to_owned(),
        };
        let name = if self.kind == FailureKind::Option { &full } else { dialect.name() };
        let message = &without_numbers(message);
        let message = if dialect.is_qemu() { &in_qemus_words(message) } else { message };
        let mut text = format!("{name}: {}\n", printable(message));
        if let Some(hint) = self.hint {
            let _ = writeln!(text, "{hint}");
        }
        if self.kind != FailureKind::Runtime {
            let information = if dialect.is_qemu() { "info" } else { "information" };
            let _ = writeln!(text, "Try '{full} --help' for more {information}");
        }
        text
    }
}

impl From<zebu_engine::Error> for Failure {
    fn from(error: zebu_engine::Error) -> Self {
        if error.kind() == ErrorKind::Cancelled {
            return Self::interrupted();
        }
        let mut message = error.to_string();
        message.push_str(&remedy(&error));
        Self::new(message)
    }
}

impl From<DiskError> for Failure {
    fn from(error: DiskError) -> Self {
        match error {
            DiskError::Cancelled => Self::interrupted(),
            DiskError::Contradiction(reason) => Self::usage(reason),
            DiskError::Engine(error) => error.into(),
            other => Self::new(other.to_string()),
        }
    }
}

impl From<IoError> for Failure {
    fn from(error: IoError) -> Self {
        zebu_engine::Error::from(error).into()
    }
}

/// A message without the numbers that the standard library appends to the system's words.
fn without_numbers(message: &str) -> String {
    let (mut text, mut rest) = (String::new(), message);
    while let Some((before, behind)) = rest.split_once(" (os error ") {
        text.push_str(before);
        rest = behind.trim_start_matches(|c: char| c.is_ascii_digit());
        rest = rest.strip_prefix(')').unwrap_or(rest);
    }
    text + rest
}

/// Whether a file is `file`, or what it is made from.
fn stands_for(found: &Path, file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let beside = found.file_name().unwrap_or_default().to_string_lossy();
    found == file || beside.starts_with(&format!(".{name}.zebu-"))
}

/// Why `image`, which the caller has named already, can't be opened or made.
fn reason(context: &Context, error: &zebu_engine::Error, image: &Path) -> String {
    let below = error.source().and_then(|source| source.downcast_ref::<IoError>());
    if let Some(IoError { op: op @ (Op::Open | Op::Lock), kind, path, detail, .. }) = below
        && path == image
    {
        if let (Op::Open, IoErrorKind::Os(errno), true) = (op, kind, context.dialect.is_qemu()) {
            let names = &context.disks.names;
            if let Some(server) = names.server(path) {
                let why = detail.clone().unwrap_or_else(|| errno_text(*errno));
                return format!("Failed to connect to '{server}': {why}");
            }
            let says_why =
                matches!(names.named(path), Some(Reference::Graph(_))) || names.driver(path) == Some("rbd");
            if let (true, Some(why)) = (says_why, detail) {
                return why.clone();
            }
            // QEMU's layers each say it.
            return format!("Could not open '{}': {}", image.display(), errno_text(*errno));
        }
        match (kind, detail) {
            (IoErrorKind::Os(errno), None) => return errno_text(*errno),
            (IoErrorKind::Os(errno), Some(detail)) => return format!("{} ({detail})", errno_text(*errno)),
            (_, Some(detail)) => return detail.clone(),
            (_, None) => {}
        }
    }
    let text = error.to_string();
    let prefix = format!("{}: ", image.display());
    text.strip_prefix(&prefix).map(str::to_owned).unwrap_or(text)
}

/// The remedy for a user of the command: the library knows no options.
fn remedy(error: &zebu_engine::Error) -> String {
    let text = error.message();
    let known = match error.kind() {
        // Whatever the reason was: it does not help to try again.
        _ if error.remedy() == Some(&Remedy::RepairLeaks) => " (zebu check -r leaks)",
        ErrorKind::Locked if error.remedy() == Some(&Remedy::WaitForWrites) => {
            " (try again when the disk has answered)"
        }
        ErrorKind::Locked => " (stop that program first)",
        ErrorKind::ForeignFormat => " (-f raw)",
        ErrorKind::ReferenceRefused => return reference_remedy(error.remedy()),
        ErrorKind::Poisoned => " (open the image again after the disk below it is repaired)",
        ErrorKind::NoSpace if error.errno() == Errno::FBIG.raw_os_error() => {
            " (the limit on the size of files, ulimit -f, or the file system does not allow more)"
        }
        ErrorKind::NoSpace if !text.contains("free") => " (free some space and try again)",
        _ => match error.remedy() {
            Some(Remedy::AllowHeaderCosts) => " (--header-costs unbounded)",
            Some(Remedy::NameFormatOfBase) => {
                " (--image-opts with backing.file.filename=FILE and backing.driver=luks,backing.key-secret=ID, or \
                 backing.driver=raw to destroy it)"
            }
            Some(Remedy::Repair) => " (zebu check -r all)",
            Some(Remedy::AllowShrinking) => " (zebu resize --shrink)",
            Some(Remedy::AllowDecryption) => {
                " (--decrypt allows it; zebu convert -o encrypt.format=luks,encrypt.key-secret=ID makes an encrypted copy)"
            }
            Some(Remedy::EnableBitmap) => " (zebu bitmap --enable)",
            Some(Remedy::NameFormatRaw) => " (-f raw)",
            Some(Remedy::RestartBackup) => " (leave --resume out)",
            Some(Remedy::BackupWithoutBitmap) => " (leave --bitmap out)",
            Some(Remedy::CopyData) => " (--copy=auto)",
            Some(Remedy::SkipBrokenBitmaps) => " (--skip-broken-bitmaps, zebu bitmap --remove)",
            Some(Remedy::ClearBitmap) => " (zebu bitmap --clear)",
            Some(Remedy::RemoveBitmap) => " (zebu bitmap --remove)",
            Some(Remedy::Unseal) if error.kind() == ErrorKind::Exists => {
                " (--force removes the seal all the same)"
            }
            Some(Remedy::Unseal) => " (zebu amend --unseal FILE)",
            _ => "",
        },
    };
    known.to_owned()
}

/// Words on the variable that widens the references of all command lines.
const DEFAULTS: &str = "; ZEBU_ALLOW_REFS and /etc/zebu/refs widen what is allowed";
/// The beginning of remedies by an option that QEMU's programs do not have.
const OWN_OPTIONS: [&str; 3] = [" (--allow-refs", " (--header-costs", " (--copy"];

/// A message for programs that know QEMU's options alone: a remedy by one of zebu's names the variable, or zebu.
fn in_qemus_words(message: &str) -> String {
    let Some((text, options)) =
        OWN_OPTIONS.iter().find_map(|begin| message.rfind(begin).map(|at| message.split_at(at)))
    else {
        return message.to_owned();
    };
    match options.find(DEFAULTS) {
        Some(at) => format!("{text} ({}", &options[at + "; ".len()..]),
        None => format!("{text} (zebu {}", &options[" (".len()..]),
    }
}

/// The options that let an image name a file which it may not name.
fn reference_remedy(remedy: Option<&Remedy>) -> String {
    let mut options = match remedy {
        Some(Remedy::AllowLocalReferences) => "--allow-refs local".to_owned(),
        Some(Remedy::AllowReferencesWithin(directory)) => {
            format!("--allow-refs dir={} or --allow-refs all", directory.display())
        }
        Some(Remedy::AllowRemoteReferences) => "--allow-refs prefix=URL or --allow-refs all".to_owned(),
        Some(Remedy::NameFile) => "--image-opts".to_owned(),
        _ => "--allow-refs says which files an image may name".to_owned(),
    };
    if remedy != Some(&Remedy::NameFile) {
        options.push_str(DEFAULTS);
    }
    format!(" ({options})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedies_under_qemus_names_are_those_that_are_there() {
        for (message, told) in [
            (
                format!("no (--allow-refs dir=/a or --allow-refs all{DEFAULTS})"),
                "no (ZEBU_ALLOW_REFS and /etc/zebu/refs widen what is allowed)",
            ),
            ("no (--header-costs unbounded)".to_owned(), "no (zebu --header-costs unbounded)"),
            ("no (-f raw)".to_owned(), "no (-f raw)"),
        ] {
            let text = Failure::new(message).text(Program::QemuImg, None);
            assert_eq!(text, format!("qemu-img: {told}\n"));
        }
    }

    #[test]
    fn a_message_is_one_line_whatever_the_file_is_called() {
        let failure = Failure::new("Could not open 'a\nb\u{1b}[2J': gone");
        assert_eq!(
            failure.text(Program::Zebu, Some("info")),
            "zebu: Could not open 'a\\nb\\u{1b}[2J': gone\n"
        );
    }

    #[test]
    fn the_systems_words_have_no_numbers() {
        let (missing, full) = (std::io::Error::from_raw_os_error(2), std::io::Error::from_raw_os_error(28));
        let text = Failure::new(format!("'a': {missing}; 'b': {full}")).text(Program::Zebu, None);
        assert_eq!(text, "zebu: 'a': No such file or directory; 'b': No space left on device\n");
    }

    #[test]
    fn usage_errors_point_at_the_help_of_the_command() {
        let text = Failure::usage("Expecting image file name").text(Program::Zebu, Some("resize"));
        assert_eq!(text, "zebu: Expecting image file name\nTry 'zebu resize --help' for more information\n");
    }

    #[test]
    fn the_file_is_named_once() {
        let error = zebu_engine::Error::new(ErrorKind::Corrupt, "Image is not in qcow2 format")
            .on(Path::new("a.img"));
        let failure = Failure::opening(&Context::default(), Path::new("a.img"), &error);
        assert_eq!(failure.message.as_deref(), Some("Could not open 'a.img': Image is not in qcow2 format"));
    }

    #[test]
    fn the_file_that_failed_is_named_if_it_is_another() {
        let error =
            zebu_engine::Error::new(ErrorKind::Corrupt, "Image is not in qcow2 format").on(Path::new("base"));
        let failure = Failure::opening(&Context::default(), Path::new("a.img"), &error);
        assert_eq!(
            failure.message.as_deref(),
            Some("Could not open 'a.img': base: Image is not in qcow2 format")
        );
    }

    #[test]
    fn cancelled_work_exits_like_an_interrupted_one() {
        let error = zebu_engine::Error::new(ErrorKind::Cancelled, "stopped");
        assert_eq!(Failure::from(error).exit, EXIT_INTERRUPTED);
    }
}
