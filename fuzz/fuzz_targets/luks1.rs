//! See `zebu_fuzz::luks::luks1`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = zebu_fuzz::luks::luks1(&mut arbitrary::Unstructured::new(bytes));
});
