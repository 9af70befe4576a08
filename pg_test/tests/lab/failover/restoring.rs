//! Rows with fences, and the state, restored in the ways that the page on operations names.

use crate::failover::restores::restore;
use pg_test::{ensure, lab_test, Calls, Database, Lab, Result, Session};
use std::fs;

const TABLES: [&str; 3] = ["managed", "bound", "plain"];

/// Partitioned tables of each kind, whose rows have fences; a worker of some names; a lease.
fn source(lab: &Lab) -> Result<(Database, String)> {
    let db = lab.database()?;
    let worker = db.role("worker")?;
    let mut session = db.connect()?;
    let token = session.acquire("all", "1 hour")?;
    for (table, arguments) in TABLES.iter().zip(["mode => 'managed'", "lease => 'all'", ""]) {
        session.run(&format!(
            "CREATE TABLE {table} (id int PRIMARY KEY, v text, fence bigint) PARTITION BY HASH (id);
             CREATE TABLE {table}_0 PARTITION OF {table} FOR VALUES WITH (MODULUS 3, REMAINDER 0);
             CREATE TABLE {table}_1 PARTITION OF {table} FOR VALUES WITH (MODULUS 3, REMAINDER 1);
             CREATE TABLE {table}_2 PARTITION OF {table} FOR VALUES WITH (MODULUS 3, REMAINDER 2);
             INSERT INTO {table} SELECT n, repeat('x', 100), {token} FROM generate_series(1, 6000) AS n;
             SELECT fence_protect('{table}'{}{arguments})",
            if arguments.is_empty() { "" } else { ", " }
        ))?;
    }
    session.run(&format!("SELECT fence_grant('{worker}', prefix => 'mine:')"))?;
    Ok((db, worker))
}

/// Dumps it through a pipe, so that the dump does not say where in it the data of a table begins.
fn dump_through_a_pipe(lab: &Lab, db: &Database) -> Result<String> {
    let file = lab.prefix().new_dir("dump")?.join("db.dump");
    let mut dump = lab.prefix().command("pg_dump")?;
    let output = dump.args(["-Fc", "-d", &db.conninfo().to_string()]).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    fs::write(&file, output.stdout)?;
    Ok(file.to_string_lossy().into_owned())
}

/// The number of rows, and of those that have their fence.
fn rows(session: &mut Session) -> Result<Vec<String>> {
    let count = |table: &&str| {
        let query = format!("SELECT count(*) || ' ' || count(fence) FROM {table}");
        Ok(session.text(&query)?.unwrap_or_default())
    };
    TABLES.iter().map(count).collect()
}

const ALL: [&str; 3] = ["6000 6000"; 3];

#[lab_test]
fn a_dump_is_restored_in_jobs_by_its_sections(lab: &Lab) -> Result<()> {
    let (db, _) = source(lab)?;
    let file = dump_through_a_pipe(lab, &db)?;
    let restored = lab.bare_database()?;
    for section in
        [&["--section=pre-data"][..], &["--section=data", "-j", "4"], &["--section=post-data"]]
    {
        restore(lab, lab.cluster(), restored.name(), &file, section)?;
    }
    let mut session = restored.connect()?;
    ensure!(rows(&mut session)? == ALL, "{:?}", rows(&mut session)?);
    for table in TABLES {
        session.refused(&format!("UPDATE {table} SET v = 'y' WHERE id = 1"), "PF002")?;
    }
    // In one step, a root's trigger may be there before its partitions' rows: then pg_restore says so.
    for _ in 0..3 {
        let at_once = lab.bare_database()?;
        let outcome = restore(lab, lab.cluster(), at_once.name(), &file, &["-j", "4"]);
        ensure!(
            outcome.is_err() || rows(&mut at_once.connect()?)? == ALL,
            "fences were lost in silence"
        );
    }
    Ok(())
}

#[lab_test]
fn rows_with_fences_do_not_lose_them_where_the_triggers_fire(lab: &Lab) -> Result<()> {
    let (db, _) = source(lab)?;
    let file = dump_through_a_pipe(lab, &db)?;
    let restored = lab.bare_database()?;
    let name = restored.name();
    restore(lab, lab.cluster(), name, &file, &["--section=pre-data", "--section=post-data"])?;
    let data = ["--data-only", "-n", "public"];
    let mut session = restored.connect()?;
    ensure!(restore(lab, lab.cluster(), name, &file, &data).is_err());
    ensure!(rows(&mut session)? != ALL && rows(&mut session)?[0] == "0 0", "they were loaded");
    let mut session = restored.connect()?;
    session.run("TRUNCATE fence.lease; SELECT fence_unprotect('plain'); TRUNCATE plain; SELECT fence_protect('plain')")?;
    let off = [&data[..], &["--disable-triggers"]].concat();
    restore(lab, lab.cluster(), name, &file, &off)?;
    ensure!(rows(&mut session)? == ALL, "{:?}", rows(&mut session)?);
    Ok(())
}

#[lab_test]
fn what_is_restored_in_part_is_as_the_page_says(lab: &Lab) -> Result<()> {
    let (db, worker) = source(lab)?;
    let file = dump_through_a_pipe(lab, &db)?;
    // The schema alone: fences and rights, but no names.
    let schema = lab.bare_database()?;
    restore(lab, lab.cluster(), schema.name(), &file, &["--schema-only"])?;
    let mut session = schema.connect()?;
    session.refused("INSERT INTO bound VALUES (1, '', NULL)", "PF002")?;
    let mut app = schema.connect_as(&worker)?;
    app.refused("SELECT lease_acquire('mine:1')", "42501")?;
    session.run(&format!("SELECT fence_grant('{worker}', prefix => 'mine:')"))?;
    app.granted("SELECT lease_acquire('mine:1')")?;

    // Some tables, or one partition: rows with their fences, but no triggers.
    let some = lab.database()?;
    let mut session = some.connect()?;
    let options = ["-t", "plain_0", "-t", "managed_1"];
    restore(lab, lab.cluster(), some.name(), &file, &options)?;
    for table in ["plain_0", "managed_1"] {
        let query = format!("SELECT count(*) > 1000 AND count(*) = count(fence) FROM {table}");
        ensure!(session.truth(&query)?, "{table}");
        let triggers =
            format!("SELECT count(*) FROM pg_trigger WHERE tgrelid = '{table}'::regclass");
        ensure!(session.one::<i64>(&triggers, &[])? == 0, "{table}");
        session.run(&format!("SELECT fence_protect('{table}')"))?;
        session.refused(&format!("UPDATE {table} SET v = 'y'"), "PF002")?;
    }

    // A partition's rows, into the table that is fenced.
    restore(
        lab,
        lab.cluster(),
        schema.name(),
        &file,
        &["--data-only", "--disable-triggers", "-t", "managed_1"],
    )?;
    let mut session = schema.connect()?;
    ensure!(session.truth("SELECT count(*) > 1000 AND count(*) = count(fence) FROM managed")?);
    Ok(())
}

#[lab_test]
fn a_column_added_to_the_state_is_told_of_for_no_dump_loads_with_it(lab: &Lab) -> Result<()> {
    let (db, _) = source(lab)?;
    let mut session = db.connect()?;
    session.run("ALTER TABLE fence.lease ADD \"a note\" text")?;
    let file = dump_through_a_pipe(lab, &db)?;
    let leases = "SELECT count(*) FROM fence.lease";
    let restored = lab.bare_database()?;
    ensure!(restore(lab, lab.cluster(), restored.name(), &file, &[]).is_err());
    let added = lab.bare_database()?;
    restore(lab, lab.cluster(), added.name(), &file, &["--section=pre-data"])?;
    added.connect()?.run("ALTER TABLE fence.lease ADD \"a note\" text")?;
    restore(lab, lab.cluster(), added.name(), &file, &["--section=data", "--section=post-data"])?;
    ensure!(added.connect()?.one::<i64>(leases, &[])? == 1);
    // The audit's remedy takes it away.
    let remedy =
        "SELECT remedy FROM fence_audit() WHERE finding LIKE '%column \"a note\" was added%'";
    let remedy = session.text(remedy)?.unwrap_or_default();
    session.run(&remedy)?;
    let file = dump_through_a_pipe(lab, &db)?;
    let restored = lab.bare_database()?;
    restore(lab, lab.cluster(), restored.name(), &file, &[])?;
    ensure!(restored.connect()?.one::<i64>(leases, &[])? == 1);
    Ok(())
}
