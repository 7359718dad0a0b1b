//! Options of `blkdebug`.

use super::pairs::{Pair, below, first, get};
use crate::keyval::parse_size_value;
use zebu_drivers::{BlkdebugConfig, Limits};

/// The configuration of a node: of `file`, which its name or its option `config` names, and of its other options.
pub(super) fn configuration(pairs: &[Pair], file: Option<&str>) -> Result<BlkdebugConfig, String> {
    let mut config = BlkdebugConfig::default();
    if let Some(file) = get(pairs, "config").or(file).filter(|file| !file.is_empty()) {
        let text = std::fs::read_to_string(file)
            .map_err(|error| format!("Could not open blkdebug config file: {file}: {error}"))?;
        config
            .add_file(&text)
            .map_err(|reason| format!("Could not parse blkdebug config file: {file}: {reason}"))?;
    }
    for section in ["inject-error", "set-state"] {
        let rules = below(pairs, section);
        let mut numbers: Vec<&str> = rules.iter().map(|(key, _)| first(key)).collect();
        numbers.dedup();
        for number in numbers {
            config.add_rule(section, &below(&rules, number))?;
        }
    }
    for key in Limits::KEYS {
        if let Some(value) = get(pairs, key) {
            config.limits.set(key, parse_size_value(key, value)?)?;
        }
    }
    config.limits.check()?;
    Ok(config)
}

/// The configuration file and the image in a name `blkdebug:[CONFIG]:IMAGE`.
pub(super) fn split_name(name: &str) -> Result<(&str, &str), String> {
    let rest = name.strip_prefix("blkdebug:").unwrap_or(name);
    rest.split_once(':').ok_or_else(|| {
        format!("Could not parse '{name}': a name of blkdebug is blkdebug:[CONFIG_FILE]:IMAGE")
    })
}
