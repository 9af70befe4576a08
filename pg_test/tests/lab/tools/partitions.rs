//! pg_partman, of Debian's package, on fenced partitions.

use super::debians;
use pg_test::cluster::Builder;
use pg_test::setup::Package;
use pg_test::{ensure, lab_test, Calls, Lab, Result};

#[lab_test(slow)]
fn pg_partman_makes_fenced_partitions_and_moves_rows_with_a_token(lab: &Lab) -> Result<()> {
    let prefix = debians(lab)?;
    let package = format!("postgresql-{}-partman", prefix.major());
    let library = format!("/usr/lib/postgresql/{}/lib/pg_partman_bgw.so", prefix.major());
    prefix.bring_package(Package::new(package, library), "pg_partman", &["pg_partman_bgw.so"])?;
    let cluster = Builder::new(prefix).start()?;
    let mut session = cluster.connect("postgres")?;
    session.run(
        "CREATE EXTENSION pg_fence; CREATE SCHEMA partman; CREATE EXTENSION pg_partman SCHEMA partman;
         CREATE TABLE public.events (id bigint NOT NULL, day timestamptz NOT NULL, body text) PARTITION BY RANGE (day);
         SELECT partman.create_parent('public.events', 'day', 'native', 'daily', p_premake => 2);
         SELECT fence_protect('events', lease => 'events')",
    )?;
    let token = session.acquire("events", "1 h")?;
    // Its maintenance makes partitions, which inherit the fence.
    session.run(
        "UPDATE partman.part_config SET premake = 4, infinite_time_partitions = true; SELECT partman.run_maintenance('public.events')",
    )?;
    let partitions = "SELECT count(*) FROM pg_inherits i WHERE inhparent = 'events'::regclass";
    let fenced = format!(
        "{partitions} AND EXISTS (SELECT FROM pg_trigger t
           WHERE t.tgrelid = i.inhrelid AND t.tgfoid = 'fenced'::regproc AND t.tgtype & 1 = 1)"
    );
    let (all, fenced): (i64, i64) = (session.one(partitions, &[])?, session.one(&fenced, &[])?);
    ensure!(all > 6 && fenced == all, "{fenced} of {all} partitions have a row trigger");
    // A row for which there is no partition yet.
    session.run(&format!(
        "SET pg_fence.token = {token}; INSERT INTO events VALUES (1, now() + interval '20 days', 'late'); RESET pg_fence.token"
    ))?;
    ensure!(session.one::<i64>("SELECT count(*) FROM events_default", &[])? == 1);

    // Moving rows deletes and inserts them: the one that does it presents a token like anybody else.
    let fault = session.refused("SELECT partman.partition_data_time('public.events')", "PF002");
    let refused = match fault {
        Ok(fault) => fault,
        // pg_partman wraps the error of the statement that it runs.
        Err(_) => {
            session.refused("SELECT partman.partition_data_time('public.events')", "P0001")?
        }
    };
    ensure!(format!("{refused}").contains("no fencing token presented"), "{refused}");
    session.run("BEGIN")?;
    session.run(&format!("SELECT lease_guard('events', {token})"))?;
    session.run("SELECT partman.partition_data_time('public.events')")?;
    session.run("COMMIT")?;
    ensure!(session.one::<i64>("SELECT count(*) FROM events_default", &[])? == 0);
    let row = "SELECT fence = $1 AND body = 'late' FROM events";
    ensure!(session.one::<bool>(row, &[&token])?, "the row is another one");
    Ok(())
}
