//! A slow synchronous standby for which only maintenance waits. So what a commit of maintenance drops is in the WAL
//! before other sessions learn of it.

use super::second_database;
use crate::chaos::instructions::Instructions;
use crate::client::{Conninfo, Session};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The name of the sessions that wait for the standby.
pub const APPLICATION: &str = "maintenance";

const WAIT: &str = "application_name = 'maintenance' AND wait_event = 'SyncRep'";

/// Lets waiting commits continue after a while, until `wanted` is false. `waits` says whether one waits in the second
/// database.
pub fn answer(instructions: PathBuf, wanted: Arc<AtomicBool>, waits: Arc<AtomicBool>, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x51E9);
    std::thread::spawn(move || {
        while wanted.load(Ordering::Relaxed) {
            // Ends when the server is gone, or another one is the primary.
            if let Ok(Instructions { port, era, .. }) = Instructions::read(&instructions) {
                let is_primary = || {
                    wanted.load(Ordering::Relaxed)
                        && Instructions::read(&instructions).is_ok_and(|now| now.era == era)
                };
                let session = Session::connect(&Conninfo::new(port, "postgres").to_string());
                if let Ok(mut session) = session {
                    while is_primary() && answer_once(&mut session, &waits, &mut rng).is_ok() {}
                }
            }
            waits.store(false, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(30));
        }
    });
}

fn answer_once(
    session: &mut Session,
    waits: &AtomicBool,
    rng: &mut StdRng,
) -> super::StatementResult<()> {
    let waiting =
        session.try_rows(&format!("SELECT datname FROM pg_stat_activity WHERE {WAIT}"))?;
    if waiting.iter().any(|row| row[0].as_deref() == Some(second_database::NAME)) {
        waits.store(true, Ordering::Relaxed);
    }
    if !waiting.is_empty() {
        std::thread::sleep(Duration::from_millis(rng.random_range(1..150)));
        // The waiting transaction is committed locally, and a cancel does not undo that.
        let sql = format!("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE {WAIT}");
        session.try_rows(&sql)?;
        waits.store(false, Ordering::Relaxed);
    }
    std::thread::sleep(Duration::from_millis(10));
    Ok(())
}
