//! An image whose mapping points into its own metadata: the write is refused, nothing is damaged further.

use crate::crash::setup::{Origin, Setup, TOP};
use crate::faults::bench::Bench;
use zebu::storage::IoBuf;
use zebu::{Durability, ErrorKind};

#[test]
pub(crate) fn data_that_would_land_on_metadata_is_refused() {
    let setup = Setup { origin: Origin::Own, pattern: 64 << 10, workers: 1, ..Setup::plain() };
    let mut files = setup.make(1);
    let top = &files[0].1;
    let word = |bytes: Vec<u8>| u64::from_be_bytes(bytes.try_into().unwrap());
    let (l1, reftable) = (word(top.bytes(40..48)), word(top.bytes(48..56)));
    let table = word(top.bytes(l1..l1 + 8)) & 0x00ff_ffff_ffff_fe00;
    for target in [l1, reftable, table] {
        files[0].1.write(table + 24, &(target | 1 << 63).to_be_bytes());
        let bench = Bench::with_files(&setup, &files, 1);
        let write = bench.guest.image.write(
            &bench.workers[0],
            3 * 4096,
            IoBuf::copy_of(&[7; 4096]).into(),
            Durability::Volatile,
        );
        let (result, _) = bench.world.block_on(write).unwrap();
        let error = result.expect_err("a write on metadata");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(bench.world.content(TOP).unwrap().same_bytes(&files[0].1), "nothing was written");
    }
}
