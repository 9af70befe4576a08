//! The cost of the fence in an UPDATE, beside other triggers and none.

use crate::plot::{Better, Plot};
use crate::race::{self, Contender, Op};
use crate::report::{Cell, Section, Table};
use crate::spread::Spread;
use crate::triggers;
use crate::workbench::Workbench;
use anyhow::{ensure, Result};
use pg_test::Session;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::Arc;
use std::time::Instant;

/// A statement writes so many rows, which takes a few milliseconds: what disturbs the machine meets few statements.
const FEW: i64 = 4_000;
/// Statements of that kind for each round of the bench.
const TURNS: usize = 60;
/// The tables of which one row at a time is written have so many.
const MANY: i64 = 200_000;
/// The columns that each table has; the fence is the third.
const COLUMNS: &str = "id bigint PRIMARY KEY, v bigint NOT NULL, fence bigint";

const NONE: &str = "none";
const MINIMAL: &str = "minimal C trigger";
const UNBOUND: &str = "pg_fence, unbound";
const BOUND: &str = "pg_fence, bound to one lease";

/// A check of a table's fence.
pub struct Check {
    pub name: &'static str,
    /// The ending of its tables' names.
    table: &'static str,
    /// Puts it on a table, `{t}`.
    sql: &'static str,
    /// A condition that an UPDATE has beside, with the token as `$1`.
    condition: Option<&'static str>,
}

/// One that asks for nothing beside.
pub const fn check(name: &'static str, table: &'static str, sql: &'static str) -> Check {
    Check { name, table, sql, condition: None }
}

const CHECKS: &[Check] = &[
    check(NONE, "none", ""),
    Check { condition: Some("fence < $1"), ..check("WHERE fence < $1", "where", "") },
    check("empty C trigger", "empty", "CREATE TRIGGER t BEFORE UPDATE ON {t} FOR EACH ROW EXECUTE FUNCTION bench_empty()"),
    check(MINIMAL, "check", "CREATE TRIGGER t BEFORE UPDATE ON {t} FOR EACH ROW EXECUTE FUNCTION bench_check()"),
    check(UNBOUND, "unbound", "SELECT fence_protect('{t}')"),
    check(BOUND, "bound", "SELECT fence_protect('{t}', lease => 'fence bench')"),
    check("plpgsql for one column", "simple", "CREATE TRIGGER t BEFORE UPDATE ON {t} FOR EACH ROW EXECUTE FUNCTION bench_simple()"),
    check("plpgsql, column by name", "generic", "CREATE TRIGGER t BEFORE UPDATE ON {t} FOR EACH ROW EXECUTE FUNCTION bench_generic('fence')"),
];

impl Check {
    /// Makes its table of so many rows, with room in each page for as many versions as `fillfactor` leaves.
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

    /// An UPDATE of that table, of the rows that a further condition names.
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

/// Many rows a statement, and one row a transaction.
pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("The fence");
    let mut session = bench.connect()?;
    let with_c = triggers::create(bench.lab, &mut session)
        .map_err(|why| bench.skip("C triggers", &why))
        .is_ok();
    let needs_c =
        |check: &Check| check.sql.contains("bench_empty") || check.sql.contains("bench_check");
    let checks: Vec<&Check> = CHECKS.iter().filter(|check| with_c || !needs_c(check)).collect();
    session.run(PLPGSQL)?;
    let token: i64 = session.one("SELECT lease_acquire('fence bench', ttl => '1 day')", &[])?;
    let token = many_rows(bench, &checks, &mut session, token, &mut section)?;
    one_row(bench, &checks, token, &mut section)?;
    Ok(section)
}

/// Statements of many rows, in turns. Gives back the token that the lease has then.
fn many_rows(
    bench: &Workbench,
    checks: &[&Check],
    session: &mut Session,
    mut token: i64,
    section: &mut Section,
) -> Result<i64> {
    let rows = bench.options.pick(FEW / 4, FEW);
    let turns = bench.options.rounds() * bench.options.pick(5, TURNS);
    bench.progress(&format!("fence: updates of {rows} rows, {turns} of each kind"));
    section.note(format!(
        "Many rows: {rows} a statement, {turns} statements of each kind, in turns, with synchronous_commit = off. One \
         row: each a transaction of its own, whose commit waits for the disk."
    ));
    // A sync takes the same for all, and varies more than the times to be measured.
    session.run("SET synchronous_commit = off")?;
    for check in checks {
        check.lay(session, "few", rows, 30)?;
    }
    let statements = checks.iter().map(|check| session.prepare(&check.update("few", None)));
    let statements = statements.collect::<Result<Vec<_>, _>>()?;
    let mut nanos = vec![Vec::new(); checks.len()];
    for turn in 0..UNCOUNTED + turns {
        token = session.one("SELECT lease_renew('fence bench', $1)", &[&token])?;
        // Nobody always follows the same one.
        let order = (0..checks.len()).map(|n| (n + turn) % checks.len());
        let order: Vec<usize> = if turn % 2 == 0 { order.collect() } else { order.rev().collect() };
        for index in order {
            let start = Instant::now();
            let updated = session.execute(&statements[index], &[&token])?;
            let spent = start.elapsed().as_secs_f64() * 1e9 / rows as f64;
            ensure!(updated == rows as u64, "{}: {updated} rows", checks[index].name);
            if turn >= UNCOUNTED {
                nanos[index].push(spent);
            }
        }
    }
    session.run("RESET synchronous_commit")?;
    report_rows(section, checks, &nanos, rows);
    Ok(token)
}

/// The first statements fill the pages, plan, and warm up.
const UNCOUNTED: usize = 10;

fn report_rows(section: &mut Section, checks: &[&Check], nanos: &[Vec<f64>], rows: i64) {
    let none = nanos[0].clone();
    let added = |index: usize| -> Vec<f64> {
        nanos[index].iter().zip(&none).map(|(with, without)| with - without).collect()
    };
    let place = |name: &str| checks.iter().position(|check| check.name == name);
    let minimal = place(MINIMAL).map(added);
    let head = ["", "ns a row", "over none", "ns added", "added, over minimal C"];
    let mut table = Table::new(format!("UPDATE of {rows} rows, one statement"), &head);
    let mut bars = Vec::new();
    for (index, Check { name, .. }) in checks.iter().enumerate() {
        let over_minimal = match &minimal {
            Some(minimal) if index > 0 => {
                Cell::Spread(Spread::of_ratios(&added(index), minimal), 2)
            }
            _ => Cell::Nothing,
        };
        table.rows.push(vec![
            (*name).into(),
            Cell::Spread(Spread::of(&nanos[index]), 0),
            Cell::Spread(Spread::of_ratios(&nanos[index], &none), 2),
            Cell::Spread(Spread::of(&added(index)), 0),
            over_minimal,
        ]);
        bars.push(((*name).to_owned(), Spread::of(&nanos[index])));
    }
    section.tables.push(table);
    let title = format!("UPDATE of {rows} rows, ns a row");
    section.plots.push(Plot { better: Better::Lower, file: "fence".to_owned(), title, bars });
    for (name, bound) in [(UNBOUND, 1.05), (BOUND, 1.15)] {
        if let (Some(index), Some(minimal)) = (place(name), &minimal) {
            let ratio = Spread::of_ratios(&added(index), minimal);
            section.at_most(
                &format!("{name}: added over the minimal C trigger's, at most {bound}"),
                ratio,
                bound,
            );
        }
    }
}

fn one_row(bench: &Workbench, checks: &[&Check], token: i64, section: &mut Section) -> Result<()> {
    let rows = bench.options.pick(MANY / 20, MANY);
    let mut session = bench.connect()?;
    for check in checks {
        check.lay(&mut session, "many", rows, 100)?;
    }
    // Unbound, each write needs a greater token than the one before; bound, the lease's own.
    let next = Arc::new(AtomicI64::new(token + 1));
    bench
        .connect()?
        .run(&format!("SELECT setval('fence.token_seq', {})", token + 1_000_000_000))?;
    let conninfo = bench.conninfo();
    let mut table = Table::new(
        "UPDATE of one row a transaction",
        &["", "1 client, tps over none", "8 clients, tps over none"],
    );
    let mut ratios: Vec<Vec<Cell>> = checks.iter().map(|check| vec![check.name.into()]).collect();
    for clients in [1, 8] {
        bench.progress(&format!("fence: one row a transaction, {}", race::at_once(clients)));
        let contenders: Vec<Contender> = checks
            .iter()
            .map(|check| {
                let (conninfo, next) = (&conninfo, &next);
                Contender::new(check.name, move |client| {
                    let mut session = conninfo.connect()?;
                    let statement = session.prepare(&check.update("many", Some("id = $2")))?;
                    let (bound, next) = (check.name == BOUND, next.clone());
                    Ok(Box::new(move || {
                        let share = rows / clients as i64;
                        let id = rand::random_range(0..share) * clients as i64 + client as i64 + 1;
                        let fresh = next.fetch_add(1, Ordering::Relaxed);
                        let shown = if bound { token } else { fresh };
                        let updated = session.execute(&statement, &[&shown, &id])?;
                        ensure!(updated == 1, "row {id} was not updated");
                        Ok(())
                    }) as Op)
                })
            })
            .collect();
        let tracks = race::run(&contenders, bench.options.rules(clients))?;
        for (track, cells) in tracks.iter().zip(&mut ratios) {
            cells.push(Cell::Spread(track.ratio_to(&tracks[0]), 2));
        }
    }
    table.rows = ratios;
    section.tables.push(table);
    Ok(())
}
