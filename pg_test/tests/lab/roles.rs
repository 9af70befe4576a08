//! The rights of PUBLIC. The rights of others, and the owner of a lease: roles.script.

automod::dir!(pub "tests/lab/roles");

use pg_test::client::literal;
use pg_test::{ensure, lab_test, Database, Fault, Lab, Result, Session};

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
