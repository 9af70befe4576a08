//! `lease_info`: what it shows of the statement that calls it, and of others.

use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};

const ACQUIRE: &str =
    "SELECT t, i.expires_at > clock_timestamp(), i.first_token, i.holder, i.state \
     FROM lease_acquire('job', 'me', '1 h') AS t, lease_info('job', t) AS i";

/// The one row of a query as text; NULL is a dash.
fn row(session: &mut Session, sql: &str) -> Result<Vec<String>> {
    let mut rows = session.rows(sql)?;
    ensure!(rows.len() == 1, "{} rows: {sql}", rows.len());
    Ok(rows.remove(0).into_iter().map(|text| text.unwrap_or_else(|| "-".to_owned())).collect())
}

#[lab_test]
fn a_grant_s_deadline_comes_with_its_token(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    // Of a name that is new, one that has a row, and as a parameter.
    for _ in 0..2 {
        let got = row(&mut session, ACQUIRE)?;
        ensure!(got[1..] == ["t", &*got[0], "me", "held"], "{got:?}");
        session.granted("SELECT lease_revoke('job')")?;
    }
    let statement = "SELECT t, i.first_token FROM lease_acquire($1) AS t, lease_info($1, t) AS i";
    let row = session.query_one(statement, &[&"other"])?;
    ensure!(row.try_get::<_, i64>(0)? == row.try_get::<_, i64>(1)?);
    Ok(())
}

#[lab_test]
fn a_lost_try_shows_who_has_the_lease(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    let theirs = other.granted("SELECT lease_acquire('job', 'they', '1 h')")?.to_string();
    let got = row(&mut session, ACQUIRE)?;
    ensure!(got == ["-", "t", &theirs, "they", "held"], "{got:?}");
    // One never acquired has no row, with and without a token.
    for call in ["lease_info('never')", "lease_info('never', NULL)", "lease_info('never', 1)"] {
        ensure!(session.rows(&format!("SELECT * FROM {call}"))?.is_empty(), "{call}");
    }
    Ok(())
}

#[lab_test]
fn it_shows_a_renewal_and_a_release_of_the_same_statement(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.acquire("job", "1 min")?;
    let renew = format!(
        "SELECT i.token = t, i.expires_at > clock_timestamp() + '30 min' \
         FROM lease_renew('job', {token}, '1 h') AS t, lease_info('job', t) AS i"
    );
    ensure!(row(&mut session, &renew)? == ["t", "t"]);
    let release = format!(
        "SELECT i.token = t, i.state FROM lease_release('job', {token}) AS t, lease_info('job', t) AS i"
    );
    ensure!(row(&mut session, &release)? == ["t", "free"]);
    Ok(())
}

#[lab_test]
fn it_looks_when_it_is_called(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    other.run("BEGIN; SELECT lease_acquire('first')")?;
    session.run("SELECT pg_advisory_lock(1)")?;
    let mut late = pg_test::Background::connect(&db.conninfo())?;
    late.send(
        "SELECT i.state FROM (SELECT count(*) AS n FROM pg_advisory_xact_lock(1)) AS waited, \
             lease_info('first', waited.n) AS i",
    )?;
    late.wait_until_blocked()?;
    // Committed long after the statement has begun.
    other.run("COMMIT")?;
    session.run("SELECT pg_advisory_unlock(1)")?;
    let rows = late.rows()?;
    ensure!(rows == [[Some("held".to_owned())]], "{rows:?}");
    Ok(())
}

#[lab_test]
fn a_transaction_that_keeps_its_snapshot_sees_its_own_grant(lab: &Lab) -> Result<()> {
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let db = lab.database()?;
        let mut session = db.connect()?;
        session.run(&format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM pg_class"))?;
        let got = row(&mut session, ACQUIRE)?;
        ensure!(got[1..] == ["t", &*got[0], "me", "held"], "{got:?}");
        session.run("COMMIT")?;
    }
    Ok(())
}

#[lab_test]
fn it_reads_no_more_than_the_rows_of_its_lease(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    session.run("SELECT lease_acquire('job' || n) FROM generate_series(1, 100) AS n")?;
    // Somebody's acquire is open: of this lease, or of another one.
    for name in ["other", "job7"] {
        other.run(&format!(
            "BEGIN; SELECT lease_revoke('{name}'); SELECT lease_acquire('{name}')"
        ))?;
        session.run("SET enable_seqscan = off; BEGIN; SELECT * FROM lease_info('job7')")?;
        let scans = "SELECT coalesce(seq_scan, 0) FROM pg_stat_xact_all_tables WHERE relid = 'fence.lease'::regclass";
        ensure!(session.granted(scans)? == 0, "{name}: the whole table was read");
        session.run("COMMIT")?;
        other.run("ROLLBACK")?;
    }
    Ok(())
}
