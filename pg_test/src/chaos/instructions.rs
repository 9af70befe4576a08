//! What workers are told: a small file that they read before each transaction.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;

/// What to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Activity {
    /// Everything.
    Work,
    /// Only draw tokens, without waiting for the disk.
    Lazy,
    /// Stop.
    Stop,
}

/// The file's contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instructions {
    /// Where the primary is.
    pub port: u16,
    /// How many failovers there were.
    pub era: u32,
    /// How many exclusive leases there are.
    pub leases: i32,
    /// Whether there are leases that several may hold at once.
    pub multi_holder: bool,
    /// What to do.
    pub activity: Activity,
}

impl Instructions {
    /// Gives them out.
    pub fn write(&self, path: &Path) -> Result<()> {
        let fresh = path.with_extension("new");
        fs::write(&fresh, serde_json::to_string(self)?)?;
        fs::rename(&fresh, path)?;
        Ok(())
    }

    /// Takes them.
    pub fn read(path: &Path) -> Result<Instructions> {
        Ok(serde_json::from_str(&fs::read_to_string(path)?)?)
    }
}
