//! The tenth of a long matrix that a run has: `ZEBU_TENTH`, a number from 0 to 9, or `all`. `cargo xtask test` chooses it
//! by the number of commits, so that ten runs have everything. Without it, a run has the first.

/// The variable's value.
fn tenth() -> Option<usize> {
    let text = std::env::var("ZEBU_TENTH").unwrap_or_else(|_| "0".to_owned());
    match text.parse() {
        Ok(tenth @ 0..=9) => Some(tenth),
        _ if text == "all" => None,
        _ => panic!("ZEBU_TENTH={text}: neither a number from 0 to 9 nor `all`"),
    }
}

/// Tells whether this run has the case of this number: its last digit is that of the tenth.
///
/// # Panics
/// If the variable can't be understood.
pub fn has(number: usize) -> bool {
    tenth().is_none_or(|tenth| number % 10 == tenth)
}

/// The cases that this run has, of a matrix whose first case has this number.
pub fn of<T>(cases: impl IntoIterator<Item = T>, first: usize) -> impl Iterator<Item = T> {
    (first..).zip(cases).filter(|(number, _)| has(*number)).map(|(_, case)| case)
}

/// Tells whether this run has all cases.
///
/// # Panics
/// If the variable can't be understood.
pub fn is_whole() -> bool {
    tenth().is_none()
}
