//! A lock service outside of the database. It has a file for each lease, with a number that grows with every grant. Its
//! files outlive every server of the run, and frozen holders are silent.

use super::record::{TTL_MS, now_us};
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

/// The latest grant of a lease.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Grant {
    number: i64,
    /// The worker and its incarnation.
    holder: (u32, u32),
    /// The end of the grant, in microseconds of [`now_us`].
    until: i64,
}

/// The service as used by a worker: a directory of files.
pub struct LockFiles {
    dir: PathBuf,
    /// The requesting holder.
    holder: (u32, u32),
}

impl LockFiles {
    /// The lock service in this directory of the run.
    pub fn new(dir: &Path, worker: u32, incarnation: u32) -> LockFiles {
        LockFiles { dir: dir.to_owned(), holder: (worker, incarnation) }
    }

    /// Grants the lease for a while, or extends the grant. Returns its number, or `None` if another holder has the
    /// lease.
    pub fn grant(&self, lease: i32) -> Result<Option<i64>> {
        let mine = |number| Grant { number, holder: self.holder, until: now_us() + TTL_MS * 1000 };
        self.change(lease, |latest| {
            let next = match latest {
                // Some numbers begin at one, and others far beyond the database's own sequence.
                None => mine(if lease % 2 == 0 { 1 } else { 1_763_900_000_000_000 }),
                Some(grant) if grant.until <= now_us() => mine(grant.number + 1),
                Some(grant) if grant.holder == self.holder => mine(grant.number),
                Some(_) => return (None, None),
            };
            let number = next.number;
            (Some(next), Some(number))
        })
    }

    /// Releases the lease, if the caller holds it: the next grant has another number.
    pub fn release(&self, lease: i32) -> Result<()> {
        self.change(lease, |latest| {
            let own = latest.filter(|grant| grant.holder == self.holder);
            (own.map(|grant| Grant { until: 0, ..grant }), ())
        })
    }

    /// Changes the state of a lease under a lock.
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

/// Writes the text at once, padded to a constant length, so that a killed worker leaves either the old or the new text.
fn replace(file: &mut File, text: &str) -> Result<()> {
    file.rewind()?;
    // The blanks after the text are ignored.
    file.write_all(format!("{text:<100}").as_bytes())?;
    Ok(())
}
