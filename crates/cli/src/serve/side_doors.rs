//! Sockets for metrics and commands, and the time until the server is to end.

use crate::failure::Failure;
use crate::serve::accept::Door;
use crate::serve::address::{Address, Bound, SocketAccess, SocketFile, bind_unix};
use crate::serve::controlled::Controlled;
use crate::serve::reload::reload;
use crate::serve::serve_args::ServeArgs;
use crate::serve::service_manager::ServiceManager;
use crate::serve::signals::Signals;
use crate::serve::{control, metrics};
use futures_util::future::Either;
use std::convert::Infallible;
use std::future::{pending, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};
use zebu_engine::storage::Worker;
use zebu_export::WorkerPool;
use zebu_export::nbd::NbdServer;
use zebu_storage::refuse_descriptors;

/// How often is looked whether an idle image holds memory that it does not use.
const TIDY_INTERVAL: Duration = Duration::from_secs(5);

/// Sockets beside those for clients.
pub(crate) struct SideDoors {
    metrics: Option<Door>,
    control: Option<Door>,
}

/// Makes the sockets; the files of those that have one.
pub(crate) fn side_doors(args: &ServeArgs) -> Result<(SideDoors, Vec<SocketFile>), Failure> {
    let mut files = Vec::new();
    let metrics = match &args.metrics {
        Some(Address::Passed) => {
            return Err(Failure::usage("--metrics needs an address of its own: unix:PATH or HOST:PORT"));
        }
        Some(address) => match address.bind(args.socket_access())?.pop() {
            Some(Bound::Tcp(listener)) => Some(Door::new(listener)?),
            Some(Bound::Unix(listener, file)) => {
                // Older kernels: `tell_of_descriptors` has told it.
                let _ = refuse_descriptors(&listener);
                files.extend(file);
                Some(Door::new(listener)?)
            }
            None => None,
        },
        None => None,
    };
    let control = match &args.control {
        Some(path) => {
            let (listener, file) = bind_unix(path, SocketAccess::OWNER)?;
            files.push(file);
            Some(Door::new(listener)?)
        }
        None => None,
    };
    Ok((SideDoors { metrics, control }, files))
}

/// Serves the side doors until a signal comes, or until the last one of `clients` has left.
pub(crate) async fn until_signal(
    worker: &Worker,
    signals: &Signals,
    clients: Option<&NbdServer>,
    side: &SideDoors,
    controlled: &Controlled<'_>,
    manager: (&ServiceManager, &WorkerPool),
) -> Result<(), Failure> {
    let mut signal = pin!(signals.wait(worker));
    let mut last_client = pin!(async {
        match clients {
            None => pending().await,
            Some(server) => server.all_left().await,
        }
    });
    let mut metrics = pin!(side.metrics.as_ref().map_or_else(
        || Either::Right(pending()),
        |door| Either::Left(
            door.serve(worker, |client, place| { metrics::answer(worker, client, place, controlled) })
        )
    ));
    let mut control = pin!(side.control.as_ref().map_or_else(
        || Either::Right(pending()),
        |door| Either::Left(
            door.serve(worker, |client, place| control::converse(worker, client, place, controlled))
        )
    ));
    let mut reloading = pin!(reload_when_asked(worker, signals, controlled));
    let mut tidying = pin!(tidy_now_and_then(worker, controlled));
    let (manager, pool) = manager;
    let mut staying_alive = pin!(manager.stay_alive(worker, || pool.turn()));
    poll_fn(|cx| {
        if let Poll::Ready(never) = tidying.as_mut().poll(cx) {
            match never {}
        }
        if let Poll::Ready(never) = staying_alive.as_mut().poll(cx) {
            match never {}
        }
        if let Poll::Ready(never) = reloading.as_mut().poll(cx) {
            match never {}
        }
        if let Poll::Ready(Err(failure)) = metrics.as_mut().poll(cx) {
            return Poll::Ready(Err(failure));
        }
        if let Poll::Ready(Err(failure)) = control.as_mut().poll(cx) {
            return Poll::Ready(Err(failure));
        }
        if last_client.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Ok(()));
        }
        signal.as_mut().poll(cx)
    })
    .await
}

/// Gives memory back that the mapping of idle images does not use: requests do so by the way, but there are none then.
async fn tidy_now_and_then(worker: &Worker, controlled: &Controlled<'_>) -> Infallible {
    loop {
        worker.sleep(TIDY_INTERVAL).await;
        for export in controlled.exports.iter() {
            export.image().tidy(Instant::now());
        }
    }
}

/// Reads the configuration again whenever a signal asks for it.
async fn reload_when_asked(worker: &Worker, signals: &Signals, controlled: &Controlled<'_>) -> Infallible {
    loop {
        signals.wait_for_reload(worker).await;
        reload(worker, &controlled.served, controlled.jobs()).await;
    }
}
