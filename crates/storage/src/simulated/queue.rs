//! The completion queue of a worker in a simulated world.

use crate::request::{Completion, Job, OpId, OpRequest};
use std::time::Duration;

/// The completion queue of a worker in a simulated world. `backend.rs` has the contract.
pub trait SimulatedQueue {
    /// The number of the worker in its world, from 0 in the order of making.
    fn number(&self) -> usize;
    /// Takes a request over.
    fn submit(&mut self, id: OpId, request: Box<OpRequest>);
    /// Starts everything taken over so far.
    fn submit_queued(&mut self);
    /// Appends what is complete, without waiting.
    fn reap(&mut self, done: &mut Vec<Completion>);
    /// Starts everything, lets the world go on until something is complete or `timeout` is over, and reaps.
    fn wait(&mut self, timeout: Option<Duration>, done: &mut Vec<Completion>);
    /// Counts the operations that have no completion yet.
    fn in_flight(&self) -> usize;
    /// Simulated time.
    fn now(&self) -> Duration;
    /// Takes over a piece of computation.
    fn run_blocking(&mut self, job: Job);
}
