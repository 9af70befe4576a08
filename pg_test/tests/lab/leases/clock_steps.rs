//! The server's clock is stepped while leases live. Two holders may overlap in time then; a stale
//! write never lands.

use crate::support::concurrency::with_time_enough;
use crate::tokens::jumps::STRIDE;
use pg_test::clock::Clocked;
use pg_test::process::PATIENCE;
use pg_test::{ensure, lab_test, Background, Lab, Result, Session};
use std::time::Duration;

const HOUR: i64 = 3600;

/// A server of one's own with a bound table and an unbound one.
fn start(lab: &Lab) -> Result<(Clocked, Session)> {
    let clocked = Clocked::start(lab.builder(), &lab.prefix().new_dir("clock")?)?;
    let mut session = clocked.cluster().connect("postgres")?;
    session.run(
        "CREATE EXTENSION pg_fence;
         CREATE TABLE orders (id int PRIMARY KEY, total int, fence bigint);
         CREATE TABLE parcels (id int PRIMARY KEY, total int, fence bigint);
         INSERT INTO orders VALUES (7, 0);
         INSERT INTO parcels VALUES (7, 0);
         SELECT fence_protect('orders', lease => 'order:{id}'), fence_protect('parcels')",
    )?;
    Ok((clocked, session))
}

fn acquire(session: &mut Session) -> Result<Option<i64>> {
    session.one("SELECT lease_acquire('order:7', ttl => '1 min')", &[])
}

fn speaks(session: &mut Session, token: i64) -> Result<bool> {
    session.one("SELECT lease_check('order:7', $1)", &[&token])
}

fn write(table: &str, total: i32, token: i64) -> String {
    format!("UPDATE {table} SET total = {total}, fence = {token}")
}

#[lab_test]
fn a_step_forward_ends_a_lease_early_and_no_stale_write_lands(lab: &Lab) -> Result<()> {
    let (clocked, mut session) = start(lab)?;
    let a = acquire(&mut session)?.expect("free");
    session.run(&write("parcels", 1, a))?;
    clocked.step(HOUR)?;
    // By its own clock A has most of its minute left; the server gives the lease to B.
    let b = acquire(&mut session)?.expect("expired");
    ensure!(b > a && !speaks(&mut session, a)? && speaks(&mut session, b)?);
    session.refused(&write("orders", 1, a), "PF004")?;
    session.run(&write("parcels", 2, b))?;
    session.refused(&write("parcels", 3, a), "PF001")?;
    session.run(&write("orders", 2, b))?;
    ensure!(session.one::<Option<i64>>("SELECT lease_renew('order:7', $1)", &[&a])?.is_none());
    Ok(())
}

#[lab_test]
fn a_step_back_prolongs_a_lease_and_no_stale_write_lands(lab: &Lab) -> Result<()> {
    let (clocked, mut session) = start(lab)?;
    let a = acquire(&mut session)?.expect("free");
    clocked.step(-HOUR)?;
    // A may go on; it is all the longer until another gets the lease.
    ensure!(acquire(&mut session)?.is_none() && speaks(&mut session, a)?);
    let remaining = "SELECT remaining > '59 min' FROM lease_info('order:7')";
    ensure!(session.one::<bool>(remaining, &[])?);
    // A renewal counts from the clock as it is now.
    let renewed: i64 = session.one("SELECT lease_renew('order:7', $1)", &[&a])?;
    ensure!(renewed > a && !session.one::<bool>(remaining, &[])?);
    session.run(&write("orders", 1, renewed))?;
    // An administrator who does not want to wait revokes.
    session.run("SELECT lease_revoke('order:7')")?;
    let b = acquire(&mut session)?.expect("revoked");
    ensure!(b > renewed);
    session.refused(&write("orders", 2, a), "PF001")?;
    session.refused(&write("orders", 2, renewed), "PF004")?;
    session.run(&write("orders", 3, b))
}

#[lab_test]
fn a_step_back_does_not_give_a_lease_back_that_changed_hands(lab: &Lab) -> Result<()> {
    let (clocked, mut session) = start(lab)?;
    let a = acquire(&mut session)?.expect("free");
    clocked.step(HOUR)?;
    let b = acquire(&mut session)?.expect("expired");
    session.run(&write("orders", 1, b))?;
    session.run(&write("parcels", 1, b))?;
    // To the time at which A's minute was not over.
    clocked.step(0)?;
    ensure!(!speaks(&mut session, a)?, "the lease went back to A");
    ensure!(session.one::<Option<i64>>("SELECT lease_renew('order:7', $1)", &[&a])?.is_none());
    ensure!(session.one::<Option<i64>>("SELECT lease_release('order:7', $1)", &[&a])?.is_none());
    session.refused(&write("orders", 2, a), "PF001")?;
    session.refused(&write("parcels", 2, a), "PF001")?;
    session.refused(&format!("SELECT lease_guard('order:7', {a})"), "PF004")?;
    ensure!(speaks(&mut session, b)? && acquire(&mut session)?.is_none());
    session.run(&write("orders", 3, b))
}

#[lab_test]
fn a_guarded_transaction_outlives_a_step_forward(lab: &Lab) -> Result<()> {
    let (clocked, mut session) = start(lab)?;
    let a = acquire(&mut session)?.expect("free");
    let mut holder = clocked.cluster().connect("postgres")?;
    holder.run(&format!("BEGIN; {}", write("orders", 1, a)))?;
    clocked.step(HOUR)?;
    // Expired or not: nobody is granted the lease while a write under it may still land.
    ensure!(acquire(&mut session)?.is_none(), "taken over under an open write");
    holder.run(&format!("{}; COMMIT", write("orders", 2, a)))?;
    let b = acquire(&mut session)?.expect("expired");
    session.refused(&write("orders", 3, a), "PF004")?;
    session.run(&write("orders", 4, b))
}

#[lab_test]
fn a_jump_with_a_clock_that_went_back_goes_beyond_the_last_token(lab: &Lab) -> Result<()> {
    let (clocked, mut session) = start(lab)?;
    let first: i64 = session.one("SELECT fence_new_epoch()", &[])?;
    clocked.step(-30 * 24 * HOUR)?;
    let second: i64 = session.one("SELECT fence_new_epoch()", &[])?;
    ensure!(second == first + STRIDE, "from {first} to {second}");
    // Before the first second that counts, too.
    clocked.step(-10 * 365 * 24 * HOUR)?;
    let third: i64 = session.one("SELECT fence_new_epoch()", &[])?;
    ensure!(third == second + STRIDE, "from {second} to {third}");
    ensure!(acquire(&mut session)? == Some(third + 1));
    Ok(())
}

#[lab_test]
fn a_waiter_gets_the_lease_that_a_step_forward_has_ended(lab: &Lab) -> Result<()> {
    let (clocked, mut session) = start(lab)?;
    let a = acquire(&mut session)?.expect("free");
    let mut waiter = Background::connect(&clocked.cluster().conninfo("postgres"))?;
    waiter.send("SELECT lease_acquire('order:7', ttl => '1 min', wait => '50 s')")?;
    waiter.wait_until_blocked()?;
    clocked.step(HOUR)?;
    let rows = waiter.outcome(PATIENCE)??;
    let b: i64 = rows[0][0].as_deref().unwrap_or_default().parse()?;
    session.refused(&write("orders", 1, a), "PF004")?;
    session.run(&write("orders", 2, b))
}

/// A session that waits for the lease, which another one has. `$` stands for four seconds, or for more where it gave
/// up before it was seen to wait.
fn waiter(clocked: &Clocked, settings: &str, wait: &str) -> Result<Background> {
    with_time_enough(|seconds| {
        let filled = |text: &str| text.replace('$', &format!("{} s", 4 * seconds));
        let (settings, wait) = (filled(settings), filled(wait));
        let mut waiter = Background::connect(&clocked.cluster().conninfo("postgres"))?;
        waiter.run(&settings)?;
        waiter
            .send(&format!("SELECT lease_acquire('order:7', ttl => '1 min', wait => '{wait}')"))?;
        Ok(waiter.blocks_or_ends()?.then_some(waiter))
    })
}

/// For the first in the queue, who looks at the lease.
#[lab_test]
fn a_wait_ends_in_time_though_the_clock_goes_back(lab: &Lab) -> Result<()> {
    for (settings, wait, sqlstate) in
        [("", "$", None), ("SET lock_timeout = '$'", "10 min", Some("55P03"))]
    {
        let (clocked, mut session) = start(lab)?;
        session.run("SELECT lease_acquire('order:7', ttl => '1 day')")?;
        let mut waiter = waiter(&clocked, settings, wait)?;
        clocked.step(-HOUR)?;
        // Far more than the four seconds, far less than the hour.
        let outcome = waiter.outcome(PATIENCE)?;
        match sqlstate {
            None => ensure!(outcome?[0][0].is_none(), "the lease is taken"),
            Some(sqlstate) => drop(pg_test::fault::expect_err(outcome, sqlstate)?),
        }
    }
    Ok(())
}

/// Waiters behind the first wait for a lock, and Postgres's timeouts follow the clock: as long as the clock went back,
/// or until they are the first.
#[lab_test]
fn who_is_behind_the_first_waits_longer_when_the_clock_goes_back(lab: &Lab) -> Result<()> {
    let (clocked, mut session) = start(lab)?;
    session.one::<i64>("SELECT lease_acquire('order:7', ttl => '1 day')", &[])?;
    let mut first = waiter(&clocked, "", "10 min")?;
    let mut queue = [waiter(&clocked, "", "$")?, waiter(&clocked, "", "$")?];
    clocked.step(-HOUR)?;
    std::thread::sleep(Duration::from_secs(6));
    ensure!(queue.iter_mut().all(|waiter| !waiter.is_finished()), "earlier than documented");
    // A cancel ends it as ever.
    queue[1].cancel()?;
    queue[1].refused("57014")?;
    first.terminate()?;
    ensure!(queue[0].rows()?[0][0].is_none(), "its time is over, and the lease is taken");
    for waiter in &mut queue {
        waiter.run("SELECT pg_sleep(0.5)")?;
        ensure!(waiter.run("SELECT lease_acquire('other', wait => '1 s')")?.len() == 1);
    }
    Ok(())
}

#[lab_test]
fn a_wait_goes_on_though_the_clock_goes_forward(lab: &Lab) -> Result<()> {
    // The first in the queue looks at the lease, the second waits for the first: so its lock_timeout follows the clock.
    for settings in ["", "SET lock_timeout = '20 min'"] {
        let (clocked, mut session) = start(lab)?;
        let token: i64 = session.one("SELECT lease_acquire('order:7', ttl => '1 day')", &[])?;
        let mut first = waiter(&clocked, settings, "10 min")?;
        let mut second = waiter(&clocked, "", "10 min")?;
        let mut hasty = waiter(&clocked, "SET lock_timeout = '20 min'", "10 min")?;
        clocked.step(HOUR)?;
        // Long enough for all to have seen the new time: they look, or are woken, each second.
        std::thread::sleep(Duration::from_secs(4));
        hasty.refused("55P03")?;
        session.one::<i64>("SELECT lease_release('order:7', $1)", &[&token])?;
        for waiter in [&mut first, &mut second] {
            let rows = waiter.outcome(PATIENCE)??;
            let token = rows[0][0].clone().unwrap_or_else(|| "it gave up".to_owned());
            let token: i64 = token.parse()?;
            session.one::<Option<i64>>("SELECT lease_release('order:7', $1)", &[&token])?;
        }
    }
    Ok(())
}
