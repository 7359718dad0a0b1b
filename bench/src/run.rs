//! The runner: sides that take turns.

use crate::Outcome;
use crate::metric::{Metric, Sample};
use crate::process::Usage;
use crate::record::{Failed, Measured, Row};

/// Anything that can be run once and measured.
pub(crate) struct Side<'a> {
    /// Its name in tables: the program, and how it is set.
    pub(crate) who: String,
    pub(crate) run: Box<dyn FnMut() -> Outcome<Sample> + 'a>,
}

impl<'a> Side<'a> {
    pub(crate) fn new(who: impl Into<String>, run: impl FnMut() -> Outcome<Sample> + 'a) -> Self {
        Self { who: who.into(), run: Box::new(run) }
    }
}

/// How often all sides run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rounds {
    pub(crate) measured: usize,
    pub(crate) warm_up: usize,
}

/// Runs all sides in turn, each once a round. Which one goes first changes from round to round, so that what the first
/// leaves behind (caches, a busy disk) hits all alike. A side that fails does not run again, and the row says why.
pub(crate) fn alternate(name: &str, rounds: Rounds, mut sides: Vec<Side<'_>>) -> Row {
    let mut measured: Vec<Measured> =
        sides.iter().map(|side| Measured { who: side.who.clone(), figures: Vec::new() }).collect();
    let mut failures: Vec<Option<String>> = vec![None; sides.len()];
    for round in 0..rounds.warm_up + rounds.measured {
        let mut order: Vec<usize> = (0..sides.len()).collect();
        if round % 2 != 0 {
            order.reverse();
        }
        for place in order {
            if failures[place].is_some() {
                continue;
            }
            match (sides[place].run)() {
                Ok(sample) if round >= rounds.warm_up => measured[place].add(&sample),
                Ok(_) => {}
                Err(why) => failures[place] = Some(why),
            }
        }
    }
    let (mut kept, mut failed) = (Vec::new(), Vec::new());
    for (measured, failure) in measured.into_iter().zip(failures) {
        match failure {
            Some(why) => failed.push(Failed { who: measured.who, why }),
            None => kept.push(measured),
        }
    }
    Row { row: name.to_owned(), sides: kept, failed }
}

/// Time, CPU and memory of a finished command.
pub(crate) fn sample(usage: &Usage) -> Sample {
    vec![
        (Metric::WallSeconds, usage.wall.as_secs_f64()),
        (Metric::CpuSeconds, usage.cpu.as_secs_f64()),
        (Metric::MaxRssMib, usage.max_rss as f64 / 1048576.0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn sides_take_turns_and_warm_up_does_not_count() {
        let order = RefCell::new(String::new());
        let side = |who: &str| {
            let (order, name) = (&order, who.to_owned());
            Side::new(who, move || {
                order.borrow_mut().push_str(&name);
                Ok(vec![(Metric::WallSeconds, order.borrow().len() as f64)])
            })
        };
        let rounds = Rounds { measured: 2, warm_up: 1 };
        let row = alternate("t", rounds, vec![side("a"), side("b"), side("c")]);
        assert_eq!(*order.borrow(), "abccbaabc");
        assert_eq!(row.sides[0].figures, [(Metric::WallSeconds, vec![6.0, 7.0])]);
        assert_eq!(row.sides[2].figures, [(Metric::WallSeconds, vec![4.0, 9.0])]);
    }

    #[test]
    fn a_side_that_fails_does_not_take_the_others_with_it() {
        let fine = |who: &str| Side::new(who, || Ok(vec![(Metric::WallSeconds, 1.0)]));
        let sides = vec![fine("a"), Side::new("b", || Err("broken".into())), fine("c")];
        let row = alternate("t", Rounds { measured: 3, warm_up: 0 }, sides);
        assert_eq!(row.sides.iter().map(|side| side.who.as_str()).collect::<Vec<_>>(), ["a", "c"]);
        assert_eq!((row.failed[0].who.as_str(), row.failed[0].why.as_str()), ("b", "broken"));
        assert_eq!(row.sides[1].figures[0].1, [1.0; 3]);
    }
}
