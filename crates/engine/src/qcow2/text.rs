//! Names in an image: bytes that should be UTF-8.

/// The bytes as text. What is no UTF-8 is replaced.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
