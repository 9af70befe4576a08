//! What a call that came to nothing must not leave behind: locks, memory, a grant beside another.

use crate::support::concurrency::{gets_nothing, token_of, waiting, waiting_at_most, WAIT};
use pg_test::calls::within_ttl;
use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};

/// How the lease may be asked for, but for its ttl.
const KINDS: [&str; 3] = ["shared => false", "shared => true", "slots => 3"];

fn ask(kind: &str, ttl: &str) -> String {
    format!("SELECT lease_acquire('job', ttl => '{ttl}', {kind})")
}

/// No two live grants exclude each other.
fn only_one_kind_lives(session: &mut Session) -> Result<()> {
    let held = session.rows("SELECT mode, token FROM lease_info('job') WHERE state = 'held'")?;
    ensure!(held.iter().all(|row| row[0] == held[0][0]), "{held:?}");
    Ok(())
}

/// A grant of that kind. One beside it has ended, so that there is room before and behind.
fn acquire(holder: &mut Session, kind: &str, ttl: &str) -> Result<i64> {
    let gone = holder.granted(&ask(kind, ttl))?;
    let beside = holder.token(&ask(kind, ttl))?;
    if beside.is_some() {
        holder.release("job", gone)?;
    }
    Ok(beside.unwrap_or(gone))
}

/// For each two kinds: an open transaction on a grant of the first, past its deadline, which `opens` makes, with a
/// session beside it if need be; and one that asks for the second meanwhile.
fn past_its_deadline(
    lab: &Lab,
    opens: fn(&mut Session, &mut Session, &str) -> Result<()>,
) -> Result<()> {
    std::thread::scope(|scope| {
        let pairs = KINDS.into_iter().flat_map(|a| KINDS.map(|b| (a, b))).filter(|(a, b)| a != b);
        let callers: Vec<_> = pairs
            .map(|(first, second)| {
                scope.spawn(move || {
                    let db = lab.database()?;
                    let (mut holder, mut other) = (db.connect()?, db.connect()?);
                    opens(&mut holder, &mut other, first)?;
                    let got = other.token(&ask(second, "1 h"))?;
                    ensure!(got.is_none(), "{second} beside {first}: {got:?}");
                    holder.run("COMMIT")?;
                    only_one_kind_lives(&mut other)
                })
            })
            .collect();
        callers.into_iter().try_for_each(|caller| caller.join().expect("no panic"))
    })
}

#[lab_test]
fn a_grant_that_is_renewed_past_its_deadline_excludes_all_but_its_own_kind(
    lab: &Lab,
) -> Result<()> {
    past_its_deadline(lab, |holder, other, kind| {
        within_ttl(|ttl| {
            let token = acquire(holder, kind, ttl)?;
            holder.run("BEGIN")?;
            let renewed =
                holder.token(&format!("SELECT lease_renew('job', {token}, ttl => '1 h')"))?;
            if renewed.is_none() {
                holder.run("ROLLBACK")?;
            }
            Ok(renewed)
        })?;
        other.wait_expired("job")
    })
}

#[lab_test]
fn a_guarded_grant_past_its_deadline_excludes_all_but_its_own_kind(lab: &Lab) -> Result<()> {
    past_its_deadline(lab, |holder, other, kind| {
        let token = acquire(holder, kind, "1 h")?;
        holder.run(&format!("BEGIN; SELECT lease_guard('job', {token})"))?;
        other.expire_now("job", token)
    })
}

#[lab_test]
fn what_the_clock_has_ended_does_not_come_back_beside_a_grant(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    for kind in KINDS {
        for other in KINDS.into_iter().filter(|other| *other != kind) {
            for _ in 0..3 {
                session.token(&ask(kind, "100 ms"))?;
            }
            session.wait_expired("job")?;
            let token = session.granted(&ask(other, "1 h"))?;
            // Whatever the clock will be: nothing but the grant is open.
            let open =
                session.granted("SELECT count(*) FROM fence.lease WHERE closing_token IS NULL")?;
            ensure!(open == 1, "{other} upon {kind}: {open} are open");
            session.release("job", token)?.expect("held");
        }
    }
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
fn a_change_of_several_that_fails_locks_none_of_them(lab: &Lab) -> Result<()> {
    for what in ["renew", "release"] {
        let db = lab.database()?;
        let (mut holder, mut other) = (db.connect()?, db.connect()?);
        let token = holder.acquire("a", "1 s")?;
        other.acquire("b", "1 h")?;
        holder.run("BEGIN")?;
        holder.nothing(&format!("SELECT lease_{what}_all('{{a,b}}', {token})"))?;
        other.wait_expired("a")?;
        ensure!(!other.is_taken("a")?, "{what}");
        holder.run("COMMIT")?;
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

#[lab_test]
fn a_check_runs_beside_a_parallel_plan(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.acquire("job", "1 h")?;
    session.run(
        "CREATE TABLE big AS SELECT g FROM generate_series(1, 100000) AS g;
         ALTER TABLE big SET (parallel_workers = 2); ANALYZE big;
         SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0;
         SET min_parallel_table_scan_size = 0",
    )?;
    let plan = session.rows("EXPLAIN SELECT count(*) FROM big")?;
    ensure!(plan.iter().any(|row| format!("{row:?}").contains("Parallel")), "{plan:?}");
    for sql in [
        format!("SELECT count(*) FROM big HAVING lease_check('job', {token})"),
        format!("SELECT count(*) FROM (SELECT * FROM big WHERE lease_check('job', {token})) AS s"),
        "SELECT count(*) FROM big HAVING (SELECT state FROM lease_info('job')) = 'held'".to_owned(),
        "SELECT count(*) FROM big HAVING (SELECT last_token > 0 FROM fence_status())".to_owned(),
    ] {
        ensure!(session.granted(&sql)? == 100_000, "{sql}");
    }
    Ok(())
}

#[lab_test]
fn a_session_in_a_transaction_survives_a_new_index(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut admin) = (db.connect()?, db.connect()?);
    let token = session.acquire("job", "1 h")?;
    session.run("BEGIN; SELECT 1")?;
    admin.run("REINDEX INDEX CONCURRENTLY fence.lease_pkey")?;
    ensure!(session.renew("job", token)?.is_some());
    session.run("COMMIT")?;
    ensure!(!session.is_taken("other")?);
    Ok(())
}
