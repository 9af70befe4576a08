//! fence.stats and fence.refusals: what the database has counted.

automod::dir!(pub "tests/lab/statistics");

use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result, Session};
use std::time::Duration;

/// What was counted since the last call, as `guards 1, releases 2`; it counts from zero then.
pub fn counted(session: &mut Session) -> Result<String> {
    let counted = shown(session)?;
    session.run("SELECT fence_stats_reset()")?;
    Ok(counted)
}

/// The counters that are not zero, without the time that was waited.
pub fn shown(session: &mut Session) -> Result<String> {
    let shown = session.text(
        "SELECT coalesce(string_agg(c.key || ' ' || c.value, ', ' ORDER BY c.key COLLATE \"C\"), '')
           FROM fence.stats s, jsonb_each_text(to_jsonb(s) - 'stats_reset' - 'wait_time') c
          WHERE c.value <> '0'",
    )?;
    Ok(shown.unwrap_or_default())
}

/// Fails unless exactly that was counted since the last look.
pub fn expect(session: &mut Session, what: &str, wanted: &str) -> Result<()> {
    let counted = counted(session)?;
    ensure!(counted == wanted, "{what}: counted {counted}, not {wanted}");
    Ok(())
}

#[lab_test]
fn each_counter_has_its_column(lab: &Lab) -> Result<()> {
    let source = pg_test::extension::source_root().join("src/statistics/counter.rs");
    let source = std::fs::read_to_string(source)?;
    let counters = source.lines().filter_map(|line| line.split_once(" = \""));
    let mut counters: Vec<_> =
        counters.filter_map(|(_, column)| column.strip_suffix("\",")).collect();
    counters.sort_unstable();
    let shown = "SELECT string_agg(key, ' ' ORDER BY key COLLATE \"C\")
           FROM fence.stats s, jsonb_each(to_jsonb(s) - 'stats_reset') WHERE value <> 'null'";
    let shown = lab.database()?.connect()?.text(shown)?.unwrap_or_default();
    ensure!(shown == counters.join(" "), "{shown}, not {counters:?}");
    Ok(())
}

#[lab_test]
fn each_call_on_a_lease_is_counted(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let mut other = db.connect()?;
    ensure!(session.truth("SELECT stats_reset IS NULL AND grants = 0 FROM fence.stats")?);
    let a = session.acquire("a", "1 h")?;
    ensure!(session.truth("SELECT stats_reset <= now() FROM fence.stats")?);
    expect(&mut session, "an acquire", "grants 1")?;
    other.nothing("SELECT lease_acquire('a')")?;
    expect(&mut session, "a try that lost", "tries_lost 1")?;
    session.renew("a", a)?;
    session.nothing("SELECT lease_renew('a', 1)")?;
    session.nothing("SELECT lease_renew('nobody', 1)")?;
    expect(&mut session, "renewals", "renewals 1, renewals_lost 2")?;
    session.run(&format!("SELECT lease_guard('a', {a})"))?;
    expect(&mut session, "a guard", "guards 1")?;
    session.run(&format!("BEGIN; SELECT lease_guard('a', {a}); SELECT lease_guard('a', {a})"))?;
    session.run("COMMIT")?;
    expect(&mut session, "a guard twice in one transaction", "guards 1")?;
    session
        .run(&format!("BEGIN; SELECT lease_release('a', {a}); SELECT lease_release('a', {a})"))?;
    session.run("COMMIT")?;
    expect(&mut session, "a release, twice in one transaction", "releases 1")?;
    session.nothing(&format!("SELECT lease_release('a', {a})"))?;
    expect(&mut session, "a release that came too late", "")?;
    session.acquire("a", "1 h")?;
    session.run("SELECT lease_revoke('a')")?;
    session.nothing("SELECT lease_revoke('a')")?;
    expect(&mut session, "a revocation", "grants 1, revocations 1")?;
    session.acquire_expired("a")?;
    session.acquire("a", "1 h")?;
    expect(&mut session, "a take-over of one that expired", "grants 2, take_overs 1")?;
    session.run("SELECT lease_acquire('a', 'me', '1 h', reclaim => true)")?;
    session.run("SELECT lease_check('a', 1), (SELECT count(*) FROM fence.leases)")?;
    expect(&mut session, "what is not counted", "tries_lost 1")?;
    session.run("SELECT fence_new_epoch(), lease_prune()")?;
    expect(&mut session, "a jump", "jumps 1")
}

#[lab_test]
fn shared_grants_slots_and_sessions_are_counted(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    for _ in 0..3 {
        session.granted("SELECT lease_acquire('r', ttl => '1 h', shared => true)")?;
    }
    session.nothing("SELECT lease_acquire('r')")?;
    expect(&mut session, "shared ones", "grants 3, tries_lost 1")?;
    session.run("SELECT lease_revoke('r')")?;
    expect(&mut session, "all of a lease revoked", "revocations 3")?;
    let slot = "SELECT lease_acquire('s', ttl => '1 h', slots => 2)";
    for token in [session.granted(slot)?, session.granted(slot)?] {
        session.expire_now("s", token)?;
    }
    session.granted("SELECT lease_acquire('s', ttl => '1 h')")?;
    expect(&mut session, "one over two that expired", "grants 3, renewals 2, take_overs 1")?;
    let mut worker = db.connect()?;
    let pid = worker.pid();
    worker.granted("SELECT lease_acquire('t', ttl => '1 h', session => true)")?;
    drop(worker);
    wait_until("it is gone", PATIENCE, || {
        let gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)";
        session.one(gone, &[&pid]).unwrap_or(false)
    })?;
    session.granted("SELECT lease_acquire('t', ttl => '1 h')")?;
    expect(&mut session, "one over one that was abandoned", "grants 2, take_overs 1")
}

#[lab_test]
fn calls_on_several_leases_count_each_of_them(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.granted("SELECT lease_acquire_all('{a,b,c}', ttl => '1 h')")?;
    session.nothing("SELECT lease_acquire_all('{c,d}')")?;
    expect(&mut session, "acquired", "grants 3, tries_lost 1")?;
    session.granted(&format!("SELECT lease_renew_all('{{a,b,c}}', {token})"))?;
    session.nothing(&format!("SELECT lease_renew_all('{{a,b,d}}', {token})"))?;
    expect(&mut session, "renewed", "renewals 3, renewals_lost 1")?;
    session.run("BEGIN")?;
    session.granted(&format!("SELECT lease_release('a', {token})"))?;
    session.granted(&format!("SELECT lease_release_all('{{a,b,c}}', {token})"))?;
    session.run("COMMIT")?;
    expect(&mut session, "released, one of them before", "releases 3")
}

#[lab_test]
fn a_wait_is_counted_with_its_time(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let wait_time =
        |session: &mut Session| session.one::<f64>("SELECT wait_time FROM fence.stats", &[]);
    let token = session.acquire("a", "1 h")?;
    session.granted("SELECT lease_acquire('free', wait => '1 h')")?;
    expect(&mut session, "no wait", "grants 2")?;
    session.nothing("SELECT lease_acquire('a', wait => '50 ms')")?;
    ensure!(wait_time(&mut session)? >= 50.0);
    expect(&mut session, "a wait in vain", "tries_lost 1, waits 1")?;
    ensure!(wait_time(&mut session)? == 0.0);

    let mut waiter = Background::connect(&db.conninfo())?;
    waiter.send("SELECT lease_acquire('a', wait => '1 h')")?;
    waiter.wait_until_blocked()?;
    session.release("a", token)?;
    waiter.rows()?;
    expect(&mut session, "a wait that won", "grants 1, releases 1, waits 1")?;

    for (end, sqlstate) in [("cancel", "57014"), ("terminate", "57P01")] {
        waiter.send("SELECT lease_acquire('a', wait => '1 h')")?;
        waiter.wait_until_blocked()?;
        std::thread::sleep(Duration::from_millis(20));
        if end == "cancel" {
            waiter.cancel()?;
        } else {
            waiter.terminate()?;
        }
        let fault = waiter.outcome(PATIENCE)?.expect_err("it was ended");
        ensure!(fault.sqlstate == sqlstate || fault.is_disconnect(), "{fault}");
        let over = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = $1 AND state = 'active'";
        let pid = waiter.pid();
        wait_until("it is over", PATIENCE, || session.one(over, &[&pid]).unwrap_or(false))?;
        ensure!(wait_time(&mut session)? >= 20.0, "{end}");
        expect(&mut session, end, "waits 1")?;
    }
    Ok(())
}

#[lab_test]
fn what_is_rolled_back_is_counted(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let mut outside = db.connect()?;
    session.run("BEGIN; SELECT lease_acquire('a'); ROLLBACK")?;
    expect(&mut outside, "an acquire rolled back", "grants 1")?;
    session.run("BEGIN; SAVEPOINT s; SELECT lease_acquire('a'); ROLLBACK TO s; COMMIT")?;
    expect(&mut outside, "with a savepoint", "grants 1")?;
    session.run("BEGIN; SELECT lease_acquire('a')")?;
    expect(&mut outside, "a transaction that is open", "")?;
    expect(&mut session, "its own counts are shown to it", "grants 1")?;
    session.run("PREPARE TRANSACTION 'p'")?;
    expect(&mut outside, "prepared, shown before", "")?;
    outside.run("ROLLBACK PREPARED 'p'")?;
    session.run("BEGIN; SELECT lease_acquire('a'); PREPARE TRANSACTION 'p'")?;
    expect(&mut outside, "a prepared one", "grants 1")?;
    outside.run("COMMIT PREPARED 'p'")?;
    expect(&mut outside, "its commit", "")?;
    let failing = "DO $$ BEGIN PERFORM lease_acquire('b'); RAISE division_by_zero; END $$";
    session.refused(failing, "22012")?;
    // The client hears of an error before its transaction is over.
    session.run("SELECT")?;
    expect(&mut outside, "a statement that failed", "grants 1")
}

#[lab_test]
fn each_refusal_is_counted_by_its_sqlstate(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run(
        "CREATE TABLE t (id int PRIMARY KEY, v int, fence bigint);
         INSERT INTO t SELECT n, 0 FROM generate_series(1, 10) n; SELECT fence_protect('t');
         CREATE TABLE b (id int PRIMARY KEY, v int, fence bigint); INSERT INTO b VALUES (1, 0);
         SELECT fence_protect('b', lease => 'b:{id}')",
    )?;
    let token = session.acquire("a", "1 h")?;
    let newer = session.granted(&format!("SELECT lease_renew('a', {token})"))?;
    counted(&mut session)?;
    session.run(&format!("UPDATE t SET v = 1, fence = {newer}"))?;
    expect(&mut session, "rows", "writes_checked 10")?;
    for (sql, sqlstate, wanted) in [
        (
            format!("UPDATE t SET fence = {token} WHERE id = 1"),
            "PF001",
            "refused_pf001 1, writes_checked 1",
        ),
        ("UPDATE t SET v = 2 WHERE id = 1".into(), "PF002", "refused_pf002 1, writes_checked 1"),
        (
            format!("UPDATE t SET fence = {newer} + 1000000 WHERE id = 1"),
            "PF003",
            "refused_pf003 1, writes_checked 1",
        ),
        (format!("UPDATE b SET fence = {newer}"), "PF004", "refused_pf004 1, writes_checked 1"),
        ("TRUNCATE t".into(), "PF005", "refused_pf005 1, writes_checked 1"),
        (format!("SELECT lease_guard('a', {token} - 1)"), "PF004", "refused_pf004 1"),
    ] {
        session.refused(&sql, sqlstate)?;
        expect(&mut session, &sql, wanted)?;
        // Caught, it was refused all the same.
        session.run(&format!(
            "DO $do$ BEGIN EXECUTE $${sql}$$; RAISE 'not refused'; EXCEPTION WHEN SQLSTATE '{sqlstate}' THEN END $do$"
        ))?;
        expect(&mut session, &format!("caught: {sql}"), wanted)?;
    }
    // Three rows that land, and the one at which the statement ends.
    let until = format!("UPDATE t SET v = 3, fence = CASE WHEN id < 4 THEN {newer} + 0 ELSE 1 END");
    session.run("UPDATE t SET v = 4 WHERE false")?;
    expect(&mut session, "no row", "")?;
    let fresh = session.granted(&format!("SELECT lease_renew('a', {token})"))?;
    session.refused(&until.replace(&newer.to_string(), &fresh.to_string()), "PF001")?;
    expect(&mut session, "some rows", "refused_pf001 1, renewals 1, writes_checked 4")
}
