//! One moment of several images.

use crate::Result;
use crate::node::Node;
use std::pin::Pin;
use std::sync::Arc;
use zebu_storage::Worker;
use zebu_storage::sabotage::{self, Fault};

type Work<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// Runs `work` while no request that changes one of these images is under way. Each is there once.
///
/// The gates are closed in one order in the whole process, so that two of these never wait for each other.
pub(super) async fn while_all_alone(
    worker: &Worker,
    mut nodes: Vec<Arc<Node>>,
    work: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    nodes.sort_by_key(|node| Arc::as_ptr(node).addr());
    if sabotage::is(Fault::CloseOneGate) {
        nodes.truncate(1);
    }
    within(worker, &nodes, Box::pin(work())).await
}

fn within<'a>(worker: &'a Worker, nodes: &'a [Arc<Node>], work: Work<'a>) -> Work<'a> {
    match nodes {
        [] => work,
        [first, rest @ ..] => {
            Box::pin(
                async move { first.while_alone(worker, async || within(worker, rest, work).await).await },
            )
        }
    }
}
