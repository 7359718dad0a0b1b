//! The images that a server has open, by the names of their exports.

use super::opened::Opened;
use std::cell::RefCell;
use std::rc::Rc;
use zebu_engine::OpenOptions;

/// Images that are to be closed in the end, or when their exports are removed. All of it belongs to one thread.
#[derive(Default)]
pub(crate) struct Images(RefCell<Vec<(String, Rc<Opened>)>>);

impl Images {
    /// Adds one.
    pub(crate) fn add(&self, name: &str, opened: Rc<Opened>) {
        self.0.borrow_mut().push((name.to_owned(), opened));
    }

    /// The options that one was opened with.
    pub(crate) fn options(&self, name: &str) -> OpenOptions {
        let all = self.0.borrow();
        let of_name = all.iter().find(|(other, _)| other == name);
        of_name.map(|(_, opened)| opened.options.clone()).unwrap_or_default()
    }

    /// Takes one out: whoever has it closes it.
    pub(crate) fn take(&self, name: &str) -> Option<Rc<Opened>> {
        let mut all = self.0.borrow_mut();
        let at = all.iter().position(|(other, _)| other == name)?;
        Some(all.remove(at).1)
    }

    /// All of them, in the order in which they came.
    pub(crate) fn all(&self) -> Vec<Rc<Opened>> {
        self.0.borrow().iter().map(|(_, opened)| Rc::clone(opened)).collect()
    }

    /// Takes all out, in the order in which they came.
    pub(crate) fn take_all(&self) -> Vec<Rc<Opened>> {
        std::mem::take(&mut *self.0.borrow_mut()).into_iter().map(|(_, opened)| opened).collect()
    }
}
