//! Leftovers that a call that came to nothing must not have: memory, queues, a grant beside another. The rest is in
//! failed_calls.script.

use crate::support::concurrency::{gets_nothing, token_of, waiting, waiting_at_most, WAIT};
use pg_test::calls::within_ttl;
use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};

/// How the lease may be asked for, but for its ttl.
const KINDS: [&str; 3] = ["shared => false", "shared => true", "slots => 3"];

fn ask(kind: &str, ttl: &str) -> String {
    format!("SELECT lease_acquire('job', ttl => '{ttl}', {kind})")
}

#[lab_test]
fn a_grant_that_is_renewed_past_its_deadline_excludes_all_but_its_own_kind(
    lab: &Lab,
) -> Result<()> {
    std::thread::scope(|scope| {
        let pairs = KINDS.into_iter().flat_map(|a| KINDS.map(|b| (a, b))).filter(|(a, b)| a != b);
        let callers: Vec<_> =
            pairs.map(|(a, b)| scope.spawn(move || renewed_past_its_deadline(lab, a, b))).collect();
        callers.into_iter().try_for_each(|caller| caller.join().expect("no panic"))
    })
}

/// A renewal that is not committed when the deadline passes keeps out the other kind.
fn renewed_past_its_deadline(lab: &Lab, kind: &str, other_kind: &str) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    within_ttl(|ttl| {
        // One beside it has ended, so that there is room before and behind.
        let gone = holder.granted(&ask(kind, ttl))?;
        let beside = holder.token(&ask(kind, ttl))?;
        if beside.is_some() {
            holder.release("job", gone)?;
        }
        let token = beside.unwrap_or(gone);
        holder.run("BEGIN")?;
        let renewed = holder.token(&format!("SELECT lease_renew('job', {token}, ttl => '1 h')"))?;
        if renewed.is_none() {
            holder.run("ROLLBACK")?;
        }
        Ok(renewed)
    })?;
    other.wait_expired("job")?;
    let got = other.token(&ask(other_kind, "1 h"))?;
    ensure!(got.is_none(), "{other_kind} beside {kind}: {got:?}");
    holder.run("COMMIT")?;
    let held = other.rows("SELECT mode, token FROM lease_info('job') WHERE state = 'held'")?;
    ensure!(held.iter().all(|row| row[0] == held[0][0]), "{held:?}");
    Ok(())
}

#[lab_test]
fn who_was_second_in_the_queue_gives_the_queue_back(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holder = db.connect()?;
    let mut token = holder.acquire("job", "1 h")?;
    for wait in ["short", "10 min"] {
        let mut head = waiting(&db, WAIT)?;
        let mut second = waiting_at_most(&db, |seconds| {
            let wait = if wait == "short" { format!("{seconds} s") } else { wait.to_owned() };
            format!("BEGIN; SELECT lease_acquire('job', ttl => '1 h', wait => '{wait}')")
        })?;
        if wait == "short" {
            gets_nothing(&mut second)?;
            holder.release("job", token)?.expect("held");
            token = token_of(&mut head)?;
        } else {
            holder.release("job", token)?.expect("held");
            holder.release("job", token_of(&mut head)?)?.expect("held");
            token = token_of(&mut second)?;
            second.send(&format!("SELECT lease_release('job', {token})"))?;
            token_of(&mut second)?;
            second.send("SAVEPOINT s")?;
            second.rows()?;
        }
        let lines = "SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database \
                     WHERE d.datname = current_database() AND objsubid = x'5048'::int";
        ensure!(holder.granted(lines)? == 0, "the queue is locked though nobody waits ({wait})");
        if wait == "short" {
            // Its transaction is open still.
            holder.release("job", token)?.expect("held");
            token = holder.acquire("job", "1 h")?;
        }
    }
    Ok(())
}

#[lab_test]
fn a_prune_keeps_no_memory_of_what_it_pruned(lab: &Lab) -> Result<()> {
    const ROWS: i64 = 40_000;
    let db = lab.database()?;
    let mut session = db.connect()?;
    // As many as one transaction may have.
    for batch in 0..ROWS / 1_000 {
        session.granted(&format!(
            "SELECT count(lease_release('job ' || i, lease_acquire('job ' || i)))
               FROM generate_series({batch} * 1000 + 1, {batch} * 1000 + 1000) AS i"
        ))?;
    }
    let mut fresh = db.connect()?;
    fresh.granted("SELECT lease_prune('1 h')")?;
    let before = memory(&fresh)?;
    ensure!(fresh.granted("SELECT lease_prune('0')")? == ROWS);
    // A copy of each row would be some 13 MB, of which the C library gives back little.
    let grown = memory(&fresh)? - before;
    ensure!(grown < 6_000, "{grown} kB for {ROWS} rows");
    Ok(())
}

/// The memory that the session's backend has of its own, in kB.
fn memory(session: &Session) -> Result<i64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", session.pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap_or_default();
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}

#[lab_test]
fn errors_that_are_caught_keep_no_memory(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run("CREATE TABLE t (id int PRIMARY KEY, fence bigint); INSERT INTO t VALUES (1); SELECT fence_protect('t')")?;
    // One of Postgres's own, refusals of a call and of a write.
    for (call, sqlstate) in [
        ("PERFORM lease_acquire('job')", "25006"),
        ("PERFORM lease_check('job', 0)", "22023"),
        ("UPDATE t SET fence = 0", "PF003"),
    ] {
        let only = if sqlstate == "25006" { "SET TRANSACTION READ ONLY;" } else { "" };
        let fail = format!(
            "BEGIN; {only} DO $$ BEGIN FOR i IN 1..30000 LOOP BEGIN {call}; RAISE 'it succeeded'; \
             EXCEPTION WHEN SQLSTATE '{sqlstate}' THEN NULL; END; END LOOP; END $$; COMMIT"
        );
        session.run(&fail)?;
        let before = memory(&session)?;
        for _ in 0..3 {
            session.run(&fail)?;
        }
        let kept = memory(&session)? - before;
        ensure!(kept < 1_000, "{kept} kB are left of 90,000 times {sqlstate}");
    }
    Ok(())
}
