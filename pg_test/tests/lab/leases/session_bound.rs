//! Grants that end with the session that acquired them, `session => true`: killed clients, cables, standbys, poolers.
//! The rest is in session_bound.script.

use crate::support::concurrency::{
    is_woken, nothing_is_left, token_of, undisturbed_server, waiting, Waiter, WAIT,
};
use pg_test::cable::Cable;
use pg_test::pooler::Pooler;
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Calls, Context, Database, Lab, Result, Session, Worker};
use std::fs;

const ACQUIRE: &str = "SELECT lease_acquire('job', 'first', ttl => '1 h', session => true)";

/// The state that is shown of `job`, and whether the token speaks.
fn seen(session: &mut Session, token: i64) -> Result<(String, bool)> {
    let state = session.text("SELECT state FROM lease_info('job')")?.unwrap_or_default();
    Ok((state, session.speaks("job", token)?))
}

fn abandoned(session: &mut Session, token: i64) -> Result<()> {
    let seen = seen(session, token)?;
    ensure!(seen == ("abandoned".to_owned(), false), "{seen:?}");
    Ok(())
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
fn a_discarded_session_s_lease_passes_on_at_once(lab: &Lab) -> Result<()> {
    passes_on(lab, &[&[]], |holder, _| holder.rows("DISCARD ALL").map(drop))
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
fn on_a_standby_the_row_is_shown_and_after_a_failover_it_is_abandoned(lab: &Lab) -> Result<()> {
    let primary = lab.builder().start()?;
    let db = Database::with_extension(primary.conninfo("postgres"))?;
    let mut holder = db.connect()?;
    let token = holder.granted(ACQUIRE)?;
    let standby = lab.builder().standby_of(&primary)?;
    standby.start()?;
    standby.wait_replayed(&primary)?;
    let mut there = standby.connect(db.name())?;
    ensure!(seen(&mut there, token)? == ("held".to_owned(), true));
    // The session lives on, but on another server.
    standby.promote()?;
    let mut there = standby.connect(db.name())?;
    abandoned(&mut there, token)?;
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
    abandoned(&mut db.copy()?.connect()?, token)
}

#[lab_test]
fn a_pooler_s_reset_ends_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let pooler = Pooler::start_in(lab, lab.cluster(), 2, "session")?;
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
    // As the documentation warns: the session is the pooler's connection, which outlives the client.
    let db = lab.database()?;
    let pooler = Pooler::start(lab, lab.cluster(), 1)?;
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
