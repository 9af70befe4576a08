//! A predecessor whose commit waits while a snapshot is taken, and changes of leases by many transactions that keep theirs.
//! The rest is in snapshots.script.

use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Background, Calls, Lab, Result, Session};

const KEEPING: [&str; 2] = ["REPEATABLE READ", "SERIALIZABLE"];

/// Rows that are bound to their leases: of each, one that the predecessor writes, and one for the transaction that relies on it then.
const TABLE: &str =
    "CREATE TABLE t (lease text, part int, v int DEFAULT 0, PRIMARY KEY (lease, part));
    SELECT fence_protect('t', lease => '{lease}', events => 'update')";

fn add_rows(session: &mut Session, lease: &str) -> Result<()> {
    session.run(&format!("INSERT INTO t VALUES ('{lease}', 1), ('{lease}', 2)"))
}

/// The ways to rely on a grant by one of its tokens.
fn relies(lease: &str, token: i64) -> [String; 2] {
    let update =
        format!("UPDATE t SET v = 7, fence = {token} WHERE (lease, part) = ('{lease}', 2)");
    [format!("SELECT lease_guard('{lease}', {token})"), update]
}

/// Begins a transaction whose snapshot is taken now; what the predecessor has written, as it sees it.
fn begin(inside: &mut Session, level: &str, lease: &str) -> Result<i64> {
    inside.run(&format!("BEGIN ISOLATION LEVEL {level}"))?;
    inside.granted(&format!("SELECT v FROM t WHERE (lease, part) = ('{lease}', 1)"))
}

/// Relying on the grant is refused with that SQLSTATE, which says why; the transaction goes on.
fn refused(inside: &mut Session, sqlstate: &str, lease: &str, token: i64) -> Result<()> {
    for statement in relies(lease, token) {
        inside.run("SAVEPOINT s")?;
        let fault = inside.refused(&statement, sqlstate)?;
        ensure!(fault.hint.is_some() && fault.json()?["lease"] == lease, "{fault}");
        inside.run("ROLLBACK TO s")?;
    }
    Ok(())
}

fn relied_on(inside: &mut Session, lease: &str, token: i64) -> Result<()> {
    relies(lease, token).iter().try_for_each(|statement| inside.run(statement))
}

/// The transaction must not rely on the grant; tried again, it may, and sees what the predecessor wrote.
fn is_later(inside: &mut Session, level: &str, lease: &str, token: i64) -> Result<()> {
    refused(inside, "40001", lease, token)?;
    inside.run("ROLLBACK")?;
    ensure!(begin(inside, level, lease)? == 50, "a new snapshot");
    relied_on(inside, lease, token)?;
    inside.run("COMMIT")
}

#[lab_test]
fn a_predecessor_whose_commit_waits_for_a_standby_is_not_overlooked(lab: &Lab) -> Result<()> {
    let cluster = lab
        .builder()
        .set("synchronous_commit", "local")
        .set("synchronous_standby_names", "nobody")
        .start()?;
    let mut admin = cluster.connect("postgres")?;
    admin.run("CREATE EXTENSION pg_fence")?;
    admin.run(TABLE)?;
    add_rows(&mut admin, "job")?;
    let token = admin.acquire("job", "1 h")?;
    let mut guarded = Background::connect(&cluster.conninfo("postgres"))?;
    guarded.send("SET synchronous_commit = on")?;
    guarded.rows()?;
    guarded.send(&format!(
        "BEGIN; SELECT lease_guard('job', {token}); UPDATE t SET v = 50 WHERE part = 1; COMMIT"
    ))?;
    let waits = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE pid = {} AND wait_event = 'SyncRep'",
        guarded.pid()
    );
    wait_until("the commit waits", PATIENCE, || admin.granted(&waits).is_ok_and(|n| n == 1))?;
    admin.release("job", token)?.expect("held");
    let mut inside = cluster.connect("postgres")?;
    ensure!(begin(&mut inside, "REPEATABLE READ", "job")? == 0, "the predecessor's world");
    ensure!(admin.is_taken("job")?, "its locks stay until its work is visible");
    admin.run(&format!("SELECT pg_cancel_backend({})", guarded.pid()))?;
    guarded.rows()?;
    let next = admin.acquire("job", "1 h")?;
    is_later(&mut inside, "REPEATABLE READ", "job", next)
}

/// Each transaction makes its changes before the next one begins with its own. Where SERIALIZABLE transactions change
/// *different* leases by turns, PostgreSQL may refuse one of them at COMMIT with 40001 ("identification as a pivot"): a row
/// version for which its page has no room adds to the index, and both have read that page of the index. A retry helps.
#[lab_test]
fn changing_a_lease_is_never_too_late(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    db.connect()?.run(TABLE)?;
    for level in KEEPING {
        let mut sessions: Vec<Session> = (0..6).map(|_| db.connect()).collect::<Result<_>>()?;
        // Twice: the first time the names are new.
        for _ in 0..2 {
            for session in &mut sessions {
                session.run(&format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM t"))?;
            }
            let mut other = db.connect()?;
            for (n, session) in sessions.iter_mut().enumerate() {
                let lease = format!("job{n}");
                let later = other.acquire(&lease, "1 h")?;
                session.nothing(&format!("SELECT lease_acquire('{lease}')"))?;
                ensure!(session.speaks(&lease, later)?, "a check is of this instant");
                let renewed = session.renew(&lease, later)?.expect("held");
                session.release(&lease, renewed)?.expect("held");
                let own = session.acquire(&lease, "1 h")?;
                session.granted(&format!("SELECT lease_revoke('{lease}')"))?;
                ensure!(session.renew(&lease, own)?.is_none());
            }
            for session in &mut sessions {
                session.run("COMMIT").map_err(|e| e.context(level))?;
            }
        }
    }
    Ok(())
}
