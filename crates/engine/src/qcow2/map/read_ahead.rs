//! Loading slices before they are wanted.
//!
//! A miss of the slice that follows one missed lately is taken for a sequence: the slices after it are read too, with
//! one request, by a task of the worker that nobody waits for. They take room only if there is some, and count as
//! unused until somebody looks at them, so a wrong guess goes first.

use crate::qcow2::state::Qcow2;
use std::sync::Arc;
use zebu_storage::Worker;

/// Bytes read ahead at most.
const MOST_BYTES: usize = 64 << 10;
/// Slices read ahead at most.
const MOST_SLICES: usize = 16;

impl Qcow2 {
    /// Has the slices after `key` loaded, as far as its table reaches.
    pub(crate) fn read_ahead(self: &Arc<Self>, worker: &Worker, key: u64) {
        let slice_bytes = self.map.slices().slice_bytes();
        let in_table = (self.map.slices_per_table() - 1 - key % self.map.slices_per_table()) as usize;
        // A small cache is not emptied for a guess.
        let share = self.map.store().budget().for_slices() / 16 / self.map.slices().slice_cost();
        let most = (MOST_BYTES / slice_bytes).min(MOST_SLICES).min(in_table).min(share as usize);
        if most < 2 {
            return;
        }
        self.map.slices().note_read_ahead(key, key + 1 + most as u64);
        let (me, on) = (self.clone(), worker.uncounted());
        drop(worker.spawn(async move {
            // What is read may be a table that is replaced meanwhile: its place is not used again before this ends.
            let _inside = me.readers().enter(&on);
            let mut begun = Vec::new();
            for next in key + 1..=key + most as u64 {
                let Some(load) = me.map.slices().begin_ahead(next) else { break };
                begun.push(load);
            }
            if begun.is_empty() {
                return;
            }
            // A failure is that of whoever wants the slice, and reads it again.
            let Ok(bytes) = me.read_slices(&on, key + 1, begun.len()).await else { return };
            for ((ticket, room), content) in begun.into_iter().zip(bytes.chunks_exact(slice_bytes)) {
                ticket.finish(content.into(), room);
            }
        }));
    }
}
