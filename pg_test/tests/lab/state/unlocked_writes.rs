//! Rows of the state that somebody else locks or writes without the leases' locks: a foreign key to them, a dump that is
//! just being loaded, an UPDATE or DELETE by hand. No call spins, a try does not wait, and what waits can be ended.

use crate::support::concurrency::{token_of, with_time_enough};
use pg_test::process::PATIENCE;
use pg_test::{ensure, lab_test, Background, Calls, Database, Lab, Result, Session, Shutdown};

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

/// What is done to the row of the held lease `job` in a transaction that stays open, and what undoes it.
struct Unlocked {
    what: &'static str,
    /// Before, with the row as it is.
    before: &'static str,
    open: &'static str,
    /// The lease is held once this is committed.
    committed_is_held: bool,
    /// … and once it is rolled back.
    undone_is_held: bool,
}

const UNLOCKED: [Unlocked; 3] = [
    Unlocked {
        what: "a load of its row",
        before: "CREATE TABLE saved AS TABLE fence.lease; DELETE FROM fence.lease",
        open: "INSERT INTO fence.lease SELECT * FROM saved",
        committed_is_held: true,
        undone_is_held: false,
    },
    Unlocked {
        what: "an UPDATE by hand",
        before: "",
        open: "UPDATE fence.lease SET metadata = '{}'",
        committed_is_held: true,
        undone_is_held: true,
    },
    Unlocked {
        what: "a DELETE by hand",
        before: "",
        open: "DELETE FROM fence.lease",
        committed_is_held: false,
        undone_is_held: true,
    },
];

impl Unlocked {
    /// The lease is held under this token, and somebody is in the middle of that.
    fn begun(&self, admin: &mut Session, other: &mut Session) -> Result<i64> {
        let token = admin.acquire("job", "1 h")?;
        admin.run(&format!("{}; SELECT 1", self.before))?;
        other.run(&format!("BEGIN; {}", self.open))?;
        Ok(token)
    }
}

/// The calls of a holder that wait for who has written its row.
fn holders_calls(token: i64) -> [String; 4] {
    [
        format!("SELECT lease_renew('job', {token})"),
        format!("SELECT lease_release('job', {token})"),
        format!("SELECT lease_renew_all('{{job}}', {token})"),
        "SELECT lease_revoke('job')".to_owned(),
    ]
}

#[lab_test]
fn a_try_does_not_wait_for_who_writes_without_a_lock(lab: &Lab) -> Result<()> {
    for unlocked in UNLOCKED {
        let db = lab.database()?;
        let (mut admin, mut other, mut probe) = (db.connect()?, db.connect()?, db.connect()?);
        unlocked.begun(&mut admin, &mut other)?;
        probe.run("SET statement_timeout = '30 s'")?;
        for arguments in ["", ", shared => true", ", slots => 1"] {
            let sql = format!("SELECT lease_acquire('job'{arguments})");
            ensure!(probe.token(&sql)?.is_none(), "{}: {sql}", unlocked.what);
        }
        ensure!(probe.token("SELECT lease_acquire_all('{job,other}')")?.is_none());
        other.run("ROLLBACK")?;
        ensure!(probe.token("SELECT lease_acquire('job')")?.is_none() == unlocked.undone_is_held);
    }
    // A name that was adopted comes back in a load, too.
    let db = lab.database()?;
    let (mut admin, mut other) = (db.connect()?, db.connect()?);
    admin.run("SELECT lease_adopt('job', 5)")?;
    let load = &UNLOCKED[0];
    admin.run(load.before)?;
    other.run(&format!("BEGIN; {}", load.open))?;
    admin.run("SET statement_timeout = '30 s'")?;
    admin.nothing("SELECT lease_adopt('job', 7)")?;
    other.run("COMMIT")?;
    ensure!(admin.granted("SELECT lease_adopt('job', 7)")? == 7);
    Ok(())
}

#[lab_test]
fn a_holder_waits_for_who_writes_without_a_lock_and_then_has_its_answer(lab: &Lab) -> Result<()> {
    for unlocked in UNLOCKED {
        for n in 0..4 {
            for (end, is_held) in
                [("COMMIT", unlocked.committed_is_held), ("ROLLBACK", unlocked.undone_is_held)]
            {
                let db = lab.database()?;
                let (mut admin, mut other) = (db.connect()?, db.connect()?);
                let token = unlocked.begun(&mut admin, &mut other)?;
                let call = &holders_calls(token)[n];
                let mut holder = Background::connect(&db.conninfo())?;
                holder.send(call)?;
                holder.wait_until_blocked()?;
                ensure!(holder.blocked_by()? == [other.pid()], "{}: {call}", unlocked.what);
                other.run(end)?;
                let rows = holder.rows()?;
                ensure!(
                    rows[0][0].is_some() == is_held,
                    "{}, {end}: {call}: {rows:?}",
                    unlocked.what
                );
            }
        }
    }
    Ok(())
}

/// The session has ended, and its statement with it.
fn ends(session: &mut Background) -> Result<()> {
    let outcome = session.outcome(PATIENCE)?;
    ensure!(outcome.is_err(), "it goes on: {outcome:?}");
    Ok(())
}

#[lab_test]
fn such_a_wait_ends_by_cancel_timeouts_and_termination(lab: &Lab) -> Result<()> {
    for unlocked in UNLOCKED {
        let db = lab.database()?;
        let (mut admin, mut other) = (db.connect()?, db.connect()?);
        let token = unlocked.begun(&mut admin, &mut other)?;
        for call in holders_calls(token) {
            let begun = |set: &str| -> Result<Background> {
                let mut holder = Background::connect(&db.conninfo())?;
                holder.run(set)?;
                holder.send(&call)?;
                Ok(holder)
            };
            let mut holder = begun("SELECT 1")?;
            holder.wait_until_blocked()?;
            holder.cancel()?;
            holder.refused("57014")?;
            begun("SET statement_timeout = '300 ms'")?.refused("57014")?;
            begun("SET lock_timeout = '300 ms'")?.refused("55P03")?;
            let mut holder = begun("SELECT 1")?;
            holder.wait_until_blocked()?;
            holder.terminate()?;
            ends(&mut holder)?;
        }
        // Whoever waits in the queue for a lease that is being loaded or changed leaves it as usual.
        let mut waiter = Background::connect(&db.conninfo())?;
        waiter.send("SELECT lease_acquire('job', wait => '10 min')")?;
        waiter.wait_until_blocked()?;
        waiter.cancel()?;
        waiter.refused("57014")?;
        other.run("ROLLBACK")?;
    }
    Ok(())
}

#[lab_test]
fn a_fast_shutdown_ends_such_a_wait(lab: &Lab) -> Result<()> {
    for unlocked in UNLOCKED {
        let server = lab.builder().start()?;
        let db = Database::with_extension(server.conninfo("postgres"))?;
        let (mut admin, mut other) = (db.connect()?, db.connect()?);
        let token = unlocked.begun(&mut admin, &mut other)?;
        let mut holders = Vec::new();
        for call in &holders_calls(token)[..2] {
            let mut holder = Background::connect(&db.conninfo())?;
            holder.send(call)?;
            holder.wait_until_blocked()?;
            holders.push(holder);
        }
        server.stop(Shutdown::Fast)?;
        holders.iter_mut().try_for_each(ends)?;
        drop((admin, other, db));
    }
    Ok(())
}

#[lab_test]
fn a_waiter_is_granted_what_a_load_has_not_brought(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut admin, mut other) = (db.connect()?, db.connect()?);
    UNLOCKED[0].begun(&mut admin, &mut other)?;
    let mut waiter = Background::connect(&db.conninfo())?;
    waiter.send("SELECT lease_acquire('job', wait => '10 min')")?;
    waiter.wait_until_blocked()?;
    other.run("ROLLBACK")?;
    token_of(&mut waiter)?;
    Ok(())
}
