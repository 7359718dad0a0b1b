//! Faults, and the operations that they happen to.

use crate::op::{OpClass, OpFilter, OpInfo};
use crate::rng::SimRng;
use std::time::Duration;

/// How much of an operation takes effect although it fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailedEffect {
    /// Nothing.
    Nothing,
    /// Some sectors, decided by the world's seed.
    Part,
    /// Everything: only the report of success is lost.
    All,
}

/// A fault of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It fails with this errno. A flush that fails guarantees nothing, nor does any later one for what it might
    /// have covered.
    Fail {
        /// errno value, such as `libc::EIO`.
        errno: i32,
        /// The part that takes effect nevertheless.
        effect: FailedEffect,
    },
    /// It takes effect in two parts at different times, as a short transfer that is continued: the first `bytes`
    /// bytes, then the rest. Reads and writes only.
    Split {
        /// Bytes of the first part.
        bytes: u64,
    },
    /// It can't take effect before so much simulated time has passed since its submission.
    Delay(Duration),
}

/// A scripted fault: of the operations that `filter` chooses, in the order of submission, the first `skip` go
/// unharmed, the next `times` meet the fault, the rest go unharmed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FaultRule {
    filter: OpFilter,
    skip: u64,
    times: u64,
    fault: Fault,
}

impl FaultRule {
    /// Every operation that `filter` chooses meets `fault`.
    pub fn new(filter: OpFilter, fault: Fault) -> Self {
        Self { filter, skip: 0, times: u64::MAX, fault }
    }

    /// Only the `n`-th one meets it, counted from 0.
    pub fn nth(mut self, n: u64) -> Self {
        self.skip = n;
        self.times = 1;
        self
    }

    /// After `skip` operations, `times` of them meet it.
    pub fn span(mut self, skip: u64, times: u64) -> Self {
        self.skip = skip;
        self.times = times;
        self
    }

    fn meet(&mut self, info: &OpInfo) -> Option<Fault> {
        if !self.filter.matches(info) || self.times == 0 {
            return None;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        self.times -= 1;
        Some(self.fault)
    }
}

/// How often random faults strike, in operations of 1000 of the kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FaultRates {
    /// Reads that fail with EIO.
    pub read_errors: u32,
    /// Writes that fail with EIO, with any effect.
    pub write_errors: u32,
    /// Writes, allocations and growths that fail with ENOSPC.
    pub no_space: u32,
    /// Flushes that fail with EIO.
    pub flush_errors: u32,
    /// Punches, zero-ranges and allocations that fail with EIO, with any effect.
    pub fallocate_errors: u32,
    /// Reads and writes in two parts.
    pub splits: u32,
    /// Operations that are delayed, by up to 10 ms.
    pub delays: u32,
}

/// The faults of a world: scripted rules, the first that applies counts, then random faults.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FaultPlan {
    rules: Vec<FaultRule>,
    rates: FaultRates,
}

impl FaultPlan {
    /// Nothing goes wrong.
    pub fn none() -> Self {
        Self::default()
    }

    /// Random faults, decided by the world's seed.
    pub fn random(rates: FaultRates) -> Self {
        Self { rules: Vec::new(), rates }
    }

    /// Adds a scripted rule after those that are there.
    pub fn with(mut self, rule: FaultRule) -> Self {
        self.rules.push(rule);
        self
    }

    pub(crate) fn push(&mut self, rule: FaultRule) {
        self.rules.push(rule);
    }

    /// Decides the fault of an operation that is being submitted.
    pub(crate) fn decide(&mut self, info: &OpInfo, rng: &mut SimRng) -> Option<Fault> {
        let mut scripted = None;
        // Every rule counts every operation, whichever of them strikes.
        for rule in &mut self.rules {
            let met = rule.meet(info);
            scripted = scripted.or(met);
        }
        scripted.or_else(|| self.rates.draw(info, rng))
    }
}

impl FaultRates {
    fn draw(&self, info: &OpInfo, rng: &mut SimRng) -> Option<Fault> {
        let mut strikes = |rate: u32| rate > 0 && rng.chance(u64::from(rate), 1000);
        let grows = matches!(
            info.class,
            OpClass::Write | OpClass::Allocate | OpClass::SetLen | OpClass::ZeroRange | OpClass::CopyRange
        );
        let failing = match info.class {
            OpClass::Read => strikes(self.read_errors),
            OpClass::Write | OpClass::CopyRange => strikes(self.write_errors),
            OpClass::Flush => strikes(self.flush_errors),
            OpClass::Punch | OpClass::ZeroRange | OpClass::Allocate => strikes(self.fallocate_errors),
            OpClass::SetLen | OpClass::ExtentAt | OpClass::CloneRange => false,
        };
        let full = grows && strikes(self.no_space);
        let split = matches!(info.class, OpClass::Read | OpClass::Write) && strikes(self.splits);
        let delayed = strikes(self.delays);
        if failing {
            let effects = [FailedEffect::Nothing, FailedEffect::Part, FailedEffect::Part, FailedEffect::All];
            return Some(Fault::Fail { errno: libc::EIO, effect: *rng.pick(&effects) });
        }
        if full {
            return Some(Fault::Fail { errno: libc::ENOSPC, effect: FailedEffect::Nothing });
        }
        if split {
            let sectors = (info.range.end - info.range.start).div_ceil(512);
            return (sectors > 1).then(|| Fault::Split { bytes: rng.between(1, sectors - 1) * 512 });
        }
        delayed.then(|| Fault::Delay(Duration::from_micros(rng.below(10_000))))
    }
}
