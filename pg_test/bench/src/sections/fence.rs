//! The cost of the fence in an UPDATE, compared with other triggers and with none.

use crate::plot::Better::Lower;
use crate::race::{self, Contender, at_once, in_turns};
use crate::report::{Cell, Section, row};
use crate::spread::Spread;
use crate::triggers;
use crate::workbench::Workbench;
use anyhow::{Result, ensure};
use pg_test::Session;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Instant;

/// The number of rows per statement, which takes a few milliseconds, so that disturbances hit few statements.
const FEW: i64 = 4_000;
/// The number of statements of each kind per round.
const TURNS: usize = 60;
/// The number of rows of the tables in which one row at a time is written.
const MANY: i64 = 200_000;
/// The columns of each table; the third one is the fence.
const COLUMNS: &str = "id bigint PRIMARY KEY, v bigint NOT NULL, fence bigint";

const NONE: &str = "none";
const MINIMAL: &str = "minimal C trigger";
const UNBOUND: &str = "pg_fence, unbound";
const BOUND: &str = "pg_fence, bound to one lease";

/// A check of a table's fence.
pub struct Check {
    pub name: &'static str,
    /// The suffix of its tables' names.
    table: &'static str,
    /// The statements that attach it to a table, `{t}`.
    sql: &'static str,
    /// An additional condition of the UPDATE, with the token as `$1`.
    condition: Option<&'static str>,
}

/// A check without an additional condition.
pub const fn check(name: &'static str, table: &'static str, sql: &'static str) -> Check {
    Check { name, table, sql, condition: None }
}

const CHECKS: &[Check] = &[
    check(NONE, "none", ""),
    Check { condition: Some("fence < $1"), ..check("WHERE fence < $1", "where", "") },
    check(
        "empty C trigger",
        "empty",
        "CREATE TRIGGER t BEFORE UPDATE ON {t} FOR EACH ROW EXECUTE FUNCTION bench_empty()",
    ),
    check(
        MINIMAL,
        "check",
        "CREATE TRIGGER t BEFORE UPDATE ON {t} FOR EACH ROW EXECUTE FUNCTION bench_check()",
    ),
    check(UNBOUND, "unbound", "SELECT fence_protect('{t}')"),
    check(BOUND, "bound", "SELECT fence_protect('{t}', lease => 'fence bench')"),
    check(
        "plpgsql for one column",
        "simple",
        "CREATE TRIGGER t BEFORE UPDATE ON {t} FOR EACH ROW EXECUTE FUNCTION bench_simple()",
    ),
    check(
        "plpgsql, column by name",
        "generic",
        "CREATE TRIGGER t BEFORE UPDATE ON {t} FOR EACH ROW EXECUTE FUNCTION bench_generic('fence')",
    ),
];

impl Check {
    /// Creates a table of this number of rows, with the room for further versions that `fillfactor` leaves in each
    /// page.
    pub fn lay(
        &self,
        session: &mut Session,
        prefix: &str,
        rows: i64,
        fillfactor: u32,
    ) -> Result<()> {
        let table = format!("{prefix}_{}", self.table);
        session.run(&format!(
            "CREATE TABLE {table} ({COLUMNS}) WITH (fillfactor = {fillfactor});
             INSERT INTO {table} SELECT i, 0, 0 FROM generate_series(1, {rows}) i; {}",
            self.sql.replace("{t}", &table)
        ))?;
        session.run(&format!("VACUUM ANALYZE {table}"))?;
        Ok(())
    }

    /// The UPDATE of the table, restricted by a further condition.
    pub fn update(&self, prefix: &str, rows: Option<&str>) -> String {
        let conditions: Vec<&str> = rows.into_iter().chain(self.condition).collect();
        let word = if conditions.is_empty() { "" } else { " WHERE " };
        let (table, conditions) = (self.table, conditions.join(" AND "));
        format!("UPDATE {prefix}_{table} SET v = v + 1, fence = $1{word}{conditions}")
    }
}

/// Two triggers in plpgsql.
pub const PLPGSQL: &str = "
CREATE OR REPLACE FUNCTION bench_simple() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.fence IS NULL OR NEW.fence <= OLD.fence THEN
        RAISE 'stale fencing token';
    END IF;
    RETURN NEW;
END$$;
CREATE OR REPLACE FUNCTION bench_generic() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    shown bigint := (to_jsonb(NEW) ->> TG_ARGV[0])::bigint;
BEGIN
    IF shown IS NULL OR shown <= (to_jsonb(OLD) ->> TG_ARGV[0])::bigint THEN
        RAISE 'stale fencing token';
    END IF;
    RETURN NEW;
END$$;
";

/// Measures many rows per statement, and one row per transaction.
pub fn measure(bench: &Workbench) -> Result<Section> {
    let (rows, turns) =
        (bench.options.pick(FEW / 4, FEW), bench.options.rounds() * bench.options.pick(5, TURNS));
    let note = format!(
        "Many rows: {rows} a statement, {turns} statements of each kind, in turns, with synchronous_commit = off. One \
         row: each a transaction of its own, whose commit waits for the disk."
    );
    let mut section = Section::new("The fence", note);
    let mut session = bench.connect()?;
    let with_c = triggers::create(bench.harness, &mut session)
        .map_err(|why| bench.skip("C triggers", &why))
        .is_ok();
    let needs_c =
        |check: &Check| check.sql.contains("bench_empty") || check.sql.contains("bench_check");
    let checks: Vec<&Check> = CHECKS.iter().filter(|check| with_c || !needs_c(check)).collect();
    session.run(PLPGSQL)?;
    let mut token: i64 = session.one("SELECT lease_acquire('fence bench', ttl => '1 day')", &[])?;
    many_rows(bench, &checks, &mut session, &mut token, (rows, turns), &mut section)?;
    one_row(bench, &checks, token, &mut section)?;
    Ok(section)
}

/// Runs statements of many rows in turns. After each one the lease has another token.
fn many_rows(
    bench: &Workbench,
    checks: &[&Check],
    session: &mut Session,
    token: &mut i64,
    (rows, turns): (i64, usize),
    section: &mut Section,
) -> Result<()> {
    bench.progress(&format!("fence: updates of {rows} rows, {turns} of each kind"));
    // Syncing takes the same time for all, and varies more than the measured times.
    session.run("SET synchronous_commit = off")?;
    for check in checks {
        check.lay(session, "few", rows, 30)?;
    }
    let statements = checks.iter().map(|check| session.prepare(&check.update("few", None)));
    let statements = statements.collect::<Result<Vec<_>, _>>()?;
    let nanos = in_turns(checks.len(), (UNCOUNTED, turns), |index| {
        *token = session.one("SELECT lease_renew('fence bench', $1)", &[token])?;
        let start = Instant::now();
        let updated = session.execute(&statements[index], &[token])?;
        let spent = start.elapsed().as_secs_f64() * 1e9 / rows as f64;
        ensure!(updated == rows as u64, "{}: {updated} rows", checks[index].name);
        Ok([spent])
    })?;
    session.run("RESET synchronous_commit")?;
    let place = |name: &str| checks.iter().position(|check| check.name == name);
    let (minimal, title) = (place(MINIMAL), format!("UPDATE of {rows} rows, one statement"));
    let all: Vec<_> =
        checks.iter().zip(&nanos).map(|(check, [nanos])| (check.name, nanos)).collect();
    let over_minimal = report_rows(section, &title, &all, (0, minimal), "minimal C");
    section.bars(
        Lower,
        "fence",
        format!("UPDATE of {rows} rows, ns a row"),
        all.iter().map(|(name, nanos)| (*name, Spread::of(nanos))),
    );
    for (name, bound) in [(UNBOUND, 1.05), (BOUND, 1.15)] {
        if let (Some(index), Some(_)) = (place(name), minimal) {
            let aim = format!("{name}: added over the minimal C trigger's");
            section.at_most(aim, over_minimal[index], bound);
        }
    }
    Ok(())
}

/// The first statements fill the pages, are planned, and warm up.
pub const UNCOUNTED: usize = 10;

/// Adds a table of nanoseconds per row: the difference to `reference`, and the first one's difference as a multiple of
/// that of `least`, which is returned.
pub fn report_rows(
    section: &mut Section,
    title: &str,
    all: &[(&str, &Vec<f64>)],
    (reference, least): (usize, Option<usize>),
    name_of_least: &str,
) -> Vec<Spread> {
    let none = all[0].1;
    let added = |nanos: &[f64]| -> Vec<f64> {
        nanos.iter().zip(none).map(|(with, without)| with - without).collect()
    };
    let least = least.map(|least| added(all[least].1));
    let mut over_least = Vec::new();
    let over = format!("over {}", all[reference].0);
    let head = ["", "ns a row", &over, "ns added", &format!("added, over {name_of_least}'s")];
    let rows = all.iter().enumerate().map(|(index, (name, nanos))| {
        let over_reference = Spread::of_ratios(nanos, all[reference].1);
        let mut row = row![*name, (*nanos, 0), (over_reference, 2)];
        let added = added(nanos);
        over_least.push(Spread::of_ratios(&added, least.as_deref().unwrap_or_default()));
        row.push(if index == 0 { Cell::Nothing } else { (&added, 0).into() });
        let is_over = index > 0 && least.is_some();
        row.push(if is_over { (over_least[index], 2).into() } else { Cell::Nothing });
        row
    });
    section.table(title, &head, rows.collect::<Vec<_>>());
    over_least
}

fn one_row(bench: &Workbench, checks: &[&Check], token: i64, section: &mut Section) -> Result<()> {
    let rows = bench.options.pick(MANY / 20, MANY);
    let mut session = bench.connect()?;
    for check in checks {
        check.lay(&mut session, "many", rows, 100)?;
    }
    // An unbound write needs a greater token than the one before; a bound one has the lease's token.
    let next = Arc::new(AtomicI64::new(token + 1));
    session.run(&format!("SELECT setval('fence.token_seq', {})", token + 1_000_000_000))?;
    let mut ratios: Vec<Vec<Cell>> = checks.iter().map(|check| row![check.name]).collect();
    for clients in [1, 8] {
        bench.progress(&format!("fence: one row a transaction, {}", at_once(clients)));
        let contenders = checks.iter().map(|check| {
            let next = &next;
            Contender::new(check.name, move |client| {
                let mut session = bench.connect()?;
                let statement = session.prepare(&check.update("many", Some("id = $2")))?;
                let (bound, next) = (check.name == BOUND, next.clone());
                Ok(move || {
                    let share = rows / clients as i64;
                    let id = rand::random_range(0..share) * clients as i64 + client as i64 + 1;
                    let fresh = next.fetch_add(1, Ordering::Relaxed);
                    let shown = if bound { token } else { fresh };
                    let updated = session.execute(&statement, &[&shown, &id])?;
                    ensure!(updated == 1, "row {id} was not updated");
                    Ok(())
                })
            })
        });
        let tracks = race::run(&contenders.collect::<Vec<_>>(), bench.options.rules(clients))?;
        for (track, cells) in tracks.iter().zip(&mut ratios) {
            cells.push((track.ratio_to(&tracks[0]), 2).into());
        }
    }
    let head = ["", "1 client, tps over none", "8 clients, tps over none"];
    section.table("UPDATE of one row a transaction", &head, ratios);
    Ok(())
}
