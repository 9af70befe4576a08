//! Slots: crowds. The rest is in slots.script.

use crate::support::concurrency::{at_once, sessions, tokens};
use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};

fn slot(n: u32) -> String {
    format!("SELECT lease_acquire('job', ttl => '1 h', slots => {n})")
}

fn live(session: &mut Session) -> Result<i64> {
    session.granted("SELECT count(*) FROM lease_info('job') WHERE state = 'held'")
}

#[lab_test]
fn of_many_at_one_instant_exactly_n_win(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    let mut crowd = sessions(&db, 12)?;
    for round in 0..16 {
        let n = [3, 1, 5, 12][round % 4];
        let got = tokens(at_once(&mut crowd, |_| slot(n)))?;
        let won: Vec<i64> = got.into_iter().flatten().collect();
        ensure!(won.len() == n as usize, "round {round}: {} of {n} granted", won.len());
        ensure!(live(&mut admin)? == i64::from(n));
        admin.nothing(&slot(n))?;
        admin.granted("SELECT lease_revoke('job')")?;
    }
    Ok(())
}

#[lab_test]
fn never_more_than_n_live_while_many_wait(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    db.connect()?.run("CREATE TABLE seen (n bigint)")?;
    let mut crowd = sessions(&db, 16)?;
    let (mut served, rounds) = (0, 4);
    for _ in 0..rounds {
        // Each counts, while it has a slot, how many have one.
        let outcomes = at_once(&mut crowd, |_| {
            "DO $$
             DECLARE t bigint;
             BEGIN
               t := lease_acquire('job', ttl => '1 min', wait => '5 min', slots => 3);
               COMMIT;
               INSERT INTO seen SELECT count(*) FROM fence.leases WHERE state = 'held';
               IF t IS NULL OR lease_release('job', t) IS NULL THEN RAISE 'lost'; END IF;
             END $$"
                .to_owned()
        });
        for outcome in outcomes {
            outcome?;
            served += 1;
        }
    }
    let row = db.connect()?.rows("SELECT max(n) <= 3, min(n) >= 1, count(*) FROM seen")?;
    ensure!(served == 16 * rounds && row[0][0].as_deref() == Some("t"), "{row:?}");
    ensure!(row[0][1].as_deref() == Some("t") && row[0][2] == Some(served.to_string()), "{row:?}");
    Ok(())
}

#[lab_test]
fn two_numbers_at_one_instant_never_both_count(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    let mut crowd = sessions(&db, 10)?;
    for round in 0..20 {
        let outcomes = at_once(&mut crowd, |i| slot(if i % 2 == 0 { 2 } else { 4 }));
        let mut won = [0, 0];
        for (i, outcome) in outcomes.into_iter().enumerate() {
            match outcome {
                Ok(rows) if rows[0][0].is_some() => won[i % 2] += 1,
                Ok(_) => {}
                Err(fault) => drop(fault.expect("22023")?),
            }
        }
        ensure!(won[0] == 0 || won[1] == 0, "round {round}: {won:?} of two and of four live");
        ensure!(won[0] <= 2 && won[1] <= 4, "round {round}: {won:?}");
        ensure!(live(&mut admin)? == won[0] + won[1], "round {round}: {won:?}");
        admin.run("SELECT lease_revoke('job')")?;
    }
    Ok(())
}
