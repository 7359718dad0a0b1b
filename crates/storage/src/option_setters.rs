//! Setters of option structs.

/// Gives an option struct a method for each of its fields, which sets it and gives the options back.
///
/// For the crates of zebu: an option may be added in any version, so option structs are `#[non_exhaustive]`, and other crates
/// fill them in by these methods.
#[doc(hidden)]
#[macro_export]
macro_rules! option_setters {
    ($options:ident { $($(#[$attribute:meta])* $field:ident: $given:ty),* $(,)? }) => {
        impl $options {$(
            $(#[$attribute])*
            #[doc = concat!("Sets [`", stringify!($field), "`](#structfield.", stringify!($field), ").")]
            #[must_use]
            pub fn $field(mut self, $field: $given) -> Self {
                self.$field = $field.into();
                self
            }
        )*}
    };
}
