//! Commands that change which image is open, and how: `open`, `close`, `reopen`.

use super::call::{Call, Outcome, tell_error, tell_failure};
use super::state::{OpenDefaults, OpenImage, State};
use crate::arguments::ForceShareArg;
use crate::commands::info;
use crate::failure::Failure;
use crate::values::{cache_argument, discard_argument};
use std::ffi::OsStr;
use std::path::Path;
use zebu_disks::graph::Filter;
use zebu_disks::keyval::parse_keyval;
use zebu_disks::{Context, ImageOpts, ImageSpec};
use zebu_engine::{Access, CacheMode};

pub(crate) fn open(state: &mut State, call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(parsed) = call.options("rsCnkUi:t:d:o:")? else { return Ok(Outcome::Failed) };
    if state.open.is_some() {
        tell_error(&format!("{}: file open already, try 'help close'", state.session.dialect().name()));
        return Ok(Outcome::Failed);
    }
    for (letter, reason) in [
        ('k', "choose the I/O engine when zebu is started"),
        ('i', "choose the I/O engine when zebu is started"),
    ] {
        if parsed.has(letter) {
            let program = state.session.dialect().name();
            tell_error(&format!("{program}: open: option -{letter} is not supported: {reason}"));
            return Ok(Outcome::Failed);
        }
    }
    let mut defaults = state.defaults.clone();
    defaults.access = if parsed.has('r') { Access::ReadOnly } else { Access::ReadWrite };
    if parsed.has('n') {
        defaults.cache = CacheMode::None;
    }
    if parsed.has('U') {
        defaults.force_share = ForceShareArg::GIVEN;
    }
    if let Some(text) = parsed.value('t') {
        match cache_argument(text) {
            Ok(cache) => defaults.cache = cache,
            Err(message) => return Ok(tell_failure(state.session.dialect(), &Failure::new(message))),
        }
    }
    let mut discard = None;
    if let Some(text) = parsed.value('d') {
        match discard_argument(text) {
            Ok(value) => discard = Some(value),
            Err(message) => return Ok(tell_failure(state.session.dialect(), &Failure::new(message))),
        }
    }
    let spec = match (parsed.operands.as_slice(), parsed.value('o')) {
        ([name], options) => named_spec(&defaults, OsStr::new(name), options),
        ([], Some(options)) => options_spec(&defaults, options),
        ([], None) => Err(Failure::new("can't open: Must specify either driver or file")),
        _ => return call.usage(),
    };
    let result = spec.and_then(|mut spec| {
        refuse_engine(&spec)?;
        spec.discard = discard.or(spec.discard);
        if parsed.has('C') {
            add_copy_on_read(&mut spec)?;
        }
        if parsed.has('s') { state.open_snapshot(spec) } else { state.open(spec) }
    });
    match result {
        Ok(()) => Ok(Outcome::Done),
        Err(failure) => Ok(tell_failure(state.session.dialect(), &failure)),
    }
}

/// Has reads kept in the image (`-C`).
pub(crate) fn add_copy_on_read(spec: &mut ImageSpec) -> Result<(), Failure> {
    if spec.options.access == Access::ReadOnly {
        return Err(Failure::new("Can't use copy-on-read on read-only device"));
    }
    spec.filters.insert(0, Filter::CopyOnRead);
    Ok(())
}

/// The worker runs already when an image is opened by a command.
fn refuse_engine(spec: &ImageSpec) -> Result<(), Failure> {
    match spec.aio {
        Some(_) => Err(Failure::new("Parameter 'aio': choose the I/O engine when zebu is started (--aio)")),
        None => Ok(()),
    }
}

/// How the image `name` is opened, with `options` on top.
fn named_spec(defaults: &OpenDefaults, name: &OsStr, options: Option<&str>) -> Result<ImageSpec, Failure> {
    let mut spec = defaults.spec(name)?;
    if let Some(text) = options {
        ImageOpts::parse_for(&defaults.context, text, Path::new(name))
            .and_then(|opts| opts.apply(&defaults.context, &mut spec))
            .map_err(|reason| Failure::new(format!("can't open device {}: {reason}", name.display())))?;
    }
    Ok(spec)
}

/// How the image that `options` name is opened.
fn options_spec(defaults: &OpenDefaults, options: &str) -> Result<ImageSpec, Failure> {
    let mut spec = defaults.spec(OsStr::new(""))?;
    ImageOpts::parse(&defaults.context, options)
        .and_then(|opts| opts.apply(&defaults.context, &mut spec))
        .map_err(|reason| Failure::new(format!("can't open: {reason}")))?;
    spec.is_described = true;
    Ok(spec)
}

pub(crate) fn close(state: &mut State) -> Outcome {
    match state.close() {
        Ok(()) => Outcome::Done,
        Err(failure) => tell_failure(state.session.dialect(), &failure),
    }
}

/// Options without those that say again what can't be changed: drivers and names of nodes.
fn without_unchanged(
    context: &Context,
    open: &OpenImage,
    given: Vec<(String, String)>,
) -> Result<Vec<(String, String)>, String> {
    let image = &open.below;
    let driver = open.spec.driver.as_deref().unwrap_or(image.format().name());
    let backing = image.backing().map(|backing| backing.format().name());
    let mut left = Vec::new();
    for (key, value) in given {
        let is_same = match key.as_str() {
            "driver" => value == driver,
            "file.driver" => value == info::protocol(&context.disks, &open.spec.path),
            "backing.driver" => Some(value.as_str()) == backing,
            _ if key.ends_with("node-name") => {
                open.spec.node_names.iter().any(|(known, name)| *known == key && *name == value)
            }
            _ => {
                left.push((key, value));
                continue;
            }
        };
        if !is_same {
            let option = key.rsplit('.').next().unwrap_or_default();
            return Err(format!("Cannot change the option '{option}'"));
        }
    }
    Ok(left)
}

/// Closes the image and opens it with what is changed. If that fails, it is opened as it was.
pub(crate) fn reopen(state: &mut State, call: &Call<'_>) -> Result<Outcome, Failure> {
    let Some(parsed) = call.options("rwc:o:")? else { return Ok(Outcome::Failed) };
    if !parsed.operands.is_empty() || (parsed.has('r') && parsed.has('w')) {
        return call.usage();
    }
    let Some(before) = state.open.as_ref().map(|open| open.spec.clone()) else { return Ok(Outcome::Failed) };
    let context = &state.defaults.context.clone();
    let mut spec = ImageSpec { aio: None, ..before.clone() };
    let given = match parsed.value('o').map_or(Ok(Vec::new()), parse_keyval) {
        Ok(given) => given,
        Err(error) => {
            return Ok(tell_failure(state.session.dialect(), &Failure::new(error.to_string())));
        }
    };
    let has = |key: &str| given.iter().any(|(known, _)| known.starts_with(key));
    if (parsed.has('r') || parsed.has('w')) && has("read-only") {
        return Ok(tell_failure(
            state.session.dialect(),
            &Failure::new("Cannot set both -r/-w and 'read-only'"),
        ));
    }
    if parsed.has('c') && has("cache.") {
        return Ok(tell_failure(
            state.session.dialect(),
            &Failure::new("Cannot set both -c and the cache options"),
        ));
    }
    let given = match state.open.as_ref().map(|open| without_unchanged(context, open, given)) {
        Some(Ok(given)) => given,
        Some(Err(message)) => {
            return Ok(tell_failure(state.session.dialect(), &Failure::new(message)));
        }
        None => return Ok(Outcome::Failed),
    };
    if parsed.has('r') {
        spec.options.access = Access::ReadOnly;
    }
    if parsed.has('w') {
        spec.options.access = Access::ReadWrite;
    }
    if let Some(text) = parsed.value('c') {
        match cache_argument(text) {
            Ok(cache) => spec.options.cache = cache,
            Err(message) => return Ok(tell_failure(state.session.dialect(), &Failure::new(message))),
        }
    }
    if !given.is_empty() {
        let applied = ImageOpts::from_pairs_for(context, given, &before.path)
            .and_then(|opts| opts.apply(context, &mut spec));
        if let Err(failure) = applied.map_err(Failure::new).and_then(|()| refuse_engine(&spec)) {
            return Ok(tell_failure(state.session.dialect(), &failure));
        }
        spec.options.format = spec.options.format.or(before.options.format);
        spec.filters.clone_from(&before.filters);
        spec.driver.clone_from(&before.driver);
    }
    let result = state.close().and_then(|()| state.open(spec));
    match result {
        Ok(()) => Ok(Outcome::Done),
        Err(mut failure) => {
            let prefix = format!("can't open device {}: ", before.path.display());
            if let Some(message) = failure.message.as_mut().filter(|_| state.session.dialect().is_qemu())
                && message.starts_with(&prefix)
            {
                message.drain(..prefix.len());
            }
            tell_failure(state.session.dialect(), &failure);
            if let Err(again) = state.open(before) {
                tell_failure(state.session.dialect(), &again);
            }
            Ok(Outcome::Failed)
        }
    }
}
