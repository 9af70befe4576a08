//! `sql/pg_fence_lite.sql`: a cancelled attempt, and bugs in it that the tests of both editions catch. The rest is in
//! lite.script. The other tests, run with `--edition lite`, show that it keeps the extension's promises.

automod::dir!(pub "tests/suite/lite");

use pg_test::edition::BUG_VARIABLE;
use pg_test::{Background, Calls, Database, Harness, Result, ensure, harness_test};
use std::process::Command;

/// Wherever it is cancelled, no session-level lock may remain: no rollback would release it.
#[harness_test]
fn a_cancelled_try_leaves_no_lock_behind(harness: &Harness) -> Result<()> {
    let db = Database::with_lite(harness.cluster().conninfo("postgres"))?;
    let (mut open, mut tries) = (db.connect()?, db.connect()?);
    let names = "SELECT count(lease_acquire('job' || n)) FROM generate_series(1, 100) AS n";
    open.run(&format!("{names}; SELECT lease_revoke(name) FROM fence.leases"))?;
    open.run(&format!("BEGIN; {names}"))?;
    let mut cancels = Background::connect(&db.conninfo())?;
    let pid = tries.pid();
    cancels.send(&format!("DO $$ BEGIN FOR i IN 1..4000 LOOP PERFORM pg_cancel_backend({pid}), pg_sleep(0.001 * random()); END LOOP; END $$"))?;
    let mut cancelled = 0;
    while !cancels.is_finished() {
        cancelled += i32::from(tries.try_rows(names).is_err());
    }
    ensure!(cancelled > 100, "{cancelled} were cancelled");
    let left = format!("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = {pid}");
    ensure!(open.granted(&left)? == 0, "a lock is left");
    Ok(())
}

/// Each bug has a test of both editions, which passes without the bug.
#[harness_test]
fn planted_bugs_are_caught(_: &Harness) -> Result<()> {
    for (bug, test) in [
        ("no-guard-lock", "guards::locks::a_prepared_guard_survives_a_crash"),
        (
            "now",
            "leases::decision_time::a_renewal_that_waited_until_its_grant_was_over_revives_nothing",
        ),
        (
            "no-start-advance",
            "failover::server_starts::a_crash_of_one_backend_advances_the_sequence",
        ),
        (
            "decision-before-lock",
            "scenarios::session_races::of_64_sessions_exactly_one_takes_an_expired_lease",
        ),
    ] {
        for planted in [false, true] {
            let mut run = Command::new(std::env::current_exe()?);
            run.args(["--edition", "lite", "--exact", test]);
            let run = if planted { run.env(BUG_VARIABLE, bug) } else { &mut run };
            let said = String::from_utf8(run.output()?.stdout)?;
            let count = if planted { "0 passed; 1 failed" } else { "1 passed; 0 failed" };
            ensure!(said.contains(count), "{bug}, {planted}: {said}");
        }
    }
    Ok(())
}
