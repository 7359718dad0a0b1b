//! Rules and limits, as a configuration file or a command line gives them.

use super::rules::{Action, IoTypes, Rule, event};
use zebu_storage::StorageOp;

/// Limits that requests keep to, in bytes; 0 is none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Requests are aligned to this, a power of two.
    pub align: Option<u32>,
    /// Bytes that a read or write moves at most.
    pub max_transfer: u64,
    /// Zeroing is cut at multiples of this.
    pub opt_write_zero: u64,
    /// Bytes that are zeroed at once at most.
    pub max_write_zero: u64,
    /// Discards are cut at multiples of this.
    pub opt_discard: u64,
    /// Bytes that are discarded at once at most.
    pub max_discard: u64,
}

impl Limits {
    /// Names of the limits on the command line.
    pub const KEYS: [&'static str; 6] =
        ["align", "max-transfer", "opt-write-zero", "max-write-zero", "opt-discard", "max-discard"];

    /// Sets a limit by its name on the command line.
    ///
    /// # Errors
    /// It contradicts the alignment, in QEMU's words.
    pub fn set(&mut self, key: &str, bytes: u64) -> Result<(), String> {
        if bytes > u64::from(u32::MAX >> 1) {
            return Err(format!("Cannot meet constraints with {key} {bytes}"));
        }
        match key {
            "align" => {
                if bytes != 0 && (!bytes.is_power_of_two() || bytes > 32 << 20) {
                    return Err(format!("Cannot meet constraints with align {bytes}"));
                }
                self.align = u32::try_from(bytes).ok().filter(|align| *align != 0);
            }
            "max-transfer" => self.max_transfer = bytes,
            "opt-write-zero" => self.opt_write_zero = bytes,
            "max-write-zero" => self.max_write_zero = bytes,
            "opt-discard" => self.opt_discard = bytes,
            "max-discard" => self.max_discard = bytes,
            _ => return Err(format!("Unknown parameter '{key}'")),
        }
        Ok(())
    }

    /// Whether the limits go together.
    ///
    /// # Errors
    /// The one that does not, in QEMU's words.
    pub fn check(&self) -> Result<(), String> {
        let align = u64::from(self.align.unwrap_or(1));
        for (key, bytes, unit) in [
            ("max-transfer", self.max_transfer, align),
            ("opt-write-zero", self.opt_write_zero, align),
            ("max-write-zero", self.max_write_zero, self.opt_write_zero.max(align)),
            ("opt-discard", self.opt_discard, align),
            ("max-discard", self.max_discard, self.opt_discard.max(align)),
        ] {
            if bytes != 0 && !bytes.is_multiple_of(unit) {
                return Err(format!("Cannot meet constraints with {key} {bytes}"));
            }
        }
        Ok(())
    }

    /// The pieces that an operation is cut into; `None` if it stays whole.
    pub(super) fn pieces(&self, op: StorageOp) -> Option<Vec<(u64, u64)>> {
        let (offset, len, unit, most) = match op {
            StorageOp::Read { offset, len } | StorageOp::Write { offset, len } => {
                (offset, len, 0, self.max_transfer)
            }
            StorageOp::ZeroRange { offset, len } => (offset, len, self.opt_write_zero, self.max_write_zero),
            StorageOp::Punch { offset, len } => (offset, len, self.opt_discard, self.max_discard),
            _ => return None,
        };
        let (end, mut at, mut pieces) = (offset + len, offset, Vec::new());
        while at < end {
            let mut piece = end - at;
            if most != 0 {
                piece = piece.min(most);
            }
            // To the next multiple first, then whole multiples.
            match at.checked_rem(unit) {
                Some(0) if piece > unit => piece -= piece % unit,
                None | Some(0) => {}
                Some(past) => piece = piece.min(unit - past),
            }
            pieces.push((at, piece));
            at += piece;
        }
        (pieces.len() > 1).then_some(pieces)
    }
}

/// All that can be configured.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlkdebugConfig {
    /// The rules.
    pub rules: Vec<Rule>,
    /// The limits.
    pub limits: Limits,
}

fn number<T: std::str::FromStr>(key: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("Parameter '{key}' expects a number"))
}

fn switch(key: &str, value: &str) -> Result<bool, String> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("Parameter '{key}' expects 'on' or 'off'")),
    }
}

impl BlkdebugConfig {
    /// Adds the rule of a section `inject-error` or `set-state`, which has these pairs.
    ///
    /// # Errors
    /// A key that is missing or not known, or a value that can't be read.
    pub fn add_rule(&mut self, section: &str, pairs: &[(String, String)]) -> Result<(), String> {
        let keys: &[&str] = match section {
            "inject-error" => &["event", "state", "iotype", "errno", "sector", "once", "immediately"],
            "set-state" => &["event", "state", "new_state"],
            _ => return Err(format!("There is no option group '{section}'")),
        };
        if let Some((key, _)) = pairs.iter().find(|(key, _)| !keys.contains(&key.as_str())) {
            return Err(format!("Invalid parameter '{key}'"));
        }
        let get =
            |key: &str| pairs.iter().rev().find(|(known, _)| known == key).map(|(_, value)| value.as_str());
        let name = get("event").ok_or("Missing event name for rule")?;
        let event = event(name).ok_or_else(|| format!("Invalid event name \"{name}\""))?;
        let state = get("state").map_or(Ok(0), |value| number("state", value))?;
        let action = if section == "set-state" {
            Action::SetState(get("new_state").map_or(Ok(0), |value| number("new_state", value))?)
        } else {
            if let Some(value) = get("immediately") {
                // Errors have no way round here that they could take.
                switch("immediately", value)?;
            }
            let sector = get("sector").map(|value| number::<i64>("sector", value)).transpose()?;
            Action::Fail {
                types: match get("iotype") {
                    None => IoTypes::USUAL,
                    Some(name) => IoTypes::by_name(name)
                        .ok_or_else(|| format!("Parameter 'iotype' does not accept value '{name}'"))?,
                },
                errno: get("errno").map_or(Ok(libc::EIO), |value| number("errno", value))?,
                offset: sector
                    .and_then(|sector| u64::try_from(sector).ok())
                    .map(|sector| sector.saturating_mul(512)),
                once: get("once").map_or(Ok(false), |value| switch("once", value))?,
            }
        };
        self.rules.push(Rule { event, state, action });
        Ok(())
    }

    /// Adds the rules of a configuration file: sections `[inject-error]` and `[set-state]`, with lines `key = "value"`.
    ///
    /// # Errors
    /// The number of the line that can't be read, and why.
    pub fn add_file(&mut self, text: &str) -> Result<(), String> {
        let mut section: Option<(String, usize)> = None;
        let mut pairs: Vec<(String, String)> = Vec::new();
        let mut end_section =
            |section: Option<(String, usize)>, pairs: &mut Vec<(String, String)>| match section {
                None => Ok(()),
                Some((name, line)) => self
                    .add_rule(&name, &std::mem::take(pairs))
                    .map_err(|reason| format!("line {line}: {reason}")),
            };
        for (index, line) in text.lines().enumerate() {
            let (line, at) = (line.trim(), index + 1);
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            if let Some(name) = line.strip_prefix('[') {
                let name = name.strip_suffix(']').ok_or_else(|| format!("line {at}: parse error"))?;
                end_section(section.take(), &mut pairs)?;
                // A section may have a name of its own.
                let name = name.split_whitespace().next().unwrap_or_default();
                section = Some((name.to_owned(), at));
                continue;
            }
            let (key, value) = line
                .split_once('=')
                .filter(|_| section.is_some())
                .ok_or_else(|| format!("line {at}: parse error"))?;
            let value = value.trim();
            let value = value
                .strip_prefix('"')
                .and_then(|value| value.strip_suffix('"'))
                .ok_or_else(|| format!("line {at}: a value stands in double quotes"))?;
            pairs.push((key.trim().to_owned(), value.to_owned()));
        }
        end_section(section, &mut pairs)
    }
}
