//! Clusters whose content tells which version of them it is, and the conversation between the program `rewriter`, which
//! writes them until it is killed, and the test that knows afterwards what may be found.

use crate::random::Random;

/// Bytes that carry the number of their version.
const SECTOR: usize = 512;

/// How a version of a cluster is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// All zero.
    Zero,
    /// Noise: it is stored plain. Two of them in succession would be written in place, and a kill could leave half of
    /// each, as on any disk.
    Plain,
    /// So many noisy bytes in each sector.
    Compressible(usize),
}

/// The kind of a version.
pub fn kind(version: u64) -> Kind {
    let mut random = Random::new(version ^ 0x6b69_6e64);
    match random.below(10) {
        0 => Kind::Zero,
        1 => Kind::Plain,
        // The number of its version is noise, too.
        2..5 => Kind::Compressible(8),
        _ => Kind::Compressible(8 + random.below(400) as usize),
    }
}

/// The content of a cluster of `len` bytes in this version. Version 0 is a cluster that was never written.
pub fn content(version: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let noisy = match kind(version) {
        _ if version == 0 => return bytes,
        Kind::Zero => return bytes,
        Kind::Plain => SECTOR,
        Kind::Compressible(noisy) => noisy,
    };
    let mut random = Random::new(version);
    for sector in bytes.chunks_mut(SECTOR) {
        sector.fill(version as u8);
        random.fill(&mut sector[..noisy]);
        sector[..8].copy_from_slice(&version.to_be_bytes());
    }
    bytes
}

/// A message of the rewriter, one line each, before or after it does it. A version belongs to one cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    /// It is about to write this version of a cluster.
    Begin {
        /// Number of the cluster.
        cluster: u64,
        /// The version that it will hold.
        version: u64,
    },
    /// The write was acknowledged.
    Done {
        /// Number of the cluster.
        cluster: u64,
        /// The version that it holds.
        version: u64,
    },
    /// The write failed.
    Failed {
        /// Number of the cluster.
        cluster: u64,
    },
    /// A flush begins.
    FlushBegins {
        /// Number of the flush.
        number: u64,
    },
    /// A flush was acknowledged.
    Flushed {
        /// Number of the flush.
        number: u64,
    },
    /// A flush failed.
    FlushFailed,
}

impl Line {
    /// As text, with the end of the line.
    pub fn text(self) -> String {
        match self {
            Line::Begin { cluster, version } => format!("begin {cluster} {version}\n"),
            Line::Done { cluster, version } => format!("done {cluster} {version}\n"),
            Line::Failed { cluster } => format!("failed {cluster} 0\n"),
            Line::FlushBegins { number } => format!("flush {number} 0\n"),
            Line::Flushed { number } => format!("flushed {number} 0\n"),
            Line::FlushFailed => "flush-failed 0 0\n".to_owned(),
        }
    }

    /// From text; `None` for anything else (such as a line that was cut short).
    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.strip_suffix('\n')?.split(' ');
        let (word, a, b) = (words.next()?, words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        Some(match word {
            "begin" => Line::Begin { cluster: a, version: b },
            "done" => Line::Done { cluster: a, version: b },
            "failed" => Line::Failed { cluster: a },
            "flush" => Line::FlushBegins { number: a },
            "flushed" => Line::Flushed { number: a },
            "flush-failed" => Line::FlushFailed,
            _ => return None,
        })
    }
}

/// The possible contents of a cluster.
#[derive(Debug, Clone, Default)]
struct Cluster {
    /// The version that a flush made durable, or that was found last.
    durable: u64,
    /// The last one that was acknowledged.
    done: u64,
    /// All that were sent since the durable one, in order.
    sent: Vec<u64>,
}

/// A disk of such clusters.
#[derive(Debug, Clone)]
pub struct Disk {
    clusters: Vec<Cluster>,
    cluster_size: usize,
    flushes: Vec<(u64, Vec<u64>)>,
    /// Writes and flushes that failed.
    pub failures: u64,
    /// Flushes that were acknowledged.
    pub flushed: u64,
}

impl Disk {
    /// One that holds these versions.
    pub fn new(versions: &[u64], cluster_size: usize) -> Self {
        let clusters = versions
            .iter()
            .map(|version| Cluster { durable: *version, done: *version, sent: Vec::new() })
            .collect();
        Self { clusters, cluster_size, flushes: Vec::new(), failures: 0, flushed: 0 }
    }

    /// Notes what the rewriter said.
    pub fn hear(&mut self, line: Line) {
        match line {
            Line::Begin { cluster, version } => self.clusters[cluster as usize].sent.push(version),
            Line::Done { cluster, version } => self.clusters[cluster as usize].done = version,
            Line::Failed { .. } | Line::FlushFailed => self.failures += 1,
            Line::FlushBegins { number } => {
                self.flushes.push((number, self.clusters.iter().map(|cluster| cluster.done).collect()));
            }
            Line::Flushed { number } => {
                self.flushed += 1;
                let Some(at) = self.flushes.iter().position(|(n, _)| *n == number) else { return };
                for (cluster, done) in self.clusters.iter_mut().zip(self.flushes.remove(at).1) {
                    // A later flush may have said more already.
                    if let Some(at) = cluster.sent.iter().position(|version| *version == done) {
                        cluster.sent.drain(..=at);
                        cluster.durable = done;
                    }
                }
            }
        }
    }

    /// The versions that these bytes are.
    ///
    /// # Errors
    /// A cluster holds what it must not, in words.
    pub fn judge(&self, bytes: &[u8]) -> Result<Vec<u64>, String> {
        if bytes.len() != self.clusters.len() * self.cluster_size {
            return Err(format!("{} bytes are not {} clusters", bytes.len(), self.clusters.len()));
        }
        let found = bytes.chunks(self.cluster_size).zip(&self.clusters).enumerate();
        found.map(|(index, (bytes, cluster))| self.judge_cluster(index, bytes, cluster)).collect()
    }

    fn judge_cluster(&self, index: usize, bytes: &[u8], cluster: &Cluster) -> Result<u64, String> {
        let mut possible = std::iter::once(&cluster.durable).chain(&cluster.sent);
        if let Some(version) = possible.find(|version| content(**version, self.cluster_size) == bytes) {
            return Ok(*version);
        }
        let first = u64::from_be_bytes(bytes[..8].try_into().unwrap_or_default());
        Err(format!(
            "cluster {index} begins with {first}; version {} is durable, {:?} were sent",
            cluster.durable, cluster.sent
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_flushed_must_be_there_and_nothing_else_than_what_was_sent() {
        let (old, new, other) = (content(3, 4096), content(7, 4096), content(8, 4096));
        let mut disk = Disk::new(&[3], 4096);
        disk.hear(Line::Begin { cluster: 0, version: 7 });
        assert_eq!((disk.judge(&old), disk.judge(&new)), (Ok(vec![3]), Ok(vec![7])));
        assert!(disk.judge(&other).is_err());
        disk.hear(Line::FlushBegins { number: 1 });
        disk.hear(Line::Done { cluster: 0, version: 7 });
        disk.hear(Line::Flushed { number: 1 });
        assert_eq!(disk.judge(&old), Ok(vec![3]), "it was not done when the flush began");
        disk.hear(Line::FlushBegins { number: 2 });
        disk.hear(Line::Begin { cluster: 0, version: 8 });
        disk.hear(Line::Flushed { number: 2 });
        assert!(disk.judge(&old).is_err());
        assert_eq!((disk.judge(&new), disk.judge(&other)), (Ok(vec![7]), Ok(vec![8])));
    }

    #[test]
    fn lines_are_what_they_were() {
        for line in [Line::Begin { cluster: 5, version: 9 }, Line::Flushed { number: 2 }, Line::FlushFailed] {
            assert_eq!(Line::parse(&line.text()), Some(line));
        }
        assert_eq!(Line::parse("begin 5 9"), None, "it was cut short");
    }
}
