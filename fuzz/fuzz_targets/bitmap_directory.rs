//! See `zebu_fuzz::tables::bitmaps`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = zebu_fuzz::tables::bitmaps(&mut arbitrary::Unstructured::new(bytes));
});
