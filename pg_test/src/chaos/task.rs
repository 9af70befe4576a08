//! The statements of a transaction, and the traces that it leaves in the database.

use super::lease_kind::{LeaseKind, row_of};
use super::record::{Event, Outcome, Purpose, TTL_MS};
use super::resolver;
use super::worker::{ChaosWorker, HeldLease, OrStop, Stop, Task};
use crate::client::Rows;
use crate::edition;
use rand::RngExt;

/// The changes of the worker's belief after the commit: the grants that it has, and those that it has lost.
type Change = Vec<(i32, Option<HeldLease>)>;

impl ChaosWorker {
    /// Runs the transaction up to its end.
    pub(super) fn run_task(&mut self, task: Task, held: Option<HeldLease>) -> OrStop<Outcome> {
        if task.purpose == Purpose::Lazy {
            return self.draw_lazily();
        }
        if task.purpose == Purpose::Row {
            return self.work_on_rows(task);
        }
        self.sql("BEGIN")?;
        self.think();
        let change = match (task.purpose, held) {
            (Purpose::Acquire | Purpose::Share, _) => self.acquire(task)?,
            (Purpose::AcquireAll, _) => self.acquire_all(task)?,
            (Purpose::Adopt, _) => self.adopt_granted(task.lease)?,
            (Purpose::Release, Some(held)) if LeaseKind::of(task.lease) == LeaseKind::Adopted => {
                self.release_adopted(task.lease, held)?
            }
            (Purpose::Renew, Some(held)) => self.renew(task, held)?,
            (Purpose::Release, Some(held)) => {
                self.draw("release", task.lease, held)?;
                vec![(task.lease, None)]
            }
            (Purpose::Guarded, Some(held)) => self.write_guarded(task.lease, held)?,
            (Purpose::Bound, Some(held)) => self.write_bound(task.lease, held)?,
            (Purpose::Free, Some(held)) => self.write_free(task.lease, held)?,
            (_, None) | (Purpose::Lazy | Purpose::Row, _) => return Err(Stop::RolledBack),
        };
        if self.rng.random_bool(0.04) {
            return Err(Stop::RolledBack);
        }
        if task.purpose.writes() && self.rng.random_bool(0.15) {
            return self.end_in_two_phases(task.lease);
        }
        self.write(Event::Commit)?;
        self.end("COMMIT")?;
        for (lease, held) in change {
            match held {
                Some(held) => {
                    if task.session && !self.session_bound.contains(&held.first) {
                        self.session_bound.push(held.first);
                    }
                    self.held.insert(lease, held);
                    self.lost.remove(&lease);
                }
                None => self.lose(lease),
            }
        }
        Ok(Outcome::Committed)
    }

    /// Releases all the session locks, which ends the session leases. The worker continues to believe in its grants.
    pub(super) fn unlock_session(&mut self) -> OrStop<()> {
        self.write(Event::Unlock)?;
        let all = self.rng.random_bool(0.5);
        self.sql(if all { "DISCARD ALL" } else { "SELECT pg_advisory_unlock_all()" })?;
        let firsts = std::mem::take(&mut self.session_bound);
        self.write(Event::SessionEnded(firsts))?;
        Ok(())
    }

    /// Prepares the transaction, and finishes it later or leaves that to the resolver.
    pub(super) fn end_in_two_phases(&mut self, lease: i32) -> OrStop<Outcome> {
        let id = self.id;
        // A lease does not separate transactions of the same holder, so the worker begins no other until this one is
        // finished.
        let held = (self.held.remove(&lease), self.lost.remove(&lease));
        self.prepared_for.push(lease);
        self.write(Event::Prepare)?;
        self.end(&format!("PREPARE TRANSACTION '{}'", resolver::gid_of(id)))?;
        self.write(Event::Prepared)?;
        if self.rng.random_bool(0.3) {
            return Ok(Outcome::Prepared);
        }
        self.think();
        self.stall(0.2);
        let commit = self.rng.random_bool(0.8);
        self.write(Event::Finish { commit })?;
        let outcome = resolver::finish(self.session(), id, commit);
        match outcome {
            Outcome::Unknown => self.hang_up(),
            Outcome::Committed | Outcome::RolledBack => {
                self.held.extend(held.0.map(|held| (lease, held)));
                self.lost.extend(held.1.map(|lost| (lease, lost)));
            }
            _ => {}
        }
        self.write(Event::Finished(outcome))?;
        Ok(Outcome::Prepared)
    }

    /// Draws tokens in asynchronous transactions, so that no other commit flushes the WAL for them.
    fn draw_lazily(&mut self) -> OrStop<Outcome> {
        for _ in 0..4 {
            // Set for this transaction only: later commits of the session count as flushed.
            let rows = self.sql(&format!(
                "BEGIN; SET LOCAL synchronous_commit = off;
                 SELECT lease_acquire('lazy:{}', ttl => '1 ms', reclaim => true, holder => 'me'); COMMIT",
                self.who.worker
            ))?;
            self.seen(&rows[0][0])?;
        }
        Ok(Outcome::Committed)
    }

    /// Records a returned token, or interprets NULL.
    fn seen(&mut self, value: &Option<String>) -> OrStop<i64> {
        let token = value.as_deref().and_then(|text| text.parse().ok()).ok_or(Stop::Lost)?;
        self.write(Event::Token(token))?;
        Ok(token)
    }

    fn acquire(&mut self, task: Task) -> OrStop<Change> {
        let lease = task.lease;
        let wait = [0, 0, 300, 1200][self.rng.random_range(0..4)];
        let reclaim = self.who.incarnation > 0 && self.rng.random_bool(0.3);
        let shared = task.purpose == Purpose::Share;
        let slots = if let LeaseKind::Slots(slots) = LeaseKind::of(lease) { slots } else { 1 };
        let rows = self.sql(&format!(
            "SELECT clock_timestamp(), lease_acquire('job:{lease}', holder => 'worker {}',
               ttl => '{TTL_MS} ms', wait => '{wait} ms', reclaim => {reclaim},
               shared => {shared}, slots => {slots}, session => {})",
            self.who.worker, task.session
        ))?;
        let token = self.seen(&rows[0][1])?;
        let held = HeldLease { token, first: token, shared };
        let purpose = if shared { "share" } else { "acquire" };
        self.note(lease, purpose, held, &rows[0][0])?;
        Ok(vec![(lease, Some(held))])
    }

    fn acquire_all(&mut self, task: Task) -> OrStop<Change> {
        let leases = [Some(task.lease), task.also];
        let names: Vec<_> = leases.iter().flatten().map(|lease| format!("job:{lease}")).collect();
        let rows = self.sql(&format!(
            "SELECT clock_timestamp(), lease_acquire_all('{{{}}}', holder => 'worker {}',
               ttl => '{TTL_MS} ms', session => {})",
            names.join(","),
            self.who.worker,
            task.session
        ))?;
        let token = self.seen(&rows[0][1])?;
        let held = HeldLease { token, first: token, shared: false };
        let mut change = Vec::new();
        for lease in leases.into_iter().flatten() {
            self.note(lease, "acquire", held, &rows[0][0])?;
            change.push((lease, Some(held)));
        }
        Ok(change)
    }

    /// Renews by one of the calls. Leases acquired together are renewed together.
    fn renew(&mut self, task: Task, held: HeldLease) -> OrStop<Change> {
        if task.also.is_none() && (edition::is_lite() || self.rng.random_bool(0.5)) {
            let token = self.draw("renew", task.lease, held)?;
            return Ok(vec![(task.lease, Some(HeldLease { token, ..held }))]);
        }
        let token_of = |lease| self.held.get(&lease).map_or(held.token, |held| held.token);
        let leases: Vec<i32> = [Some(task.lease), task.also].into_iter().flatten().collect();
        let names: Vec<_> = leases.iter().map(|lease| format!("job:{lease}")).collect();
        let tokens: Vec<_> = leases.iter().map(|lease| token_of(*lease).to_string()).collect();
        // Read in a statement of its own; in the next one it would be read after the rows.
        let requested = self.sql("SELECT clock_timestamp()")?.remove(0).remove(0);
        let rows = self.sql(&format!(
            "SELECT renewed, outcome FROM lease_keep('{{{}}}', '{{{}}}')",
            names.join(","),
            tokens.join(",")
        ))?;
        let outcomes: Vec<_> = rows.iter().map(|row| row[1].as_deref().unwrap_or("")).collect();
        match outcomes.as_slice() {
            ["lost", ..] => return Err(Stop::Lost),
            all if all.iter().all(|outcome| *outcome == "kept") => {}
            // One of the leases is locked.
            _ => return Err(Stop::RolledBack),
        }
        let token = self.seen(&rows[0][0])?;
        let mut change = Vec::new();
        for lease in leases {
            let held = HeldLease { token, ..held };
            self.note(lease, "renew", held, &requested)?;
            change.push((lease, Some(held)));
        }
        Ok(change)
    }

    /// Renews or releases (`what`), and returns the new token.
    fn draw(&mut self, purpose: &str, lease: i32, held: HeldLease) -> OrStop<i64> {
        let call = format!("lease_{purpose}('job:{lease}', {})", held.token);
        let rows = self.sql(&format!("SELECT clock_timestamp(), {call}"))?;
        let token = self.seen(&rows[0][1])?;
        self.note(lease, purpose, HeldLease { token, ..held }, &rows[0][0])?;
        Ok(token)
    }

    fn write_guarded(&mut self, lease: i32, held: HeldLease) -> OrStop<Change> {
        let (table, row) = row_of(lease, self.who.worker);
        if LeaseKind::of(lease) == LeaseKind::Adopted && self.rng.random_bool(0.7) {
            self.adopt(lease, held.token)?;
        }
        self.sql(&format!("SELECT lease_guard('job:{lease}', {})", held.token))?;
        self.write(Event::Guarded)?;
        // Only an exclusive lease protects a row that was read. (A worker may have two slots, if it has left a prepared
        // transaction with one.)
        let lock = if LeaseKind::of(lease) == LeaseKind::Exclusive { "" } else { "FOR UPDATE" };
        let rows = self.sql(&format!("SELECT version FROM {table} WHERE id = {row} {lock}"))?;
        let read: i64 = rows[0][0].as_deref().and_then(|text| text.parse().ok()).unwrap_or(0);
        self.think();
        let rows = self.sql(&format!(
            "UPDATE {table} SET version = {}, uid = {}, fence = {} WHERE id = {row}
             RETURNING version, fence",
            read + 1,
            self.id,
            held.token
        ))?;
        self.wrote((table, row), lease, &rows, held)
    }

    fn write_bound(&mut self, lease: i32, held: HeldLease) -> OrStop<Change> {
        let (table, row) = row_of(lease, self.who.worker);
        let rows = self.sql(&format!(
            "UPDATE {table} SET version = version + 1, uid = {}, fence = {} WHERE id = {row}
             RETURNING version, fence",
            self.id, held.token
        ))?;
        self.write(Event::Guarded)?;
        self.wrote((table, row), lease, &rows, held)
    }

    fn write_free(&mut self, lease: i32, held: HeldLease) -> OrStop<Change> {
        let by_setting = self.rng.random_bool(0.4);
        let column = if by_setting {
            self.sql(&format!("SET LOCAL pg_fence.token = '{}'", held.token))?;
            String::new()
        } else {
            format!(", fence = {}", held.token)
        };
        let rows = self.sql(&format!(
            "UPDATE free SET version = version + 1, uid = {}{column} WHERE id = {lease}
             RETURNING version, fence",
            self.id
        ))?;
        self.wrote(("free", lease), lease, &rows, held)
    }

    /// Acquires from the lock service, and adopts the grant.
    fn adopt_granted(&mut self, lease: i32) -> OrStop<Change> {
        let number = self.service.grant(lease)?.ok_or(Stop::Lost)?;
        // A freeze at this point makes the adoption late.
        self.think();
        self.adopt(lease, number)?;
        Ok(vec![(lease, Some(HeldLease { token: number, first: number, shared: false }))])
    }

    /// Adopts a number, and leaves a trace of a new one in the order of the lease's locks.
    fn adopt(&mut self, lease: i32, number: i64) -> OrStop<()> {
        let wait = [0, 0, 300, 1200][self.rng.random_range(0..4)];
        let rows = self.sql(&format!(
            "SELECT lease_adopt('job:{lease}', {number}, 'worker {}', wait => '{wait} ms')",
            self.who.worker
        ))?;
        if rows[0][0].is_none() {
            // A grant that was ended must stay ended, so that the next attempt continues from there.
            if self.rng.random_bool(0.7) {
                self.sql("COMMIT")?;
            }
            return Err(Stop::Lost);
        }
        self.write(Event::Adopted(number))?;
        self.think();
        self.sql(&format!(
            "WITH next AS (UPDATE line SET n = n + 1 WHERE lease = {lease} AND NOT EXISTS
                  (SELECT FROM grants WHERE lease = {lease} AND what = 'acquire' AND first = {number})
                  RETURNING n)
             INSERT INTO grants SELECT {lease}, coalesce(n, 0), CASE WHEN n IS NULL THEN 'again' ELSE 'acquire' END,
                    {number}, {number}, {}
               FROM (SELECT 1) AS one LEFT JOIN next ON true",
            self.id
        ))?;
        Ok(())
    }

    /// Releases an adopted lease, here and then in the lock service.
    fn release_adopted(&mut self, lease: i32, held: HeldLease) -> OrStop<Change> {
        let number = held.token;
        let rows = self.sql(&format!("SELECT lease_release('job:{lease}', {number})"))?;
        if rows[0][0].is_none() {
            self.service.release(lease)?;
            return Err(Stop::Lost);
        }
        self.sql(&format!(
            "INSERT INTO grants VALUES ({lease}, 0, 'release', {number}, {number}, {})",
            self.id
        ))?;
        Ok(vec![(lease, None)])
    }

    /// Leaves a trace of a grant's token in the database, for an exclusive lease in the order of its locks.
    fn note(
        &mut self,
        lease: i32,
        purpose: &str,
        held: HeldLease,
        requested: &Option<String>,
    ) -> OrStop<()> {
        let requested = requested.as_deref().unwrap_or("now");
        let HeldLease { token, first, .. } = held;
        self.think();
        let next = match LeaseKind::of(lease) {
            LeaseKind::Exclusive => {
                format!("UPDATE line SET n = n + 1 WHERE lease = {lease} RETURNING n")
            }
            _ => "SELECT 0 AS n".to_owned(),
        };
        self.sql(&format!(
            "WITH next AS ({next})
             INSERT INTO grants SELECT {lease}, n, '{purpose}', {token}, {first}, {}, '{requested}',
                    (SELECT max(expires_at) FROM fence.leases
                      WHERE name = 'job:{lease}' AND token = {token})
               FROM next",
            self.id
        ))?;
        Ok(())
    }

    /// Leaves a trace of a write in the database, with the grant that is current at its end.
    fn wrote(
        &mut self,
        (table, row): (&str, i32),
        lease: i32,
        rows: &Rows,
        held: HeldLease,
    ) -> OrStop<Change> {
        let value = |column: usize| rows.first().and_then(|row| row[column].clone());
        let (version, fence) = (value(0).unwrap_or_default(), value(1).unwrap_or_default());
        // A take-over would do the most harm here: the row is written, but not committed.
        self.stall(0.04);
        self.think();
        let current = match LeaseKind::of(lease) {
            LeaseKind::Exclusive | LeaseKind::Adopted => format!(
                "SELECT first FROM grants WHERE lease = {lease} AND what = 'acquire'
                  ORDER BY n DESC LIMIT 1"
            ),
            LeaseKind::Shared => {
                let others = if held.shared { "" } else { ", 'share'" };
                format!(
                    "SELECT max(first) FROM grants WHERE lease = {lease} AND what IN ('acquire'{others})"
                )
            }
            LeaseKind::Slots(_) => "SELECT NULL::bigint".to_owned(),
        };
        self.sql(&format!(
            "INSERT INTO writes VALUES ('{table}', {row}, {lease}, {version}, {fence}, {}, {}, ({current}))",
            held.first, self.id
        ))?;
        Ok(Vec::new())
    }
}
