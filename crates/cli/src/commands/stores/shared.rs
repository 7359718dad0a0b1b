//! Names, rules and failures of all commands on stores.

use crate::failure::Failure;
use std::ffi::OsStr;
use std::path::Path;
use zebu_disks::{Context, PointChain, without_secrets};
use zebu_engine::Image;
use zebu_engine::storage::{IoError, Worker};
use zebu_store::points::{Keep, Layer, PointName, PointStore, PointsError};

/// Heading of the rules, in the help.
const KEEPING: &str = "Points that stay";

impl From<PointsError> for Failure {
    fn from(error: PointsError) -> Self {
        Self::new(error.to_string())
    }
}

/// `--keep-last` and its kin.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub(crate) struct KeepArgs {
    /// Keep the last N points
    #[arg(long, value_name = "N", help_heading = KEEPING, value_parser = clap::value_parser!(u32).range(1..))]
    keep_last: Option<u32>,

    /// Keep the last point of each of the last N days that have one (UTC)
    #[arg(long, value_name = "N", help_heading = KEEPING, value_parser = clap::value_parser!(u32).range(1..))]
    keep_daily: Option<u32>,

    /// Keep the last point of each of the last N weeks that have one
    #[arg(hide_short_help = true, long, value_name = "N", help_heading = KEEPING, value_parser = clap::value_parser!(u32).range(1..))]
    keep_weekly: Option<u32>,

    /// Keep the last point of each of the last N months that have one
    #[arg(hide_short_help = true, long, value_name = "N", help_heading = KEEPING, value_parser = clap::value_parser!(u32).range(1..))]
    keep_monthly: Option<u32>,
}

impl KeepArgs {
    /// The rules.
    pub(crate) fn rules(self) -> Keep {
        Keep {
            last: self.keep_last.unwrap_or(0),
            daily: self.keep_daily.unwrap_or(0),
            weekly: self.keep_weekly.unwrap_or(0),
            monthly: self.keep_monthly.unwrap_or(0),
        }
    }

    /// Whether there are any.
    pub(crate) fn is_given(self) -> bool {
        !self.rules().is_empty()
    }
}

/// The store that a word names; `None` if it is the name of something else.
///
/// # Errors
/// It is the name of a store, and can't be read.
pub(crate) fn store_argument(name: &OsStr) -> Result<Option<PointName>, Failure> {
    match name.to_str().filter(|text| PointName::is_name(text)) {
        None => Ok(None),
        Some(text) => PointName::parse(text).map(Some).map_err(|reason| Failure::opening_name(name, &reason)),
    }
}

/// Reads the argument that must be a store.
pub(crate) fn parse_store(text: &str) -> Result<PointName, String> {
    PointName::parse(text).map_err(|reason| {
        if PointName::is_name(text) {
            reason
        } else if Path::new(text).is_file() {
            format!(
                "{reason}; this is a file: `zebu convert` copies an image, `zebu snapshot -a` goes back to a \
                 snapshot in it"
            )
        } else {
            format!("{reason} (did you mean 'store:{}'?)", without_secrets(text.as_ref()))
        }
    })
}

/// The same of a store as a whole.
pub(crate) fn parse_whole_store(text: &str) -> Result<PointName, String> {
    let name = parse_store(text)?;
    match name.point() {
        None => Ok(name),
        Some(_) => Err("it is about a whole store: leave the point out".to_owned()),
    }
}

/// Opens a store that is there.
pub(crate) fn open_store(context: &Context, name: &PointName) -> Result<PointStore, Failure> {
    Ok(PointStore::open(name, &context.disks.remote.http_options())?)
}

/// Says what is wrong with manifests of a store.
pub(crate) fn tell_damaged(context: &Context, damaged: &[PointsError]) {
    for error in damaged {
        crate::output::stderr::tell(context.dialect, &error.to_string());
    }
}

/// The same as texts.
pub(crate) fn texts(damaged: &[PointsError]) -> Vec<String> {
    damaged.iter().map(ToString::to_string).collect()
}

/// Opens the image that shows what these layers do.
pub(crate) fn open_layers(
    context: &Context,
    worker: &Worker,
    store: &PointStore,
    layers: &[Layer],
) -> Result<(Image, PointChain), zebu_engine::Error> {
    let chain = context
        .disks
        .remote
        .point_chain(store, layers)
        .map_err(|error: IoError| zebu_engine::Error::from(error))?;
    let image = worker.block_on(Image::open(worker, &chain.top, &chain.options()))?;
    Ok((image, chain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_that_names_no_store_is_answered_with_one_that_does() {
        assert!(parse_store("store:/backups/vm1@first").is_ok());
        let reason = parse_store("/backups/vm1").unwrap_err();
        assert!(reason.ends_with("(did you mean 'store:/backups/vm1'?)"), "{reason}");
        let file = std::env::current_exe().unwrap();
        let reason = parse_store(file.to_str().unwrap()).unwrap_err();
        assert!(reason.contains("`zebu convert`") && reason.contains("`zebu snapshot -a`"), "{reason}");
    }
}
