//! The first worker in each client's README, which has at most twenty-five lines and runs. Also the client's own tests.

use super::languages::{Language, Program};
use crate::database::Database;
use crate::harness::Harness;
use crate::process::output_of;
use crate::source_tree::source_root;
use anyhow::{Context, Result, ensure};
use std::fs;

/// The most lines that a newcomer should have to read.
const LINES: usize = 25;

/// Its output while another client had the lease, and when it had the lease itself.
pub struct Printed {
    refused: String,
    done: String,
}

impl Printed {
    /// Checks that the two outputs differ.
    pub fn tells_them_apart(&self) -> Result<()> {
        for said in [&self.refused, &self.done] {
            ensure!(!said.trim().is_empty(), "it says nothing of what it did");
        }
        ensure!(self.refused != self.done, "it says the same in both cases: {}", self.done);
        Ok(())
    }
}

/// Runs it against a table as in the README: twice concurrently, and alone.
pub fn runs(harness: &Harness, first_worker: &Program) -> Result<Printed> {
    runs_in(&harness.database()?, harness, first_worker)
}

/// Runs it in this database, of either edition.
pub fn runs_in(database: &Database, harness: &Harness, first_worker: &Program) -> Result<Printed> {
    let mut admin = database.connect()?;
    admin.run(
        "CREATE TABLE orders (id bigint PRIMARY KEY, status text);
         INSERT INTO orders VALUES (7, 'new');
         SELECT fence_protect('orders', lease => 'order:{id}')",
    )?;
    // Another client has the lease.
    admin.run("SELECT lease_acquire('order:7', ttl => '1 hour')")?;
    let refused = output_of(first_worker.command(harness).arg(url(database)))?;
    let left_alone: bool = admin.one("SELECT status = 'new' FROM orders", &[])?;
    ensure!(left_alone, "it has paid the order beside another worker: {refused}");
    admin.run("SELECT lease_revoke('order:7')")?;
    let done = output_of(first_worker.command(harness).arg(url(database)))?;
    let is_paid: bool = admin.one(
        "SELECT status = 'paid' AND fence > 0 AND NOT EXISTS (SELECT FROM lease_info('order:7') \
         WHERE state = 'held') FROM orders",
        &[],
    )?;
    ensure!(is_paid, "the order is not paid, or its lease is still held: {done}");
    Ok(Printed { refused, done })
}

/// Runs the client's own tests.
pub fn tests_pass(harness: &Harness, tests: &Program) -> Result<()> {
    let database = harness.database()?;
    output_of(tests.command(harness).env("DATABASE_URL", url(&database))).map(drop)
}

/// A URL that every driver understands.
fn url(database: &Database) -> String {
    let conninfo = database.conninfo();
    let (port, dbname) = conninfo.place();
    format!("postgresql://127.0.0.1:{port}/{dbname}?user=postgres")
}

/// Checks that the README shows what runs: its first block of code is a file of the examples.
pub fn is_shown(client: &Language) -> Result<()> {
    let dir = source_root().join("clients").join(client.directory);
    let readme = fs::read_to_string(dir.join("README.md"))?;
    let (_, below) = readme.split_once("## The first worker\n").context("no first worker")?;
    let (_, code) = below.split_once("```").context("no code")?;
    let (_, code) = code.split_once('\n').context("no code")?;
    let (code, _) = code.split_once("\n```").context("the code has no end")?;
    ensure!(code.lines().count() <= LINES, "it has {} lines", code.lines().count());
    let path = dir.join(client.first_worker);
    let file = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    ensure!(file.trim_end() == code, "README.md shows something else than {}", client.first_worker);
    Ok(())
}
