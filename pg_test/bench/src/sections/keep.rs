//! The heartbeat of a process that has many leases: one call for all of them, beside a renewal each in one statement.

use super::lite::work_of;
use crate::report::{Cell, Section, Table};
use crate::spread::Spread;
use crate::workbench::Workbench;
use anyhow::{ensure, Result};
use pg_test::Session;
use postgres::Statement;
use std::time::Instant;

const LEASES: i64 = 1_000;

/// The statements, of names and tokens. Both give back how many were renewed.
const CALLS: [(&str, &str); 2] = [
    ("lease_keep", "SELECT count(renewed) FROM lease_keep($1, $2)"),
    (
        "unnest and lease_renew",
        "SELECT count(lease_renew(n, t)) FROM unnest($1::text[], $2::bigint[]) AS x (n, t)",
    ),
];

/// The cost of one call.
#[derive(Default)]
struct Taken {
    ms: Vec<f64>,
    cpu_ms: Vec<f64>,
    wal_kb: Vec<f64>,
    flushes: Vec<f64>,
}

pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Keeping a thousand leases");
    section.note(
        "A heartbeat of one process, in one statement and one commit, from a client with a prepared statement.",
    );
    let database = bench.database()?;
    let (mut session, mut admin) = (database.connect()?, database.connect()?);
    admin.run("ALTER TABLE fence.lease SET (autovacuum_enabled = off)")?;
    let names: Vec<String> = (1..=LEASES).map(|n| format!("lease {n}")).collect();
    let tokens: Vec<i64> = session
        .query(
            "SELECT token FROM lease_acquire_any($1, $2, ttl => '1 day') ORDER BY place",
            &[&names, &(LEASES as i32)],
        )?
        .iter()
        .map(|row| row.get(0))
        .collect();
    let mut taken = CALLS.map(|(_, sql)| Ok((session.prepare(sql)?, Taken::default())));
    let turns = bench.options.rounds() * bench.options.pick(1, 3);
    bench.progress(&format!("keep: {LEASES} leases, {turns} times each"));
    for turn in 0..turns + 2 {
        for call in &mut taken {
            let (statement, taken): &mut (Statement, Taken) = match call {
                Ok(call) => call,
                Err(error) => anyhow::bail!("{error:#}"),
            };
            let mut one = Taken::default();
            once(&mut session, &mut admin, statement, (&names, &tokens), &mut one)?;
            if turn > 1 {
                taken.ms.extend(one.ms);
                taken.cpu_ms.extend(one.cpu_ms);
                taken.wal_kb.extend(one.wal_kb);
                taken.flushes.extend(one.flushes);
            }
        }
    }
    let taken = taken.into_iter().collect::<Result<Vec<_>>>()?;
    let head = ["", "ms", "the server's CPU, ms", "WAL, kB", "flushes"];
    let mut table = Table::new(format!("a heartbeat of {LEASES} leases"), &head);
    for ((name, _), (_, taken)) in CALLS.iter().zip(&taken) {
        table.rows.push(vec![
            (*name).into(),
            Cell::Spread(Spread::of(&taken.ms), 2),
            Cell::Spread(Spread::of(&taken.cpu_ms), 2),
            Cell::Spread(Spread::of(&taken.wal_kb), 0),
            Cell::Spread(Spread::of(&taken.flushes), 1),
        ]);
    }
    section.tables.push(table);
    let [(_, keep), (_, renew)] = taken.as_slice() else { return Ok(section) };
    for (what, keep, renew) in
        [("CPU", &keep.cpu_ms, &renew.cpu_ms), ("WAL", &keep.wal_kb, &renew.wal_kb)]
    {
        section.at_most(
            &format!("{what} over a renewal each: at most 1"),
            Spread::of_ratios(keep, renew),
            1.0,
        );
    }
    if !keep.flushes.is_empty() {
        section.at_most("flushes of a call: at most 1", Spread::of(&keep.flushes), 1.0);
    }
    Ok(section)
}

fn once(
    session: &mut Session,
    admin: &mut Session,
    statement: &Statement,
    (names, tokens): (&Vec<String>, &Vec<i64>),
    taken: &mut Taken,
) -> Result<()> {
    let written = "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8";
    let (before, flushed): (f64, Option<i64>) = (admin.one(written, &[])?, flushes(session)?);
    let (worked, start) = (work_of(session)?, Instant::now());
    let kept: i64 = session.query_one(statement, &[names, tokens])?.get(0);
    taken.ms.push(start.elapsed().as_secs_f64() * 1e3);
    taken.cpu_ms.push((work_of(session)? - worked) / 1e6);
    ensure!(kept == LEASES, "{kept} were kept");
    taken.wal_kb.push((admin.one::<f64>(written, &[])? - before) / 1e3);
    if let (Some(before), Some(after)) = (flushed, flushes(session)?) {
        taken.flushes.push((after - before) as f64);
    }
    Ok(())
}

/// How often the server has flushed its log, where it tells of that at once (to 17).
fn flushes(session: &mut Session) -> Result<Option<i64>> {
    let version: i32 = session.one("SELECT current_setting('server_version_num')::int", &[])?;
    if version >= 180_000 {
        return Ok(None);
    }
    session.run("SELECT pg_stat_force_next_flush()")?;
    Ok(Some(session.one("SELECT wal_sync FROM pg_stat_wal", &[])?))
}
