//! Attacks that an unprivileged role might try, each shown to fail. More of it is in attacks.script.

use crate::roles::{gives_all_by_default, public_rights, role_of, PUBLIC};
use pg_test::{edition, ensure, lab_test, Calls, Context, Database, Lab, Result, Session};

/// In lite the owner of a schema may drop what is in it, and a dump reads the marks.
const NOT_LITE: [&str; 4] =
    ["DROP FUNCTION", "EXTENSION", "server_start_seq", "setval('fence.dumped_token_seq'"];

#[lab_test]
fn the_state_and_the_sequence_are_out_of_reach(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = role_of(&db, "admin", &[("admin", "")])?;
    // Owning the database is not owning the extension.
    db.connect()?.run(&format!("ALTER DATABASE {} OWNER TO {role}", db.name()))?;
    let mut admin = db.connect_as(&role)?;
    let token: i64 = admin.one("SELECT lease_acquire('job')", &[])?;
    for attack in [
        "SELECT setval('fence.token_seq', 1)",
        "SELECT setval('fence.token_seq', 1, false)",
        "SELECT nextval('fence.token_seq')",
        "SELECT setval('fence.database_identity_seq', 1)",
        "SELECT setval('fence.jump_token_seq', 1)",
        "SELECT setval('fence.dumped_token_seq', 1)",
        "SELECT nextval('fence.jump_count_seq')",
        "ALTER SEQUENCE fence.token_seq RESTART",
        "ALTER SEQUENCE fence.token_seq CACHE 10",
        "ALTER SEQUENCE fence.token_seq OWNER TO CURRENT_USER",
        "DROP SEQUENCE fence.token_seq CASCADE",
        "INSERT INTO fence.lease SELECT * FROM fence.lease",
        "INSERT INTO fence.lease (name) VALUES ('x')",
        "UPDATE fence.lease SET expires_at = 'infinity'",
        "DELETE FROM fence.lease",
        "TRUNCATE fence.lease",
        "COPY fence.lease FROM STDIN",
        "MERGE INTO fence.lease l USING (VALUES (1)) v ON true WHEN MATCHED THEN DELETE",
        "SELECT 1 FROM fence.lease FOR UPDATE",
        "SELECT last_value FROM fence.server_start_seq",
        "BEGIN; LOCK TABLE fence.lease IN ACCESS EXCLUSIVE MODE",
        "ALTER TABLE fence.lease DISABLE TRIGGER ALL",
        "CREATE TRIGGER t BEFORE UPDATE ON fence.lease FOR EACH ROW \
         EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "CREATE RULE r AS ON UPDATE TO fence.lease DO INSTEAD NOTHING",
        "CREATE INDEX ON fence.lease (expires_at)",
        "ALTER TABLE fence.lease ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY p ON fence.lease USING (false)",
        "CREATE OR REPLACE VIEW fence.leases AS SELECT 1",
        "CREATE TABLE fence.mine (n int)",
        "CREATE FUNCTION fence.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "ALTER SCHEMA fence RENAME TO fence_old",
        "ALTER FUNCTION lease_check(text, bigint) RENAME TO check_no_more",
        "ALTER FUNCTION lease_check(text, bigint) SECURITY DEFINER",
        "DROP FUNCTION lease_check(text, bigint)",
        "ALTER EXTENSION pg_fence DROP TABLE fence.lease",
    ] {
        admin.run("ROLLBACK")?;
        if edition::is_lite() && NOT_LITE.iter().any(|part| attack.contains(part)) {
            continue;
        }
        // (What belongs to the extension is protected twice, so DROP may name the extension first.)
        let outcome = admin.try_rows(attack);
        let Err(fault) = outcome else { pg_test::bail!("it went through: {attack}") };
        ensure!(["42501", "2BP01"].contains(&fault.sqlstate.as_str()), "{attack}: {fault}");
    }
    // A role that may use leases may dump them, and so read the table beneath the view; nobody else may.
    admin.run("ROLLBACK; SELECT * FROM fence.lease")?;
    let mut nobody = db.connect_as(&db.role("nobody")?)?;
    nobody.refused("SELECT * FROM fence.lease", "42501")?;
    if !edition::is_lite() {
        nobody.refused("SELECT last_value FROM fence.token_seq", "42501")?;
    }
    // The view cannot be written at all, not even by a superuser.
    for attack in ["UPDATE fence.leases SET expires_at = 'infinity'", "DELETE FROM fence.leases"] {
        for session in [&mut admin, &mut db.connect()?] {
            session.run("ROLLBACK")?;
            session.refused(attack, "55000")?;
        }
    }
    ensure!(admin.one::<i64>("SELECT last_token FROM fence_status()", &[])? == token);
    ensure!(admin.one::<bool>("SELECT lease_check('job', $1)", &[&token])?);
    ensure!(admin.one::<i64>("SELECT lease_renew('job', $1)", &[&token])? == token + 1);
    Ok(())
}

/// Takes a lease through its life; whatever surrounds the session must not show.
fn a_lease_lives(session: &mut Session) -> Result<()> {
    let token: i64 = session.one("SELECT public.lease_acquire('job')", &[])?;
    ensure!(session.one::<Option<i64>>("SELECT public.lease_acquire('job')", &[])?.is_none());
    ensure!(session.one::<bool>("SELECT public.lease_check('job', $1)", &[&token])?);
    let seen = session.rows("SELECT i.name, i.state, i.token FROM public.lease_info('job') i")?;
    let expected = [["job", "held", &token.to_string()].map(|text| Some(text.to_owned()))];
    ensure!(seen == expected, "{seen:?}");
    ensure!(session.one::<i64>("SELECT public.lease_guard('job', $1)", &[&token])? == token);
    let renewed: i64 = session.one("SELECT public.lease_renew('job', $1)", &[&token])?;
    ensure!(renewed == token + 1, "{renewed} after {token}");
    ensure!(session.one::<i64>("SELECT last_token FROM public.fence_status()", &[])? == renewed);
    let closing: i64 = session.one("SELECT public.lease_release('job', $1)", &[&renewed])?;
    ensure!(closing == renewed + 1, "{closing} after {renewed}");
    ensure!(!session.one::<bool>("SELECT public.lease_check('job', $1)", &[&renewed])?);
    Ok(())
}

#[lab_test]
fn temporary_objects_shadow_nothing(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect_as(&role_of(&db, "admin", &[("admin", "")])?)?;
    admin.run(
        "CREATE TEMP TABLE lease (LIKE fence.leases);
         CREATE TEMP VIEW leases AS SELECT 'job'::text AS name;
         CREATE TEMP SEQUENCE token_seq START 1000;
         CREATE TEMP SEQUENCE jump_token_seq START 1000;
         CREATE TEMP SEQUENCE dumped_token_seq START 1000;
         CREATE TEMP SEQUENCE database_identity_seq;
         CREATE TEMP SEQUENCE jump_count_seq;
         CREATE TEMP TABLE pg_class (oid oid);
         CREATE TEMP TABLE pg_extension (extname text, extversion text);
         CREATE TEMP TABLE pg_sequence (n int);
         CREATE FUNCTION pg_temp.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS $$SELECT 'infinity'::timestamptz$$;
         CREATE FUNCTION pg_temp.checked_name(text, bigint) RETURNS text LANGUAGE sql AS $$SELECT 'other'$$;
         SET search_path = pg_temp, fence, public, pg_catalog",
    )?;
    a_lease_lives(&mut admin)?;
    ensure!(
        admin.one::<Option<String>>("SELECT sql_version FROM public.fence_status()", &[])?
            == Some(pg_test::extension::VERSION.to_owned())
    );
    Ok(())
}

/// A schema full of traps: whatever is called of it raises an error.
fn schema_of_traps(db: &Database, role: &str) -> Result<()> {
    let mut owner = db.connect()?;
    owner.run(&format!("CREATE SCHEMA evil AUTHORIZATION {role}"))?;
    let mut session = db.connect_as(role)?;
    session.run("SET search_path = pg_catalog")?;
    let mut trap = |name: &str, arguments: &str, returns: &str| {
        session.run(&format!(
            "CREATE FUNCTION evil.{name}({arguments}) RETURNS {returns} LANGUAGE plpgsql \
             AS 'BEGIN RAISE ''trapped in {name}''; END'"
        ))
    };
    for (name, arguments, returns) in [
        ("same", "text, text", "boolean"),
        ("same", "name, text", "boolean"),
        ("same", "name, name", "boolean"),
        ("same", "oid, oid", "boolean"),
        ("same", "smallint, smallint", "boolean"),
        ("same", "bigint, bigint", "boolean"),
        ("same", "\"char\", \"char\"", "boolean"),
        ("same", "timestamptz, timestamptz", "boolean"),
        ("less", "timestamptz, timestamptz", "boolean"),
        ("minus", "timestamptz, timestamptz", "interval"),
        ("joined", "text, text", "text"),
        ("clock_timestamp", "", "timestamptz"),
        ("now", "", "timestamptz"),
        ("format", "text", "text"),
        ("format", "text, VARIADIC text[]", "text"),
        ("quote_ident", "text", "text"),
        ("quote_ident", "name", "text"),
        ("quote_literal", "text", "text"),
        ("concat_ws", "text, VARIADIC text[]", "text"),
        ("lower", "text", "text"),
        ("cardinality", "bigint[]", "integer"),
        ("checked_name", "text, bigint", "text"),
        ("uncommitted", "", "bigint"),
        ("blocking_pids", "text, integer", "integer[]"),
        ("lease_acquire", "text", "bigint"),
        ("lease_info", "text", "bigint"),
        ("fenced", "", "bigint"),
    ] {
        trap(name, arguments, returns)?;
    }
    for (operator, function, left, right) in [
        ("=", "same", "text", "text"),
        ("=", "same", "name", "text"),
        ("=", "same", "name", "name"),
        ("=", "same", "oid", "oid"),
        ("=", "same", "smallint", "smallint"),
        ("=", "same", "bigint", "bigint"),
        ("=", "same", "\"char\"", "\"char\""),
        ("=", "same", "timestamptz", "timestamptz"),
        ("<", "less", "timestamptz", "timestamptz"),
        ("<=", "less", "timestamptz", "timestamptz"),
        (">", "less", "timestamptz", "timestamptz"),
        ("-", "minus", "timestamptz", "timestamptz"),
        ("||", "joined", "text", "text"),
        ("~", "same", "text", "text"),
    ] {
        session.run(&format!(
            "CREATE OPERATOR evil.{operator} (FUNCTION = evil.{function}, LEFTARG = {left}, RIGHTARG = {right})"
        ))?;
    }
    // The traps do snap.
    let fault = session
        .refused("SET search_path = evil, pg_catalog; SELECT 'a'::text = 'a'::text", "P0001")?;
    ensure!(fault.message == "trapped in same", "{fault}");
    Ok(())
}

#[lab_test]
fn a_search_path_with_one_s_own_operators_and_overloads_changes_nothing(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = role_of(&db, "admin", &[("admin", "")])?;
    schema_of_traps(&db, &role)?;
    let mut admin = db.connect_as(&role)?;
    admin.run("SET search_path = evil, pg_catalog, public")?;
    a_lease_lives(&mut admin)?;
    admin.run(
        "SELECT public.lease_acquire_all('{a,b}'); SELECT public.lease_revoke('a');
         SELECT public.lease_prune('1 hour'); SELECT public.fence_new_epoch();
         SELECT state, remaining, blocking_pids FROM fence.leases; SELECT public.fence_audit()",
    )?;
    Ok(())
}

#[lab_test]
fn a_search_path_does_not_hijack_putting_on_the_fence(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = role_of(&db, "admin", &[("admin", "")])?;
    schema_of_traps(&db, &role)?;
    let mut owner = db.connect()?;
    let friend = db.role("friend")?;
    // Here the trap would run with a superuser's rights.
    owner.run(
        "CREATE TABLE orders (id int PRIMARY KEY, total int);
         INSERT INTO orders VALUES (7, 0);
         SET search_path = evil, pg_catalog, public",
    )?;
    owner.run(
        "SELECT public.fence_protect('public.orders', lease => 'order:{id}', verify => true)",
    )?;
    owner.run("SELECT public.fence_audit('public.orders')")?;
    owner.run(&format!("SELECT public.fence_grant('{friend}', 'admin')"))?;
    let token: i64 =
        owner.one("SELECT public.lease_acquire('order:7'::text, holder => 'h')", &[])?;
    owner.run(&format!("UPDATE public.orders SET total = 1, fence = {token}"))?;
    owner.refused("UPDATE public.orders SET total = 2, fence = 0", "PF003")?;
    owner.run(&format!("SELECT public.fence_revoke('{friend}')"))?;
    owner.run("SELECT public.fence_unprotect('public.orders')")
}

#[lab_test]
fn default_privileges_of_the_installer_give_nothing_away(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let role = db.role("favoured")?;
    let mut owner = db.connect()?;
    gives_all_by_default(&mut owner, &[&role])?;
    owner.run("CREATE EXTENSION pg_fence")?;
    let rights = public_rights(&db)?;
    ensure!(rights == PUBLIC, "{rights:?}");
    owner.run("SELECT lease_acquire('job')")?;
    let mut favoured = db.connect_as(&role)?;
    for attack in [
        "SELECT setval('fence.token_seq', 1)",
        "SELECT nextval('fence.token_seq')",
        "UPDATE fence.lease SET expires_at = 'infinity'",
        "DELETE FROM fence.lease",
        "TRUNCATE fence.lease",
        "CREATE TABLE fence.mine (n int)",
    ] {
        favoured.refused(attack, "42501")?;
    }
    for call in
        ["SELECT lease_revoke('job')", "SELECT fence_new_epoch()", "SELECT lease_acquire('x')"]
    {
        favoured.refused(call, "42501")?;
    }
    Ok(())
}

#[lab_test]
fn no_name_can_be_looked_for_that_has_the_locks_of_another(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut holder = db.connect()?;
    let token = holder.acquire("payroll", "1 h")?;
    let attacker = role_of(&db, "attacker", &[("worker", "a:")])?;
    let mut attacker = db.connect_as(&attacker)?;
    // By the unkeyed hash of PostgreSQL's hash indexes these two are alike.
    attacker.run("BEGIN")?;
    attacker.acquire(r"a:xxxxxxxxxx(lduo7\HSs0", "1 h")?;
    holder.run("SET statement_timeout = '30 s'")?;
    let renewed = holder.renew("payroll", token)?.context("held")?;
    holder.run(&format!("BEGIN; SELECT lease_guard('payroll', {renewed}); COMMIT"))?;
    holder.release("payroll", renewed)?.context("held")?;
    holder.acquire("payroll", "1 h")?;
    attacker.run("ROLLBACK")?;
    // Nobody is told the key of what he may not see, and another database has another one.
    attacker.nothing("SELECT fence.queue_key('payroll')")?;
    attacker.granted("SELECT fence.queue_key('a:')")?;
    attacker.refused("SELECT last_value FROM fence.lock_key_seq", "42501")?;
    let key = "SELECT fence.queue_key('payroll')";
    let other = lab.database()?.connect()?.granted(key)?;
    ensure!(holder.granted(key)? != other, "the key is no secret");
    Ok(())
}

#[lab_test]
fn without_the_secret_of_the_locks_nothing_is_granted(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut owner = db.connect()?;
    owner.run("ALTER SEQUENCE fence.lock_key_seq RESTART")?;
    let mut session = db.connect()?;
    let fault = session.refused("SELECT lease_acquire('job')", "55000")?;
    let hint = fault.hint.clone().unwrap_or_default();
    owner.run(hint.split_once(": ").context("a statement")?.1)?;
    session.acquire("job", "1 h")?;
    Ok(())
}
