//! `fence_audit` on settings that reach a fenced table from outside. Roles and parameters belong to the
//! whole server, and so these tests have one of their own.

use crate::support::holes::{AuditedDatabase, Hole, BOUND, HOLE, LANDS};
use pg_test::{ensure, lab_test, Cluster, Database, Lab, Result};

fn audited(lab: &Lab) -> Result<(Cluster, AuditedDatabase)> {
    let cluster = lab.builder().start()?;
    let audited = AuditedDatabase::on(Database::with_extension(cluster.conninfo("postgres"))?)?;
    Ok((cluster, audited))
}

/// A write that presents nothing of its own.
const BARE: Hole<'static> =
    Hole { by_admin: true, write: "UPDATE orders SET v = 33", after: "PF002", ..HOLE };

#[lab_test]
fn a_token_that_is_set_for_others_is_found(lab: &Lab) -> Result<()> {
    let (_cluster, mut audited) = audited(lab)?;
    for whom in
        ["ROLE :writer", "ROLE :writer IN DATABASE :database", "DATABASE :database", "ROLE ALL"]
    {
        let found = format!(
            "orders|hole|pg_fence.token is set for {whom}: who has no token presents that one"
        );
        audited.close_all(&[Hole {
            built: &format!("ALTER {whom} SET pg_fence.token = ':new'"),
            found: &[&found],
            ..BARE
        }])?;
    }
    Ok(())
}

#[lab_test]
fn a_function_that_brings_its_own_token_is_found(lab: &Lab) -> Result<()> {
    let mut audited = AuditedDatabase::new(lab)?;
    audited.close_all(&[
        Hole {
            by_admin: false,
            built:
                "CREATE FUNCTION pay(int) RETURNS void LANGUAGE sql SET pg_fence.token = ':new' \
                        AS 'UPDATE orders SET v = $1'",
            found: &["orders|hole|pg_fence.token is set for FUNCTION s.pay(integer): \
                      who has no token presents that one"],
            write: "SELECT pay(33)",
            ..BARE
        },
        Hole {
            by_admin: false,
            built: "CREATE PROCEDURE \"Pay 'em\"() LANGUAGE sql SET pg_fence.token = ':new' \
                        AS 'UPDATE orders SET v = 33'",
            found: &["orders|hole|pg_fence.token is set for PROCEDURE s.\"Pay 'em\"(): \
                      who has no token presents that one"],
            write: "CALL \"Pay 'em\"()",
            ..BARE
        },
        Hole {
            built: "CREATE FUNCTION pay() RETURNS void LANGUAGE sql SECURITY DEFINER \
                        SET session_replication_role = replica AS 'UPDATE s.orders SET v = 33'",
            found: &["orders|hole|session_replication_role is set for FUNCTION s.pay(): \
                      triggers that are not ENABLE ALWAYS do not fire"],
            write: "SELECT pay()",
            ..BARE
        },
    ])?;
    // One that only makes sure that none is set is no hole.
    audited.stage(HOLE.table, BOUND)?;
    audited.owner.run(
        "CREATE FUNCTION pay() RETURNS int LANGUAGE sql SET pg_fence.token = '' AS 'SELECT 1'",
    )?;
    let rows = audited.audit("'orders'")?;
    ensure!(rows.is_empty(), "{rows:?}");
    Ok(())
}

#[lab_test]
fn triggers_switched_off_are_found(lab: &Lab) -> Result<()> {
    let (_cluster, mut audited) = audited(lab)?;
    audited.close_all(&[
        Hole {
            built: "ALTER ROLE :writer SET session_replication_role = replica",
            found: &["orders|hole|session_replication_role is set for ROLE :writer: \
                      triggers that are not ENABLE ALWAYS do not fire"],
            ..BARE
        },
        Hole {
            built: "GRANT SET ON PARAMETER session_replication_role TO :writer",
            found: &["orders|hole|:writer may set session_replication_role, \
                      under which fences judge little or nothing"],
            write: "SET session_replication_role = replica; UPDATE orders SET v = 33",
            after: "42501",
            ..BARE
        },
        // Even a trigger that fires then does not ask for the lease.
        Hole {
            fence: ", lease => 'order:{id}', always => true",
            built: "GRANT SET ON PARAMETER session_replication_role TO PUBLIC",
            found: &["orders|hole|PUBLIC may set session_replication_role, \
                      under which fences judge little or nothing"],
            write: "SET session_replication_role = replica; \
                    UPDATE orders SET v = 33, fence = lease_acquire('another')",
            after: "42501",
            ..BARE
        },
        Hole {
            built: "ALTER ROLE :writer SET session_replication_role = local",
            found: &[],
            before: "PF002",
            ..BARE
        },
    ])
}

#[lab_test]
fn a_setting_of_the_whole_server_is_found(lab: &Lab) -> Result<()> {
    // The tokens are those that will have been drawn there.
    for (name, value, finding) in [
        ("pg_fence.token", "777000000000003", "who has no token presents that one"),
        ("session_replication_role", "replica", "triggers that are not ENABLE ALWAYS do not fire"),
    ] {
        let cluster = lab.builder().set(name, value).start()?;
        let mut audited =
            AuditedDatabase::on(Database::with_extension(cluster.conninfo("postgres"))?)?;
        audited.admin.run("SELECT setval('fence.token_seq', 777000000000000)")?;
        audited.stage(HOLE.table, BOUND)?;
        audited.comes_to("UPDATE orders SET v = 33", LANDS)?;
        let rows = audited.audit("'orders'")?;
        ensure!(rows.len() == 1, "{rows:?}");
        ensure!(
            rows[0].0 == format!("orders|hole|{name} is set for the whole server: {finding}"),
            "{rows:?}"
        );
        audited.admin.run(&rows[0].1)?;
        let rows = audited.audit("'orders'")?;
        ensure!(rows.is_empty(), "{rows:?}");
        audited.comes_to("UPDATE orders SET v = 33", "PF002")?;
    }
    Ok(())
}

#[lab_test]
fn what_is_set_for_another_database_is_not(lab: &Lab) -> Result<()> {
    let (_cluster, mut audited) = audited(lab)?;
    audited.close_all(&[Hole {
        built: "ALTER DATABASE postgres SET pg_fence.token = '7'; \
                ALTER ROLE :writer IN DATABASE postgres SET pg_fence.token = '7'; \
                ALTER ROLE :writer SET pg_fence.token = ''",
        found: &[],
        before: "PF002",
        ..BARE
    }])
}
