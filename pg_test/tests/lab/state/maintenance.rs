//! Maintenance of the state's tables takes no lease from its holder: who waits for a lease or guards one holds
//! no lock that maintenance waits for, and a try never queues behind maintenance that waits for others.

use crate::roles::role_of;
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Background, Calls, Context, Database, Lab, Result, Session};
use std::time::Duration;

/// The relations of the state that the backend has locks on.
fn locked(session: &mut Session, pid: i32) -> Result<Option<String>> {
    session.text(&format!(
        "SELECT string_agg(relation::regclass || ' ' || mode, ', ' ORDER BY relation::regclass::text, mode)
           FROM pg_locks WHERE pid = {pid} AND locktype = 'relation' AND mode <> 'SIReadLock'
            AND relation IN (SELECT oid FROM pg_class WHERE relnamespace = 'fence'::regnamespace)"
    ))
}

fn is_bound(session: &mut Session) -> Result<()> {
    session.run(
        "CREATE TABLE orders (id int PRIMARY KEY, v int); INSERT INTO orders VALUES (7, 0);
         SELECT fence_protect('orders', lease => '{id}')",
    )
}

#[lab_test]
fn who_only_looks_keeps_no_lock_on_the_state(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut probe) = (db.connect()?, db.connect()?);
    is_bound(&mut probe)?;
    let token = probe.acquire("7", "1 h")?;
    let other = probe.acquire("other", "1 h")?;
    let pid = session.pid();
    for (isolation, call) in
        ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"].into_iter().flat_map(|isolation| {
            [
                "SELECT lease_acquire('7')".to_owned(),
                "SELECT lease_acquire('7', wait => '10 ms')".to_owned(),
                "SELECT lease_acquire('7', shared => true)".to_owned(),
                "SELECT lease_acquire_all('{free, 7}')".to_owned(),
                "SELECT lease_renew('7', 999)".to_owned(),
                "SELECT lease_release('7', 999)".to_owned(),
                "SELECT lease_renew_all('{7,none}', 999)".to_owned(),
                "SELECT lease_release_all('{7,none}', 999)".to_owned(),
                "SELECT lease_revoke('none')".to_owned(),
                "SELECT lease_prune('1 h')".to_owned(),
                format!("SELECT lease_check('7', {token})"),
                format!("SELECT lease_guard('7', {token})"),
                "SELECT fence_status()".to_owned(),
                format!("UPDATE orders SET v = v + 1, fence = {token}"),
            ]
            .map(move |call| (isolation, call))
        })
    {
        session.run(&format!("BEGIN ISOLATION LEVEL {isolation}; {call}"))?;
        let kept = locked(&mut probe, pid)?;
        ensure!(kept.is_none(), "{call} at {isolation} keeps {kept:?}");
        session.run("ROLLBACK")?;
    }
    // What is refused keeps nothing either, in a transaction that goes on.
    session.run("BEGIN; SAVEPOINT s")?;
    session.refused("SELECT lease_guard('7', 999)", "PF004")?;
    session.run("ROLLBACK TO s")?;
    ensure!(locked(&mut probe, pid)?.is_none());
    session.run("COMMIT")?;
    // Nor does a waiter while it sleeps, be it the head of the queue or not.
    let mut waiters = [Background::connect(&db.conninfo())?, Background::connect(&db.conninfo())?];
    for waiter in &mut waiters {
        waiter.send("SELECT lease_acquire('other', ttl => '1 h', wait => '1 min')")?;
        waiter.wait_until_blocked()?;
    }
    for waiter in &waiters {
        // It may just look.
        wait_until("a waiter has no lock", PATIENCE, || {
            matches!(locked(&mut probe, waiter.pid()), Ok(None))
        })?;
    }
    probe.release("other", other)?.expect("held");
    waiters[0].rows()?;
    Ok(())
}

#[lab_test]
fn who_has_written_keeps_the_table_s_lock_and_no_other(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut probe) = (db.connect()?, db.connect()?);
    let pid = session.pid();
    session.run("BEGIN")?;
    let token = session.acquire("job", "1 h")?;
    // A guard in it leaves that as it is.
    for statement in ["SELECT 1".to_owned(), format!("SELECT lease_guard('job', {token})")] {
        session.run(&statement)?;
        let kept = locked(&mut probe, pid)?.unwrap_or_default();
        ensure!(kept.contains("fence.lease RowExclusiveLock"), "{statement}: {kept}");
        ensure!(!kept.contains("pkey") && !kept.contains("guarded"), "{statement}: {kept}");
    }
    Ok(())
}

/// What a DBA runs on the state.
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
    is_bound(&mut holder)?;
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

/// A transaction that has written to fence.lease, and maintenance that waits for it.
fn queued(db: &Database, open: &mut Session) -> Result<Background> {
    open.run("BEGIN; SELECT lease_acquire('open', ttl => '1 h')")?;
    let mut dba = Background::connect(&db.conninfo())?;
    dba.send("VACUUM FULL fence.lease")?;
    dba.wait_until_blocked()?;
    ensure!(dba.blocked_by()? == [open.pid()]);
    Ok(dba)
}

#[lab_test]
fn a_try_does_not_queue_behind_maintenance_that_waits(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut open = db.connect()?;
    let mut dba = queued(&db, &mut open)?;
    let mut other = Background::connect(&db.conninfo())?;
    for call in [
        "lease_acquire('free')",
        "lease_acquire('open')",
        "lease_acquire('free', shared => true)",
        "lease_acquire_all('{free,freer}')",
    ] {
        ensure!(other.run(&format!("SELECT {call}"))? == [[None]], "{call}");
        ensure!(!dba.is_finished());
    }
    // The transaction that has written goes on without waiting for anybody.
    open.run("SET LOCAL lock_timeout = '10 s'")?;
    let token = open.granted("SELECT lease_acquire('second', ttl => '1 h')")?;
    open.renew("second", token)?.expect("held");
    open.run(&format!("SELECT lease_guard('second', {token}), lease_check('second', {token})"))?;
    open.run("COMMIT")?;
    dba.rows()?;
    ensure!(other.run("SELECT lease_acquire('free') IS NOT NULL")? == [[Some("t".to_owned())]]);
    Ok(())
}

#[lab_test]
fn a_waiter_waits_on_while_maintenance_waits(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut open = db.connect()?;
    let mut dba = queued(&db, &mut open)?;
    let mut waiter = Background::connect(&db.conninfo())?;
    ensure!(waiter.run("SELECT lease_acquire('free', wait => '50 ms')")? == [[None]]);
    waiter.send("SELECT lease_acquire('free', wait => '10 min') IS NOT NULL")?;
    waiter.wait_until_blocked()?;
    ensure!(!dba.is_finished() && !waiter.is_finished());
    open.run("COMMIT")?;
    dba.rows()?;
    ensure!(waiter.rows()? == [[Some("t".to_owned())]]);
    Ok(())
}

#[lab_test]
fn a_try_waits_for_maintenance_at_work(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut dba, mut other) = (db.connect()?, Background::connect(&db.conninfo())?);
    let works = [
        "LOCK TABLE fence.lease IN ACCESS EXCLUSIVE MODE",
        "LOCK TABLE fence.lease IN SHARE MODE",
        "REINDEX INDEX fence.lease_pkey",
        "ALTER INDEX fence.lease_pkey SET TABLESPACE pg_default",
    ];
    let calls = ["lease_acquire('job')", "lease_acquire_all('{a,b}')"];
    for (work, call) in works.iter().flat_map(|work| calls.map(|call| (work, call))) {
        for end in ["ROLLBACK", "COMMIT"] {
            dba.run(&format!("BEGIN; {work}"))?;
            other.run("BEGIN")?;
            other.send(&format!("SELECT {call} IS NOT NULL"))?;
            other.wait_until_blocked()?;
            ensure!(other.blocked_by()? == [dba.pid()], "{work}: {call}");
            dba.run(end)?;
            ensure!(other.rows()? == [[Some("t".to_owned())]], "{work}: {call}");
            other.run("ROLLBACK")?;
        }
    }
    Ok(())
}

#[lab_test]
fn a_try_that_waits_for_maintenance_obeys_timeouts_and_cancel(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut dba, mut session) = (db.connect()?, db.connect()?);
    dba.run("BEGIN; LOCK TABLE fence.lease")?;
    session.run("SET lock_timeout = '50 ms'")?;
    session.refused("SELECT lease_acquire('job')", "55P03")?;
    session.run("SET lock_timeout = 0; SET statement_timeout = '50 ms'")?;
    session.refused("SELECT lease_acquire('job')", "57014")?;
    session.run("SET statement_timeout = 0")?;
    let mut other = Background::connect(&db.conninfo())?;
    other.send("SELECT lease_acquire('job')")?;
    other.wait_until_blocked()?;
    other.cancel()?;
    other.refused("57014")?;
    // One that it waits for itself is a deadlock, and found out.
    let mut first = Background::connect(&db.conninfo())?;
    session.run("CREATE TABLE mine ()")?;
    first.run("BEGIN; LOCK TABLE mine")?;
    first.send("SELECT lease_acquire('job')")?;
    first.wait_until_blocked()?;
    dba.refused("LOCK TABLE mine", "40P01")
        .map(drop)
        .or_else(|_| first.refused("40P01").map(drop))?;
    dba.run("ROLLBACK")?;
    Ok(())
}

#[lab_test]
fn a_commit_does_not_queue_behind_maintenance(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut guard = db.connect()?;
    let token = guard.acquire("guarded", "1 h")?;
    guard.run("SET lock_timeout = '20 s'")?;
    guard.run(&format!("BEGIN; SELECT lease_guard('guarded', {token}); CREATE TABLE t ()"))?;
    let mut open = db.connect()?;
    open.expire_now("guarded", token)?;
    let mut dba = queued(&db, &mut open)?;
    guard.run("COMMIT")?;
    ensure!(!dba.is_finished());
    open.run("ROLLBACK")?;
    dba.rows()?;
    Ok(())
}

#[lab_test]
fn a_renewal_queues_behind_maintenance_no_longer_than_lock_timeout(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut open, mut holder) = (db.connect()?, db.connect()?);
    let token = holder.acquire("job", "1 h")?;
    let mut dba = queued(&db, &mut open)?;
    holder.run("SET lock_timeout = '50 ms'")?;
    for call in ["lease_renew", "lease_release", "lease_guard"] {
        holder.refused(&format!("SELECT {call}('job', {token})"), "55P03")?;
    }
    holder.run("RESET lock_timeout")?;
    // With a lock_timeout of its own, maintenance gives way.
    dba.cancel()?;
    dba.refused("57014")?;
    holder.renew("job", token)?.expect("held");
    open.run("COMMIT")?;
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

#[lab_test]
fn a_try_does_not_queue_for_the_prefixes_behind_maintenance_that_waits(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut owner = db.connect()?;
    let worker = role_of(&db, "worker", &[("worker", "job")])?;
    let token = db.connect_as(&worker)?.acquire("job", "1 h")?;
    let mut reader = db.connect()?;
    reader.run("BEGIN; SELECT * FROM fence.role_prefix")?;
    let mut maintenance = Background::connect(&db.conninfo())?;
    maintenance.send("VACUUM FULL fence.role_prefix")?;
    maintenance.wait_until_blocked()?;
    let mut session = db.connect_as(&worker)?;
    session.run("SET statement_timeout = '30 s'")?;
    for call in [
        "SELECT lease_acquire('job 2')",
        "SELECT lease_acquire('job 2', shared => true)",
        "SELECT lease_acquire_all('{job 2}')",
        "SELECT lease_acquire('job 2', wait => '300 ms')",
    ] {
        ensure!(session.token(call)?.is_none(), "{call}");
    }
    ensure!(session.renew("job", token)?.is_some(), "a holder goes by its role");
    reader.run("COMMIT")?;
    maintenance.rows()?;
    owner.run("ANALYZE fence.role_prefix")?;
    session.acquire("job 2", "1 h")?;
    Ok(())
}
