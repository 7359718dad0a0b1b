//! Fields of the driver's structs: components own their state, and the image has few of them.

use crate::attributes::is_for_tests;
use syn::visit::{self, Visit};

/// The struct of an open image, and how many components it may have.
const IMAGE: (&str, usize) = ("Qcow2", 12);

/// Lists what breaks the rules in the files below `part`: fields that the whole crate may use, and an image of too many
/// fields.
pub(crate) fn open_fields<'a>(
    part: &str,
    files: impl Iterator<Item = (&'a String, &'a syn::File)>,
) -> Vec<String> {
    let mut broken = Vec::new();
    for (file, parsed) in files.filter(|(file, _)| file.starts_with(part)) {
        let mut structs = Structs { file, broken: &mut broken };
        structs.visit_file(parsed);
    }
    broken
}

struct Structs<'a> {
    file: &'a str,
    broken: &'a mut Vec<String>,
}

impl<'ast> Visit<'ast> for Structs<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        let (file, name) = (self.file, &item.ident);
        if *name == IMAGE.0 && item.fields.len() > IMAGE.1 {
            let count = item.fields.len();
            self.broken.push(format!("{file}: {name} has {count} fields; {} are allowed", IMAGE.1));
        }
        for field in item.fields.iter().filter(|field| is_open(&field.vis)) {
            let field = field.ident.as_ref().map_or_else(|| "a field".to_owned(), ToString::to_string);
            self.broken.push(format!("{file}: {name}: {field}"));
        }
    }
}

/// Whether the whole crate, or everybody, may use it.
fn is_open(visibility: &syn::Visibility) -> bool {
    match visibility {
        syn::Visibility::Public(_) => true,
        syn::Visibility::Restricted(to) => to.path.is_ident("crate"),
        syn::Visibility::Inherited => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let file = syn::parse_file(text).unwrap();
        open_fields("qcow2", [(&"qcow2/a.rs".to_owned(), &file), (&"b.rs".to_owned(), &file)].into_iter())
    }

    #[test]
    fn open_fields_are_named() {
        let text =
            "struct A { a: u8, pub(super) b: u8, pub(crate) c: u8, pub d: u8 } struct B(pub(crate) u8);";
        assert_eq!(found(text), ["qcow2/a.rs: A: c", "qcow2/a.rs: A: d", "qcow2/a.rs: B: a field"]);
        assert!(found("#[cfg(test)] mod tests { struct A { pub(crate) a: u8 } }").is_empty());
    }

    #[test]
    fn an_image_has_few_fields() {
        let of = |count| format!("struct Qcow2({});", "u8,".repeat(count));
        assert!(found(&of(12)).is_empty());
        assert_eq!(found(&of(13)), ["qcow2/a.rs: Qcow2 has 13 fields; 12 are allowed"]);
    }
}
