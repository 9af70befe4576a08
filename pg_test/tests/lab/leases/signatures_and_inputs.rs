//! Bad input that is refused. Signatures, defaults and limits: signatures_and_inputs.script.

use pg_test::{ensure, lab_test, Calls, Lab, Result};

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
