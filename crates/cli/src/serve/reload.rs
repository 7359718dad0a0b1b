//! Reading the configuration again (SIGHUP): what it says is made true, and what `zebu ctl` changed is undone.

use super::come_and_go::{Clients, Files, NewExport, Origin, Served, Turn, close, handed_file};
use super::config_file::{self, ConfigFile, FileExport, Loaded, ServerPart};
use super::jobs::Jobs;
use super::limit_change::in_words;
use super::limits::{Groups, group_name};
use super::opened::Opened;
use std::collections::BTreeSet;
use std::path::PathBuf;
use zebu_engine::Access;
use zebu_engine::storage::Worker;
use zebu_export::{Export, Exports, Level, Limits, Log};

/// Reads the configuration again. With a mistake in it, all stays as it is.
pub(crate) async fn reload(worker: &Worker, served: &Served<'_>, jobs: Jobs<'_>) {
    let Some(loaded) = &served.config else { return };
    let _turn = Turn::wait(worker, &served.is_changing).await;
    served
        .log
        .write(Level::Info, format_args!("the configuration '{}' is read again", loaded.path.display()));
    match apply(worker, served, jobs, loaded).await {
        Ok(()) => {
            let path = loaded.path.display();
            served.log.write(Level::Info, format_args!("the configuration '{path}' was read again"));
        }
        Err(why) => {
            served.log.write(Level::Error, format_args!("{why}; the configuration stays as it is"));
        }
    }
}

async fn apply(worker: &Worker, served: &Served<'_>, jobs: Jobs<'_>, loaded: &Loaded) -> Result<(), String> {
    let text = match &served.files {
        Files::Free => {
            let path = loaded.path.clone();
            worker.run_blocking(move || config_file::read(&path)).await?
        }
        Files::Sandboxed(Some(opener)) => opener.read(worker).await?,
        Files::Sandboxed(None) => return Err("the process that reads the configuration has ended".to_owned()),
    };
    let wanted = ConfigFile::parse(&loaded.path, &text)?;
    let last = loaded.in_effect.borrow().clone();
    for export in &wanted.exports {
        if served.origin(&export.name) == Some(Origin::CommandLine) {
            return Err(format!(
                "'{}', line {}: name: the export '{}' is one of the command line",
                loaded.path.display(),
                export.line,
                export.name
            ));
        }
    }
    // All that may fail comes first, but for images that others hold until they are removed.
    let mut opened = Vec::new();
    let held = held_by_others(served, &wanted);
    for (number, export) in wanted.exports.iter().enumerate() {
        if served.origin(&export.name).is_some() || held.contains(&export.file) {
            continue;
        }
        match open(worker, served, number, export).await {
            Ok(image) => opened.push((export, image)),
            Err(why) => {
                for (_, image) in opened {
                    let _ = close(worker, &image).await;
                }
                return Err(format!("'{}', line {}: {why}", loaded.path.display(), export.line));
            }
        }
    }
    tell_of_restart(served, loaded, &last, &wanted);
    remove_others(worker, served, jobs, &wanted).await;
    let mut added = BTreeSet::new();
    for (export, image) in opened {
        if last.exports.iter().any(|other| other.name == export.name) {
            undone(
                &served.log,
                format_args!("the export '{}', which ctl had removed, is added again", export.name),
            );
        }
        added.insert(export.name.clone());
        add(worker, served, export, image).await;
    }
    // Those whose names or images were taken until now.
    for (number, export) in wanted.exports.iter().enumerate() {
        if served.origin(&export.name).is_some() {
            continue;
        }
        if let Some(other) = served.exports.iter().find(|other| other.image().path() == export.file) {
            let (name, other, line) = (&export.name, other.name().to_owned(), export.line);
            let what = format_args!(
                "'{}', line {line}: the export '{name}' is not added, since '{other}' still has its file",
                loaded.path.display()
            );
            served.log.write(Level::Warning, what);
            continue;
        }
        match open(worker, served, number, export).await {
            Ok(image) => {
                added.insert(export.name.clone());
                add(worker, served, export, image).await;
            }
            Err(why) => served.log.write(Level::Error, format_args!("{why}")),
        }
    }
    set_limits(&served.log, &served.groups, &served.exports, &last, &wanted);
    *loaded.in_effect.borrow_mut() = in_effect(served, last, wanted, &added);
    Ok(())
}

/// Files of exports that go if the configuration is made true: an export of another name may have one of them.
fn held_by_others(served: &Served<'_>, wanted: &ConfigFile) -> BTreeSet<PathBuf> {
    let going = served.exports.iter().filter(|export| goes(served, export.name(), wanted));
    going.map(|export| export.image().path().to_owned()).collect()
}

/// Whether an export is to be removed: the configuration's own of before that it has no more, and those of `ctl`.
fn goes(served: &Served<'_>, name: &str, wanted: &ConfigFile) -> bool {
    match served.origin(name) {
        Some(Origin::File) => !wanted.exports.iter().any(|other| other.name == name),
        Some(Origin::Ctl) => true,
        Some(Origin::CommandLine) | None => false,
    }
}

/// The configuration as far as it is in effect now. `added` are the exports that were opened as `wanted` says.
fn in_effect(
    served: &Served<'_>,
    last: ConfigFile,
    wanted: ConfigFile,
    added: &BTreeSet<String>,
) -> ConfigFile {
    let of = |file: &ConfigFile, name: &str| file.exports.iter().find(|export| export.name == name).cloned();
    let mut exports = Vec::new();
    for export in served.exports.iter().filter(|export| served.origin(export.name()) == Some(Origin::File)) {
        let name = export.name();
        let now = of(&wanted, name);
        let (limits, group) = now.as_ref().map(|now| (now.limits, now.group.clone())).unwrap_or_default();
        let opened = if added.contains(name) { now } else { of(&last, name) };
        exports.extend(opened.map(|opened| FileExport { limits, group, ..opened }));
    }
    ConfigFile { server: last.server, groups: wanted.groups, exports }
}

fn undone(log: &Log, what: std::fmt::Arguments<'_>) {
    log.write(Level::Warning, format_args!("undone: {what}"));
}

async fn open(
    worker: &Worker,
    served: &Served<'_>,
    number: usize,
    export: &FileExport,
) -> Result<Opened, String> {
    let handed = match &served.files {
        Files::Sandboxed(Some(opener)) => Some(handed_file(opener.open(worker, number).await?)?),
        _ => None,
    };
    let new = NewExport {
        name: &export.name,
        file: &export.file,
        handed,
        format: export.format.as_deref(),
        access: if export.read_only || served.args.read_only { Access::ReadOnly } else { Access::ReadWrite },
        // What is to be changed was compared already.
        turn: None,
    };
    served.open(worker, new).await
}

async fn add(worker: &Worker, served: &Served<'_>, export: &FileExport, image: Opened) {
    if let Err(why) = served.announce(worker, &export.name, image, Origin::File).await {
        served.log.write(Level::Error, format_args!("{why}"));
    }
}

/// Warns of what has changed and is read at the start only.
fn tell_of_restart(served: &Served<'_>, loaded: &Loaded, last: &ConfigFile, wanted: &ConfigFile) {
    let path = loaded.path.display();
    let effect = "which takes effect when the server is restarted";
    let tell = |line: usize, key: &str| {
        served.log.write(Level::Warning, format_args!("'{path}', line {line}: {key} has changed, {effect}"));
    };
    for key in changed_keys(&last.server, &wanted.server) {
        match wanted.server.lines.get(key) {
            Some(line) => tell(*line, key),
            None => served.log.write(Level::Warning, format_args!("'{path}': {key} is gone, {effect}")),
        }
    }
    for export in &wanted.exports {
        let before = last.exports.iter().find(|other| other.name == export.name);
        let is_there = served.origin(&export.name) == Some(Origin::File);
        if is_there && before.is_some_and(|before| !before.is_served_as(export)) {
            tell(export.line, &format!("the file, the format or read-only of '{}'", export.name));
        }
    }
}

fn changed_keys(last: &ServerPart, wanted: &ServerPart) -> Vec<&'static str> {
    let pairs = [
        ("nbd", last.nbd != wanted.nbd),
        ("control", last.control != wanted.control),
        ("metrics", last.metrics != wanted.metrics),
        ("tls-certificate", last.tls_certificate != wanted.tls_certificate),
        ("tls-key", last.tls_key != wanted.tls_key),
        ("tls-client-ca", last.tls_client_ca != wanted.tls_client_ca),
        ("tls-client-crl", last.tls_client_crl != wanted.tls_client_crl),
        ("tls-psk-file", last.tls_psk_file != wanted.tls_psk_file),
    ];
    pairs.into_iter().filter_map(|(key, has_changed)| has_changed.then_some(key)).collect()
}

/// Removes the exports that the configuration does not have: its own of before, and those of `ctl`.
async fn remove_others(worker: &Worker, served: &Served<'_>, jobs: Jobs<'_>, wanted: &ConfigFile) {
    for export in served.exports.iter() {
        let name = export.name().to_owned();
        let origin = served.origin(&name);
        if !goes(served, &name, wanted) {
            continue;
        }
        match served.remove(worker, export, Clients::Kept, jobs).await {
            Ok(()) if origin == Some(Origin::Ctl) => {
                undone(&served.log, format_args!("the export '{name}', which ctl had added, is removed"));
            }
            Ok(()) => {}
            Err(why) => served.log.write(Level::Warning, format_args!("not removed: {why}")),
        }
    }
}

/// Makes the limits those of the configuration. Exports of the command line have none.
fn set_limits(log: &Log, groups: &Groups, exports: &Exports, last: &ConfigFile, wanted: &ConfigFile) {
    for group in groups.all() {
        let (name, now) = (group.name().to_owned(), group.limits());
        if last.groups.get(&name) != Some(&now) && wanted.groups.get(&name) != Some(&now) {
            undone(
                log,
                format_args!("the limits that ctl gave the group '{name}' ({})", in_words(&now, None)),
            );
        }
    }
    for name in last.groups.keys().filter(|name| wanted.groups.contains_key(*name)) {
        if groups.find(name).is_err() {
            undone(log, format_args!("the group '{name}', which ctl had removed, is made again"));
        }
    }
    for (name, limits) in &wanted.groups {
        groups.set(name, limits);
    }
    let of = |file: &ConfigFile, name: &str| {
        let export = file.exports.iter().find(|export| export.name == name);
        export.map(|export| (export.limits, export.group.clone())).unwrap_or_default()
    };
    for export in exports.iter() {
        let name = export.name();
        let (now, before, target) =
            ((export.limits(), group_name(&export)), of(last, name), of(wanted, name));
        if now != target && now != before {
            let words = in_words(&now.0, now.1.as_deref());
            undone(log, format_args!("the limits that ctl gave the export '{name}' ({words})"));
        }
        set(groups, &export, &target);
    }
    for group in groups.all().iter().filter(|group| !wanted.groups.contains_key(group.name())) {
        groups.remove(group.name(), exports);
    }
}

/// Gives an export these limits and this group, which is there.
fn set(groups: &Groups, export: &Export, (limits, group): &(Limits, Option<String>)) {
    if export.limits() != *limits {
        export.set_limits(limits);
    }
    if group_name(export) != *group {
        let group = group.as_ref().and_then(|name| groups.find(name).ok());
        export.set_limit_group(group.as_ref());
    }
}

/// Sets all limits as they are at the start.
pub(crate) fn begin(loaded: &Loaded, log: &Log, groups: &Groups, exports: &Exports) {
    set_limits(log, groups, exports, &ConfigFile::default(), &loaded.in_effect.borrow());
}
