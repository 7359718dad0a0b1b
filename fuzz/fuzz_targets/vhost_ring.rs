//! See `zebu_fuzz::clients::vhost_ring`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = zebu_fuzz::clients::vhost_ring(&mut arbitrary::Unstructured::new(bytes));
});
