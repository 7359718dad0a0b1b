//! Operations of other threads that were under way when each step of a commit began.

use std::cell::RefCell;
use std::collections::BTreeMap;
use zebu_storage::commit_steps::CommitStep;

/// By step and operation: how often.
pub(crate) type Beside = BTreeMap<String, BTreeMap<&'static str, u64>>;

thread_local! {
    static SEEN: RefCell<Beside> = const { RefCell::new(BTreeMap::new()) };
}

/// A step begins beside these operations.
pub(crate) fn note(step: CommitStep, under_way: &[&'static str]) {
    SEEN.with_borrow_mut(|seen| {
        let of_step = seen.entry(format!("{step:?}")).or_default();
        for operation in under_way {
            *of_step.entry(operation).or_default() += 1;
        }
    });
}

/// Takes the notes of this thread since the last call.
pub(crate) fn take() -> Beside {
    SEEN.take()
}

/// Adds `other`.
pub(crate) fn add(sum: &mut Beside, other: Beside) {
    for (step, operations) in other {
        let of_step = sum.entry(step).or_default();
        for (operation, count) in operations {
            *of_step.entry(operation).or_default() += count;
        }
    }
}
