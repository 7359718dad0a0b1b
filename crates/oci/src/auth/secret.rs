//! What tells a registry who asks.

/// What tells a registry who asks. Nothing shows it.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Secret {
    /// A user and a password.
    Password { user: String, password: String },
    /// What a server of tokens gives tokens for.
    Identity(String),
    /// A token.
    Token(String),
}
