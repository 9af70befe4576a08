//! REPEATABLE READ and SERIALIZABLE: 40001 where the snapshot is too old, and nowhere else.

use pg_test::calls::within_ttl;
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Background, Calls, Database, Lab, Result, Session};

const KEEPING: [&str; 2] = ["REPEATABLE READ", "SERIALIZABLE"];

/// For each isolation level that keeps its snapshot: a session outside, and one in a transaction
/// whose snapshot is taken after `before` was run.
fn at_each_level(
    lab: &Lab,
    before: impl Fn(&mut Session) -> Result<()>,
    then: impl Fn(&Database, &mut Session, &mut Session) -> Result<()>,
) -> Result<()> {
    for level in KEEPING {
        let db = lab.database()?;
        let (mut outside, mut inside) = (db.connect()?, db.connect()?);
        inside.run("SET lock_timeout = '10 s'")?;
        before(&mut outside)?;
        inside.run(&format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM pg_class"))?;
        then(&db, &mut outside, &mut inside).map_err(|e| e.context(level))?;
    }
    Ok(())
}

/// The acquire must fail with 40001, and say what to do.
fn too_late(inside: &mut Session) -> Result<()> {
    let fault = inside.refused("SELECT lease_acquire('job')", "40001")?;
    ensure!(fault.hint.is_some() && fault.json()?["lease"] == "job", "{fault}");
    inside.run("ROLLBACK")
}

fn hold(session: &mut Session) -> Result<()> {
    session.acquire("job", "1 h").map(drop)
}

const FIRST: &str = "(SELECT first_token FROM fence.leases WHERE name = 'job')";

#[lab_test]
fn what_was_free_is_granted(lab: &Lab) -> Result<()> {
    at_each_level(
        lab,
        |outside| {
            outside.acquire_expired("expired")?;
            let token = outside.acquire("freed", "1 h")?;
            outside.release("freed", token).map(drop)
        },
        |_, _, inside| {
            for name in ["new", "freed", "expired"] {
                let token = inside.acquire(name, "1 h")?;
                ensure!(inside.speaks(name, token)? && inside.renew(name, token)?.is_some());
            }
            inside.run("COMMIT")?;
            ensure!(inside.is_taken("new")? && inside.is_taken("freed")?);
            Ok(())
        },
    )
}

#[lab_test]
fn a_release_after_the_snapshot_is_too_late(lab: &Lab) -> Result<()> {
    at_each_level(lab, hold, |_, outside, inside| {
        outside.granted(&format!("SELECT lease_release('job', {FIRST})"))?;
        too_late(inside)
    })
}

#[lab_test]
fn a_revocation_after_the_snapshot_is_too_late(lab: &Lab) -> Result<()> {
    at_each_level(lab, hold, |_, outside, inside| {
        outside.granted("SELECT lease_revoke('job')")?;
        too_late(inside)
    })
}

#[lab_test]
fn a_release_that_was_open_at_the_snapshot_is_too_late(lab: &Lab) -> Result<()> {
    let open = |outside: &mut Session| {
        hold(outside)?;
        outside.run(&format!("BEGIN; SELECT lease_release('job', {FIRST})"))
    };
    at_each_level(lab, open, |_, outside, inside| {
        inside.nothing("SELECT lease_acquire('job')")?;
        outside.run("COMMIT")?;
        too_late(inside)
    })
}

#[lab_test]
fn an_expiry_after_the_snapshot_is_too_late(lab: &Lab) -> Result<()> {
    for level in KEEPING {
        within_ttl(|ttl| expires_after_the_snapshot(lab, level, ttl))
            .map_err(|e| e.context(level))?;
    }
    Ok(())
}

fn expires_after_the_snapshot(lab: &Lab, level: &str, ttl: &str) -> Result<Option<()>> {
    let db = lab.database()?;
    let (mut outside, mut inside) = (db.connect()?, db.connect()?);
    outside.acquire("job", ttl)?;
    inside.run(&format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM pg_class"))?;
    if !matches!(inside.token("SELECT lease_acquire('job')"), Ok(None)) {
        return Ok(None);
    }
    // The predecessor may have written until its deadline, and has.
    outside.run("CREATE TABLE written (n int)")?;
    outside.wait_expired("job")?;
    too_late(&mut inside).map(Some)
}

/// In a transaction that guards `job` and has written, and whose grant has run out.
fn guard_past_its_deadline(session: &mut Session) -> Result<()> {
    session.run("CREATE TABLE t (n int)")?;
    within_ttl(|ttl| {
        let token = session.acquire("job", ttl)?;
        session.run("BEGIN")?;
        let guarded = session.run(&format!("SELECT lease_guard('job', {token})"));
        if guarded.is_err() {
            session.run("ROLLBACK")?;
        }
        Ok(guarded.ok())
    })?;
    session.run("INSERT INTO t VALUES (1)")?;
    session.wait_expired("job")
}

#[lab_test]
fn a_guard_that_ended_after_the_snapshot_is_too_late(lab: &Lab) -> Result<()> {
    // The grant is over before the snapshot, its guarded transaction is not.
    for end in ["COMMIT", "PREPARE TRANSACTION 'guard'; COMMIT PREPARED 'guard'"] {
        at_each_level(lab, guard_past_its_deadline, |_, outside, inside| {
            inside.nothing("SELECT lease_acquire('job')")?;
            for statement in end.split("; ") {
                outside.run(statement)?;
            }
            ensure!(inside.granted("SELECT count(*) FROM t")? == 0, "the predecessor's world");
            too_late(inside)
        })?;
    }
    Ok(())
}

#[lab_test]
fn a_guard_of_a_live_grant_that_is_reclaimed_or_revoked_is_too_late(lab: &Lab) -> Result<()> {
    for (end, acquire) in [
        ("", "SELECT lease_acquire('job', 'w1', reclaim => true)"),
        ("SELECT lease_revoke('job')", "SELECT lease_acquire('job', 'w2')"),
    ] {
        let guarded = |outside: &mut Session| {
            outside.run("CREATE TABLE t (n int)")?;
            let token = outside.granted("SELECT lease_acquire('job', 'w1', '1 h')")?;
            outside.run(&format!(
                "BEGIN; SELECT lease_guard('job', {token}); INSERT INTO t VALUES (1)"
            ))
        };
        at_each_level(lab, guarded, |_, outside, inside| {
            outside.run("COMMIT")?;
            inside.run(end)?;
            ensure!(inside.granted("SELECT count(*) FROM t")? == 0, "the predecessor's world");
            inside.refused(acquire, "40001")?;
            inside.run("ROLLBACK")?;
            // Tried again, it sees what was written.
            inside.run("BEGIN ISOLATION LEVEL REPEATABLE READ")?;
            inside.run(end)?;
            inside.granted(acquire)?;
            ensure!(inside.granted("SELECT count(*) FROM t")? == 1);
            Ok(())
        })?;
    }
    Ok(())
}

#[lab_test]
fn a_guard_prepared_long_before_its_deadline_is_too_late(lab: &Lab) -> Result<()> {
    let guarded = |outside: &mut Session| {
        outside.run("CREATE TABLE t (n int)")?;
        let token = outside.acquire("job", "7 s")?;
        outside.run("BEGIN")?;
        outside.run(&format!("SELECT lease_guard('job', {token}); INSERT INTO t VALUES (1)"))?;
        outside.run("PREPARE TRANSACTION 'long before'")?;
        outside.wait_expired("job")
    };
    at_each_level(lab, guarded, |_, outside, inside| {
        ensure!(inside.granted("SELECT count(*) FROM t")? == 0, "the predecessor's world");
        outside.run("COMMIT PREPARED 'long before'")?;
        too_late(inside)
    })
}

#[lab_test]
fn a_guard_whose_grant_another_was_changing_is_too_late(lab: &Lab) -> Result<()> {
    for level in KEEPING {
        within_ttl(|ttl| is_being_changed(lab, level, ttl)).map_err(|e| e.context(level))?;
    }
    Ok(())
}

fn is_being_changed(lab: &Lab, level: &str, ttl: &str) -> Result<Option<()>> {
    let db = lab.database()?;
    let (mut other, mut inside) = (db.connect()?, db.connect()?);
    other.run("CREATE TABLE t (n int)")?;
    let token = other.acquire("job", ttl)?;
    let mut guarded = db.connect()?;
    if guarded.run(&format!("BEGIN; SELECT lease_guard('job', {token})")).is_err() {
        return Ok(None);
    }
    guarded.run("INSERT INTO t VALUES (1)")?;
    other.run("BEGIN")?;
    if other.release("job", token)?.is_none() {
        return Ok(None);
    }
    inside.wait_expired("job")?;
    inside.run(&format!("BEGIN ISOLATION LEVEL {level}"))?;
    ensure!(inside.granted("SELECT count(*) FROM t")? == 0, "the predecessor's world");
    guarded.run("COMMIT")?;
    // What the other did is undone: the grant's row is as it was at the snapshot.
    other.run("ROLLBACK")?;
    too_late(&mut inside).map(Some)
}

/// A guarded transaction that was prepared when the grant had so long.
fn prepared(session: &mut Session, ttl: &str, gid: &str) -> Result<i64> {
    session.run("CREATE TABLE IF NOT EXISTS t (n int)")?;
    let token = session.acquire("job", ttl)?;
    session.run(&format!("BEGIN; SELECT lease_guard('job', {token}); INSERT INTO t VALUES (1)"))?;
    session.run(&format!("PREPARE TRANSACTION '{gid}'"))?;
    Ok(token)
}

#[lab_test]
fn a_grant_that_ended_under_a_prepared_guard_is_too_late(lab: &Lab) -> Result<()> {
    for end in ["lease_release('job', $)", "lease_revoke('job')", "lease_renew('job', $, '1 ms')"] {
        let gid = format!("ended under it: {end}").replace('\'', "");
        let ended = |outside: &mut Session| {
            let token = prepared(outside, "1 h", &gid)?;
            outside.granted(&format!("SELECT {}", end.replace('$', &token.to_string())))?;
            outside.wait_expired("job")
        };
        at_each_level(lab, ended, |_, outside, inside| {
            ensure!(inside.granted("SELECT count(*) FROM t")? == 0, "the predecessor's world");
            outside.run(&format!("COMMIT PREPARED '{gid}'"))?;
            too_late(inside).map_err(|e| e.context(end))
        })?;
    }
    Ok(())
}

#[lab_test]
fn a_guard_whose_commit_waits_for_a_standby_is_too_late(lab: &Lab) -> Result<()> {
    let cluster = lab
        .builder()
        .set("synchronous_commit", "local")
        .set("synchronous_standby_names", "nobody")
        .start()?;
    let mut admin = cluster.connect("postgres")?;
    admin.run("CREATE EXTENSION pg_fence; CREATE TABLE t (n int)")?;
    let token = admin.acquire("job", "1 h")?;
    let mut guarded = Background::connect(&cluster.conninfo("postgres"))?;
    guarded.send("SET synchronous_commit = on")?;
    guarded.rows()?;
    guarded.send(&format!(
        "BEGIN; SELECT lease_guard('job', {token}); INSERT INTO t VALUES (1); COMMIT"
    ))?;
    let waits = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE pid = {} AND wait_event = 'SyncRep'",
        guarded.pid()
    );
    wait_until("the commit waits", PATIENCE, || admin.granted(&waits).is_ok_and(|n| n == 1))?;
    admin.release("job", token)?.expect("held");
    let mut inside = cluster.connect("postgres")?;
    inside.run("BEGIN ISOLATION LEVEL REPEATABLE READ")?;
    ensure!(inside.granted("SELECT count(*) FROM t")? == 0, "the predecessor's world");
    admin.run(&format!("SELECT pg_cancel_backend({})", guarded.pid()))?;
    guarded.rows()?;
    too_late(&mut inside)
}

#[lab_test]
fn a_prepared_guard_holds_up_no_change_of_the_grant(lab: &Lab) -> Result<()> {
    for ttl in ["4 s", "1 h"] {
        let db = lab.database()?;
        let mut session = db.connect()?;
        session.run("SET statement_timeout = '10 s'")?;
        let gid = format!("holds up nothing {ttl}");
        let token = prepared(&mut session, ttl, &gid)?;
        let token = session.renew("job", token)?.expect("held");
        session.release("job", token)?.expect("held");
        ensure!(session.is_taken("job")?, "it is guarded");
        session.run(&format!("COMMIT PREPARED '{gid}'"))?;
        let token = prepared(&mut session, ttl, &gid)?;
        session.granted("SELECT lease_revoke('job')")?;
        ensure!(!session.speaks("job", token)?);
        session.run(&format!("ROLLBACK PREPARED '{gid}'"))?;
        ensure!(!session.is_taken("job")?);
    }
    Ok(())
}

#[lab_test]
fn a_guard_that_was_rolled_back_is_no_reason_to_fail(lab: &Lab) -> Result<()> {
    at_each_level(lab, guard_past_its_deadline, |_, outside, inside| {
        // The deadline must have passed before the transaction began, too.
        inside.nothing("SELECT lease_acquire('job')")?;
        outside.run("ROLLBACK")?;
        inside.acquire("job", "1 h")?;
        inside.run("COMMIT")
    })
}

#[lab_test]
fn a_grant_that_came_and_went_after_the_snapshot_is_too_late(lab: &Lab) -> Result<()> {
    let freed = |outside: &mut Session| {
        hold(outside)?;
        outside.run(&format!("SELECT lease_release('job', {FIRST})"))
    };
    at_each_level(lab, freed, |_, outside, inside| {
        let token = outside.acquire("job", "1 h")?;
        outside.release("job", token)?;
        too_late(inside)
    })?;
    // Also where the name was new.
    at_each_level(
        lab,
        |_| Ok(()),
        |_, outside, inside| {
            let token = outside.acquire("job", "1 h")?;
            outside.release("job", token)?;
            too_late(inside)
        },
    )
}

#[lab_test]
fn a_pruning_after_the_snapshot_does_not_hide_the_predecessor(lab: &Lab) -> Result<()> {
    at_each_level(lab, hold, |_, outside, inside| {
        outside.run(&format!("SELECT lease_release('job', {FIRST})"))?;
        ensure!(outside.granted("SELECT lease_prune('0')")? == 1);
        too_late(inside)
    })
}

#[lab_test]
fn a_retried_transaction_is_granted(lab: &Lab) -> Result<()> {
    at_each_level(lab, hold, |_, outside, inside| {
        outside.granted("SELECT lease_revoke('job')")?;
        let level = inside.text("SHOW transaction_isolation")?.unwrap_or_default();
        too_late(inside)?;
        inside.run(&format!("BEGIN ISOLATION LEVEL {level}"))?;
        inside.acquire("job", "1 h")?;
        inside.run("COMMIT")
    })
}

#[lab_test]
fn what_ended_before_the_snapshot_is_granted(lab: &Lab) -> Result<()> {
    for level in KEEPING {
        let db = lab.database()?;
        let (mut outside, mut inside) = (db.connect()?, db.connect()?);
        let token = outside.acquire("released", "1 h")?;
        outside.acquire("expired", "2 s")?;
        // The transaction has begun, its snapshot is yet to be taken.
        inside.run(&format!("BEGIN ISOLATION LEVEL {level}"))?;
        outside.release("released", token)?;
        outside.wait_expired("expired")?;
        inside.acquire("released", "1 h")?;
        // Postgres does not tell when the snapshot was taken: a retry may be asked for, but once.
        let expired = "SELECT lease_acquire('expired')";
        match inside.try_rows(expired) {
            Ok(rows) => ensure!(rows[0][0].is_some(), "{level}: taken"),
            Err(fault) => {
                fault.expect("40001")?;
                inside.run(&format!("ROLLBACK; BEGIN ISOLATION LEVEL {level}"))?;
                inside.granted(expired)?;
            }
        }
        inside.run("COMMIT")?;
    }
    Ok(())
}

#[lab_test]
fn other_transactions_are_no_reason_to_fail(lab: &Lab) -> Result<()> {
    let freed = |outside: &mut Session| {
        outside.run("CREATE TABLE t (n int)")?;
        outside.run("SELECT lease_release('job', lease_acquire('job'))")?;
        // Has nothing to do with the lease, and ends after the snapshot.
        outside.run("BEGIN; INSERT INTO t VALUES (1); SELECT lease_acquire('other')")
    };
    at_each_level(lab, freed, |_, outside, inside| {
        outside.run("COMMIT; SELECT lease_acquire('third')")?;
        inside.acquire("job", "1 h")?;
        inside.run("COMMIT")
    })
}

#[lab_test]
fn a_lease_of_the_transaction_s_own_is_no_reason_to_fail(lab: &Lab) -> Result<()> {
    at_each_level(
        lab,
        |outside| outside.run("CREATE TABLE t (n int)"),
        |_, outside, inside| {
            // Something that has nothing to do with the lease is committed before each acquire.
            let commit = |outside: &mut Session| outside.run("INSERT INTO t VALUES (1)");
            commit(outside)?;
            let token = inside.acquire("job", "1 h")?;
            ensure!(outside.is_taken("job")?);
            inside.granted(&format!("SELECT lease_guard('job', {token})"))?;
            inside.nothing("SELECT lease_acquire('job')")?;
            let closing = inside.release("job", token)?.expect("held");
            ensure!(
                inside.speaks("job", closing)? && inside.release("job", token)? == Some(closing)
            );
            commit(outside)?;
            inside.granted("SELECT lease_acquire('again', 'me', reclaim => true)")?;
            commit(outside)?;
            inside.granted("SELECT lease_acquire('again', 'me', reclaim => true)")?;
            inside.granted("SELECT lease_revoke('again')")?;
            commit(outside)?;
            inside.acquire("again", "1 h")?;
            for _ in 0..2 {
                inside.run("SAVEPOINT s")?;
                commit(outside)?;
                let shared = "lease_acquire('shared', 'me', reclaim => true, shared => true)";
                inside.granted(&format!("SELECT {shared} + {shared}"))?;
                inside.run("ROLLBACK TO s; RELEASE s")?;
            }
            inside.run("COMMIT")?;
            ensure!(outside.is_taken("again")? && !outside.is_taken("job")?);
            Ok(())
        },
    )
}

#[lab_test]
fn a_grant_that_a_savepoint_took_back_vouches_for_nothing(lab: &Lab) -> Result<()> {
    at_each_level(
        lab,
        |_| Ok(()),
        |_, outside, inside| {
            inside.run("SAVEPOINT s; SELECT lease_acquire('job', 'me', reclaim => true)")?;
            inside.run("ROLLBACK TO s")?;
            // A predecessor, whose work the snapshot does not see.
            let token = outside.acquire("job", "1 h")?;
            ensure!(outside.release("job", token)?.is_some());
            too_late(inside)
        },
    )
}

#[lab_test]
fn what_is_taken_is_null_not_an_error(lab: &Lab) -> Result<()> {
    at_each_level(lab, hold, |_, outside, inside| {
        inside.nothing("SELECT lease_acquire('job')")?;
        outside.granted(&format!("SELECT lease_renew('job', {FIRST})"))?;
        inside.nothing("SELECT lease_acquire('job')")?;
        outside.run("SELECT lease_revoke('job')")?;
        outside.acquire("job", "1 h")?;
        inside.nothing("SELECT lease_acquire('job')")?;
        outside.acquire("new", "1 h")?;
        inside.nothing("SELECT lease_acquire('new')")?;
        outside.run("BEGIN; SELECT lease_acquire('newer')")?;
        inside.nothing("SELECT lease_acquire('newer')")?;
        outside.run("COMMIT")?;
        inside.run("COMMIT")
    })
}

#[lab_test]
fn a_guard_of_a_grant_after_the_snapshot_is_too_late(lab: &Lab) -> Result<()> {
    at_each_level(
        lab,
        |_| Ok(()),
        |_, outside, inside| {
            let token = outside.acquire("job", "1 h")?;
            ensure!(inside.speaks("job", token)?, "a check is of this instant");
            let guard = format!("SELECT lease_guard('job', {token})");
            let fault = inside.refused(&guard, "40001")?;
            ensure!(fault.json()?["lease"] == "job", "{fault}");
            inside.run("ROLLBACK; BEGIN ISOLATION LEVEL REPEATABLE READ")?;
            inside.run(&guard)?;
            inside.run("COMMIT")
        },
    )
}

#[lab_test]
fn a_guard_of_a_grant_before_the_snapshot_stands(lab: &Lab) -> Result<()> {
    at_each_level(lab, hold, |_, outside, inside| {
        // Renewed since: it is the same grant still.
        let renewed = outside.granted(&format!("SELECT lease_renew('job', {FIRST})"))?;
        inside.granted(&format!("SELECT lease_guard('job', {FIRST})"))?;
        inside.granted(&format!("SELECT lease_guard('job', {renewed})"))?;
        inside.run("COMMIT")
    })
}

#[lab_test]
fn renewals_and_releases_are_no_reason_to_fail(lab: &Lab) -> Result<()> {
    at_each_level(lab, hold, |_, outside, inside| {
        let token = outside.granted(&format!("SELECT {FIRST}"))?;
        let theirs = outside.renew("job", token)?.expect("held");
        let mine = inside.renew("job", token)?.expect("held");
        ensure!(mine > theirs);
        let latest = inside.renew("job", theirs)?.expect("by a token after the snapshot");
        ensure!(inside.release("job", latest)?.is_some());
        // A grant of after the snapshot, too: it is not read, only ended.
        let other = outside.acquire("other", "1 h")?;
        ensure!(inside.renew("other", other)?.is_some());
        inside.granted("SELECT lease_revoke('other')")?;
        inside.nothing("SELECT lease_revoke('nobody')")?;
        inside.run("COMMIT")?;
        ensure!(!outside.is_taken("job")? && !outside.is_taken("other")?);
        // A lease lost since is NULL.
        let token = outside.acquire("third", "1 h")?;
        inside.run("BEGIN ISOLATION LEVEL SERIALIZABLE; SELECT count(*) FROM pg_class")?;
        outside.release("third", token)?;
        ensure!(inside.renew("third", token)?.is_none());
        ensure!(inside.release("third", token)?.is_none());
        inside.run("COMMIT")
    })
}

#[lab_test]
fn sessions_with_other_leases_do_not_conflict(lab: &Lab) -> Result<()> {
    for level in KEEPING {
        let db = lab.database()?;
        let mut sessions: Vec<Session> = (0..6).map(|_| db.connect()).collect::<Result<_>>()?;
        // Twice: the first time the names are new.
        for _ in 0..2 {
            let mut tokens = Vec::new();
            for session in &mut sessions {
                session.run(&format!("BEGIN ISOLATION LEVEL {level}"))?;
            }
            for (n, session) in sessions.iter_mut().enumerate() {
                tokens.push(session.acquire(&format!("job{n}"), "1 h")?);
            }
            for (n, session) in sessions.iter_mut().enumerate() {
                ensure!(session.renew(&format!("job{n}"), tokens[n])?.is_some());
            }
            for session in &mut sessions {
                session.run("COMMIT").map_err(|e| e.context(level))?;
            }
            for (n, session) in sessions.iter_mut().enumerate() {
                session.release(&format!("job{n}"), tokens[n])?;
            }
        }
    }
    Ok(())
}
