//! Instructions for workers, in a small file that they read before each transaction.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// The workers' task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activity {
    /// Acquire, renew, release and write, at random.
    Work,
    /// Only draw tokens, without waiting for the disk.
    Lazy,
    Stop,
}

/// The leases for which workers compete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leases {
    /// The number of exclusive leases.
    pub exclusive: i32,
    /// True if there are leases with several holders.
    pub multi_holder: bool,
    /// True if two leases are acquired at once.
    pub several: bool,
    /// True if there are session leases.
    pub sessions: bool,
    /// The number of leases granted by a lock service.
    pub adopted: usize,
    /// True if workers compete mostly for those.
    pub mostly_adopted: bool,
    /// The percentage of transactions on row leases.
    pub row_share: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instructions {
    /// The port of the primary.
    pub port: u16,
    /// The number of failovers so far.
    pub era: u32,
    /// The leases that exist.
    pub leases: Leases,
    /// The workers' task.
    pub activity: Activity,
}

impl Instructions {
    /// Replaces the file atomically, so that no worker reads half of it.
    pub fn write(&self, path: &Path) -> Result<()> {
        let fresh = path.with_extension("new");
        fs::write(&fresh, serde_json::to_string(self)?)?;
        fs::rename(&fresh, path)?;
        Ok(())
    }

    pub fn read(path: &Path) -> Result<Instructions> {
        Ok(serde_json::from_str(&fs::read_to_string(path)?)?)
    }
}
