//! Known bugs that can be built into the extension, to show that a run catches them: patches of its sources, in `bugs`.

use super::nemesis::{ALL, Disturbance, Weights};
use super::{Summary, run_for};
use crate::edition;
use crate::environment;
use crate::install_dir::InstallDir;
use crate::source_tree::source_root;
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The length of a run before its history is checked.
const ROUND: Duration = Duration::from_secs(15);

/// A bug, and what reveals it soonest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum KnownBug {
    /// The token is drawn before the lease is locked
    TokenBeforeLock,
    /// The time is that of the transaction's start
    Now,
    /// A server that starts draws on where the log ends
    NoStartAdvance,
    /// A promoted standby draws on where it stood
    NoNewEpoch,
    /// A session keeps the epoch that it has read, whatever comes after
    OldEpoch,
    /// The version of a row that a session has once seen is taken for the present one
    UncheckedPlace,
    /// A guard takes no lock
    NoGuardLock,
    /// Relations of the state are read without their locks
    NoTableLock,
    /// A session is believed to live for ever
    SessionOutlived,
    /// An adoption does not take the lease alone
    NoAdoptLock,
    /// Each version of a row that is a lease is taken for the transaction's own
    OwnIsEverybodys,
    /// An acquire decides by what it saw before the lock (of the lite edition only)
    DecisionBeforeLock,
}

impl KnownBug {
    /// The name of the bug on the command line, and of its patch.
    pub fn name(self) -> String {
        self.to_possible_value().expect("no bug is hidden").get_name().to_owned()
    }

    /// The patch that plants the bug in the extension; `None` if it is in the lite edition only.
    pub fn patch(self) -> Option<PathBuf> {
        let patch = patches().join(format!("{}.patch", self.name()));
        (self != KnownBug::DecisionBeforeLock).then_some(patch)
    }

    /// The disturbances that reveal the bug.
    pub(super) fn weights(self) -> Weights {
        match self {
            KnownBug::TokenBeforeLock => &[(Disturbance::FreezeBackend, 1)],
            KnownBug::Now => ALL,
            KnownBug::NoStartAdvance => &[(Disturbance::KillServer, 1)],
            KnownBug::NoNewEpoch => &[(Disturbance::FailOver, 1)],
            KnownBug::OldEpoch => &[(Disturbance::NewEpoch, 1)],
            // Workers compete at once for a lease that is revoked.
            KnownBug::NoGuardLock | KnownBug::UncheckedPlace | KnownBug::DecisionBeforeLock => {
                &[(Disturbance::FreezeWorker, 1), (Disturbance::Revoke, 3)]
            }
            KnownBug::NoTableLock | KnownBug::NoAdoptLock | KnownBug::OwnIsEverybodys => {
                &[(Disturbance::FreezeWorker, 1)]
            }
            KnownBug::SessionOutlived => &[(Disturbance::Terminate, 1)],
        }
    }

    /// The checker's words for the violations that the bug causes.
    fn shows_as(self) -> &'static [&'static str] {
        match self {
            KnownBug::TokenBeforeLock => &["came Grant"],
            KnownBug::Now => &["a grant lasted"],
            KnownBug::NoStartAdvance | KnownBug::NoNewEpoch => &["was seen twice", "had been seen"],
            KnownBug::NoGuardLock | KnownBug::NoAdoptLock | KnownBug::DecisionBeforeLock => {
                &["replaced grant", "too many holders", "others had it"]
            }
            KnownBug::OldEpoch => &["that made its token invalid"],
            KnownBug::UncheckedPlace => &["accepted after", "replaced grant", "others had it"],
            KnownBug::SessionOutlived => &["after the end of its session"],
            KnownBug::OwnIsEverybodys => &["written while held by another"],
            KnownBug::NoTableLock => &["a standby died", "changes of dropped files"],
        }
    }

    fn is_caught(self, violations: &[String]) -> bool {
        let shows =
            |violation: &String| self.shows_as().iter().any(|said| violation.contains(said));
        violations.iter().any(shows)
    }

    /// Returns true if maintenance reveals the bug.
    pub(super) fn is_about_maintenance(self) -> bool {
        self == KnownBug::NoTableLock
    }

    /// Returns true if adopted leases reveal the bug.
    pub(super) fn is_about_adoption(self) -> bool {
        self == KnownBug::NoAdoptLock
    }

    /// The percentage of transactions on row leases.
    pub(super) fn row_share(self) -> u32 {
        match self {
            KnownBug::OwnIsEverybodys => 90,
            _ => 0,
        }
    }

    /// The number of leases for which workers compete.
    pub(super) fn leases(self) -> i32 {
        match self {
            KnownBug::TokenBeforeLock
            | KnownBug::NoGuardLock
            | KnownBug::UncheckedPlace
            | KnownBug::DecisionBeforeLock => 1,
            _ => 3,
        }
    }
}

/// The directory of the patches.
pub fn patches() -> PathBuf {
    source_root().join("pg_test/src/chaos/bugs")
}

/// A private PostgreSQL with the extension that has the bug. `program` is the tests' binary.
pub fn build_with(program: &Path, bug: KnownBug) -> Result<Arc<InstallDir>> {
    let patch = bug.patch().context("it is a bug of the lite edition: --edition lite")?;
    InstallDir::with_patch(program, &patch)
}

/// Plants the bug in the lite edition, for this process and its children.
pub fn plant_in_lite(bug: KnownBug) -> Result<()> {
    environment::set(edition::BUG_VARIABLE, bug.name());
    edition::lite_script().map(drop)
}

/// Runs again and again with that extension until the bug causes a violation, and returns the proof. Errors if no run
/// does so within `limit`.
pub fn catch(
    install_dir: &Arc<InstallDir>,
    bug: KnownBug,
    limit: Duration,
    seed: u64,
) -> Result<Summary> {
    let start = Instant::now();
    for round in 0.. {
        let summary = run_for(install_dir, ROUND, seed + round, Some(bug))?;
        let seconds = start.elapsed().as_secs();
        if bug.is_caught(summary.violations()) {
            eprintln!("{bug:?}: caught in round {} after {seconds} s", round + 1);
            return Ok(summary);
        }
        if start.elapsed() >= limit {
            bail!("the planted bug was not caught within {seconds} s:\n{summary}");
        }
    }
    unreachable!("there is always another round")
}
