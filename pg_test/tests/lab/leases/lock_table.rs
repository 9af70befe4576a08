//! One transaction has no more than a quarter of the server's lock table, so that others can still work.

use pg_test::{ensure, lab_test, Calls, Cluster, Lab, Result, Session};

/// A server with a small lock table.
fn small(lab: &Lab) -> Result<(Cluster, Session)> {
    let settings = [
        ("max_connections", "40"),
        ("max_locks_per_transaction", "10"),
        ("max_prepared_transactions", "10"),
    ];
    let builder = settings.into_iter().fold(lab.builder(), |b, (name, value)| b.set(name, value));
    let cluster = builder.start()?;
    let mut session = cluster.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    Ok((cluster, session))
}

/// A quarter of the entries for which the server has room.
fn quarter(session: &mut Session) -> Result<i64> {
    // Two processes besides have slots of their own from 17 on, not one, and workers of autovacuum from 18 on.
    session.granted(
        "SELECT current_setting('max_locks_per_transaction')::int \
             * (sum(setting::int) + CASE WHEN current_setting('server_version_num')::int >= 170000 \
                                         THEN 2 ELSE 1 END) / 4 \
         FROM pg_settings WHERE name IN ('max_connections', 'max_worker_processes', 'max_wal_senders', \
             'max_prepared_transactions', coalesce((SELECT s.name FROM pg_settings s \
                 WHERE s.name = 'autovacuum_worker_slots'), 'autovacuum_max_workers'))",
    )
}

/// How many entries a session's leases have.
fn entries(session: &mut Session, pid: i32) -> Result<i64> {
    session.granted(&format!(
        "SELECT count(DISTINCT (objid, classid, objsubid)) FROM pg_locks \
         WHERE pid = {pid} AND locktype = 'advisory'"
    ))
}

/// Acquires leases until that is refused, in a transaction that stays open.
fn acquire_until_refused(session: &mut Session, prefix: &str) -> Result<()> {
    session.run("BEGIN")?;
    for n in 0.. {
        session.run("SAVEPOINT s")?;
        match session.try_rows(&format!("SELECT lease_acquire('{prefix}{n}', ttl => '1 h')")) {
            Ok(_) => session.run("RELEASE s")?,
            Err(fault) => {
                let fault = fault.expect("53200")?;
                let hint = fault.hint.as_deref().unwrap_or_default();
                ensure!(hint.contains("max_locks_per_transaction"), "{fault}");
                ensure!(fault.message.contains("lock table"), "{fault}");
                ensure!(fault.json()?["locks"].as_i64() >= Some(n), "{fault}");
                return session.run("ROLLBACK TO s");
            }
        }
    }
    unreachable!("there are always more numbers")
}

#[lab_test]
fn one_transaction_does_not_fill_the_lock_table(lab: &Lab) -> Result<()> {
    let (cluster, mut outside) = small(lab)?;
    let quarter = quarter(&mut outside)?;
    // Also where two do it at the same time.
    let mut greedy = [cluster.connect("postgres")?, cluster.connect("postgres")?];
    for (n, session) in greedy.iter_mut().enumerate() {
        acquire_until_refused(session, &format!("job{n}-"))?;
        let has = entries(&mut outside, session.pid())?;
        ensure!((quarter - 2..=quarter).contains(&has), "{has} of {quarter}");
    }
    // Others connect and do what they do.
    for n in 0..10 {
        let mut other = cluster.connect("postgres")?;
        other.run(&format!("CREATE TABLE t{n} (id int PRIMARY KEY, fence bigint)"))?;
        other.run(&format!("SELECT fence_protect('t{n}', lease => 't:{{id}}')"))?;
        let token = other.acquire("t:1", "1 h")?;
        other.run(&format!("INSERT INTO t{n} VALUES (1, {token})"))?;
        other.release("t:1", token)?.expect("held");
        ensure!(other.is_taken("job0-0")?);
    }
    // It can work with the leases that it has, and give them back.
    for session in &mut greedy {
        session.run("COMMIT")?;
    }
    ensure!(outside.granted("SELECT count(*) FROM fence.leases WHERE state = 'held'")? > quarter);
    Ok(())
}

#[lab_test]
fn a_write_of_many_bound_rows_is_refused_in_time(lab: &Lab) -> Result<()> {
    let (cluster, mut session) = small(lab)?;
    let quarter = quarter(&mut session)?;
    session.run(&format!(
        "CREATE TABLE t (id int PRIMARY KEY, v int, fence bigint); \
         INSERT INTO t SELECT n, 0 FROM generate_series(1, {quarter} + 1) n; \
         SELECT fence_protect('t', lease => 'row:{{id}}')"
    ))?;
    let mut token = 0;
    for n in 1..=quarter + 1 {
        token = session.acquire(&format!("row:{n}"), "1 h")?;
        session.run(&format!("UPDATE t SET v = 1, fence = {token} WHERE id = {n}"))?;
    }
    let write = "UPDATE t SET v = 2, fence = (SELECT first_token FROM fence.leases l WHERE l.name = 'row:' || t.id)";
    session.refused(write, "53200")?;
    session.run("BEGIN")?;
    // A guard of an exclusive grant has one entry.
    session.run(&format!("{write} WHERE id <= {quarter}"))?;
    cluster.connect("postgres")?.run("CREATE TABLE other (id int)")?;
    session.run("COMMIT")?;
    ensure!(session.granted("SELECT count(*) FROM t WHERE v = 2")? == quarter);
    ensure!(session.speaks(&format!("row:{}", quarter + 1), token)?);
    Ok(())
}

#[lab_test]
fn what_is_given_back_is_counted_off(lab: &Lab) -> Result<()> {
    let (cluster, mut session) = small(lab)?;
    let mut other = cluster.connect("postgres")?;
    let many = 3 * quarter(&mut session)?;
    let each = |work: &str| format!("DO $$ BEGIN FOR n IN 1..{many} LOOP {work}; END LOOP; END $$");
    session.run(&each("PERFORM lease_acquire('theirs' || n, ttl => '1 h'); COMMIT"))?;
    other.run("BEGIN")?;
    for work in [
        // A try that loses.
        "IF lease_acquire('theirs' || n) IS NOT NULL THEN RAISE 'granted'; END IF",
        // Leases that are rolled back.
        "BEGIN PERFORM lease_acquire('mine' || n); RAISE division_by_zero; EXCEPTION WHEN division_by_zero THEN END",
        // A guard that fails.
        "BEGIN PERFORM lease_guard('theirs' || n, 1000000000); EXCEPTION WHEN SQLSTATE 'PF004' THEN END",
        // The same lease again and again.
        "PERFORM lease_release('one', lease_renew('one', lease_acquire('one')))",
        "PERFORM lease_guard('theirs1', (SELECT token FROM fence.leases WHERE name = 'theirs1'))",
        "PERFORM lease_renew('theirs1', (SELECT token FROM fence.leases WHERE name = 'theirs1'))",
    ] {
        other.run(&each(work))?;
    }
    let pid = other.pid();
    ensure!(entries(&mut session, pid)? == 2, "two leases, one of them guarded");
    // There is as much room as before.
    other.run("ROLLBACK")?;
    acquire_until_refused(&mut other, "more")?;
    other.run("ROLLBACK; BEGIN; SAVEPOINT s; SELECT lease_acquire('x')")?;
    other.run("ROLLBACK TO s; RELEASE s; COMMIT")?;
    // Rows that are pruned are locked one by one.
    session.run("UPDATE fence.lease SET closing_token = first_token, ended_at = '2026-01-01'")?;
    ensure!(session.granted("SELECT lease_prune('0')")? >= many);
    Ok(())
}

#[lab_test]
fn a_thousand_leases_at_once_are_few_enough(lab: &Lab) -> Result<()> {
    // As the server comes.
    let defaults = [("max_connections", "100"), ("max_prepared_transactions", "0")];
    let builder = defaults.into_iter().fold(lab.builder(), |b, (name, value)| b.set(name, value));
    let cluster = builder.start()?;
    let mut session = cluster.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    let names = "(SELECT array_agg('job' || n) FROM generate_series(1, 1000) n)";
    for _ in 0..2 {
        session.run("BEGIN")?;
        let token = session.granted(&format!("SELECT lease_acquire_all({names}, ttl => '1 h')"))?;
        let token = session.granted(&format!("SELECT lease_renew_all({names}, {token})"))?;
        session.granted(&format!("SELECT lease_release_all({names}, {token})"))?;
        session.run("COMMIT")?;
    }
    Ok(())
}

#[lab_test]
fn prepared_transactions_count_for_themselves(lab: &Lab) -> Result<()> {
    let (_cluster, mut session) = small(lab)?;
    acquire_until_refused(&mut session, "first")?;
    session.run("PREPARE TRANSACTION 'p'")?;
    acquire_until_refused(&mut session, "second")?;
    session.run("ROLLBACK")?;
    session.run("ROLLBACK PREPARED 'p'")?;
    ensure!(!session.is_taken("first0")?);
    Ok(())
}

#[lab_test]
fn what_there_was_no_room_for_is_kept_by_the_next_call(lab: &Lab) -> Result<()> {
    let (cluster, mut session) = small(lab)?;
    let quarter = quarter(&mut session)?;
    let many = quarter + quarter / 2;
    session
        .run("CREATE TABLE held (name text PRIMARY KEY, token bigint, done bool DEFAULT false)")?;
    session.run(&format!(
        "DO $$ BEGIN FOR n IN 1..{many} LOOP
             INSERT INTO held VALUES ('job' || n, lease_acquire('job' || n, ttl => '1 h')); COMMIT;
         END LOOP; END $$"
    ))?;
    // Locks that the last call has not kept.
    let keep =
        "SELECT k.* FROM (SELECT array_agg(name) AS names, array_agg(token) AS tokens FROM held WHERE NOT done) h, \
         lease_keep(h.names, h.tokens) k";
    let count = |or: &str| {
        format!(
            "WITH k AS MATERIALIZED ({keep}), u AS ( \
                 UPDATE held SET done = true FROM k WHERE k.name = held.name AND k.outcome = 'kept') \
             SELECT count(*) FROM k WHERE outcome = 'kept' OR {or}"
        )
    };
    let later = "outcome = 'later' AND code = '53200' AND again_in = '0' AND remaining > '50 min' AND renewed IS NULL";
    ensure!(session.granted(&count(later))? == many, "some were neither kept nor left");
    let left = many - session.granted("SELECT count(*) FROM held WHERE done")?;
    ensure!((quarter / 2..=quarter / 2 + 2).contains(&left), "{left} of {many} are left");
    ensure!(session.granted(&count("false"))? == left);
    ensure!(session.granted("SELECT count(*) FROM fence.leases WHERE renewals = 1")? == many);
    // Where others have filled it to the last entry, nothing is raised either.
    let mut other = cluster.connect("postgres")?;
    other.run("BEGIN")?;
    for n in 0.. {
        other.run("SAVEPOINT s")?;
        if other.try_rows(&format!("SELECT pg_advisory_xact_lock({n}); RELEASE s")).is_err() {
            other.run("ROLLBACK TO s")?;
            break;
        }
    }
    let later =
        format!("SELECT count(*) FROM ({}) k WHERE {later}", keep.replace("NOT done", "done"));
    ensure!(session.granted(&later)? == many, "the table is full");
    other.run("ROLLBACK")?;
    Ok(())
}

#[lab_test]
fn a_session_lease_is_looked_at_where_the_lock_table_is_full(lab: &Lab) -> Result<()> {
    let (cluster, mut session) = small(lab)?;
    let token = session.granted("SELECT lease_acquire('job', session => true)")?;
    let mut looker = cluster.connect("postgres")?;
    ensure!(looker.speaks("job", token)?);
    let mut hog = cluster.connect("postgres")?;
    hog.refused("SELECT pg_advisory_lock(n) FROM generate_series(1, 1000000) AS n", "53200")?;
    // The locks left after the error: the session has kept them.
    while hog.try_rows("SELECT pg_advisory_lock((random() * 1e15)::bigint)").is_ok() {}
    ensure!(looker.speaks("job", token)?, "looking takes a lock");
    Ok(())
}

#[lab_test]
fn a_full_table_is_told_from_a_lease_in_somebody_s_hands(lab: &Lab) -> Result<()> {
    let (cluster, mut session) = small(lab)?;
    let token = session.acquire("job", "1 h")?;
    let keep = format!("SELECT code FROM lease_keep(ARRAY['job'], ARRAY[{token}])");
    // A guard keeps no renewal off.
    let mut guard = cluster.connect("postgres")?;
    guard.run(&format!("BEGIN; SELECT lease_guard('job', {token})"))?;
    ensure!(session.text(&keep)?.is_none());
    // Entries of one lock for several sessions fill the table, too.
    let mut hogs = Vec::new();
    for _ in 0..10 {
        hogs.push(cluster.connect("postgres")?);
    }
    let mut locks = 0;
    while hogs[0].try_rows(&format!("SELECT pg_advisory_lock_shared({locks})")).is_ok() {
        locks += 1;
    }
    let all = format!("SELECT pg_advisory_lock_shared(n) FROM generate_series(0, {locks} - 1) n");
    ensure!(!hogs.iter_mut().skip(1).all(|hog| hog.try_rows(&all).is_ok()), "it is not full");
    let code = session.text(&keep)?;
    ensure!(code.as_deref() == Some("53200"), "{code:?}");
    Ok(())
}

#[lab_test]
fn who_claims_more_than_there_is_room_for_gets_what_there_is(lab: &Lab) -> Result<()> {
    let (_cluster, mut session) = small(lab)?;
    let quarter = quarter(&mut session)?;
    for more in ["", ", session => true"] {
        let names = "ARRAY(SELECT 'job' || n FROM generate_series(1, 1000) n)";
        let claim = format!("SELECT count(*) FROM lease_acquire_any({names}, 1000{more})");
        session.run("BEGIN")?;
        let had = session.granted(&claim)?;
        // One of a session takes a second entry, which the session keeps.
        let wanted = if more.is_empty() { quarter } else { quarter / 2 };
        ensure!((wanted - 2..=wanted).contains(&had), "{had} of {quarter}{more}");
        session.run("SAVEPOINT s")?;
        let fault = session.refused(&claim, "53200")?;
        ensure!(fault.hint.is_some(), "{fault}");
        session.run("ROLLBACK TO s; COMMIT")?;
        ensure!(session.granted("SELECT count(*) FROM fence.leases WHERE state = 'held'")? == had);
        session.run("DISCARD ALL")?;
        session.run("SELECT lease_revoke(name) FROM fence.leases")?;
    }
    Ok(())
}
