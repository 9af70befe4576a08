//! `fence_audit` on who may take which names; each remedy is run, and puts it right.

use crate::roles::{give, role_of};
use pg_test::{ensure, lab_test, Calls, Context, Lab, Result, Session};

/// What is said when asked for all tables: `relation|finding`, and the remedy.
fn audit(session: &mut Session) -> Result<Vec<(String, String)>> {
    let rows = session.rows(
        "SELECT coalesce(relation::text, '-') || '|' || finding, coalesce(remedy, '') FROM fence_audit()
          WHERE severity = 'notice'",
    )?;
    let text = |cell: Option<String>| cell.context("a finding with a NULL");
    rows.into_iter().map(|mut row| Ok((text(row.remove(0))?, text(row.remove(0))?))).collect()
}

/// These findings and no others; after their remedies there is none.
fn are_found(session: &mut Session, wanted: &[String]) -> Result<()> {
    let rows = audit(session)?;
    ensure!(rows.iter().map(|row| &row.0).eq(wanted), "the audit says {rows:#?}, not {wanted:#?}");
    for (_, remedy) in &rows {
        session.run(remedy)?;
    }
    let left = audit(session)?;
    ensure!(left.is_empty(), "after {rows:#?}\nthe audit says {left:#?}");
    Ok(())
}

#[lab_test]
fn a_role_that_may_block_another_s_table_is_found(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (writer, reader) = (db.role("writer")?, db.role("reader")?);
    let mut admin = db.connect()?;
    admin.run(&format!(
        "CREATE TABLE orders (id int PRIMARY KEY); CREATE TABLE one (id int PRIMARY KEY);
         SELECT fence_protect('orders', lease => 'order:{{id}}'), fence_protect('one', lease => 'one');
         GRANT INSERT ON orders TO {writer}; GRANT UPDATE (id) ON one TO {writer}; GRANT SELECT ON orders, one TO {reader}"
    ))?;
    let may = |table: &str, role: &str, lease: &str| {
        format!(
            "{table}|role \"{role}\" may take leases that this table is bound to (\"{lease}\"), and so keep out those \
             who write it; it does not write it itself"
        )
    };
    let of_orders = may("orders", &reader, "order:{id}");
    for (level, prefix, orders, one) in [
        ("worker", "", true, true),
        ("worker", "o", true, true),
        ("worker", "order:", true, false),
        ("worker", "order:7", true, false),
        ("worker", "one", false, true),
        // 'one' is one name: what begins with more is another.
        ("worker", "one:", false, false),
        ("worker", "Order:", false, false),
        ("worker", "x", false, false),
        ("adopter", "order:", true, false),
        ("monitor", "", false, false),
        ("admin", "", false, false),
    ] {
        for role in [&reader, &writer] {
            give(&mut admin, role, level, prefix)?;
        }
        let mut wanted = Vec::new();
        if one {
            wanted.push(may("one", &reader, "one"));
        }
        if orders {
            wanted.push(of_orders.clone());
        }
        are_found(&mut admin, &wanted).with_context(|| format!("{level} of {prefix:?}"))?;
        // Only that prefix was taken.
        for role in [&reader, &writer] {
            admin.run(&format!("SELECT fence_revoke('{role}')"))?;
        }
    }
    // A role whose name needs quotes, and a prefix that does.
    let odd = format!("{} \"Odd's\" %role", db.name());
    let quoted = format!("\"{}\"", odd.replace('"', "\"\""));
    let name = quoted.replace('\'', "''");
    admin.run(&format!(
        "CREATE ROLE {quoted}; CREATE TABLE \"T 1\" (id int PRIMARY KEY);
         SELECT fence_protect('\"T 1\"', lease => 'it''s % \\ \"{{id}}\"');
         SELECT fence_grant('{name}', prefix => 'it''s % \\ \"')"
    ))?;
    let wanted = may("\"T 1\"", &odd, "it's % \\ \"{id}\"");
    let outcome = are_found(&mut admin, &[wanted]);
    admin.run(&format!("SELECT fence_revoke('{name}')"))?;
    admin.run(&format!("DROP ROLE {quoted}"))?;
    outcome
}

#[lab_test]
fn names_of_a_role_that_is_gone_are_found(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = role_of(&db, "gone", &[("worker", "a:"), ("monitor", "it's % \\")])?;
    let mut admin = db.connect()?;
    ensure!(audit(&mut admin)?.is_empty());
    admin.run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"))?;
    let said = |prefix: &str| {
        format!(
            "fence.role_prefix|names that begin with \"{prefix}\" are for role \"{role}\", which is dropped or \
             renamed: a role that gets this name gets them"
        )
    };
    are_found(&mut admin, &[said("a:"), said("it's % \\")])?;
    ensure!(admin.one::<i64>("SELECT count(*) FROM fence.role_prefix", &[])? == 0);
    Ok(())
}

#[lab_test]
fn an_exporter_that_may_acquire_is_found(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    let odd = format!("{} Exporter", db.name());
    let outcome = (|| {
        admin.run(&format!("CREATE ROLE \"{odd}\" LOGIN; GRANT pg_monitor TO \"{odd}\""))?;
        admin.run(&format!("SELECT fence_grant('\"{odd}\"', 'monitor')"))?;
        ensure!(audit(&mut admin)?.is_empty(), "a monitor is as it should be");
        admin.run(&format!("SELECT fence_grant('\"{odd}\"', 'worker', 'a:')"))?;
        are_found(
            &mut admin,
            &[format!(
                "fence.role_prefix|role \"{odd}\" monitors the server, and may take leases whose names begin with \"a:\""
            )],
        )?;
        let mut exporter = db.connect_as(&odd)?;
        exporter
            .run("SELECT * FROM fence.leases; SELECT * FROM fence.stats; SELECT fence_status()")?;
        exporter.refused("SELECT lease_acquire('a:1')", "42501").map(drop)
    })();
    admin.run(&format!("SELECT fence_revoke('\"{odd}\"')"))?;
    admin.run(&format!("DROP ROLE \"{odd}\""))?;
    outcome
}

#[lab_test]
fn what_public_was_given_is_found(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut admin = db.connect()?;
    for (what, privilege, relation) in [
        ("FUNCTION public.lease_acquire(text,text,interval,interval,jsonb,boolean,integer,boolean,boolean)", "EXECUTE", "-"),
        ("FUNCTION public.lease_revoke(text)", "EXECUTE", "-"),
        ("FUNCTION fence.is_shown(text)", "EXECUTE", "-"),
        ("TABLE fence.leases", "SELECT", "fence.leases"),
        ("TABLE fence.role_prefix", "SELECT", "fence.role_prefix"),
        ("SEQUENCE fence.token_seq", "SELECT", "fence.token_seq"),
    ] {
        admin.run(&format!("GRANT {privilege} ON {what} TO PUBLIC"))?;
        let wanted = format!("{relation}|PUBLIC has {privilege} on {what}: leases are for the roles that fence_grant names");
        are_found(&mut admin, &[wanted]).with_context(|| what.to_owned())?;
    }
    Ok(())
}

#[lab_test]
fn a_trigger_that_does_not_tell_is_found(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = role_of(&db, "tenant", &[("worker", "a:")])?;
    let mut admin = db.connect()?;
    let mut tenant = db.connect_as(&role)?;
    for (change, what) in [
        ("DISABLE TRIGGER changed", "does not always fire"),
        ("DISABLE TRIGGER ALL", "does not always fire"),
        ("ENABLE TRIGGER changed", "does not always fire"),
        ("ENABLE REPLICA TRIGGER changed", "does not always fire"),
    ] {
        admin.run(&format!("ALTER TABLE fence.role_prefix {change}"))?;
        are_found(&mut admin, &[said(what)]).with_context(|| change.to_owned())?;
    }
    admin.run(
        "ALTER EXTENSION pg_fence DROP FUNCTION fence.role_prefix_changed();
         DROP TRIGGER changed ON fence.role_prefix;
         ALTER EXTENSION pg_fence ADD FUNCTION fence.role_prefix_changed()",
    )?;
    // Whether an open session goes on with "a:" now is chance: any of the server's own messages
    // may empty what it remembers. After the remedy it is not chance.
    tenant.acquire("a:1", "1 h")?;
    admin.run(&format!("SELECT fence_revoke('{role}', 'a:')"))?;
    are_found(&mut admin, &[said("is gone")])?;
    give(&mut admin, &role, "worker", "b:")?;
    tenant.acquire("b:1", "1 h")?;
    admin.run(&format!("SELECT fence_revoke('{role}', 'b:')"))?;
    tenant.refused("SELECT lease_acquire('b:2')", "42501").map(drop)
}

fn said(what: &str) -> String {
    format!(
        "fence.role_prefix|trigger \"changed\" {what}: a prefix that is taken away may go on counting in sessions that are open"
    )
}

#[lab_test]
fn who_may_not_read_the_names_is_not_told_of_them(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let gone = role_of(&db, "gone", &[("worker", "secret:")])?;
    let mut admin = db.connect()?;
    admin.run(&format!("DROP OWNED BY {gone}; DROP ROLE {gone}"))?;
    for (level, told) in [("monitor", 0), ("worker", 0), ("adopter", 0), ("admin", 1)] {
        let mut session = db.connect_as(&role_of(&db, level, &[(level, "")])?)?;
        let rows =
            session.rows("SELECT finding FROM fence_audit() WHERE finding LIKE '%secret%'")?;
        ensure!(rows.len() == told, "{level}: {rows:?}");
    }
    ensure!(db
        .connect_as(&db.role("none")?)?
        .rows("SELECT finding FROM fence_audit()")?
        .is_empty());
    Ok(())
}
