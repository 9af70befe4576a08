//! REPEATABLE READ and SERIALIZABLE, read-only transactions and standbys.

use pg_test::{ensure, Calls, Cluster, Database, Lab, Result, Session};

pg_test::trials![
    what_was_free_is_granted,
    a_release_after_the_snapshot_is_too_late,
    a_revocation_after_the_snapshot_is_too_late,
    a_release_that_was_open_at_the_snapshot_is_too_late,
    an_expiry_after_the_snapshot_is_too_late,
    a_guard_that_ended_after_the_snapshot_is_too_late,
    a_grant_that_came_and_went_after_the_snapshot_is_too_late,
    a_pruning_after_the_snapshot_does_not_hide_the_predecessor,
    a_retried_transaction_is_granted,
    what_ended_before_the_snapshot_is_granted,
    other_transactions_are_no_reason_to_fail,
    a_lease_of_the_transaction_s_own_is_no_reason_to_fail,
    what_is_taken_is_null_not_an_error,
    a_guard_of_a_grant_after_the_snapshot_is_too_late,
    a_guard_of_a_grant_before_the_snapshot_stands,
    renewals_and_releases_are_no_reason_to_fail,
    sessions_with_other_leases_do_not_conflict,
    a_read_only_transaction_only_looks,
    a_standby_only_looks,
];

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

fn a_release_after_the_snapshot_is_too_late(lab: &Lab) -> Result<()> {
    at_each_level(lab, hold, |_, outside, inside| {
        outside.granted(&format!("SELECT lease_release('job', {FIRST})"))?;
        too_late(inside)
    })
}

fn a_revocation_after_the_snapshot_is_too_late(lab: &Lab) -> Result<()> {
    at_each_level(lab, hold, |_, outside, inside| {
        outside.granted("SELECT lease_revoke('job')")?;
        too_late(inside)
    })
}

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

fn an_expiry_after_the_snapshot_is_too_late(lab: &Lab) -> Result<()> {
    let short = |outside: &mut Session| outside.acquire("job", "2 s").map(drop);
    at_each_level(lab, short, |_, outside, inside| {
        // The predecessor may have written until its deadline.
        inside.nothing("SELECT lease_acquire('job')")?;
        outside.wait_expired("job")?;
        too_late(inside)
    })
}

fn a_guard_that_ended_after_the_snapshot_is_too_late(lab: &Lab) -> Result<()> {
    // The grant is over before the snapshot, its guarded transaction is not.
    for end in ["COMMIT", "PREPARE TRANSACTION 'guard'; COMMIT PREPARED 'guard'"] {
        let guarded = |outside: &mut Session| {
            outside.run("CREATE TABLE t (n int)")?;
            let token = outside.acquire("job", "1 s")?;
            outside.run("BEGIN")?;
            outside
                .run(&format!("SELECT lease_guard('job', {token}); INSERT INTO t VALUES (1)"))?;
            outside.wait_expired("job")
        };
        at_each_level(lab, guarded, |_, outside, inside| {
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

fn a_pruning_after_the_snapshot_does_not_hide_the_predecessor(lab: &Lab) -> Result<()> {
    at_each_level(lab, hold, |_, outside, inside| {
        outside.run(&format!("SELECT lease_release('job', {FIRST})"))?;
        ensure!(outside.granted("SELECT lease_prune('0')")? == 1);
        too_late(inside)
    })
}

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
        inside.acquire("expired", "1 h").map_err(|e| e.context(level))?;
        inside.run("COMMIT")?;
    }
    Ok(())
}

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

fn a_lease_of_the_transaction_s_own_is_no_reason_to_fail(lab: &Lab) -> Result<()> {
    at_each_level(
        lab,
        |_| Ok(()),
        |_, outside, inside| {
            let token = inside.acquire("job", "1 h")?;
            ensure!(outside.is_taken("job")?);
            inside.granted(&format!("SELECT lease_guard('job', {token})"))?;
            inside.nothing("SELECT lease_acquire('job')")?;
            let closing = inside.release("job", token)?.expect("held");
            ensure!(
                inside.speaks("job", closing)? && inside.release("job", token)? == Some(closing)
            );
            inside.run("SELECT lease_acquire('again', 'me', reclaim => true)")?;
            inside.granted("SELECT lease_acquire('again', 'me', reclaim => true)")?;
            inside.granted("SELECT lease_revoke('again')")?;
            inside.acquire("again", "1 h")?;
            inside.run("COMMIT")?;
            ensure!(outside.is_taken("again")? && !outside.is_taken("job")?);
            Ok(())
        },
    )
}

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

fn a_guard_of_a_grant_before_the_snapshot_stands(lab: &Lab) -> Result<()> {
    at_each_level(lab, hold, |_, outside, inside| {
        // Renewed since: it is the same grant still.
        let renewed = outside.granted(&format!("SELECT lease_renew('job', {FIRST})"))?;
        inside.granted(&format!("SELECT lease_guard('job', {FIRST})"))?;
        inside.granted(&format!("SELECT lease_guard('job', {renewed})"))?;
        inside.run("COMMIT")
    })
}

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

/// All that writes, refused with 25006; all that looks, answered.
fn only_looks(session: &mut Session, token: i64) -> Result<()> {
    for call in [
        "lease_acquire('new')",
        "lease_acquire('job')",
        "lease_acquire('job', wait => '1 s')",
        &format!("lease_renew('job', {token})"),
        "lease_renew('nobody', 1)",
        &format!("lease_release('job', {token})"),
        "lease_revoke('job')",
        "lease_revoke('nobody')",
        &format!("lease_guard('job', {token})"),
        "lease_prune()",
        "lease_acquire_all('{a,b}')",
        &format!("lease_renew_all('{{job}}', {token})"),
        &format!("lease_release_all('{{job}}', {token})"),
    ] {
        session.run("SAVEPOINT s")?;
        session.refused(&format!("SELECT {call}"), "25006")?;
        session.run("ROLLBACK TO s")?;
    }
    ensure!(session.speaks("job", token)? && !session.speaks("job", token + 1)?);
    let shown = "SELECT name || ' ' || state || ' ' || holder || ' ' || (remaining > '0')";
    for source in ["lease_info('job')", "fence.leases WHERE name = 'job'"] {
        let text = session.text(&format!("{shown} FROM {source}"))?;
        ensure!(text.as_deref() == Some("job held me true"), "{text:?}");
    }
    session.refused("SELECT lease_check('', 1)", "22023")?;
    Ok(())
}

fn a_read_only_transaction_only_looks(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.granted("SELECT lease_acquire('job', 'me', '1 h')")?;
    for begin in [
        "BEGIN READ ONLY",
        "BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY",
        "BEGIN; SET transaction_read_only = on",
    ] {
        session.run(begin)?;
        only_looks(&mut session, token).map_err(|e| e.context(begin))?;
        session.run("ROLLBACK")?;
    }
    ensure!(session.renew("job", token)?.is_some());
    Ok(())
}

fn a_standby_only_looks(lab: &Lab) -> Result<()> {
    let primary = lab.builder().without_fsync().start()?;
    let standby = lab.builder().without_fsync().standby_of(&primary)?;
    standby.start()?;
    let mut session = primary.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    let token = session.granted("SELECT lease_acquire('job', 'me', '1 h')")?;
    let look = |standby: &Cluster| -> Result<Session> {
        standby.wait_replayed(&primary)?;
        standby.connect("postgres")
    };
    let mut reader = look(&standby)?;
    reader.run("BEGIN")?;
    only_looks(&mut reader, token)?;
    reader.run("COMMIT; BEGIN ISOLATION LEVEL REPEATABLE READ")?;
    only_looks(&mut reader, token)?;
    reader.run("COMMIT")?;
    // It goes with the primary, and by its own clock.
    session.granted(&format!("SELECT lease_renew('job', {token}, '1 s')"))?;
    let mut reader = look(&standby)?;
    reader.wait_expired("job")?;
    ensure!(!reader.speaks("job", token)?);
    session.acquire("job", "1 h")?;
    let mut reader = look(&standby)?;
    ensure!(!reader.speaks("job", token)? && reader.speaks("job", token + 2)?);
    Ok(())
}
