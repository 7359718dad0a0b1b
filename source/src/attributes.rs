//! Attributes of items.

/// Whether an item is compiled for tests only.
pub(crate) fn is_for_tests(attrs: &[syn::Attribute]) -> bool {
    attrs.iter().any(|attr| {
        attr.path().is_ident("cfg")
            && matches!(&attr.meta, syn::Meta::List(list) if {
                let text = list.tokens.to_string();
                text.contains("test") && !text.starts_with("not") && !text.contains("feature")
            })
    })
}
