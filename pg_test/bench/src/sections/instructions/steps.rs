//! What is counted: calls on leases and writes of fenced rows, and what is set beside each.

use crate::sections::fence::PLPGSQL;
use crate::triggers;
use crate::workbench::Workbench;
use anyhow::{Context, Result};
use pg_test::Session;
use std::ops::Range;

/// A table of the report.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    /// Calls on leases, many in one statement.
    Calls,
    /// Calls on leases, each a prepared statement and a transaction.
    Statements,
    /// Rows of one UPDATE.
    Rows,
    /// Updates of one row, each a prepared statement and a transaction.
    OneRow,
}

impl Kind {
    /// What its figures are for one of.
    pub fn unit(self) -> &'static str {
        match self {
            Kind::Calls => "a call of many in a statement",
            Kind::Statements => "a statement and transaction of its own",
            Kind::Rows => "a row of an UPDATE of many",
            Kind::OneRow => "an UPDATE of one row",
        }
    }
}

/// What the extension counts for `fence.stats` of these, and the most instructions that this may take.
pub const COUNTING: &[(Kind, &str, Option<f64>)] = &[
    (Kind::Statements, "pg_fence, losing try", Some(60.0)),
    (Kind::Statements, "pg_fence, acquire", None),
    (Kind::Statements, "pg_fence, renew", None),
    (Kind::Statements, "pg_fence, release", None),
    (Kind::Rows, "pg_fence, unbound", Some(5.0)),
    (Kind::Rows, "pg_fence, bound to one lease", Some(5.0)),
    (Kind::OneRow, "pg_fence, unbound", Some(150.0)),
    (Kind::OneRow, "pg_fence, bound to one lease", None),
];

/// What adopting takes is set beside these.
pub const ADOPTING: &[(Kind, &str)] = &[
    (Kind::Calls, "pg_fence, guard, lease known"),
    (Kind::Calls, "adopted, guard, lease known"),
    (Kind::Calls, "adopted, adopt + guard, lease known"),
    (Kind::Calls, "pg_fence, guard"),
    (Kind::Calls, "adopted, guard"),
    (Kind::Calls, "adopted, adopt + guard"),
    (Kind::Statements, "update of a row"),
    (Kind::Statements, "pg_fence, acquire"),
    (Kind::Statements, "pg_fence, release"),
    (Kind::Statements, "adopted, a greater number"),
];

/// Something that is counted.
pub struct Step {
    /// In which table it is shown.
    pub kind: Kind,
    /// Its name in it.
    pub name: &'static str,
    /// An expression, a statement to prepare or a table's name, by its kind.
    sql: &'static str,
    /// What the prepared statement is given.
    given: &'static str,
    /// The session has to do with its leases before they are counted, as a worker with its own.
    known: bool,
}

impl Step {
    /// Is it the one of that kind and name?
    pub fn is(&self, kind: Kind, name: &str) -> bool {
        self.kind == kind && self.name == name
    }

    /// Are its leases adopted, and not granted here?
    fn is_of_adopted(&self) -> bool {
        self.name.starts_with("adopted")
    }
}

const fn call(name: &'static str, sql: &'static str) -> Step {
    Step { kind: Kind::Calls, name, sql, given: "", known: false }
}

const fn call_on_known(name: &'static str, sql: &'static str) -> Step {
    Step { known: true, ..call(name, sql) }
}

const fn statement(name: &'static str, sql: &'static str, given: &'static str) -> Step {
    Step { kind: Kind::Statements, name, sql, given, known: false }
}

const fn rows(name: &'static str, table: &'static str) -> Step {
    Step { kind: Kind::Rows, name, sql: table, given: "", known: false }
}

const fn one_row(name: &'static str, table: &'static str) -> Step {
    Step { kind: Kind::OneRow, name, sql: table, given: "", known: false }
}

/// What all others of its table are set against, or beyond.
pub const LOOP: &str = "the loop alone";
pub const ONE: &str = "SELECT 1";
/// A table without a trigger.
pub const NONE: &str = "none";
pub const MINIMAL: &str = "minimal C trigger";

pub const STEPS: &[Step] = &[
    call(LOOP, "count(token)"),
    call("plpgsql: select of a row", "count(plpgsql_select(name))"),
    call("plpgsql: update of a row", "count(plpgsql_update(name))"),
    // First, for a session remembers a few thousand leases and then forgets them all.
    call_on_known("pg_fence, losing try, lease known", "count(lease_acquire(name, 'other'))"),
    call_on_known("pg_fence, renew, lease known", "count(lease_renew(name, token))"),
    call_on_known("pg_fence, guard, lease known", "count(lease_guard(name, token))"),
    call_on_known("pg_fence, release, lease known", "count(lease_release(name, token))"),
    call("pg_fence, lease_check", "count(*) FILTER (WHERE lease_check(name, token))"),
    call("pg_fence, losing try", "count(lease_acquire(name, 'other'))"),
    call("pg_fence, acquire", "count(lease_acquire(name, 'other'))"),
    call("pg_fence, renew", "count(lease_renew(name, token))"),
    call("pg_fence, release", "count(lease_release(name, token))"),
    call("pg_fence, guard", "count(lease_guard(name, token))"),
    call_on_known("adopted, guard, lease known", "count(lease_guard(name, token))"),
    call_on_known(
        "adopted, adopt + guard, lease known",
        "count(lease_guard(name, lease_adopt(name, token)))",
    ),
    call("adopted, guard", "count(lease_guard(name, token))"),
    call("adopted, adopt + guard", "count(lease_guard(name, lease_adopt(name, token)))"),
    statement(ONE, "SELECT 1", ""),
    statement("select of a row", "SELECT n FROM two WHERE name = $1", "'NAME'"),
    statement("update of a row", "UPDATE two SET n = n + 1 WHERE name = $1 RETURNING n", "'NAME'"),
    statement("plpgsql: update of a row", "SELECT plpgsql_update($1)", "'NAME'"),
    statement("pg_fence, losing try", "SELECT lease_acquire($1, 'other')", "'NAME'"),
    statement("pg_fence, acquire", "SELECT lease_acquire($1, 'other')", "'NAME'"),
    statement("pg_fence, renew", "SELECT lease_renew($1, $2)", "'NAME', TOKEN"),
    statement("pg_fence, release", "SELECT lease_release($1, $2)", "'NAME', TOKEN"),
    statement("adopted, a greater number", "SELECT lease_adopt($1, $2)", "'NAME', TOKEN + 1"),
    rows(NONE, "i_none"),
    rows("empty C trigger", "i_empty"),
    rows(MINIMAL, "i_check"),
    rows("pg_fence, unbound", "i_unbound"),
    rows("pg_fence, bound to one lease", "i_bound"),
    rows("plpgsql for one column", "i_simple"),
    one_row(NONE, "i_none"),
    one_row("empty C trigger", "i_empty"),
    one_row(MINIMAL, "i_check"),
    one_row("pg_fence, unbound", "i_unbound"),
    one_row("pg_fence, bound to one lease", "i_bound"),
    one_row("plpgsql for one column", "i_simple"),
];

/// Those that a short run counts, by their places.
pub fn chosen(short: bool) -> Vec<usize> {
    const SHORT: [&str; 6] =
        [ONE, "update of a row", "pg_fence, renew", NONE, MINIMAL, "pg_fence, unbound"];
    let wanted = |step: &Step| match short {
        true => matches!(step.kind, Kind::Statements | Kind::Rows) && SHORT.contains(&step.name),
        false => !step.is_of_adopted(),
    };
    (0..STEPS.len()).filter(|&index| wanted(&STEPS[index])).collect()
}

const TABLES: &[(&str, &str)] = &[
    ("i_none", ""),
    (
        "i_empty",
        "CREATE TRIGGER t BEFORE UPDATE ON i_empty FOR EACH ROW EXECUTE FUNCTION bench_empty()",
    ),
    (
        "i_check",
        "CREATE TRIGGER t BEFORE UPDATE ON i_check FOR EACH ROW EXECUTE FUNCTION bench_check()",
    ),
    ("i_unbound", "SELECT fence_protect('i_unbound')"),
    ("i_bound", "SELECT fence_protect('i_bound', lease => 'all rows')"),
    (
        "i_simple",
        "CREATE TRIGGER t BEFORE UPDATE ON i_simple FOR EACH ROW EXECUTE FUNCTION bench_simple()",
    ),
];

/// Calls before the first count.
const WARM_UP: usize = 10;

/// A database made ready: each step has rows and leases of its own, by their numbers.
pub struct Course {
    /// How many calls of each step are counted, and then twice as many.
    pub calls: usize,
    tokens: Vec<i64>,
    /// Of the lease that the bound table names; newer than what is in any row.
    token: i64,
}

impl Course {
    /// Makes the tables and leases for so many calls, and twice as many, of each step.
    pub fn lay(bench: &Workbench, session: &mut Session, calls: usize) -> Result<Course> {
        triggers::create(bench.lab, session)?;
        let numbers = STEPS.len() * (WARM_UP + 3 * calls);
        session.run(PLPGSQL)?;
        session.run(&format!(
            "CREATE TABLE two (name text COLLATE \"C\" PRIMARY KEY, n bigint NOT NULL) WITH (fillfactor = 50);
             INSERT INTO two SELECT 'lease' || i, 0 FROM generate_series(0, {numbers} - 1) i;
             CREATE FUNCTION plpgsql_select(the_name text) RETURNS bigint LANGUAGE plpgsql AS $$
             DECLARE found bigint;
             BEGIN SELECT n INTO found FROM two WHERE name = the_name; RETURN found; END$$;
             CREATE FUNCTION plpgsql_update(the_name text) RETURNS bigint LANGUAGE plpgsql AS $$
             DECLARE found bigint;
             BEGIN UPDATE two SET n = n + 1 WHERE name = the_name RETURNING n INTO found; RETURN found; END$$;
             CREATE TABLE lease_of (id integer PRIMARY KEY, name text NOT NULL, token bigint NOT NULL)"
        ))?;
        for (table, sql) in TABLES {
            session.run(&format!(
                "CREATE TABLE {table} (id bigint PRIMARY KEY, v bigint NOT NULL, fence bigint) WITH (fillfactor = 40);
                 INSERT INTO {table} SELECT i, 0, 0 FROM generate_series(0, {numbers} - 1) i; {sql}"
            ))?;
        }
        let of_adopted = STEPS.iter().enumerate().filter(|(_, step)| step.is_of_adopted());
        let is_adopted: Vec<String> = of_adopted
            .map(|(index, _)| numbers_of(index, calls))
            .map(|Range { start, end }| format!("i BETWEEN {start} AND {end} - 1"))
            .collect();
        let is_adopted = is_adopted.join(" OR ");
        // A lock a lease until the transaction ends, so not all at once.
        for first in (0..numbers).step_by(1_500) {
            session.run(&format!(
                "INSERT INTO lease_of SELECT i, 'lease' || i,
                        CASE WHEN {is_adopted} THEN lease_adopt('lease' || i, 34, 'bench')
                             ELSE lease_acquire('lease' || i, 'bench', '300 days') END
                   FROM generate_series({first}, least({first} + 1500, {numbers}) - 1) i"
            ))?;
        }
        for (index, _) in
            STEPS.iter().enumerate().filter(|(_, step)| step.name.ends_with("acquire"))
        {
            let Range { start, end } = numbers_of(index, calls);
            session.run(&format!(
                "SELECT lease_release(name, token) FROM lease_of WHERE id BETWEEN {start} AND {end} - 1"
            ))?;
        }
        let token = session.one("SELECT lease_acquire('all rows', ttl => '300 days')", &[])?;
        session.run("VACUUM ANALYZE")?;
        let tokens = session.one("SELECT array_agg(token ORDER BY id) FROM lease_of", &[])?;
        Ok(Course { calls, tokens, token })
    }

    /// The statements of one step: those that warm it up, so many calls, twice as many.
    pub fn parts(&self, index: usize) -> Result<[Vec<String>; 3]> {
        let Range { start, .. } = numbers_of(index, self.calls);
        let middle = start + WARM_UP;
        let end = middle + self.calls;
        let [warm, once, twice] = [start..middle, middle..end, end..end + 2 * self.calls]
            .map(|part| self.of(index, part));
        let mut warm = warm?;
        warm.splice(0..0, self.prepare(index));
        Ok([warm, once?, twice?])
    }

    fn prepare(&self, index: usize) -> Option<String> {
        let Step { kind, sql, known, .. } = STEPS[index];
        if known {
            let Range { start, end } = numbers_of(index, self.calls);
            return Some(format!(
                "SELECT count(*) FROM lease_of WHERE id BETWEEN {start} AND {end} - 1 AND lease_check(name, token)"
            ));
        }
        match kind {
            Kind::Statements => Some(format!("PREPARE p{index} AS {sql}")),
            Kind::OneRow => Some(format!(
                "PREPARE p{index}(bigint, bigint) AS UPDATE {sql} SET v = v + 1, fence = $2 WHERE id = $1"
            )),
            Kind::Calls | Kind::Rows => None,
        }
    }

    fn of(&self, index: usize, numbers: Range<usize>) -> Result<Vec<String>> {
        let Step { kind, sql, given, .. } = STEPS[index];
        let (first, last) = (numbers.start, numbers.end - 1);
        let token = self.token;
        Ok(match kind {
            Kind::Calls => {
                vec![format!("SELECT {sql} FROM lease_of WHERE id BETWEEN {first} AND {last}")]
            }
            Kind::Rows => vec![format!(
                "UPDATE {sql} SET v = v + 1, fence = {token} WHERE id BETWEEN {first} AND {last}"
            )],
            Kind::OneRow => {
                numbers.map(|number| format!("EXECUTE p{index}({number}, {token})")).collect()
            }
            Kind::Statements => numbers
                .map(|number| {
                    let token = self.tokens.get(number).context("a lease without a token")?;
                    let given = given
                        .replace("NAME", &format!("lease{number}"))
                        .replace("TOKEN", &token.to_string());
                    Ok(match given.is_empty() {
                        true => format!("EXECUTE p{index}"),
                        false => format!("EXECUTE p{index}({given})"),
                    })
                })
                .collect::<Result<Vec<_>>>()?,
        })
    }
}

fn numbers_of(index: usize, calls: usize) -> Range<usize> {
    let each = WARM_UP + 3 * calls;
    index * each..(index + 1) * each
}
