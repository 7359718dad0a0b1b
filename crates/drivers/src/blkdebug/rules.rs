//! Rules and the errors that they make active.

use zebu_storage::StorageOp;

/// The events of QEMU's `blkdebug`.
const EVENTS: [&str; 48] = [
    "l1_update",
    "l1_grow_alloc_table",
    "l1_grow_write_table",
    "l1_grow_activate_table",
    "l2_load",
    "l2_update",
    "l2_update_compressed",
    "l2_alloc_cow_read",
    "l2_alloc_write",
    "read_aio",
    "read_backing_aio",
    "read_compressed",
    "write_aio",
    "write_compressed",
    "vmstate_load",
    "vmstate_save",
    "cow_read",
    "cow_write",
    "reftable_load",
    "reftable_grow",
    "reftable_update",
    "refblock_load",
    "refblock_update",
    "refblock_update_part",
    "refblock_alloc",
    "refblock_alloc_hookup",
    "refblock_alloc_write",
    "refblock_alloc_write_blocks",
    "refblock_alloc_write_table",
    "refblock_alloc_switch_table",
    "cluster_alloc",
    "cluster_alloc_bytes",
    "cluster_free",
    "flush_to_os",
    "flush_to_disk",
    "pwritev_rmw_head",
    "pwritev_rmw_after_head",
    "pwritev_rmw_tail",
    "pwritev_rmw_after_tail",
    "pwritev",
    "pwritev_zero",
    "pwritev_done",
    "empty_image_prepare",
    "l1_shrink_write_table",
    "l1_shrink_free_l2_clusters",
    "cor_write",
    "cluster_alloc_space",
    "none",
];

/// The event of that name.
pub fn event(name: &str) -> Option<&'static str> {
    EVENTS.into_iter().find(|event| *event == name)
}

/// Kinds of requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoTypes(u8);

impl IoTypes {
    /// All but looks at what is allocated.
    pub const USUAL: Self = Self(0b1_1111);

    /// The kind of that name: `read`, `write`, `write-zeroes`, `discard`, `flush`, `block-status`.
    pub fn by_name(name: &str) -> Option<Self> {
        let names = ["read", "write", "write-zeroes", "discard", "flush", "block-status"];
        names.iter().position(|known| *known == name).map(|at| Self(1 << at))
    }

    fn has(self, op: StorageOp) -> bool {
        let bit = match op {
            StorageOp::Read { .. } => 0,
            StorageOp::Write { .. } => 1,
            StorageOp::ZeroRange { .. } => 2,
            // Zeroes that may give space back come as this, too.
            StorageOp::Punch { .. } => return self.0 & 0b1100 != 0,
            StorageOp::Flush => 4,
            StorageOp::ExtentAt { .. } => 5,
            _ => return false,
        };
        self.0 >> bit & 1 == 1
    }
}

/// The answer of the rules to an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// An error becomes active.
    Fail {
        /// Requests that it fails.
        types: IoTypes,
        /// The errno.
        errno: i32,
        /// It fails requests that cover this byte only.
        offset: Option<u64>,
        /// It fails one request only.
        once: bool,
    },
    /// The state changes.
    SetState(u32),
    /// The request stops until it is resumed, once.
    Stop {
        /// Name of the breakpoint.
        tag: String,
    },
}

/// An event, the state that it must happen in (0: any), and what becomes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// One of [`event`].
    pub event: &'static str,
    /// The state; 0 is any. The first one is 1.
    pub state: u32,
    /// Its answer.
    pub action: Action,
}

/// All rules, and the errors that are active.
#[derive(Debug)]
pub(super) struct Rules {
    rules: Vec<(u64, Rule)>,
    next: u64,
    active: Vec<u64>,
    state: u32,
}

impl Default for Rules {
    fn default() -> Self {
        Self { rules: Vec::new(), next: 0, active: Vec::new(), state: 1 }
    }
}

impl Rules {
    pub(super) fn new(rules: Vec<Rule>) -> Self {
        let mut all = Self::default();
        for rule in rules {
            all.add(rule);
        }
        all
    }

    pub(super) fn add(&mut self, rule: Rule) {
        self.rules.push((self.next, rule));
        self.next += 1;
    }

    /// Takes breakpoints away; false if there was none.
    pub(super) fn remove_stops(&mut self, tag: &str) -> bool {
        let before = self.rules.len();
        self.rules.retain(|(_, rule)| !matches!(&rule.action, Action::Stop { tag: found } if found == tag));
        self.rules.len() != before
    }

    /// An event happens; the name of the breakpoint that it hits.
    pub(super) fn happen(&mut self, event: &'static str) -> Option<String> {
        let (mut next_state, mut is_first_error, mut hit) = (self.state, true, None);
        for (number, rule) in &self.rules {
            if rule.event != event || rule.state != 0 && rule.state != self.state {
                continue;
            }
            match &rule.action {
                Action::Fail { .. } => {
                    if is_first_error {
                        self.active.clear();
                        is_first_error = false;
                    }
                    self.active.push(*number);
                }
                Action::SetState(state) => next_state = *state,
                Action::Stop { tag } => hit = hit.or(Some((*number, tag.clone()))),
            }
        }
        self.state = next_state;
        let (number, tag) = hit?;
        self.rules.retain(|(found, _)| *found != number);
        Some(tag)
    }

    /// The errno that a request fails with, if an active error is for it.
    pub(super) fn error_for(&mut self, op: StorageOp) -> Option<i32> {
        let covers = |offset: u64| match op {
            StorageOp::Read { offset: start, len }
            | StorageOp::Write { offset: start, len }
            | StorageOp::Punch { offset: start, len }
            | StorageOp::ZeroRange { offset: start, len } => offset >= start && offset - start < len,
            StorageOp::ExtentAt { offset: start } => offset >= start,
            _ => false,
        };
        // The latest one is looked at first.
        let found = self.active.iter().rev().find_map(|number| {
            let (_, rule) = self.rules.iter().find(|(found, _)| found == number)?;
            match rule.action {
                Action::Fail { types, errno, offset, once } if types.has(op) && offset.is_none_or(covers) => {
                    Some((*number, errno, once))
                }
                _ => None,
            }
        });
        let (number, errno, once) = found?;
        if once {
            self.rules.retain(|(found, _)| *found != number);
            self.active.retain(|found| *found != number);
        }
        Some(errno)
    }
}
