//! A session that reads the state of leases must lock the tables that it reads. The commit of a DDL that drops a file
//! is in the log before other sessions are notified. A session that then changes a page of that file without a lock (a
//! prune, a hint bit) makes every standby fail for good. So each DDL is stopped at that moment, while all calls are
//! made.

use pg_test::process::{PATIENCE, wait_until};
use pg_test::{
    Background, Calls, Cluster, Context, Harness, Result, Session, dropped_files, ensure,
    harness_test,
};

/// The calls, with `{lease}`, `{token}` and `{new}` (a free name).
const LOOKS: [&str; 14] = [
    "SELECT lease_check('{lease}', {token})",
    "SELECT lease_acquire('{lease}')",
    "SELECT lease_acquire('{lease}', shared => true)",
    "SELECT lease_acquire('{lease}', wait => '1 ms')",
    "SELECT lease_guard('{lease}', {token})",
    "UPDATE work SET n = n + 1, fence = {token} WHERE lease = '{lease}'",
    "SELECT lease_renew('{lease}', {token})",
    "SELECT lease_release('{lease}', 999)",
    "SELECT count(*) FROM lease_info('{lease}', {token})",
    "SELECT count(*) FROM fence.leases WHERE name = '{lease}'",
    "SELECT lease_acquire_all('{{lease},{new}}')",
    "SELECT lease_acquire('{new}', ttl => '1 ms')",
    "SELECT lease_prune('1 h')",
    "SELECT last_token FROM fence_status()",
];

/// A primary with all settings that make it log more, and a standby that it does not wait for.
struct Pair {
    primary: Cluster,
    standby: Cluster,
    /// One session for each call.
    lookers: Vec<Background>,
    tokens: Vec<i64>,
    holder: Session,
    dba: Background,
    /// The number of DDLs so far.
    round: u32,
}

fn name(look: usize) -> String {
    format!("look {look:02}")
}

impl Pair {
    fn start(harness: &Harness) -> Result<Pair> {
        let builder = harness.builder().without_fsync().set("autovacuum", "off");
        // As with checksums, the default of PostgreSQL 18, hint bits are logged.
        let builder = builder.set("wal_log_hints", "on").set("allow_in_place_tablespaces", "on");
        // No standby has that name: a commit that waits for standbys is in the log, but not yet visible.
        let builder = builder.set("synchronous_standby_names", "nobody");
        let primary = builder.set("synchronous_commit", "local").start()?;
        let standby = harness.builder().without_fsync().standby_of(&primary)?;
        standby.start()?;
        let conninfo = primary.conninfo("postgres");
        let looker = || Background::connect(&conninfo.clone().set("statement_timeout", "60s"));
        let lookers = LOOKS.map(|_| looker()).into_iter().collect::<Result<_>>()?;
        let mut holder = conninfo.connect()?;
        holder.run("CREATE TABLESPACE aside LOCATION ''")?;
        let dba = Background::connect(&conninfo.set("synchronous_commit", "on"))?;
        let (tokens, round) = (Vec::new(), 0);
        let mut pair = Pair { primary, standby, lookers, tokens, holder, dba, round };
        pair.create_extension()?;
        Ok(pair)
    }

    fn create_extension(&mut self) -> Result<()> {
        self.holder.run(
            "DROP TABLE IF EXISTS work;
             CREATE EXTENSION pg_fence;
             CREATE TABLE work (lease text PRIMARY KEY, n int)",
        )?;
        for look in 0..LOOKS.len() {
            self.holder.run(&format!("INSERT INTO work VALUES ('{}', 0)", name(look)))?;
        }
        self.holder.run("SELECT fence_protect('work', lease => '{lease}')")
    }

    /// Creates a lease for each call, with enough others between that each is in its own page: after a prune of a page
    /// there is nothing left for another to prune.
    fn fill(&mut self) -> Result<()> {
        self.holder.run("TRUNCATE fence.lease")?;
        self.tokens.clear();
        for look in 0..LOOKS.len() {
            let lease = name(look);
            self.tokens.push(self.holder.acquire(&lease, "1 h")?);
            self.holder.run(&format!(
                "SELECT lease_acquire_all(ARRAY(SELECT '{lease} ' || n FROM generate_series(10, 34) n), ttl => '1 us')"
            ))?;
        }
        Ok(())
    }

    /// Returns the statement of a call.
    fn sql(&self, look: usize) -> String {
        let (lease, new) = (name(look), format!("new {} {look}", self.round));
        let sql = LOOKS[look].replace("{lease}", &lease).replace("{new}", &new);
        sql.replace("{token}", &self.tokens[look].to_string())
    }

    /// Runs a DDL that stops at each of its commits, at which all calls are made. The standby must then continue.
    fn ddl(&mut self, sql: &str, checkpoint: bool) -> Result<()> {
        self.round += 1;
        let start = self.holder.text("SELECT pg_current_wal_insert_lsn()")?.context("no LSN")?;
        // From here on each session has cached where its lease's row is.
        for look in 0..LOOKS.len() {
            let sql = self.sql(look);
            self.lookers[look].send(&sql)?;
            self.lookers[look].rows()?;
        }
        // Old row versions, for a prune, and a new one that no session has read, for a hint bit.
        for _ in 0..5 {
            for (look, token) in self.tokens.iter().enumerate() {
                self.holder.run(&format!("SELECT lease_renew('{}', {token})", name(look)))?;
            }
        }
        if checkpoint {
            // After a checkpoint the first change of each page, even a hint bit, is logged with the whole page.
            self.holder.run("CHECKPOINT")?;
        }
        self.dba.send(sql)?;
        let mut before = None;
        while let Some(transaction) = self.pause(before)? {
            for look in 0..LOOKS.len() {
                let sql = self.sql(look);
                self.lookers[look].send(&sql)?;
            }
            for looker in &mut self.lookers {
                looker.blocks_or_ends()?;
            }
            // The DDL is committed nevertheless.
            self.dba.cancel()?;
            before = Some(transaction);
            for looker in &mut self.lookers {
                if let Err(fault) = looker.outcome(PATIENCE)? {
                    let dropped = sql.starts_with("DROP");
                    let internal = fault.sqlstate.starts_with("XX") && !dropped;
                    ensure!(!internal && !fault.is_disconnect(), "beside {sql}: {fault}");
                }
            }
        }
        ensure!(before.is_some(), "it did not pause: {sql}");
        self.dba.outcome(PATIENCE)?.with_context(|| sql.to_owned())?;
        let changed = dropped_files::changed(&self.primary, 1, &start)?;
        let ended = self.follows().map_err(|error| format!("{error:#}"));
        ensure!(
            changed.is_empty() && ended.is_ok(),
            "after {sql}: {} changes of a file that it has dropped. {:?} The standby: {ended:?}",
            changed.len(),
            changed.first()
        );
        Ok(())
    }

    /// Waits until the DDL waits in a commit (of another transaction than before), and returns the transaction. Returns
    /// `None` if the DDL has ended.
    fn pause(&mut self, before: Option<i64>) -> Result<Option<i64>> {
        let sql = format!(
            "SELECT max(backend_xid::text::bigint) FROM pg_stat_activity
              WHERE pid = {} AND wait_event = 'SyncRep'",
            self.dba.pid()
        );
        let mut found = None;
        let (dba, holder) = (&mut self.dba, &mut self.holder);
        wait_until("the DDL pauses or ends", PATIENCE, || {
            found = holder.token(&sql).ok().flatten().filter(|found| Some(*found) != before);
            found.is_some() || dba.is_finished()
        })?;
        Ok(found)
    }

    /// Checks that the standby runs and has replayed everything.
    fn follows(&self) -> Result<()> {
        let mut primary = self.primary.connect("postgres")?;
        let written = primary.text("SELECT pg_current_wal_lsn()")?.context("no LSN")?;
        let sql = format!("SELECT coalesce(pg_last_wal_replay_lsn() >= '{written}', false)");
        let mut alive = true;
        wait_until("the standby has replayed", PATIENCE, || {
            alive = self.standby.is_running();
            let session = self.standby.connect("postgres");
            !alive || session.and_then(|mut session| session.truth(&sql)).unwrap_or(false)
        })?;
        ensure!(alive, "it is dead; its log ends:\n{}", self.standby.log_end(12));
        Ok(())
    }

    /// Checks the same after a restart, and that the standby has what the primary has.
    fn end(self) -> Result<()> {
        self.standby.restart()?;
        self.follows()?;
        let sql = "SELECT md5(string_agg(l::text, ' ' ORDER BY name, slot)) FROM fence.lease l";
        let (mut primary, mut standby) =
            (self.primary.connect("postgres")?, self.standby.connect("postgres")?);
        if primary.truth("SELECT to_regclass('fence.lease') IS NOT NULL")? {
            ensure!(primary.text(sql)? == standby.text(sql)?, "other rows on the standby");
        }
        Ok(())
    }
}

/// Runs the DDLs twice: when a changed page need not be logged as a whole, and when it must be.
fn beside(harness: &Harness, ddls: &[&str]) -> Result<()> {
    let mut pair = Pair::start(harness)?;
    for checkpoint in [false, true] {
        pair.fill()?;
        for sql in ddls {
            pair.ddl(sql, checkpoint)?;
        }
    }
    pair.end()
}

#[harness_test]
fn a_standby_outlives_looks_beside_moves_to_another_tablespace(harness: &Harness) -> Result<()> {
    beside(
        harness,
        &[
            "ALTER TABLE fence.lease SET TABLESPACE aside",
            "ALTER INDEX fence.lease_pkey SET TABLESPACE aside",
            "ALTER TABLE ALL IN TABLESPACE aside SET TABLESPACE pg_default",
            "ALTER INDEX fence.lease_pkey SET TABLESPACE pg_default",
        ],
    )
}

#[harness_test]
fn a_standby_outlives_looks_beside_rewrites(harness: &Harness) -> Result<()> {
    beside(
        harness,
        &[
            "VACUUM FULL fence.lease",
            "CLUSTER fence.lease USING lease_pkey",
            "REINDEX TABLE fence.lease",
            "REINDEX TABLE CONCURRENTLY fence.lease",
            "ALTER TABLE fence.lease SET UNLOGGED",
            "ALTER TABLE fence.lease SET LOGGED",
            "TRUNCATE fence.lease",
        ],
    )
}

#[harness_test]
fn a_standby_outlives_looks_beside_the_extension_s_end(harness: &Harness) -> Result<()> {
    let mut pair = Pair::start(harness)?;
    for checkpoint in [false, true] {
        pair.fill()?;
        pair.ddl("DROP EXTENSION pg_fence CASCADE", checkpoint)?;
        pair.create_extension()?;
    }
    pair.end()
}

#[harness_test]
fn a_standby_outlives_looks_beside_rewrites_of_sequences(harness: &Harness) -> Result<()> {
    let mut pair = Pair::start(harness)?;
    let sequences = pair.holder.rows(
        "SELECT oid::regclass::text, relpersistence FROM pg_class
          WHERE relkind = 'S' AND relnamespace = 'fence'::regnamespace ORDER BY relname",
    )?;
    ensure!(sequences.len() > 4, "{sequences:?}");
    pair.fill()?;
    for row in &sequences {
        let [Some(sequence), Some(persistence)] = &row[..] else { continue };
        pair.ddl(&format!("ALTER SEQUENCE {sequence} INCREMENT 1"), true)?;
        if persistence == "p" {
            // At once, because there are no tokens while the table is unlogged.
            pair.ddl(
                &format!(
                    "ALTER SEQUENCE {sequence} SET UNLOGGED; ALTER SEQUENCE {sequence} SET LOGGED"
                ),
                true,
            )?;
        }
    }
    pair.end()
}
