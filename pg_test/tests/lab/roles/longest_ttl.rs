//! How a client might try to get around pg_fence.max_ttl when it connects. The rest is in longest_ttl.script.

use pg_test::{ensure, lab_test, Calls, Database, Lab, Result, Session};

/// A worker that may ask for a minute at most.
fn bounded(db: &Database) -> Result<String> {
    let role = db.role("bounded")?;
    db.connect()?.run(&format!(
        "SELECT fence_grant('{role}'); ALTER ROLE {role} SET pg_fence.max_ttl = '1 min'"
    ))?;
    Ok(role)
}

/// A minute is granted and more is not; whatever the session tries, the library is loaded by these calls at the latest.
fn is_bounded(session: &mut Session) -> Result<()> {
    let fault = session.refused("SELECT lease_acquire('job', ttl => '60.000001 s')", "22023")?;
    ensure!(fault.message == "ttl must be at most 60 s here", "{fault}");
    ensure!(fault.json()?["argument"] == "ttl", "{fault}");
    ensure!(fault.hint.as_deref().is_some_and(|h| h.contains("pg_fence.max_ttl")), "{fault}");
    let token = session.acquire("job", "1 min")?;
    ensure!(session.release("job", token)?.is_some());
    Ok(())
}

/// A setting that a client asks for when it connects overrides the role's.
#[lab_test]
fn an_option_of_the_connection_does_not_lift_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = bounded(&db)?;
    for value in ["0", "366d", "nonsense", ""] {
        let conninfo = db.conninfo().user(&role).set("pg_fence.max_ttl", value);
        let mut session = conninfo.connect()?;
        is_bounded(&mut session)?;
        let _ = session.try_rows("RESET pg_fence.max_ttl; RESET ALL");
        is_bounded(&mut session)?;
        session.run("DISCARD ALL")?;
        is_bounded(&mut session)?;
    }
    // Nor where the library is loaded when the session begins.
    let preload = "session_preload_libraries";
    db.connect()?.run(&format!("ALTER DATABASE {} SET {preload} = 'pg_fence'", db.name()))?;
    is_bounded(&mut db.connect_as(&role)?)?;
    let conninfo = db.conninfo().user(&role).set("pg_fence.max_ttl", "0");
    is_bounded(&mut conninfo.connect()?)?;
    Ok(())
}
