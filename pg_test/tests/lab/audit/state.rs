//! `fence_audit` on the state of pg_fence itself, which it looks at when asked for all tables: who may write it, whose it is,
//! a clock that stood ahead. The rest is in state.script.

use crate::support::holes::{AuditedDatabase, Hole, HOLE};
use pg_test::clock::Clocked;
use pg_test::{ensure, lab_test, Context, Database, Lab, Result, Session};

/// The answer of `fence_audit()` to a session: `relation|severity|finding`, and the remedy.
fn audit(session: &mut Session) -> Result<Vec<(String, String)>> {
    let rows = session.rows(
        "SELECT concat_ws('|', coalesce(relation::text, '-'), severity, finding), coalesce(remedy, '') FROM fence_audit()",
    )?;
    let text = |cell: Option<String>| cell.context("a finding with a NULL");
    rows.into_iter().map(|mut row| Ok((text(row.remove(0))?, text(row.remove(0))?))).collect()
}

/// Takes the lease away from its holder, and writes.
const ROB: &str =
    "DELETE FROM fence.lease; UPDATE orders SET v = 33, fence = lease_acquire('order:1')";

#[lab_test]
fn who_may_write_the_state_is_found(lab: &Lab) -> Result<()> {
    let hole = Hole { by_admin: true, write: ROB, after: "42501", ..HOLE };
    AuditedDatabase::new(lab)?.close_all(&[
        Hole {
            built: "GRANT DELETE ON fence.lease TO :writer",
            found_in_all: Some(&[
                "fence.lease|hole|:writer has DELETE on TABLE fence.lease, which is for pg_fence alone",
            ]),
            ..hole
        },
        Hole {
            built: "GRANT DELETE, SELECT, REFERENCES ON fence.lease TO PUBLIC",
            found_in_all: Some(&[
                "fence.lease|hole|PUBLIC has DELETE on TABLE fence.lease, which is for pg_fence alone",
                "fence.lease|notice|PUBLIC has REFERENCES on TABLE fence.lease, which is for pg_fence alone",
                "fence.lease|notice|PUBLIC has SELECT on TABLE fence.lease: leases are for the roles that fence_grant names",
            ]),
            ..hole
        },
        // A right passed on goes with that of the role that did.
        Hole {
            built: "GRANT DELETE ON fence.lease TO :owner WITH GRANT OPTION; \
                    SET ROLE :owner; GRANT DELETE ON fence.lease TO :writer; RESET ROLE",
            found_in_all: Some(&[
                "fence.lease|hole|:owner has DELETE on TABLE fence.lease, which is for pg_fence alone",
                "fence.lease|hole|:writer has DELETE on TABLE fence.lease, which is for pg_fence alone",
            ]),
            ..hole
        },
        Hole {
            built: "GRANT UPDATE (expires_at), SELECT ON fence.lease TO :writer",
            found_in_all: Some(&[
                "fence.lease|hole|:writer has UPDATE (expires_at) on TABLE fence.lease, which is for pg_fence alone",
            ]),
            write: "UPDATE fence.lease SET expires_at = now(); \
                    UPDATE orders SET v = 33, fence = lease_acquire('order:1')",
            ..hole
        },
        Hole {
            built: "GRANT INSERT, TRUNCATE, TRIGGER ON fence.lease TO :writer",
            found_in_all: Some(&[
                "fence.lease|hole|:writer has INSERT on TABLE fence.lease, which is for pg_fence alone",
                "fence.lease|hole|:writer has TRUNCATE on TABLE fence.lease, which is for pg_fence alone",
                "fence.lease|hole|:writer has TRIGGER on TABLE fence.lease, which is for pg_fence alone",
            ]),
            write: "TRUNCATE fence.lease; UPDATE orders SET v = 33, fence = lease_acquire('order:1')",
            ..hole
        },
        Hole {
            built: "GRANT CREATE ON SCHEMA fence TO :writer",
            found_in_all: Some(&[
                "orders|notice|:writer has CREATE on SCHEMA fence, which is for pg_fence alone",
            ]),
            write: "CREATE FUNCTION fence.max_column_value(regclass, smallint) RETURNS bigint RETURN 1",
            before: "no effect",
            ..hole
        },
    ])
}

#[lab_test]
fn who_may_draw_tokens_without_a_lease_is_found(lab: &Lab) -> Result<()> {
    let hole = Hole {
        fence: "",
        by_admin: true,
        write: "UPDATE orders SET v = 33, fence = nextval('fence.token_seq')",
        after: "42501",
        ..HOLE
    };
    AuditedDatabase::new(lab)?.close_all(&[
        Hole {
            built: "GRANT USAGE ON SEQUENCE fence.token_seq TO :writer",
            found_in_all: Some(&[
                "fence.token_seq|hole|:writer has USAGE on SEQUENCE fence.token_seq, which is for pg_fence alone",
            ]),
            ..hole
        },
        Hole {
            built: "GRANT UPDATE ON SEQUENCE fence.token_seq TO PUBLIC",
            found_in_all: Some(&[
                "fence.token_seq|hole|PUBLIC has UPDATE on SEQUENCE fence.token_seq, which is for pg_fence alone",
            ]),
            ..hole
        },
    ])
}

/// Members of that role are the same in all databases, and so this test has a server of its own.
#[lab_test]
fn who_may_write_all_data_is_found(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    let mut audited = AuditedDatabase::on(Database::with_extension(cluster.conninfo("postgres"))?)?;
    let found =
        "fence.lease|notice|:writer is a member of pg_write_all_data, and may write the state of pg_fence";
    for write in [
        "UPDATE orders SET v = 33, fence = nextval('fence.token_seq')",
        "UPDATE fence.lease SET expires_at = 'infinity'; UPDATE orders SET v = 33, fence = lease_renew('order:1', :new)",
    ] {
        audited.close_all(&[Hole {
            fence: "",
            by_admin: true,
            built: "GRANT pg_write_all_data TO :writer",
            found_in_all: Some(&[found]),
            write,
            after: "42501",
            ..HOLE
        }])?;
    }
    Ok(())
}

#[lab_test]
fn what_belongs_to_somebody_else_is_found(lab: &Lab) -> Result<()> {
    AuditedDatabase::new(lab)?.close_all(&[Hole {
        by_admin: true,
        built: "ALTER TABLE fence.lease OWNER TO :writer",
        found_in_all: Some(&[
            "fence.lease|hole|TABLE fence.lease belongs to :writer, not to the owner of pg_fence",
        ]),
        write: ROB,
        after: "42501",
        ..HOLE
    }])
}

#[lab_test]
fn a_lease_from_a_clock_that_stood_ahead_is_found(lab: &Lab) -> Result<()> {
    let clocked = Clocked::start(lab.builder(), &lab.prefix().new_dir("clock")?)?;
    let mut admin = clocked.cluster().connect("postgres")?;
    admin.run("CREATE EXTENSION pg_fence; SELECT lease_acquire('before', ttl => '1 day')")?;
    clocked.step(2 * 3600)?;
    admin.run("SELECT lease_release('over', lease_acquire('over', ttl => '1 min'))")?;
    admin.run("SELECT lease_acquire('job', ttl => '1 min')")?;
    let kept: i64 = admin.one("SELECT lease_acquire('kept', ttl => '1 min')", &[])?;
    ensure!(audit(&mut admin)?.is_empty());
    clocked.step(0)?;
    let said = |lease: &str| {
        format!(
            "fence.lease|notice|lease \"{lease}\" has more time left than its ttl: \
             the clock stood ahead when it was granted or renewed"
        )
    };
    let rows = audit(&mut admin)?;
    let wanted = ["job", "kept"].map(said);
    ensure!(rows.iter().map(|row| &row.0).eq(&wanted), "{rows:#?}");
    // A renewal counts from the clock as it is; or the remedies.
    admin.run(&format!("SELECT lease_renew('kept', {kept})"))?;
    admin.run(&rows[0].1)?;
    ensure!(audit(&mut admin)?.is_empty());
    ensure!(admin.one::<bool>("SELECT count(*) = 2 FROM fence.leases WHERE state = 'held'", &[])?);
    Ok(())
}
