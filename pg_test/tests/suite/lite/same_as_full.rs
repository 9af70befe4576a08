//! Single writes to fenced tables, enumerated: what a row has × what a statement brings, on both editions. They must
//! answer alike, by the same SQLSTATE or the same values in the row, but for documented differences. Each write is rolled
//! back, so that each case meets the same rows. What follows upon what is for histories.rs.

use pg_test::skipped::left_out;
use pg_test::source_tree::source_root;
use pg_test::{Database, Harness, Result, Session, bail, edition, ensure, harness_test};
use std::collections::BTreeSet;

/// The numbers and deadlines of the cases. They have names, because tokens and times are others in each database.
const NAMES: &str = "
    CREATE TABLE numbers (name text PRIMARY KEY, value bigint);
    INSERT INTO numbers VALUES ('NULL', NULL), ('negative', -5), ('zero', 0), ('never issued', 1::bigint << 60);

    -- Tokens, in the order in which they are drawn. The lease A has had the revoked one; the first and the renewed one
    -- speak for it. The other one is of the lease B, the later one of C.
    INSERT INTO numbers SELECT 'revoked', lease_acquire('A');
    SELECT lease_revoke('A');
    INSERT INTO numbers SELECT 'first', lease_acquire('A', ttl => '1 d');
    INSERT INTO numbers SELECT 'other', lease_acquire('B', ttl => '1 d');
    INSERT INTO numbers SELECT 'renewed', lease_renew('A', value) FROM numbers WHERE name = 'first';
    INSERT INTO numbers SELECT 'later', lease_acquire('C', ttl => '1 d');

    -- They are no whole milliseconds, so that a deadline may equal another to the millisecond.
    CREATE TABLE deadlines (name text PRIMARY KEY, value timestamptz);
    INSERT INTO deadlines
    SELECT name, date_trunc('day', now()) + days * interval '1 day' + interval '0.4 ms'
    FROM (VALUES ('past', -10), ('sooner', 10), ('ahead', 20), ('later', 30), ('far', 400)) AS d (name, days);
    INSERT INTO deadlines VALUES ('NULL', NULL), ('infinity', 'infinity'), ('-infinity', '-infinity');

    CREATE FUNCTION number(name text) RETURNS bigint LANGUAGE sql STABLE
    BEGIN ATOMIC SELECT value FROM numbers AS n WHERE n.name = $1; END;

    -- The name of a fence that a write has left in its row.
    CREATE FUNCTION name_of(number bigint) RETURNS text LANGUAGE sql STABLE
    BEGIN ATOMIC
      SELECT coalesce(
        (SELECT name FROM numbers WHERE value IS NOT DISTINCT FROM number),
        CASE WHEN number > number('later') THEN 'a drawn one' END,
        number::text);
    END;

    -- What the transaction has beside the fence column, before it writes. No setting is below 1: the extension refuses
    -- that when it is set, lite when a row is written.
    CREATE FUNCTION prepare(setting text, guard text) RETURNS void LANGUAGE plpgsql AS $$
    BEGIN
      IF guard <> 'none' THEN
        PERFORM lease_guard(CASE guard WHEN 'other' THEN 'B' ELSE 'A' END, number(guard));
      END IF;
      IF setting <> 'none' THEN
        PERFORM set_config('pg_fence.token', number(setting)::text, true);
      END IF;
    END $$;
";

/// Rows that are leases of their own. `write` makes the write of a case, and returns what the row has then.
const ROW_LEASES: &str = "
    CREATE TABLE work (
      stored_fence text,
      stored_deadline text,
      note text,
      fence bigint,
      held_until timestamptz,
      PRIMARY KEY (stored_fence, stored_deadline)
    );
    INSERT INTO work
    SELECT n.name, d.name, 'as stored', n.value, d.value
    FROM numbers AS n CROSS JOIN deadlines AS d
    WHERE n.name IN ('NULL', 'negative', 'zero', 'first', 'never issued') AND d.name NOT IN ('sooner', 'later');

    CREATE TABLE cases AS
    SELECT *
    FROM string_to_table('UPDATE, DELETE, INSERT', ', ') AS statement
    CROSS JOIN (SELECT stored_fence, stored_deadline FROM work UNION ALL VALUES ('no row', 'no row')) AS w
    CROSS JOIN string_to_table('unnamed, NULL, negative, zero, revoked, first, later, never issued', ', ') AS presented
    CROSS JOIN string_to_table('none, revoked, first, later, never issued', ', ') AS setting
    CROSS JOIN string_to_table('none, first', ', ') AS guard
    CROSS JOIN string_to_table('unnamed, kept, milliseconds, NULL, past, sooner, later, far, infinity, -infinity', ', ')
      AS new_deadline
    WHERE (statement = 'INSERT') = (stored_fence = 'no row')
      AND (statement <> 'INSERT' OR new_deadline NOT IN ('kept', 'milliseconds'))
      AND (statement <> 'DELETE' OR presented = 'unnamed' AND new_deadline = 'unnamed')
      -- A setting or a guard matters most where the column presents nothing, or the row's own token.
      AND (setting = 'none' AND guard = 'none' OR presented IN ('unnamed', 'NULL', 'first'))
      AND (guard = 'none' OR setting IN ('none', 'first') AND new_deadline IN ('unnamed', 'NULL', 'later'));

    CREATE FUNCTION write(c cases) RETURNS text LANGUAGE plpgsql AS $$
    DECLARE
      place text := format('stored_fence = %L AND stored_deadline = %L', c.stored_fence, c.stored_deadline);
      stored timestamptz := (SELECT value FROM deadlines WHERE name = c.stored_deadline);
      given timestamptz := CASE c.new_deadline
        WHEN 'kept' THEN stored
        WHEN 'milliseconds' THEN date_trunc('milliseconds', stored)
        ELSE (SELECT value FROM deadlines WHERE name = c.new_deadline)
      END;
      fence bigint;
      deadline timestamptz;
    BEGIN
      PERFORM prepare(c.setting, c.guard);
      IF c.statement = 'DELETE' THEN
        EXECUTE 'DELETE FROM work WHERE ' || place;
        RETURN 'deleted';
      ELSIF c.statement = 'INSERT' THEN
        INSERT INTO work AS w VALUES ('no row', 'no row', 'new', number(c.presented), given)
        RETURNING w.fence, w.held_until INTO fence, deadline;
      ELSE
        EXECUTE concat(
          'UPDATE work SET note = ''written''',
          CASE WHEN c.presented <> 'unnamed' THEN format(', fence = %L', number(c.presented)) END,
          CASE WHEN c.new_deadline <> 'unnamed' THEN format(', held_until = %L', given) END,
          ' WHERE ', place, ' RETURNING fence, held_until')
        INTO fence, deadline;
      END IF;
      RETURN format('fence %s, deadline %s', name_of(fence), CASE
        WHEN deadline IS NOT DISTINCT FROM stored THEN 'as stored'
        WHEN deadline IS NOT DISTINCT FROM given THEN 'as given'
        ELSE coalesce(deadline::text, 'NULL')
      END);
    END $$;
";

/// Rows that are bound to the lease in their column `lease`, or to none.
const OTHER_FENCES: &str = "
    CREATE TABLE orders (
      stored_fence text,
      stored_lease text,
      note text,
      lease text,
      fence bigint,
      PRIMARY KEY (stored_fence, stored_lease)
    );
    INSERT INTO orders
    SELECT n.name, l, 'as stored', nullif(l, 'NULL'), n.value
    FROM numbers AS n CROSS JOIN string_to_table('A, NULL', ', ') AS l;

    CREATE TABLE cases AS
    SELECT *
    FROM string_to_table('UPDATE, DELETE, INSERT', ', ') AS statement
    CROSS JOIN (SELECT name FROM numbers UNION ALL VALUES ('no row')) AS n (stored_fence)
    CROSS JOIN string_to_table('A, NULL', ', ') AS stored_lease
    CROSS JOIN (SELECT name FROM numbers UNION ALL VALUES ('unnamed')) AS p (presented)
    CROSS JOIN string_to_table('none, revoked, first, renewed, later, never issued', ', ') AS setting
    CROSS JOIN string_to_table('none, first, renewed, other', ', ') AS guard
    CROSS JOIN string_to_table('kept, B, NULL, empty', ', ') AS new_lease
    WHERE (statement = 'INSERT') = (stored_fence = 'no row')
      AND (statement <> 'INSERT' OR new_lease = 'kept')
      AND (statement <> 'DELETE' OR presented = 'unnamed' AND new_lease = 'kept')
      -- A row without a lease that is given an impossible one has two faults, of which any may be told.
      AND (stored_lease = 'A' OR new_lease IN ('kept', 'B'))
      -- A setting or a guard matters most where the column presents nothing, or a token of the row's lease.
      AND (setting = 'none' AND guard = 'none' OR presented IN ('unnamed', 'NULL', 'first', 'renewed'))
      AND (guard = 'none' OR setting IN ('none', 'renewed'));

    CREATE FUNCTION write(c cases) RETURNS text LANGUAGE plpgsql AS $$
    DECLARE
      place text := format('stored_fence = %L AND stored_lease = %L', c.stored_fence, c.stored_lease);
      fence bigint;
    BEGIN
      PERFORM prepare(c.setting, c.guard);
      IF c.statement = 'DELETE' THEN
        EXECUTE 'DELETE FROM orders WHERE ' || place;
        RETURN 'deleted';
      ELSIF c.statement = 'INSERT' THEN
        INSERT INTO orders AS o
        VALUES ('no row', c.stored_lease, 'new', nullif(c.stored_lease, 'NULL'), number(c.presented))
        RETURNING o.fence INTO fence;
      ELSE
        EXECUTE concat(
          'UPDATE orders SET note = ''written''',
          CASE WHEN c.presented <> 'unnamed' THEN format(', fence = %L', number(c.presented)) END,
          CASE c.new_lease
            WHEN 'B' THEN ', lease = ''B'''
            WHEN 'NULL' THEN ', lease = NULL'
            WHEN 'empty' THEN ', lease = '''''
          END,
          ' WHERE ', place, ' RETURNING fence')
        INTO fence;
      END IF;
      RETURN 'fence ' || name_of(fence);
    END $$;
";

/// Runs a case, and takes back what it has done.
const OUTCOME: &str = "
    CREATE FUNCTION outcome(c cases) RETURNS text LANGUAGE plpgsql AS $$
    DECLARE
      written text;
    BEGIN
      written := write(c);
      RAISE SQLSTATE 'ZZ000';
    EXCEPTION
      WHEN SQLSTATE 'ZZ000' THEN RETURN written;
      WHEN OTHERS THEN RETURN SQLSTATE;
    END $$;
";

/// The writes of an apply worker: triggers that fire for it check the order alone.
const APPLIED: &str = "SET LOCAL session_replication_role = replica";

/// Makes the present version of each row the transaction's own.
const OWN_ROWS: &str = "
    SET LOCAL session_replication_role = replica;
    UPDATE work SET note = 'own';
    SET LOCAL session_replication_role = origin";

/// A table, and the ways to fence it.
struct Group {
    /// Creates the table, the cases, and the function that makes the write of a case.
    tables: &'static str,
    fences: Vec<Fence>,
    /// The errors that the cases come to.
    sqlstates: &'static [&'static str],
    /// Words of docs/reference/lite.md, and the cases in which the editions may differ for that reason.
    exceptions: &'static [(&'static str, &'static str)],
}

struct Fence {
    protect: String,
    /// What the transaction of all cases does before them.
    before: &'static str,
    /// Which cases are tried.
    cases: &'static str,
}

#[derive(PartialEq)]
struct Answer {
    case: String,
    outcome: String,
    is_exception: bool,
}

impl Group {
    /// The answers of an edition: for each fence, those of its cases.
    fn answers(&self, db: &Database) -> Result<Vec<Vec<Answer>>> {
        let mut session = db.connect()?;
        session.run("SET client_min_messages = error")?;
        session.run(&[NAMES, self.tables, OUTCOME].concat())?;
        self.fences.iter().map(|fence| self.answers_with(&mut session, fence)).collect()
    }

    fn answers_with(&self, session: &mut Session, fence: &Fence) -> Result<Vec<Answer>> {
        let excepted = self.exceptions.iter().map(|(_, cases)| format!(" OR {cases}"));
        session.run(&fence.protect)?;
        session.run(&format!("BEGIN; {}", fence.before))?;
        let rows = session.rows(&format!(
            "SELECT translate(to_json(c)::text, '{{}}\"', ''), outcome(c), false{} FROM cases AS c WHERE {} ORDER BY 1",
            excepted.collect::<String>(),
            fence.cases
        ))?;
        session.run("ROLLBACK")?;
        let answer = |row: Vec<Option<String>>| match &row[..] {
            [Some(case), Some(outcome), Some(excepted)] => Ok(Answer {
                case: case.replace(',', ", "),
                outcome: outcome.clone(),
                is_exception: excepted == "t",
            }),
            _ => bail!("{row:?}"),
        };
        rows.into_iter().map(answer).collect()
    }

    /// Tries all cases on both editions, at the same time, and compares the answers.
    fn is_written_alike(&self, harness: &Harness) -> Result<()> {
        if edition::is_lite() {
            return left_out("it tries the other edition, too");
        }
        let page = std::fs::read_to_string(source_root().join("docs/reference/lite.md"))?;
        for (words, _) in self.exceptions {
            ensure!(page.contains(words), "the page does not say: {words}");
        }
        let full = harness.database()?;
        let lite = Database::with_lite(harness.cluster().conninfo("postgres"))?;
        let (full, lite) = std::thread::scope(|scope| {
            let lite = scope.spawn(|| self.answers(&lite));
            (self.answers(&full), lite.join().expect("it does not panic"))
        });

        let (mut count, mut exceptions, mut differing) = (0, 0, Vec::new());
        let mut sqlstates = BTreeSet::new();
        for ((fence, full), lite) in self.fences.iter().zip(full?).zip(lite?) {
            ensure!(full.len() == lite.len(), "{}: {}, {}", fence.protect, full.len(), lite.len());
            count += full.len();
            for (full, lite) in full.into_iter().zip(lite) {
                if full == lite {
                    sqlstates.extend(Some(full.outcome).filter(|outcome| outcome.len() == 5));
                } else if full.is_exception {
                    exceptions += 1;
                } else {
                    differing.push(format!(
                        "{}; BEGIN; {}\n  {}\n  the extension: {}\n  lite: {}",
                        fence.protect, fence.before, full.case, full.outcome, lite.outcome
                    ));
                }
            }
        }
        println!("{count} cases, {exceptions} of them answered differently by design");
        ensure!(
            differing.is_empty(),
            "{} cases differ, the first of them:\n{}",
            differing.len(),
            differing[..differing.len().min(10)].join("\n")
        );
        ensure!(sqlstates.iter().eq(self.sqlstates), "{sqlstates:?}");
        ensure!((exceptions > 0) != self.exceptions.is_empty(), "{exceptions} exceptions");
        Ok(())
    }
}

#[harness_test]
fn rows_that_are_leases_are_written_alike(harness: &Harness) -> Result<()> {
    let mut fences = Vec::new();
    for mode in ["monotonic", "managed"] {
        for (before, always, cases) in [
            ("", false, "true"),
            (OWN_ROWS, false, "stored_fence <> 'no row'"),
            (APPLIED, true, "guard = 'none' AND setting IN ('none', 'later')"),
        ] {
            let protect = format!(
                "SELECT fence_protect('work', mode => '{mode}', deadline => 'held_until', always => {always})"
            );
            fences.push(Fence { protect, before, cases });
        }
    }
    let sqlstates = &["22023", "PF001", "PF002", "PF003", "PF004", "PF006"];
    Group { tables: ROW_LEASES, fences, sqlstates, exceptions: &[] }.is_written_alike(harness)
}

#[harness_test]
fn rows_with_other_fences_are_written_alike(harness: &Harness) -> Result<()> {
    let mut fences = Vec::new();
    let unbound = "stored_lease = 'A' AND new_lease = 'kept'";
    for mode in ["strict", "monotonic", "managed"] {
        for (lease, cases) in [("NULL", unbound), ("'{lease}'", "true")] {
            for events in ["insert,update,delete", "update"] {
                let protect = format!(
                    "SELECT fence_unprotect('orders'), fence_protect('orders', mode => '{mode}', lease => {lease}, events => '{events}')"
                );
                fences.push(Fence { protect, before: "", cases });
            }
        }
        let protect = format!(
            "SELECT fence_protect('orders', mode => '{mode}', events => 'insert,update,delete', always => true)"
        );
        let cases = "guard = 'none' AND setting IN ('none', 'later')";
        fences.push(Fence { protect, before: APPLIED, cases });
    }
    Group {
        tables: OTHER_FENCES,
        fences,
        sqlstates: &["22004", "22023", "PF001", "PF002", "PF003", "PF004"],
        exceptions: &[(
            "beside the column, a transaction has one token",
            "guard <> 'none' AND setting NOT IN ('none', guard)",
        )],
    }
    .is_written_alike(harness)
}
