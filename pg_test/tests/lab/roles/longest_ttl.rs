//! pg_fence.max_ttl: the longest ttl that may be asked for, and how a role might try to get around it.

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

#[lab_test]
fn each_call_that_asks_for_a_ttl_is_bounded(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = bounded(&db)?;
    let mut session = db.connect_as(&role)?;
    is_bounded(&mut session)?;
    let token = session.acquire("held", "1 min")?;
    let several = session.granted("SELECT lease_acquire_all('{a,b}', ttl => '1 min')")?;
    for call in [
        "lease_acquire('x', ttl => '61 s')".to_owned(),
        "lease_acquire('x', ttl => '61 s', wait => '1 h')".to_owned(),
        "lease_acquire('x', ttl => '61 s', session => true)".to_owned(),
        "lease_acquire('x', ttl => '1000 years', session => true)".to_owned(),
        "lease_acquire('held', ttl => '61 s')".to_owned(),
        "lease_acquire_all('{x,y}', ttl => '61 s')".to_owned(),
        "lease_acquire_all('{x,y}', ttl => '61 s', session => true)".to_owned(),
        format!("lease_renew('held', {token}, '61 s')"),
        "lease_renew('held', 7, '61 s')".to_owned(),
        format!("lease_renew_all('{{a,b}}', {several}, '61 s')"),
    ] {
        session.refused(&format!("SELECT {call}"), "22023")?;
    }
    ensure!(
        session.one::<i64>("SELECT count(*) FROM fence.leases WHERE name IN ('x', 'y')", &[])? == 0
    );
    session.granted(&format!("SELECT lease_renew('held', {token})"))?;
    session.granted(&format!("SELECT lease_renew_all('{{a,b}}', {several}, '1 min')"))?;
    session.granted("SELECT lease_acquire('y', ttl => '1 min', session => true)")?;
    // Nobody else is bounded.
    db.connect()?.acquire("z", "366 days").map(drop)
}

#[lab_test]
fn a_default_ttl_above_it_is_refused_too(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = bounded(&db)?;
    let mut owner = db.connect()?;
    owner.run(&format!("ALTER ROLE {role} SET pg_fence.max_ttl = '5 s'"))?;
    let mut session = db.connect_as(&role)?;
    session.refused("SELECT lease_acquire('job')", "22023")?;
    session.refused("SELECT lease_acquire_all('{job}')", "22023")?;
    let token = session.acquire("job", "5 s")?;
    session.granted(&format!("SELECT lease_renew('job', {token})"))?;
    // A renewal without a ttl asks for nothing: it has that of the acquire, which was allowed then.
    let role = db.role("earlier")?;
    owner.run(&format!("SELECT fence_grant('{role}')"))?;
    let long = db.connect_as(&role)?.acquire("long", "1 h")?;
    owner.run(&format!("ALTER ROLE {role} SET pg_fence.max_ttl = '1 min'"))?;
    let mut later = db.connect_as(&role)?;
    later.granted(&format!("SELECT lease_renew('long', {long})"))?;
    later.refused(&format!("SELECT lease_renew('long', {long}, '1 h')"), "22023")?;
    later.granted(&format!("SELECT lease_renew('long', {long}, '1 min')"))?;
    later.refused("SELECT lease_acquire('long', 'h', '1 h')", "22023").map(drop)
}

#[lab_test]
fn a_database_and_a_role_in_a_database_have_bounds_of_their_own(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (role, other) = (db.role("tenant")?, db.role("other")?);
    let mut owner = db.connect()?;
    owner.run(&format!(
        "SELECT fence_grant('{role}'), fence_grant('{other}');
         ALTER DATABASE {name} SET pg_fence.max_ttl = 60;
         ALTER ROLE {other} SET pg_fence.max_ttl = '1 d';
         ALTER ROLE {other} IN DATABASE {name} SET pg_fence.max_ttl = '60000 ms'",
        name = db.name()
    ))?;
    is_bounded(&mut db.connect_as(&role)?)?;
    is_bounded(&mut db.connect_as(&other)?)?;
    owner.run(&format!("ALTER ROLE {other} IN DATABASE {} RESET pg_fence.max_ttl", db.name()))?;
    db.connect_as(&other)?.acquire("day", "1 day")?;
    // A superuser's sessions too, until they lift it.
    let mut superuser = db.connect()?;
    is_bounded(&mut superuser)?;
    superuser.run("SET pg_fence.max_ttl = 0; SELECT lease_acquire('year', ttl => '365 days')")?;
    superuser.run("RESET pg_fence.max_ttl")?;
    is_bounded(&mut superuser)
}

#[lab_test]
fn the_role_itself_does_not_lift_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = bounded(&db)?;
    let attempts = [
        "SET pg_fence.max_ttl = 0",
        "SET SESSION pg_fence.max_ttl = '366 days'",
        "SET pg_fence.max_ttl = 'nonsense'",
        "SET pg_fence.max_ttl TO DEFAULT",
        "RESET pg_fence.max_ttl",
        "RESET ALL",
        "DISCARD ALL",
        "SELECT set_config('pg_fence.max_ttl', '0', false)",
        "UPDATE pg_settings SET setting = '0' WHERE name = 'pg_fence.max_ttl'",
        "CREATE FUNCTION pg_temp.f() RETURNS void LANGUAGE sql SET pg_fence.max_ttl = 0 AS 'SELECT'; SELECT pg_temp.f()",
    ];
    for attempt in attempts {
        // Before the library is loaded, and after.
        for loaded in [false, true] {
            let mut session = db.connect_as(&role)?;
            if loaded {
                is_bounded(&mut session)?;
            }
            let _ = session.try_rows(attempt);
            is_bounded(&mut session)?;
        }
        // In a transaction, for the call alone.
        let mut session = db.connect_as(&role)?;
        let _ = session.try_rows(&format!("BEGIN; {}", attempt.replace("SET pg", "SET LOCAL pg")));
        let asked = session.try_rows("SELECT lease_acquire('long', ttl => '1 h')");
        let _ = session.try_rows("ROLLBACK");
        ensure!(asked.is_err(), "{attempt}: {asked:?}");
        is_bounded(&mut session)?;
    }
    // For sessions to come.
    for attempt in [
        format!("ALTER ROLE {role} SET pg_fence.max_ttl = 0"),
        format!("ALTER ROLE {role} IN DATABASE {} SET pg_fence.max_ttl = 0", db.name()),
        format!("ALTER ROLE {role} RESET pg_fence.max_ttl"),
        format!("ALTER ROLE {role} RESET ALL"),
    ] {
        for loaded in [false, true] {
            let mut session = db.connect_as(&role)?;
            if loaded {
                is_bounded(&mut session)?;
            }
            let _ = session.try_rows(&attempt);
            is_bounded(&mut db.connect_as(&role)?)?;
        }
    }
    Ok(())
}

/// What a client asks for when it connects comes before what the role was given, and is stronger.
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

/// It binds the role of the login, as every setting of a role does.
#[lab_test]
fn it_is_that_of_the_login_not_of_a_role_become_later(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = bounded(&db)?;
    let free = db.role("free")?;
    db.connect()?.run(&format!("SELECT fence_grant('{free}')"))?;
    db.connect()?.run(&format!("GRANT {free} TO {role}"))?;
    let mut session = db.connect_as(&role)?;
    session.run(&format!("SET ROLE {free}"))?;
    is_bounded(&mut session)?;
    let mut superuser = db.connect()?;
    superuser.run(&format!("SET ROLE {role}; SELECT lease_acquire('long', ttl => '1 h')"))?;
    Ok(())
}
