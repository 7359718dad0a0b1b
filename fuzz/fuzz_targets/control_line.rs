//! See `zebu_fuzz::words::control`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = zebu_fuzz::words::control(&mut arbitrary::Unstructured::new(bytes));
});
