//! The first worker in each client's README, which has at most twenty-five lines and runs. Also the client's own tests.

use super::languages::{Client, Language};
use crate::database::Database;
use crate::harness::Harness;
use crate::markdown;
use crate::process::output_of;
use anyhow::{Context, Result, ensure};
use std::fs;

/// Runs it against a table as in the README: beside another holder of its lease, and alone. It must tell these apart.
pub fn runs(harness: &Harness, client: &Client, database: &Database) -> Result<()> {
    let mut admin = database.connect()?;
    admin.run(
        "CREATE TABLE orders (id bigint PRIMARY KEY, status text);
         INSERT INTO orders VALUES (7, 'new');
         SELECT fence_protect('orders', lease => 'order:{id}')",
    )?;
    let (_, program) = client.language.first_worker;
    let run = || output_of(client.program(harness, program).arg(url(database)));
    // Another client has the lease.
    admin.run("SELECT lease_acquire('order:7', ttl => '1 hour')")?;
    let refused = run()?;
    let left_alone: bool = admin.one("SELECT status = 'new' FROM orders", &[])?;
    ensure!(left_alone, "it has paid the order beside another worker: {refused}");
    admin.run("SELECT lease_revoke('order:7')")?;
    let done = run()?;
    let is_paid: bool = admin.one(
        "SELECT status = 'paid' AND fence > 0 AND NOT EXISTS (SELECT FROM lease_info('order:7') \
         WHERE state = 'held') FROM orders",
        &[],
    )?;
    ensure!(is_paid, "the order is not paid, or its lease is still held: {done}");
    let are_words = [&refused, &done].iter().all(|said| !said.trim().is_empty());
    ensure!(are_words && refused != done, "it does not tell them apart: {refused}{done}");
    Ok(())
}

/// Runs the client's own tests.
pub fn tests_pass(harness: &Harness, client: &Client) -> Result<()> {
    let database = harness.database()?;
    let mut tests = client.program(harness, client.language.tests);
    output_of(tests.env("DATABASE_URL", url(&database))).map(drop)
}

/// A URL that every driver understands.
fn url(database: &Database) -> String {
    let conninfo = database.conninfo();
    let (port, dbname) = conninfo.place();
    format!("postgresql://127.0.0.1:{port}/{dbname}?user=postgres")
}

/// Checks that the README shows what runs: its first block of code is a file of the examples.
pub fn is_shown(client: &Language) -> Result<()> {
    let readme = fs::read_to_string(client.source().join("README.md"))?;
    let section = markdown::section(&readme, "## The first worker")?;
    let block = markdown::blocks(section).into_iter().next().context("no code")?;
    let lines = block.code.lines().count();
    ensure!(lines <= 25, "it has {lines} lines");
    let (file, _) = client.first_worker;
    let path = client.source().join(file);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    ensure!(text == block.code, "README.md shows something else than {file}");
    Ok(())
}
