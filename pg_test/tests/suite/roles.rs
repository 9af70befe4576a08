//! Privileges, and what an unprivileged role might try.

automod::dir!(pub "tests/suite/roles");

use pg_test::client::literal;
use pg_test::{Database, Fault, Result, Session, ensure};

/// Creates a role with these levels, each for a prefix.
pub fn role_of(db: &Database, what: &str, given: &[(&str, &str)]) -> Result<String> {
    let role = db.role(what)?;
    let mut owner = db.connect()?;
    for (level, prefix) in given {
        give(&mut owner, &role, level, prefix)?;
    }
    Ok(role)
}

/// Grants a role a level for the names with a prefix. An empty prefix means all names.
pub fn give(owner: &mut Session, role: &str, level: &str, prefix: &str) -> Result<()> {
    let prefix = if prefix.is_empty() { "NULL".to_owned() } else { literal(prefix) };
    owner.run(&format!("SELECT fence_grant('{role}', '{level}', {prefix})"))
}

/// Checks that the call is refused only because of its name.
pub fn not_given(session: &mut Session, call: &str) -> Result<Fault> {
    let fault = session.refused(call, "42501")?;
    ensure!(fault.message.ends_with(" is not for this role"), "{call}: {fault}");
    Ok(fault)
}
