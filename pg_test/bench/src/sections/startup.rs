//! The cost of the first call in a new connection, compared with later ones, and the memory that stays in use.

use crate::peers::sql;
use crate::plot::Better::Lower;
use crate::race::in_turns;
use crate::report::{Section, row};
use crate::sections::fence::PLPGSQL;
use crate::spread::Spread;
use crate::workbench::Workbench;
use anyhow::{Context, Result, ensure};
use pg_test::Session;
use std::time::Instant;

/// The number of calls after the first.
const LATER: usize = 12;

const LEASE: &str = "pg_fence, lease_acquire";
const LEASE_PLPGSQL: &str = "plpgsql lease: acquire";
const UPDATE: &str = "pg_fence, fenced update";
const UPDATE_PLPGSQL: &str = "plpgsql trigger: update";
/// A name and a statement; `#` is the number of the call, and so of a free lease or row.
const CALLS: &[(&str, &str)] = &[
    ("SELECT 1", "SELECT 1"),
    ("plain table: update", "UPDATE startup_plain SET v = v + 1, fence = TOKEN WHERE id = #"),
    (LEASE_PLPGSQL, "SELECT plpgsql_acquire('startup#', 'bench')"),
    (UPDATE_PLPGSQL, "UPDATE startup_plpgsql SET v = v + 1, fence = fence + 1 WHERE id = #"),
    ("pg_fence, lease_check", "SELECT lease_check('startup#', 1)"),
    (LEASE, "SELECT lease_acquire('startup#', 'bench')"),
    (UPDATE, "UPDATE startup_unbound SET v = v + 1, fence = TOKEN WHERE id = #"),
    ("pg_fence, bound update", "UPDATE startup_bound SET v = v + 1, fence = TOKEN WHERE id = #"),
];

/// Measures new connections, each with one kind of call.
pub fn measure(bench: &Workbench) -> Result<Section> {
    let note = format!(
        "Each figure is of connections that do nothing else: one call and {LATER} more, as simple queries, with \
         synchronous_commit = off so that the disk does not hide the rest. Memory is what the backend has more \
         of private dirty pages than right after SELECT 1, by /proc/PID/smaps_rollup."
    );
    let mut section = Section::new("Start-up and memory", note);
    prepare(bench)?;
    let token: i64 =
        bench.connect()?.one("SELECT lease_acquire('startup', ttl => '1 day')", &[])?;
    let rounds = bench.options.pick(2, 50);
    bench.progress(&format!("startup: {rounds} times two connections for each call"));
    let seen = in_turns(CALLS.len(), (0, rounds), |index| {
        let sql = CALLS[index].1.replace("TOKEN", &token.to_string());
        let [first, later] = times(bench, &sql)?;
        // Measuring memory costs time in the kernel, so it has a connection of its own.
        let kb = memory(bench, &sql).or_else(|why| {
            bench.skip("memory", &why);
            anyhow::Ok(f64::NAN)
        });
        Ok([first, later, kb?])
    })?;
    let extra = |first: &[f64], later: &[f64]| -> Vec<f64> {
        first.iter().zip(later).map(|(first, later)| first - later).collect()
    };
    let rows = CALLS.iter().zip(&seen).map(|((name, _), [first, later, _])| {
        row![*name, (first, 0), (later, 0), (&extra(first, later), 0)]
    });
    let head = ["", "first call µs", "later calls µs", "first less later µs"];
    section.table("the first call in a connection", &head, rows);
    let rows = CALLS.iter().zip(&seen).map(|((name, _), [.., kb])| row![*name, (kb, 0)]);
    let title = format!("private memory of a backend after {} calls", LATER + 1);
    section.table(title, &["", "kB"], rows);
    let place = |name| CALLS.iter().position(|call| call.0 == name).unwrap_or(0);
    for (what, figure) in [("first call", 0), ("private memory", 2)] {
        for (ours, theirs) in [(LEASE, LEASE_PLPGSQL), (UPDATE, UPDATE_PLPGSQL)] {
            let of = |name| &seen[place(name)][figure];
            let ratio = Spread::of_ratios(of(ours), of(theirs));
            if ratio.median.is_finite() {
                section.at_most(format!("{what}, {ours} over {theirs}"), ratio, 1.0);
            }
        }
    }
    let bars = CALLS.iter().zip(&seen).map(|((name, _), [first, ..])| (*name, Spread::of(first)));
    section.bars(Lower, "startup", "the first call in a new connection, µs", bars);
    Ok(section)
}

fn prepare(bench: &Workbench) -> Result<()> {
    sql::PLPGSQL.prepare(bench)?;
    let mut session = bench.connect()?;
    session.run(PLPGSQL)?;
    for table in ["plain", "plpgsql", "unbound", "bound"] {
        session.run(&format!(
            "CREATE TABLE startup_{table} (id bigint PRIMARY KEY, v bigint NOT NULL, fence bigint) WITH (fillfactor = 50);
             INSERT INTO startup_{table} SELECT i, 0, 0 FROM generate_series(0, 99) i"
        ))?;
    }
    session.run(
        "CREATE TRIGGER t BEFORE UPDATE ON startup_plpgsql FOR EACH ROW EXECUTE FUNCTION bench_simple();
         SELECT fence_protect('startup_unbound', mode => 'monotonic');
         SELECT fence_protect('startup_bound', lease => 'startup')",
    )?;
    // The leases' rows exist beforehand, so that all calls update.
    session.run(
        "SELECT lease_acquire('startup' || i, ttl => '1 us'), plpgsql_acquire('startup' || i, '') FROM generate_series(0, 99) i;
         UPDATE plpgsql_lease SET expires_at = '-infinity' WHERE name LIKE 'startup%'",
    )?;
    for table in ["fence.lease", "plpgsql_lease"] {
        session.run(&format!("VACUUM ANALYZE {table}"))?;
    }
    Ok(())
}

/// A new connection for nothing else.
fn connect(bench: &Workbench) -> Result<Session> {
    bench.conninfo().set("synchronous_commit", "off").connect()
}

/// Runs one call and returns its duration in microseconds.
fn call(session: &mut Session, sql: &str, number: usize) -> Result<f64> {
    let statement = sql.replace('#', &number.to_string());
    let start = Instant::now();
    let rows = session.rows(&statement)?;
    let spent = start.elapsed().as_secs_f64() * 1e6;
    let granted = !rows.iter().any(|row| row[0].is_none());
    ensure!(granted, "it was not granted: {statement}");
    Ok(spent)
}

/// The durations of the first call and of a later one.
fn times(bench: &Workbench, sql: &str) -> Result<[f64; 2]> {
    let mut session = connect(bench)?;
    let first = call(&mut session, sql, 0)?;
    let later = (1..=LATER).map(|number| call(&mut session, sql, number));
    let later = Spread::of(&later.collect::<Result<Vec<_>>>()?).median;
    free_all(bench)?;
    Ok([first, later])
}

/// The growth of the private dirty memory by all calls, in kB.
fn memory(bench: &Workbench, sql: &str) -> Result<f64> {
    let mut session = connect(bench)?;
    session.run("SELECT 1")?;
    let before = memory_kb(session.pid())?;
    (0..=LATER).try_for_each(|number| call(&mut session, sql, number).map(drop))?;
    let grown = memory_kb(session.pid())? - before;
    free_all(bench)?;
    Ok(grown)
}

/// Makes all leases free again.
fn free_all(bench: &Workbench) -> Result<()> {
    bench.connect()?.run(
        "SELECT lease_revoke('startup' || i) FROM generate_series(0, 99) i;
         UPDATE plpgsql_lease SET expires_at = '-infinity' WHERE name LIKE 'startup%'",
    )
}

/// The private dirty memory of a process, in kB.
fn memory_kb(pid: i32) -> Result<f64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = std::fs::read_to_string(&path).context("cannot read smaps_rollup")?;
    let line = text.lines().find(|line| line.starts_with("Private_Dirty:"));
    let kb = line.and_then(|line| line.split_whitespace().nth(1)).context("no such field")?;
    Ok(kb.parse()?)
}
