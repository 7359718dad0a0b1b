//! Rewrites clusters of an image compressed, several at once and at random, and says so, until it is killed or its
//! standard input ends. For the tests that kill it; see `zebu_tests::rewriting`.

use clap::Parser;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use zebu_engine::storage::{Engine, IoBuf, Worker, WorkerConfig};
use zebu_engine::{Access, CacheMode, CompressOptions, Durability, Format, Image, OpenOptions};
use zebu_tests::random::Random;
use zebu_tests::rewriting::{Kind, Line, content, kind};

#[derive(Parser)]
struct Options {
    image: PathBuf,
    /// Chooses what is written, and how
    #[arg(long)]
    seed: u64,
    /// Versions are greater than this
    #[arg(long)]
    after: u64,
    /// The numbers of the clusters that are stored plain, with commas between them
    #[arg(long, default_value = "")]
    plain: String,
}

/// State that the streams of requests share.
struct Rewriter {
    image: Image,
    cluster_size: usize,
    next_version: Cell<u64>,
    next_flush: Cell<u64>,
    clusters: RefCell<Vec<State>>,
    stop: Arc<AtomicBool>,
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    busy: bool,
    /// Whether the cluster may be stored plain.
    plain: bool,
}

/// One write, so that a kill leaves whole lines.
fn complain(error: &dyn std::fmt::Display) {
    let _ = std::io::stderr().write_all(format!("{error}\n").as_bytes());
}

/// One write, so that a kill leaves whole lines.
fn say(line: Line) {
    let text = line.text();
    if std::io::stdout().write_all(text.as_bytes()).and_then(|()| std::io::stdout().flush()).is_err() {
        std::process::exit(1);
    }
}

impl Rewriter {
    fn claim(&self, random: &mut Random) -> Vec<u64> {
        let mut clusters = self.clusters.borrow_mut();
        let first = random.below(clusters.len() as u64);
        let most = random.between(1, 4);
        let free: Vec<u64> = (first..clusters.len() as u64)
            .take(most as usize)
            .take_while(|i| !clusters[*i as usize].busy)
            .collect();
        for index in &free {
            clusters[*index as usize].busy = true;
        }
        free
    }

    /// A version for a cluster. None that is stored plain comes where another one may be.
    fn version(&self, cluster: u64) -> u64 {
        let state = &mut self.clusters.borrow_mut()[cluster as usize];
        loop {
            let version = self.next_version.get() + 1;
            self.next_version.set(version);
            let plain = kind(version) == Kind::Plain;
            if !(plain && state.plain) {
                state.plain |= plain;
                return version;
            }
        }
    }

    async fn stream(self: Rc<Self>, worker: Worker, mut random: Random) {
        while !self.stop.load(Ordering::Relaxed) {
            if random.chance(6) {
                self.flush(&worker).await;
                continue;
            }
            let claimed = self.claim(&mut random);
            if claimed.is_empty() {
                let mut seen = false;
                poll_fn(|cx| {
                    cx.waker().wake_by_ref();
                    if std::mem::replace(&mut seen, true) { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
                continue;
            }
            let versions: Vec<u64> = claimed.iter().map(|cluster| self.version(*cluster)).collect();
            let mut bytes = Vec::new();
            for (cluster, version) in claimed.iter().zip(&versions) {
                say(Line::Begin { cluster: *cluster, version: *version });
                bytes.extend(content(*version, self.cluster_size));
            }
            let offset = claimed[0] * self.cluster_size as u64;
            let bufs = IoBuf::copy_of(&bytes).into();
            let (result, _) = self.image.write_compressed(&worker, offset, bufs, Durability::Volatile).await;
            for (cluster, version) in claimed.iter().zip(&versions) {
                let state = &mut self.clusters.borrow_mut()[*cluster as usize];
                state.busy = false;
                if let Err(error) = &result {
                    complain(error);
                    say(Line::Failed { cluster: *cluster });
                } else {
                    state.plain = kind(*version) == Kind::Plain;
                    say(Line::Done { cluster: *cluster, version: *version });
                }
            }
        }
    }

    async fn flush(&self, worker: &Worker) -> bool {
        let number = self.next_flush.get();
        self.next_flush.set(number + 1);
        say(Line::FlushBegins { number });
        let result = self.image.flush(worker).await;
        if let Err(error) = &result {
            complain(error);
        }
        say(if result.is_ok() { Line::Flushed { number } } else { Line::FlushFailed });
        result.is_ok()
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let mut random = Random::new(options.seed);
    let stop = Arc::new(AtomicBool::new(false));
    let ended = Arc::clone(&stop);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        ended.store(true, Ordering::Relaxed);
    });
    let engine = *random.pick(&[Engine::Auto, Engine::Threads]);
    let worker = match Worker::new(&WorkerConfig::default().engine(engine)) {
        Ok(worker) => worker,
        Err(error) => {
            complain(&error);
            return ExitCode::FAILURE;
        }
    };
    let open = OpenOptions::default()
        .format(Some(Format::Qcow2))
        .access(Access::ReadWrite)
        .cache(*random.pick(&[CacheMode::None, CacheMode::Writeback]))
        .compress(CompressOptions::default().level(Some(1)).gather_memory(*random.pick(&[
            0,
            64 << 10,
            8 << 20,
        ])));
    let ended = worker.block_on(async {
        let image = Image::open(&worker, &options.image, &open).await?;
        let cluster_size = image.cluster_size() as usize;
        let mut clusters = vec![State::default(); image.virtual_size() as usize / cluster_size];
        for index in options.plain.split(',').filter_map(|word| word.parse::<usize>().ok()) {
            clusters[index].plain = true;
        }
        let rewriter = Rc::new(Rewriter {
            image: image.clone(),
            cluster_size,
            next_version: Cell::new(options.after),
            next_flush: Cell::new(0),
            clusters: RefCell::new(clusters),
            stop,
        });
        let streams: Vec<_> = (0..random.between(1, 12))
            .map(|_| worker.spawn(Rc::clone(&rewriter).stream(worker.clone(), Random::new(random.bits()))))
            .collect();
        for stream in streams {
            stream.await;
        }
        let flushed = rewriter.flush(&worker).await;
        image.close(&worker).await.map(|()| flushed)
    });
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}
