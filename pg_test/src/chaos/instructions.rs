//! Instructions for workers: a small file that they read before each transaction.

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

/// The leases that are fought for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leases {
    /// How many exclusive ones there are.
    pub exclusive: i32,
    /// Whether there are leases that several may hold at once.
    pub multi_holder: bool,
    /// Whether two are acquired at once.
    pub several: bool,
    /// Whether grants end with their session.
    pub sessions: bool,
    /// How many there are that a lock service grants.
    pub adopted: usize,
    /// Whether it is mostly these that are fought for.
    pub mostly_adopted: bool,
    /// How many transactions in a hundred are about rows that are leases.
    pub row_share: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instructions {
    /// Where the primary is.
    pub port: u16,
    /// How many failovers there were.
    pub era: u32,
    /// Which leases there are.
    pub leases: Leases,
    /// The workers' task.
    pub activity: Activity,
}

impl Instructions {
    /// Replaces the file at once, so that no worker reads half of it.
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
