//! Slots: up to n grants live together.

use crate::support::concurrency::{at_once, sessions, still_wait, token_of, tokens, waiting};
use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};

fn slot(n: u32) -> String {
    format!("SELECT lease_acquire('job', ttl => '1 h', slots => {n})")
}

fn wait_for(n: u32) -> String {
    format!("SELECT lease_acquire('job', ttl => '1 h', wait => '10 min', slots => {n})")
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
fn waiters_for_slots_are_served_in_their_order(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holder = db.connect()?;
    let mut held = vec![holder.granted(&slot(2))?, holder.granted(&slot(2))?];
    let mut queue = (0..4).map(|_| waiting(&db, &wait_for(2))).collect::<Result<Vec<_>>>()?;
    holder.nothing(&slot(2))?;
    while !queue.is_empty() {
        holder.release("job", held.remove(0))?.expect("held");
        held.push(token_of(&mut queue.remove(0))?);
        still_wait(&mut queue)?;
        ensure!(live(&mut holder)? == 2);
    }
    Ok(())
}

#[lab_test]
fn another_number_is_refused_while_any_grant_lives(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.granted(&slot(3))?;
    for n in [1, 2, 4, 1000] {
        session.refused(&slot(n), "22023")?;
        session.refused(&wait_for(n), "22023")?;
    }
    ensure!(session.speaks("job", token)? && live(&mut session)? == 1);
    session.release("job", token)?.expect("held");
    session.granted(&slot(1))?;
    session.refused(&slot(3), "22023")?;
    for n in ["0", "-1"] {
        session.refused(&format!("SELECT lease_acquire('x', slots => {n})"), "22023")?;
    }
    // NULL means the default, one.
    session.granted("SELECT lease_acquire('x', slots => NULL)")?;
    session.refused("SELECT lease_acquire('x', slots => 2)", "22023").map(drop)
}

#[lab_test]
fn the_number_changes_when_none_lives(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    for n in [4, 2, 1, 3] {
        let tokens = (0..n).map(|_| session.granted(&slot(n))).collect::<Result<Vec<_>>>()?;
        session.nothing(&slot(n))?;
        if n % 2 == 0 {
            session.granted("SELECT lease_revoke('job')")?;
        } else {
            tokens.into_iter().try_for_each(|token| session.expire_now("job", token))?;
        }
    }
    let rows = session.granted("SELECT count(*) FROM lease_info('job')")?;
    ensure!(rows <= 4, "{rows} rows for four at most");
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

#[lab_test]
fn one_slot_that_runs_out_is_one_to_be_had(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let a = session.granted(&slot(2))?;
    let b = session.granted(&slot(2))?;
    let mut queue = [waiting(&db, &wait_for(2))?, waiting(&db, &wait_for(2))?];
    session.granted(&format!("SELECT lease_renew('job', {b}, '300 ms')"))?;
    let next = token_of(&mut queue[0])?;
    ensure!(!session.speaks("job", b)? && session.renew("job", b)?.is_none());
    ensure!(session.speaks("job", a)? && session.speaks("job", next)?);
    still_wait(&mut queue[1..])
}

#[lab_test]
fn each_slot_lives_its_own_life(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let a = session.granted(&slot(3))?;
    let b = session.granted(&slot(3))?;
    let renewed = session.renew("job", a)?.expect("held");
    ensure!(session.speaks("job", a)? && session.speaks("job", b)?);
    let closing = session.release("job", b)?.expect("held");
    ensure!(closing > renewed && session.speaks("job", renewed)? && !session.speaks("job", b)?);
    let c = session.granted(&slot(3))?;
    ensure!(session.release("job", b)?.is_none(), "a late release ended the next grant");
    ensure!(session.speaks("job", c)? && live(&mut session)? == 2);
    let closing = session.granted("SELECT lease_revoke('job')")?;
    ensure!(closing > c && live(&mut session)? == 0);
    Ok(())
}

#[lab_test]
fn a_holder_of_a_slot_reclaims_it_though_all_are_taken(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let call = |holder: &str| {
        format!("SELECT lease_acquire('job', '{holder}', '1 h', slots => 2, reclaim => true)")
    };
    let (a, b) = (session.granted(&call("a"))?, session.granted(&call("b"))?);
    let mut waiter = waiting(&db, &wait_for(2))?;
    session.nothing(&call("c"))?;
    let again = session.granted(&call("b"))?;
    ensure!(!session.speaks("job", b)? && session.speaks("job", again)?);
    ensure!(session.speaks("job", a)? && live(&mut session)? == 2);
    still_wait([&mut waiter])?;
    session.release("job", again)?.expect("held");
    token_of(&mut waiter)?;
    session.nothing(&call("b"))
}

/// A grant of another number is made, guarded and over while an acquire is about to write its row.
#[lab_test]
fn another_number_that_is_over_but_guarded_is_not_granted_beside(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    admin.run(
        "CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF NEW.slots = 2 THEN PERFORM pg_advisory_xact_lock(7); END IF;
             RETURN NEW;
         END $$;
         CREATE TRIGGER stop BEFORE INSERT ON fence.lease FOR EACH ROW EXECUTE FUNCTION stop();
         SELECT pg_advisory_lock(7)",
    )?;
    let mut writing = waiting(&db, &slot(2))?;
    let mut guard = db.connect()?;
    let token = guard.granted("SELECT lease_acquire('job', ttl => '1 h', slots => 3)")?;
    guard.run(&format!("BEGIN; SELECT lease_guard('job', {token}); CREATE TABLE written ()"))?;
    admin.expire_now("job", token)?;
    admin.run("SELECT pg_advisory_unlock(7)")?;
    let fault = writing.refused("22023")?;
    ensure!(fault.message.contains("slots = 3, not 2"), "{fault}");
    ensure!(live(&mut admin)? == 0, "two slots beside a guarded one of three");
    guard.run("COMMIT")?;
    admin.granted(&slot(2)).map(drop)
}
