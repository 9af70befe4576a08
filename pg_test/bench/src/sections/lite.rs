//! The cost of the edition without a library, beside SQL that is written by hand, and the extension in the same run.

use super::fence::{check, Check, PLPGSQL};
use super::uncontended::{find, pairs};
use crate::peer::{self, Prepare};
use crate::peers::sql::Sql;
use crate::peers::*;
use crate::race::{self, Contender};
use crate::report::{Cell, Section, Table};
use crate::spread::Spread;
use crate::workbench::Workbench;
use anyhow::{ensure, Context, Result};
use pg_test::{Database, Session};
use postgres::Statement;
use std::fs;

const LITE: &str = "pg_fence_lite";
/// The most that a pair may take of the time that it takes by hand.
const OF_A_PAIR: f64 = 1.5;
/// How many times what a trigger for one fixed column adds a bound row of a statement over many may add.
const OF_A_ROW: f64 = 12.0;
/// The most that a transaction of one bound row may take of the server's work, in microseconds.
const OF_A_TRANSACTION: f64 = 135.0;

const BY_HAND: &[(&str, Prepare)] = &[
    (update_first::NAME, update_first::prepare),
    (plpgsql::NAME, plpgsql::prepare),
    (ours::NAME, ours::prepare),
];

pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Without a library");
    section.note(
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
    let mut peers = peer::prepare(bench, BY_HAND);
    let (conninfo, statements) = (database.conninfo(), ours::statements(""));
    peers.push(Box::new(Sql { name: LITE, conninfo, statements }));
    for clients in [1, 8] {
        let at_once = race::at_once(clients);
        bench.progress(&format!("lite: pairs, {at_once}"));
        let contenders: Vec<Contender> = peers.iter().map(|peer| pairs(&**peer, clients)).collect();
        let tracks = race::run(&contenders, bench.options.rules(clients))?;
        let (lite, by_hand) = (find(&tracks, LITE)?, find(&tracks, plpgsql::NAME)?);
        let title = format!("acquire + release, {at_once}");
        let over = "over plpgsql by hand";
        section.tables.push(Table::of_rates(title, "pairs/s", &tracks, by_hand, over));
        // Rates, so that the time of the one over that of the other is the other way around.
        for name in [plpgsql::NAME, update_first::NAME] {
            let aim = format!("time of a pair over {name}, {at_once}: at most {OF_A_PAIR}");
            section.at_most(&aim, find(&tracks, name)?.ratio_to(lite), OF_A_PAIR);
        }
    }
    Ok(())
}

/// How long a server process has been at work, in nanoseconds: what else the machine does is not in it.
pub(super) fn work_of(session: &Session) -> Result<f64> {
    let path = format!("/proc/{}/schedstat", session.pid());
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let word = text.split_whitespace().next().with_context(|| path.clone())?;
    Ok(word.parse()?)
}

/// Pairs a turn.
const PAIRS: usize = 100;

/// A session that acquires and releases by these statements.
struct Pair {
    name: &'static str,
    session: Session,
    acquire: Statement,
    release: Statement,
    micros: Vec<f64>,
}

/// The server's work for a pair whose commits wait for nothing.
fn work_of_pairs(bench: &Workbench, database: &Database, section: &mut Section) -> Result<()> {
    let turns = bench.options.rounds() * bench.options.pick(2, 10);
    bench.progress(&format!("lite: the server's work for {PAIRS} pairs, {turns} times each"));
    let calls = ["SELECT lease_acquire($1, $2)", "SELECT lease_release($1, $2)"];
    let by_hand = ["SELECT plpgsql_acquire($1, $2)", "SELECT plpgsql_release($1, $2)"];
    let mut all = Vec::new();
    for (name, conninfo, [acquire, release]) in [
        (plpgsql::NAME, bench.conninfo(), by_hand),
        (LITE, database.conninfo(), calls),
        (ours::NAME, bench.conninfo(), calls),
    ] {
        let mut session = conninfo.set("synchronous_commit", "off").connect()?;
        let (acquire, release) = (session.prepare(acquire)?, session.prepare(release)?);
        all.push(Pair { name, session, acquire, release, micros: Vec::new() });
    }
    for turn in 0..turns + 1 {
        for Pair { name, session, acquire, release, micros } in &mut all {
            let start = work_of(session)?;
            for pair in 0..PAIRS {
                let lease = format!("name{pair}");
                let token: Option<i64> = session.query_one(&*acquire, &[&lease, name])?.get(0);
                session.query_one(&*release, &[&lease, &token.context("it should be free")?])?;
            }
            let spent = (work_of(session)? - start) / 1e3 / PAIRS as f64;
            if turn > 0 {
                micros.push(spent);
            }
        }
    }
    let head = ["", "µs of the server's work", "over plpgsql by hand"];
    let mut table = Table::new("a pair by prepared statements, synchronous_commit = off", &head);
    let by_hand = all[0].micros.clone();
    for Pair { name, micros, .. } in &all {
        let over = Cell::Spread(Spread::of_ratios(micros, &by_hand), 2);
        table.rows.push(vec![(*name).into(), Cell::Spread(Spread::of(micros), 0), over]);
    }
    section.tables.push(table);
    Ok(())
}

/// So many rows a statement.
const FEW: i64 = 1_000;
/// So many transactions a turn, of a row each.
const TRANSACTIONS: i64 = 100;
/// The first statements plan, and fill the pages.
const UNCOUNTED: usize = 10;

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
/// Its place among them.
const BOUND: usize = 3;
const OF_THE_EXTENSION: &[Check] = &[
    check("pg_fence, unbound", "unbound", "SELECT fence_protect('{t}')"),
    check(
        "pg_fence, bound to one lease",
        "bound",
        "SELECT fence_protect('{t}', lease => 'lite bench')",
    ),
];

/// Updates of one table, in a session of the edition that fences it.
struct Updates {
    name: &'static str,
    edition: usize,
    statement: Statement,
    nanos: Vec<f64>,
}

/// A session, and a token of the lease that tables in its database are bound to.
struct Side {
    session: Session,
    token: i64,
}

impl Side {
    fn begin(mut session: Session, checks: &[Check]) -> Result<Side> {
        session.run(PLPGSQL)?;
        // A sync takes the same for all, and varies more than the times to be measured.
        session.run("SET synchronous_commit = off")?;
        for check in checks {
            check.lay(&mut session, "lite", FEW, 30)?;
        }
        let token = session.one("SELECT lease_acquire('lite bench', ttl => '1 day')", &[])?;
        Ok(Side { session, token })
    }
}

/// Statements of many rows, and transactions of one.
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
    let added = report_rows(section, &format!("UPDATE of {FEW} rows, one statement"), &many);
    let aim =
        format!("{}: work added to a row, over plpgsql's, at most {OF_A_ROW}", many[BOUND].name);
    section.at_most(&aim, added, OF_A_ROW);

    let one = updates(&mut sides, turns, Some("id = $2"))?;
    report_rows(section, "UPDATE of a row, a transaction", &one);
    let aim =
        format!("{}: µs of work for a transaction, at most {OF_A_TRANSACTION}", one[BOUND].name);
    section.at_most(&aim, Spread::of(&one[BOUND].nanos).times(1e-3), OF_A_TRANSACTION);
    Ok(())
}

/// Of all rows by a statement, or, by that condition, of one after the other, each in a transaction of its own.
fn updates(sides: &mut [Side; 2], turns: usize, each: Option<&str>) -> Result<Vec<Updates>> {
    let mut all = Vec::new();
    for (edition, checks) in [OF_LITE, OF_THE_EXTENSION].into_iter().enumerate() {
        for check in checks {
            let statement = sides[edition].session.prepare(&check.update("lite", each))?;
            all.push(Updates { name: check.name, edition, statement, nanos: Vec::new() });
        }
    }
    for turn in 0..UNCOUNTED + turns {
        for Side { session, token } in &mut *sides {
            *token = session.one("SELECT lease_renew('lite bench', $1)", &[token])?;
        }
        // Nobody always follows the same one.
        let start = turn % all.len();
        for index in (start..all.len()).chain(0..start) {
            let Updates { name, edition, statement, nanos } = &mut all[index];
            let Side { session, token } = &mut sides[*edition];
            let start = work_of(session)?;
            let (mut updated, mut wanted) = (0, FEW);
            if each.is_some() {
                wanted = TRANSACTIONS;
                for id in 1..=TRANSACTIONS {
                    updated += session.execute(&*statement, &[token, &id])?;
                }
            } else {
                updated = session.execute(&*statement, &[token])?;
            }
            let spent = (work_of(session)? - start) / wanted as f64;
            ensure!(updated == wanted as u64, "{name}: {updated} rows");
            if turn >= UNCOUNTED {
                nanos.push(spent);
            }
        }
    }
    Ok(all)
}

/// How many times what the trigger for one column adds the bound one does.
fn report_rows(section: &mut Section, title: &str, all: &[Updates]) -> Spread {
    let (none, simple) = (&all[0].nanos, &all[1].nanos);
    let added = |nanos: &[f64]| -> Vec<f64> {
        nanos.iter().zip(none).map(|(with, without)| with - without).collect()
    };
    let head = ["", "ns a row", "over plpgsql for one column", "ns added", "added, over plpgsql's"];
    let mut table = Table::new(title, &head);
    for (index, Updates { name, nanos, .. }) in all.iter().enumerate() {
        let over = |mine: &[f64], other: &[f64]| Cell::Spread(Spread::of_ratios(mine, other), 2);
        table.rows.push(vec![
            (*name).into(),
            Cell::Spread(Spread::of(nanos), 0),
            over(nanos, simple),
            if index == 0 { Cell::Nothing } else { Cell::Spread(Spread::of(&added(nanos)), 0) },
            if index == 0 { Cell::Nothing } else { over(&added(nanos), &added(simple)) },
        ]);
    }
    section.tables.push(table);
    Spread::of_ratios(&added(&all[BOUND].nanos), &added(simple))
}
