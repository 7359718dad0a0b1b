//! A tenth of the lines and of the stacks of `cargo xtask beside-qemu`.

use zebu_tests::beside_qemu::lines;
use zebu_tests::beside_qemu::run::{Extent, is_in_tenth, numbered, run_lines, run_stacks};
use zebu_tests::qemu::Qemu;
use zebu_tests::tenth;

/// Runs at the same time.
const JOBS: usize = 2;

#[test]
fn lines_end_as_with_qemu_or_as_the_page_says() {
    let Some(_) = Qemu::find() else { return };
    let is_mine = |number: usize| (0..10).any(|digit| tenth::has(digit) && is_in_tenth(number, digit));
    let chosen: Vec<_> = numbered(lines::all().unwrap()).filter(|(number, _)| is_mine(*number)).collect();
    let extent = if tenth::is_whole() { Extent::Whole } else { Extent::Part };
    run_lines(&chosen, extent, JOBS).unwrap();
}

#[test]
fn stacks_do_as_with_qemu_or_as_the_page_says() {
    let Some(_) = Qemu::find() else { return };
    for digit in (0..10).filter(|digit| tenth::has(*digit as usize)) {
        run_stacks(digit * 100 + 1..digit * 100 + 101, JOBS).unwrap();
    }
}
