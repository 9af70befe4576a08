//! Jumps of copies, of many at once, and what else shows them. The rest is in jumps.script.

use crate::support::history::History;
use pg_test::calls::within_ttl;
use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};
use std::sync::{Arc, Barrier};

/// Tokens per second of the clock.
pub const STRIDE: i64 = 1 << 20;

/// Where the server's clock would have a move go to.
pub fn by_clock(session: &mut Session) -> Result<i64> {
    session.one(
        "SELECT floor(extract(epoch FROM clock_timestamp() - timestamptz '2026-01-01 00:00:00+00') * 1048576)::bigint",
        &[],
    )
}

/// Where the latest jump went to.
pub fn floor(session: &mut Session) -> Result<i64> {
    session.one("SELECT last_value FROM fence.jump_token_seq", &[])
}

/// How often the sequence has jumped.
pub fn jumps(session: &mut Session) -> Result<i64> {
    session.one("SELECT jumps FROM fence_status()", &[])
}

#[lab_test]
fn a_jump_silences_every_earlier_token_until_renewed(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let history = History::begin(&mut session)?;
    session.run("SELECT fence_new_epoch()")?;
    history.goes_on(&mut session)?;
    ensure!(jumps(&mut session)? == 1);
    // The second one silences the renewed token as well.
    let renewed: i64 = session.one("SELECT lease_renew('order:7', $1)", &[&history.token])?;
    session.run("SELECT fence_new_epoch()")?;
    ensure!(!session.one::<bool>("SELECT lease_check('order:7', $1)", &[&renewed])?);
    ensure!(session
        .one::<Option<i64>>("SELECT lease_renew('order:7', $1)", &[&renewed])?
        .is_some());
    Ok(())
}

#[lab_test]
fn a_lease_outlives_a_jump_no_longer_than_its_deadline(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let old = within_ttl(|ttl| {
        let old = session.acquire("job", ttl)?;
        session.run("SELECT fence_new_epoch()")?;
        let state = session.text("SELECT state FROM lease_info('job')")?;
        Ok((state.as_deref() == Some("held")).then_some(old))
    })?;
    let next: i64 = session.one("SELECT lease_acquire('job', wait => '2 min')", &[])?;
    ensure!(next > old);
    // Granted again, it was not before the deadline of the old grant.
    ensure!(session.one::<Option<i64>>("SELECT lease_renew('job', $1)", &[&old])?.is_none());
    ensure!(session.one::<bool>("SELECT lease_check('job', $1)", &[&next])?);
    Ok(())
}

#[lab_test]
fn a_copy_made_from_a_template_jumps(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let history = History::begin(&mut db.connect()?)?;
    let copy = db.copy()?;
    let mut session = copy.connect()?;
    history.goes_on(&mut session)?;
    ensure!(jumps(&mut session)? == 1);
    // The original is what it was, and goes on counting.
    let mut original = db.connect()?;
    ensure!(
        original.one::<i64>("SELECT lease_renew('order:7', $1)", &[&history.token])?
            == history.seen + 1
    );
    ensure!(jumps(&mut original)? == 0);
    Ok(())
}

#[lab_test]
fn a_template_that_never_drew_gives_no_token_twice(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let copy = db.copy()?;
    let seen: i64 = db.connect()?.one("SELECT lease_acquire('job')", &[])?;
    db.connect()?.run("SELECT lease_acquire('other')")?;
    // The original is gone for good, and its copy takes its place.
    let next: i64 = copy.connect()?.one("SELECT lease_acquire('job')", &[])?;
    ensure!(next > seen + 1, "{next} was seen before");
    Ok(())
}

/// Has `count` sessions run `sql` at once, and returns their answers.
pub fn race(
    conninfo: &pg_test::Conninfo,
    count: usize,
    sql: fn(usize) -> String,
) -> Result<Vec<i64>> {
    let sessions: Vec<Session> = (0..count).map(|_| conninfo.connect()).collect::<Result<_>>()?;
    race_of(sessions, sql)
}

/// The same with sessions that are there already.
pub fn race_of(sessions: Vec<Session>, sql: fn(usize) -> String) -> Result<Vec<i64>> {
    let barrier = Arc::new(Barrier::new(sessions.len()));
    let threads: Vec<_> = sessions
        .into_iter()
        .enumerate()
        .map(|(n, mut session)| {
            let barrier = barrier.clone();
            std::thread::spawn(move || {
                barrier.wait();
                session.one::<i64>(&sql(n), &[])
            })
        })
        .collect();
    let mut answers = Vec::new();
    for thread in threads {
        answers.push(thread.join().expect("no panic")?);
    }
    answers.sort_unstable();
    Ok(answers)
}

#[lab_test]
fn racing_sessions_jump_once(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let seen: i64 = db.connect()?.one("SELECT lease_acquire('job')", &[])?;
    for _ in 0..3 {
        let copy = db.copy()?;
        let tokens = race(&copy.conninfo(), 24, |n| format!("SELECT lease_acquire('racer {n}')"))?;
        let jumped = jumps(&mut copy.connect()?)?;
        ensure!(jumped == 1, "{jumped} jumps");
        let first = floor(&mut copy.connect()?)? + 1;
        ensure!(tokens[0] > seen && tokens[0] == first, "{tokens:?}");
        ensure!(tokens.windows(2).all(|pair| pair[1] == pair[0] + 1), "{tokens:?}");
    }
    Ok(())
}

#[lab_test]
fn racing_jumps_by_hand_are_all_different(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let targets = race(&db.conninfo(), 12, |_| "SELECT fence_new_epoch()".to_owned())?;
    ensure!(targets.windows(2).all(|pair| pair[1] >= pair[0] + STRIDE), "{targets:?}");
    let mut session = db.connect()?;
    ensure!(jumps(&mut session)? == 12);
    let last = targets.last().copied().unwrap_or_default();
    ensure!(session.one::<i64>("SELECT lease_acquire('job')", &[])? == last + 1);
    Ok(())
}

#[lab_test]
fn an_open_transaction_holds_no_jump_up(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    db.connect()?.run("SELECT lease_acquire('job')")?;
    let copy = db.copy()?;
    let conninfo = copy.conninfo().set("statement_timeout", "10s");
    // The one that jumps stays open; so do one that writes and one that has a snapshot.
    let mut jumper = conninfo.connect()?;
    let mut reader = conninfo.connect()?;
    reader.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT * FROM fence.leases")?;
    jumper.run("BEGIN ISOLATION LEVEL SERIALIZABLE; CREATE TABLE t (n int)")?;
    let first: i64 = jumper.one("SELECT lease_acquire('first')", &[])?;
    let second: i64 = conninfo.connect()?.one("SELECT lease_acquire('second')", &[])?;
    ensure!(second == first + 1, "{first}, {second}");
    let by_hand: i64 = conninfo.connect()?.one("SELECT fence_new_epoch()", &[])?;
    let third: i64 = jumper.one("SELECT lease_acquire('third')", &[])?;
    ensure!(third == by_hand + 1, "{by_hand}, {third}");
    let again: i64 = jumper.one("SELECT fence_new_epoch()", &[])?;
    ensure!(conninfo.connect()?.one::<i64>("SELECT fence_new_epoch()", &[])? > again);
    jumper.run("ROLLBACK")?;
    ensure!(jumps(&mut reader)? == 4);
    Ok(())
}

#[lab_test]
fn a_due_jump_is_seen_by_those_who_only_read(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let history = History::begin(&mut db.connect()?)?;
    let copy = db.copy()?;
    let conninfo = copy.conninfo();
    let mut reader = conninfo.clone().set("default_transaction_read_only", "on").connect()?;
    ensure!(
        !reader.one::<bool>("SELECT lease_check('order:7', $1)", &[&history.token])?,
        "it speaks"
    );
    ensure!(jumps(&mut reader)? == 0);
    // Losing needs no token, so no jump either.
    let mut session = conninfo.connect()?;
    ensure!(session.one::<Option<i64>>("SELECT lease_acquire('order:7')", &[])?.is_none());
    ensure!(session.one::<i64>("SELECT last_token FROM fence_status()", &[])? == history.seen);
    Ok(())
}
