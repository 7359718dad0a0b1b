//! See `zebu_fuzz::foreign::image`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = zebu_fuzz::foreign::image(&mut arbitrary::Unstructured::new(bytes));
});
