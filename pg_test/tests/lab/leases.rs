//! The life of a lease, and what is shown of it, one session at a time.
//!
//! The files of this folder: each kind of grant, the clock, and what is refused as input.

automod::dir!(pub "tests/lab/leases");

use pg_test::{ensure, lab_test, Calls, Lab, Result, Session};

#[lab_test]
fn a_lease_is_had_by_one_at_a_time(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut a, mut b) = (db.connect()?, db.connect()?);
    let first = a.granted("SELECT lease_acquire('job')")?;
    b.nothing("SELECT lease_acquire('job')")?;
    ensure!(a.speaks("job", first)? && b.speaks("job", first)?, "it speaks in any session");
    ensure!(!b.speaks("job", first + 1)? && !b.speaks("other", first)?);
    ensure!(a.release("job", first)?.is_some());
    let second = b.granted("SELECT lease_acquire('job')")?;
    ensure!(second > first);
    a.nothing("SELECT lease_acquire('job')")?;
    ensure!(!a.speaks("job", first)? && a.speaks("job", second)?);
    Ok(())
}

#[lab_test]
fn a_lease_that_is_taken_is_taken_whoever_asks(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.granted("SELECT lease_acquire('job', 'me')")?;
    session.nothing("SELECT lease_acquire('job', 'me')")?;
    session.nothing("SELECT lease_acquire('job')")?;
    db.connect()?.nothing("SELECT lease_acquire('job', 'me')")?;
    // In the transaction that acquired it, too.
    session.run("BEGIN; SELECT lease_acquire('inner', 'me')")?;
    session.nothing("SELECT lease_acquire('inner', 'me')")?;
    session.run("COMMIT")?;
    ensure!(session.speaks("job", token)?, "asking again must not outdate the token");
    Ok(())
}

#[lab_test]
fn names_are_compared_byte_by_byte(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let names = ["a", "A", "a ", " a", "ä", "a\u{308}", "à", "a'b\"c\\d", "a\nb", "%", "a%", "🦀"];
    for name in names {
        session.acquire(name, "1 min")?;
    }
    for name in names {
        ensure!(session.is_taken(name)?, "{name:?}");
        let shown: String = session.one("SELECT name FROM lease_info($1)", &[&name])?;
        ensure!(shown == name, "{shown:?} is not {name:?}");
    }
    let shown: Vec<String> =
        session.one("SELECT array_agg(name ORDER BY first_token) FROM fence.leases", &[])?;
    ensure!(shown == names, "{shown:?}");
    Ok(())
}

#[lab_test]
fn a_renewal_moves_the_deadline_and_counts(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let first = session.acquire("job", "10 s")?;
    let before = deadline(&mut session)?;
    let second = session.granted(&format!("SELECT lease_renew('job', {first}, '1 h')"))?;
    ensure!(second > first);
    let after = deadline(&mut session)?;
    ensure!(after - before >= 3_590_000_000, "{before} {after}");
    let row = session.rows(
        "SELECT token, first_token, renewals, renewed_at > acquired_at, state FROM fence.leases",
    )?;
    let expected = [&second.to_string(), &first.to_string(), "1", "t", "held"];
    ensure!(row[0].iter().map(Option::as_deref).eq(expected.map(Some)), "{row:?}");
    // A shorter one moves it back.
    let third = session.granted(&format!("SELECT lease_renew('job', {second}, '5 s')"))?;
    ensure!(third > second && deadline(&mut session)? < after);
    Ok(())
}

/// The deadline in microseconds.
fn deadline(session: &mut Session) -> Result<i64> {
    session.granted("SELECT (extract(epoch FROM expires_at) * 1000000)::bigint FROM fence.leases")
}

#[lab_test]
fn the_ttl_of_a_renewal_is_the_one_last_asked_for(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let mut asked = |call: &str| -> Result<String> {
        session.granted(call)?;
        let ttl = session.text("SELECT expires_at - renewed_at FROM lease_info('job')")?;
        Ok(ttl.unwrap_or_default())
    };
    let token = "(SELECT token FROM lease_info('job'))";
    ensure!(asked("SELECT lease_acquire('job')")? == "00:00:30", "the default");
    ensure!(asked(&format!("SELECT lease_renew('job', {token})"))? == "00:00:30");
    ensure!(asked(&format!("SELECT lease_renew('job', {token}, '90 min')"))? == "01:30:00");
    ensure!(asked(&format!("SELECT lease_renew('job', {token})"))? == "01:30:00");
    ensure!(asked(&format!("SELECT lease_renew('job', {token}, NULL)"))? == "01:30:00");
    asked(&format!("SELECT lease_release('job', {token})"))?;
    ensure!(asked("SELECT lease_acquire('job')")? == "00:00:30", "not the predecessor's");
    Ok(())
}

#[lab_test]
fn an_expired_lease_is_never_revived(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut a, mut b) = (db.connect()?, db.connect()?);
    let first = a.acquire("job", "1 h")?;
    let second = a.granted(&format!("SELECT lease_renew('job', {first}, '1 us')"))?;
    a.wait_expired("job")?;
    for token in [first, second] {
        ensure!(!a.speaks("job", token)?);
        ensure!(a.renew("job", token)?.is_none(), "not taken over, and revived");
        ensure!(a.release("job", token)?.is_none());
    }
    let other = b.acquire("job", "1 h")?;
    for token in [first, second] {
        ensure!(!a.speaks("job", token)?);
        ensure!(a.renew("job", token)?.is_none(), "taken over, and revived");
    }
    ensure!(b.speaks("job", other)?);
    Ok(())
}

#[lab_test]
fn a_late_release_does_not_end_the_next_grant(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut a, mut b) = (db.connect()?, db.connect()?);
    let late = a.acquire_expired("job")?;
    let current = b.acquire("job", "1 h")?;
    ensure!(a.release("job", late)?.is_none());
    ensure!(a.renew("job", late)?.is_none());
    ensure!(b.speaks("job", current)? && a.is_taken("job")?);
    // Nor after a release of one's own, with any token that one ever had.
    let next = b.granted(&format!("SELECT lease_renew('job', {current})"))?;
    let closing = b.release("job", next)?.expect("held");
    let third = a.acquire("job", "1 h")?;
    for token in [late, current, next, closing] {
        ensure!(b.release("job", token)?.is_none() && b.renew("job", token)?.is_none());
    }
    ensure!(a.speaks("job", third)?);
    Ok(())
}

#[lab_test]
fn calls_can_be_nested_in_one_statement(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let closing =
        session.granted("SELECT lease_release('job', lease_renew('job', lease_acquire('job')))")?;
    ensure!(closing == session.last_token()?);
    ensure!(!session.is_taken("job")?);
    let rows = session.rows("SELECT lease_acquire('n' || g) FROM generate_series(1, 50) AS g")?;
    let tokens: Vec<i64> = rows.iter().filter_map(|r| r[0].as_deref()?.parse().ok()).collect();
    ensure!(tokens.len() == 50 && tokens.windows(2).all(|w| w[0] < w[1]), "{tokens:?}");
    let rows = session.rows("SELECT lease_acquire('same') FROM generate_series(1, 3)")?;
    ensure!(rows.iter().filter(|r| r[0].is_some()).count() == 1, "{rows:?}");
    session.run("DO $$BEGIN PERFORM lease_release('same', lease_acquire('same2')); END$$")?;
    ensure!(session.is_taken("same")? && session.is_taken("same2")?);
    Ok(())
}

#[lab_test]
fn the_view_shows_each_state(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run("SELECT lease_acquire('held', 'H', '1 h')")?;
    session.acquire_expired("expired")?;
    let token = session.acquire("free", "1 h")?;
    let closing = session.release("free", token)?;
    session.acquire("revoked", "1 h")?;
    session.run("SELECT lease_revoke('revoked')")?;
    let rows = session.rows(
        "SELECT name, mode, state, remaining = interval '0', remaining > interval '59 min',
                blocking_pids = '{}', renewals
           FROM fence.leases ORDER BY first_token",
    )?;
    let shown: Vec<String> =
        rows.iter().map(|r| r.iter().flatten().cloned().collect::<Vec<_>>().join(" ")).collect();
    let expected = [
        "held exclusive held f t t 0",
        "expired exclusive expired t f t 0",
        "free exclusive free t f t 0",
        "revoked exclusive free t f t 0",
    ];
    ensure!(shown == expected, "{shown:?}");
    let latest = session.token("SELECT token FROM lease_info('free')")?;
    ensure!(latest == closing, "{latest:?} is not the closing token {closing:?}");
    let row = session.rows(
        "SELECT holder, role = current_user, token = first_token, renewed_at = acquired_at,
                expires_at - acquired_at = interval '1 h', metadata
           FROM lease_info('held')",
    )?;
    let texts: Vec<_> = row[0].iter().map(Option::as_deref).collect();
    ensure!(texts == [Some("H"), Some("t"), Some("t"), Some("t"), Some("t"), None], "{texts:?}");
    Ok(())
}

#[lab_test]
fn the_view_has_these_columns_and_types(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let columns: Vec<String> = db.connect()?.one(
        "SELECT array_agg(attname || ' ' || format_type(atttypid, atttypmod) ORDER BY attnum)
           FROM pg_attribute WHERE attrelid = 'fence.leases'::regclass AND attnum > 0",
        &[],
    )?;
    let expected = [
        "name text",
        "mode text",
        "state text",
        "holder text",
        "role name",
        "token bigint",
        "first_token bigint",
        "acquired_at timestamp with time zone",
        "renewed_at timestamp with time zone",
        "expires_at timestamp with time zone",
        "remaining interval",
        "renewals bigint",
        "metadata jsonb",
        "blocking_pids integer[]",
        "adopted boolean",
    ];
    ensure!(columns == expected, "{columns:?}");
    Ok(())
}

#[lab_test]
fn the_view_describes_the_session_where_no_holder_is_named(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.conninfo().application("night run").connect()?;
    session.acquire("job", "1 h")?;
    let pid = session.pid();
    let holder = db.connect()?.text("SELECT holder FROM lease_info('job')")?.unwrap_or_default();
    ensure!(holder == format!("night run[{pid}]"), "{holder}");
    // It cannot be claimed by spelling it out.
    db.connect()?.nothing(&format!(
        "SELECT lease_acquire('job', {}, reclaim => true)",
        pg_test::client::literal(&holder)
    ))
}

#[lab_test]
fn metadata_is_kept_as_given(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let shown = |session: &mut Session| session.text("SELECT metadata FROM lease_info('job')");
    let given = r#"{"host": "db-1", "tries": [1, null, "ä\""]}"#;
    let token = session.granted(&format!("SELECT lease_acquire('job', metadata => '{given}')"))?;
    ensure!(shown(&mut session)?.as_deref() == Some(given));
    let token = session.renew("job", token)?.expect("held");
    ensure!(shown(&mut session)?.as_deref() == Some(given), "lost by a renewal");
    session.release("job", token)?;
    let token = session.granted("SELECT lease_acquire('job', metadata => 'null')")?;
    ensure!(shown(&mut session)?.as_deref() == Some("null"));
    session.release("job", token)?;
    session.acquire("job", "1 h")?;
    ensure!(shown(&mut session)?.is_none(), "the predecessor's");
    Ok(())
}

#[lab_test]
fn metadata_from_a_table_outlives_the_table(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run(
        "CREATE TABLE source (doc jsonb, long text);
         ALTER TABLE source ALTER doc SET STORAGE EXTERNAL, ALTER long SET STORAGE EXTERNAL;
         INSERT INTO source SELECT jsonb_build_object('x', string_agg(md5(g::text), '')),
                                   string_agg(md5(g::text), '') FROM generate_series(1, 2000) AS g;
         UPDATE source SET long = left(long, 512);
         CREATE TEMP TABLE expected AS SELECT md5(doc::text) AS doc, md5(long) AS long FROM source;",
    )?;
    let mut token =
        session.granted("SELECT lease_acquire('job', long, metadata => doc) FROM source")?;
    session.run("DROP TABLE source")?;
    let same = "SELECT md5(metadata::text) = doc AND md5(holder) = long
                  FROM lease_info('job'), expected";
    for _ in 0..3 {
        ensure!(session.truth(same)?);
        token = session.renew("job", token)?.expect("held");
    }
    ensure!(session.truth(same)?, "lost by renewals");
    session.release("job", token)?;
    ensure!(session.truth(same)?, "lost by the release");
    Ok(())
}

#[lab_test]
fn info_is_the_view_for_one_name(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run("SELECT lease_acquire('a'), lease_acquire('b')")?;
    ensure!(session.rows("SELECT * FROM lease_info('nobody')")?.is_empty());
    let same = session.truth(
        "SELECT i.* IS NOT DISTINCT FROM v.* FROM
           (SELECT name, state, token, acquired_at, expires_at FROM lease_info('a')) AS i,
           (SELECT name, state, token, acquired_at, expires_at FROM fence.leases
             WHERE name = 'a') AS v",
    )?;
    ensure!(same);
    let kind = session.truth(
        "SELECT prorettype = 'fence.leases'::regtype AND proretset
           FROM pg_proc WHERE proname = 'lease_info'",
    )?;
    ensure!(kind, "it returns rows of the view");
    Ok(())
}

#[lab_test]
fn pruning_deletes_what_ended_long_ago(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let live = session.acquire("live", "1 h")?;
    session.acquire_expired("expired")?;
    let token = session.acquire("released", "1 h")?;
    session.release("released", token)?;
    ensure!(session.granted("SELECT lease_prune()")? == 0, "they ended within the last day");
    ensure!(session.granted("SELECT lease_prune('1 h')")? == 0);
    ensure!(session.granted("SELECT lease_prune(older_than => '0')")? == 2);
    let left = session.rows("SELECT name FROM fence.leases")?;
    ensure!(left == [[Some("live".to_owned())]], "{left:?}");
    ensure!(session.speaks("live", live)? && session.renew("live", live)?.is_some());
    ensure!(session.granted("SELECT lease_prune('0')")? == 0);
    Ok(())
}

#[lab_test]
fn pruning_never_lowers_a_token(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let late = session.acquire_expired("job")?;
    let last = session.last_token()?;
    ensure!(session.granted("SELECT lease_prune('0')")? == 1);
    ensure!(session.last_token()? == last);
    ensure!(!session.speaks("job", late)? && session.renew("job", late)?.is_none());
    ensure!(session.release("job", late)?.is_none());
    ensure!(session.acquire("job", "1 h")? > last);
    Ok(())
}

#[lab_test]
fn pruning_leaves_what_is_guarded(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut worker, mut admin) = (db.connect()?, db.connect()?);
    admin.run("SET lock_timeout = '10 s'")?;
    let token = worker.acquire("job", "1 h")?;
    worker.run(&format!("BEGIN; SELECT lease_guard('job', {token})"))?;
    admin.expire_now("job", token)?;
    ensure!(admin.granted("SELECT lease_prune('0')")? == 0, "pruned under its guard");
    ensure!(worker.granted("SELECT lease_prune('0')")? == 0, "pruned by its own guard");
    ensure!(admin.is_taken("job")?, "had from under its guard");
    worker.run("COMMIT")?;
    ensure!(admin.granted("SELECT lease_prune('0')")? == 1);
    Ok(())
}
