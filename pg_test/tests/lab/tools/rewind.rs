//! pg_rewind and repmgr: a primary that was replaced comes back behind its successor.

use super::debians;
use crate::failover::promotions::cut;
use crate::support::history::History;
use crate::tokens::jumps::jumps;
use pg_test::cluster::Builder;
use pg_test::prefix::Prefix;
use pg_test::process::{output_of, wait_until, PATIENCE};
use pg_test::setup::Package;
use pg_test::{ensure, lab_test, Cluster, Lab, Result, Shutdown};
use std::fs;

#[lab_test]
fn a_primary_that_pg_rewind_brought_back_and_that_is_promoted_again_goes_on(
    lab: &Lab,
) -> Result<()> {
    let first = lab.builder().set("wal_log_hints", "on").set("wal_keep_size", "256MB").start()?;
    let mut session = first.connect("postgres")?;
    let mut history = History::begin(&mut session)?;
    let second = lab
        .builder()
        .set("wal_log_hints", "on")
        .set("wal_keep_size", "256MB")
        .standby_of(&first)?;
    second.start()?;
    second.wait_replayed(&first)?;
    cut(&second)?;
    // The first goes on alone, and hands out tokens that the second will not know.
    history.draw_more(&mut session, 50)?;
    drop(session);
    first.stop(Shutdown::Fast)?;
    second.promote()?;
    let mut session = second.connect("postgres")?;
    history.see(history.goes_on(&mut session)?);
    let renewed = history.token;
    ensure!(jumps(&mut session)? == 1);
    session.run("CHECKPOINT")?;

    let settings = fs::read(first.data().join("postgresql.auto.conf"))?;
    let source = second.conninfo("postgres").to_string();
    let data = first.data().to_string_lossy().into_owned();
    lab.run("pg_rewind", &["--target-pgdata", &data, "--source-server", &source, "--no-sync"])?;
    // It has copied the other's settings, port and all.
    fs::write(first.data().join("postgresql.auto.conf"), settings)?;
    first.configure(&[("primary_conninfo", &source), ("recovery_target_timeline", "latest")])?;
    fs::write(first.data().join("standby.signal"), "")?;
    first.start()?;
    first.wait_replayed(&second)?;
    history.draw_more(&mut session, 50)?;
    first.wait_replayed(&second)?;
    drop(session);
    second.stop(Shutdown::Fast)?;

    first.promote()?;
    let mut session = first.connect("postgres")?;
    let check = "SELECT lease_check('order:7', $1)";
    ensure!(!session.one::<bool>(check, &[&renewed])?, "a token speaks that no holder has renewed");
    let token: i64 = session.one("SELECT lease_acquire('first again')", &[])?;
    ensure!(token > history.seen, "{token} was drawn after {} was seen", history.seen);
    ensure!(jumps(&mut session)? == 2);
    ensure!(session.one::<i32>("SELECT timeline FROM fence_status()", &[])? == 3);
    Ok(())
}

/// A node of repmgr's, and its configuration file.
struct Node<'a> {
    cluster: &'a Cluster,
    config: std::path::PathBuf,
}

impl Node<'_> {
    fn new(cluster: &Cluster, id: u32) -> Result<Node<'_>> {
        let prefix: &Prefix = cluster.prefix();
        let config = cluster.dir().join("repmgr.conf");
        let quoted = |text: String| text.replace('\'', "");
        let text = format!(
            "node_id={id}\nnode_name='node{id}'\nconninfo='{}'\ndata_directory='{}'\npg_bindir='{}'\n\
             use_replication_slots=no\nfailover=manual\n\
             service_start_command='/bin/true'\nservice_stop_command='/bin/true'\n",
            quoted(format!(
                "host=127.0.0.1 port={} user=postgres dbname=postgres connect_timeout=5",
                cluster.port()
            )),
            cluster.data().display(),
            prefix.bin_dir().display()
        );
        fs::write(&config, text)?;
        Ok(Node { cluster, config })
    }

    fn run(&self, command: &[&str]) -> Result<()> {
        let mut tool = self.cluster.prefix().command("repmgr")?;
        output_of(tool.arg("-f").arg(&self.config).args(command)).map(drop)
    }
}

#[lab_test(slow)]
fn a_standby_that_repmgr_promotes_goes_on_above_all_that_was_seen(lab: &Lab) -> Result<()> {
    let prefix = debians(lab)?;
    let program = format!("/usr/lib/postgresql/{}/bin/repmgr", prefix.major());
    let package = Package::new(format!("postgresql-{}-repmgr", prefix.major()), program)
        .without_service("repmgrd");
    prefix.bring_package(package, "repmgr", &["bin/repmgr", "repmgr.so"])?;
    let builder = || {
        Builder::new(prefix.clone())
            .set("shared_preload_libraries", "repmgr")
            .set("wal_log_hints", "on")
    };
    let first = builder().set("wal_keep_size", "256MB").start()?;
    let primary = Node::new(&first, 1)?;
    primary.run(&["primary", "register"])?;
    let mut session = first.connect("postgres")?;
    let mut history = History::begin(&mut session)?;

    let second = builder().standby_of(&first)?;
    second.start()?;
    let standby = Node::new(&second, 2)?;
    standby.run(&["standby", "register", "--upstream-node-id=1", "--force"])?;
    second.wait_replayed(&first)?;
    cut(&second)?;
    history.draw_more(&mut session, 50)?;
    drop(session);
    first.kill9()?;
    standby.run(&["standby", "promote"])?;
    let mut session = second.connect("postgres")?;
    wait_until("the standby is promoted", PATIENCE, || {
        session.one("SELECT NOT pg_is_in_recovery()", &[]).unwrap_or(false)
    })?;
    history.goes_on(&mut session)?;
    ensure!(jumps(&mut session)? == 1);
    Ok(())
}
