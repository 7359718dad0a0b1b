//! `-o` of images of other programs: their own options, by QEMU's names.

use std::fmt::Write as _;
use zebu_disks::keyval::{parse_size_value, parse_switch};
use zebu_engine::{
    Allocation, ForeignFormat, NewForeign, NewVdi, NewVhdx, NewVmdk, NewVpc, VmdkAdapter, VmdkKind, VpcSize,
};

/// One option: its name, the kind of its value, and its description.
type Described = (&'static str, &'static str, &'static str);

const VMDK: &[Described] = &[
    ("adapter_type", "str", "Virtual adapter type (ide [default], lsilogic, buslogic, legacyESX)"),
    ("compat6", "bool (on/off)", "Virtual hardware version 6"),
    ("hwversion", "num", "Virtual hardware version (default 4)"),
    ("subformat", "str", "Kind of file (monolithicSparse [default], streamOptimized, monolithicFlat)"),
    ("toolsversion", "num", "Version of the guest tools"),
    ("zeroed_grain", "bool (on/off)", "The header allows grains that are marked as zero"),
];
const VHDX: &[Described] = &[
    ("block_size", "size", "Bytes of a block: a power of two, 1M to 256M; 0: by the size of the disk"),
    ("block_state_zero", "bool (on/off)", "Blocks that were never written are marked as zero (default on)"),
    ("log_size", "size", "Bytes of the log, a multiple of 1M (default 1M)"),
    (
        "logical_sector_size",
        "size",
        "Bytes of a sector as the guest sees it: 512 or 4096 (default that of the source, or 512)",
    ),
    ("subformat", "str", "Allocation (dynamic [default], fixed)"),
];
const VPC: &[Described] = &[
    (
        "force_size",
        "bool (on/off)",
        "The size as given, not the next that cylinders can express; fixed: whole MiB, for Azure",
    ),
    ("subformat", "str", "Allocation (dynamic [default], fixed)"),
];
const VDI: &[Described] = &[
    (
        "block_size",
        "size",
        "Bytes of a block, a power of two; QEMU and VirtualBox read 1M alone (default 1M)",
    ),
    ("static", "bool (on/off)", "All blocks have places (default off)"),
];

/// Options of QEMU that are refused by name.
const REFUSED: &[(&str, &str)] = &[
    ("backing_file", "images of other programs are made without a backing file"),
    ("backing_fmt", "images of other programs are made without a backing file"),
    ("preallocation", "choose a kind whose blocks all have places (subformat=fixed, static=on)"),
];

/// The options that a format has of its own.
fn options(format: ForeignFormat) -> &'static [Described] {
    match format {
        ForeignFormat::Vmdk => VMDK,
        ForeignFormat::Vhdx => VHDX,
        ForeignFormat::Vpc => VPC,
        ForeignFormat::Vdi => VDI,
        _ => &[],
    }
}

/// The options that were given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ForeignOpts {
    /// In the order of the user.
    given: Vec<(String, String)>,
}

impl ForeignOpts {
    /// Notes an option of `format`, and checks its value. The error names the option.
    pub(crate) fn set(&mut self, key: &str, value: &str, format: ForeignFormat) -> Result<(), String> {
        if let Some((_, reason)) = REFUSED.iter().find(|(name, _)| *name == key) {
            return Err(format!("Parameter '{key}' is not supported for format {}: {reason}", format.name()));
        }
        if !options(format).iter().any(|(name, ..)| *name == key) {
            return Err(format!(
                "Invalid parameter '{key}' for format {} (-o help lists them)",
                format.name()
            ));
        }
        self.given.retain(|(name, _)| name != key);
        self.given.push((key.to_owned(), value.to_owned()));
        self.image(format).map(drop)
    }

    fn value(&self, key: &str) -> Option<&str> {
        self.given.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    fn switch(&self, key: &str) -> Result<Option<bool>, String> {
        self.value(key).map(|value| parse_switch(key, value)).transpose()
    }

    fn size(&self, key: &str) -> Result<Option<u32>, String> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let bytes = parse_size_value(key, value)?;
        u32::try_from(bytes).map(Some).map_err(|_| format!("Parameter '{key}': {value} is too large"))
    }

    fn number(&self, key: &str) -> Result<Option<u32>, String> {
        let Some(value) = self.value(key) else { return Ok(None) };
        value.parse().map(Some).map_err(|_| format!("Parameter '{key}' expects a number, not '{value}'"))
    }

    fn choice<T: Copy>(&self, key: &str, choices: &[(&str, T)]) -> Result<Option<T>, String> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let found = choices.iter().find(|(name, _)| *name == value).map(|(_, choice)| *choice);
        found.map(Some).ok_or_else(|| {
            let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
            format!("Parameter '{key}' does not accept value '{value}' (there are {})", names.join(", "))
        })
    }

    /// The image that they describe; `None` for a format that can't be made.
    pub(crate) fn image(&self, format: ForeignFormat) -> Result<Option<NewForeign>, String> {
        let allocation = [("dynamic", Allocation::Dynamic), ("fixed", Allocation::Fixed)];
        Ok(match format {
            ForeignFormat::Vmdk => Some(NewForeign::Vmdk(self.vmdk()?)),
            ForeignFormat::Vhdx => {
                let usual = NewVhdx::default();
                Some(NewForeign::Vhdx(NewVhdx {
                    allocation: self.choice("subformat", &allocation)?.unwrap_or_default(),
                    block_size: self.size("block_size")?.filter(|bytes| *bytes != 0),
                    log_size: self.size("log_size")?.unwrap_or(usual.log_size),
                    logical_sector: self.size("logical_sector_size")?,
                    zero_blocks: self.switch("block_state_zero")?.unwrap_or(usual.zero_blocks),
                }))
            }
            ForeignFormat::Vpc => Some(NewForeign::Vpc(NewVpc {
                allocation: self.choice("subformat", &allocation)?.unwrap_or_default(),
                size: match self.switch("force_size")? {
                    Some(true) => VpcSize::Exact,
                    Some(false) | None => VpcSize::ByGeometry,
                },
            })),
            ForeignFormat::Vdi => Some(NewForeign::Vdi(NewVdi {
                allocation: match self.switch("static")? {
                    Some(true) => Allocation::Fixed,
                    Some(false) | None => Allocation::Dynamic,
                },
                block_size: self.size("block_size")?.unwrap_or(NewVdi::default().block_size),
            })),
            _ => None,
        })
    }

    fn vmdk(&self) -> Result<NewVmdk, String> {
        let usual = NewVmdk::default();
        let kinds = [
            ("monolithicSparse", VmdkKind::MonolithicSparse),
            ("streamOptimized", VmdkKind::StreamOptimized),
            ("monolithicFlat", VmdkKind::MonolithicFlat),
        ];
        let adapters = [
            ("ide", VmdkAdapter::Ide),
            ("lsilogic", VmdkAdapter::LsiLogic),
            ("buslogic", VmdkAdapter::BusLogic),
            ("legacyESX", VmdkAdapter::LegacyEsx),
        ];
        let compat6 = self.switch("compat6")?.unwrap_or(false);
        let version = self.number("hwversion")?;
        if compat6 && version.is_some() {
            return Err("compat6 cannot be enabled with hwversion set".to_owned());
        }
        let kind = self.choice("subformat", &kinds)?.unwrap_or_default();
        let zeroed_grain = self.switch("zeroed_grain")?.unwrap_or(usual.zeroed_grain);
        if zeroed_grain && kind != VmdkKind::MonolithicSparse {
            let kind = self.value("subformat").unwrap_or_default();
            return Err(format!("zeroed_grain=on is not supported with subformat={kind}"));
        }
        Ok(NewVmdk {
            kind,
            adapter: self.choice("adapter_type", &adapters)?.unwrap_or_default(),
            hardware_version: version.unwrap_or(if compat6 { 6 } else { usual.hardware_version }),
            tools_version: self.number("toolsversion")?.unwrap_or(usual.tools_version),
            zeroed_grain,
        })
    }

    /// The part of the line of `create` that repeats them: QEMU's order, and its defaults.
    pub(crate) fn formatting(&self, format: ForeignFormat) -> String {
        let (defaults, order): (&[(&str, &str)], &[&str]) = match format {
            ForeignFormat::Vmdk => (
                &[("compat6", "off"), ("hwversion", "undefined")],
                &["adapter_type", "compat6", "hwversion", "toolsversion", "subformat", "zeroed_grain"],
            ),
            ForeignFormat::Vhdx => (
                &[("log_size", "1048576"), ("block_size", "0")],
                &["log_size", "block_size", "logical_sector_size", "subformat", "block_state_zero"],
            ),
            ForeignFormat::Vpc => (&[], &["subformat", "force_size"]),
            ForeignFormat::Vdi => (&[("static", "off")], &["block_size", "static"]),
            _ => (&[], &[]),
        };
        let mut text = String::new();
        for key in order {
            let default = defaults.iter().find(|(name, _)| name == key).map(|(_, value)| *value);
            let value = match (self.size(key), self.value(key).or(default)) {
                (Ok(Some(bytes)), _) if key.ends_with("_size") && *key != "force_size" => bytes.to_string(),
                (_, Some(value)) => value.to_owned(),
                (_, None) => continue,
            };
            let _ = write!(text, " {key}={value}");
        }
        text
    }
}

/// Lines of `-o help`: name, kind of value, description.
pub(crate) fn described(format: ForeignFormat) -> impl Iterator<Item = Described> {
    options(format).iter().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(format: ForeignFormat, pairs: &[(&str, &str)]) -> Result<NewForeign, String> {
        let mut opts = ForeignOpts::default();
        for (key, value) in pairs {
            opts.set(key, value, format)?;
        }
        opts.image(format).map(Option::unwrap)
    }

    #[test]
    fn every_described_option_changes_the_image() {
        for format in [ForeignFormat::Vmdk, ForeignFormat::Vhdx, ForeignFormat::Vpc, ForeignFormat::Vdi] {
            for (name, kind, _) in described(format) {
                let value = match (name, kind, format) {
                    ("block_state_zero", ..) => "off",
                    (_, "bool (on/off)", _) => "on",
                    ("adapter_type", ..) => "lsilogic",
                    ("subformat", _, ForeignFormat::Vmdk) => "streamOptimized",
                    ("subformat", ..) => "fixed",
                    ("hwversion" | "toolsversion", ..) => "7",
                    ("logical_sector_size", ..) => "4096",
                    _ => "2M",
                };
                let image = parse(format, &[(name, value)]).unwrap();
                assert_ne!(Some(image), NewForeign::of(format), "{name}={value}");
            }
        }
    }

    #[test]
    fn wrong_values_and_options_are_named() {
        use ForeignFormat::{Vdi, Vhdx, Vmdk, Vpc};
        for (format, pairs, word) in [
            (Vmdk, vec![("subformat", "twoGbMaxExtentFlat")], "streamOptimized"),
            (Vmdk, vec![("subformat", "monolithicFlat"), ("zeroed_grain", "on")], "zeroed_grain"),
            (Vmdk, vec![("adapter_type", "scsi")], "buslogic"),
            (Vmdk, vec![("hwversion", "new")], "hwversion"),
            (Vmdk, vec![("hwversion", "6"), ("compat6", "on")], "compat6"),
            (Vmdk, vec![("subformat", "streamOptimized"), ("zeroed_grain", "on")], "zeroed_grain"),
            (Vmdk, vec![("backing_file", "base")], "backing_file"),
            (Vhdx, vec![("block_size", "8G")], "block_size"),
            (Vhdx, vec![("subformat", "sparse")], "subformat"),
            (Vpc, vec![("force_size", "perhaps")], "force_size"),
            (Vpc, vec![("block_size", "2M")], "block_size"),
            (Vdi, vec![("preallocation", "metadata")], "static=on"),
        ] {
            let error = parse(format, &pairs).unwrap_err();
            assert!(error.contains(word), "{pairs:?}: {error}");
        }
    }

    #[test]
    fn the_line_of_create_is_that_of_qemu() {
        let line = |format, pairs: &[(&str, &str)]| {
            let mut opts = ForeignOpts::default();
            for (key, value) in pairs {
                opts.set(key, value, format).unwrap();
            }
            opts.formatting(format)
        };
        assert_eq!(line(ForeignFormat::Vmdk, &[]), " compat6=off hwversion=undefined");
        assert_eq!(
            line(ForeignFormat::Vhdx, &[("subformat", "fixed"), ("block_size", "1M")]),
            " log_size=1048576 block_size=1048576 subformat=fixed"
        );
        assert_eq!(
            line(ForeignFormat::Vpc, &[("force_size", "on"), ("subformat", "fixed")]),
            " subformat=fixed force_size=on"
        );
        assert_eq!(line(ForeignFormat::Vdi, &[]), " static=off");
    }
}
