//! Messages in an order that no ordinary client sends, within one transaction.

use bytes::BytesMut;
use pg_test::process::{PATIENCE, wait_until};
use pg_test::{Calls, Database, Harness, Result, ensure, harness_test};
use postgres_protocol::message::frontend;
use std::io::{Read, Write};
use std::net::TcpStream;

/// Opens a connection and sends the messages that `write` writes.
fn send(db: &Database, write: impl Fn(&mut BytesMut) -> Result<()>) -> Result<TcpStream> {
    let port: i32 = db.connect()?.one("SELECT inet_server_port()", &[])?;
    let port = u16::try_from(port)?;
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut messages = BytesMut::new();
    let whom = [("user", "postgres"), ("database", db.name()), ("application_name", "pipeline")];
    frontend::startup_message(whom, &mut messages)?;
    write(&mut messages)?;
    frontend::terminate(&mut messages);
    stream.write_all(&messages)?;
    Ok(stream)
}

fn bind(portal: &str, statement: &str, to: &mut BytesMut) -> Result<()> {
    let none = std::iter::empty::<i16>;
    let nothing = std::iter::empty::<()>();
    let never = |(), _: &mut BytesMut| unreachable!("no parameter");
    frontend::bind(portal, statement, none(), nothing, never, none(), to)
        .map_err(|_| std::io::Error::other("cannot bind").into())
}

/// Returns true if a lease can be taken while a transaction commits that has written under it and whose last statement
/// was DISCARD ALL.
pub fn is_taken_after_discard(harness: &Harness) -> Result<bool> {
    let db = harness.database()?;
    let mut admin = db.connect()?;
    admin.run(
        "CREATE TABLE t (id int PRIMARY KEY, n int); INSERT INTO t VALUES (1, 0), (2, 0);
         SELECT fence_protect('t', lease => 'job');
         CREATE TABLE late (n int);
         CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
            PERFORM pg_advisory_xact_lock(1); RETURN NULL; END$$;
         CREATE CONSTRAINT TRIGGER late AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION late()",
    )?;
    let token = admin.acquire("job", "1 h")?;
    // The function is declared IMMUTABLE, so planning runs it: DISCARD ALL is then the first statement to be executed,
    // and is allowed.
    admin.run(&format!(
        "CREATE FUNCTION writes() RETURNS int LANGUAGE plpgsql AS $$BEGIN
            UPDATE t SET n = n + 1, fence = {token} WHERE id = 1;
            INSERT INTO late VALUES (1); RETURN 1; END$$;
         CREATE FUNCTION planned() RETURNS int LANGUAGE plpgsql IMMUTABLE AS $$BEGIN
            RETURN writes(); END$$;
         SELECT pg_advisory_lock(1)"
    ))?;
    let mut stream = send(&db, |to| {
        frontend::parse("", "SELECT planned()", std::iter::empty(), to)?;
        bind("", "", to)?;
        frontend::parse("discard", "DISCARD ALL", std::iter::empty(), to)?;
        bind("discard", "discard", to)?;
        frontend::execute("discard", 0, to)?;
        frontend::sync(to);
        Ok(())
    })?;
    // It is committing, and waits for the lock that is held here.
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pipeline' \
                 AND wait_event = 'advisory' AND query = 'DISCARD ALL'";
    wait_until("the commit waits", PATIENCE, || admin.granted(waits).is_ok_and(|n| n == 1))?;
    admin.expire_now("job", token)?;
    let is_taken = admin.is_taken("job")?;
    admin.run("SELECT pg_advisory_unlock(1)")?;
    stream.read_to_end(&mut Vec::new())?;
    ensure!(admin.granted("SELECT n FROM t WHERE id = 1")? == 1, "it was to be committed");
    ensure!(!is_taken || !admin.is_taken("job")?);
    Ok(is_taken)
}

#[harness_test]
fn what_discards_a_session_s_locks_leaves_its_guards(harness: &Harness) -> Result<()> {
    ensure!(
        is_taken_after_discard(harness)?,
        "granted beside an open transaction that has written under it"
    );
    Ok(())
}

/// PostgreSQL refuses it if a statement came before in the pipeline.
#[harness_test]
fn nothing_is_discarded_behind_a_guard(harness: &Harness) -> Result<()> {
    let db = harness.database()?;
    let mut admin = db.connect()?;
    admin.run(
        "CREATE TABLE t (n int); INSERT INTO t VALUES (0); SELECT fence_protect('t', lease => 'job')",
    )?;
    let token = admin.acquire("job", "1 h")?;
    let mut stream = send(&db, |to| {
        for sql in [&*format!("UPDATE t SET n = 1, fence = {token}"), "DISCARD ALL"] {
            frontend::parse("", sql, std::iter::empty(), to)?;
            bind("", "", to)?;
            frontend::execute("", 0, to)?;
        }
        frontend::sync(to);
        Ok(())
    })?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    ensure!(String::from_utf8_lossy(&answer).contains("25001"));
    ensure!(admin.granted("SELECT n FROM t")? == 0);
    Ok(())
}

#[harness_test]
fn a_guard_is_warned_of_only_where_nothing_follows_it(harness: &Harness) -> Result<()> {
    let db = harness.database()?;
    let token = db.connect()?.acquire("job", "1 h")?;
    let guard = format!("SELECT lease_guard('job', {token})");
    for (statements, warned) in [
        (vec![&*guard], true),
        (vec![&*guard, "SELECT 1"], false),
        // From 18 on, what follows a pipeline's first statement seems to be in an open transaction.
        (vec!["SELECT 1", &*guard], harness.install_dir().major_number() < 18),
    ] {
        let mut stream = send(&db, |to| {
            for sql in &statements {
                frontend::parse("", sql, std::iter::empty(), to)?;
                bind("", "", to)?;
                frontend::execute("", 0, to)?;
            }
            frontend::sync(to);
            Ok(())
        })?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer);
        ensure!(!answer.contains("SERROR"), "{statements:?}: {answer}");
        ensure!(answer.contains("25P01") == warned, "{statements:?}: {answer}");
    }
    Ok(())
}
