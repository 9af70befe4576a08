//! pgBackRest, of Debian's package: a backup restored, with and without recovery beyond it.

use crate::support::history::{jumps, History};
use pg_test::cluster::Builder;
use pg_test::process::{self, output_of, PATIENCE};
use pg_test::setup::{self, Package};
use pg_test::{ensure, lab_test, Cluster, Lab, Result, Shutdown};
use std::fs;
use std::path::Path;

/// Runs pgbackrest for the cluster.
fn run(cluster: &Cluster, dir: &Path, command: &[&str]) -> Result<()> {
    let mut tool = cluster.prefix().rundir().command("/usr/bin/pgbackrest");
    process::as_server_user(&mut tool)?;
    tool.env("LC_ALL", "C.UTF-8").env("TZ", "UTC");
    let config = dir.join("pgbackrest.conf");
    output_of(tool.arg(format!("--config={}", config.display())).arg("--stanza=main").args(command))
        .map(drop)
}

fn configure(cluster: &Cluster, dir: &Path) -> Result<()> {
    let config = format!(
        "[main]\npg1-path={}\npg1-port={}\npg1-socket-path={}\npg1-user=postgres\n\
         [global]\nrepo1-path={dir}/repo\nlog-path={dir}\nlock-path={dir}/lock\nspool-path={dir}/spool\n\
         log-level-file=off\nstart-fast=y\narchive-timeout=60\n",
        cluster.data().display(),
        cluster.port(),
        cluster.dir().display(),
        dir = dir.display()
    );
    Ok(fs::write(dir.join("pgbackrest.conf"), config)?)
}

#[lab_test(slow)]
fn a_backup_restored_by_pgbackrest_jumps_and_one_without_recovery_takes_it_by_hand(
    lab: &Lab,
) -> Result<()> {
    setup::ensure(&[Package::new("pgbackrest", "/usr/bin/pgbackrest")])?;
    let prefix = lab.debians(None)?;
    let dir = prefix.new_dir("backrest")?;
    let archive = format!(
        "pgbackrest --config={}/pgbackrest.conf --stanza=main archive-push %p",
        dir.display()
    );
    let cluster = Builder::new(prefix)
        .own_identity()
        .set("archive_mode", "on")
        .set("archive_command", &archive)
        .start()?;
    configure(&cluster, &dir)?;
    run(&cluster, &dir, &["stanza-create"])?;
    let mut session = cluster.connect("postgres")?;
    let mut history = History::begin(&mut session)?;
    run(&cluster, &dir, &["backup", "--type=full", "--archive-copy"])?;
    history.draw_more(&mut session, 50)?;
    drop(session);
    cluster.stop(Shutdown::Fast)?;

    // As of the backup, with recovery: a new timeline.
    run(&cluster, &dir, &["restore", "--delta", "--type=immediate", "--target-action=promote"])?;
    cluster.start()?;
    let mut session = cluster.connect("postgres")?;
    process::wait_until("recovery is over", PATIENCE, || {
        session.one("SELECT NOT pg_is_in_recovery()", &[]).unwrap_or(false)
    })?;
    history.see(history.goes_on(&mut session)?);
    ensure!(jumps(&mut session)? == 1);
    drop(session);
    cluster.stop(Shutdown::Fast)?;

    // It always leaves a signal. Without it, it is a start like any other: no token recurs, and the jump
    // is for the administrator to make.
    run(&cluster, &dir, &["restore", "--delta", "--type=none", "--archive-mode=off"])?;
    fs::remove_file(cluster.data().join("recovery.signal"))?;
    cluster.start()?;
    let mut session = cluster.connect("postgres")?;
    ensure!(session.one::<bool>("SELECT timeline = 1 AND jumps = 0 FROM fence_status()", &[])?);
    let token: i64 = session.one("SELECT lease_acquire('first')", &[])?;
    ensure!(token > history.seen, "{token} was drawn after {} was seen", history.seen);
    history.see(token);
    session.run("SELECT fence_new_epoch()")?;
    history.goes_on(&mut session)?;
    Ok(())
}
