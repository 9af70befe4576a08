//! A lock service that is none of the database's. It has a file for each lease, with a number that grows with every grant.
//! Its memory outlives every server of the run; of its holders it hears nothing once they are frozen.

use super::record::{now_us, TTL_MS};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

/// The latest grant of a lease.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Grant {
    number: i64,
    /// The worker, and which of its incarnations.
    holder: (u32, u32),
    /// When it is over, in microseconds of [`now_us`].
    until: i64,
}

/// A service that is a directory of files, as a worker uses it.
pub struct LockFiles {
    dir: PathBuf,
    /// The holder that asks.
    holder: (u32, u32),
}

impl LockFiles {
    /// The lock service of the run in this directory.
    pub fn new(dir: &Path, worker: u32, incarnation: u32) -> LockFiles {
        LockFiles { dir: dir.to_owned(), holder: (worker, incarnation) }
    }

    /// Grants the lease for a while, or for a while longer: its number, or None where another one has it.
    pub fn grant(&self, lease: i32) -> Result<Option<i64>> {
        let mine = |number| Grant { number, holder: self.holder, until: now_us() + TTL_MS * 1000 };
        self.change(lease, |latest| {
            let next = match latest {
                // Some count from one, others are far beyond the database's own sequence.
                None => mine(if lease % 2 == 0 { 1 } else { 1_763_900_000_000_000 }),
                Some(grant) if grant.until <= now_us() => mine(grant.number + 1),
                Some(grant) if grant.holder == self.holder => mine(grant.number),
                Some(_) => return (None, None),
            };
            let number = next.number;
            (Some(next), Some(number))
        })
    }

    /// Gives it back, where the caller has it: the next grant has another number.
    pub fn release(&self, lease: i32) -> Result<()> {
        self.change(lease, |latest| {
            let own = latest.filter(|grant| grant.holder == self.holder);
            (own.map(|grant| Grant { until: 0, ..grant }), ())
        })
    }

    /// Changes what is known of a lease, one caller after the other.
    fn change<T>(
        &self,
        lease: i32,
        change: impl FnOnce(Option<Grant>) -> (Option<Grant>, T),
    ) -> Result<T> {
        let path = self.dir.join(format!("service-{lease}"));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = file.with_context(|| format!("cannot open {}", path.display()))?;
        file.lock()?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let latest = if text.is_empty() { None } else { Some(serde_json::from_str(&text)?) };
        let (next, result) = change(latest);
        if let Some(next) = next {
            replace(&mut file, &serde_json::to_string(&next)?)?;
        }
        Ok(result)
    }
}

/// In one write: a worker that is killed leaves the old text or the new one, of the same length.
fn replace(file: &mut File, text: &str) -> Result<()> {
    file.rewind()?;
    // Blanks behind it are no part of it.
    file.write_all(format!("{text:<100}").as_bytes())?;
    Ok(())
}
