//! Time is the server's clock at the moment of the decision, whatever the session has set.

use pg_test::calls::within_ttl;
use pg_test::{ensure, lab_test, Background, Calls, Context, Lab, Result};
use std::thread::sleep;
use std::time::Duration;

#[lab_test]
fn the_deadline_counts_from_the_decision_not_from_the_transaction(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run("BEGIN; SELECT 1")?;
    sleep(Duration::from_millis(300));
    let token = session.acquire("job", "10 s")?;
    let late = "SELECT expires_at - now() >= interval '10.3 s' AND renewed_at > now()
                  FROM lease_info('job')";
    ensure!(session.truth(late)?, "acquire counts from the transaction's start");
    let token = session.granted(&format!("SELECT lease_renew('job', {token})"))?;
    ensure!(session.truth(late)?, "renew counts from the transaction's start");
    session.run("COMMIT")?;
    // Nor from the statement's, which is the transaction's first.
    session.run("BEGIN")?;
    session.run("SELECT pg_sleep(0.3), lease_acquire('new', ttl => '10 s')")?;
    ensure!(session.truth("SELECT acquired_at - now() >= '0.3 s' FROM lease_info('new')")?);
    session.run("COMMIT; BEGIN")?;
    session.run(&format!("SELECT pg_sleep(0.3), lease_renew('job', {token})"))?;
    ensure!(session.truth("SELECT renewed_at - now() >= '0.3 s' FROM lease_info('job')")?);
    session.run("COMMIT")
}

#[lab_test]
fn a_check_sees_the_deadline_pass_within_a_transaction(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut looker = db.connect()?;
    for isolation in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        let mut session = db.connect()?;
        let token = within_ttl(|ttl| {
            let token = session.acquire("job", ttl)?;
            session.run(&format!("BEGIN ISOLATION LEVEL {isolation}"))?;
            if session.speaks("job", token)? {
                return Ok(Some(token));
            }
            session.run("ROLLBACK").map(|()| None)
        })
        .context(isolation)?;
        looker.wait_expired("job")?;
        ensure!(!session.speaks("job", token)?, "{isolation}: checked by an old clock");
        ensure!(session.renew("job", token)?.is_none(), "{isolation}: renewed by an old clock");
        ensure!(session.release("job", token)?.is_none(), "{isolation}");
        let state = session.text("SELECT state FROM lease_info('job')")?;
        ensure!(state.as_deref() == Some("expired"), "{isolation}: {state:?}");
        session.run("COMMIT")?;
    }
    Ok(())
}

#[lab_test]
fn a_try_sees_the_deadline_pass_within_a_transaction(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    let token = within_ttl(|ttl| {
        let token = holder.acquire("job", ttl)?;
        other.run("BEGIN")?;
        if other.token("SELECT lease_acquire('job')")?.is_none() {
            return Ok(Some(token));
        }
        other.run("ROLLBACK").map(|()| None)
    })?;
    holder.wait_expired("job")?;
    let next = other.granted("SELECT lease_acquire('job')")?;
    ensure!(next > token && other.speaks("job", next)?);
    other.run("COMMIT")
}

#[lab_test]
fn a_renewal_after_a_wait_has_its_whole_ttl(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut first, mut looker) = (db.connect()?, db.connect()?);
    let mut second = Background::connect(&db.conninfo())?;
    let token = first.acquire("job", "1 h")?;
    first.run("BEGIN")?;
    first.renew("job", token)?;
    second.send(&format!("SELECT lease_renew('job', {token}, '10 s')"))?;
    second.wait_until_blocked()?;
    looker.run("CREATE TABLE mark AS SELECT clock_timestamp() AS at")?;
    first.run("COMMIT")?;
    second.rows()?;
    ensure!(
        looker.truth(
            "SELECT renewed_at >= at AND expires_at = renewed_at + interval '10 s'
               FROM lease_info('job'), mark"
        )?,
        "the time of the wait was taken off"
    );
    Ok(())
}

#[lab_test]
fn a_ttl_is_the_same_span_in_every_session(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut looker = db.connect()?;
    let odd = [
        ("UTC", "ISO, MDY", "postgres"),
        // Its clocks change within any 200 days.
        ("America/New_York", "German", "sql_standard"),
        ("Pacific/Apia", "SQL, DMY", "iso_8601"),
        ("Asia/Kathmandu", "Postgres, YMD", "postgres_verbose"),
        ("<odd>-13:37", "ISO, DMY", "postgres"),
    ];
    for (n, (zone, date, interval)) in odd.into_iter().enumerate() {
        let mut session = db.connect()?;
        session.run(&format!(
            "SET TimeZone = '{zone}'; SET DateStyle = '{date}'; SET IntervalStyle = '{interval}';
             SET extra_float_digits = 0; SET lc_time = 'C'"
        ))?;
        let name = format!("job{n}");
        let token = session.acquire(&name, "200 days")?;
        let span = format!(
            "SELECT extract(epoch FROM expires_at - renewed_at)::bigint FROM lease_info('{name}')
              WHERE abs(extract(epoch FROM renewed_at - clock_timestamp())) < 60"
        );
        let days = looker.granted(&span)?;
        ensure!(days == 200 * 86_400, "{zone}: {days} s");
        ensure!(session.granted(&span)? == days, "{zone}");
        // The default, spelt by the installer, read in any style.
        ensure!(session.renew(&name, token)?.is_some());
        ensure!(looker.granted(&span)? == days, "{zone}");
        let defaults = format!("SELECT lease_acquire('{name} d')");
        session.granted(&defaults)?;
        let thirty = looker.granted(&span.replace(&name, &format!("{name} d")))?;
        ensure!(thirty == 30, "{zone}: {thirty} s");
        ensure!(looker.speaks(&name, token)?, "{zone}");
        // In a session at the other end of the world it is as taken, and as long expired.
        let gone = session.acquire_expired(&format!("{name} x"))?;
        ensure!(!looker.speaks(&format!("{name} x"), gone)?, "{zone}");
        ensure!(session.is_taken("job0")?, "{zone}");
    }
    Ok(())
}

#[lab_test]
fn days_have_24_hours_and_months_30_days(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let day = 86_400;
    for (n, (ttl, seconds)) in [
        ("1 day", day),
        ("1 mon", 30 * day),
        ("2 mons 3 days 04:05:06", 63 * day + 14_706),
        ("1 mon -29 days", day),
        ("-1 mon 31 days", day),
        ("-1 day 25 hours", 3_600),
        ("12 mons", 360 * day),
        ("1 year", 360 * day),
        ("366 days", 366 * day),
        ("8784 hours", 366 * day),
    ]
    .into_iter()
    .enumerate()
    {
        session.acquire(&format!("job{n}"), ttl)?;
        let span = session.granted(&format!(
            "SELECT extract(epoch FROM expires_at - acquired_at)::bigint FROM lease_info('job{n}')"
        ))?;
        ensure!(span == seconds, "{ttl} is {span} s, not {seconds}");
    }
    Ok(())
}

#[lab_test]
fn a_ttl_is_kept_to_the_microsecond(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.acquire("job", "1 h 0.000001 s")?;
    let span = "SELECT expires_at - renewed_at FROM lease_info('job')";
    ensure!(session.text(span)?.as_deref() == Some("01:00:00.000001"));
    session.granted(&format!("SELECT lease_renew('job', {token}, '2 h 0.123456 s')"))?;
    ensure!(session.text(span)?.as_deref() == Some("02:00:00.123456"));
    Ok(())
}
