//! Option strings: words with commas between them. Two commas are one that belongs to the word.

use crate::failure::{Failure, Outcome};
use std::collections::BTreeSet;
use zebu_disks::words::{ReferenceRule, reference_argument, reference_policy};
use zebu_engine::check::Repair;
use zebu_engine::jobs::TargetClusters;
use zebu_engine::storage::Engine;
use zebu_engine::{Access, CacheMode, CreateOptions, Format, OpenOptions, Preallocation, RefPolicy, Sharing};

const CACHES: [(&str, CacheMode); 5] = [
    ("none", CacheMode::None),
    ("writeback", CacheMode::Writeback),
    ("writethrough", CacheMode::Writethrough),
    ("directsync", CacheMode::Directsync),
    ("unsafe", CacheMode::Unsafe),
];
const ENGINES: [(&str, Engine); 2] = [("io_uring", Engine::Auto), ("threads", Engine::Threads)];
const LOCKS: [(&str, Sharing); 2] = [("on", Sharing::Locked), ("off", Sharing::Unlocked)];
const PREALLOCATIONS: [(&str, Preallocation); 4] = [
    ("off", Preallocation::Off),
    ("metadata", Preallocation::Metadata),
    ("falloc", Preallocation::Falloc),
    ("full", Preallocation::Full),
];
const REPAIRS: [(&str, Repair); 3] = [("none", Repair::None), ("leaks", Repair::Leaks), ("all", Repair::All)];
const COMPRESSION: [(&str, TargetClusters); 2] =
    [("off", TargetClusters::Plain), ("on", TargetClusters::Compressed)];

/// A word: `rw`, or `cache=none`.
struct Word {
    key: String,
    value: Option<String>,
}

/// The words of a text. Only `refs` may be given again.
fn words(text: &str) -> Outcome<Vec<Word>> {
    let mut plain = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            ',' if letters.next_if_eq(&',').is_none() => plain.push(String::new()),
            letter => plain.last_mut().expect("there is one from the start").push(letter),
        }
    }
    let mut keys = BTreeSet::new();
    let mut words = Vec::new();
    for word in plain.into_iter().filter(|word| !word.is_empty()) {
        let (key, value) = match word.split_once('=') {
            Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
            None => (word, None),
        };
        if key != "refs" && !keys.insert(key.clone()) {
            return Err(Failure::invalid(format!("the option '{key}' is given twice")));
        }
        words.push(Word { key, value });
    }
    Ok(words)
}

impl Word {
    /// The refusal of a word that stands for nothing here.
    fn refuse<T>(&self, known: &[&str]) -> Outcome<T> {
        let message = match (known.contains(&self.key.as_str()), &self.value) {
            (false, _) => format!("unknown option '{}' (there are {})", self.key, known.join(", ")),
            (true, None) => format!("the option '{}' needs a value", self.key),
            (true, Some(_)) => format!("the option '{}' has no value", self.key),
        };
        Err(Failure::invalid(message))
    }
}

/// The value that a word names.
fn choice<T: Copy>(key: &str, name: &str, all: &[(&str, T)]) -> Outcome<T> {
    let found = all.iter().find(|(known, _)| *known == name);
    found.map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = all.iter().map(|(known, _)| *known).collect();
        Failure::invalid(format!("{key}: no '{name}' (there are {})", names.join(", ")))
    })
}

fn number<T: std::str::FromStr>(key: &str, text: &str) -> Outcome<T> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit());
    let parsed = is_plain.then(|| text.parse().ok()).flatten();
    parsed.ok_or_else(|| Failure::invalid(format!("{key}: no number: '{text}'")))
}

fn format(key: &str, name: &str) -> Outcome<Format> {
    Format::from_name(name).ok_or_else(|| Failure::invalid(format!("{key}: unknown format '{name}'")))
}

/// How an image is opened.
#[derive(Debug, Default)]
pub(crate) struct Opening {
    pub(crate) options: OpenOptions,
    pub(crate) engine: Engine,
    /// Rules of what an image may name.
    pub(crate) refs: Vec<ReferenceRule>,
}

/// Options of `zebu_open`.
pub(crate) fn opening(text: &str) -> Outcome<Opening> {
    const KNOWN: [&str; 9] =
        ["ro", "rw", "format", "cache", "aio", "refs", "locks", "snapshot", "cache_size"];
    let Opening { mut options, mut engine, mut refs } = Opening::default();
    let mut access = None;
    for word in words(text)? {
        match (word.key.as_str(), word.value.as_deref()) {
            ("ro" | "rw", None) if access.is_some() => {
                return Err(Failure::invalid("the options 'ro' and 'rw' contradict each other"));
            }
            ("ro", None) => access = Some(Access::ReadOnly),
            ("rw", None) => access = Some(Access::ReadWrite),
            ("format", Some(name)) => options = options.format(format("format", name)?),
            ("cache", Some(name)) => options = options.cache(choice("cache", name, &CACHES)?),
            ("aio", Some(name)) => engine = choice("aio", name, &ENGINES)?,
            ("refs", Some(rule)) => refs.push(reference(rule)?),
            ("locks", Some(name)) => options = options.sharing(choice("locks", name, &LOCKS)?),
            ("snapshot", Some(name)) => options = options.snapshot(name.to_owned()),
            ("cache_size", Some(bytes)) => {
                options = options.cache_size(number::<u64>("cache_size", bytes)?);
            }
            _ => return word.refuse(&KNOWN),
        }
    }
    options = options.access(access.unwrap_or(Access::ReadOnly)).refs(policy(&refs)?);
    Ok(Opening { options, engine, refs })
}

/// One value of `refs`.
fn reference(rule: &str) -> Outcome<ReferenceRule> {
    reference_argument(rule).map_err(|_| {
        Failure::invalid(format!("refs: no '{rule}' (there are none, local, dir=PATH, prefix=URL, all)"))
    })
}

/// The policy that all `refs` make together.
fn policy(rules: &[ReferenceRule]) -> Outcome<RefPolicy> {
    reference_policy(rules).map_err(|_| Failure::invalid("refs=none contradicts the other refs"))
}

/// How a queue is made.
#[derive(Debug, Default)]
pub(crate) struct Queueing {
    pub(crate) depth: Option<u32>,
    pub(crate) engine: Engine,
}

/// Options of `zebu_queue_new`.
pub(crate) fn queueing(text: &str) -> Outcome<Queueing> {
    let mut queueing = Queueing::default();
    for word in words(text)? {
        match (word.key.as_str(), word.value.as_deref()) {
            ("depth", Some(count)) => queueing.depth = Some(number("depth", count)?),
            ("aio", Some(name)) => queueing.engine = choice("aio", name, &ENGINES)?,
            _ => return word.refuse(&["depth", "aio"]),
        }
    }
    Ok(queueing)
}

/// Options of `zebu_create`.
pub(crate) fn creation(text: &str) -> Outcome<(CreateOptions, Engine)> {
    let (engine, rest) = apart("aio", &ENGINES, words(text)?)?;
    Ok((made(rest, "aio")?, engine.unwrap_or_default()))
}

/// Options of a target of `zebu_convert`.
pub(crate) fn target(text: &str) -> Outcome<(CreateOptions, TargetClusters)> {
    let (clusters, rest) = apart("compress", &COMPRESSION, words(text)?)?;
    Ok((made(rest, "compress")?, clusters.unwrap_or(TargetClusters::Plain)))
}

/// Takes a word that has a value from among others.
fn apart<T: Copy>(key: &str, all: &[(&str, T)], words: Vec<Word>) -> Outcome<(Option<T>, Vec<Word>)> {
    let (found, rest): (Vec<Word>, Vec<Word>) =
        words.into_iter().partition(|word| word.key == key && word.value.is_some());
    let name = found.first().and_then(|word| word.value.as_deref());
    Ok((name.map(|name| choice(key, name, all)).transpose()?, rest))
}

const CREATION: [&str; 6] = ["format", "cluster_size", "preallocation", "backing", "backing_format", "cache"];

/// How an image is made. A function knows one word more.
fn made(words: Vec<Word>, known_besides: &str) -> Outcome<CreateOptions> {
    let mut options = CreateOptions::default();
    let (mut made_in, mut backing, mut backing_format) = (None, None, None);
    for word in words {
        match (word.key.as_str(), word.value.as_deref()) {
            ("format", Some(name)) => made_in = Some(format("format", name)?),
            ("cluster_size", Some(bytes)) => {
                options = options.cluster_size(number::<u64>("cluster_size", bytes)?);
            }
            ("preallocation", Some(name)) => {
                options = options.preallocation(choice("preallocation", name, &PREALLOCATIONS)?);
            }
            ("backing", Some(name)) => backing = Some(name.to_owned()),
            ("backing_format", Some(name)) => backing_format = Some(format("backing_format", name)?),
            ("cache", Some(name)) => options = options.cache(choice("cache", name, &CACHES)?),
            _ => {
                let mut known = CREATION.to_vec();
                known.push(known_besides);
                return word.refuse(&known);
            }
        }
    }
    let Some(made_in) = made_in else {
        return Err(Failure::invalid("a new image needs a format: give the option 'format'"));
    };
    let backing = match (backing, backing_format) {
        (None, None) => None,
        (Some(name), Some(format)) => Some((name, format)),
        (Some(_), None) => return Err(Failure::invalid("'backing' needs 'backing_format'")),
        (None, Some(_)) => return Err(Failure::invalid("'backing_format' needs 'backing'")),
    };
    Ok(options.format(made_in).backing(backing))
}

/// How an image is checked.
#[derive(Debug, Default)]
pub(crate) struct Checking {
    pub(crate) repair: Repair,
    pub(crate) cache: CacheMode,
    pub(crate) sharing: Sharing,
    pub(crate) engine: Engine,
}

/// Options of `zebu_check`.
pub(crate) fn checking(text: &str) -> Outcome<Checking> {
    let mut checking = Checking::default();
    for word in words(text)? {
        match (word.key.as_str(), word.value.as_deref()) {
            ("repair", Some(name)) => checking.repair = choice("repair", name, &REPAIRS)?,
            ("cache", Some(name)) => checking.cache = choice("cache", name, &CACHES)?,
            ("locks", Some(name)) => checking.sharing = choice("locks", name, &LOCKS)?,
            ("aio", Some(name)) => checking.engine = choice("aio", name, &ENGINES)?,
            _ => return word.refuse(&["repair", "cache", "locks", "aio"]),
        }
    }
    Ok(checking)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        opening(text).expect_err(text).message
    }

    #[test]
    fn words_stand_between_commas_and_two_commas_are_one() {
        let words = words("rw,refs=dir=/a,,b,,,refs=local").expect("words");
        let shown: Vec<_> = words.iter().map(|word| (word.key.as_str(), word.value.as_deref())).collect();
        assert_eq!(shown, [("rw", None), ("refs", Some("dir=/a,b,")), ("refs", Some("local"))]);
    }

    #[test]
    fn images_are_opened_for_reading_unless_it_is_said_otherwise() {
        assert_eq!(opening("").expect("nothing").options.access, Access::ReadOnly);
        let rw = opening("rw,format=raw,cache=none,aio=threads,refs=dir=/a,refs=local").expect("known");
        assert_eq!((rw.options.access, rw.options.cache), (Access::ReadWrite, CacheMode::None));
        assert_eq!((rw.options.format, rw.engine), (Some(Format::Raw), Engine::Threads));
        assert_eq!(rw.options.refs, RefPolicy::Within(vec!["/a".into()]));
    }

    #[test]
    fn what_is_unknown_is_refused_by_its_name() {
        assert_eq!(
            refusal("rw,chache=none"),
            "unknown option 'chache' (there are ro, rw, format, cache, aio, refs, locks, snapshot, cache_size)"
        );
        assert_eq!(refusal("cache"), "the option 'cache' needs a value");
        assert_eq!(refusal("rw=1"), "the option 'rw' has no value");
        assert_eq!(refusal("ro,rw"), "the options 'ro' and 'rw' contradict each other");
        assert_eq!(refusal("rw,rw"), "the option 'rw' is given twice");
        assert_eq!(refusal("format=qcow3"), "format: unknown format 'qcow3'");
        assert_eq!(refusal("aio=native"), "aio: no 'native' (there are io_uring, threads)");
        assert_eq!(refusal("cache_size=+1"), "cache_size: no number: '+1'");
        assert_eq!(refusal("cache_size="), "cache_size: no number: ''");
        assert_eq!(refusal("refs=none,refs=local"), "refs=none contradicts the other refs");
        assert_eq!(
            refusal("refs=dir="),
            "refs: no 'dir=' (there are none, local, dir=PATH, prefix=URL, all)"
        );
    }

    #[test]
    fn new_images_have_a_format_and_backing_files_have_theirs() {
        assert!(creation("").is_err() && creation("format=qcow2,backing=b").is_err());
        let refused = creation("format=qcow2,compress=on").expect_err("a word of targets").message;
        assert!(refused.ends_with("backing_format, cache, aio)"), "{refused}");
        assert_eq!(creation("format=qcow2,aio=threads").expect("known").1, Engine::Threads);
        assert!(target("format=qcow2,aio=threads").is_err());
        let (options, clusters) =
            target("compress=on,format=qcow2,backing=b,backing_format=raw").expect("known");
        assert_eq!(
            (options.backing, clusters),
            (Some(("b".to_owned(), Format::Raw)), TargetClusters::Compressed)
        );
    }
}
