//! Points of several disks of one moment: all layers are in their stores before the first point is published.

use super::new_point::{Made, Unpublished, follow};
use super::point_options::PointOptions;
use super::point_report::{PUBLISHED, Report};
use crate::failure::Failure;
use crate::output::stderr;
use crate::session::Session;
use crate::watch::Watch;
use serde::Serialize;
use zebu_disks::{Context, Program};
use zebu_engine::Image;
use zebu_oci::OciName;
use zebu_store::points::{Keep, PointName, PointStore};

/// A disk, and the store that gets its point.
pub(crate) struct DiskPoint<'a> {
    /// The name of its export.
    pub(crate) export: &'a str,
    pub(crate) image: &'a Image,
    pub(crate) store: &'a PointName,
}

/// Points that are made and not published.
pub(crate) struct MadePoints(Vec<MadePoint>);

struct MadePoint {
    export: String,
    store: PointStore,
    point: Unpublished,
}

/// Points that are published.
#[derive(Default)]
pub(crate) struct PublishedPoints {
    pub(crate) points: Vec<DiskReport>,
    /// Why others are not.
    pub(crate) failed: Option<Failure>,
}

/// The report of the point of a disk.
#[derive(Serialize)]
pub(crate) struct DiskReport {
    pub(crate) export: String,
    store: String,
    #[serde(flatten)]
    report: Report,
}

impl MadePoints {
    /// Makes the layers, one disk after the other. If one fails, there is none.
    pub(crate) fn make(
        session: &Session,
        options: &mut PointOptions,
        disks: &[DiskPoint<'_>],
        watch: &Watch,
    ) -> Result<Self, Failure> {
        let http = session.context().disks.remote.http_options();
        let rate = options.layer.control.rate_limit;
        let all: u64 = disks.iter().map(|disk| disk.image.virtual_size()).sum();
        let (mut made, mut before) = (Self(Vec::new()), 0);
        for disk in disks {
            options.layer.control = watch.control_within(before, all).rate_limit(rate);
            before += disk.image.virtual_size();
            let one = PointStore::open_or_create(disk.store, &http).map_err(Failure::from);
            let one = one.and_then(|store| {
                let point = Unpublished::make(options, session, &store, disk.image)?;
                Ok(MadePoint { export: disk.export.to_owned(), store, point })
            });
            match one {
                Ok(one) => made.0.push(one),
                Err(failure) => {
                    made.give_up();
                    return Err(failure);
                }
            }
        }
        Ok(made)
    }

    /// Publishes all, and forgets other points by rules.
    pub(crate) fn publish(self, dialect: Program, keep: &Keep) -> PublishedPoints {
        let is_alone = self.0.len() == 1;
        let mut published: Vec<(String, PointStore, Made)> = Vec::new();
        let mut failed = None;
        for MadePoint { export, store, point } in self.0 {
            if failed.is_some() {
                point.give_up();
                continue;
            }
            match point.publish(dialect, &store) {
                Ok(made) => published.push((export, store, made)),
                Err(failure) => failed = Some(failure),
            }
        }
        let report = |(export, store, made): (String, PointStore, Made)| {
            let prefix = if is_alone { String::new() } else { format!("'{export}': ") };
            let report = Report::telling(dialect, &prefix, made, follow(&store, keep));
            DiskReport { export, store: store.name().to_string(), report }
        };
        PublishedPoints { points: published.into_iter().map(report).collect(), failed }
    }

    /// Leaves all unpublished.
    pub(crate) fn give_up(self) {
        self.0.into_iter().for_each(|made| made.point.give_up());
    }
}

impl PublishedPoints {
    /// Says on standard error what is not published.
    ///
    /// # Errors
    /// Nothing is.
    pub(crate) fn tell_failed(&self, dialect: Program) -> Result<(), Failure> {
        match &self.failed {
            Some(failure) if self.points.is_empty() => Err(failure.clone()),
            Some(failure) => {
                let names: Vec<String> =
                    self.points.iter().map(|point| format!("'{}'", point.export)).collect();
                let reason = failure.message.as_deref().unwrap_or_default();
                let names = names.join(", ");
                stderr::tell(dialect, &format!("only the points of {names} are published: {reason}"));
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// The exit code of the command.
    pub(crate) fn code(&self) -> u8 {
        let of_points = self.points.iter().map(|point| point.report.code()).max().unwrap_or(0);
        if self.failed.is_some() { PUBLISHED } else { of_points }
    }

    /// The reports for people, each behind the name of its export if there are several.
    pub(crate) fn human_text(&self) -> String {
        let is_alone = self.points.len() == 1 && self.failed.is_none();
        let line = |point: &DiskReport| {
            let text = point.report.human_text();
            if is_alone { text } else { format!("'{}': {text}", point.export) }
        };
        self.points.iter().map(line).collect()
    }
}

/// The stores of disks whose points are of one moment: `to` itself for one, `to/EXPORT` for several.
///
/// # Errors
/// An export's name can't name a store, or a store would lie in another one.
pub(crate) fn stores_of(
    context: &Context,
    to: &PointName,
    exports: &[String],
) -> Result<Vec<PointName>, Failure> {
    let http = context.disks.remote.http_options();
    let below = |export: &String| within(to, export);
    let is_store = |name: &PointName| PointStore::open(name, &http).is_ok();
    if let [export] = exports {
        if let Some(other) = below(export).ok().filter(is_store) {
            return Err(Failure::usage(format!(
                "'{to}' has stores of several disks: '{other}' is probably meant"
            )));
        }
        PointStore::find(to, &http)?;
        return Ok(vec![to.clone()]);
    }
    let stores = exports.iter().map(below).collect::<Result<Vec<_>, _>>()?;
    if is_store(to) {
        return Err(Failure::usage(format!(
            "'{to}' is a store of one disk: several need a name that leads to no store, such as '{to}-disks'"
        )));
    }
    for store in &stores {
        PointStore::find(store, &http)?;
    }
    Ok(stores)
}

fn within(to: &PointName, export: &str) -> Result<PointName, Failure> {
    let name = Some(format!("{to}/{export}")).filter(|_| can_name(export));
    let name = name.ok_or_else(|| {
        Failure::usage(format!(
            "the export '{export}' can't name a store in '{to}': such names have letters, digits, '-', '_', '+' and '.', which is not \
             the first; back it up alone, into a store that you name"
        ))
    })?;
    PointName::parse(&name).map_err(|reason| Failure::usage(format!("'{name}': {reason}")))
}

/// The images of a registry that several forked disks become: `NAME/EXPORT:TAG`.
///
/// # Errors
/// An export's name can't name a repository, or it is a layout.
pub(crate) fn images_of(to: &OciName, exports: &[String]) -> Result<Vec<OciName>, Failure> {
    if exports.len() == 1 {
        return Ok(vec![to.clone()]);
    }
    let OciName::Registry { registry, repository, reference, .. } = to else {
        return Err(Failure::usage(format!(
            "'{to}': an image of a layout has one disk, and there are several"
        )));
    };
    let of = |export: &String| {
        let name = format!("oci://{registry}/{repository}/{export}:{reference}");
        let fail =
            |reason| Failure::usage(format!("the export '{export}' can't name a repository: {reason}"));
        OciName::parse(&name).map_err(fail)
    };
    exports.iter().map(of).collect()
}

/// The longest name of an export that can be one of a store, in bytes.
const LONGEST: usize = 128;

/// Whether the name of an export can be one of a store.
fn can_name(export: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || "-_+.".contains(c);
    !export.is_empty() && export.len() <= LONGEST && !export.starts_with('.') && export.chars().all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(to: &str, exports: &[&str]) -> Result<Vec<String>, Failure> {
        let to = PointName::parse(to).unwrap();
        let exports: Vec<String> = exports.iter().map(|&export| export.to_owned()).collect();
        let names = stores_of(&Context::default(), &to, &exports)?;
        Ok(names.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn several_disks_have_a_store_each() {
        assert_eq!(names("store:no/such", &[""]).unwrap(), ["store:no/such"]);
        assert_eq!(
            names("store:no/such", &["root", "data-1.b"]).unwrap(),
            ["store:no/such/root", "store:no/such/data-1.b"]
        );
        for wrong in ["", ".", "..", ".a", "a/b", "a@b", "a b", "a?b", "a\0", &"a".repeat(129)] {
            let message = names("store:no/such", &["root", wrong]).unwrap_err().message.unwrap();
            assert!(message.contains("can't name a store"), "{message}");
        }
    }

    #[test]
    fn several_disks_have_a_repository_each() {
        let of = |to: &str, exports: &[&str]| {
            let exports: Vec<String> = exports.iter().map(|&export| export.to_owned()).collect();
            images_of(&OciName::parse(to).unwrap(), &exports)
        };
        let names = of("oci://r:5000/vm/disks:v1", &["root", "data"]).unwrap();
        assert_eq!(names[1].to_string(), "oci://r:5000/vm/disks/data:v1");
        assert_eq!(of("oci-layout:dir:v1", &["Any"]).unwrap()[0].to_string(), "oci-layout:dir:v1");
        assert!(of("oci://r/vm:v1", &["root", "Data"]).is_err());
        assert!(of("oci-layout:dir:v1", &["root", "data"]).is_err());
    }
}
