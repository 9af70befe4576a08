//! Values in parameters of a prepared statement. Signatures, limits and refused input are tested in
//! signatures_and_inputs.script.

use pg_test::{Harness, Result, ensure, harness_test};

#[harness_test]
fn parameters_are_taken_as_values(harness: &Harness) -> Result<()> {
    let db = harness.database()?;
    let mut session = db.connect()?;
    let odd = "x'); SELECT lease_revoke('a";
    let metadata = serde_json::json!({"quote": "'\"\\", "n": 1});
    let token: i64 = session
        .one("SELECT lease_acquire($1, holder => $1, metadata => $2)", &[&odd, &metadata])?;
    // A prepared statement that is planned once still works the tenth time.
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
