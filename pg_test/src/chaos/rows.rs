//! Row leases: the table, the workers' statements on it, and the log that a trigger writes in the same transactions.

use super::record::{Claimed, Event, Outcome};
use super::worker::{ChaosWorker, OrStop, Stop, Task};
use rand::RngExt;
use rand::seq::IndexedRandom;
use serde::{Deserialize, Serialize};

/// The number of rows, which are also deleted and inserted again.
const ROWS: i32 = 6;
/// The number of latest tokens that a worker remembers, whatever happened to them.
const REMEMBERED: usize = 8;

/// The log of changes is sorted by the order of each row's locks. `held_us` is the remaining life of the old row's
/// claim.
pub const TABLES: &str = "
    CREATE TABLE runs (id int PRIMARY KEY, state text NOT NULL DEFAULT 'ready', attempts int NOT NULL DEFAULT 0,
                       held_until timestamptz);
    CREATE TABLE changes (n bigserial, id int, op text, was bigint, now bigint, held_us bigint, worker int, statement text,
                          uid bigint);
    CREATE FUNCTION log_change() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO public.changes (id, op, was, now, held_us, worker, statement, uid)
        VALUES (coalesce(NEW.id, OLD.id), TG_OP, OLD.fence, NEW.fence,
                (extract(epoch FROM OLD.held_until - clock_timestamp()) * 1000000)::bigint,
                current_setting('chaos.worker')::int, current_setting('chaos.statement'),
                current_setting('chaos.uid')::bigint);
        RETURN NULL;
    END$$;
    SELECT fence_protect('runs', deadline => 'held_until');
    CREATE TRIGGER z_log AFTER INSERT OR UPDATE OR DELETE ON runs FOR EACH ROW EXECUTE FUNCTION log_change();";

/// The purpose of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Statement {
    Claim,
    /// With one of the worker's tokens, like all up to `Delete`.
    Write,
    Renew,
    GiveUp,
    Finish,
    Delete,
    /// Without a token.
    Edit,
    /// A DELETE without a token.
    Drop,
    /// With the row's own token, whoever holds the row.
    Evict,
    /// An INSERT of a row without a holder.
    Create,
}

use Statement::*;

/// The weight of each statement.
const STATEMENTS: [(Statement, u32); 10] = [
    (Claim, 5),
    (Write, 3),
    (Renew, 3),
    (GiveUp, 2),
    (Finish, 2),
    (Delete, 2),
    (Edit, 2),
    (Drop, 1),
    (Evict, 1),
    (Create, 2),
];

impl Statement {
    /// Returns true if the statement presents the worker's own token.
    pub fn shows_token(self) -> bool {
        matches!(self, Write | Renew | GiveUp | Finish | Delete)
    }
}

impl ChaosWorker {
    /// A transaction of a few statements on row leases.
    pub(super) fn work_on_rows(&mut self, task: Task) -> OrStop<Outcome> {
        let level = match self.rng.random_range(0..6) {
            0 => "REPEATABLE READ",
            1 => "SERIALIZABLE",
            _ => "READ COMMITTED",
        };
        let (worker, id) = (self.who.worker, self.id);
        // A worker that waits too long for a prepared transaction tries something else.
        self.sql(&format!(
            "BEGIN ISOLATION LEVEL {level}; SET LOCAL lock_timeout = '500ms';
             SET LOCAL chaos.worker = {worker}; SET LOCAL chaos.uid = '{id}'"
        ))?;
        if self.rng.random_bool(0.3) {
            self.sql("SELECT count(*) FROM runs")?;
            self.think();
        }
        let mut written = 0;
        for _ in 0..self.rng.random_range(1..=3) {
            written += match self.rng.random_bool(0.3) {
                true => self.in_savepoint()?,
                false => self.change_rows()?,
            };
            self.think();
        }
        // No row was free or left, so no trace shows whether the transaction was committed.
        if written == 0 {
            return Err(Stop::Lost);
        }
        if self.rng.random_bool(0.06) {
            return Err(Stop::RolledBack);
        }
        if self.rng.random_bool(0.15) {
            return self.end_in_two_phases(task.lease);
        }
        self.write(Event::Commit)?;
        self.end("COMMIT")?;
        Ok(Outcome::Committed)
    }

    /// Runs a statement in a savepoint, which is rolled back if the fence refuses the statement, and sometimes
    /// otherwise.
    fn in_savepoint(&mut self) -> OrStop<usize> {
        self.sql("SAVEPOINT before")?;
        let written = match self.change_rows() {
            Err(Stop::Fault(fault)) if fault.sqlstate.starts_with("PF") => None,
            written => Some(written?),
        };
        let keeps = written.is_some() && self.rng.random_bool(0.6);
        self.sql(if keeps { "RELEASE before" } else { "ROLLBACK TO before" })?;
        Ok(written.filter(|_| keeps).unwrap_or(0))
    }

    /// Runs one statement, and returns the number of changed rows.
    fn change_rows(&mut self) -> OrStop<usize> {
        let drawn = STATEMENTS.choose_weighted(&mut self.rng, |(_, weight)| *weight);
        let statement = drawn.expect("weights").0;
        let own = self.claimed.choose(&mut self.rng).copied();
        let statement = if statement.shows_token() && own.is_none() { Claim } else { statement };
        let any = self.rng.random_range(0..ROWS);
        let sql = match own.filter(|_| statement.shows_token()) {
            Some(own) => self.by_token(statement, own),
            None => self.by_anybody(statement, any),
        };
        let rows = self.sql(&format!("SET LOCAL chaos.statement = '{statement:?}'; {sql}"))?;
        if statement == Claim {
            for row in &rows {
                let number = |column: usize| row[column].as_deref().and_then(|n| n.parse().ok());
                let (Some(id), Some(token)) = (number(0), number(1)) else { continue };
                // The transaction has claimed the row before, so this was a renewal.
                if !self.claimed.contains(&(id as i32, token)) {
                    self.claimed.push((id as i32, token));
                    self.write(Event::Token(token))?;
                }
            }
            let forgotten = self.claimed.len().saturating_sub(REMEMBERED);
            self.claimed.drain(..forgotten);
        }
        Ok(rows.len())
    }

    /// A statement that presents one or more tokens.
    fn by_token(&mut self, statement: Statement, (id, token): Claimed) -> String {
        let ahead = self.deadline();
        let set = match statement {
            Renew if self.rng.random_bool(0.3) => {
                let list = |column: fn(&Claimed) -> i64| {
                    let numbers: Vec<String> =
                        self.claimed.iter().map(|one| column(one).to_string()).collect();
                    numbers.join(",")
                };
                let (ids, tokens) = (list(|one| one.0.into()), list(|one| one.1));
                return format!(
                    "WITH mine AS (SELECT r.id, r.fence FROM runs r
                         JOIN unnest('{{{ids}}}'::int[], '{{{tokens}}}'::bigint[]) AS m (id, fence)
                           ON r.id = m.id AND r.fence = m.fence
                          FOR NO KEY UPDATE OF r SKIP LOCKED)
                     UPDATE runs SET held_until = {ahead}, fence = mine.fence FROM mine
                      WHERE runs.id = mine.id RETURNING runs.id"
                );
            }
            Renew => format!("held_until = {ahead}"),
            GiveUp => "state = 'ready', held_until = NULL".to_owned(),
            Finish => "state = 'done', held_until = NULL".to_owned(),
            Delete => {
                return format!(
                    "SET LOCAL pg_fence.token = '{token}'; DELETE FROM runs WHERE id = {id} RETURNING id;
                     SET LOCAL pg_fence.token = ''"
                );
            }
            _ => "attempts = attempts + 1".to_owned(),
        };
        format!("UPDATE runs SET {set}, fence = {token} WHERE id = {id} RETURNING id")
    }

    /// A statement that presents no token of the worker.
    fn by_anybody(&mut self, statement: Statement, id: i32) -> String {
        match statement {
            Edit => format!("UPDATE runs SET attempts = attempts + 1 WHERE id = {id} RETURNING id"),
            Drop => format!("DELETE FROM runs WHERE id = {id} RETURNING id"),
            Evict => format!(
                "UPDATE runs SET state = 'cancelled', held_until = NULL, fence = fence WHERE id = {id}
                 RETURNING id"
            ),
            Create => {
                format!("INSERT INTO runs (id) VALUES ({id}) ON CONFLICT DO NOTHING RETURNING id")
            }
            _ => self.claim(id),
        }
    }

    /// A claim, in one of the forms that people write.
    fn claim(&mut self, id: i32) -> String {
        let set = format!("state = 'running', held_until = {}", self.deadline());
        let free = "(held_until IS NULL OR held_until < now())";
        match self.rng.random_range(0..5) {
            0 => format!(
                "UPDATE runs SET {set} WHERE id = (SELECT id FROM runs WHERE {free} ORDER BY random() LIMIT 1
                    FOR UPDATE SKIP LOCKED) RETURNING id, fence"
            ),
            1 => format!(
                "WITH free AS (SELECT id FROM runs WHERE {free} LIMIT {} FOR NO KEY UPDATE SKIP LOCKED)
                 UPDATE runs SET {set} FROM free WHERE runs.id = free.id RETURNING runs.id, fence",
                self.rng.random_range(1..=2)
            ),
            2 => format!(
                "UPDATE runs SET {set} WHERE id = {id} AND (held_until IS NULL OR held_until < clock_timestamp())
                 RETURNING id, fence"
            ),
            3 => format!("UPDATE runs SET {set} WHERE id = {id} RETURNING id, fence"),
            _ => format!(
                "INSERT INTO runs (id, state, held_until) VALUES ({id}, 'running', {})
                 ON CONFLICT (id) DO UPDATE SET held_until = EXCLUDED.held_until RETURNING id, fence",
                self.deadline()
            ),
        }
    }

    /// A deadline that passes soon, or later.
    fn deadline(&mut self) -> String {
        let ms = [5, 30, 200, 1_000][self.rng.random_range(0..4)];
        format!("clock_timestamp() + '{ms} ms'")
    }
}
