//! The plans of the statements on the pages on tables of work.

use crate::project::pages::{example, page};
use pg_test::markdown::filled;
use pg_test::{Context, Harness, Result, Session, ensure, harness_test};

/// The number of rows of a table of work after a minute, an hour and a day.
const ROWS: [u32; 3] = [1_000, 20_000, 200_000];

/// A page, its table of work, and what else its rows contain: columns, and their values for the row `n`.
const PAGES: [(&str, &str, [&str; 2]); 2] = [
    (
        "docs/recipes/work-table.md",
        "runs",
        ["due, result, held_until", "now() - n * interval '1 s', 'a result', until"],
    ),
    ("docs/recipes/from/lease-columns.md", "jobs", ["result, locked_until", "'a result', until"]),
];

/// Fills the table: of 1,000 rows one is running and ten are ready; the others are done.
fn fill(table: &str, [columns, values]: [&str; 2], rows: u32) -> String {
    format!(
        "INSERT INTO {table} (input, state, {columns}) SELECT n, state, {values}
           FROM generate_series({rows}, 1, -1) AS n,
                LATERAL (SELECT CASE WHEN n % 1000 = 1 THEN 'running' WHEN n % 100 = 0 THEN 'ready' ELSE 'done' END) AS s (state),
                LATERAL (SELECT CASE state WHEN 'running' THEN now() + interval '1 h' END) AS u (until);
         ANALYZE"
    )
}

/// Returns the line of a plan that reads the whole table, or the whole index of its key.
fn whole_table<'a>(plan: &'a [String], table: &str) -> Option<&'a String> {
    let all = format!("Seq Scan on {table}");
    let by_key = format!("using {table}_pkey on");
    let has_condition = |n: usize| plan.get(n + 1).is_some_and(|next| next.contains("Index Cond:"));
    let line = |(n, line): &(usize, &String)| {
        line.contains(&all) || line.contains(&by_key) && !has_condition(*n)
    };
    plan.iter().enumerate().find(line).map(|(_, line)| line)
}

fn plan(session: &mut Session, sql: &str) -> Result<Vec<String>> {
    let rows = session.rows(&format!("EXPLAIN {sql}"))?;
    rows.into_iter().map(|row| row.into_iter().next().flatten().context("a line")).collect()
}

/// Checks plans with tokens as literals, and as parameters of prepared statements, whose values the planner does not
/// know.
fn check_statements(
    session: &mut Session,
    (path, table, filling): (&str, &str, [&str; 2]),
    rows: u32,
) -> Result<usize> {
    let mut looked_at = 0;
    let mut filled_up = false;
    let major =
        session.text("SHOW server_version_num")?.context("a version")?.parse::<u32>()? / 10_000;
    for step in example::blocks(&page(path)?, major)?.concat() {
        let place = format!("{path}:{} with {rows} rows", step.line);
        let verb = step.sql.split_whitespace().next().unwrap_or_default();
        match verb {
            "CREATE" | "ALTER" => session.run(&step.sql)?,
            "SELECT" if step.sql.contains("fence_protect") => session.run(&step.sql)?,
            "INSERT" if !filled_up => {
                session.run(&fill(table, filling, rows))?;
                filled_up = true;
            }
            "UPDATE" | "DELETE" | "WITH" | "SELECT" | "INSERT" => {
                let with_numbers = filled(&step.sql, |_| Some("7".to_owned()))?;
                let with_parameter = filled(&step.sql, |_| Some("$1".to_owned()))?;
                session.run(&format!("PREPARE shown(bigint) AS {with_parameter}"))?;
                for sql in [&with_numbers, "EXECUTE shown(7)"] {
                    let plan = plan(session, sql).with_context(|| place.clone())?;
                    let found = whole_table(&plan, table);
                    ensure!(found.is_none(), "{place}: {}\n{}", step.sql, plan.join("\n"));
                }
                session.run("DEALLOCATE shown")?;
                looked_at += 1;
            }
            _ => {}
        }
    }
    Ok(looked_at)
}

#[harness_test]
fn no_statement_of_a_page_reads_a_whole_table_of_work(harness: &Harness) -> Result<()> {
    for shown in PAGES {
        let (path, table, _) = shown;
        for rows in ROWS {
            let db = harness.database()?;
            let mut session = db.connect()?;
            session.run("SET plan_cache_mode = force_generic_plan")?;
            let looked_at = check_statements(&mut session, shown, rows)?;
            ensure!(looked_at > 5, "{path}: {looked_at} statements");
            // This check finds bad plans.
            let both =
                "WHERE state = 'ready' OR state = 'running' AND result = 'x' ORDER BY id LIMIT 1";
            for reads_all in ["WHERE input = 'x'", both] {
                let plan = plan(&mut session, &format!("SELECT FROM {table} {reads_all}"))?;
                ensure!(whole_table(&plan, table).is_some(), "{reads_all}: {}", plan.join("\n"));
            }
        }
    }
    Ok(())
}
