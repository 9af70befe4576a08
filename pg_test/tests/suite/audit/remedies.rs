//! The remedies of `fence_audit` for roles, columns and leases whose names contain all that can end a quoted string.
//! (The other tests of this folder give such names to other objects before they run the remedies.)

use pg_test::client::{literal, set_if_known};
use pg_test::script::bypass::{WORST, identifier, statements};
use pg_test::{Database, Harness, Result, Session, ensure, harness_test};

/// Returns the findings and the statements of each remedy. The remedies, run one after the other, must leave no
/// finding.
fn put_right(admin: &mut Session, how_many: usize) -> Result<()> {
    let rows = admin
        .rows("SELECT finding, remedy FROM fence_audit() WHERE finding NOT LIKE 'monotonic: a%'")?;
    ensure!(rows.len() == how_many, "not {how_many}: {rows:#?}");
    for row in &rows {
        if let Some(remedy) = &row[1] {
            let count = statements(admin, remedy)?;
            ensure!(count == 1, "{count} statements, not one: {row:#?}");
        }
    }
    let heard = admin.rows("SELECT * FROM pg_listening_channels()")?;
    ensure!(heard.is_empty(), "part of a name was run: {rows:#?}");
    let left = admin.rows("SELECT finding FROM fence_audit() WHERE remedy IS NOT NULL")?;
    ensure!(left.is_empty(), "after {rows:#?}\nthe audit says {left:#?}");
    Ok(())
}

#[harness_test]
fn a_role_is_named_in_a_remedy_and_nothing_of_its_name_is_run(harness: &Harness) -> Result<()> {
    for setting in ["on", "off"] {
        let db = harness.database()?;
        let mut admin = db.connect()?;
        let mut name = format!("{}{WORST}", db.name());
        if harness.install_dir().major_number() >= 19 {
            // From PostgreSQL 19 on a role's name contains no line feed.
            name = name.replace('\n', "");
        }
        let role = identifier(&name);
        admin.run(&format!("CREATE ROLE {role}"))?;
        admin.run(&set_if_known(&format!("standard_conforming_strings = {setting}")))?;
        let outcome = is_put_right(&db, &mut admin, &role);
        admin.run(&format!(
            "RESET ROLE; REASSIGN OWNED BY {role} TO postgres; DROP OWNED BY {role}"
        ))?;
        admin.run(&format!("DROP ROLE {role}"))?;
        outcome?;
    }
    Ok(())
}

fn is_put_right(db: &Database, admin: &mut Session, role: &str) -> Result<()> {
    let (text, name) = (literal(role), literal(&format!("x{WORST}")));
    admin.run(&format!(
        "CREATE TABLE orders (id int PRIMARY KEY); GRANT CREATE ON SCHEMA public TO {role};
         SELECT fence_protect('orders', {name}, lease => {name}), fence_grant({text}, prefix => {name});
         GRANT pg_monitor TO {role}; GRANT INSERT ON fence.lease TO {role};
         GRANT TRUNCATE, TRIGGER ON orders TO {role}; ALTER SEQUENCE fence.token_seq OWNER TO {role};
         ALTER ROLE {role} IN DATABASE {} SET pg_fence.token = '7'",
        db.name()
    ))?;
    put_right(admin, 7)?;
    // A lease and two prefixes of a dropped role of that name.
    admin.run(&format!("SELECT fence_grant({text}, prefix => {name}); SET ROLE {role}"))?;
    admin.run(&format!(
        "SELECT lease_acquire({name}); RESET ROLE; ALTER ROLE {role} RENAME TO gone"
    ))?;
    let outcome = put_right(admin, 3);
    admin.run(&format!("ALTER ROLE gone RENAME TO {role}"))?;
    outcome
}
