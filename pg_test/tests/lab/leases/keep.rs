//! The heartbeat of a process: what needs threads. The rest is in keep.script.

use crate::support::concurrency::{at_once, rounds, sessions};
use pg_test::{bail, ensure, lab_test, Calls, Context, Lab, Result};

#[lab_test]
fn ten_thousand_are_kept_in_as_many_calls_as_their_locks_take(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut pruner) = (db.connect()?, db.connect()?);
    session
        .run("CREATE TABLE held (name text PRIMARY KEY, token bigint, done bool DEFAULT false)")?;
    session.run(
        "DO $$ BEGIN FOR n IN 0..99 LOOP
             INSERT INTO held SELECT name, token FROM lease_acquire_any(
                 ARRAY(SELECT 'job' || n * 100 + i FROM generate_series(1, 100) i), 100, ttl => '1 h');
             COMMIT;
         END LOOP; END $$",
    )?;
    // Every tenth has been lost, and is pruned while the others are kept.
    session.run("DO $$ BEGIN FOR n IN 1..1000 LOOP PERFORM lease_revoke('job' || n * 10); COMMIT; END LOOP; END $$")?;
    let mut calls = 0;
    let mut left = 10_000;
    while left > 0 {
        let prune = std::thread::spawn(move || {
            let pruned = pruner.granted("SELECT lease_prune('0')");
            (pruner, pruned)
        });
        let answered = session.granted(
            "WITH k AS MATERIALIZED (SELECT k.* FROM (SELECT array_agg(name) n, array_agg(token) t FROM held WHERE NOT done) h,
                  lease_keep(h.n, h.t) k),
                  u AS (UPDATE held SET done = true FROM k WHERE k.name = held.name AND k.outcome IN ('kept', 'lost'))
             SELECT count(*) FROM k WHERE outcome IN ('kept', 'lost')",
        )?;
        let (again, pruned) = prune.join().expect("it does not panic");
        (pruner, calls, left) = (again, calls + 1, left - answered);
        pruned?;
        ensure!(answered > 0 && calls < 40, "{left} are left after {calls} calls");
    }
    ensure!(session.granted("SELECT count(*) FROM fence.leases WHERE renewals = 1")? == 9_000);
    ensure!(session.granted("SELECT renewals FROM fence.stats")? == 9_000);
    ensure!(session.granted("SELECT renewals_lost FROM fence.stats")? == 1_000);
    Ok(())
}

#[lab_test]
fn calls_of_one_instant_are_in_each_other_s_way_at_most(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut sessions = sessions(&db, 8)?;
    let held = sessions[0].rows(
        "SELECT string_agg(name, ','), string_agg(token::text, ',') FROM lease_acquire_any(
             ARRAY(SELECT 'job' || i FROM generate_series(1, 50) i), 50, ttl => '1 h')",
    )?;
    let [Some(names), Some(tokens)] = &held[0][..] else { bail!("{held:?}") };
    let keep = format!(
        "SELECT count(*) FROM lease_keep('{{{names}}}', '{{{tokens}}}') WHERE outcome NOT IN ('kept', 'later')"
    );
    for round in 0..rounds(40) {
        for answer in at_once(&mut sessions, |_| keep.clone()) {
            let answer = answer.with_context(|| format!("round {round}"))?;
            ensure!(answer[0][0].as_deref() == Some("0"), "round {round}: {answer:?}");
        }
    }
    Ok(())
}
