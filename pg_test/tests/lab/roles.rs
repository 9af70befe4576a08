//! Who may call what, and to whom a lease belongs.

automod::dir!(pub "tests/lab/roles");

use pg_test::client::literal;
use pg_test::{
    edition, ensure, lab_test, Background, Calls, Database, Fault, Lab, Result, Session,
};

const BASE: [&str; 11] = [
    "SELECT lease_acquire('l')",
    "SELECT lease_renew('l', 1)",
    "SELECT lease_release('l', 1)",
    "SELECT lease_acquire_all('{l,m}')",
    "SELECT lease_renew_all('{l,m}', 1)",
    "SELECT lease_release_all('{l,m}', 1)",
    "SELECT lease_guard('l', 1)",
    "SELECT lease_check('l', 1)",
    "SELECT lease_info('l')",
    "SELECT fence_status()",
    "SELECT count(blocking_pids) FROM fence.leases",
];
const ADMIN: [&str; 3] =
    ["SELECT lease_revoke('l')", "SELECT lease_prune()", "SELECT fence_new_epoch()"];

/// Functions of the extension that PUBLIC may execute, and relations and schemas of which it has
/// any right at all.
pub fn public_rights(db: &Database) -> Result<Vec<String>> {
    let rows = db.connect()?.rows(
        "WITH member AS (
           SELECT d.classid, d.objid FROM pg_depend d JOIN pg_extension e ON e.oid = d.refobjid
            WHERE d.deptype = 'e' AND d.refclassid = 'pg_extension'::regclass AND e.extname = 'pg_fence')
         SELECT p.proname::text FROM member m JOIN pg_proc p ON p.oid = m.objid
          WHERE m.classid = 'pg_proc'::regclass AND has_function_privilege('public', p.oid, 'EXECUTE')
         UNION ALL
         SELECT c.relname FROM member m JOIN pg_class c ON c.oid = m.objid
          WHERE m.classid = 'pg_class'::regclass AND EXISTS (SELECT FROM aclexplode(c.relacl) a WHERE a.grantee = 0)
         UNION ALL
         SELECT 'schema ' || n.nspname FROM pg_namespace n
          WHERE n.nspname = 'fence' AND EXISTS (SELECT FROM aclexplode(n.nspacl) a WHERE a.grantee = 0)
         ORDER BY 1",
    )?;
    Ok(rows.into_iter().filter_map(|mut row| row.remove(0)).collect())
}

/// The functions that the README names for PUBLIC.
pub const PUBLIC: [&str; 4] = ["fence_audit", "fence_protect", "fence_unprotect", "fenced"];

fn all_refused(session: &mut Session, calls: &[&str]) -> Result<()> {
    for call in calls {
        session.refused(call, "42501")?;
    }
    Ok(())
}

/// Runs each call, whose outcome may be anything but a lack of rights.
fn all_allowed(session: &mut Session, calls: &[&str]) -> Result<()> {
    for call in calls {
        if let Err(fault) = session.try_rows(call) {
            ensure!(fault.sqlstate == "PF004", "{call}: {fault}");
        }
    }
    Ok(())
}

fn granted(db: &Database, what: &str) -> Result<String> {
    role_of(db, what, &[("worker", "")])
}

/// A role that was given these levels, each for a prefix.
pub fn role_of(db: &Database, what: &str, given: &[(&str, &str)]) -> Result<String> {
    let role = db.role(what)?;
    let mut owner = db.connect()?;
    for (level, prefix) in given {
        give(&mut owner, &role, level, prefix)?;
    }
    Ok(role)
}

/// Gives a role a level for the names that begin with a prefix; empty for all.
pub fn give(owner: &mut Session, role: &str, level: &str, prefix: &str) -> Result<()> {
    let prefix = if prefix.is_empty() { "NULL".to_owned() } else { literal(prefix) };
    owner.run(&format!("SELECT fence_grant('{role}', '{level}', {prefix})"))
}

/// Takes the lease and gives it back.
pub fn takes(session: &mut Session, name: &str) -> Result<()> {
    let token = session.acquire(name, "1 h")?;
    ensure!(session.release(name, token)?.is_some(), "{name}");
    Ok(())
}

pub fn takes_not(session: &mut Session, name: &str) -> Result<()> {
    not_given(session, &format!("SELECT lease_acquire({})", literal(name))).map(drop)
}

/// Whatever the session's role creates from now on is everybody's, and theirs.
pub fn gives_all_by_default(session: &mut Session, grantees: &[&str]) -> Result<()> {
    for grantee in [&["PUBLIC"], grantees].concat() {
        for kind in ["TABLES", "SEQUENCES", "FUNCTIONS", "SCHEMAS"] {
            session.run(&format!("ALTER DEFAULT PRIVILEGES GRANT ALL ON {kind} TO {grantee}"))?;
        }
    }
    Ok(())
}

/// The call is refused for its name alone.
pub fn not_given(session: &mut Session, call: &str) -> Result<Fault> {
    let fault = session.refused(call, "42501")?;
    ensure!(fault.message.ends_with(" is not for this role"), "{call}: {fault}");
    Ok(fault)
}

#[lab_test]
fn public_gets_the_trigger_and_its_helpers_and_nothing_else(lab: &Lab) -> Result<()> {
    let rights = public_rights(&lab.database()?)?;
    ensure!(rights == PUBLIC, "{rights:?}");
    Ok(())
}

#[lab_test]
fn fence_grant_lets_a_role_use_leases_and_with_admin_administer_them(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = db.role("app")?;
    let mut app = db.connect_as(&role)?;
    all_refused(&mut app, &BASE)?;
    all_refused(&mut app, &ADMIN)?;
    let mut owner = db.connect()?;
    give(&mut owner, &role, "worker", "")?;
    all_allowed(&mut app, &BASE)?;
    all_refused(&mut app, &ADMIN)?;
    let shown: String = app.one("SELECT role::text FROM lease_info('l')", &[])?;
    ensure!(shown == role);
    // Granted twice is granted; the lower level does not take the higher one away.
    for level in ["admin", "worker"] {
        give(&mut owner, &role, level, "")?;
        all_allowed(&mut app, &BASE)?;
        all_allowed(&mut app, &ADMIN)?;
    }
    Ok(())
}

#[lab_test]
fn fence_revoke_takes_all_of_it_back(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut owner = db.connect()?;
    let role = db.role("leaver")?;
    let quiet = "SELECT count(*) FROM pg_shdepend WHERE refobjid = $1::text::regrole \
                 AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database())";
    for level in ["worker", "admin"] {
        owner.run(&format!("SELECT fence_grant('{role}', '{level}')"))?;
        ensure!(owner.one::<i64>(quiet, &[&role])? > 0);
        owner.run(&format!("SELECT fence_revoke('{role}')"))?;
        ensure!(owner.one::<i64>(quiet, &[&role])? == 0, "something is left of {role}'s rights");
    }
    let mut leaver = db.connect_as(&role)?;
    all_refused(&mut leaver, &BASE)?;
    all_refused(&mut leaver, &ADMIN)?;
    owner.run(&format!("DROP ROLE {role}"))
}

#[lab_test]
fn only_the_owner_of_the_extension_grants(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = role_of(&db, "admin", &[("admin", "")])?;
    let friend = db.role("friend")?;
    let mut admin = db.connect_as(&role)?;
    admin.refused(&format!("SELECT fence_grant('{friend}')"), "42501")?;
    admin.refused(&format!("SELECT fence_revoke('{friend}')"), "42501")?;
    if !edition::is_lite() {
        // There a dump reads the marks, too.
        admin.refused(&format!("GRANT SELECT ON fence.server_start_seq TO {friend}"), "42501")?;
    }
    // What one may read oneself, one gives on with a mere warning that nothing was given.
    admin.run(&format!(
        "GRANT USAGE ON SCHEMA fence TO {friend}; GRANT SELECT ON fence.lease TO {friend}"
    ))?;
    let mut friend = db.connect_as(&friend)?;
    friend.refused("SELECT * FROM fence.lease", "42501")?;
    all_refused(&mut friend, &BASE)
}

#[lab_test]
fn a_lease_belongs_to_the_role_that_was_granted_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (a, b) = (granted(&db, "a")?, granted(&db, "b")?);
    let token: i64 = db.connect_as(&a)?.one("SELECT lease_acquire('job')", &[])?;
    let mut other = db.connect_as(&b)?;
    for call in ["lease_renew", "lease_release", "lease_guard"] {
        let fault = other.refused(&format!("SELECT {call}('job', {token})"), "42501")?;
        ensure!(fault.json()?["lease"] == "job", "{fault}");
    }
    for call in ["lease_renew_all", "lease_release_all"] {
        other.refused(&format!("SELECT {call}('{{job}}', {token})"), "42501")?;
    }
    // The same in a session that became the other role.
    db.connect()?.refused(&format!("SET ROLE {b}; SELECT lease_renew('job', {token})"), "42501")?;
    ensure!(other.one::<bool>("SELECT lease_check('job', $1)", &[&token])?, "it was harmed");
    ensure!(other.one::<i64>("SELECT last_token FROM fence_status()", &[])? == token);
    // Tokens order writers, so anyone's wrong guess is merely not a token of this lease.
    ensure!(other.one::<Option<i64>>("SELECT lease_renew('job', 99)", &[])?.is_none());
    Ok(())
}

#[lab_test]
fn who_may_only_administer_a_role_does_not_act_for_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let creator = granted(&db, "creator")?;
    let worker = format!("{creator}_worker");
    db.connect()?.run(&format!("ALTER ROLE {creator} CREATEROLE"))?;
    // From PostgreSQL 16 on the creator is a member, without the new role's rights and without the way to become it.
    let mut creating = db.connect_as(&creator)?;
    creating.run(&format!("CREATE ROLE {worker} LOGIN"))?;
    creating.refused(&format!("SET ROLE {worker}"), "42501")?;
    db.connect()?.run(&format!("SELECT fence_grant('{worker}')"))?;
    let token = db.connect_as(&worker)?.acquire("job", "1 h")?;
    for call in ["renew", "release", "guard"] {
        creating.refused(&format!("SELECT lease_{call}('job', {token})"), "42501")?;
    }
    Ok(())
}

#[lab_test(from = 16)]
fn either_way_of_being_a_member_is_enough_to_act_for_a_role(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (worker, friend) = (granted(&db, "worker")?, granted(&db, "friend")?);
    let token = db.connect_as(&worker)?.acquire("job", "1 h")?;
    let (mut superuser, mut session) = (db.connect()?, db.connect_as(&friend)?);
    for (way, is_enough) in [
        ("INHERIT TRUE, SET FALSE", true),
        ("INHERIT FALSE, SET TRUE", true),
        ("INHERIT FALSE, SET FALSE, ADMIN TRUE", false),
    ] {
        superuser.run(&format!("GRANT {worker} TO {friend} WITH {way}"))?;
        let guard = format!("SELECT lease_guard('job', {token})");
        match is_enough {
            true => session.run(&guard)?,
            false => session.refused(&guard, "42501").map(drop)?,
        }
        superuser.run(&format!("REVOKE {worker} FROM {friend}"))?;
        session.refused(&guard, "42501")?;
    }
    Ok(())
}

#[lab_test]
fn a_member_of_the_role_and_a_superuser_may_use_its_leases(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (team, member) = (granted(&db, "team")?, granted(&db, "member")?);
    let token: i64 = db.connect_as(&team)?.one("SELECT lease_acquire('job')", &[])?;
    db.connect()?.run(&format!("GRANT {team} TO {member}"))?;
    let mut session = db.connect_as(&member)?;
    let renewed: i64 = session.one("SELECT lease_renew('job', $1)", &[&token])?;
    ensure!(renewed > token);
    session.run(&format!("SELECT lease_guard('job', {renewed})"))?;
    ensure!(db.connect()?.one::<i64>("SELECT lease_renew('job', $1)", &[&token])? > renewed);
    ensure!(session.one::<Option<i64>>("SELECT lease_release('job', $1)", &[&token])?.is_some());
    // It does not work the other way round.
    let mine: i64 = session.one("SELECT lease_acquire('mine')", &[])?;
    db.connect_as(&team)?.refused(&format!("SELECT lease_renew('mine', {mine})"), "42501")?;
    Ok(())
}

#[lab_test]
fn a_bound_table_asks_for_the_role_of_the_lease(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (a, b) = (granted(&db, "a")?, granted(&db, "b")?);
    db.connect()?.run(&format!(
        "CREATE TABLE orders (id int PRIMARY KEY, total int);
         INSERT INTO orders VALUES (7, 0);
         SELECT fence_protect('orders', lease => 'order:{{id}}');
         GRANT ALL ON orders TO {a}, {b}"
    ))?;
    let token: i64 = db.connect_as(&a)?.one("SELECT lease_acquire('order:7')", &[])?;
    let write = format!("UPDATE orders SET total = total + 1, fence = {token}");
    db.connect_as(&b)?.refused(&write, "42501")?;
    db.connect_as(&a)?.run(&write)?;
    ensure!(db.connect()?.one::<i32>("SELECT total FROM orders", &[])? == 1);
    Ok(())
}

#[lab_test]
fn the_writers_of_a_fenced_table_need_no_grant(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let writer = db.role("writer")?;
    let mut owner = db.connect()?;
    owner.run(&format!(
        "CREATE TABLE orders (id int PRIMARY KEY, total int, fence bigint);
         INSERT INTO orders VALUES (7, 0);
         SELECT fence_protect('orders');
         GRANT ALL ON orders TO {writer}"
    ))?;
    let old: i64 = owner.one("SELECT lease_acquire('order:7')", &[])?;
    let new: i64 = owner.one("SELECT lease_renew('order:7', $1)", &[&old])?;
    let mut writer = db.connect_as(&writer)?;
    writer.run(&format!("UPDATE orders SET total = 1, fence = {new}"))?;
    writer.refused(&format!("UPDATE orders SET total = 2, fence = {old}"), "PF001")?;
    writer.refused("UPDATE orders SET total = 2", "PF002")?;
    writer.refused("UPDATE orders SET total = 2, fence = 777000001000000", "PF003")?;
    writer.refused("TRUNCATE orders", "PF005")?;
    writer.run(&format!("SET pg_fence.token = {new}"))?;
    Ok(())
}

#[lab_test]
fn putting_on_the_fence_asks_for_ownership(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (owner, other) = (db.role("owner")?, db.role("other")?);
    let mut admin = db.connect()?;
    admin.run(&format!("GRANT CREATE ON SCHEMA public TO {owner}"))?;
    let mut owner = db.connect_as(&owner)?;
    owner.run(&format!(
        "CREATE TABLE t (id int PRIMARY KEY); GRANT ALL ON t TO {other}; \
         SELECT fence_protect('t')"
    ))?;
    let mut other = db.connect_as(&other)?;
    other.refused("SELECT fence_protect('t', mode => 'monotonic')", "42501")?;
    other.refused("SELECT fence_unprotect('t')", "42501")?;
    owner.refused("UPDATE t SET id = 1; INSERT INTO t VALUES (1); UPDATE t SET id = 2", "PF002")?;
    owner.run("SELECT fence_audit('t')")?;
    owner.run("SELECT fence_unprotect('t')")
}

#[lab_test]
fn the_audit_shows_nobody_else_s_tables(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let other = db.role("other")?;
    db.connect()?.run(
        "CREATE TABLE secret (id int PRIMARY KEY);
         SELECT fence_protect('secret');
         ALTER TABLE secret DISABLE TRIGGER fenced",
    )?;
    let count = "SELECT count(*) FROM fence_audit() WHERE relation::text LIKE '%secret%'";
    ensure!(db.connect()?.one::<i64>(count, &[])? > 0, "the owner's audit says nothing of it");
    let mut other = Background::connect(&db.conninfo().user(&other))?;
    let rows = other.run("SELECT * FROM fence_audit()")?;
    ensure!(rows.is_empty(), "{rows:?}");
    Ok(())
}
