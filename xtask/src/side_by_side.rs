//! Test programs that run beside each other.

use crate::all;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use zebu_bench::Outcome;
use zebu_bench::process::shown;

/// Programs that run at the same time. Each has threads of its own, but most tests wait for a disk or another program.
const LANES: usize = 2;

/// A program, under the name by which it is shown.
pub(crate) struct Named {
    pub(crate) name: String,
    pub(crate) command: Command,
}

/// Runs all programs, whatever becomes of the others. The output of each is printed when it has ended.
pub(crate) fn run_side_by_side(programs: Vec<Named>) -> Outcome {
    let programs: Vec<_> = programs.into_iter().map(Mutex::new).collect();
    let next = AtomicUsize::new(0);
    let lane = || {
        let taken = std::iter::from_fn(|| programs.get(next.fetch_add(1, Ordering::Relaxed)));
        taken.map(|program| run_captured(&mut program.lock().expect("is taken once"))).collect::<Vec<_>>()
    };
    let ended: Vec<Outcome> = thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES).map(|_| scope.spawn(lane)).collect();
        lanes.into_iter().flat_map(|lane| lane.join().expect("a program's failure is returned")).collect()
    });
    all(ended)
}

/// Runs a program, then prints all that it said in one piece.
fn run_captured(Named { name, command }: &mut Named) -> Outcome {
    let ended = command.output().map_err(|e| format!("cannot run {}: {e}", shown(command)))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    println!("-- {name}\n{}{}", text(&ended.stdout), text(&ended.stderr));
    if ended.status.success() { Ok(()) } else { Err(format!("{name}: {}", ended.status)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(name: &str, script: &str) -> Named {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Named { name: name.to_owned(), command }
    }

    #[test]
    fn all_programs_run_and_each_failure_is_named() {
        assert_eq!(run_side_by_side(vec![program("a", "true"), program("b", "true")]), Ok(()));
        let scripts = ["exit 3", "true", "true", "exit 4"].into_iter().zip(["a", "b", "c", "d"]);
        let error =
            run_side_by_side(scripts.map(|(script, name)| program(name, script)).collect()).unwrap_err();
        assert!(error.contains("a: exit status: 3") && error.contains("d: exit status: 4"), "{error}");
        assert_eq!(error.lines().count(), 2, "{error}");
    }

    #[test]
    fn programs_run_beside_each_other() {
        let dir = std::env::temp_dir().join(format!("zebu-side-by-side-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let meet = |own: &str, other: &str| {
            let (own, other) = (dir.join(own), dir.join(other));
            format!("touch '{}'; until [ -e '{}' ]; do sleep 0.01; done", own.display(), other.display())
        };
        let both = vec![program("a", &meet("a", "b")), program("b", &meet("b", "a"))];
        assert_eq!(run_side_by_side(both), Ok(()));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
