//! `zebu ctl fork --push`: sealed images into their stores, or into a registry, while the guests go on in the overlays.
//!
//! The upload is made here: the server has no credentials, and its sandbox no way to a store. It may go on in a process of its own.

use crate::arguments::EngineArgs;
use crate::commands::push::{self, Wanted};
use crate::commands::stores::moment_points::{DiskPoint, MadePoints, images_of, stores_of};
use crate::commands::stores::point_options::{BaseChoice, MissingBitmap, PointOptions};
use crate::commands::stores::shared::parse_whole_store;
use crate::failure::Failure;
use crate::lock_patience::lock_wait;
use crate::output::stdout;
use crate::session::Session;
use crate::values::{Rate, SpeedName, rate_argument};
use crate::watch::{ProgressMode, Watch};
use serde_json::{Value, json};
use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use zebu_disks::{Context, ImageSpec};
use zebu_engine::jobs::BackupOptions;
use zebu_engine::{Access, Chain, Compression, Format, Image, OpenOptions, Purpose, Sharing};
use zebu_oci::OciName;
use zebu_store::points::{Keep, PointMoment, PointName};

/// The exit code where the disks are forked, and not all images are uploaded.
pub(super) const FORKED: u8 = 3;

/// The command that uploads in the background.
const COMMAND: &str = "upload-a-fork";

/// `--push`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PushTo {
    Store(PointName),
    Registry(OciName),
}

impl PushTo {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if PointName::is_name(text) {
            parse_whole_store(text).map(Self::Store)
        } else if OciName::is_name(text) {
            OciName::parse(text).map(Self::Registry)
        } else {
            Err("expected a store (store:DIR/NAME, store:s3://BUCKET/PREFIX/NAME), or an image of a registry (oci://REGISTRY/NAME:TAG, \
                 oci-layout:DIR:TAG)"
                .to_owned())
        }
    }

    /// A target for each disk.
    ///
    /// # Errors
    /// An export's name can't be a part of its name, or the store can't be had.
    pub(super) fn targets(&self, context: &Context, exports: &[String]) -> Result<Vec<String>, Failure> {
        fn texts<T: ToString>(names: Vec<T>) -> Vec<String> {
            names.iter().map(T::to_string).collect()
        }
        match self {
            Self::Store(name) => stores_of(context, name, exports).map(texts),
            Self::Registry(name) => images_of(name, exports).map(texts),
        }
    }
}

/// A sealed image, and where it goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sealed {
    pub(super) export: String,
    pub(super) image: PathBuf,
    pub(super) target: String,
}

/// An upload of all images of a fork.
pub(super) struct Upload {
    pub(super) disks: Vec<Sealed>,
    pub(super) moment: PointMoment,
    /// Bytes a second.
    pub(super) rate: Option<NonZeroU64>,
}

/// The result of an upload.
#[derive(Default)]
pub(super) struct Uploaded {
    /// Exports whose images are uploaded.
    exports: Vec<String>,
    /// The report for people.
    pub(super) text: String,
    /// Reports of the images.
    pub(super) reports: Vec<Value>,
    /// Why others are not.
    pub(super) failed: Option<Failure>,
}

/// Arguments of the process that uploads in the background.
#[derive(Debug, clap::Args)]
pub(crate) struct UploadArgs {
    #[arg(long)]
    moment: PointMoment,

    #[arg(long, value_parser = rate_argument)]
    rate: Option<Rate>,

    /// Export, image and target of each disk
    #[arg(num_args = 3.., required = true)]
    words: Vec<String>,
}

/// Runs the process in the background.
pub(crate) fn run(args: &UploadArgs, context: &Context) -> Result<u8, Failure> {
    let disks = args.words.chunks_exact(3).map(|words| Sealed {
        export: words[0].clone(),
        image: PathBuf::from(&words[1]),
        target: words[2].clone(),
    });
    let upload = Upload {
        disks: disks.collect(),
        moment: args.moment.clone(),
        rate: args.rate.and_then(|rate| rate.0),
    };
    let mut watch = Watch::start(ProgressMode::None)?;
    let uploaded = upload.run(context, &mut watch);
    stdout::print(&uploaded.text)?;
    match upload.told(&uploaded) {
        Some(told) => Err(Failure::new(told).with_exit(FORKED)),
        None => Ok(0),
    }
}

impl Upload {
    /// Uploads all images.
    pub(super) fn run(&self, context: &Context, watch: &mut Watch) -> Uploaded {
        let session = Session::start(context, &EngineArgs { aio: None, verbose: false }, None);
        let mut uploaded = Uploaded::default();
        let done = session.and_then(|mut session| {
            // Pages that the server uses stay.
            session.read_uncached();
            if self.disks.iter().any(|disk| PointName::is_name(&disk.target)) {
                self.make_points(&session, watch, &mut uploaded)
            } else {
                self.push_images(&session, watch, &mut uploaded)
            }
        });
        watch.finish();
        if let Err(failure) = done {
            uploaded.failed = Some(failure);
        }
        uploaded
    }

    fn make_points(&self, session: &Session, watch: &Watch, uploaded: &mut Uploaded) -> Result<(), Failure> {
        let context = session.context();
        let mut images: Vec<Image> = Vec::new();
        let made = self.open_all(session, &mut images).and_then(|()| {
            let named = |disk: &Sealed| {
                PointName::parse(&disk.target)
                    .map_err(|reason| Failure::new(format!("'{}': {reason}", disk.target)))
            };
            let stores = self.disks.iter().map(named).collect::<Result<Vec<_>, _>>()?;
            let disks = self.disks.iter().zip(&images).zip(&stores);
            let disks: Vec<_> = disks
                .map(|((disk, image), store)| DiskPoint { export: &disk.export, image, store })
                .collect();
            MadePoints::make(session, &mut self.point_options(context, watch), &disks, watch)
        });
        for image in &images {
            let _ = session.close(image, Access::ReadOnly);
        }
        let published = made?.publish(context.dialect, &Keep::default());
        published.tell_failed(context.dialect)?;
        uploaded.text = published.human_text();
        for point in &published.points {
            uploaded.exports.push(point.export.clone());
            uploaded.reports.push(serde_json::to_value(point).unwrap_or_default());
        }
        published.failed.map_or(Ok(()), Err)
    }

    fn push_images(&self, session: &Session, watch: &Watch, uploaded: &mut Uploaded) -> Result<(), Failure> {
        for disk in &self.disks {
            let name = OciName::parse(&disk.target)
                .map_err(|reason| Failure::new(format!("'{}': {reason}", disk.target)))?;
            let wanted = Wanted {
                name: name.clone(),
                kind: None,
                title: None,
                annotations: Vec::new(),
                rate: self.rate,
            };
            let spec = sealed_spec(session.context(), &disk.image)?;
            let pushed = push::push_image(session, &spec, &wanted, watch)?;
            uploaded.text += &push::human_text(&name, &pushed);
            let mut report = serde_json::to_value(push::json_report(&name, &pushed)).unwrap_or_default();
            report["export"] = disk.export.as_str().into();
            uploaded.reports.push(report);
            uploaded.exports.push(disk.export.clone());
        }
        Ok(())
    }

    fn open_all(&self, session: &Session, images: &mut Vec<Image>) -> Result<(), Failure> {
        for disk in &self.disks {
            images.push(session.open(&sealed_spec(session.context(), &disk.image)?)?);
        }
        Ok(())
    }

    fn point_options(&self, context: &Context, watch: &Watch) -> PointOptions {
        let layer = BackupOptions::new("")
            .lock_wait(lock_wait(context.dialect))
            .compression(Compression::Zstd)
            .speed(SpeedName::Adaptive.speed())
            .control(watch.control().rate_limit(self.rate));
        PointOptions {
            layer,
            base: BaseChoice::Last,
            missing_bitmap: MissingBitmap::Refuse,
            moment: Some(self.moment.clone()),
        }
    }

    /// Begins to upload in a process in the background: its number, and the file in which it tells of its end.
    pub(super) fn begin(&self, log: &Path) -> Result<u32, Failure> {
        let fail = |error: std::io::Error| {
            Failure::new(format!(
                "could not begin to upload in the background (log '{}'): {error}",
                log.display()
            ))
        };
        let file = File::options()
            .create(true)
            .append(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(log)
            .map_err(fail)?;
        let mut command = Command::new("/proc/self/exe");
        command.arg(COMMAND).arg(format!("--moment={}", self.moment));
        command.args(self.rate.map(|rate| format!("--rate={rate}")));
        command.arg("--");
        for disk in &self.disks {
            command.arg(&disk.export).arg(&disk.image).arg(&disk.target);
        }
        command.stdin(Stdio::null()).stdout(file.try_clone().map_err(fail)?).stderr(file);
        // What a terminal sends to those who use it is not for it.
        let child = command.process_group(0).spawn().map_err(fail)?;
        Ok(child.id())
    }

    /// A message on what is not uploaded, with the commands that do it.
    pub(super) fn told(&self, uploaded: &Uploaded) -> Option<String> {
        let failure = uploaded.failed.as_ref()?;
        let left = self.disks.iter().filter(|disk| !uploaded.exports.contains(&disk.export));
        Some(self.failed(failure.message.as_deref().unwrap_or_default(), left))
    }

    /// The same, where nothing is.
    pub(super) fn failed_at_all(&self, reason: &str) -> String {
        self.failed(reason, self.disks.iter())
    }

    fn failed<'a>(&self, reason: &str, left: impl Iterator<Item = &'a Sealed>) -> String {
        let commands: Vec<String> = left.map(|disk| self.command_of(disk)).collect();
        format!(
            "the fork stands, and guests go on, but not all is uploaded: {reason}; once more: {}",
            commands.join("; ")
        )
    }

    /// The command that uploads an image.
    fn command_of(&self, disk: &Sealed) -> String {
        let rate = self.rate.map_or_else(String::new, |rate| format!(" --rate-limit {rate}"));
        let (image, target) = (quoted(&disk.image.to_string_lossy()), quoted(&disk.target));
        if PointName::is_name(&disk.target) {
            format!("zebu backup -f qcow2 --moment {}{rate} {image} {target}", self.moment)
        } else {
            format!("zebu push -f qcow2{rate} {image} {target}")
        }
    }
}

/// How a sealed image is opened.
fn sealed_spec(context: &Context, image: &Path) -> Result<ImageSpec, Failure> {
    let options = OpenOptions::default()
        .format(Some(Format::Qcow2))
        .access(Access::ReadOnly)
        .lock_wait(lock_wait(context.dialect));
    Ok(context.describe(image.as_os_str(), context.with_references(options, &[])?)?)
}

/// The sealed image on which the overlay of a fork stands.
pub(super) fn sealed_below(context: &Context, overlay: &Path) -> Result<PathBuf, Failure> {
    let session = Session::start(context, &EngineArgs { aio: None, verbose: false }, None)?;
    // The server writes it.
    let options = OpenOptions::default()
        .format(Some(Format::Qcow2))
        .access(Access::ReadOnly)
        .sharing(Sharing::Unlocked)
        .chain(Chain::TopOnly)
        .purpose(Purpose::Inspect);
    let spec = ImageSpec::new(overlay.to_owned(), options);
    let name = session.with_image(&spec, |image| Ok(image.info()?.backing_file))?;
    let directory = overlay.parent().unwrap_or(Path::new("/"));
    let name = name.ok_or_else(|| Failure::new(format!("'{}' stands on no image", overlay.display())))?;
    Ok(directory.join(name.strip_prefix("./").unwrap_or(&name)))
}

/// A word of a command line, as a shell reads it.
fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./:@%+=,".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The part of a fork's report that is about its upload.
pub(super) fn report(reports: Vec<Value>, failed: Option<&str>) -> Value {
    let mut report = json!({ "uploaded": reports });
    if let Some(failed) = failed {
        report["failed"] = failed.into();
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_for_a_shell() {
        for (word, shown) in
            [("/a/b-1.qcow2", "/a/b-1.qcow2"), ("a b", "'a b'"), ("it's", r"'it'\''s'"), ("", "''")]
        {
            assert_eq!(quoted(word), shown);
        }
    }

    #[test]
    fn targets_are_stores_and_images() {
        for name in ["store:d/n", "store:s3://b/p/n", "oci://r/n:t", "oci-layout:d:t"] {
            assert!(PushTo::parse(name).is_ok(), "{name}");
        }
        for name in ["d/n", "store:d/n@p-1", "s3://b/n", "oci://r"] {
            assert!(PushTo::parse(name).is_err(), "{name}");
        }
    }
}
