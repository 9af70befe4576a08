//! A try (wait = 0) never blocks, and one that loses leaves no trace.

use pg_test::cluster::Builder;
use pg_test::{ensure, lab_test, Calls, Cluster, Context, Lab, Result, Session};

/// Sessions of two callers; a wait of the second is an error.
fn pair(db: &pg_test::Database) -> Result<(Session, Session)> {
    let patience = db.conninfo().set("lock_timeout", "10s").set("statement_timeout", "20s");
    Ok((db.connect()?, patience.connect()?))
}

#[lab_test]
fn a_try_does_not_wait_for_an_open_change_of_the_lease(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = pair(&db)?;
    for call in ["renew('job', 1)", "renew('job', 1, '1 us')", "release('job', 1)", "revoke('job')"]
    {
        let token = holder.acquire("job", "1 h")?;
        let call =
            call.replace(", 1", &format!(", {token}")).replace(&format!("{token} us"), "1 us");
        holder.run("BEGIN")?;
        holder.granted(&format!("SELECT lease_{call}"))?;
        ensure!(other.is_taken("job")?, "had during an open lease_{call}");
        other.nothing("SELECT lease_acquire('job', 'me', reclaim => true)")?;
        holder.run("ROLLBACK")?;
        ensure!(other.is_taken("job")?, "had after lease_{call} was rolled back");
        holder.release("job", token)?;
        ensure!(!other.is_taken("job")?);
    }
    Ok(())
}

#[lab_test]
fn a_try_does_not_wait_for_a_name_just_inserted(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut first, mut other) = pair(&db)?;
    first.run("BEGIN; SELECT lease_acquire('new', 'me')")?;
    ensure!(other.is_taken("new")?);
    // What is not committed is nobody's yet.
    other.nothing("SELECT lease_acquire('new', 'me', reclaim => true)")?;
    other.acquire("another", "1 h")?;
    first.run("ROLLBACK")?;
    other.acquire("new", "1 h")?;
    // With several names at once, in opposite orders: nobody waits, so there is no deadlock.
    first.run("BEGIN; SELECT lease_acquire('x')")?;
    other.run("BEGIN; SELECT lease_acquire('y')")?;
    first.nothing("SELECT lease_acquire('y')")?;
    other.nothing("SELECT lease_acquire('x')")?;
    first.run("COMMIT")?;
    other.run("COMMIT")
}

#[lab_test]
fn a_try_does_not_wait_for_an_open_take_over(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut first, mut other) = pair(&db)?;
    first.acquire_expired("job")?;
    first.run("BEGIN; SELECT lease_acquire('job', ttl => '1 us')")?;
    ensure!(other.is_taken("job")?, "the expired row of the predecessor was had twice");
    first.run("ROLLBACK")?;
    ensure!(!other.is_taken("job")?);
    Ok(())
}

/// A session whose guard keeps `guarded` taken, though its grant is over.
fn guarding(db: &pg_test::Database) -> Result<Session> {
    let (mut guard, mut other) = (db.connect()?, db.connect()?);
    let token = guard.granted("SELECT lease_acquire('guarded', 'me', '1 h')")?;
    guard.run(&format!("BEGIN; SELECT lease_guard('guarded', {token})"))?;
    other.expire_now("guarded", token)?;
    Ok(guard)
}

#[lab_test]
fn a_losing_try_takes_no_transaction_id_and_keeps_no_lock(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = pair(&db)?;
    let _guard = guarding(&db)?;
    holder.run("SELECT lease_acquire('held', 'me', '1 h')")?;
    holder.run("BEGIN; SELECT lease_acquire('new')")?;
    for isolation in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        other.run(&format!("BEGIN ISOLATION LEVEL {isolation}"))?;
        for call in [
            "'held'",
            "'held', 'you', reclaim => true",
            "'new'",
            "'guarded'",
            "'guarded', 'me', reclaim => true",
        ] {
            other.nothing(&format!("SELECT lease_acquire({call})"))?;
            let kept = other.granted(
                "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'",
            )?;
            ensure!(kept == 0, "{isolation}: {call} keeps {kept} locks");
        }
        other.run("SELECT lease_check('held', 1)")?;
        let xid = other.text("SELECT pg_current_xact_id_if_assigned()")?;
        ensure!(xid.is_none(), "{isolation}: {xid:?}");
        other.run("COMMIT")?;
    }
    holder.run("ROLLBACK")
}

#[lab_test]
fn a_losing_try_makes_no_row_version_and_draws_no_token(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = pair(&db)?;
    let _guard = guarding(&db)?;
    holder.run("SELECT lease_acquire('held', 'me', '1 h')")?;
    let state = "SELECT ctid, xmin, xmax, l.* FROM fence.lease l";
    let before = (holder.rows(state)?, holder.last_token()?);
    for _ in 0..20 {
        other.nothing("SELECT lease_acquire('held')")?;
        other.nothing("SELECT lease_acquire('held', 'you', reclaim => true)")?;
        other.nothing("SELECT lease_acquire('guarded', 'me', reclaim => true)")?;
    }
    holder.run("BEGIN; SELECT lease_acquire('new')")?;
    let drawn = holder.last_token()?;
    for _ in 0..20 {
        other.nothing("SELECT lease_acquire('new')")?;
    }
    ensure!(holder.last_token()? == drawn, "a losing try drew a token");
    holder.run("ROLLBACK")?;
    ensure!(holder.rows(state)? == before.0, "the row was touched");
    ensure!(drawn == before.1 + 1, "a losing try drew a token");
    Ok(())
}

#[lab_test]
fn a_losing_try_writes_no_wal(lab: &Lab) -> Result<()> {
    let cluster = quiet(lab.builder()).start()?;
    let (mut holder, mut other) = (cluster.connect("postgres")?, cluster.connect("postgres")?);
    holder.run("CREATE EXTENSION pg_fence; SELECT lease_acquire('held', 'me', '1 h')")?;
    holder.run("BEGIN; SELECT lease_acquire('new')")?;
    let calls = ["'held'", "'held', 'you', reclaim => true", "'new'"]
        .map(|arguments| format!("SELECT lease_acquire({arguments})"));
    for call in &calls {
        other.nothing(call)?;
    }
    // The server's own records (running transactions, every 15 s) are rare; one round is without.
    let mut written = Vec::new();
    for _ in 0..5 {
        let before = wal(&cluster)?;
        for call in calls.iter().cycle().take(150) {
            other.nothing(call)?;
        }
        written.push(wal(&cluster)? - before);
        if written.last() == Some(&0) {
            return holder.run("ROLLBACK");
        }
    }
    pg_test::bail!("150 losing tries wrote so many bytes of WAL, five times: {written:?}")
}

#[lab_test]
fn under_checksums_a_losing_try_writes_no_more_than_a_select_would(lab: &Lab) -> Result<()> {
    // With them the first to read a row after its commit, and first since a checkpoint touches its page, writes
    // an image of that page. From PostgreSQL 18 on it is what a new cluster has.
    let cluster = quiet(lab.builder())
        .create_by(|prefix, data| prefix.initdb_with(data, &["--data-checksums"]))?;
    cluster.start()?;
    let (mut holder, mut other) = (cluster.connect("postgres")?, cluster.connect("postgres")?);
    ensure!(other.text("SHOW data_checksums")?.as_deref() == Some("on"));
    holder.run("CREATE EXTENSION pg_fence")?;
    let mut token = holder.acquire("held", "1 h")?;
    other.run("SET enable_seqscan = off")?;
    let (select, lost) =
        ("SELECT name FROM fence.lease WHERE name = 'held'", "SELECT lease_acquire('held')");
    for warm in [select, lost] {
        other.run(warm)?;
    }
    let mut seen = Vec::new();
    // The server's own records are rare; one round is without.
    for _ in 0..8 {
        let mut written = [select, lost, select].into_iter().map(|first| -> Result<(i64, i64)> {
            token = holder.renew("held", token)?.context("not renewed")?;
            holder.run("CHECKPOINT")?;
            let before = wal(&cluster)?;
            other.run(first)?;
            let after_one = wal(&cluster)?;
            for _ in 0..50 {
                other.nothing(lost)?;
            }
            Ok((after_one - before, wal(&cluster)? - after_one))
        });
        let mut next = || written.next().context("three")?;
        let (selecting, trying, selecting_again) = (next()?, next()?, next()?);
        drop(written);
        seen.push((selecting, trying, selecting_again));
        let ((by_select, after_select), (by_try, after_try)) = (selecting, trying);
        // Each renewal leaves a row version on the page, which its image has too: so the try is held against the middle.
        let is_no_more = 2 * by_try <= by_select + selecting_again.0;
        if by_select > 0 && is_no_more && after_select == 0 && after_try == 0 {
            return Ok(());
        }
    }
    pg_test::bail!(
        "bytes of WAL, by one SELECT and 50 tries after it, by one try and 50 after it, by a SELECT again: {seen:?}"
    )
}

/// A server on which nothing but the sessions of a test writes.
fn quiet(builder: Builder) -> Builder {
    builder
        .set("autovacuum", "off")
        .set("bgwriter_lru_maxpages", "0")
        .set("checkpoint_timeout", "1d")
}

fn wal(cluster: &Cluster) -> Result<i64> {
    let mut session = cluster.connect("postgres")?;
    session.granted("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")
}

#[lab_test]
fn a_losing_try_holds_nothing_up(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = pair(&db)?;
    let mut loser = db.connect()?;
    for isolation in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        let token = holder.acquire("job", "1 h")?;
        holder.run("BEGIN; SELECT lease_acquire('new')")?;
        loser.run(&format!("BEGIN ISOLATION LEVEL {isolation}"))?;
        loser.nothing("SELECT lease_acquire('job')")?;
        loser.nothing("SELECT lease_acquire('job', 'x', reclaim => true)")?;
        loser.nothing("SELECT lease_acquire('new')")?;
        holder.run("ROLLBACK")?;
        holder.release("job", token)?;
        ensure!(!other.is_taken("job")?, "{isolation}: the loser's open transaction is in the way");
        ensure!(!other.is_taken("new")?, "{isolation}: the loser's open transaction is in the way");
        loser.run("COMMIT")?;
    }
    Ok(())
}

#[lab_test]
fn a_call_that_finds_the_lease_lost_holds_nothing_up(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = pair(&db)?;
    let mut stale_worker = db.connect()?;
    let expired = holder.acquire_expired("expired")?;
    let freed = holder.acquire("freed", "1 h")?;
    holder.release("freed", freed)?;
    let ended = holder.acquire_expired("taken over")?;
    holder.acquire("taken over", "1 h")?;
    for (name, token) in [("expired", expired), ("freed", freed), ("taken over", ended)] {
        let calls = [
            format!("lease_renew('{name}', {token})"),
            format!("lease_release('{name}', {token})"),
            format!("lease_renew('{name}', 1000000)"),
            "lease_revoke('expired')".to_owned(),
        ];
        for call in calls {
            // A worker that woke up in its open transaction, and goes on sleeping.
            stale_worker.run("BEGIN")?;
            stale_worker.nothing(&format!("SELECT {call}"))?;
            if name != "taken over" {
                let taken = other.is_taken(name)?;
                ensure!(!taken, "NULL from {call} keeps others from {name} while it is open");
            }
            stale_worker.run("COMMIT")?;
        }
        stale_worker.run("BEGIN; SAVEPOINT s")?;
        stale_worker.refused(&format!("SELECT lease_guard('{name}', {token})"), "PF004")?;
        stale_worker.run("ROLLBACK TO s")?;
        let set = "SELECT coalesce(current_setting('pg_fence.token', true), '')";
        ensure!(stale_worker.text(set)?.as_deref() == Some(""), "a refused guard set its token");
        if name != "taken over" {
            ensure!(!other.is_taken(name)?, "a refused guard keeps others from {name}");
        }
        stale_worker.run("COMMIT")?;
    }
    Ok(())
}

#[lab_test]
fn a_check_waits_for_nobody_and_holds_nothing_up(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = pair(&db)?;
    let token = holder.acquire("job", "1 h")?;
    other.run("BEGIN")?;
    ensure!(other.speaks("job", token)?);
    holder.run("BEGIN")?;
    let renewed = holder.renew("job", token)?.expect("held");
    ensure!(other.speaks("job", token)? && !other.speaks("job", renewed)?, "not committed yet");
    ensure!(other.rows("SELECT * FROM lease_info('job')")?.len() == 1);
    holder.run("COMMIT")?;
    ensure!(other.speaks("job", renewed)?);
    holder.run("BEGIN")?;
    holder.release("job", token)?;
    ensure!(other.speaks("job", token)?, "not committed yet");
    holder.run("COMMIT")?;
    ensure!(!other.speaks("job", token)?);
    let mut third = db.connect()?;
    ensure!(!third.is_taken("job")?, "the check's open transaction is in the way");
    other.run("COMMIT")
}

#[lab_test]
fn leases_of_another_database_are_others(lab: &Lab) -> Result<()> {
    let (here, there) = (lab.database()?, lab.database()?);
    let (mut one, mut two) = (here.connect()?, there.connect()?);
    two.run("SET lock_timeout = '10 s'")?;
    let token = one.acquire("job", "1 h")?;
    one.run("BEGIN; SELECT lease_acquire('open')")?;
    one.renew("job", token)?;
    let other = two.acquire("job", "1 h")?;
    two.acquire("open", "1 h")?;
    ensure!(two.renew("job", other)?.is_some());
    two.granted("SELECT lease_revoke('job')")?;
    one.run("COMMIT")?;
    ensure!(one.speaks("job", token)?);
    Ok(())
}
