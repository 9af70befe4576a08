//! How long is waited where the server's clock is stepped meanwhile. What becomes of leases: clock_steps.script.

use crate::support::concurrency::with_time_enough;
use pg_test::clock::Clocked;
use pg_test::process::PATIENCE;
use pg_test::{ensure, lab_test, Background, Lab, Result, Session};
use std::time::Duration;

const HOUR: i64 = 3600;

/// A server of one's own.
fn start(lab: &Lab) -> Result<(Clocked, Session)> {
    let clocked = Clocked::start(lab.builder(), &lab.prefix().new_dir("clock")?)?;
    let mut session = clocked.cluster().connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    Ok((clocked, session))
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
