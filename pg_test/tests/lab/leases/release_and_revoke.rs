//! A closing token and its grant's deadline. The rest is in release_and_revoke.script.

use pg_test::calls::within_ttl;
use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test]
fn a_closing_token_outlives_the_deadline_in_its_transaction(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut other) = (db.connect()?, db.connect()?);
    let (token, closing) = within_ttl(|ttl| {
        let token = holder.acquire("job", ttl)?;
        holder.run("BEGIN")?;
        match holder.release("job", token)? {
            Some(closing) => Ok(Some((token, closing))),
            None => holder.run("ROLLBACK").map(|()| None),
        }
    })?;
    other.wait_expired("job")?;
    ensure!(holder.speaks("job", closing)? && holder.release("job", token)? == Some(closing));
    ensure!(other.is_taken("job")?);
    holder.run("COMMIT")?;
    ensure!(!other.is_taken("job")?);
    Ok(())
}
