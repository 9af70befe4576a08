//! Grants that end with the session that acquired them (`session => true`), with cut connections and poolers. The rest
//! is in session_bound.script.

use crate::support::concurrency::{WAIT, token_of, waiting};
use pg_test::network_link::NetworkLink;
use pg_test::pooler::Pooler;
use pg_test::process::{PATIENCE, wait_until};
use pg_test::{Calls, Database, Harness, Result, Session, Worker, ensure, harness_test};
use std::fs;

const ACQUIRE: &str = "SELECT lease_acquire('job', 'first', ttl => '1 h', session => true)";

/// Returns the state of `job` as shown, and whether the token is valid.
fn seen(session: &mut Session, token: i64) -> Result<(String, bool)> {
    let state = session.text("SELECT state FROM lease_info('job')")?.unwrap_or_default();
    Ok((state, session.speaks("job", token)?))
}

fn abandoned(session: &mut Session, token: i64) -> Result<()> {
    let seen = seen(session, token)?;
    ensure!(seen == ("abandoned".to_owned(), false), "{seen:?}");
    Ok(())
}

#[harness_test]
fn a_cut_link_is_noticed_by_tcp_and_by_the_ttl_at_the_latest(harness: &Harness) -> Result<()> {
    let link = match NetworkLink::create(harness.rundir()) {
        Ok(link) => link,
        Err(why) => {
            eprintln!("left out: no network of a client's own can be made here: {why:#}");
            return Ok(());
        }
    };
    let addresses = format!("127.0.0.1,{}", link.near());
    let server = harness.builder().set("listen_addresses", &addresses).create()?;
    let access = server.data().join("pg_hba.conf");
    let near = format!("{}\nhost all all {}/32 trust\n", fs::read_to_string(&access)?, link.far());
    fs::write(&access, near)?;
    server.start()?;
    let db = Database::with_extension(server.conninfo("postgres"))?;
    let mut admin = db.connect()?;
    let far = db.conninfo().host(&link.near());
    let watch = [
        ("tcp_keepalives_idle", "5"),
        ("tcp_keepalives_interval", "1"),
        ("tcp_keepalives_count", "2"),
        // Keepalive sends nothing while an answer is not acknowledged.
        ("tcp_user_timeout", "3 s"),
    ];
    let watched =
        watch.iter().fold(far.clone(), |conninfo, (name, value)| conninfo.set(name, value));
    let mut idle = link.worker(harness.rundir(), "idle", &watched)?;
    let mut answered = link.worker(harness.rundir(), "answered", &watched)?;
    let mut unnoticed = link.worker(harness.rundir(), "unnoticed", &far)?;
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
    // Its statement returns right after the cut, before keepalive detects it.
    admin.run("SELECT pg_advisory_lock(1)")?;
    answered.send("SELECT pg_advisory_lock(1)")?;
    let pid = answered.backend();
    let waits = format!("SELECT wait_event = 'advisory' FROM pg_stat_activity WHERE pid = {pid}");
    wait_until("it waits", PATIENCE, || admin.truth(&waits).unwrap_or(false))?;
    link.cut()?;
    admin.run("SELECT pg_advisory_unlock(1)")?;
    // The server has ended these sessions without a word from their clients.
    for ((name, token), waiter) in held.iter().zip(waiters) {
        let next = waiter?.outcome(PATIENCE)??;
        ensure!(next[0][0].is_some() && !admin.speaks(name, *token)?, "{name}: {next:?}");
    }
    let left = |worker: &Worker| {
        format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {}", worker.backend())
    };
    ensure!(admin.granted(&left(&unnoticed))? == 1, "its lease passed on by the ttl alone");
    for worker in [&idle, &answered] {
        // A session's locks are released a little before it disappears from the views.
        wait_until("the session is gone", PATIENCE, || {
            admin.granted(&left(worker)).is_ok_and(|left| left == 0)
        })?;
    }
    Ok(())
}

#[harness_test]
fn a_pooler_s_reset_ends_it(harness: &Harness) -> Result<()> {
    let db = harness.database()?;
    let pooler = Pooler::start_in(harness, harness.cluster(), 2, "session")?;
    let mut admin = db.connect()?;
    let mut client = pooler.conninfo(db.name()).connect()?;
    let token = client.granted(ACQUIRE)?;
    ensure!(admin.speaks("job", token)?);
    let mut waiter = waiting(&db, WAIT)?;
    // The client leaves. The pooler keeps the connection, and resets it for the next client.
    drop(client);
    let next = token_of(&mut waiter)?;
    ensure!(!admin.speaks("job", token)? && admin.speaks("job", next)?);
    Ok(())
}

#[harness_test]
fn behind_a_transaction_pooler_it_is_the_connection_s(harness: &Harness) -> Result<()> {
    // As the documentation warns: the session is the pooler's connection, which outlives the client.
    let db = harness.database()?;
    let pooler = Pooler::start(harness, harness.cluster(), 1)?;
    let mut admin = db.connect()?;
    let mut client = pooler.conninfo(db.name()).connect()?;
    let token = client.granted(ACQUIRE)?;
    drop(client);
    let mut next = pooler.conninfo(db.name()).connect()?;
    next.run("SELECT 1")?;
    ensure!(seen(&mut admin, token)? == ("held".to_owned(), true) && next.is_taken("job")?);
    drop(pooler);
    wait_until("the lease is abandoned", PATIENCE, || abandoned(&mut admin, token).is_ok())
}
