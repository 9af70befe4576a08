//! The cost of the lite edition, compared with hand-written SQL and with the extension in the same run.

use super::capacity::work_of;
use super::fence::{Check, PLPGSQL, UNCOUNTED, check, report_rows};
use crate::peers::sql::{OURS, PLPGSQL as BY_HAND, Sql, UPDATE_FIRST};
use crate::race::{Contender, at_once, in_turns, ratio};
use crate::report::{Section, row};
use crate::spread::Spread;
use crate::workbench::Workbench;
use anyhow::{Context, Result, ensure};
use pg_test::{Conninfo, Database, Session};
use postgres::Statement;

const LITE: &str = "pg_fence_lite";
/// The longest duration of a pair, relative to the hand-written one.
const OF_A_PAIR: f64 = 1.5;
/// The most that a bound row may add in a statement of many rows, relative to a trigger for one fixed column.
const OF_A_ROW: f64 = 12.0;
/// The most CPU time of the server for a transaction with one bound row, in microseconds.
const OF_A_TRANSACTION: f64 = 135.0;

pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new(
        "Without a library",
        "The edition in one file of SQL, in a database of its own on the same server, beside leases and a trigger written \
         by hand, and the extension.",
    );
    let database = Database::with_lite(bench.conninfo())?;
    leases(bench, &database, &mut section)?;
    work_of_pairs(bench, &database, &mut section)?;
    rows(bench, &database, &mut section)?;
    Ok(section)
}

fn leases(bench: &Workbench, database: &Database, section: &mut Section) -> Result<()> {
    let peers = [UPDATE_FIRST, BY_HAND, OURS].map(|sql| sql.prepare(bench));
    let mut peers = peers.into_iter().collect::<Result<Vec<_>>>()?;
    peers.push(Sql { name: LITE, ..OURS }.at(database.conninfo()));
    for clients in [1, 8] {
        let contenders: Vec<Contender> =
            peers.iter().map(|peer| Contender::of_pairs(&**peer, clients)).collect();
        let title = format!("acquire + release beside lite, {}", at_once(clients));
        let over = (BY_HAND.name, "over plpgsql by hand");
        let rules = bench.options.rules(clients);
        let tracks = section.race(bench, (&title, "pairs/s"), &contenders, rules, over)?;
        // These are rates, so the ratio of durations is the inverse.
        for name in [BY_HAND.name, UPDATE_FIRST.name] {
            let aim = format!("time of a pair over {name}, {}", at_once(clients));
            section.at_most(aim, ratio(&tracks, name, LITE)?, OF_A_PAIR);
        }
    }
    Ok(())
}

/// The number of pairs per turn.
const PAIRS: usize = 100;

/// The server's CPU time for a pair whose commits wait for nothing.
fn work_of_pairs(bench: &Workbench, database: &Database, section: &mut Section) -> Result<()> {
    let turns = bench.options.rounds() * bench.options.pick(2, 10);
    bench.progress(&format!("lite: the server's work for {PAIRS} pairs, {turns} times each"));
    let all = [
        (BY_HAND.name, bench.conninfo(), BY_HAND),
        (LITE, database.conninfo(), OURS),
        (OURS.name, bench.conninfo(), OURS),
    ];
    let prepared = |(name, conninfo, sql): &(&'static str, Conninfo, Sql)| -> Result<_> {
        let mut session = conninfo.clone().set("synchronous_commit", "off").connect()?;
        let (acquire, release) = (session.prepare(sql.acquire)?, session.prepare(sql.release)?);
        Ok((*name, session, acquire, release))
    };
    let mut all = all.iter().map(prepared).collect::<Result<Vec<_>>>()?;
    let micros = in_turns(all.len(), (1, turns), |index| {
        let (name, session, acquire, release) = &mut all[index];
        let start = work_of(session.pid())?;
        for pair in 0..PAIRS {
            let lease = format!("name{pair}");
            let token: Option<i64> = session.query_one(&*acquire, &[&lease, name])?.get(0);
            session.query_one(&*release, &[&lease, &token.context("it should be free")?])?;
        }
        Ok([(work_of(session.pid())? - start) / 1e3 / PAIRS as f64])
    })?;
    let rows = all.iter().zip(&micros).map(|((name, ..), [one])| {
        row![*name, (one, 0), (Spread::of_ratios(one, &micros[0][0]), 2)]
    });
    let head = ["", "µs of the server's work", "over plpgsql by hand"];
    section.table("a pair by prepared statements, synchronous_commit = off", &head, rows);
    Ok(())
}

/// The number of rows per statement.
const FEW: i64 = 1_000;
/// The number of transactions per turn, with one row each.
const TRANSACTIONS: i64 = 100;
const SIMPLE: &str =
    "CREATE TRIGGER t BEFORE UPDATE ON {t} FOR EACH ROW EXECUTE FUNCTION bench_simple()";
const NONE: Check = check("none", "none", "");
const BY_TRIGGER: Check = check("plpgsql for one column", "simple", SIMPLE);
const OF_LITE: &[Check] = &[
    NONE,
    BY_TRIGGER,
    check("pg_fence_lite, unbound", "unbound", "SELECT fence_protect('{t}')"),
    check(
        "pg_fence_lite, bound to one lease",
        "bound",
        "SELECT fence_protect('{t}', lease => 'lite bench')",
    ),
];
/// The index of the bound check.
const BOUND: usize = 3;
const OF_THE_EXTENSION: &[Check] = &[
    check("pg_fence, unbound", "unbound", "SELECT fence_protect('{t}')"),
    check(
        "pg_fence, bound to one lease",
        "bound",
        "SELECT fence_protect('{t}', lease => 'lite bench')",
    ),
];

/// A session, and a token of the lease to which the tables in its database are bound.
struct Side {
    session: Session,
    token: i64,
}

impl Side {
    fn begin(mut session: Session, checks: &[Check]) -> Result<Side> {
        session.run(PLPGSQL)?;
        // Syncing takes the same time for all, and varies more than the measured times.
        session.run("SET synchronous_commit = off")?;
        for check in checks {
            check.lay(&mut session, "lite", FEW, 30)?;
        }
        let token = session.one("SELECT lease_acquire('lite bench', ttl => '1 day')", &[])?;
        Ok(Side { session, token })
    }
}

/// Measures statements of many rows, and transactions of one.
fn rows(bench: &Workbench, database: &Database, section: &mut Section) -> Result<()> {
    let turns = bench.options.rounds() * bench.options.pick(5, 20);
    bench.progress(&format!("lite: updates, {turns} turns of each kind"));
    section.note(format!(
        "Rows: {FEW} a statement, {turns} statements of each kind, in turns; then {TRANSACTIONS} transactions of a row a turn; \
         with synchronous_commit = off. Times of rows, and of a pair without the disk, are those in which the server process \
         was at work."
    ));
    let mut sides = [
        Side::begin(database.connect()?, OF_LITE)?,
        Side::begin(bench.connect()?, OF_THE_EXTENSION)?,
    ];
    let many = updates(&mut sides, turns, None)?;
    let all: Vec<_> = many.iter().map(|(name, nanos)| (*name, nanos)).collect();
    let title = format!("UPDATE of {FEW} rows, one statement");
    let added = report_rows(section, &title, &all, (1, Some(1)), "plpgsql");
    let aim = format!("{}: work added to a row, over plpgsql's", all[BOUND].0);
    section.at_most(aim, added[BOUND], OF_A_ROW);

    let one = updates(&mut sides, turns, Some("id = $2"))?;
    let all: Vec<_> = one.iter().map(|(name, nanos)| (*name, nanos)).collect();
    report_rows(section, "UPDATE of a row, a transaction", &all, (1, Some(1)), "plpgsql");
    let aim = format!("{}: µs of work for a transaction", all[BOUND].0);
    section.at_most(aim, Spread::of(all[BOUND].1).times(1e-3), OF_A_TRANSACTION);
    Ok(())
}

/// Nanoseconds per row by the name of the check: for all rows in one statement or, with the condition, for one row
/// after the other, each in its own transaction.
fn updates(
    sides: &mut [Side; 2],
    turns: usize,
    each: Option<&str>,
) -> Result<Vec<(&'static str, Vec<f64>)>> {
    let mut all: Vec<(&str, usize, Statement)> = Vec::new();
    for (edition, checks) in [OF_LITE, OF_THE_EXTENSION].into_iter().enumerate() {
        for check in checks {
            let statement = sides[edition].session.prepare(&check.update("lite", each))?;
            all.push((check.name, edition, statement));
        }
    }
    let nanos = in_turns(all.len(), (UNCOUNTED, turns), |index| {
        let (name, edition, statement) = &all[index];
        let Side { session, token } = &mut sides[*edition];
        *token = session.one("SELECT lease_renew('lite bench', $1)", &[token])?;
        let start = work_of(session.pid())?;
        let (mut updated, mut wanted) = (0, FEW);
        if each.is_some() {
            wanted = TRANSACTIONS;
            for id in 1..=TRANSACTIONS {
                updated += session.execute(statement, &[token, &id])?;
            }
        } else {
            updated = session.execute(statement, &[token])?;
        }
        ensure!(updated == wanted as u64, "{name}: {updated} rows");
        Ok([(work_of(session.pid())? - start) / wanted as f64])
    })?;
    Ok(all.iter().zip(nanos).map(|((name, ..), [nanos])| (*name, nanos)).collect())
}
