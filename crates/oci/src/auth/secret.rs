//! Secrets for registries.

/// A proof of who asks a registry. Nothing shows it.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Secret {
    /// A user and a password.
    Password { user: String, password: String },
    /// An identity that a server of tokens gives tokens for.
    Identity(String),
    /// A token.
    Token(String),
}
