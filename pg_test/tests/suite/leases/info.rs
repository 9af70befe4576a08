//! A grant with its deadline, by the extended protocol. The rest is in info.script.

use pg_test::{Harness, Result, ensure, harness_test};

#[harness_test]
fn a_grant_s_deadline_comes_where_the_name_is_a_parameter(harness: &Harness) -> Result<()> {
    let db = harness.database()?;
    let mut session = db.connect()?;
    let statement = "SELECT t, i.first_token FROM lease_acquire($1) AS t, lease_info($1, t) AS i";
    let row = session.query_one(statement, &[&"other"])?;
    ensure!(row.try_get::<_, i64>(0)? == row.try_get::<_, i64>(1)?);
    Ok(())
}
