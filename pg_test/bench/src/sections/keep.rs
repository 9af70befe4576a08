//! The heartbeat of a process with many leases: one call for all of them, compared with single renewals in one
//! statement.

use super::capacity::work_of;
use crate::race::in_turns;
use crate::report::{Section, row};
use crate::spread::Spread;
use crate::workbench::Workbench;
use anyhow::{Result, ensure};
use pg_test::Session;
use std::time::Instant;

const LEASES: i64 = 1_000;

/// The statements, given names and tokens. Both return the number of renewals.
const CALLS: [(&str, &str); 2] = [
    ("lease_keep", "SELECT count(renewed) FROM lease_keep($1, $2)"),
    (
        "unnest and lease_renew",
        "SELECT count(lease_renew(n, t)) FROM unnest($1::text[], $2::bigint[]) AS x (n, t)",
    ),
];

pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new(
        "Keeping a thousand leases",
        "A heartbeat of one process, in one statement and one commit, from a client with a prepared statement.",
    );
    let database = bench.database()?;
    let (mut session, mut admin) = (database.connect()?, database.connect()?);
    admin.run("ALTER TABLE fence.lease SET (autovacuum_enabled = off)")?;
    let names: Vec<String> = (1..=LEASES).map(|n| format!("lease {n}")).collect();
    let tokens: Vec<i64> = session
        .query(
            "SELECT lease_acquire(name, ttl => '1 day') FROM unnest($1::text[]) AS name",
            &[&names],
        )?
        .iter()
        .map(|row| row.get(0))
        .collect();
    let calls = CALLS.map(|(_, sql)| session.prepare(sql));
    let calls = calls.into_iter().collect::<Result<Vec<_>, _>>()?;
    let turns = bench.options.rounds() * bench.options.pick(1, 3);
    bench.progress(&format!("keep: {LEASES} leases, {turns} times each"));
    let written = "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8";
    let taken = in_turns(CALLS.len(), (2, turns), |index| {
        let (before, flushed): (f64, _) = (admin.one(written, &[])?, flushes(&mut session)?);
        let (worked, start) = (work_of(session.pid())?, Instant::now());
        let kept: i64 = session.query_one(&calls[index], &[&names, &tokens])?.get(0);
        let ms = start.elapsed().as_secs_f64() * 1e3;
        let cpu_ms = (work_of(session.pid())? - worked) / 1e6;
        ensure!(kept == LEASES, "{kept} were kept");
        let wal_kb = (admin.one::<f64>(written, &[])? - before) / 1e3;
        Ok([ms, cpu_ms, wal_kb, flushes(&mut session)? - flushed])
    })?;
    let head = ["", "ms", "the server's CPU, ms", "WAL, kB", "flushes"];
    let rows = CALLS.iter().zip(&taken).map(|((name, _), [ms, cpu_ms, wal_kb, flushes])| {
        row![*name, (ms, 2), (cpu_ms, 2), (wal_kb, 0), (flushes, 1)]
    });
    section.table(format!("a heartbeat of {LEASES} leases"), &head, rows);
    for (what, place) in [("CPU", 1), ("WAL", 2)] {
        let ratio = Spread::of_ratios(&taken[0][place], &taken[1][place]);
        section.at_most(format!("{what} over a renewal each"), ratio, 1.0);
    }
    let flushes = Spread::of(&taken[0][3]);
    if flushes.median.is_finite() {
        section.at_most("flushes of a call", flushes, 1.0);
    }
    Ok(section)
}

/// The number of WAL flushes, in versions that report it at once (up to 17).
fn flushes(session: &mut Session) -> Result<f64> {
    let version: i32 = session.one("SELECT current_setting('server_version_num')::int", &[])?;
    if version >= 180_000 {
        return Ok(f64::NAN);
    }
    session.run("SELECT pg_stat_force_next_flush()")?;
    session.one("SELECT wal_sync::float8 FROM pg_stat_wal", &[])
}
