//! Words for the errors of the system.

/// The words for an errno, without the number that the standard library appends.
pub fn errno_text(errno: i32) -> String {
    let text = std::io::Error::from_raw_os_error(errno).to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_systems_words() {
        assert_eq!(errno_text(5), "Input/output error");
    }
}
