//! Rows of the state that somebody else locks or writes without the leases' locks: a foreign key to them, and what waits
//! when the server stops. The rest is in unlocked_writes.script.

use crate::support::concurrency::with_time_enough;
use pg_test::process::PATIENCE;
use pg_test::{ensure, lab_test, Background, Calls, Database, Lab, Result, Shutdown};

/// A table whose rows lock rows of leases.
const CHILD: &str = "CREATE TABLE child (name text COLLATE \"C\", slot int,
                                         FOREIGN KEY (name, slot) REFERENCES fence.lease)";

/// A grant that is over, by an acquire with these arguments, whose row was locked by a foreign key while a renewal was
/// rolled back: it names a multixact as its deleter.
fn with_multixact(db: &Database, arguments: &str) -> Result<()> {
    let (mut writer, mut holder) = (db.connect()?, db.connect()?);
    with_time_enough(|seconds| {
        let acquire = format!("SELECT lease_acquire('job', ttl => '{seconds} s'{arguments})");
        let token = holder.granted(&acquire)?;
        writer.run("BEGIN; INSERT INTO child VALUES ('job', 0)")?;
        holder.run("BEGIN")?;
        let renewed = holder.renew("job", token)?;
        holder.run("ROLLBACK")?;
        writer.run("COMMIT; DELETE FROM child")?;
        holder.wait_expired("job")?;
        Ok(renewed)
    })?;
    let mask = "SELECT t_infomask & 4096 FROM heap_page_items(get_raw_page('fence.lease', 0)) WHERE lp_flags = 1";
    let multixacts: Vec<Option<String>> = holder.rows(mask)?.into_iter().flatten().collect();
    ensure!(multixacts.contains(&Some("4096".into())), "no row has a multixact: {multixacts:?}");
    Ok(())
}

#[lab_test]
fn a_multixact_of_a_foreign_key_keeps_nobody_from_a_lease(lab: &Lab) -> Result<()> {
    for (made, asked) in [
        ("", ""),
        ("", ", shared => true"),
        (", shared => true", ", shared => true"),
        (", shared => true", ""),
        (", slots => 2", ", slots => 2"),
        ("", ", wait => '10 s'"),
    ] {
        let db = lab.database()?;
        let mut session = db.connect()?;
        session.run(CHILD)?;
        session.run("CREATE EXTENSION pageinspect; SET statement_timeout = '30 s'")?;
        with_multixact(&db, made)?;
        let token =
            session.granted(&format!("SELECT lease_acquire('job'{asked}, ttl => '1 h')"))?;
        ensure!(session.speaks("job", token)?, "{made:?}, then {asked:?}");
    }
    Ok(())
}

#[lab_test]
fn a_row_with_a_multixact_is_shown_and_pruned(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run(CHILD)?;
    session.run("CREATE EXTENSION pageinspect; SET statement_timeout = '30 s'")?;
    with_multixact(&db, "")?;
    let state = session.text("SELECT state FROM lease_info('job')")?;
    ensure!(state.as_deref() == Some("expired"), "{state:?}");
    session.nothing("SELECT lease_revoke('job')")?;
    ensure!(session.granted("SELECT lease_prune('0')")? == 1);
    Ok(())
}

/// The write of the row of the held lease `job` in a transaction that stays open, and the step before: a load of
/// the row, an UPDATE and a DELETE by hand.
const UNLOCKED: [(&str, &str); 3] = [
    (
        "CREATE TABLE saved AS TABLE fence.lease; DELETE FROM fence.lease",
        "INSERT INTO fence.lease SELECT * FROM saved",
    ),
    ("SELECT 1", "UPDATE fence.lease SET metadata = '{}'"),
    ("SELECT 1", "DELETE FROM fence.lease"),
];

#[lab_test]
fn a_fast_shutdown_ends_such_a_wait(lab: &Lab) -> Result<()> {
    for (before, open) in UNLOCKED {
        let server = lab.builder().start()?;
        let db = Database::with_extension(server.conninfo("postgres"))?;
        let (mut admin, mut other) = (db.connect()?, db.connect()?);
        let token = admin.acquire("job", "1 h")?;
        admin.run(before)?;
        other.run(&format!("BEGIN; {open}"))?;
        let mut holders = Vec::new();
        for call in ["lease_renew", "lease_release"] {
            let mut holder = Background::connect(&db.conninfo())?;
            holder.send(&format!("SELECT {call}('job', {token})"))?;
            holder.wait_until_blocked()?;
            holders.push(holder);
        }
        server.stop(Shutdown::Fast)?;
        for holder in &mut holders {
            let outcome = holder.outcome(PATIENCE)?;
            ensure!(outcome.is_err(), "it goes on: {outcome:?}");
        }
        drop((admin, other, db));
    }
    Ok(())
}
