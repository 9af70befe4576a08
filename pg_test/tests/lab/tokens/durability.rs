//! A token that a client has seen is on disk: no crash makes the server forget it.
//!
//! Each crash is shown to lose what a plain sequence gave out in the same way.

use crate::support::c_module;
use pg_test::crash_test::{CrashOutcome, CrashTest};
use pg_test::{ensure, lab_test, Calls, Lab, Result};

/// The crash lost what was not flushed, and no token.
fn safe(what: &str, loss: CrashOutcome) -> Result<()> {
    ensure!(loss.plain_reissued(), "{what}: the crash lost nothing, so it shows nothing: {loss:?}");
    ensure!(!loss.reissued(), "{what}: a token was reissued: {loss:?}");
    Ok(())
}

#[lab_test]
fn a_token_of_an_open_transaction_survives_a_crash(lab: &Lab) -> Result<()> {
    let mut server = CrashTest::start(lab.builder())?;
    // One, and so many that the sequence logs twice more.
    for draws in [1, 67] {
        let open = server.session("BEGIN")?;
        for n in 0..draws {
            server.see(open, &format!("SELECT lease_acquire('job-{n}')"))?;
        }
        server.see_plain(open)?;
        let (loss, cluster) = server.crash()?;
        safe("open", loss)?;
        server = CrashTest::again(cluster)?;
    }
    Ok(())
}

#[lab_test]
fn a_token_of_a_rolled_back_transaction_survives_a_crash(lab: &Lab) -> Result<()> {
    let mut server = CrashTest::start(lab.builder())?;
    let session = server.session("BEGIN")?;
    server.see(session, "SELECT lease_acquire('job')")?;
    server.see_plain(session)?;
    server.run(session, "ROLLBACK")?;
    safe("rolled back", server.crash()?.0)
}

#[lab_test]
fn a_token_committed_asynchronously_survives_a_crash(lab: &Lab) -> Result<()> {
    let mut server = CrashTest::start(lab.builder().set("synchronous_commit", "off"))?;
    let session = server.session("SET synchronous_commit = off")?;
    for n in 0..6 {
        server.see(session, &format!("SELECT lease_acquire('job-{n}')"))?;
        server.see_plain(session)?;
        if n == 2 {
            // Recovery does not read what was logged before.
            server.checkpoint()?;
        }
    }
    safe("asynchronous", server.crash()?.0)
}

#[lab_test]
fn a_token_whose_log_record_is_another_open_transaction_s_survives_a_crash(
    lab: &Lab,
) -> Result<()> {
    let mut server = CrashTest::start(lab.builder())?;
    for commit in ["on", "off"] {
        // This one logs 32 values ahead, and stays open.
        let open = server.session("BEGIN")?;
        server.see(open, "SELECT lease_acquire('open')")?;
        let other = server.session(&format!("SET synchronous_commit = {commit}"))?;
        for n in 0..5 {
            server.see(other, &format!("SELECT lease_acquire('job-{n}')"))?;
        }
        server.see_plain(open)?;
        server.see_plain(other)?;
        let (loss, cluster) = server.crash()?;
        safe(commit, loss)?;
        cluster.connect("postgres")?.run("SELECT lease_revoke(name) FROM fence.leases")?;
        server = CrashTest::again(cluster)?;
    }
    Ok(())
}

#[lab_test]
fn every_function_that_draws_is_durable(lab: &Lab) -> Result<()> {
    let mut server = CrashTest::start(lab.builder())?;
    for call in [
        "SELECT lease_acquire('job', wait => '1 s')",
        "SELECT lease_acquire('together', shared => true)",
        "SELECT lease_acquire('old', 'h', reclaim => true)",
        "SELECT lease_renew('old', $)",
        "SELECT lease_release('old', $)",
        "SELECT lease_revoke('old')",
        "SELECT lease_acquire_all('{a,b,c}')",
        "SELECT lease_renew_all('{old}', $)",
        "SELECT lease_release_all('{old}', $)",
    ] {
        let session = server.session("BEGIN")?;
        server.see(session, &call.replace('$', &server.old().to_string()))?;
        server.see_plain(session)?;
        let (loss, cluster) = server.crash()?;
        safe(call, loss)?;
        server = CrashTest::again(cluster)?;
    }
    Ok(())
}

#[lab_test]
fn no_draw_waits_for_the_disk(lab: &Lab) -> Result<()> {
    let mut server = CrashTest::start(lab.builder())?;
    let open = server.session("BEGIN")?;
    let other = server.session("CREATE TABLE t ()")?;
    let mut last = server.old();
    let mut by_draws = 0;
    for _ in 0..100 {
        let before = server.flushed()?;
        last = server.see(open, &format!("SELECT lease_renew('old', {last})"))?;
        by_draws += usize::from(server.flushed()? != before);
        // Any commit writes the log up to its own record, and so what the draw has logged.
        server.run(other, "CREATE TABLE u (); DROP TABLE u")?;
    }
    ensure!(by_draws == 0, "{by_draws} of 100 draws waited");
    server.see_plain(open)?;
    safe("others commit", server.crash()?.0)
}

#[lab_test]
fn a_transaction_that_only_releases_does_not_wait_for_the_disk(lab: &Lab) -> Result<()> {
    let mut server = CrashTest::start(lab.builder())?;
    let session = server.session("CREATE TABLE t (n int)")?;
    for (release, writes) in [
        ("SELECT lease_release('job', $)", true),
        ("SELECT lease_release_all('{job, more}', $)", true),
        ("SELECT lease_release('job', $)", false),
        ("SELECT lease_release_all('{job}', $)", false),
        ("SELECT lease_release_all('{more, job}', $)", false),
    ] {
        // These commits wait, so all before is on disk.
        server.run(session, "SELECT lease_revoke('job'), lease_revoke('more')")?;
        let acquire = "SELECT lease_acquire_all('{job, more}', ttl => '1 hour')";
        let token = server.see(session, acquire)?;
        let before = server.flushed()?;
        let write = if writes { "INSERT INTO t VALUES (1);" } else { "" };
        let release = release.replace('$', &token.to_string());
        server.see(session, &format!("BEGIN; {write} {release}; COMMIT"))?;
        let waited = server.flushed()? != before;
        ensure!(waited == writes, "waited: {waited}, with {write:?} before {release}");
    }
    server.run(session, "BEGIN")?;
    server.see_plain(session)?;
    let (loss, cluster) = server.crash()?;
    safe("released", loss)?;
    // The lease that the last one gave back is taken until its deadline.
    let mut session = cluster.connect("postgres")?;
    ensure!(session.one::<Option<i64>>("SELECT lease_acquire('job')", &[])?.is_none());
    Ok(())
}

/// Another extension, which writes something when a transaction commits.
const WRITES_AT_COMMIT: &str = r#"
#include "postgres.h"
#include "access/xact.h"
#include "fmgr.h"
#include "replication/message.h"

PG_MODULE_MAGIC;
void _PG_init(void);

static void
before_commit(XactEvent event, void *unused)
{
    if (event != XACT_EVENT_PRE_COMMIT)
        return;
#if PG_VERSION_NUM < 170000
    LogLogicalMessage("test", "x", 1, true);
#else
    LogLogicalMessage("test", "x", 1, true, false);
#endif
}

void
_PG_init(void)
{
    RegisterXactCallback(before_commit, NULL);
}
"#;

#[lab_test]
fn a_release_loosens_no_write_of_another_extension_s(lab: &Lab) -> Result<()> {
    let library = c_module::build(lab, "writes_at_commit", WRITES_AT_COMMIT)?;
    let mut server = CrashTest::start(lab.builder())?;
    // Loaded before pg_fence or after it: so its work is done after pg_fence's, or before.
    for (before, after) in [(true, false), (false, true)] {
        let load = |load: bool| match load {
            true => format!("LOAD '{}'", library.display()),
            false => String::new(),
        };
        let session = server.session(&load(before))?;
        let token = server.see(session, "SELECT lease_acquire('job')")?;
        server.run(session, &load(after))?;
        // This commit waits, so all before is on disk.
        server.run(session, "CREATE TABLE t (); DROP TABLE t")?;
        let flushed = server.flushed()?;
        server.see(session, &format!("SELECT lease_release('job', {token})"))?;
        ensure!(server.flushed()? != flushed, "loaded before: {before}");
    }
    Ok(())
}

#[lab_test]
fn a_jump_of_an_open_transaction_survives_a_crash(lab: &Lab) -> Result<()> {
    let mut server = CrashTest::start(lab.builder())?;
    let old = server.old();
    let session = server.session("BEGIN")?;
    server.see(session, "SELECT fence_new_epoch()")?;
    server.see_plain(session)?;
    let (loss, cluster) = server.crash()?;
    safe("jump", loss)?;
    // It was no transaction's to undo, and the earlier token is silent still.
    let mut session = cluster.connect("postgres")?;
    ensure!(session.one::<i64>("SELECT jumps FROM fence_status()", &[])? == 1);
    ensure!(!session.one::<bool>("SELECT lease_check('old', $1)", &[&old])?, "it speaks again");
    session.refused(&format!("SELECT lease_guard('old', {old})"), "PF004")?;
    Ok(())
}

#[lab_test]
fn a_token_is_durable_without_wal_for_replicas(lab: &Lab) -> Result<()> {
    let builder = lab.builder().set("wal_level", "minimal").set("max_wal_senders", "0");
    let mut server = CrashTest::start(builder)?;
    let session = server.session("BEGIN")?;
    server.see(session, "SELECT lease_acquire('job')")?;
    server.see_plain(session)?;
    safe("minimal", server.crash()?.0)
}

#[lab_test]
fn a_token_of_an_altered_sequence_survives_a_crash(lab: &Lab) -> Result<()> {
    let mut server = CrashTest::start(lab.builder())?;
    // The session knows a record of the old file that covers the next tokens.
    let session = server.session("SELECT lease_acquire('a'); SELECT lease_acquire('b')")?;
    let admin = server.session("")?;
    server.run(admin, "ALTER SEQUENCE fence.token_seq INCREMENT 1 CACHE 1 NO CYCLE")?;
    server.run(session, "BEGIN")?;
    server.see(session, "SELECT lease_acquire('c')")?;
    server.see_plain(session)?;
    safe("altered", server.crash()?.0)
}

#[lab_test]
fn a_token_of_a_sequence_that_was_unlogged_survives_a_crash(lab: &Lab) -> Result<()> {
    let mut server = CrashTest::start(lab.builder())?;
    let admin = server.session("SELECT lease_acquire('a')")?;
    server.run(admin, "ALTER SEQUENCE fence.token_seq SET UNLOGGED")?;
    server.run(admin, "ALTER SEQUENCE fence.token_seq SET LOGGED")?;
    for known in [admin, server.session("")?] {
        server.run(known, "BEGIN")?;
        server.see(known, &format!("SELECT lease_acquire('b{known}')"))?;
        server.see(known, &format!("SELECT lease_acquire('c{known}')"))?;
    }
    server.see_plain(admin)?;
    safe("unlogged", server.crash()?.0)
}

#[lab_test]
fn a_token_of_a_sequence_made_without_wal_survives_a_crash(lab: &Lab) -> Result<()> {
    let builder = lab.builder().set("wal_level", "minimal").set("max_wal_senders", "0");
    let mut server = CrashTest::start(builder)?;
    let maker = server.session("DROP EXTENSION pg_fence; BEGIN; CREATE EXTENSION pg_fence")?;
    server.run(maker, "SELECT lease_acquire('a')")?;
    server.run(maker, "COMMIT")?;
    for known in [maker, server.session("")?] {
        server.run(known, "BEGIN")?;
        // More than the dropped one had given out.
        for n in 0..5 {
            server.see(known, &format!("SELECT lease_acquire('job-{known}-{n}')"))?;
        }
    }
    server.see_plain(maker)?;
    safe("made without WAL", server.crash()?.0)
}

#[lab_test]
fn a_sequence_altered_in_the_transaction_is_refused(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    const ALTER: &str = "ALTER SEQUENCE fence.token_seq CACHE 1";
    let before = session.granted("SELECT lease_acquire('a')")?;
    session.run(&format!("BEGIN; {ALTER}"))?;
    session.refused("SELECT lease_acquire('b')", "55000")?;
    session.run("ROLLBACK")?;
    session.run(&format!("BEGIN; SAVEPOINT s; {ALTER}; ROLLBACK TO s"))?;
    let undone = session.granted("SELECT lease_acquire('b')")?;
    session.run("COMMIT")?;
    session.run(ALTER)?;
    let after = session.granted("SELECT lease_acquire('c')")?;
    ensure!(before < undone && undone < after, "{before}, {undone}, {after}");
    // The rest of the grants lives on.
    ensure!(session.speaks("a", before)? && session.speaks("b", undone)?);
    Ok(())
}

#[lab_test]
fn what_was_committed_before_the_token_was_seen_is_there(lab: &Lab) -> Result<()> {
    // With the default setting the grant itself survives too, so nobody else gets the lease.
    let mut server = CrashTest::start(lab.builder())?;
    let session = server.session("")?;
    let token = server.see(session, "SELECT lease_acquire('job', ttl => '1 hour')")?;
    let (_, cluster) = server.crash()?;
    let mut session = cluster.connect("postgres")?;
    ensure!(session.one::<bool>("SELECT lease_check('job', $1)", &[&token])?);
    ensure!(session.one::<Option<i64>>("SELECT lease_acquire('job')", &[])?.is_none());
    Ok(())
}

#[lab_test]
fn a_prepared_grant_survives_a_crash(lab: &Lab) -> Result<()> {
    let mut server = CrashTest::start(lab.builder())?;
    let session = server.session("BEGIN")?;
    let token = server.see(session, "SELECT lease_acquire('job', ttl => '1 hour')")?;
    server.run(session, "PREPARE TRANSACTION 'grant'")?;
    let (loss, cluster) = server.crash()?;
    ensure!(!loss.reissued(), "{loss:?}");
    let mut session = cluster.connect("postgres")?;
    ensure!(session.one::<Option<i64>>("SELECT lease_acquire('job')", &[])?.is_none());
    session.run("COMMIT PREPARED 'grant'")?;
    ensure!(session.one::<bool>("SELECT lease_check('job', $1)", &[&token])?);
    Ok(())
}
