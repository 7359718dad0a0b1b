//! Calls of methods between the folders of one part of a crate.
//!
//! Types are followed as far as declarations say them: `self`, parameters, fields, what methods return, and variables that
//! get one of these. A call on anything else draws no arrow.

use crate::attributes::is_for_tests;
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::{self, Visit};

/// From each folder to those whose methods it calls, with the calls.
pub(crate) type Calls = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Types that stand for what is in them.
const WRAPPERS: [&str; 10] =
    ["Arc", "Box", "Option", "Result", "Mutex", "MutexGuard", "RwLock", "ArcCell", "OnceLock", "Rc"];

/// Draws the calls between the folders of `part`; a file that lies in none of them counts as one.
pub(crate) fn between_folders<'a>(
    part: &str,
    files: impl Iterator<Item = (&'a String, &'a syn::File)> + Clone,
) -> Calls {
    let room = |file: &str| {
        let rest = file.strip_prefix(part)?.strip_prefix('/')?;
        Some(rest.split_once('/').map_or(rest, |(folder, _)| folder).to_owned())
    };
    let files = files.filter_map(|(name, file)| Some((name, room(name)?, file)));
    let mut known = Known::default();
    for (_, room, file) in files.clone() {
        known.room = room;
        known.visit_file(file);
    }
    let mut calls = Calls::new();
    for (name, room, file) in files {
        let mut caller = Caller { known: &known, this: None, params: BTreeMap::new(), found: Vec::new() };
        caller.visit_file(file);
        for (target, method) in caller.found {
            if target != room {
                let call = format!("{name}: {method}");
                calls.entry(room.clone()).or_default().entry(target).or_default().insert(call);
            }
        }
        calls.entry(room).or_default();
    }
    calls
}

/// The declarations of all types of the part.
#[derive(Default)]
struct Known {
    room: String,
    /// By method, then by type: the folder, and the type that it returns.
    methods: BTreeMap<String, BTreeMap<String, (String, Option<String>)>>,
    fields: BTreeMap<(String, String), String>,
}

impl<'ast> Visit<'ast> for Known {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        for field in &item.fields {
            if let (Some(name), Some(of)) = (&field.ident, name_of(&field.ty)) {
                self.fields.insert((item.ident.to_string(), name.to_string()), of);
            }
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let Some(this) = name_of(&item.self_ty).filter(|_| item.trait_.is_none()) else { return };
        for item in &item.items {
            if let syn::ImplItem::Fn(method) = item {
                let returns = match &method.sig.output {
                    syn::ReturnType::Type(_, of) => name_of(of),
                    syn::ReturnType::Default => None,
                };
                let returns = returns.map(|of| if of == "Self" { this.clone() } else { of });
                let types = self.methods.entry(method.sig.ident.to_string()).or_default();
                types.insert(this.clone(), (self.room.clone(), returns));
            }
        }
    }
}

/// The last name of a type, within references and wrappers.
fn name_of(of: &syn::Type) -> Option<String> {
    match of {
        syn::Type::Reference(of) => name_of(&of.elem),
        syn::Type::Paren(of) => name_of(&of.elem),
        syn::Type::Path(path) => {
            let last = path.path.segments.last()?;
            let name = last.ident.to_string();
            match &last.arguments {
                syn::PathArguments::AngleBracketed(inner) if WRAPPERS.contains(&name.as_str()) => {
                    inner.args.iter().find_map(|argument| match argument {
                        syn::GenericArgument::Type(of) => name_of(of),
                        _ => None,
                    })
                }
                _ => Some(name),
            }
        }
        _ => None,
    }
}

/// Collects the folders whose methods a file calls.
struct Caller<'a> {
    known: &'a Known,
    this: Option<String>,
    params: BTreeMap<String, String>,
    found: Vec<(String, String)>,
}

impl Caller<'_> {
    fn type_of(&self, expression: &syn::Expr) -> Option<String> {
        match expression {
            syn::Expr::Path(path) => {
                let name = path.path.get_ident()?.to_string();
                if name == "self" {
                    return self.this.clone();
                }
                let of = self.params.get(&name).cloned();
                // What runs on a worker of its own has the driver by these names.
                of.or_else(|| ["me", "qcow2", "image"].contains(&name.as_str()).then(|| "Qcow2".to_owned()))
            }
            syn::Expr::Field(field) => {
                let syn::Member::Named(name) = &field.member else { return None };
                let of = self.type_of(&field.base)?;
                self.known.fields.get(&(of, name.to_string())).cloned()
            }
            syn::Expr::MethodCall(call) => {
                let of = self.type_of(&call.receiver)?;
                self.known.methods.get(&call.method.to_string())?.get(&of)?.1.clone()
            }
            syn::Expr::Reference(inner) => self.type_of(&inner.expr),
            syn::Expr::Paren(inner) => self.type_of(&inner.expr),
            syn::Expr::Await(inner) => self.type_of(&inner.base),
            syn::Expr::Try(inner) => self.type_of(&inner.expr),
            _ => None,
        }
    }

    fn with_params(&mut self, signature: &syn::Signature, visit: impl FnOnce(&mut Self)) {
        let before = self.params.clone();
        for input in &signature.inputs {
            if let syn::FnArg::Typed(param) = input
                && let syn::Pat::Ident(name) = &*param.pat
                && let Some(of) = name_of(&param.ty)
            {
                self.params.insert(name.ident.to_string(), of);
            }
        }
        visit(self);
        self.params = before;
    }
}

impl<'ast> Visit<'ast> for Caller<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let before = std::mem::replace(&mut self.this, name_of(&item.self_ty));
        visit::visit_item_impl(self, item);
        self.this = before;
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.with_params(&item.sig, |caller| visit::visit_item_fn(caller, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.with_params(&item.sig, |caller| visit::visit_impl_item_fn(caller, item));
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        visit::visit_local(self, local);
        if let (syn::Pat::Ident(name), Some(init)) = (&local.pat, &local.init)
            && let Some(of) = self.type_of(&init.expr)
        {
            self.params.insert(name.ident.to_string(), of);
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let method = call.method.to_string();
        if let Some(types) = self.known.methods.get(&method) {
            let room = self.type_of(&call.receiver).and_then(|of| types.get(&of));
            self.found.extend(room.map(|(room, _)| (room.clone(), method)));
        }
        visit::visit_expr_method_call(self, call);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_followed_through_fields_and_returned_types() {
        let files: Vec<(String, syn::File)> = [
            ("p/a/x.rs", "pub struct A { b: B } impl A { fn go(&self) { self.b.inner().len(); } fn up(&self) {} }"),
            ("p/b/y.rs", "pub struct B { c: Mutex<C> } impl B { fn inner(&self) -> MutexGuard<'_, C> { &self.c } }"),
            ("p/c.rs", "pub struct C; impl C { fn len(&self) {} fn call(a: &Arc<A>) { let b = a; b.up(); x.inner(); } }"),
            ("q/d.rs", "fn d(b: &B) { b.inner(); }"),
        ]
        .map(|(name, text)| (name.to_owned(), syn::parse_file(text).unwrap()))
        .into();
        let calls = between_folders("p", files.iter().map(|(name, file)| (name, file)));
        let arrows: Vec<(&str, &str)> =
            calls.iter().flat_map(|(from, to)| to.keys().map(|to| (from.as_str(), to.as_str()))).collect();
        assert_eq!(arrows, [("a", "b"), ("a", "c.rs"), ("c.rs", "a")]);
    }
}
