//! Rows of leases move and go, and others take their places: what a session is told of a lease never comes from another
//! lease's row, or from one that is not there any more.

use pg_test::{ensure, lab_test, process, Calls, Context, Database, Lab, Result, Session};

/// Deletes the rows of all grants that are over, and frees their places.
fn prune(session: &mut Session) -> Result<()> {
    session.run("SELECT lease_prune('0')")?;
    session.run("VACUUM (INDEX_CLEANUP ON) fence.lease")
}

fn place(session: &mut Session, name: &str) -> Result<Option<String>> {
    session.text(&format!("SELECT ctid::text FROM fence.lease WHERE name = '{name}'"))
}

#[lab_test]
fn a_place_that_is_another_leases_by_now_tells_nothing(lab: &Lab) -> Result<()> {
    // A server of its own: nobody keeps the row of z from being removed, or its page from being cleared.
    let server = lab.builder().without_fsync().set("autovacuum", "off").start()?;
    let db = Database::with_extension(server.conninfo("postgres"))?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    let token = session.acquire("z", "1 h")?;
    ensure!(place(&mut other, "z")?.as_deref() == Some("(0,1)"));
    session.renew("z", token)?.context("held")?;
    other.run("SELECT lease_revoke('z')")?;
    prune(&mut other)?;
    let both = other.granted("SELECT lease_acquire_all('{y, z}', ttl => '1 h')")?;
    ensure!(place(&mut other, "y")?.as_deref() == Some("(0,1)"), "y is not where z was");
    other.release("z", both)?.context("held")?;
    session.refused(&format!("SELECT lease_guard('z', {both})"), "PF004").map(drop)
}

/// Acquires and renews leases.
fn hold(session: &mut Session, names: &[&str]) -> Result<Vec<i64>> {
    let mut tokens = Vec::new();
    for name in names {
        let token = session.acquire(name, "1 h")?;
        tokens.push(session.renew(name, token)?.context("held")?);
    }
    Ok(tokens)
}

/// The lease is its holder's as before: renewed, guarded and released.
fn is_held(session: &mut Session, name: &str, token: i64) -> Result<()> {
    let token = session.renew(name, token)?.with_context(|| format!("{name} is lost"))?;
    session.run(&format!("BEGIN; SELECT lease_guard('{name}', {token})"))?;
    session.run("COMMIT")?;
    ensure!(session.speaks(name, token)?);
    session.release(name, token)?.with_context(|| format!("{name} is lost"))?;
    ensure!(session.release(name, token)?.is_none(), "{name} was released twice");
    session.acquire(name, "1 h").map(drop)
}

/// Rows are moved by `work`, with some of them gone before; what is left is as before.
fn moved_by(db: &Database, work: impl FnOnce(&mut Session) -> Result<()>) -> Result<()> {
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    let names = ["a", "b", "c", "d"];
    let tokens = hold(&mut session, &names)?;
    other.run("SELECT lease_revoke('a'), lease_revoke('c')")?;
    prune(&mut other)?;
    let before = place(&mut other, "b")?;
    work(&mut other)?;
    ensure!(place(&mut other, "b")? != before, "no row has moved");
    for (name, token) in names.into_iter().zip(tokens) {
        if ["b", "d"].contains(&name) {
            is_held(&mut session, name, token)?;
        } else {
            ensure!(session.renew(name, token)?.is_none(), "{name} was revoked");
            session.refused(&format!("SELECT lease_guard('{name}', {token})"), "PF004")?;
        }
    }
    Ok(())
}

#[lab_test]
fn rows_that_a_rewrite_has_moved_are_found(lab: &Lab) -> Result<()> {
    for rewrite in ["VACUUM FULL fence.lease", "CLUSTER fence.lease USING lease_pkey"] {
        moved_by(&lab.database()?, |session| session.run(rewrite)).context(rewrite)?;
    }
    Ok(())
}

#[lab_test]
fn rows_that_pg_repack_has_moved_are_found(lab: &Lab) -> Result<()> {
    lab.prefix().bring_repack()?;
    let db = lab.database()?;
    db.connect()?.run("CREATE EXTENSION pg_repack")?;
    let port = lab.cluster().port().to_string();
    moved_by(&db, |_| {
        let mut command = lab.prefix().command("pg_repack")?;
        command.args(["-h", "127.0.0.1", "-U", "postgres", "-p", &port, "-d", db.name()]);
        process::output_of(command.args(["-t", "fence.lease"])).map(drop)
    })
}

#[lab_test]
fn a_row_that_was_deleted_and_made_anew_is_the_new_holders(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    let token = hold(&mut session, &["a"])?[0];
    for gone in ["SELECT lease_revoke('a')", "TRUNCATE fence.lease"] {
        other.run(gone)?;
        prune(&mut other)?;
        let theirs = other.acquire("a", "1 h")?;
        ensure!(session.renew("a", token)?.is_none() && session.release("a", token)?.is_none());
        session.refused(&format!("SELECT lease_guard('a', {token})"), "PF004")?;
        ensure!(session.is_taken("a")?);
        ensure!(session.speaks("a", theirs)? && !session.speaks("a", token)?);
        session.run(&format!("BEGIN; SELECT lease_guard('a', {theirs}); ROLLBACK"))?;
    }
    Ok(())
}

#[lab_test]
fn a_row_that_has_outgrown_its_page_is_found(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    let mut token = hold(&mut session, &["a"])?[0];
    let before = place(&mut other, "a")?;
    // As long as a snapshot sees them all, old versions fill the page.
    other.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM fence.lease")?;
    for _ in 0..200 {
        token = session.renew("a", token)?.context("held")?;
    }
    other.run("COMMIT")?;
    let after = place(&mut other, "a")?;
    ensure!(
        before.is_some_and(|b| b.starts_with("(0,")) && !after.is_none_or(|a| a.starts_with("(0,"))
    );
    is_held(&mut session, "a", token)
}

#[lab_test]
fn what_a_rollback_takes_back_is_gone(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run("BEGIN")?;
    let token = session.acquire("a", "1 h")?;
    session.renew("a", token)?.context("held")?;
    session.run("ROLLBACK")?;
    ensure!(session.renew("a", token)?.is_none());
    let token = session.acquire("a", "1 h")?;
    session.run("BEGIN")?;
    let lost = session.renew("a", token)?.context("held")?;
    session.run("ROLLBACK")?;
    ensure!(session.renew("a", lost)?.is_none(), "the renewal was rolled back");
    is_held(&mut session, "a", token)
}
