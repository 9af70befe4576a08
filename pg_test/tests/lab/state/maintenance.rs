//! Maintenance of the state's tables, step after step, beside a waiter and guarded transactions; and a table that was made
//! shorter under a guard. The rest is in maintenance.script.

use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Background, Calls, Context, Database, Lab, Result, Session};
use std::time::Duration;

/// The commands that a DBA runs on the state.
const MAINTENANCE: &[&str] = &[
    "REINDEX TABLE fence.lease",
    "REINDEX TABLE CONCURRENTLY fence.lease",
    "REINDEX INDEX fence.lease_pkey",
    "VACUUM FULL fence.lease",
    "CLUSTER fence.lease USING lease_pkey",
    "ALTER TABLE fence.lease SET (autovacuum_enabled = false, fillfactor = 40)",
    "ALTER TABLE fence.lease SET TABLESPACE elsewhere",
    "ALTER INDEX fence.lease_pkey SET TABLESPACE elsewhere",
    "CREATE INDEX CONCURRENTLY extra ON fence.lease (split_part(name, ':', 1))",
    "DROP INDEX CONCURRENTLY fence.extra",
    "CREATE INDEX extra ON fence.lease (expires_at) WHERE closing_token IS NULL",
    "DROP INDEX fence.extra",
    "ANALYZE fence.lease",
    "VACUUM (FREEZE, TRUNCATE) fence.lease",
    "ALTER TABLE fence.lease SET TABLESPACE pg_default",
    "ALTER TABLE fence.lease ALTER metadata SET STATISTICS 10",
    "ALTER SEQUENCE fence.token_seq OWNED BY NONE",
    "REINDEX SCHEMA fence",
    "VACUUM FULL",
];

/// And from 19 on.
const MAINTENANCE_19: &[&str] =
    &["REPACK fence.lease", "REPACK fence.lease USING INDEX lease_pkey"];

#[lab_test]
fn maintenance_goes_on_beside_a_waiter_and_guarded_transactions(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().set("allow_in_place_tablespaces", "on").start()?;
    cluster.connect("postgres")?.run("CREATE TABLESPACE elsewhere LOCATION ''")?;
    let db = Database::with_extension(cluster.conninfo("postgres"))?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    let (mut guard, mut writer) = (db.connect()?, db.connect()?);
    let mut dba = Background::connect(&db.conninfo())?;
    holder.run(
        "CREATE TABLE orders (id int PRIMARY KEY, v int); INSERT INTO orders VALUES (7, 0);
         SELECT fence_protect('orders', lease => '{id}')",
    )?;
    holder.run(
        "SELECT count(lease_acquire('old:' || n, ttl => '1 us')) FROM generate_series(1, 200) n",
    )?;
    let mut guarded = holder.acquire("guarded", "1 h")?;
    let mut bound = holder.acquire("7", "1 h")?;
    let newer = if lab.prefix().major_number() < 19 { &[] } else { MAINTENANCE_19 };
    let steps = [MAINTENANCE, newer].concat();
    for step in &steps {
        let held = holder.acquire("waited for", "1 h")?;
        let mut waiter = Background::connect(&db.conninfo())?;
        waiter.send("SELECT lease_acquire('waited for', ttl => '1 h', wait => '10 min')")?;
        waiter.wait_until_blocked()?;
        guard
            .run(&format!("BEGIN; SELECT lease_guard('guarded', {guarded}); CREATE TABLE t ()"))?;
        writer.run(&format!("BEGIN; UPDATE orders SET v = v + 1, fence = {bound}"))?;
        // Of the whole database, the table that the transaction has written would be waited for.
        let step = if *step == "VACUUM FULL" { "VACUUM (FULL, SKIP_LOCKED)" } else { step };
        // As for any statement that takes long, it waits for the waiter's to be over; nobody waits for it.
        let outlasts_statements = step.contains("CONCURRENTLY") && !step.contains("DROP");
        dba.send(step)?;
        if outlasts_statements {
            wait_until(step, PATIENCE, || {
                dba.is_finished() || dba.blocked_by().is_ok_and(|by| by == [waiter.pid()])
            })?;
        } else {
            dba.outcome(PATIENCE)?.with_context(|| step.to_owned())?;
        }
        // Renewals and tries go on; who guards still excludes others.
        ensure!(holder.renew("waited for", held)?.is_some(), "{step}");
        holder.nothing("SELECT lease_acquire('guarded')")?;
        other.nothing("SELECT lease_acquire('7', 'me', reclaim => true)")?;
        other.run("BEGIN; SELECT lease_acquire('fresh', ttl => '1 h'); ROLLBACK")?;
        guard.run(&format!("SELECT lease_guard('guarded', {guarded}); DROP TABLE t; COMMIT"))?;
        writer.run("UPDATE orders SET v = v + 1; COMMIT")?;
        ensure!(!waiter.is_finished(), "{step}: {:?}", waiter.outcome(Duration::ZERO));
        holder.release("waited for", held)?.expect("held");
        let rows = waiter.rows()?;
        let won: i64 = rows[0][0].as_deref().expect("granted").parse()?;
        ensure!(won > held && holder.speaks("waited for", won)?, "{step}");
        if outlasts_statements {
            dba.outcome(PATIENCE)?.with_context(|| step.to_owned())?;
        }
        holder.release("waited for", won)?.expect("held");
        guarded = holder.renew("guarded", guarded)?.expect("held");
        bound = holder.renew("7", bound)?.expect("held");
    }
    let written = steps.len() * 2;
    ensure!(holder.text("SELECT v FROM orders")? == Some(written.to_string()));
    Ok(())
}

/// Many rows, of grants that are over.
fn fill(session: &mut Session) -> Result<()> {
    session.run(
        "SELECT count(lease_acquire('old:' || n, ttl => '1 us')) FROM generate_series(1, 1000) n",
    )
}

#[lab_test]
fn a_guard_stands_though_the_table_was_made_shorter(lab: &Lab) -> Result<()> {
    // A server of its own: what another transaction might still see is not removed.
    let cluster = lab.builder().set("autovacuum", "off").start()?;
    let db = Database::with_extension(cluster.conninfo("postgres"))?;
    let (mut guard, mut other) = (db.connect()?, db.connect()?);
    fill(&mut other)?;
    for is_over in [false, true] {
        let token = other.acquire("last", "1 h")?;
        ensure!(other.truth("SELECT ctid >= '(10,1)' FROM fence.lease WHERE name = 'last'")?);
        guard.run(&format!("BEGIN; SELECT lease_guard('last', {token})"))?;
        if is_over {
            other.expire_now("last", token)?;
        }
        other.granted("SELECT lease_prune('0')")?;
        other.run("VACUUM FULL fence.lease")?;
        ensure!(other.truth("SELECT pg_relation_size('fence.lease') = 8192")?);
        other.nothing("SELECT lease_acquire('last', 'me', reclaim => true)")?;
        guard.run(&format!(
            "SELECT lease_guard('last', {token}); CREATE TABLE t (); DROP TABLE t; COMMIT"
        ))?;
        other.release("last", token)?;
        other.granted("SELECT lease_prune('0')")?;
        fill(&mut other)?;
    }
    Ok(())
}
