//! What the fence adds to an UPDATE, beside other triggers and none.

use crate::plot::Plot;
use crate::race::{self, Contender, Op, Rules, WARM_UP};
use crate::report::{Cell, Section, Table};
use crate::spread::Spread;
use crate::triggers;
use crate::workbench::Workbench;
use anyhow::{ensure, Result};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::Arc;
use std::time::Instant;

const ROWS: i64 = 200_000;
/// The columns that each table has; the fence is the third.
const COLUMNS: &str = "id bigint PRIMARY KEY, v bigint NOT NULL, fence bigint";

const NONE: &str = "none";
const MINIMAL: &str = "minimal C trigger";
const UNBOUND: &str = "pg_fence, unbound";
const BOUND: &str = "pg_fence, bound to one lease";

/// A name, its table, and what puts its check on the table.
const CHECKS: &[(&str, &str, &str)] = &[
    (NONE, "f_none", ""),
    ("WHERE fence < $1", "f_where", ""),
    ("empty C trigger", "f_empty", "CREATE TRIGGER t BEFORE UPDATE ON f_empty FOR EACH ROW EXECUTE FUNCTION bench_empty()"),
    (MINIMAL, "f_check", "CREATE TRIGGER t BEFORE UPDATE ON f_check FOR EACH ROW EXECUTE FUNCTION bench_check()"),
    (UNBOUND, "f_unbound", "SELECT fence_protect('f_unbound')"),
    (BOUND, "f_bound", "SELECT fence_protect('f_bound', lease => 'fence bench')"),
    ("plpgsql for one column", "f_simple", "CREATE TRIGGER t BEFORE UPDATE ON f_simple FOR EACH ROW EXECUTE FUNCTION bench_simple()"),
    ("plpgsql, column by name", "f_generic", "CREATE TRIGGER t BEFORE UPDATE ON f_generic FOR EACH ROW EXECUTE FUNCTION bench_generic('fence')"),
];

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
    let checks: Vec<_> = CHECKS
        .iter()
        .filter(|(_, _, sql)| {
            with_c || !sql.contains("bench_empty") && !sql.contains("bench_check")
        })
        .collect();
    let rows = bench.options.pick(ROWS / 20, ROWS);
    session.run(PLPGSQL)?;
    for (_, table, sql) in &checks {
        session.run(&format!(
            "CREATE TABLE {table} ({COLUMNS}); INSERT INTO {table} SELECT i, 0, 0 FROM generate_series(1, {rows}) i;
             {sql}"
        ))?;
        session.run(&format!("VACUUM ANALYZE {table}"))?;
    }
    let mut token: i64 = session.one("SELECT lease_acquire('fence bench', ttl => '1 day')", &[])?;
    let rounds = bench.options.rounds();
    bench.progress(&format!("fence: updates of {rows} rows"));
    let mut nanos = vec![Vec::new(); checks.len()];
    for round in 0..=rounds {
        token = session.one("SELECT lease_renew('fence bench', $1)", &[&token])?;
        for (index, (name, table, _)) in checks.iter().enumerate() {
            let condition = if name.starts_with("WHERE") { "WHERE fence < $1" } else { "" };
            let sql = format!("UPDATE {table} SET v = v + 1, fence = $1 {condition}");
            let statement = session.prepare(&sql)?;
            let start = Instant::now();
            let updated = session.execute(&statement, &[&token])?;
            let spent = start.elapsed().as_secs_f64() * 1e9 / rows as f64;
            ensure!(updated == rows as u64, "{name}: {updated} rows");
            // The first round grows the tables to the size that they keep.
            if round > 0 {
                nanos[index].push(spent);
            }
            session.run(&format!("VACUUM {table}"))?;
        }
    }
    report_rows(&mut section, &checks, &nanos, rows);
    one_row(bench, &checks, rows, token, &mut section)?;
    Ok(section)
}

fn report_rows(
    section: &mut Section,
    checks: &[&(&str, &str, &str)],
    nanos: &[Vec<f64>],
    rows: i64,
) {
    let none = nanos[0].clone();
    let added = |index: usize| -> Vec<f64> {
        nanos[index].iter().zip(&none).map(|(with, without)| with - without).collect()
    };
    let place = |name: &str| checks.iter().position(|check| check.0 == name);
    let minimal = place(MINIMAL).map(added);
    let head = ["", "ns a row", "over none", "ns added", "added, over minimal C"];
    let mut table = Table::new(format!("UPDATE of {rows} rows, one statement"), &head);
    let mut bars = Vec::new();
    for (index, (name, ..)) in checks.iter().enumerate() {
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
    section.plots.push(Plot { file: "fence".to_owned(), title, bars });
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

fn one_row(
    bench: &Workbench,
    checks: &[&(&str, &str, &str)],
    rows: i64,
    token: i64,
    section: &mut Section,
) -> Result<()> {
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
    let mut ratios: Vec<Vec<Cell>> = checks.iter().map(|check| vec![check.0.into()]).collect();
    for clients in [1, 8] {
        bench.progress(&format!("fence: one row a transaction, {}", race::at_once(clients)));
        let contenders: Vec<Contender> = checks
            .iter()
            .map(|(name, of, _)| {
                let (conninfo, next) = (&conninfo, &next);
                let condition = if name.starts_with("WHERE") { "AND fence < $1" } else { "" };
                Contender::new(*name, move |client| {
                    let mut session = conninfo.connect()?;
                    let statement = session.prepare(&format!(
                        "UPDATE {of} SET v = v + 1, fence = $1 WHERE id = $2 {condition}"
                    ))?;
                    let (bound, next) = (*name == BOUND, next.clone());
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
        let rules = Rules {
            clients,
            rounds: bench.options.rounds(),
            slice: bench.options.slice(),
            warm_up: WARM_UP,
        };
        let tracks = race::run(&contenders, rules)?;
        for (track, cells) in tracks.iter().zip(&mut ratios) {
            cells.push(Cell::Spread(track.ratio_to(&tracks[0]), 2));
        }
    }
    table.rows = ratios;
    section.tables.push(table);
    Ok(())
}
