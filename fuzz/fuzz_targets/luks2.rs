//! See `zebu_fuzz::luks::luks2`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = zebu_fuzz::luks::luks2(&mut arbitrary::Unstructured::new(bytes));
});
