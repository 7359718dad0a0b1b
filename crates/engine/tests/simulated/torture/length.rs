//! The length of the image file: no more than what was needed, and one growth.

use crate::crash::guest::Request;
use crate::crash::setup::TOP;
use crate::torture::plan::{Phase, Plan};
use zebu_sim::SimWorld;

/// Bytes that the file grows by ahead of use, at least.
const GROWTH: u64 = 1 << 20;
/// Bytes of the first window of a stream.
const WINDOW: u64 = 64 << 10;
/// Bytes on either side of a read that are copied with it.
const AROUND: u64 = 64 << 10;

/// The bound of the file's length in one life.
pub(crate) struct Length<'a> {
    plan: &'a Plan,
    world: &'a SimWorld,
    at_open: u64,
    /// Bytes that requests may have needed, with windows and tables.
    needed: u64,
}

impl<'a> Length<'a> {
    pub(crate) fn at_open(plan: &'a Plan, world: &'a SimWorld) -> Self {
        Self { plan, world, at_open: Self::of_file(world), needed: 0 }
    }

    fn of_file(world: &SimWorld) -> u64 {
        world.content(TOP).map_or(0, |content| content.len())
    }

    /// The most that a request needs: its clusters, an L2 table for each of them, and the windows of both.
    fn of_request(&self, request: &Request) -> u64 {
        let setup = &self.plan.setup;
        let len = match *request {
            Request::Write { len, .. } | Request::WriteCompressed { len, .. } | Request::Zero { len, .. } => {
                len
            }
            Request::Discard { len, .. } => len,
            // So much around it is copied, too.
            Request::Read { len, .. } if setup.copy_on_read => len + 2 * AROUND,
            Request::Read { .. } | Request::Flush => return 0,
        };
        let cluster = setup.cluster_size;
        let tables = len / (cluster * cluster / 16) + 2;
        let window = self.plan.window.clamp(cluster, WINDOW.max(cluster));
        let windows = if self.plan.window > cluster { 2 * window + 2 * len } else { 0 };
        len + (2 + tables) * cluster + windows
    }

    /// Notes that the requests of a phase came and have ended.
    pub(crate) fn check_after(&mut self, phase: &Phase) -> Result<(), String> {
        let requests = phase.streams.iter().flatten();
        self.needed += requests.map(|request| self.of_request(request)).sum::<u64>();
        if let Some(len) = phase.resize {
            // Another L1 table, and where there is a backing image what the disk grows by.
            let cluster = self.plan.setup.cluster_size;
            self.needed += len / (cluster * cluster / 16) * 8 + 4 * cluster + len / 8;
        }
        // Refcount blocks, a refcount table that moves, rests of growths that are too short for a window.
        let needed = self.needed + self.needed / 4 + 64 * self.plan.setup.cluster_size;
        let most = self.at_open.next_multiple_of(self.plan.setup.cluster_size) + needed;
        let most = most + GROWTH.max(most / 16);
        match Self::of_file(self.world) {
            len if len > most => Err(format!(
                "the file has {len:#x} bytes, not {most:#x} at most: {:#x} at open, {:#x} needed",
                self.at_open, self.needed
            )),
            _ => Ok(()),
        }
    }
}
