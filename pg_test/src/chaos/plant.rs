//! Known bugs that can be built into the extension, to show that a run catches them.

use super::nemesis::{Fault, Weights, ALL};
use super::{rage, Summary};
use crate::extension::{self, Extension};
use crate::prefix::Prefix;
use crate::rundir::RunDir;
use anyhow::{bail, Result};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// For how long a run goes on before it is judged.
const ROUND: Duration = Duration::from_secs(15);

/// A bug, and what brings it to light soonest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Plant {
    /// The token is drawn before the lease is locked
    TokenBeforeLock,
    /// The time is that of the transaction's start
    Now,
    /// A server that starts draws on where the log ends
    NoStartMove,
    /// A promoted standby draws on where it stood
    NoJump,
    /// A guard takes no lock
    NoGuardLock,
    /// Rows of the state are written past the indexes and row triggers of their table
    DirectWrites,
}

impl Plant {
    /// As the extension's build knows it (`--cfg planted="<name>"`).
    fn name(self) -> &'static str {
        match self {
            Plant::TokenBeforeLock => "token-before-lock",
            Plant::Now => "now",
            Plant::NoStartMove => "no-start-move",
            Plant::NoJump => "no-jump",
            Plant::NoGuardLock => "no-guard-lock",
            Plant::DirectWrites => "direct-writes",
        }
    }

    /// The faults that it takes.
    pub(super) fn weights(self) -> Weights {
        match self {
            Plant::TokenBeforeLock => &[(Fault::FreezeBackend, 1)],
            Plant::Now => ALL,
            Plant::NoStartMove => &[(Fault::KillServer, 1)],
            Plant::NoJump => &[(Fault::FailOver, 1)],
            Plant::NoGuardLock => &[(Fault::FreezeWorker, 1), (Fault::Revoke, 3)],
            Plant::DirectWrites => &[(Fault::FreezeWorker, 1)],
        }
    }

    /// What is said of the promises that it breaks.
    fn shows_as(self) -> &'static [&'static str] {
        match self {
            Plant::TokenBeforeLock => &["came Grant"],
            Plant::Now => &["a grant lasted"],
            Plant::NoStartMove | Plant::NoJump => &["was seen twice", "had been seen"],
            Plant::NoGuardLock => &["replaced grant", "too many holders", "others had it"],
            // The last is the crash of an index's expression that has nowhere to be evaluated.
            Plant::DirectWrites => &["missed writes", "others had it", "by signal 11"],
        }
    }

    fn is_caught(self, violations: &[String]) -> bool {
        let shows =
            |violation: &String| self.shows_as().iter().any(|said| violation.contains(said));
        violations.iter().any(shows)
    }

    /// Whether maintenance brings it to light.
    pub(super) fn is_about_maintenance(self) -> bool {
        self == Plant::DirectWrites
    }

    /// How many leases there are to be fought for.
    pub(super) fn leases(self) -> i32 {
        match self {
            Plant::TokenBeforeLock | Plant::NoGuardLock => 1,
            _ => 3,
        }
    }
}

/// A PostgreSQL of its own with the extension that has the bug. `program` is the lab's binary.
pub fn planted(program: &Path, plant: Plant) -> Result<Arc<Prefix>> {
    let pg_config = extension::default_pg_config();
    let extension = Extension::build_planted(&pg_config, plant.name())?;
    let rundir = Arc::new(RunDir::create(program)?);
    let prefix = Arc::new(Prefix::copy(rundir, &pg_config)?);
    prefix.install(&extension)?;
    Ok(prefix)
}

/// Runs again and again with that extension, until the bug is seen to break a promise; returns what shows it.
/// That no round does within `limit` is an error.
pub fn catch(prefix: &Arc<Prefix>, plant: Plant, limit: Duration, seed: u64) -> Result<Summary> {
    let start = Instant::now();
    for round in 0.. {
        let summary = rage(prefix, ROUND, seed + round, Some(plant))?;
        let seconds = start.elapsed().as_secs();
        if plant.is_caught(summary.violations()) {
            eprintln!("{plant:?}: caught in round {} after {seconds} s", round + 1);
            return Ok(summary);
        }
        if start.elapsed() >= limit {
            bail!("the planted bug was not caught within {seconds} s:\n{summary}");
        }
    }
    unreachable!("there is always another round")
}
