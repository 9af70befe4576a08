//! The cost of the first call in a new connection beside later ones, and the memory that stays in use.

use crate::peers::plpgsql;
use crate::plot::{Better, Plot};
use crate::report::{Cell, Section, Table};
use crate::sections::fence::PLPGSQL;
use crate::spread::Spread;
use crate::workbench::Workbench;
use anyhow::{ensure, Context, Result};
use pg_test::Session;
use std::time::Instant;

/// Calls after the first.
const LATER: usize = 12;

const LEASE: &str = "pg_fence, lease_acquire";
const LEASE_PLPGSQL: &str = "plpgsql lease: acquire";
const UPDATE: &str = "pg_fence, fenced update";
const UPDATE_PLPGSQL: &str = "plpgsql trigger: update";
const NOTHING: &str = "SELECT 1";

/// A name and the statement; `#` is the number of the call, of a lease or a row that is free.
const CALLS: &[(&str, &str)] = &[
    (NOTHING, "SELECT 1"),
    ("plain table: update", "UPDATE startup_plain SET v = v + 1, fence = TOKEN WHERE id = #"),
    (LEASE_PLPGSQL, "SELECT plpgsql_acquire('startup#', 'bench')"),
    (UPDATE_PLPGSQL, "UPDATE startup_plpgsql SET v = v + 1, fence = fence + 1 WHERE id = #"),
    ("pg_fence, lease_check", "SELECT lease_check('startup#', 1)"),
    (LEASE, "SELECT lease_acquire('startup#', 'bench')"),
    (UPDATE, "UPDATE startup_unbound SET v = v + 1, fence = TOKEN WHERE id = #"),
    ("pg_fence, bound update", "UPDATE startup_bound SET v = v + 1, fence = TOKEN WHERE id = #"),
];

/// The figures of one connection.
#[derive(Default)]
struct Seen {
    first_us: Vec<f64>,
    later_us: Vec<f64>,
    private_kb: Vec<f64>,
}

/// New connections, each for one kind of call.
pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Start-up and memory");
    section.note(format!(
        "Each figure is of connections that do nothing else: one call and {LATER} more, as simple queries, with \
         synchronous_commit = off so that the disk does not hide the rest. Memory is what the backend has more \
         of private dirty pages than right after SELECT 1, by /proc/PID/smaps_rollup."
    ));
    prepare(bench)?;
    let token: i64 =
        bench.connect()?.one("SELECT lease_acquire('startup', ttl => '1 day')", &[])?;
    let mut seen: Vec<Seen> = CALLS.iter().map(|_| Seen::default()).collect();
    let rounds = bench.options.pick(6, 80);
    bench.progress(&format!("startup: {rounds} connections for each call"));
    let mut memory = true;
    for round in 0..rounds {
        for ((_, sql), seen) in CALLS.iter().zip(&mut seen) {
            let statement = |number: usize| {
                sql.replace('#', &number.to_string()).replace("TOKEN", &token.to_string())
            };
            let mut session = bench.conninfo().set("synchronous_commit", "off").connect()?;
            let mut call = |number: usize, session: &mut Session| -> Result<f64> {
                let statement = statement(number);
                let start = Instant::now();
                let rows = session.rows(&statement)?;
                let spent = start.elapsed().as_secs_f64() * 1e6;
                ensure!(
                    !rows.iter().any(|row| row[0].is_none()),
                    "it was not granted: {statement}"
                );
                Ok(spent)
            };
            // Every third connection is for memory alone: to look takes the kernel's time.
            if memory && round % 3 == 2 {
                match watched(&mut session, &mut call) {
                    Ok(kb) => seen.private_kb.push(kb),
                    Err(why) => {
                        bench.skip("memory", &why);
                        memory = false;
                    }
                }
            } else {
                seen.first_us.push(call(0, &mut session)?);
                let later = (1..=LATER).map(|number| call(number, &mut session));
                seen.later_us.push(Spread::of(&later.collect::<Result<Vec<_>>>()?).median);
            }
            drop(session);
            if sql.contains("acquire") {
                let mut session = bench.connect()?;
                session.run("SELECT lease_revoke('startup' || i) FROM generate_series(0, 99) i")?;
                session.run(
                    "UPDATE plpgsql_lease SET expires_at = '-infinity' WHERE name LIKE 'startup%'",
                )?;
            }
        }
    }
    times(&mut section, &seen);
    if memory {
        rooms(&mut section, &seen);
    }
    Ok(section)
}

fn prepare(bench: &Workbench) -> Result<()> {
    plpgsql::prepare(bench)?;
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
    // The rows of the leases are there beforehand, so that all calls update.
    session.run(
        "SELECT lease_acquire('startup' || i, ttl => '1 us'), plpgsql_acquire('startup' || i, '') FROM generate_series(0, 99) i;
         UPDATE plpgsql_lease SET expires_at = '-infinity' WHERE name LIKE 'startup%'",
    )?;
    for table in ["fence.lease", "plpgsql_lease"] {
        session.run(&format!("VACUUM ANALYZE {table}"))?;
    }
    Ok(())
}

/// The growth of the private dirty memory by all calls, in kB.
fn watched(
    session: &mut Session,
    call: &mut impl FnMut(usize, &mut Session) -> Result<f64>,
) -> Result<f64> {
    session.run("SELECT 1")?;
    let before = memory_kb(session.pid())?;
    for number in 0..=LATER {
        call(number, session)?;
    }
    Ok(memory_kb(session.pid())? - before)
}

/// The private dirty memory of a process.
fn memory_kb(pid: i32) -> Result<f64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let line = text.lines().find(|line| line.starts_with("Private_Dirty:"));
    let kb = line.and_then(|line| line.split_whitespace().nth(1)).context("no such field")?;
    Ok(kb.parse()?)
}

fn place(name: &str) -> usize {
    CALLS.iter().position(|call| call.0 == name).unwrap_or(0)
}

fn times(section: &mut Section, seen: &[Seen]) {
    let head = ["", "first call µs", "later calls µs", "first less later µs"];
    let mut table = Table::new("the first call in a connection", &head);
    let extra = |seen: &Seen| -> Vec<f64> {
        seen.first_us.iter().zip(&seen.later_us).map(|(first, later)| first - later).collect()
    };
    let mut bars = Vec::new();
    for ((name, _), seen) in CALLS.iter().zip(seen) {
        table.rows.push(vec![
            (*name).into(),
            Cell::Spread(Spread::of(&seen.first_us), 0),
            Cell::Spread(Spread::of(&seen.later_us), 0),
            Cell::Spread(Spread::of(&extra(seen)), 0),
        ]);
        bars.push(((*name).to_owned(), Spread::of(&seen.first_us)));
    }
    section.tables.push(table);
    for (ours, theirs) in [(LEASE, LEASE_PLPGSQL), (UPDATE, UPDATE_PLPGSQL)] {
        let ratio = Spread::of_ratios(&seen[place(ours)].first_us, &seen[place(theirs)].first_us);
        section.at_most(&format!("first call, {ours} over {theirs}: at most 1"), ratio, 1.0);
    }
    section.plots.push(Plot {
        better: Better::Lower,
        file: "startup".to_owned(),
        title: "the first call in a new connection, µs".to_owned(),
        bars,
    });
}

fn rooms(section: &mut Section, seen: &[Seen]) {
    let title = format!("private memory of a backend after {} calls", LATER + 1);
    let mut table = Table::new(title, &["", "kB"]);
    for ((name, _), seen) in CALLS.iter().zip(seen) {
        let kb = Cell::Spread(Spread::of(&seen.private_kb), 0);
        table.rows.push(vec![(*name).into(), kb]);
    }
    section.tables.push(table);
    for (ours, theirs) in [(LEASE, LEASE_PLPGSQL), (UPDATE, UPDATE_PLPGSQL)] {
        let ratio =
            Spread::of_ratios(&seen[place(ours)].private_kb, &seen[place(theirs)].private_kb);
        section.at_most(&format!("private memory, {ours} over {theirs}: at most 1"), ratio, 1.0);
    }
}
