//! Beside the tools of others: poolers, object mappers, job queues, lock services, test suites, auditing, partitions
//! that are maintained, backups.
//!
//! Tools of Debian's packages run with Debian's PostgreSQL, whatever version the other tests run on.

automod::dir!(pub "tests/lab/tools");

use pg_test::pooler::{Mode, Pooler};
use pg_test::prefix::Prefix;
use pg_test::rundir::RunDir;
use pg_test::{ensure, lab_test, setup, Calls, Cluster, Lab, Result};
use std::sync::Arc;

/// Debian's own PostgreSQL with the extension, in a run directory of its own: tools are added to it.
fn debians(lab: &Lab) -> Result<Arc<Prefix>> {
    let rundir = Arc::new(RunDir::create(lab.rundir().program())?);
    Ok(Arc::new(Prefix::of_major(rundir, setup::USUAL_MAJOR)?))
}

/// A bound table with one row, and a grant of the row's lease for an hour.
fn bound_orders(cluster: &Cluster) -> Result<(pg_test::Session, i64)> {
    let mut session = cluster.connect("postgres")?;
    session.run(
        "CREATE EXTENSION IF NOT EXISTS pg_fence;
         CREATE TABLE orders (id int PRIMARY KEY, total int NOT NULL);
         INSERT INTO orders VALUES (7, 0);
         SELECT fence_protect('orders', lease => 'order:{id}')",
    )?;
    let token = session.acquire("order:7", "1 h")?;
    Ok((session, token))
}

#[lab_test]
fn statement_mode_has_room_for_calls_and_for_writes_that_carry_their_token(
    lab: &Lab,
) -> Result<()> {
    let cluster = lab.builder().start()?;
    let (_, token) = bound_orders(&cluster)?;
    let pooler = Pooler::start_in(lab, &cluster, 2, Mode::Statement)?;
    let connect = || pooler.conninfo("postgres").connect();
    let mut client = connect()?;
    let mine: i64 = client.granted("SELECT lease_acquire('job')")?;
    ensure!(client.granted(&format!("SELECT lease_renew('job', {mine})"))? > mine);
    client.run(&format!("UPDATE orders SET total = 1, fence = {token}"))?;
    // The setting ends with its own statement, and what is set for a session reaches others.
    client.run(&format!("SELECT set_config('pg_fence.token', '{token}', true)"))?;
    client.refused("UPDATE orders SET total = 2", "PF002")?;
    client
        .run(&format!("UPDATE orders SET total = 3, fence = lease_release('order:7', {token})"))?;
    // There are no transactions, and so no guards.
    ensure!(connect()?.try_rows("BEGIN").is_err(), "the pooler let a transaction begin");
    Ok(())
}

#[lab_test]
fn a_token_in_a_parameter_makes_one_entry_among_the_statements(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().set("shared_preload_libraries", "pg_stat_statements").start()?;
    let (mut session, _) = bound_orders(&cluster)?;
    session.run("CREATE EXTENSION pg_stat_statements")?;
    for _ in 0..5 {
        let token = session.acquire(&format!("job {}", rand::random::<u32>()), "1 h")?;
        session.run(&format!("BEGIN; SET LOCAL pg_fence.token = {token}; COMMIT"))?;
        session.run("BEGIN")?;
        session.one::<String>(
            "SELECT set_config('pg_fence.token', $1, true)",
            &[&token.to_string()],
        )?;
        session.run("COMMIT")?;
    }
    let mut entries = |like: &str| -> Result<i64> {
        session.one("SELECT count(*) FROM pg_stat_statements WHERE query LIKE $1", &[&like])
    };
    ensure!(entries("SELECT set_config(%")? == 1);
    // From 18 on PostgreSQL takes the value out of SET, too.
    let wanted = if lab.prefix().major_number() < 18 { 5 } else { 1 };
    let found = entries("SET LOCAL pg_fence.token%")?;
    ensure!(found == wanted, "{found} entries for SET LOCAL");
    Ok(())
}

#[lab_test]
fn a_foreign_table_takes_the_token_in_its_column_and_not_from_the_setting(lab: &Lab) -> Result<()> {
    let far = lab.builder().start()?;
    let (mut there, token) = bound_orders(&far)?;
    let near = lab.builder().start()?;
    let mut here = near.connect("postgres")?;
    here.run(&format!(
        "CREATE EXTENSION pg_fence;
         CREATE EXTENSION postgres_fdw;
         CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '127.0.0.1', port '{}', dbname 'postgres');
         CREATE USER MAPPING FOR CURRENT_USER SERVER far OPTIONS (user 'postgres');
         CREATE FOREIGN TABLE orders (id int, total int, fence bigint) SERVER far",
        far.port()
    ))?;
    // A token that this database has issued may be set here; it stays here.
    let local = here.acquire("job", "1 h")?;
    here.run(&format!("SET pg_fence.token = {local}"))?;
    here.refused("UPDATE orders SET total = 1", "PF002")?;
    here.refused("DELETE FROM orders", "PF002")?;
    here.run(&format!("UPDATE orders SET total = 2, fence = {token}"))?;
    ensure!(there.one::<bool>("SELECT (total, fence) = (2, $1) FROM orders", &[&token])?);
    // A lease of this database says nothing there.
    here.run("BEGIN; SELECT lease_guard('job', current_setting('pg_fence.token')::bigint)")?;
    here.refused("UPDATE orders SET total = 3", "PF002")?;
    here.run("ROLLBACK")?;
    // It is refused to fence the foreign table itself: where its rows are is the place for that.
    here.try_rows("SELECT fence_protect('orders')").err().map_or_else(
        || pg_test::bail!("a foreign table was fenced"),
        |fault| {
            ensure!(fault.sqlstate == "42809", "{fault}");
            Ok(())
        },
    )
}
