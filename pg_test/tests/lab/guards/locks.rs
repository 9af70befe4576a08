//! A guard locks the grant: who is kept out by it, who is not, and who is shown to keep them out.

use crate::support::test_database::{bound, shown, shows, TestDatabase};
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result, Session};

/// How a transaction comes to guard `order:1`.
const OPENINGS: &[&str] = &[
    "SELECT lease_guard('order:1', {t})",
    "UPDATE orders SET v = v + 1, fence = {t}",
    "INSERT INTO orders VALUES (1, 0, {t}) ON CONFLICT (id) DO UPDATE SET v = 1, fence = {t}",
    "SET LOCAL pg_fence.token = '{t}'; DELETE FROM orders",
];

fn open(session: &mut Session, opening: &str, token: i64) -> Result<()> {
    session.run(&format!("BEGIN; {}", opening.replace("{t}", &token.to_string())))
}

fn acquire(db: &mut TestDatabase, holder: &str, ttl: &str) -> Result<i64> {
    db.one(&format!("SELECT lease_acquire('order:1', '{holder}', '{ttl}')"), &[])
}

fn expire(session: &mut Session, token: i64) -> Result<()> {
    session.expire_now("order:1", token)?;
    shows(session, "SELECT state FROM lease_info('order:1')", "expired")
}

#[lab_test]
fn no_other_grant_replaces_a_guarded_one(lab: &Lab) -> Result<()> {
    // What becomes of the grant while it is guarded.
    for fate in ["live", "expired", "released", "revoked"] {
        let mut db = bound(lab)?;
        let token = acquire(&mut db, "me", "1 h")?;
        let mut writer = db.another()?;
        open(&mut writer, OPENINGS[usize::from(fate == "released")], token)?;
        match fate {
            "expired" => expire(&mut db, token)?,
            "released" => db.run(&format!("SELECT lease_release('order:1', {token})"))?,
            "revoked" => db.run("SELECT lease_revoke('order:1')")?,
            _ => {}
        }
        let calls = [
            "SELECT lease_acquire('order:1')",
            "SELECT lease_acquire('order:1', 'somebody')",
            "SELECT lease_acquire('order:1', 'me')",
            "SELECT lease_acquire('order:1', 'me', reclaim => true)",
            "SELECT lease_acquire('order:1', 'me', shared => true)",
            "SELECT lease_acquire('order:1', 'me', wait => '100 ms')",
            "SELECT lease_acquire_all('{order:0,order:1,order:2}', 'me')",
        ];
        let slots = "SELECT lease_acquire('order:1', slots => 2)";
        for call in calls {
            ensure!(shown(&mut db, call)? == "-", "{fate}, and yet granted: {call}");
        }
        // Another number of slots than those of a live grant is an error instead.
        if fate == "live" {
            db.refused(slots, "22023")?;
        } else {
            ensure!(shown(&mut db, slots)? == "-", "{fate}, and yet granted a slot");
        }
        shows(&mut db, "SELECT count(*) FROM fence.leases WHERE name <> 'order:1'", "0")?;
        writer.run("COMMIT")?;
        let after = shown(&mut db, "SELECT lease_acquire('order:1', 'me', reclaim => true)")?;
        ensure!(after != "-", "{fate}: the guard outlived its transaction");
    }
    Ok(())
}

#[lab_test]
fn not_even_one_of_the_same_transaction(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    let token = acquire(&mut db, "me", "1 h")?;
    for opening in OPENINGS {
        open(&mut db, opening, token)?;
        shows(&mut db, "SELECT lease_acquire('order:1', 'me', reclaim => true)", "-")?;
        shows(&mut db, "SELECT lease_acquire('order:1')", "-")?;
        db.run("ROLLBACK")?;
    }
    Ok(())
}

#[lab_test]
fn whoever_guards_is_shown(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    let token = acquire(&mut db, "me", "1 h")?;
    let pids = "SELECT blocking_pids FROM fence.leases WHERE name = 'order:1'";
    shows(&mut db, pids, "{}")?;
    for opening in OPENINGS {
        let (mut a, mut b) = (db.another()?, db.another()?);
        open(&mut a, opening, token)?;
        shows(&mut db, pids, &format!("{{{}}}", a.pid()))?;
        open(&mut b, OPENINGS[0], token)?;
        let both = format!(
            "SELECT blocking_pids @> '{{{0},{1}}}' AND cardinality(blocking_pids) = 2 \
             FROM lease_info('order:1')",
            a.pid(),
            b.pid()
        );
        shows(&mut db, &both, "t")?;
        a.run("ROLLBACK")?;
        // The other one still guards.
        shows(&mut db, "SELECT lease_acquire('order:1', 'me', reclaim => true)", "-")?;
        b.run("ROLLBACK")?;
        shows(&mut db, pids, "{}")?;
    }
    Ok(())
}

#[lab_test]
fn renewing_and_releasing_are_not_held_up(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    db.run("SET lock_timeout = '2 s'")?;
    for opening in OPENINGS {
        let token = acquire(&mut db, "me", "1 h")?;
        let mut writer = db.another()?;
        open(&mut writer, opening, token)?;
        let renewed: Option<i64> = db.one("SELECT lease_renew('order:1', $1)", &[&token])?;
        ensure!(renewed.is_some_and(|renewed| renewed > token));
        // The writer may go on with either, and its own renewing waits for nothing.
        writer.run("SAVEPOINT s")?;
        let own: Option<i64> = writer.one("SELECT lease_renew('order:1', $1)", &[&token])?;
        ensure!(own > renewed);
        writer.run("ROLLBACK TO s")?;
        let closing: Option<i64> = db.one("SELECT lease_release('order:1', $1)", &[&renewed])?;
        ensure!(closing > own);
        writer.run("ROLLBACK")?;
    }
    // Nor is revoking.
    let token = acquire(&mut db, "me", "1 h")?;
    let mut writer = db.another()?;
    open(&mut writer, OPENINGS[1], token)?;
    let closing: Option<i64> = db.one("SELECT lease_revoke('order:1')", &[])?;
    ensure!(closing.is_some());
    writer.run("COMMIT")
}

#[lab_test]
fn a_guard_ends_with_its_transaction_however_that_ends(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    for end in ["COMMIT", "ROLLBACK", "SELECT 1/0", "terminated", "disconnected"] {
        for opening in [OPENINGS[0], OPENINGS[1]] {
            let token = acquire(&mut db, "me", "1 h")?;
            let mut writer = Background::connect(&db.database().conninfo())?;
            let opening = opening.replace("{t}", &token.to_string());
            writer.run(&format!("BEGIN; {opening}"))?;
            db.run("SELECT lease_revoke('order:1')")?;
            ensure!(shown(&mut db, "SELECT lease_acquire('order:1')")? == "-");
            match end {
                "terminated" => writer.terminate()?,
                "disconnected" => drop(writer),
                "SELECT 1/0" => {
                    writer.send(end)?;
                    writer.refused("22012")?;
                }
                _ => drop(writer.run(end)?),
            }
            let mut next: Option<i64> = None;
            wait_until("the lease can be had", PATIENCE, || {
                next = db.one("SELECT lease_acquire('order:1')", &[]).unwrap_or(None);
                next.is_some()
            })?;
            let _: Option<i64> = db.one("SELECT lease_release('order:1', $1)", &[&next])?;
        }
    }
    Ok(())
}

#[lab_test]
fn a_prepared_guard_survives_a_crash(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    let mut session = cluster.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    let token: i64 = session.one("SELECT lease_acquire('a', ttl => '1 h')", &[])?;
    session.run(&format!("BEGIN; CREATE TABLE t (); SELECT lease_guard('a', {token})"))?;
    session.run("PREPARE TRANSACTION 'p'")?;
    cluster.kill9()?;
    cluster.start()?;
    let mut session = cluster.connect("postgres")?;
    session.run("SELECT lease_revoke('a')")?;
    shows(&mut session, "SELECT lease_acquire('a')", "-")?;
    shows(&mut session, "SELECT blocking_pids FROM lease_info('a')", "{0}")?;
    session.run("COMMIT PREPARED 'p'")?;
    let next: Option<i64> = session.one("SELECT lease_acquire('a')", &[])?;
    ensure!(next.is_some_and(|next| next > token));
    Ok(())
}

#[lab_test]
fn a_guard_makes_no_row_lock_and_no_multixact(lab: &Lab) -> Result<()> {
    let mut db = bound(lab)?;
    let token = acquire(&mut db, "me", "1 h")?;
    let lease = "SELECT ctid, xmin, xmax FROM fence.lease";
    let before = shown(&mut db, lease)?;
    ensure!(before.ends_with("|0"), "{before}");
    let mut sessions = Vec::new();
    for opening in [OPENINGS[1], OPENINGS[0], OPENINGS[0], OPENINGS[0]] {
        let mut session = db.another()?;
        open(&mut session, opening, token)?;
        sessions.push(session);
    }
    // xmax would be a locker or a multixact, were the row locked.
    shows(&mut db, lease, &before)?;
    let others = "SELECT count(*) FROM pg_locks WHERE locktype = 'tuple' \
                  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    shows(&mut db, others, "0")?;
    for session in &mut sessions {
        session.run("COMMIT")?;
    }
    shows(&mut db, lease, &before)
}
