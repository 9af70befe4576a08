//! Grants that end with the session that acquired them: `session => true`.

use crate::support::concurrency::{
    is_woken, nothing_is_left, token_of, undisturbed_server, waiting, Waiter, WAIT,
};
use nix::sys::signal::Signal;
use pg_test::cable::Cable;
use pg_test::pooler::{Mode, Pooler};
use pg_test::process::{signal, wait_until, PATIENCE};
use pg_test::{
    ensure, lab_test, Background, Calls, Context, Database, Lab, Result, Session, Worker,
};
use std::fs;

const ACQUIRE: &str = "SELECT lease_acquire('job', 'first', ttl => '1 h', session => true)";

fn state(session: &mut Session, name: &str) -> Result<String> {
    let sql = format!("SELECT coalesce(string_agg(state, ' '), 'none') FROM lease_info('{name}')");
    Ok(session.text(&sql)?.unwrap_or_default())
}

fn abandoned(session: &mut Session, name: &str) -> Result<()> {
    wait_until("the lease is abandoned", PATIENCE, || {
        state(session, name).is_ok_and(|state| state == "abandoned")
    })
}

/// A client with a process of its own holds the lease, and who waits for it is woken when `end` has ended the
/// session. In each round it gets it. The client has done before what each of the cases says; `{}` is its token.
fn passes_on(
    lab: &Lab,
    cases: &[&[&str]],
    end: impl Fn(&mut Worker, &mut Session) -> Result<()>,
) -> Result<()> {
    let server = undisturbed_server(lab)?;
    let db = Database::with_extension(server.conninfo("postgres"))?;
    let mut admin = db.connect()?;
    admin.run("CREATE TABLE t (n int)")?;
    for before in cases {
        is_woken(|| {
            let mut holder = lab.worker("holder", &db.conninfo())?;
            let first = holder.number(ACQUIRE)?.expect("free");
            for sql in *before {
                holder.rows(&sql.replace("{}", &first.to_string()))?;
            }
            let waiter = Waiter::comes(&db, &mut admin)?;
            end(&mut holder, &mut admin)?;
            let (next, took) = waiter.served(&mut admin)?;
            ensure!(next > first, "{next} after {first}");
            ensure!(!admin.speaks("job", first)? && admin.speaks("job", next)?);
            admin.release("job", next)?.expect("held");
            Ok(took)
        })
        .with_context(|| format!("{before:?}"))?;
    }
    nothing_is_left(&mut admin)
}

#[lab_test]
fn a_killed_client_s_lease_passes_on_at_once(lab: &Lab) -> Result<()> {
    let cases: &[&[&str]] = &[
        &[],
        &["BEGIN", "INSERT INTO t VALUES (1)"],
        &["BEGIN", "SELECT lease_guard('job', {})", "INSERT INTO t VALUES (1)"],
    ];
    passes_on(lab, cases, |holder, _| holder.kill())
}

#[lab_test]
fn a_terminated_session_s_lease_passes_on_at_once(lab: &Lab) -> Result<()> {
    passes_on(lab, &[&[], &["BEGIN", "SELECT lease_guard('job', {})"]], |holder, admin| {
        admin.run(&format!("SELECT pg_terminate_backend({}, 5000)", holder.backend()))
    })
}

#[lab_test]
fn a_client_killed_in_a_statement_is_noticed_where_the_server_checks(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    let mut holder = lab.worker("holder", &db.conninfo())?;
    let first = holder.number(ACQUIRE)?.expect("free");
    holder.rows("SET client_connection_check_interval = '100 ms'")?;
    holder.send("SELECT pg_sleep(600)")?;
    let mut waiter = waiting(&db, WAIT)?;
    holder.kill()?;
    let next = token_of(&mut waiter)?;
    ensure!(!admin.speaks("job", first)? && admin.speaks("job", next)?);
    Ok(())
}

#[lab_test]
fn a_cut_cable_is_noticed_by_tcp_and_by_the_ttl_at_the_latest(lab: &Lab) -> Result<()> {
    let cable = match Cable::lay(lab.rundir()) {
        Ok(cable) => cable,
        Err(why) => {
            eprintln!("left out: no network of a client's own can be made here: {why:#}");
            return Ok(());
        }
    };
    let addresses = format!("127.0.0.1,{}", cable.near());
    let server = lab.builder().set("listen_addresses", &addresses).create()?;
    let access = server.data().join("pg_hba.conf");
    let near = format!("{}\nhost all all {}/32 trust\n", fs::read_to_string(&access)?, cable.far());
    fs::write(&access, near)?;
    server.start()?;
    let db = Database::with_extension(server.conninfo("postgres"))?;
    let mut admin = db.connect()?;
    let far = db.conninfo().host(&cable.near());
    let watch = [
        ("tcp_keepalives_idle", "5"),
        ("tcp_keepalives_interval", "1"),
        ("tcp_keepalives_count", "2"),
        // Keepalive says nothing while an answer is not acknowledged.
        ("tcp_user_timeout", "3 s"),
    ];
    let watched =
        watch.iter().fold(far.clone(), |conninfo, (name, value)| conninfo.set(name, value));
    let mut idle = cable.worker(lab.rundir(), "idle", &watched)?;
    let mut answered = cable.worker(lab.rundir(), "answered", &watched)?;
    let mut unnoticed = cable.worker(lab.rundir(), "unnoticed", &far)?;
    let acquire = |worker: &mut Worker, name: &str, ttl: &str| {
        let sql = format!("SELECT lease_acquire('{name}', ttl => '{ttl}', session => true)");
        Ok::<_, anyhow::Error>(worker.number(&sql)?.expect("free"))
    };
    let held = [
        ("idle", acquire(&mut idle, "idle", "1 h")?),
        ("answered", acquire(&mut answered, "answered", "1 h")?),
        ("unnoticed", acquire(&mut unnoticed, "unnoticed", "8 s")?),
    ];
    let waiters = held.map(|(name, _)| waiting(&db, &WAIT.replace("'job'", &format!("'{name}'"))));
    // It is answered right after the cut, before keepalive finds it.
    admin.run("SELECT pg_advisory_lock(1)")?;
    answered.send("SELECT pg_advisory_lock(1)")?;
    let pid = answered.backend();
    let waits = format!("SELECT wait_event = 'advisory' FROM pg_stat_activity WHERE pid = {pid}");
    wait_until("it waits", PATIENCE, || admin.truth(&waits).unwrap_or(false))?;
    cable.cut()?;
    admin.run("SELECT pg_advisory_unlock(1)")?;
    // No client has said a word of it.
    for ((name, token), waiter) in held.iter().zip(waiters) {
        let next = waiter?.outcome(PATIENCE)??;
        ensure!(next[0][0].is_some() && !admin.speaks(name, *token)?, "{name}: {next:?}");
    }
    let left = |worker: &Worker| {
        format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {}", worker.backend())
    };
    ensure!(admin.granted(&left(&unnoticed))? == 1, "its lease passed on by the ttl alone");
    for worker in [&idle, &answered] {
        // Its locks are gone a little before it is.
        wait_until("the session is gone", PATIENCE, || {
            admin.granted(&left(worker)).is_ok_and(|left| left == 0)
        })?;
    }
    Ok(())
}

#[lab_test]
fn what_gives_back_advisory_locks_ends_it(lab: &Lab) -> Result<()> {
    passes_on(lab, &[&[]], |holder, _| holder.rows("DISCARD ALL").map(drop))?;
    // Found out within a second, or told at the end of the statement's transaction.
    let db = lab.database()?;
    let (mut holder, mut admin) = (db.connect()?, db.connect()?);
    let first = holder.granted(ACQUIRE)?;
    let mut waiter = waiting(&db, WAIT)?;
    holder.run("SELECT pg_advisory_unlock_all()")?;
    let next = token_of(&mut waiter)?;
    ensure!(!admin.speaks("job", first)? && admin.speaks("job", next)?);
    // In mid-transaction, too.
    let other = holder.granted("SELECT lease_acquire('other', session => true)")?;
    holder.run("BEGIN; SELECT pg_advisory_unlock_all()")?;
    ensure!(state(&mut admin, "other")? == "abandoned" && !admin.speaks("other", other)?);
    ensure!(!holder.speaks("other", other)?, "its own session is no exception");
    holder.run("COMMIT")?;
    // The session may acquire again.
    let again = holder.granted("SELECT lease_acquire('other', session => true)")?;
    ensure!(admin.speaks("other", again)? && state(&mut admin, "other")? == "held");
    // Other advisory locks of users are none of ours.
    holder.run("SELECT pg_advisory_lock(1), pg_advisory_unlock(1)")?;
    ensure!(admin.speaks("other", again)?);
    Ok(())
}

fn waiting_or_granted(db: &Database) -> Result<Background> {
    let mut session = Background::connect(&db.conninfo())?;
    session.send(WAIT)?;
    Ok(session)
}

#[lab_test]
fn no_token_of_an_abandoned_grant_speaks(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    other
        .run("CREATE TABLE t (id text PRIMARY KEY, fence bigint); INSERT INTO t VALUES ('job')")?;
    other.run("SELECT fence_protect('t', lease => '{id}')")?;
    let first = holder.granted(ACQUIRE)?;
    let renewed = holder.renew("job", first)?.expect("held");
    let write = |token: i64| format!("UPDATE t SET fence = {token}");
    other.run(&write(first))?;
    drop(holder);
    abandoned(&mut other, "job")?;
    ensure!(other.text("SELECT remaining FROM lease_info('job')")?.as_deref() == Some("00:00:00"));
    for token in [first, renewed] {
        ensure!(!other.speaks("job", token)?);
        ensure!(other.renew("job", token)?.is_none() && other.release("job", token)?.is_none());
        other.refused(&format!("SELECT lease_guard('job', {token})"), "PF004")?;
        other.refused(&write(renewed), "PF004")?;
    }
    other.nothing("SELECT lease_revoke('job')")?;
    let next = other.acquire("job", "1 h")?;
    ensure!(next > renewed && state(&mut other, "job")? == "held");
    other.run(&write(next))
}

#[lab_test]
fn other_sessions_use_it_while_the_session_lives(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    let first = holder.granted(ACQUIRE)?;
    ensure!(state(&mut other, "job")? == "held" && state(&mut holder, "job")? == "held");
    ensure!(other.speaks("job", first)? && holder.speaks("job", first)?);
    ensure!(other.is_taken("job")? && holder.is_taken("job")?);
    let renewed = other.renew("job", first)?.expect("held");
    other.run(&format!("SELECT lease_guard('job', {renewed}) + 0 FROM generate_series(1, 2)"))?;
    other.run("BEGIN; SELECT 1; COMMIT")?;
    ensure!(other.release("job", first)?.is_some());
    ensure!(!holder.speaks("job", first)? && state(&mut holder, "job")? == "free");
    // The lock that is left behind keeps nobody out, and does not keep the next grant alive.
    let mut third = db.connect()?;
    third.granted("SELECT lease_acquire('job', session => true)")?;
    drop(third);
    abandoned(&mut other, "job")
}

#[lab_test]
fn the_ttl_ends_it_at_the_latest(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    let sql = "SELECT lease_acquire('job', ttl => '200 ms', session => true)";
    let first = holder.granted(sql)?;
    holder.wait_expired("job")?;
    ensure!(state(&mut other, "job")? == "expired" && !holder.speaks("job", first)?);
    let next = other.acquire("job", "1 h")?;
    ensure!(next > first);
    drop(holder);
    // The end of the first session is nothing to the second grant.
    ensure!(other.speaks("job", next)?);
    Ok(())
}

#[lab_test]
fn an_acquire_that_is_rolled_back_leaves_nothing(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    for script in [
        format!("BEGIN; {ACQUIRE}; ROLLBACK"),
        format!("BEGIN; SAVEPOINT s; {ACQUIRE}; ROLLBACK TO s; COMMIT"),
        format!("BEGIN; SAVEPOINT s; SAVEPOINT u; {ACQUIRE}; RELEASE u; ROLLBACK TO s; COMMIT"),
        format!("BEGIN; SAVEPOINT s; {ACQUIRE}; RELEASE s; ROLLBACK"),
        "DO $$ BEGIN PERFORM lease_acquire('job', session => true); RAISE 'x'; EXCEPTION WHEN raise_exception THEN NULL; END $$".into(),
    ] {
        holder.run(&script)?;
        nothing_is_left(&mut other).map_err(|e| e.context(script))?;
        ensure!(state(&mut other, "job")? == "none");
    }
    let token = other.acquire("job", "1 h")?;
    ensure!(other.release("job", token)?.is_some());
    // Within a savepoint that is kept it lives on, and a later rollback does not touch it.
    holder.run(&format!("BEGIN; SAVEPOINT s; {ACQUIRE}; RELEASE s; COMMIT"))?;
    holder.run("BEGIN; SELECT 1; ROLLBACK")?;
    ensure!(state(&mut other, "job")? == "held");
    Ok(())
}

#[lab_test]
fn a_release_gives_the_lock_back_when_it_commits(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    let token = holder.granted(ACQUIRE)?;
    let release = format!("SELECT lease_release('job', {token})");
    for script in [
        format!("BEGIN; {release}; ROLLBACK"),
        format!("BEGIN; SAVEPOINT s; {release}; ROLLBACK TO s; COMMIT"),
    ] {
        holder.run(&script)?;
        ensure!(other.speaks("job", token)? && state(&mut other, "job")? == "held", "{script}");
    }
    holder.run(&release)?;
    nothing_is_left(&mut other)?;
    holder.run(ACQUIRE)?;
    holder.run("SELECT lease_revoke('job')")?;
    nothing_is_left(&mut other)
}

#[lab_test]
fn a_release_by_another_session_keeps_nobody_out(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    // More than one session may hold locks for: those of ended grants do not count.
    for round in 0..4 {
        holder.run(&format!(
            "SELECT count(lease_acquire('{round}:' || i, session => true)) FROM generate_series(1, 1000) i"
        ))?;
        let ended = other.granted(&format!(
            "SELECT count(lease_revoke('{round}:' || i)) FROM generate_series(1, 1000) i"
        ))?;
        ensure!(ended == 1000, "{ended}");
        ensure!(
            other.granted(&format!(
                "SELECT count(lease_acquire('{round}:' || i)) FROM generate_series(1, 1000) i"
            ))? == 1000
        );
    }
    drop(holder);
    nothing_is_left(&mut other)
}

#[lab_test]
fn a_transaction_that_acquired_one_cannot_be_prepared(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    for acquire in [ACQUIRE.to_owned(), format!("SAVEPOINT s; {ACQUIRE}; RELEASE s")] {
        holder.run(&format!("BEGIN; {acquire}"))?;
        let fault = holder.refused("PREPARE TRANSACTION 'p'", "0A000")?;
        ensure!(fault.hint.is_some(), "{fault}");
        holder.run("ROLLBACK")?;
        nothing_is_left(&mut other)?;
    }
    // One that merely uses such a lease can, as can one of a session that has one.
    let token = holder.granted(ACQUIRE)?;
    holder.run(&format!("BEGIN; SELECT lease_guard('job', {token})"))?;
    holder.run("CREATE TABLE t (n int)")?;
    let prepared = format!("{}_uses", db.name());
    holder.run(&format!("PREPARE TRANSACTION '{prepared}'"))?;
    holder.run(&format!("COMMIT PREPARED '{prepared}'"))?;
    holder.run(&format!("BEGIN; SELECT lease_release('job', {token})"))?;
    holder.run(&format!("PREPARE TRANSACTION '{prepared}'"))?;
    holder.run(&format!("COMMIT PREPARED '{prepared}'"))?;
    ensure!(state(&mut other, "job")? == "free");
    Ok(())
}

#[lab_test]
fn a_guard_outlives_the_session_prepared_or_not(lab: &Lab) -> Result<()> {
    for prepared in [false, true] {
        let db = lab.database()?;
        let (mut holder, mut guard, mut other) = (db.connect()?, db.connect()?, db.connect()?);
        guard.run("CREATE TABLE t (n int)")?;
        let token = holder.granted(ACQUIRE)?;
        guard
            .run(&format!("BEGIN; SELECT lease_guard('job', {token}); INSERT INTO t VALUES (1)"))?;
        if prepared {
            guard.run(&format!("PREPARE TRANSACTION '{}'", db.name()))?;
        }
        drop(holder);
        abandoned(&mut other, "job")?;
        ensure!(!other.speaks("job", token)?);
        other.nothing("SELECT lease_acquire('job')")?;
        other.nothing("SELECT lease_acquire('job', 'first', reclaim => true)")?;
        let mut waiter = waiting(&db, WAIT)?;
        let commit = format!("COMMIT PREPARED '{}'", db.name());
        guard.run(if prepared { &commit } else { "COMMIT" })?;
        let next = token_of(&mut waiter)?;
        ensure!(other.granted("SELECT count(*) FROM t")? == 1 && other.speaks("job", next)?);
    }
    Ok(())
}

#[lab_test]
fn several_under_one_token_end_together_or_one_by_one(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    let all = "SELECT lease_acquire_all('{a, b, c}', 'first', ttl => '1 h', session => true)";
    let token = holder.granted(all)?;
    ensure!(holder.release("a", token)?.is_some());
    for (name, wanted) in [("a", "free"), ("b", "held"), ("c", "held")] {
        ensure!(state(&mut other, name)? == wanted, "{name}");
    }
    holder.run(&format!("SELECT lease_release_all('{{b, c}}', {token})"))?;
    nothing_is_left(&mut other)?;
    let token = holder.granted(all)?;
    drop(holder);
    for name in ["a", "b", "c"] {
        abandoned(&mut other, name)?;
        ensure!(!other.speaks(name, token)?);
    }
    other.granted("SELECT lease_acquire_all('{c, b, a}')").map(drop)
}

#[lab_test]
fn shared_and_slots_end_one_by_one(lab: &Lab) -> Result<()> {
    for mode in ["shared => true", "slots => 2"] {
        let db = lab.database()?;
        let (mut one, mut two, mut other) = (db.connect()?, db.connect()?, db.connect()?);
        let sql = format!("SELECT lease_acquire('job', ttl => '1 h', {mode}, session => true)");
        let (first, second) = (one.granted(&sql)?, two.granted(&sql)?);
        drop(one);
        wait_until("one is abandoned", PATIENCE, || {
            state(&mut other, "job").is_ok_and(|s| s.contains("abandoned") && s.contains("held"))
        })?;
        ensure!(!other.speaks("job", first)? && other.speaks("job", second)?, "{mode}");
        let third = other.granted(&sql)?;
        ensure!(other.speaks("job", second)? && other.speaks("job", third)?, "{mode}");
        drop(two);
        other.release("job", third)?.expect("held");
        let mut next = waiting_or_granted(&db)?;
        let last = token_of(&mut next)?;
        ensure!(other.speaks("job", last)? && !other.speaks("job", second)?, "{mode}");
    }
    Ok(())
}

#[lab_test]
fn a_reclaim_in_a_new_session_is_that_session_s(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut old, mut new, mut other) = (db.connect()?, db.connect()?, db.connect()?);
    let first = old.granted(ACQUIRE)?;
    let reclaim =
        "SELECT lease_acquire('job', 'first', ttl => '1 h', reclaim => true, session => true)";
    let second = new.granted(reclaim)?;
    ensure!(!other.speaks("job", first)? && other.speaks("job", second)?);
    drop(old);
    wait_until("the old session is gone", PATIENCE, || {
        let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = \
                     (SELECT oid FROM pg_database WHERE datname = current_database())";
        other.granted(locks).is_ok_and(|n| n == 1)
    })?;
    ensure!(other.speaks("job", second)?, "the old session's end is nothing to the new grant");
    // In one session the earlier lock goes.
    let third = new.granted(reclaim)?;
    ensure!(!other.speaks("job", second)? && other.speaks("job", third)?);
    new.release("job", third)?.expect("held");
    nothing_is_left(&mut other)
}

#[lab_test]
fn a_restart_and_a_crash_end_it(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    let db = Database::with_extension(cluster.conninfo("postgres"))?;
    for crash in [false, true] {
        let mut holder = db.connect()?;
        let token = holder.granted(ACQUIRE)?;
        // This commit waits for the disk, so the crash leaves what was before it, too.
        let plain = holder.acquire("plain", "1 h")?;
        if crash {
            let mut witness = db.connect()?;
            signal(holder.pid(), Signal::SIGKILL)?;
            wait_until("the server has noticed", PATIENCE, || witness.run("SELECT 1").is_err())?;
            wait_until("the server is back", PATIENCE, || {
                db.connect().is_ok_and(|mut s| s.run("SELECT 1").is_ok())
            })?;
        } else {
            cluster.restart()?;
        }
        let mut other = db.connect()?;
        ensure!(state(&mut other, "job")? == "abandoned" && !other.speaks("job", token)?);
        ensure!(other.speaks("plain", plain)?, "the other lease lives on");
        other.release("plain", plain)?.expect("held");
        let next = other.acquire("job", "1 h")?;
        ensure!(next > token);
        other.release("job", next)?.expect("held");
    }
    Ok(())
}

#[lab_test]
fn on_a_standby_the_row_is_shown_and_after_a_failover_it_is_abandoned(lab: &Lab) -> Result<()> {
    let primary = lab.builder().start()?;
    let db = Database::with_extension(primary.conninfo("postgres"))?;
    let mut holder = db.connect()?;
    let token = holder.granted(ACQUIRE)?;
    let standby = lab.builder().standby_of(&primary)?;
    standby.start()?;
    standby.wait_replayed(&primary)?;
    let mut there = standby.connect(db.name())?;
    ensure!(state(&mut there, "job")? == "held" && there.speaks("job", token)?);
    // The session lives on, but on another server.
    standby.promote()?;
    let mut there = standby.connect(db.name())?;
    ensure!(state(&mut there, "job")? == "abandoned" && !there.speaks("job", token)?);
    let next = there.acquire("job", "1 h")?;
    ensure!(next > token);
    ensure!(holder.speaks("job", token)?, "the old primary knows nothing of it");
    Ok(())
}

#[lab_test]
fn in_a_copied_database_it_is_abandoned(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.granted(ACQUIRE)?;
    drop(session);
    let copy = db.copy()?;
    let mut there = copy.connect()?;
    ensure!(state(&mut there, "job")? == "abandoned" && !there.speaks("job", token)?);
    Ok(())
}

#[lab_test]
fn a_pooler_s_reset_ends_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let pooler = Pooler::start_in(lab, lab.cluster(), 2, Mode::Session)?;
    let mut admin = db.connect()?;
    let mut client = pooler.conninfo(db.name()).connect()?;
    let token = client.granted(ACQUIRE)?;
    ensure!(admin.speaks("job", token)?);
    let mut waiter = waiting(&db, WAIT)?;
    // The client leaves; the pooler keeps the connection, and resets it for the next.
    drop(client);
    let next = token_of(&mut waiter)?;
    ensure!(!admin.speaks("job", token)? && admin.speaks("job", next)?);
    Ok(())
}

#[lab_test]
fn behind_a_transaction_pooler_it_is_the_connection_s(lab: &Lab) -> Result<()> {
    // What the documentation warns of: the session is the pooler's connection, which outlives the client.
    let db = lab.database()?;
    let pooler = Pooler::start(lab, lab.cluster(), 1)?;
    let mut admin = db.connect()?;
    let mut client = pooler.conninfo(db.name()).connect()?;
    let token = client.granted(ACQUIRE)?;
    drop(client);
    let mut next = pooler.conninfo(db.name()).connect()?;
    next.run("SELECT 1")?;
    ensure!(admin.speaks("job", token)? && state(&mut admin, "job")? == "held");
    ensure!(next.is_taken("job")?);
    drop(pooler);
    abandoned(&mut admin, "job")
}

#[lab_test]
fn a_session_s_lease_may_live_as_long_as_the_session(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut admin) = (db.connect()?, db.connect()?);
    let longest = "100000 years";
    for ttl in ["1000 years", longest] {
        let token = holder
            .granted(&format!("SELECT lease_acquire('job', ttl => '{ttl}', session => true)"))?;
        let years = if ttl == longest { 90_000 } else { 900 };
        let shown = format!(
            "SELECT state = 'held' AND remaining > interval '{years} years' AND expires_at > now() + interval '{years} years'"
        );
        ensure!(admin.truth(&format!("{shown} FROM fence.leases"))?);
        ensure!(admin.truth(&format!("{shown} FROM lease_info('job', {token})"))?);
        // It is renewed for as long as it was asked for, or for longer; and passes on when its session ends.
        let token = admin.renew("job", token)?.expect("held");
        ensure!(admin.truth(&format!("{shown} FROM fence.leases"))?);
        let token = admin.granted(&format!("SELECT lease_renew('job', {token}, '{longest}')"))?;
        ensure!(admin.speaks("job", token)?);
        admin.run(&format!("BEGIN; SELECT lease_guard('job', {token}); COMMIT"))?;
        admin.nothing("SELECT lease_acquire('job', wait => '50 ms')")?;
        let mut waiter = Background::connect(&db.conninfo())?;
        waiter.send("SELECT lease_acquire('job', session => true, wait => '1 h')")?;
        waiter.wait_until_blocked()?;
        holder.run("DISCARD ALL")?;
        // Nobody renews it any more, however long.
        admin.nothing(&format!("SELECT lease_renew('job', {token}, '{longest}')"))?;
        let next = token_of(&mut waiter)?;
        admin.release("job", next)?.expect("held");
    }
    let all = holder.granted(&format!(
        "SELECT lease_acquire_all('{{a,b}}', ttl => '{longest}', session => true)"
    ))?;
    admin.granted(&format!("SELECT lease_renew_all('{{a,b}}', {all}, '1000 years')"))?;
    // A lasting one would hold everybody up once its holder has died.
    let lasting = admin.acquire("lasting", "1 h")?;
    let before = admin.last_token()?;
    for renewal in ["lease_renew('lasting'", "lease_renew_all('{lasting}'", "lease_renew('nobody'"]
    {
        let fault =
            admin.refused(&format!("SELECT {renewal}, {lasting}, '366 days 1 us')"), "22023")?;
        ensure!(fault.json()?["argument"] == "ttl", "{fault}");
    }
    ensure!(admin.last_token()? == before && admin.speaks("lasting", lasting)?);
    admin.granted(&format!("SELECT lease_renew('lasting', {lasting}, '366 days')"))?;
    Ok(())
}
