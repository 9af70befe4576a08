//! No error shows a file path, even if backtraces are switched on.

use pg_test::{Cluster, Harness, Result, Session, bail, ensure, harness_test};

/// Starts a server with a careless administrator's settings.
fn cluster(harness: &Harness) -> Result<(Cluster, Session)> {
    let cluster = harness
        .builder()
        .env("RUST_BACKTRACE", "full")
        .env("RUST_LIB_BACKTRACE", "1")
        .set("log_error_verbosity", "verbose")
        .start()?;
    let mut session = cluster.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    session.run(
        "CREATE TABLE orders (id int PRIMARY KEY, v int NOT NULL DEFAULT 0, fence bigint);
         INSERT INTO orders VALUES (1)",
    )?;
    Ok((cluster, session))
}

/// Checks all fields of an error, including the fields for developers.
fn shows_no_path(error: &postgres::Error, sqlstate: &str) -> Result<()> {
    let Some(error) = error.as_db_error() else { bail!("not the server's: {error}") };
    ensure!(error.code().code() == sqlstate, "wanted {sqlstate}, got {error:?}");
    let texts =
        [Some(error.message()), error.detail(), error.hint(), error.where_(), error.routine()];
    for text in texts.into_iter().flatten() {
        let text = text.replace("PL/pgSQL", "");
        let suspicious = ["/", "\\", ".rs", "backtrace", "pgrx", "panic"];
        if let Some(found) = suspicious.iter().find(|s| text.contains(**s)) {
            bail!("{found:?} is in {text:?}: {error:?}");
        }
    }
    // PostgreSQL names the C file of its own errors, and only its name.
    let file = error.file().unwrap_or_default();
    ensure!(!file.contains('/') && !file.ends_with(".rs"), "the file is {file}");
    Ok(())
}

fn refused(session: &mut Session, sql: &str, sqlstate: &str) -> Result<()> {
    match session.simple_query(sql) {
        Ok(_) => bail!("it succeeded: {sql}"),
        Err(error) => {
            shows_no_path(&error, sqlstate).map_err(|error| error.context(sql.to_owned()))
        }
    }
}

#[harness_test]
fn a_refusal_shows_no_path_with_backtraces_on(harness: &Harness) -> Result<()> {
    let (cluster, mut session) = cluster(harness)?;
    session.run("CREATE ROLE stranger LOGIN")?;
    session
        .run("SELECT fence_grant('stranger'), fence_protect('orders', lease => 'order:{id}')")?;
    let old: i64 = session.one("SELECT lease_acquire('order:1', ttl => '1 h')", &[])?;
    session.run(&format!("UPDATE orders SET fence = {old}"))?;
    session.run("SELECT lease_revoke('order:1')")?;
    let held: i64 = session.one("SELECT lease_acquire('order:1', ttl => '1 h')", &[])?;
    session.run(
        "CREATE TABLE plain (id int, fence bigint); INSERT INTO plain VALUES (1); \
         SELECT fence_protect('plain')",
    )?;
    session.run(&format!("UPDATE plain SET fence = {held}"))?;
    for (sql, sqlstate) in [
        (format!("UPDATE plain SET fence = {old}"), "PF001"),
        ("UPDATE orders SET v = 7".to_owned(), "PF002"),
        ("UPDATE orders SET fence = 0".to_owned(), "PF003"),
        (format!("UPDATE orders SET fence = {old}"), "PF004"),
        (format!("SELECT lease_guard('order:1', {old})"), "PF004"),
        ("TRUNCATE orders".to_owned(), "PF005"),
        ("SELECT lease_acquire('')".to_owned(), "22023"),
        ("SELECT lease_acquire(NULL)".to_owned(), "22004"),
        ("SELECT lease_acquire('a', ttl => '-1 s')".to_owned(), "22023"),
        ("SELECT lease_acquire('order:1', slots => 3)".to_owned(), "22023"),
        ("SELECT lease_renew('a', 0)".to_owned(), "22023"),
        ("SET pg_fence.token = 'x'".to_owned(), "22023"),
        ("SELECT fenced()".to_owned(), "39P01"),
        ("SELECT fence_protect('pg_class')".to_owned(), "42809"),
        ("SELECT fence_protect('orders', 'no', 'mode')".to_owned(), "22023"),
    ] {
        refused(&mut session, &sql, sqlstate)?;
    }
    session.run("ALTER TABLE plain RENAME COLUMN fence TO f")?;
    refused(&mut session, "UPDATE plain SET id = 2", "42703")?;
    let mut stranger = cluster.conninfo("postgres").user("stranger").connect()?;
    refused(&mut stranger, &format!("SELECT lease_guard('order:1', {held})"), "42501")?;
    refused(&mut stranger, &format!("SELECT lease_release('order:1', {held})"), "42501")?;
    refused(&mut stranger, "SELECT lease_revoke('order:1')", "42501")?;
    session.run("ALTER SEQUENCE fence.token_seq CYCLE")?;
    refused(&mut session, "SELECT lease_acquire('new')", "55000")
}

#[harness_test]
fn an_error_of_postgres_itself_passes_through_without_a_path(harness: &Harness) -> Result<()> {
    let (_cluster, mut session) = cluster(harness)?;
    let token: i64 = session.one("SELECT lease_acquire('a', ttl => '1 h')", &[])?;
    session.run("SET default_transaction_read_only = on")?;
    for call in [
        "lease_acquire('b')".to_owned(),
        "lease_acquire('b', wait => '1 s')".to_owned(),
        format!("lease_renew('a', {token})"),
        format!("lease_release('a', {token})"),
        format!("lease_guard('a', {token})"),
        "lease_revoke('a')".to_owned(),
        "lease_prune()".to_owned(),
        "fence_new_epoch()".to_owned(),
    ] {
        refused(&mut session, &format!("SELECT {call}"), "25006")?;
    }
    session.run("RESET default_transaction_read_only")?;
    session.run("BEGIN; ALTER TABLE fence.lease RENAME TO gone")?;
    refused(&mut session, "SELECT lease_acquire('b')", "55000")?;
    session.run("ROLLBACK")?;
    session.run(&format!("SELECT lease_release('a', {token})"))
}
