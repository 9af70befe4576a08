//! A dump contains levels and name prefixes. Wherever it is restored, no role has more than before.

use crate::roles::{give, not_given, role_of};
use crate::support::dumps::{dump, restore};
use pg_test::{Calls, Harness, Result, ensure, harness_test};

const ROWS: &str = "SELECT role, prefix, level FROM fence.role_prefix ORDER BY 1, 2";

#[harness_test]
fn a_restored_database_has_the_same_roles_with_the_same_names(harness: &Harness) -> Result<()> {
    let db = harness.database()?;
    let role =
        role_of(&db, "tenant", &[("monitor", ""), ("worker", "a:"), ("worker", "it's \\ % é\n")])?;
    let admin = role_of(&db, "admin", &[("admin", "")])?;
    let file = dump(harness, harness.cluster(), db.name())?;
    for options in [&["-j", "2"] as &[&str], &["--no-owner", "--disable-triggers"]] {
        let other = harness.bare_database()?;
        restore(harness, harness.cluster(), other.name(), &file, options)?;
        let mut owner = other.connect()?;
        ensure!(owner.rows(ROWS)? == db.connect()?.rows(ROWS)?);
        let mut tenant = other.connect_as(&role)?;
        tenant.acquire("a:1", "1 h")?;
        tenant.acquire("it's \\ % é\n1", "1 h")?;
        not_given(&mut tenant, "SELECT lease_acquire('b:1')")?;
        ensure!(tenant.truth("SELECT fence.is_visible('b:1')")?);
        other.connect_as(&admin)?.run("SELECT lease_revoke('a:1')")?;
        // Sessions there notice a change as sessions here do.
        owner.run(&format!("SELECT fence_revoke('{role}', 'a:')"))?;
        not_given(&mut tenant, "SELECT lease_acquire('a:1')")?;
        drop(tenant);
        // Without the rows no role may use a name; without the privileges no role may call a function.
        let bare = harness.bare_database()?;
        restore(harness, harness.cluster(), bare.name(), &file, &["--no-privileges"])?;
        bare.connect_as(&role)?.refused("SELECT lease_acquire('a:1')", "42501")?;
        give(&mut bare.connect()?, &role, "worker", "b:")?;
        not_given(&mut bare.connect_as(&role)?, "SELECT lease_acquire('a:1')")?;
        let bare = harness.bare_database()?;
        restore(harness, harness.cluster(), bare.name(), &file, &["--schema-only"])?;
        not_given(&mut bare.connect_as(&role)?, "SELECT lease_acquire('a:1')")?;
    }
    Ok(())
}

#[harness_test]
fn a_dump_loads_where_its_roles_are_missing(harness: &Harness) -> Result<()> {
    let db = harness.database()?;
    let role = role_of(&db, "tenant", &[("worker", "a:")])?;
    let team = role_of(&db, "team", &[("worker", "team:")])?;
    db.connect_as(&role)?.acquire("a:1", "1 h")?;
    let file = dump(harness, harness.cluster(), db.name())?;
    let server = harness.builder().start()?;
    let mut owner = server.connect("postgres")?;
    owner.run(&format!("CREATE ROLE {team}"))?;
    owner.run("CREATE DATABASE other")?;
    // A grant to a missing role is an error, after which pg_restore continues.
    let conninfo = server.conninfo("other").to_string();
    let outcome = harness.run("pg_restore", &["-d", &conninfo, &file]);
    ensure!(
        outcome.is_err_and(|e| format!("{e:#}").contains(&format!("\"{role}\" does not exist")))
    );
    let mut owner = server.connect("other")?;
    ensure!(owner.rows(ROWS)?.len() == 2);
    let found = owner.rows(
        "SELECT finding, remedy FROM fence_audit() WHERE finding LIKE 'names that begin with%'",
    )?;
    ensure!(found.len() == 1, "{found:?}");
    // A role of that name is created: it has no privileges, and then those granted now, and its team's.
    owner.run(&format!("CREATE ROLE {role} LOGIN"))?;
    let mut tenant = server.conninfo("other").user(&role).connect()?;
    tenant.refused("SELECT lease_acquire('a:2')", "42501")?;
    give(&mut owner, &role, "worker", "b:")?;
    tenant.acquire("b:1", "1 h")?;
    not_given(&mut tenant, "SELECT lease_acquire('a:2')")?;
    // pg_restore runs all GRANTs on an object as one statement: with the missing role's grants the team's are lost,
    // too.
    owner.run(&format!("GRANT {team} TO {role}"))?;
    not_given(&mut tenant, "SELECT lease_acquire('team:1')")?;
    give(&mut owner, &team, "worker", "team:")?;
    tenant.acquire("team:1", "1 h")?;
    not_given(&mut tenant, "SELECT lease_acquire('a:2')").map(drop)
}
