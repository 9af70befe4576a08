//! The calls that workers may make in the edition under test. There is no list: the server is asked.

use crate::client::Session;
use crate::edition::is_lite;
use anyhow::Result;
use serde::{Deserialize, Serialize};

/// The available calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Surface {
    /// Shared grants, and slots.
    pub multi_holder: bool,
    /// Calls on several leases.
    pub several: bool,
    /// Session leases.
    pub sessions: bool,
    /// Adopted leases.
    pub adoption: bool,
}

impl Surface {
    const WHOLE: Surface =
        Surface { multi_holder: true, several: true, sessions: true, adoption: true };

    /// Asks the server. For the extension all calls are assumed, so that none is skipped by mistake.
    pub fn of(session: &mut Session) -> Result<Surface> {
        if !is_lite() {
            return Ok(Surface::WHOLE);
        }
        let mut has = |call: &str| -> Result<bool> {
            match session.try_rows(&format!("BEGIN; SELECT {call}")) {
                Err(fault) if fault.sqlstate == "0A000" => {
                    session.run("ROLLBACK")?;
                    Ok(false)
                }
                Err(fault) => Err(fault.into()),
                Ok(_) => session.run("ROLLBACK").map(|()| true),
            }
        };
        Ok(Surface {
            multi_holder: has("lease_acquire('surface', shared => true)")?
                && has("lease_acquire('surface', slots => 2)")?,
            several: has("lease_acquire_all('{surface,below}')")?,
            sessions: has("lease_acquire('surface', session => true)")?,
            adoption: has("lease_adopt('surface', 1)")?,
        })
    }

    /// The missing calls, in words.
    pub fn left_out(&self) -> Vec<&'static str> {
        [
            (self.multi_holder, "shared grants and slots"),
            (self.several, "several leases at once"),
            (self.sessions, "grants that end with their session"),
            (self.adoption, "adoptions"),
        ]
        .into_iter()
        .filter_map(|(is_there, what)| (!is_there).then_some(what))
        .collect()
    }
}
