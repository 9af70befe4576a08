//! pg_rewind: a primary that was replaced comes back behind its successor.

use crate::support::history::{jumps, History};
use pg_test::{ensure, lab_test, Lab, Result, Shutdown};
use std::fs;

#[lab_test]
fn a_primary_that_pg_rewind_brought_back_and_that_is_promoted_again_goes_on(
    lab: &Lab,
) -> Result<()> {
    let builder = || lab.builder().set("wal_log_hints", "on").set("wal_keep_size", "256MB");
    let first = builder().start()?;
    let mut session = first.connect("postgres")?;
    let mut history = History::begin(&mut session)?;
    let second = builder().standby_of(&first)?;
    second.start()?;
    second.wait_replayed(&first)?;
    second.cut()?;
    // The first goes on alone, and hands out tokens that the second will not know.
    history.draw_more(&mut session, 50)?;
    drop(session);
    first.stop(Shutdown::Fast)?;
    second.promote()?;
    let mut session = second.connect("postgres")?;
    history.see(history.goes_on(&mut session)?);
    let renewed = history.token;
    ensure!(jumps(&mut session)? == 1);
    session.run("CHECKPOINT")?;

    let settings = fs::read(first.data().join("postgresql.auto.conf"))?;
    let source = second.conninfo("postgres").to_string();
    let data = first.data().to_string_lossy().into_owned();
    lab.run("pg_rewind", &["--target-pgdata", &data, "--source-server", &source, "--no-sync"])?;
    // It has copied the other's settings, port and all.
    fs::write(first.data().join("postgresql.auto.conf"), settings)?;
    first.configure(&[("primary_conninfo", &source), ("recovery_target_timeline", "latest")])?;
    fs::write(first.data().join("standby.signal"), "")?;
    first.start()?;
    first.wait_replayed(&second)?;
    history.draw_more(&mut session, 50)?;
    first.wait_replayed(&second)?;
    drop(session);
    second.stop(Shutdown::Fast)?;

    first.promote()?;
    let mut session = first.connect("postgres")?;
    let check = "SELECT lease_check('order:7', $1)";
    ensure!(!session.one::<bool>(check, &[&renewed])?, "a token speaks that no holder has renewed");
    let token: i64 = session.one("SELECT lease_acquire('first again')", &[])?;
    ensure!(token > history.seen, "{token} was drawn after {} was seen", history.seen);
    ensure!(jumps(&mut session)? == 2);
    ensure!(session.one::<i32>("SELECT timeline FROM fence_status()", &[])? == 3);
    Ok(())
}
