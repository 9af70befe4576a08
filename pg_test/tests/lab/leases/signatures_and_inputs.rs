//! Signatures, defaults, and what is refused as bad input.

use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn the_functions_have_the_documented_signatures(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    for (name, arguments, result) in [
        (
            "lease_acquire",
            "name text, holder text DEFAULT NULL::text, \
             ttl interval DEFAULT '00:00:30'::interval, \
             wait interval DEFAULT '00:00:00'::interval, metadata jsonb DEFAULT NULL::jsonb, \
             shared boolean DEFAULT false, slots integer DEFAULT 1, \
             reclaim boolean DEFAULT false, session boolean DEFAULT false",
            "bigint",
        ),
        ("lease_renew", "name text, token bigint, ttl interval DEFAULT NULL::interval", "bigint"),
        ("lease_release", "name text, token bigint", "bigint"),
        ("lease_revoke", "name text", "bigint"),
        ("lease_guard", "name text, token bigint", "bigint"),
        ("lease_check", "name text, token bigint", "boolean"),
        ("lease_info", "name text, token bigint DEFAULT NULL::bigint", "SETOF fence.leases"),
        ("lease_prune", "older_than interval DEFAULT '1 day'::interval", "bigint"),
    ] {
        let rows = session.rows(&format!(
            "SELECT pg_get_function_arguments(oid), pg_get_function_result(oid)
               FROM pg_proc WHERE proname = '{name}'"
        ))?;
        ensure!(rows.len() == 1, "{} functions {name}", rows.len());
        let found: Vec<_> = rows[0].iter().flatten().map(String::as_str).collect();
        ensure!(found == [arguments, result], "{name}: {found:?}");
    }
    Ok(())
}

#[lab_test]
fn arguments_may_be_named(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.granted(
        "SELECT lease_acquire(reclaim => false, slots => 1, shared => false, metadata => '[1]',
                wait => '0', ttl => '1 min', holder => 'h', name => 'job')",
    )?;
    let row = session.rows(
        "SELECT mode, holder, metadata, expires_at - acquired_at FROM lease_info(name => 'job')",
    )?;
    let texts: Vec<_> = row[0].iter().flatten().map(String::as_str).collect();
    ensure!(texts == ["exclusive", "h", "[1]", "00:01:00"], "{texts:?}");
    ensure!(session.truth(&format!("SELECT lease_check(token => {token}, name => 'job')"))?);
    session
        .granted(&format!("SELECT lease_renew(ttl => '1 h', token => {token}, name => 'job')"))?;
    session.granted(&format!("SELECT lease_release(token => {token}, name => 'job')"))?;
    session.nothing("SELECT lease_revoke(name => 'job')")?;
    session.granted("SELECT lease_prune(older_than => '1 h')")?;
    Ok(())
}

/// Calls, and what each is refused with.
const BAD: &[(&str, &str)] = &[
    ("lease_acquire('')", "22023"),
    ("lease_acquire(repeat('x', 513))", "22023"),
    ("lease_acquire(repeat('ä', 257))", "22023"),
    ("lease_acquire('job', ttl => '0')", "22023"),
    ("lease_acquire('job', ttl => '-1 us')", "22023"),
    ("lease_acquire('job', ttl => '1 mon -31 days')", "22023"),
    ("lease_acquire('job', ttl => '366 days 1 us')", "22023"),
    ("lease_acquire('job', ttl => '1 year 7 days')", "22023"),
    ("lease_acquire('job', ttl => '178000000 years')", "22023"),
    ("lease_acquire('job', ttl => '-178000000 years')", "22023"),
    ("lease_acquire('job', ttl => '0', session => true)", "22023"),
    ("lease_acquire('job', ttl => '100000 years 1 us', session => true)", "22023"),
    ("lease_acquire('job', ttl => '178000000 years', session => true)", "22023"),
    ("lease_acquire_all('{job}', ttl => '366 days 1 us')", "22023"),
    ("lease_acquire_all('{job}', ttl => '100000 years 1 us', session => true)", "22023"),
    ("lease_renew('job', 1, '100000 years 1 us')", "22023"),
    ("lease_acquire('job', wait => '-1 us')", "22023"),
    ("lease_acquire('job', wait => '-1 mon')", "22023"),
    ("lease_acquire('job', wait => '-178000000 years')", "22023"),
    ("lease_acquire('job', slots => 0)", "22023"),
    ("lease_acquire('job', slots => -1)", "22023"),
    ("lease_acquire('job', slots => -2147483648)", "22023"),
    ("lease_acquire('job', shared => true, slots => 2)", "22023"),
    ("lease_acquire('job', reclaim => true)", "22023"),
    ("lease_acquire('job', repeat('x', 513))", "22023"),
    ("lease_acquire('job', repeat('ä', 257))", "22023"),
    ("lease_acquire('job', metadata => to_jsonb(repeat('x', 65536)))", "22023"),
    (
        "lease_acquire('job', metadata => (SELECT jsonb_agg(n) FROM generate_series(1, 20000) n))",
        "22023",
    ),
    ("lease_acquire_all('{job,tool}', repeat('x', 513))", "22023"),
    ("lease_acquire_all('{job,tool}', metadata => to_jsonb(repeat('x', 65536)))", "22023"),
    ("lease_acquire(NULL)", "22004"),
    ("lease_renew('', 1)", "22023"),
    ("lease_renew('job', 0)", "22023"),
    ("lease_renew('job', -1)", "22023"),
    ("lease_renew('job', -9223372036854775808)", "22023"),
    ("lease_renew('job', 1, '0')", "22023"),
    ("lease_renew('job', 1, '-1 s')", "22023"),
    ("lease_renew('job', 1, '367 days')", "22023"),
    ("lease_renew(NULL, 1)", "22004"),
    ("lease_renew('job', NULL)", "22004"),
    ("lease_release('', 1)", "22023"),
    ("lease_release('job', 0)", "22023"),
    ("lease_release('job', -5)", "22023"),
    ("lease_release(NULL, 1)", "22004"),
    ("lease_release('job', NULL)", "22004"),
    ("lease_revoke('')", "22023"),
    ("lease_revoke(repeat('x', 513))", "22023"),
    ("lease_revoke(NULL)", "22004"),
    ("lease_guard('', 1)", "22023"),
    ("lease_guard(repeat('x', 513), 1)", "22023"),
    ("lease_guard('job', -1)", "22023"),
    ("lease_guard('job', 0)", "22023"),
    ("lease_guard(NULL, 1)", "22004"),
    ("lease_guard('job', NULL)", "22004"),
    ("lease_check('', 1)", "22023"),
    ("lease_check('job', 0)", "22023"),
    ("lease_check('job', -1)", "22023"),
    ("lease_check(NULL, 1)", "22004"),
    ("lease_check('job', NULL)", "22004"),
    ("lease_info('')", "22023"),
    ("lease_info(repeat('x', 513))", "22023"),
    ("lease_info('job', 0)", "22023"),
    ("lease_info(NULL)", "22004"),
    ("lease_info(NULL, 1)", "22004"),
    ("lease_prune('-1 s')", "22023"),
];

fn refuse_all(session: &mut pg_test::Session, sqlstate: &str) -> Result<()> {
    for (call, _) in BAD.iter().filter(|(_, expected)| *expected == sqlstate) {
        let fault = session.refused(&format!("SELECT {call}"), sqlstate)?;
        ensure!(fault.hint.as_deref().is_some_and(|hint| !hint.is_empty()), "{call}: {fault}");
        ensure!(!fault.message.contains('\n'), "{call}: {fault}");
        let detail = fault.json()?;
        ensure!(detail.is_object(), "{call}: {detail}");
        ensure!(!fault.to_string().contains(".rs"), "{call} shows a file: {fault}");
    }
    Ok(())
}

#[lab_test]
fn bad_input_is_refused_with_a_hint(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    refuse_all(&mut session, "22023")?;
    // Also where there is a lease of that name, and while it is held.
    session.run("SELECT lease_acquire('job', 'me', '1 h')")?;
    refuse_all(&mut session, "22023")
}

#[lab_test]
fn null_is_refused_where_a_value_is_needed(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    refuse_all(&mut session, "22004")?;
    session.run("SELECT lease_acquire('job', 'me', '1 h'); ANALYZE fence.lease")?;
    refuse_all(&mut session, "22004")
}

#[lab_test]
fn null_is_taken_where_it_means_the_default(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    let token = session.granted(
        "SELECT lease_acquire('job', NULL, NULL, NULL, NULL, shared => NULL, slots => NULL, reclaim => NULL)",
    )?;
    let defaults =
        "SELECT mode = 'exclusive' AND expires_at - acquired_at = '30 s' AND metadata IS NULL \
                    FROM lease_info('job', NULL)";
    ensure!(session.truth(defaults)?);
    other.nothing("SELECT lease_acquire('job', wait => NULL, reclaim => NULL)")?;
    session.granted(&format!("SELECT lease_renew('job', {token}, NULL)"))?;
    session.granted("SELECT lease_acquire_all('{a,b}', NULL, NULL, NULL)")?;
    ensure!(session.truth("SELECT expires_at - acquired_at = '30 s' FROM lease_info('a')")?);
    // The default of lease_prune is a day.
    session.granted("SELECT lease_revoke('a')")?;
    ensure!(session.granted("SELECT lease_prune(NULL)")? == 0);
    let role = db.role("worker")?;
    session.run(&format!("SELECT fence_grant('{role}', level => NULL, prefix => NULL)"))?;
    db.connect_as(&role)?.acquire("theirs", "1 h")?;
    db.connect_as(&role)?.refused("SELECT lease_revoke('theirs')", "42501")?;
    Ok(())
}

#[lab_test]
fn a_name_has_up_to_512_bytes(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    for name in ["x".repeat(512), "ä".repeat(256), "€".repeat(170) + "xy", "🦀".repeat(128)] {
        ensure!(name.len() == 512);
        let token = session.acquire(&name, "1 h")?;
        ensure!(session.is_taken(&name)? && session.speaks(&name, token)?);
        let shorter: String = name.chars().take(name.chars().count() - 1).collect();
        let other = session.acquire(&shorter, "1 h")?;
        ensure!(!session.speaks(&name, other)?);
        ensure!(session.renew(&name, token)?.is_some());
        let shown: String = session.one("SELECT name FROM lease_info($1)", &[&name])?;
        ensure!(shown == name);
        let longer = format!("{name}x");
        let fault = session.refused(&format!("SELECT lease_acquire('{longer}')"), "22023")?;
        ensure!(!fault.to_string().contains(&name), "a whole long name in an error: {fault}");
        ensure!(session.release(&name, token)?.is_some());
    }
    Ok(())
}

#[lab_test]
fn the_limits_themselves_are_allowed(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.acquire("job", "366 days")?;
    session.granted(&format!("SELECT lease_renew('job', {token}, '366 days')"))?;
    session.acquire("short", "1 us")?;
    session.granted("SELECT lease_acquire('no wait', wait => '0 s')")?;
    session.granted("SELECT lease_acquire('long wait', wait => '1000 days')")?;
    session.granted("SELECT lease_acquire('one slot', slots => 1)")?;
    // Compressed to next to nothing, or not at all.
    for metadata in [
        "repeat('x', 65000)",
        "left((SELECT string_agg(md5(n::text), '') FROM generate_series(1, 3000) n), 65000)",
    ] {
        let call = format!(
            "lease_acquire('much', repeat('x', 512), metadata => to_jsonb({metadata}), reclaim => true)"
        );
        let much = session.granted(&format!("SELECT {call}"))?;
        session.granted(&format!("SELECT lease_renew('much', {much})"))?;
        let kept = format!("SELECT metadata #>> '{{}}' = {metadata} FROM lease_info('much')");
        ensure!(session.truth(&kept)?, "{metadata}");
    }
    ensure!(session.renew("job", i64::MAX)?.is_none());
    ensure!(session.release("job", i64::MAX)?.is_none());
    ensure!(!session.speaks("job", i64::MAX)?);
    session.granted("SELECT lease_prune('178000000 years')")?;
    session.granted("SELECT lease_prune('0')")?;
    Ok(())
}

#[lab_test]
fn a_refusal_leaves_no_trace(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let token = session.acquire("job", "1 h")?;
    session.run("BEGIN")?;
    for (call, sqlstate) in BAD {
        session.run("SAVEPOINT s")?;
        session.refused(&format!("SELECT {call}"), sqlstate)?;
        session.run("ROLLBACK TO s; RELEASE s")?;
        let xid = session.text("SELECT pg_current_xact_id_if_assigned()")?;
        ensure!(xid.is_none(), "{call} took a transaction id");
    }
    ensure!(session.last_token()? == token, "a refused call drew a token");
    session.run("COMMIT")?;
    ensure!(session.rows("SELECT * FROM fence.leases")?.len() == 1);
    ensure!(session.speaks("job", token)?);
    Ok(())
}

#[lab_test]
fn parameters_are_taken_as_values(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let odd = "x'); SELECT lease_revoke('a";
    let metadata = serde_json::json!({"quote": "'\"\\", "n": 1});
    let token: i64 = session
        .one("SELECT lease_acquire($1, holder => $1, metadata => $2)", &[&odd, &metadata])?;
    // A prepared statement, planned once, is as good the tenth time.
    let renew = session.prepare("SELECT lease_renew($1, $2)")?;
    let mut latest = token;
    for _ in 0..10 {
        let next: i64 = session.query_one(&renew, &[&odd, &latest])?.try_get(0)?;
        ensure!(next > latest);
        latest = next;
    }
    let none: Option<i64> = session.one("SELECT lease_acquire($1)", &[&odd])?;
    ensure!(none.is_none());
    let row = session.query_one("SELECT holder, metadata FROM lease_info($1)", &[&odd])?;
    let (holder, kept): (String, serde_json::Value) = (row.try_get(0)?, row.try_get(1)?);
    ensure!(holder == odd && kept == metadata, "{holder} {kept}");
    Ok(())
}
