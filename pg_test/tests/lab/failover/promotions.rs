//! Standbys that are promoted, having missed what clients have seen.

use crate::support::history::History;
use crate::tokens::jumps::{floor, jumps, race_of, STRIDE};
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Cluster, Lab, Result, Session};

/// Cuts a standby off: what the primary does from now on, it will never know.
pub fn cut(standby: &Cluster) -> Result<()> {
    standby.configure(&[("primary_conninfo", "")])?;
    standby.reload()?;
    wait_until("the standby is cut off", PATIENCE, || {
        standby.processes("walreceiver").is_ok_and(|found| found.is_empty())
    })
}

/// A primary with the extension, and as many standbys that know all so far.
fn family(lab: &Lab, standbys: usize) -> Result<(Cluster, Vec<Cluster>)> {
    let primary = lab.builder().set("autovacuum", "off").start()?;
    let mut family = Vec::new();
    for _ in 0..standbys {
        let standby = lab.builder().standby_of(&primary)?;
        standby.start()?;
        family.push(standby);
    }
    Ok((primary, family))
}

/// A primary with a history, and a standby that has seen all of it.
struct Pair {
    primary: Cluster,
    standby: Cluster,
    /// On the primary.
    session: Session,
    history: History,
}

impl Pair {
    fn begin(lab: &Lab) -> Result<Pair> {
        let (primary, mut standbys) = family(lab, 1)?;
        let standby = standbys.remove(0);
        let mut session = primary.connect("postgres")?;
        let history = History::begin(&mut session)?;
        standby.wait_replayed(&primary)?;
        Ok(Pair { primary, standby, session, history })
    }

    /// The same, and the standby will know no more than that.
    fn cut_off(lab: &Lab) -> Result<Pair> {
        let pair = Pair::begin(lab)?;
        cut(&pair.standby)?;
        Ok(pair)
    }
}

#[lab_test]
fn an_asynchronous_standby_promoted_behind_goes_on_above_all_that_was_seen(
    lab: &Lab,
) -> Result<()> {
    let Pair { primary, standby, mut session, mut history } = Pair::cut_off(lab)?;
    // More than a standby's copy of the sequence is ahead by itself.
    history.draw_more(&mut session, 100)?;
    primary.kill9()?;
    standby.promote()?;
    let mut session = standby.connect("postgres")?;
    let ahead: i64 = session.one("SELECT last_value FROM fence.token_seq", &[])?;
    ensure!(ahead < history.seen, "the standby missed nothing: {ahead}, {}", history.seen);
    ensure!(session.one::<i32>("SELECT timeline FROM fence_status()", &[])? == 2);
    ensure!(jumps(&mut session)? == 0);
    let next = history.goes_on(&mut session)?;
    ensure!(next > STRIDE && jumps(&mut session)? == 1);
    // Once, not once a session and not once a start.
    standby.restart()?;
    let mut session = standby.connect("postgres")?;
    ensure!(session.one::<i64>("SELECT lease_acquire('later')", &[])? > next);
    ensure!(jumps(&mut session)? == 1);
    Ok(())
}

#[lab_test]
fn a_second_older_standby_promoted_after_it_outruns_both(lab: &Lab) -> Result<()> {
    let (primary, standbys) = family(lab, 2)?;
    let [first, second] = &standbys[..] else { unreachable!("two") };
    let mut session = primary.connect("postgres")?;
    let mut history = History::begin(&mut session)?;
    second.wait_replayed(&primary)?;
    cut(second)?;
    history.draw_more(&mut session, 70)?;
    first.wait_replayed(&primary)?;
    cut(first)?;
    history.draw_more(&mut session, 70)?;
    primary.kill9()?;

    first.promote()?;
    let mut session = first.connect("postgres")?;
    history.see(session.one("SELECT lease_renew('order:7', $1)", &[&history.token])?);
    history.draw_more(&mut session, 70)?;
    first.kill9()?;
    // It calls its new timeline 2 as well, knowing of no other.
    let mut session = second.connect("postgres")?;
    second.promote()?;
    ensure!(session.one::<i32>("SELECT timeline FROM fence_status()", &[])? == 2);
    history.goes_on(&mut session)?;
    ensure!(jumps(&mut session)? == 1);
    Ok(())
}

#[lab_test]
fn a_standby_of_the_promoted_one_jumps_once_more(lab: &Lab) -> Result<()> {
    let (primary, standbys) = family(lab, 2)?;
    let [first, second] = &standbys[..] else { unreachable!("two") };
    let mut session = primary.connect("postgres")?;
    let mut history = History::begin(&mut session)?;
    for standby in &standbys {
        standby.wait_replayed(&primary)?;
    }
    primary.kill9()?;
    first.promote()?;
    let from = first.conninfo("postgres").to_string();
    second.configure(&[("primary_conninfo", &from)])?;
    second.restart()?;
    let mut session = first.connect("postgres")?;
    history.token = session.one("SELECT lease_renew('order:7', $1)", &[&history.token])?;
    history.see(history.token);
    session.run(&format!("UPDATE orders SET total = 1, fence = {}", history.token))?;
    second.wait_replayed(first)?;
    let mut reader = second.connect("postgres")?;
    // It is as good as what it has replayed: the jump came with the stream.
    ensure!(jumps(&mut reader)? == 1);
    ensure!(reader.one::<bool>("SELECT lease_check('order:7', $1)", &[&history.token])?);
    cut(second)?;
    history.draw_more(&mut session, 70)?;
    first.kill9()?;
    second.promote()?;
    ensure!(reader.one::<i32>("SELECT timeline FROM fence_status()", &[])? == 3);
    history.goes_on(&mut reader)?;
    ensure!(jumps(&mut reader)? == 2);
    Ok(())
}

#[lab_test]
fn a_standby_that_never_saw_a_draw_gives_no_token_twice(lab: &Lab) -> Result<()> {
    let (primary, standbys) = family(lab, 1)?;
    let standby = &standbys[0];
    let mut session = primary.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    standby.wait_replayed(&primary)?;
    cut(standby)?;
    let mut seen = 0;
    for n in 0..5 {
        seen = session.one("SELECT lease_acquire($1)", &[&format!("job {n}")])?;
    }
    primary.kill9()?;
    standby.promote()?;
    let next: i64 = standby.connect("postgres")?.one("SELECT lease_acquire('job 0')", &[])?;
    ensure!(next > seen, "{next} was seen before");
    Ok(())
}

#[lab_test]
fn a_take_over_that_the_standby_missed_lets_no_stale_write_land(lab: &Lab) -> Result<()> {
    let Pair { primary, standby, mut session, history } = Pair::cut_off(lab)?;
    // The lease changes hands, and only the primary knows.
    session.run("SELECT lease_revoke('order:7')")?;
    let second: i64 = session.one("SELECT lease_acquire('order:7', 'other')", &[])?;
    session.run(&format!("UPDATE orders SET total = 100, fence = {second}"))?;
    primary.kill9()?;
    standby.promote()?;
    let mut session = standby.connect("postgres")?;
    // Each believes to be the holder; neither speaks, for either may be the stale one.
    for token in [history.token, second] {
        session.refused(&format!("UPDATE orders SET total = 2, fence = {token}"), "PF004")?;
        session.refused(&format!("SELECT lease_guard('order:7', {token})"), "PF004")?;
        ensure!(!session.one::<bool>("SELECT lease_check('order:7', $1)", &[&token])?);
    }
    // The second is none of the grant that survived, so it cannot renew: one holder at most goes on.
    ensure!(session.one::<Option<i64>>("SELECT lease_renew('order:7', $1)", &[&second])?.is_none());
    let renewed: i64 = session.one("SELECT lease_renew('order:7', $1)", &[&history.token])?;
    session.run(&format!("UPDATE orders SET total = 3, fence = {renewed}"))
}

#[lab_test]
fn sessions_that_were_open_before_the_promotion_jump_once(lab: &Lab) -> Result<()> {
    let Pair { primary, standby, mut session, mut history } = Pair::cut_off(lab)?;
    history.draw_more(&mut session, 40)?;
    let mut sessions = Vec::new();
    for _ in 0..16 {
        let mut session = standby.connect("postgres")?;
        // They have looked around already, on the standby.
        session.run("SELECT lease_check('order:7', 1), fence_status(), lease_info('order:7')")?;
        sessions.push(session);
    }
    primary.kill9()?;
    standby.promote()?;
    let tokens = race_of(sessions, |n| format!("SELECT lease_acquire('racer {n}')"))?;
    let first = floor(&mut standby.connect("postgres")?)? + 1;
    ensure!(tokens[0] > history.seen && tokens[0] == first, "{tokens:?}");
    ensure!(tokens.windows(2).all(|pair| pair[1] == pair[0] + 1), "{tokens:?}");
    ensure!(jumps(&mut standby.connect("postgres")?)? == 1);
    Ok(())
}

#[lab_test]
fn an_open_reader_does_not_hold_the_jump_of_a_promotion_up(lab: &Lab) -> Result<()> {
    let Pair { primary, standby, mut history, .. } = Pair::begin(lab)?;
    let mut reader = standby.connect("postgres")?;
    reader.run(
        "BEGIN ISOLATION LEVEL REPEATABLE READ; \
         SELECT * FROM fence.leases; SELECT lease_check('order:7', 1); SELECT * FROM fence.token_seq",
    )?;
    primary.kill9()?;
    standby.promote()?;
    let mut session = standby.conninfo("postgres").set("statement_timeout", "20s").connect()?;
    session.run("BEGIN; CREATE TABLE t (n int)")?;
    history.see(session.one("SELECT lease_acquire('open')", &[])?);
    let mut other = standby.conninfo("postgres").set("statement_timeout", "20s").connect()?;
    history.goes_on(&mut other)?;
    ensure!(jumps(&mut other)? == 1);
    reader.run("COMMIT")?;
    session.run("ROLLBACK")
}

#[lab_test]
fn a_crash_right_after_the_first_draw_loses_neither_token_nor_jump(lab: &Lab) -> Result<()> {
    let Pair { primary, standby, mut session, mut history } = Pair::cut_off(lab)?;
    history.draw_more(&mut session, 40)?;
    primary.kill9()?;
    standby.configure(&[("synchronous_commit", "off"), ("autovacuum", "off")])?;
    standby.promote()?;
    // The checkpoint that follows a promotion would save what the draw must save itself.
    standby.connect("postgres")?.run("CHECKPOINT")?;
    for title in ["walwriter", "background writer", "checkpointer"] {
        standby.freeze(title)?;
    }
    let mut session = standby.connect("postgres")?;
    session.run("BEGIN")?;
    history.see(session.one("SELECT lease_acquire('first')", &[])?);
    standby.kill9()?;
    standby.start()?;
    let mut session = standby.connect("postgres")?;
    history.goes_on(&mut session)?;
    // Had the record of the jump been lost, there would be one more: never one too few.
    ensure!((1..=2).contains(&jumps(&mut session)?));
    Ok(())
}
