//! A second database of the same server, for DDL that loses leases, which the checker could not tell from a violation.
//! Here nothing is checked except that servers and standbys survive.

use super::StatementResult;
use crate::chaos::instructions::Instructions;
use crate::client::{Conninfo, Session};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

pub const NAME: &str = "second";
pub const CREATE: &str = "CREATE DATABASE second";

/// One session renews a lease, until `wanted` is false. Other sessions read it when the maintenance waits in its commit
/// (`waits`), and once afterwards. Further reads would prune the page before the reads that matter.
pub fn work(instructions: &Path, wanted: &Arc<AtomicBool>, waits: &Arc<AtomicBool>) {
    let token = Arc::new(AtomicI64::new(1));
    for number in 0..4 {
        let (instructions, token) = (instructions.to_owned(), token.clone());
        let (wanted, waits) = (wanted.clone(), waits.clone());
        std::thread::spawn(move || {
            while wanted.load(Ordering::Relaxed) {
                // The server may be down, or the extension or the lease may be gone.
                if let Ok(Instructions { port, .. }) = Instructions::read(&instructions) {
                    let _ = match number {
                        0 => renew(port, &wanted, &token),
                        _ => look(port, number, &wanted, &waits, &token),
                    };
                }
                std::thread::sleep(Duration::from_millis(30));
            }
        });
    }
}

fn connect(port: u16) -> StatementResult<Session> {
    let conninfo = Conninfo::new(port, NAME).application("second").set("statement_timeout", "2s");
    Session::connect(&conninfo.to_string())
}

fn renew(port: u16, wanted: &AtomicBool, token: &AtomicI64) -> StatementResult<()> {
    let mut session = connect(port)?;
    while wanted.load(Ordering::Relaxed) {
        let current = token.load(Ordering::Relaxed);
        if session.try_rows(&format!("SELECT lease_renew('job', {current})"))? == [[None]] {
            token.store(acquire(&mut session)?, Ordering::Relaxed);
        }
        std::thread::sleep(Duration::from_millis(40));
    }
    Ok(())
}

fn look(
    port: u16,
    number: u32,
    wanted: &AtomicBool,
    waits: &AtomicBool,
    token: &AtomicI64,
) -> StatementResult<()> {
    let mut session = connect(port)?;
    while wanted.load(Ordering::Relaxed) {
        let waiting = waits.load(Ordering::Relaxed);
        let current = token.load(Ordering::Relaxed);
        let call = match number {
            1 => "lease_acquire('job', ttl => '1 ms')".to_owned(),
            2 => format!("lease_guard('job', {current})"),
            _ => format!("lease_check('job', {current})"),
        };
        if let Err(fault) = session.try_rows(&format!("SELECT {call}"))
            && fault.is_disconnect()
        {
            return Err(fault);
        }
        while waits.load(Ordering::Relaxed) == waiting && wanted.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(())
}

/// Acquires the lease, and others to fill its page, so that each renewal leaves something to prune.
fn acquire(session: &mut Session) -> StatementResult<i64> {
    let granted = session.try_rows("SELECT lease_acquire('job', 'me', '1 h', reclaim => true)")?;
    session.try_rows(
        "SELECT lease_acquire_all(ARRAY(SELECT 'old:' || n FROM generate_series(1, 20) n), ttl => '1 ms')",
    )?;
    Ok(granted[0][0].as_deref().and_then(|text| text.parse().ok()).unwrap_or(1))
}

/// The DDL that is possible in the present state.
pub fn ddl(session: &mut Session) -> StatementResult<Vec<String>> {
    let create = "CREATE EXTENSION pg_fence";
    if session.try_rows("SELECT FROM pg_extension WHERE extname = 'pg_fence'")?.is_empty() {
        return Ok(vec![create.to_owned()]);
    }
    let drop = "DROP EXTENSION pg_fence CASCADE";
    let mut all = vec![
        drop.to_owned(),
        format!("{drop}; {create}"),
        "TRUNCATE fence.lease".to_owned(),
        "ALTER TABLE fence.lease SET TABLESPACE aside".to_owned(),
        "ALTER TABLE fence.lease SET TABLESPACE pg_default".to_owned(),
    ];
    // Logged sequences only: PostgreSQL up to 15.18 may lose the page of an unlogged one in a failover, and then fails
    // to alter it.
    let sequences = session.try_rows(
        "SELECT oid::regclass::text FROM pg_class
          WHERE relkind = 'S' AND relpersistence = 'p' AND relnamespace = 'fence'::regnamespace
          ORDER BY random() LIMIT 2",
    )?;
    let sequences = sequences.into_iter().filter_map(|mut row| row.remove(0));
    all.extend(sequences.map(|sequence| format!("ALTER SEQUENCE {sequence} INCREMENT 1")));
    Ok(all)
}
