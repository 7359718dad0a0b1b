//! Differences of two disks by the hashes of their clusters: texts of which nothing else need be read.

use std::io::BufRead;

/// The longest line that such a text has, in bytes.
const LONGEST_LINE: u64 = 4096;

/// A range of a disk that differs from another disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangedRange {
    /// Offset in bytes.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// A run of clusters of which a text says the same.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    first: u64,
    count: u64,
    /// The hash; none for zeroes.
    hash: Option<[u8; 32]>,
}

/// Reads the runs of a text, from the first cluster to the last.
struct Runs<R> {
    text: R,
    size: u64,
    cluster: u64,
    next: u64,
    ahead: Option<Run>,
}

fn bad<T>() -> Result<T, String> {
    Err("the hashes of a layer can't be read: they are not what this program wrote".to_owned())
}

impl<R: BufRead> Runs<R> {
    fn begin(mut text: R) -> Result<Self, String> {
        let mut read = |word: &str| -> Result<String, String> {
            let line = line_of(&mut text)?.unwrap_or_default();
            line.strip_prefix(word).map(|rest| rest.trim().to_owned()).map_or_else(bad, Ok)
        };
        if read("zebu-manifest ")? != "2" {
            return bad();
        }
        let size: u64 = read("virtual-size ")?.parse().or_else(|_| bad())?;
        let cluster: u64 = read("cluster-size ")?.parse().or_else(|_| bad())?;
        if !cluster.is_power_of_two() {
            return bad();
        }
        Ok(Self { text, size, cluster, next: 0, ahead: None })
    }

    fn clusters(&self) -> u64 {
        self.size.div_ceil(self.cluster)
    }

    /// The run at the next cluster; none at the end of the disk.
    fn run(&mut self) -> Result<Option<Run>, String> {
        while self.ahead.is_none() && self.next < self.clusters() {
            let Some(line) = line_of(&mut self.text)? else { return bad() };
            let mut words = line.trim().split(' ');
            let number = |word: Option<&str>| word.and_then(|word| word.parse::<u64>().ok());
            let run = match words.next() {
                Some("zero") => match (number(words.next()), number(words.next())) {
                    (Some(first), Some(count @ 1..)) => Run { first, count, hash: None },
                    _ => return bad(),
                },
                Some(word) if word.bytes().all(|byte| byte.is_ascii_digit()) && !word.is_empty() => {
                    match (number(Some(word)), words.next().and_then(hash_of)) {
                        (Some(first), Some(hash)) => Run { first, count: 1, hash: Some(hash) },
                        _ => return bad(),
                    }
                }
                // Facts that are not about clusters.
                _ => continue,
            };
            if run.first != self.next
                || run.first.checked_add(run.count).is_none_or(|end| end > self.clusters())
            {
                return bad();
            }
            self.ahead = Some(run);
        }
        Ok(self.ahead.clone())
    }

    fn pass(&mut self, count: u64) {
        self.next += count;
        self.ahead = self.ahead.take().and_then(|mut run| {
            run.first += count;
            run.count = run.count.saturating_sub(count);
            (run.count > 0).then_some(run)
        });
    }
}

fn line_of(text: &mut impl BufRead) -> Result<Option<String>, String> {
    let mut line = String::new();
    let read = std::io::Read::take(text, LONGEST_LINE).read_line(&mut line);
    match read {
        Ok(0) => Ok(None),
        Ok(_) if line.ends_with('\n') => Ok(Some(line)),
        _ => bad(),
    }
}

fn hash_of(word: &str) -> Option<[u8; 32]> {
    if word.len() != 64 || !word.is_ascii() {
        return None;
    }
    let mut hash = [0; 32];
    for (at, byte) in hash.iter_mut().enumerate() {
        *byte = u8::from_str_radix(word.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(hash)
}

/// Tells of each range in which the disks of two texts of hashes differ, in order. What one disk has beyond the end of the
/// other differs.
///
/// # Errors
/// One of them can't be read, or their clusters have different sizes.
pub fn differences(
    a: impl BufRead,
    b: impl BufRead,
    mut tell: impl FnMut(ChangedRange),
) -> Result<(), String> {
    let (mut a, mut b) = (Runs::begin(a)?, Runs::begin(b)?);
    if a.cluster != b.cluster {
        return Err(format!(
            "the clusters of one have {} bytes, those of the other {}",
            a.cluster, b.cluster
        ));
    }
    let (cluster, end) = (a.cluster, a.size.max(b.size));
    let (mut at, mut open): (u64, Option<u64>) = (0, None);
    loop {
        let (count, differs) = match (a.run()?, b.run()?) {
            (None, None) => break,
            (Some(one), Some(other)) => (one.count.min(other.count), one.hash != other.hash),
            (Some(run), None) | (None, Some(run)) => (run.count, true),
        };
        if differs {
            open.get_or_insert(at);
        } else if let Some(start) = open.take() {
            tell(ChangedRange { offset: start * cluster, length: (at - start) * cluster });
        }
        a.pass(count.min(a.clusters().saturating_sub(a.next)));
        b.pass(count.min(b.clusters().saturating_sub(b.next)));
        at += count;
    }
    let tail = a.size.min(b.size) / cluster;
    if let Some(start) = open {
        tell(ChangedRange { offset: start * cluster, length: end - start * cluster });
    } else if a.size != b.size && tail < at {
        tell(ChangedRange { offset: tail * cluster, length: end - tail * cluster });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(size: u64, lines: &[(&str, u64, u64)]) -> String {
        let mut text = format!("zebu-manifest 2\nvirtual-size {size}\ncluster-size 512\nsource a b -\n");
        for (hash, first, count) in lines {
            match *hash {
                "zero" => text += &format!("zero {first} {count}\n"),
                digit => text += &format!("{first} {}\n", digit.repeat(64)),
            }
        }
        text + "disk 00\nend 00\n"
    }

    fn changed(a: &str, b: &str) -> Result<Vec<(u64, u64)>, String> {
        let mut all = Vec::new();
        differences(a.as_bytes(), b.as_bytes(), |range| all.push((range.offset, range.length)))?;
        Ok(all)
    }

    #[test]
    fn ranges_that_differ_are_told() {
        let a = text(2600, &[("a", 0, 1), ("zero", 1, 4), ("b", 5, 1)]);
        assert_eq!(changed(&a, &a), Ok(vec![]));
        let b = text(2600, &[("a", 0, 1), ("zero", 1, 1), ("c", 2, 1), ("zero", 3, 3)]);
        assert_eq!(changed(&a, &b), Ok(vec![(1024, 512), (2560, 40)]));
        let longer = text(4096, &[("a", 0, 1), ("zero", 1, 4), ("b", 5, 1), ("zero", 6, 2)]);
        assert_eq!(changed(&a, &longer), Ok(vec![(3072, 1024)]));
        assert_eq!(changed(&longer, &a), Ok(vec![(3072, 1024)]));
    }

    #[test]
    fn texts_of_strangers_are_refused() {
        let a = text(2600, &[("a", 0, 1), ("zero", 1, 4), ("b", 5, 1)]);
        for (from, to) in [
            ("zebu-manifest 2", "zebu-manifest 7"),
            ("cluster-size 512", "cluster-size 0"),
            ("zero 1 4", "zero 2 4"),
            ("zero 1 4", "zero 1 18446744073709551615"),
            ("zero 1 4", "zero 1 0"),
            ("virtual-size 2600", "virtual-size 18446744073709551615"),
        ] {
            let bad = a.replace(from, to);
            assert!(changed(&bad, &a).is_err() || changed(&a, &bad).is_err(), "{to}");
        }
        assert!(changed(&format!("zebu-manifest {}", "2".repeat(10_000)), &a).is_err());
        for len in 0..a.len() - 20 {
            assert!(changed(&a[..len], &a).is_err(), "{len}");
        }
    }
}
