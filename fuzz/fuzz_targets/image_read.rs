//! See `zebu_fuzz::image::read`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = zebu_fuzz::image::read(&mut arbitrary::Unstructured::new(bytes));
});
