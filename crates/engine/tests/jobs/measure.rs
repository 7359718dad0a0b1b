//! `measure` says what `qemu-img measure` says.

use crate::support::{json_number, qemu_img, tool};
use proptest::prelude::*;
use zebu_engine::jobs::{Measurement, measure_size};
use zebu_engine::{CreateOptions, ErrorKind, Format, Preallocation};

fn options_text(create: &CreateOptions) -> String {
    let on = |flag| if flag { "on" } else { "off" };
    format!(
        "cluster_size={},compat={},refcount_bits={},extended_l2={},preallocation={}",
        create.cluster_size,
        if create.version == 2 { "0.10" } else { "1.1" },
        create.refcount_bits,
        on(create.extended_l2),
        match create.preallocation {
            Preallocation::Off => "off",
            Preallocation::Metadata => "metadata",
            Preallocation::Falloc => "falloc",
            Preallocation::Full => "full",
        }
    )
}

fn parsed(json: &str) -> Measurement {
    let mut measurement = Measurement::default();
    measurement.required = json_number(json, "required").unwrap();
    measurement.fully_allocated = json_number(json, "fully-allocated").unwrap();
    measurement.bitmaps = json_number(json, "bitmaps");
    measurement
}

fn create_options() -> impl Strategy<Value = CreateOptions> {
    let preallocation = prop::sample::select(vec![
        Preallocation::Off,
        Preallocation::Metadata,
        Preallocation::Falloc,
        Preallocation::Full,
    ]);
    (9u32..=21, 0u32..=6, any::<bool>(), any::<bool>(), preallocation).prop_map(
        |(cluster_bits, refcount_order, v2, extended_l2, preallocation)| {
            CreateOptions::default()
                .cluster_size(1 << cluster_bits)
                .version(if v2 { 2 } else { 3 })
                .refcount_bits(if v2 { 16 } else { 1 << refcount_order })
                .extended_l2(extended_l2 && !v2 && cluster_bits >= 14)
                .preallocation(preallocation)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    /// Sizes from nothing to beyond what the cluster size allows.
    #[test]
    fn empty_disks_measure_alike(create in create_options(), bits in 0u32..62, low in any::<u64>()) {
        let size = (1u64 << bits) + low % (1 << bits);
        let options = options_text(&create);
        let args = ["measure", "--output", "json", "-O", "qcow2", "-o", &options, "--size", &size.to_string()];
        let output = tool("qemu-img", &args);
        match measure_size(size, &create) {
            Ok(found) => {
                prop_assert!(output.status.success(), "QEMU refuses: {}", String::from_utf8_lossy(&output.stderr));
                prop_assert_eq!(found, parsed(&String::from_utf8(output.stdout).unwrap()));
            }
            Err(error) => {
                prop_assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                prop_assert!(!output.status.success(), "QEMU accepts what we refuse: {}", error);
            }
        }
    }
}

#[test]
fn raw_targets_and_an_empty_disk_measure_alike() {
    for (format, name) in [(Format::Raw, "raw"), (Format::Qcow2, "qcow2")] {
        for size in ["0", "1", "511", "512", "1000", "1073741824", "8070450532247928832"] {
            let create = CreateOptions::default().format(format);
            let found = measure_size(size.parse().unwrap(), &create);
            if format == Format::Qcow2 && size.len() > 12 {
                assert_eq!(found.unwrap_err().kind(), ErrorKind::InvalidArgument);
                continue;
            }
            let json = qemu_img(&["measure", "--output", "json", "-O", name, "--size", size]);
            assert_eq!(found.unwrap(), parsed(&json), "{name} {size}");
        }
    }
}

#[test]
fn targets_that_can_not_be_made_are_refused() {
    let valid = CreateOptions::default();
    for create in [
        valid.clone().cluster_size(513),
        valid.clone().cluster_size(256),
        valid.clone().cluster_size(0),
        valid.clone().cluster_size(4 << 20),
        valid.clone().cluster_size(4096).extended_l2(true),
        valid.clone().version(2).extended_l2(true),
        valid.clone().version(2).refcount_bits(8),
        valid.clone().refcount_bits(3),
        valid.clone().refcount_bits(128),
        valid.clone().refcount_bits(0),
        valid.version(4),
    ] {
        assert_eq!(
            measure_size(1 << 30, &create).unwrap_err().kind(),
            ErrorKind::InvalidArgument,
            "{create:?}"
        );
    }
    let raw = CreateOptions::default().format(Format::Raw);
    assert!(measure_size(u64::MAX, &raw).is_err());
}
