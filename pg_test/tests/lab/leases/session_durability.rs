//! A lease of a session needs no disk, unless a crash could bring back the grant before it.

use pg_test::crash_test::CrashTest;
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result};

/// A commit that waits: all before it is on disk.
const WAITS: &str = "SELECT pg_logical_emit_message(true, 'test', 'flushed')";
const HOUR: &str = "ttl => '1 h'";

/// A lasting grant that was released by a commit which has not waited. Gives its token.
fn just_released(server: &mut CrashTest, name: &str) -> Result<i64> {
    let other = server.session("")?;
    let token = server.see(other, &format!("SELECT lease_acquire('{name}', {HOUR})"))?;
    let flushed = server.flushed()?;
    server.see(other, &format!("SELECT lease_release('{name}', {token})"))?;
    ensure!(server.flushed()? == flushed, "a release waits");
    Ok(token)
}

/// Whether the statements wait for the disk; they give a token.
fn waits(server: &mut CrashTest, session: usize, sql: &str) -> Result<(bool, i64)> {
    let flushed = server.flushed()?;
    let token = server.see(session, sql)?;
    Ok((server.flushed()? != flushed, token))
}

#[lab_test]
fn a_lease_of_a_session_does_not_wait_for_the_disk(lab: &Lab) -> Result<()> {
    let mut server = CrashTest::start(lab.builder())?;
    let session = server.session("CREATE TABLE t (n int)")?;
    let mut last = 0;
    for (call, asks) in [
        // Nobody had it; then its own renewal and release; then over what it has released.
        ("SELECT lease_acquire('job', session => true)", false),
        ("SELECT lease_renew('job', $)", false),
        ("SELECT lease_release('job', $)", false),
        ("SELECT lease_acquire('job', 'me', session => true)", false),
        ("SELECT lease_acquire('job', 'me', session => true, reclaim => true)", false),
        ("SELECT lease_acquire_all('{a, b}', session => true)", false),
        ("SELECT lease_release_all('{a, b}', $)", false),
        ("SELECT token FROM lease_acquire_any('{any}', session => true)", false),
        ("SELECT renewed FROM lease_keep('{any}', ('{' || ($) || '}')::bigint[])", false),
        ("SELECT lease_acquire('slots', slots => 2, session => true)", false),
        ("SELECT lease_acquire('slots', slots => 2, session => true)", false),
        ("SELECT lease_acquire('waited', wait => '1 s', session => true)", false),
        ("BEGIN; DO $$BEGIN PERFORM lease_acquire('c', session => true); END$$; SELECT lease_acquire('d', session => true); COMMIT", false),
        ("BEGIN; SAVEPOINT s; SELECT lease_acquire('e', session => true); RELEASE s; COMMIT", false),
        // The twins that last, and whatever else is written.
        ("SELECT lease_acquire('lasting')", true),
        ("SELECT lease_renew('lasting', $)", true),
        ("SELECT lease_acquire_all('{x, y}')", true),
        ("SELECT token FROM lease_acquire_any('{z}')", true),
        ("SELECT max(renewed) FROM lease_keep('{any, z}', (SELECT array_agg(first_token ORDER BY name) FROM fence.leases WHERE name IN ('any', 'z')))", true),
        ("BEGIN; INSERT INTO t VALUES (1); SELECT lease_acquire('f', session => true); COMMIT", true),
        ("BEGIN; SELECT lease_acquire('g', session => true); INSERT INTO t VALUES (1); COMMIT", true),
        ("BEGIN; SELECT lease_acquire('h', session => true); SAVEPOINT s; INSERT INTO t VALUES (1); RELEASE s; COMMIT", true),
        ("BEGIN; DO $$BEGIN PERFORM lease_acquire('i', session => true); END$$; SELECT lease_acquire('j'); COMMIT", true),
    ] {
        server.run(session, WAITS)?;
        let call = call.replace("$)", &format!("{last})"));
        let (waited, token) = waits(&mut server, session, &call)?;
        last = token;
        ensure!(waited == asks, "waited: {waited}: {call}");
    }
    // After the crash they are free, and no token comes again.
    server.run(session, "BEGIN")?;
    server.see_plain(session)?;
    let (loss, cluster) = server.crash()?;
    ensure!(loss.plain_reissued() && !loss.reissued(), "{loss:?}");
    let mut after = cluster.connect("postgres")?;
    for name in ["job", "c", "d", "e"] {
        ensure!(after.granted(&format!("SELECT lease_acquire('{name}')"))? > last, "{name}");
    }
    Ok(())
}

#[lab_test]
fn a_crash_brings_back_no_grant_that_a_session_s_has_replaced(lab: &Lab) -> Result<()> {
    const ACQUIRE: &str = "SELECT lease_acquire('job', 'h', session => true)";
    const RECLAIM: &str = "SELECT lease_acquire('job', 'h', session => true, reclaim => true)";
    let mut server = CrashTest::start(lab.builder())?;
    // The fate of a lasting grant of which nobody has told the disk, and how a session is granted the lease then.
    for (what, settings, before, acquire, asks) in [
        ("released", "", "", ACQUIRE.to_owned(), true),
        ("by a session that never waits", "SET synchronous_commit = off", "", ACQUIRE.to_owned(), true),
        ("released, then written", "", WAITS, ACQUIRE.to_owned(), false),
        ("pruned", "", "BEGIN; SET LOCAL synchronous_commit = off; SELECT lease_prune('0'); COMMIT", ACQUIRE.to_owned(), false),
        ("live", "", "SELECT lease_acquire('job', 'h', ttl => '1 h')", RECLAIM.to_owned(), true),
        (
            "revoked by a commit that does not wait",
            "",
            "SELECT lease_acquire('job', 'h', ttl => '1 h');
             BEGIN; SET LOCAL synchronous_commit = off; SELECT lease_revoke('job'); COMMIT",
            ACQUIRE.to_owned(),
            true,
        ),
        (
            "cut short by a commit that does not wait",
            "",
            "SELECT lease_acquire('job', 'h', ttl => '1 h');
             BEGIN; SET LOCAL synchronous_commit = off;
             SELECT lease_renew('job', first_token, ttl => '1 ms') FROM fence.leases WHERE name = 'job';
             COMMIT; SELECT pg_sleep(0.01)",
            ACQUIRE.to_owned(),
            true,
        ),
        (
            "released in the same transaction",
            "",
            "SELECT lease_acquire('job', 'h', ttl => '1 h')",
            format!(
                "BEGIN;
                 DO $$BEGIN PERFORM lease_release('job', first_token) FROM fence.leases WHERE name = 'job'; END$$;
                 {ACQUIRE}; COMMIT"
            ),
            true,
        ),
    ] {
        let mut old = just_released(&mut server, "job")?;
        let session = server.session(settings)?;
        server.run(session, before)?;
        let held = "SELECT coalesce(max(first_token), 0) FROM fence.leases WHERE name = 'job' AND holder = 'h'";
        let of_before = server.see(session, held)?;
        if of_before > 0 {
            old = of_before;
        }
        let (waited, new) = waits(&mut server, session, &acquire)?;
        ensure!(waited == asks, "{what}: waited: {waited}");
        let cluster = server.crash_only()?;
        let mut after = cluster.connect("postgres")?;
        ensure!(!after.speaks("job", old)?, "{what}: {old} speaks again after {new}");
        ensure!(after.granted("SELECT lease_acquire('job')")? > new, "{what}: it is taken");
        after.run("SELECT lease_revoke('job'); SELECT lease_prune('0')")?;
        server = CrashTest::again(cluster)?;
    }
    Ok(())
}

#[lab_test]
fn who_comes_after_a_session_that_never_waits_needs_not_wait(lab: &Lab) -> Result<()> {
    let mut server = CrashTest::start(lab.builder())?;
    let old = just_released(&mut server, "job")?;
    let between = server.session("SET synchronous_commit = off")?;
    let token = server.see(between, "SELECT lease_acquire('job', session => true)")?;
    server.see(between, &format!("SELECT lease_release('job', {token})"))?;
    let session = server.session("")?;
    let (waited, _) = waits(&mut server, session, "SELECT lease_acquire('job', session => true)")?;
    ensure!(!waited, "it waits");
    let cluster = server.crash_only()?;
    ensure!(!cluster.connect("postgres")?.speaks("job", old)?, "{old} speaks again");
    Ok(())
}

#[lab_test]
fn what_a_trigger_on_the_state_writes_is_waited_for(lab: &Lab) -> Result<()> {
    let mut server = CrashTest::start(lab.builder())?;
    let session = server.session(
        "CREATE TABLE log (name text);
         CREATE FUNCTION log() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN INSERT INTO log VALUES (NEW.name); RETURN NULL; END$$;
         CREATE TRIGGER log AFTER INSERT OR UPDATE ON fence.lease FOR EACH ROW EXECUTE FUNCTION log()",
    )?;
    let mut last = 0;
    for call in ["SELECT lease_acquire('job', session => true)", "SELECT lease_release('job', $)"] {
        server.run(session, WAITS)?;
        let (waited, token) = waits(&mut server, session, &call.replace('$', &last.to_string()))?;
        last = token;
        ensure!(waited, "{call} does not wait");
    }
    Ok(())
}

#[lab_test]
fn with_synchronous_standbys_it_waits_as_its_session_asked(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    let mut local = cluster.connect("postgres")?;
    local.run("CREATE EXTENSION pg_fence; SET synchronous_commit = local")?;
    // One that never answers.
    cluster.configure(&[("synchronous_standby_names", "nobody")])?;
    cluster.reload()?;
    let mut asks = Background::connect(&cluster.conninfo("postgres"))?;
    wait_until("who asks for a standby waits for it", PATIENCE, || {
        // The checkpointer may not know of the standby yet.
        if asks.is_finished() {
            let _ = asks.rows();
        }
        let _ = asks.send("SELECT lease_acquire('job', 'h', session => true, reclaim => true)");
        asks.waits_for().is_some_and(|(_, event)| event == "SyncRep")
    })?;
    local.granted("SELECT lease_acquire('local', session => true)").map(drop)
}
