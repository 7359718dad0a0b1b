//! A source in which every change of it is compiled, one of which can be active.
//!
//! `a + b` becomes `(if crate::changed::is(7) { a - b } else { a + b })`, the body of a function begins with
//! `if crate::changed::is(8) { return Ok(()); }`, and so on: the engine is built once, instead of once for each change.

use serde::Deserialize;
use std::collections::HashMap;
use std::ops::Range;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// A change, as `cargo mutants --list --json` says it.
#[derive(Debug, Clone, Deserialize)]
pub struct Change {
    /// Its place and what it does.
    pub name: String,
    /// The file, from the root of the workspace.
    pub file: String,
    /// The word of cargo-mutants for its kind.
    pub genre: String,
    /// The new code.
    pub replacement: String,
    span: Span,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Span {
    start: Place,
}

/// Line and column, of characters, both from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
struct Place {
    line: usize,
    column: usize,
}

impl Place {
    fn of(place: proc_macro2::LineColumn) -> Self {
        Self { line: place.line, column: place.column + 1 }
    }
}

/// A source with its changes.
#[derive(Debug, Default)]
pub struct Schema {
    /// The source with the changes.
    pub text: String,
    /// Where the changed code of each number is in the text, bytes.
    pub changed: Vec<(Range<usize>, u32)>,
    /// Changes that can't be chosen when the program runs (a verdict of its own).
    pub left_out: Vec<u32>,
}

/// Puts the changes with their numbers into `source`.
pub fn schema(source: &str, changes: &[(u32, &Change)]) -> Result<Schema, String> {
    let file = syn::parse_file(source).map_err(|e| format!("{e} at {:?}", e.span().start()))?;
    let mut places = Places { lines: Lines::of(source), found: HashMap::new(), constant: 0 };
    places.visit_file(&file);
    let mut schema = Schema::default();
    let mut edits = Vec::<Edit>::new();
    for (number, change) in changes {
        let start = change.span.start;
        let edit = match (change.genre.as_str(), places.found.get(&(change.genre.as_str(), start))) {
            // What returns some iterator can't return another.
            ("FnValue", _) if change.replacement.starts_with("::std::iter::") => None,
            ("FnValue", found) if !matches!(found, Some(Found::Constant)) => {
                places.lines.byte(start).map(|at| Edit::value(at, *number, &change.replacement))
            }
            ("BinaryOperator", Some(Found::Operator { whole, operator })) => {
                let (before, after) =
                    (&source[whole.start..operator.start], &source[operator.end..whole.end]);
                let changed = format!("{before} {} {after}", change.replacement);
                Some(Edit::alternative(whole.clone(), *number, changed))
            }
            ("UnaryOperator", Some(Found::Unary { whole, operand })) => {
                Some(Edit::alternative(whole.clone(), *number, source[operand.clone()].to_owned()))
            }
            ("MatchArmGuard", Some(Found::Guard(guard))) => {
                Some(Edit::alternative(guard.clone(), *number, change.replacement.clone()))
            }
            ("MatchArm", Some(Found::Arm { pattern_end })) => Some(Edit::arm(*pattern_end, *number)),
            _ => None,
        };
        match edit {
            Some(edit) => edits.push(edit),
            None => schema.left_out.push(*number),
        }
    }
    // The outer first; what is inserted at the beginning of an expression comes before it.
    edits.sort_by_key(|edit| (edit.at.start, !edit.at.is_empty(), std::cmp::Reverse(edit.at.end)));
    let mut rest = edits.as_slice();
    schema.write(source, 0..source.len(), &mut rest);
    Ok(schema)
}

/// The edit that a change asks for.
#[derive(Debug)]
struct Edit {
    /// The expression, or the place that something is inserted at.
    at: Range<usize>,
    number: u32,
    /// The text that is inserted, or stands in the expression's place; and what of it is the changed code.
    text: String,
    changed: Range<usize>,
}

impl Edit {
    fn value(at: usize, number: u32, value: &str) -> Self {
        let text = format!("if crate::changed::is({number}) {{ return {value}; }} ");
        let changed = 0..text.len();
        Self { at: at..at, number, text, changed }
    }

    fn arm(at: usize, number: u32) -> Self {
        let text = format!(" if !crate::changed::is({number})");
        Self { at: at..at, number, changed: 0..text.len(), text }
    }

    fn alternative(at: Range<usize>, number: u32, code: String) -> Self {
        let before = format!("if crate::changed::is({number}) {{ ");
        let changed = before.len()..before.len() + code.len();
        Self { at, number, text: format!("{before}{code} }} else "), changed }
    }
}

impl Schema {
    /// Writes a part of the source with the edits that lie in it, and takes those off `rest`.
    fn write(&mut self, source: &str, part: Range<usize>, rest: &mut &[Edit]) {
        let mut from = part.start;
        while let Some((edit, more)) = rest.split_first()
            && edit.at.end <= part.end
        {
            self.text.push_str(&source[from..edit.at.start]);
            from = edit.at.end;
            if edit.at.is_empty() {
                *rest = more;
                self.change(edit);
                continue;
            }
            self.text.push('(');
            let same = rest.iter().take_while(|other| other.at == edit.at).count();
            let (here, more) = rest.split_at(same);
            *rest = more;
            for edit in here {
                self.change(edit);
            }
            self.text.push_str("{ ");
            self.write(source, edit.at.clone(), rest);
            self.text.push_str(" })");
        }
        self.text.push_str(&source[from..part.end]);
    }

    fn change(&mut self, edit: &Edit) {
        let start = self.text.len();
        self.text.push_str(&edit.text);
        self.changed.push((start + edit.changed.start..start + edit.changed.end, edit.number));
    }
}

/// Where the lines of a source begin, bytes.
struct Lines(Vec<(usize, String)>);

impl Lines {
    fn of(source: &str) -> Self {
        let mut at = 0;
        let lines = source.split_inclusive('\n').map(|line| {
            let start = at;
            at += line.len();
            (start, line.to_owned())
        });
        Self(lines.collect())
    }

    fn byte(&self, place: Place) -> Option<usize> {
        let (start, line) = self.0.get(place.line.checked_sub(1)?)?;
        let chars = place.column.checked_sub(1)?;
        Some(start + line.chars().take(chars).map(char::len_utf8).sum::<usize>())
    }

    fn bytes(&self, spanned: &impl Spanned) -> Option<Range<usize>> {
        let span = spanned.span();
        Some(self.byte(Place::of(span.start()))?..self.byte(Place::of(span.end()))?)
    }
}

/// The code at a place.
enum Found {
    Operator {
        whole: Range<usize>,
        operator: Range<usize>,
    },
    Unary {
        whole: Range<usize>,
        operand: Range<usize>,
    },
    Guard(Range<usize>),
    Arm {
        pattern_end: usize,
    },
    /// Code that the compiler runs.
    Constant,
}

struct Places {
    lines: Lines,
    found: HashMap<(&'static str, Place), Found>,
    /// How many constants we are in.
    constant: usize,
}

impl Places {
    fn add(&mut self, genre: &'static str, at: &impl Spanned, found: Option<Found>) {
        let found = if self.constant > 0 { Some(Found::Constant) } else { found };
        if let Some(found) = found {
            self.found.insert((genre, Place::of(at.span().start())), found);
        }
    }

    fn constant(&mut self, visit: impl FnOnce(&mut Self)) {
        self.constant += 1;
        visit(self);
        self.constant -= 1;
    }

    /// Marks where the body of a constant function begins.
    fn body(&mut self, block: &syn::Block) {
        if let Some(first) = block.stmts.first() {
            self.add("FnValue", first, None);
        }
    }
}

impl<'ast> Visit<'ast> for Places {
    fn visit_expr_binary(&mut self, expr: &'ast syn::ExprBinary) {
        // A `let` in a chain of conditions can stand nowhere else.
        let lets = |expr: &syn::Expr| matches!(expr, syn::Expr::Let(_)) || is_chain(expr);
        let found = if lets(&expr.left) || lets(&expr.right) {
            None
        } else {
            let ranges = (self.lines.bytes(expr), self.lines.bytes(&expr.op));
            if let (Some(whole), Some(operator)) = ranges {
                Some(Found::Operator { whole, operator })
            } else {
                None
            }
        };
        self.add("BinaryOperator", &expr.op, found);
        visit::visit_expr_binary(self, expr);
    }

    fn visit_expr_unary(&mut self, expr: &'ast syn::ExprUnary) {
        if let (Some(whole), Some(operand)) = (self.lines.bytes(expr), self.lines.bytes(&*expr.expr)) {
            self.add("UnaryOperator", &expr.op, Some(Found::Unary { whole, operand }));
        }
        visit::visit_expr_unary(self, expr);
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if let Some((_, guard)) = &arm.guard {
            if !is_chain(guard)
                && let Some(range) = self.lines.bytes(&**guard)
            {
                self.add("MatchArmGuard", &**guard, Some(Found::Guard(range)));
            }
        } else if let Some(range) = self.lines.bytes(&arm.pat) {
            self.add("MatchArm", &arm.pat, Some(Found::Arm { pattern_end: range.end }));
        }
        visit::visit_arm(self, arm);
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.constant(|places| visit::visit_item_const(places, item));
    }

    fn visit_impl_item_const(&mut self, item: &'ast syn::ImplItemConst) {
        self.constant(|places| visit::visit_impl_item_const(places, item));
    }

    fn visit_item_static(&mut self, item: &'ast syn::ItemStatic) {
        self.constant(|places| visit::visit_item_static(places, item));
    }

    fn visit_type_array(&mut self, array: &'ast syn::TypeArray) {
        self.constant(|places| visit::visit_type_array(places, array));
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        if function.sig.constness.is_some() {
            self.constant(|places| {
                places.body(&function.block);
                visit::visit_item_fn(places, function);
            });
        } else {
            visit::visit_item_fn(self, function);
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        if function.sig.constness.is_some() {
            self.constant(|places| {
                places.body(&function.block);
                visit::visit_impl_item_fn(places, function);
            });
        } else {
            visit::visit_impl_item_fn(self, function);
        }
    }
}

/// Whether `let` is among the conditions.
fn is_chain(expr: &syn::Expr) -> bool {
    match expr {
        syn::Expr::Let(_) => true,
        syn::Expr::Binary(binary) if matches!(binary.op, syn::BinOp::And(_)) => {
            is_chain(&binary.left) || is_chain(&binary.right)
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A change at the first place in `source` where `at` is.
    fn change(genre: &str, replacement: &str, source: &str, at: &str) -> Change {
        let before = &source[..source.find(at).expect("it is there")];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
        Change {
            name: String::new(),
            file: String::new(),
            genre: genre.into(),
            replacement: replacement.into(),
            span: Span { start: Place { line, column } },
        }
    }

    fn written(source: &str, changes: &[Change]) -> Schema {
        let numbered: Vec<(u32, &Change)> = (1..).zip(changes).collect();
        let schema = schema(source, &numbered).expect("Rust");
        syn::parse_file(&schema.text).expect("still Rust");
        schema
    }

    #[test]
    fn operators_nest() {
        let source = "fn f(a: u64, b: u64) -> u64 { (a + b * 2) }";
        let changes =
            [change("BinaryOperator", "-", source, "+"), change("BinaryOperator", "/", source, "*")];
        let wanted = "fn f(a: u64, b: u64) -> u64 { ((if crate::changed::is(1) { a  -  b * 2 } else { \
                      a + (if crate::changed::is(2) { b  /  2 } else { b * 2 }) })) }";
        assert_eq!(written(source, &changes).text, wanted);
    }

    #[test]
    fn two_changes_of_one_operator_are_a_chain() {
        let source = "fn f(é: u8) -> bool { /* ä */ if é == 1 { é > 2 } else { false } }";
        let changes =
            [change("BinaryOperator", "<", source, "=="), change("BinaryOperator", ">=", source, "==")];
        let text = written(source, &changes).text;
        let wanted = "is(1) { é  <  1 } else if crate::changed::is(2) { é  >=  1 } else { é == 1 })";
        assert!(text.contains(wanted), "{text}");
    }

    #[test]
    fn bodies_guards_and_arms() {
        let source = "fn f(a: Option<u8>) -> u8 {\n    match a {\n        Some(0) => 1,\n        \
                      Some(n) if n > 3 => n,\n        _ => 4,\n    }\n}";
        let changes = [
            change("FnValue", "7", source, "match"),
            change("MatchArm", "", source, "Some(0)"),
            change("MatchArmGuard", "true", source, "n > 3"),
            change("BinaryOperator", "<", source, "> 3"),
        ];
        let schema = written(source, &changes);
        let text = &schema.text;
        assert!(text.contains("if crate::changed::is(1) { return 7; } match a {"), "{text}");
        assert!(text.contains("Some(0) if !crate::changed::is(2) => 1"), "{text}");
        let guard = "Some(n) if (if crate::changed::is(3) { true } \
                     else if crate::changed::is(4) { n  <  3 } else { n > 3 }) => n";
        assert!(text.contains(guard), "{text}");
        let changed: Vec<&str> = schema.changed.iter().map(|(range, _)| &text[range.clone()]).collect();
        assert_eq!(changed[2..], ["true", "n  <  3"]);
    }

    #[test]
    fn what_the_compiler_runs_is_left_out() {
        let source = "const A: u64 = 1 << 3;\nconst fn f() -> u64 {\n    5\n}\n\
                      fn g(a: Option<u8>, b: bool) -> bool { if let Some(_) = a && b { true } else { false } }";
        let changes = [
            change("BinaryOperator", ">>", source, "<<"),
            change("FnValue", "0", source, "5"),
            change("BinaryOperator", "||", source, "&&"),
        ];
        let schema = written(source, &changes);
        assert_eq!(schema.left_out, [1, 2, 3]);
        assert_eq!(schema.text, source);
    }
}
