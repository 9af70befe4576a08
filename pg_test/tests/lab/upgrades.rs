//! `pg_upgrade` to a newer major version; and what it does to Debian's: the cluster's files under another
//! system identifier.
//!
//! The newer versions to be had cannot upgrade a cluster of Debian's (its `pg_attver` is not theirs), but one
//! of their own. For Debian's the files stay the same, with every oid, and a new control file gives them
//! another identity, as an upgrade does (by the same program, `pg_resetwal`).

use crate::epoch_jumps::jumps;
use crate::support::history::History;
use pg_test::cluster::Builder;
use pg_test::majors;
use pg_test::prefix::Prefix;
use pg_test::process::{as_server_user, output_of};
use pg_test::{ensure, lab_test, Cluster, Context, Lab, Result, Shutdown};
use std::fs;
use std::process::Command;
use std::sync::Arc;

/// Gives a stopped cluster a new control file, and so a new system identifier.
fn change_identity(lab: &Lab, cluster: &Cluster) -> Result<()> {
    let data = cluster.data();
    let path = data.to_string_lossy().into_owned();
    let control = lab.run("pg_controldata", &["-D", &path])?;
    let value = |label: &str| -> Result<String> {
        let line = control.lines().find_map(|line| line.strip_prefix(label));
        Ok(line.with_context(|| format!("no {label}"))?.trim().to_owned())
    };
    let xid = value("Latest checkpoint's NextXID:")?;
    let xid = xid.rsplit(':').next().unwrap_or_default().to_owned();
    let oid = value("Latest checkpoint's NextOID:")?;
    let multi = value("Latest checkpoint's NextMultiXactId:")?;
    let oldest_multi = value("Latest checkpoint's oldestMultiXid:")?;
    let offset = value("Latest checkpoint's NextMultiOffset:")?;
    let file = data.join("global/pg_control");
    fs::remove_file(&file)?;
    output_of(as_server_user(Command::new("touch").arg(&file))?)?;
    let multis = format!("{multi},{oldest_multi}");
    let args = ["-f", "-D", &path, "-x", &xid, "-o", &oid, "-m", &multis, "-O", &offset];
    lab.run("pg_resetwal", &args).map(drop)
}

#[lab_test]
fn a_cluster_under_another_identity_goes_on_above_all_that_was_seen(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().own_identity().start()?;
    let mut session = cluster.connect("postgres")?;
    let mut history = History::begin(&mut session)?;
    history.draw_more(&mut session, 40)?;
    let identity = "SELECT system_identifier FROM fence_status()";
    let before: i64 = session.one(identity, &[])?;
    drop(session);
    cluster.stop(Shutdown::Fast)?;
    change_identity(lab, &cluster)?;
    cluster.start()?;
    let mut session = cluster.connect("postgres")?;
    ensure!(session.one::<i64>(identity, &[])? != before, "it is the same cluster still");
    ensure!(session.one::<bool>("SELECT timeline = 1 AND jumps = 0 FROM fence_status()", &[])?);
    ensure!(session.one::<i64>("SELECT last_token FROM fence_status()", &[])? == history.seen);
    history.goes_on(&mut session)?;
    ensure!(jumps(&mut session)? == 1);
    Ok(())
}

/// A stopped cluster of another major version.
fn cluster_of(lab: &Lab, major: &str) -> Result<Cluster> {
    let prefix = Arc::new(majors::prefix(lab.rundir().clone(), major)?);
    Builder::new(prefix).create_by(|prefix: &Prefix, data| {
        let mut initdb = prefix.command("initdb")?;
        initdb.args(["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8"]);
        initdb.args(["--locale=C.UTF-8", "-D"]).arg(data);
        if major > "17" {
            initdb.arg("--no-data-checksums");
        }
        output_of(&mut initdb).map(drop)
    })
}

#[lab_test(slow)]
fn an_upgraded_cluster_goes_on_above_all_that_was_seen(lab: &Lab) -> Result<()> {
    let old = cluster_of(lab, "16")?;
    old.start()?;
    let mut session = old.connect("postgres")?;
    let mut history = History::begin(&mut session)?;
    let identity: i64 = session.one("SELECT system_identifier FROM fence_status()", &[])?;
    history.draw_more(&mut session, 40)?;
    session.run("CREATE ROLE app LOGIN; SELECT fence_grant('app')")?;
    drop(session);
    old.stop(Shutdown::Fast)?;

    let new = cluster_of(lab, "18")?;
    let mut upgrade = new.prefix().command("pg_upgrade")?;
    upgrade.args(["--username=postgres", "--no-sync", "--socketdir"]).arg(old.dir());
    upgrade.arg("-b").arg(old.prefix().bin_dir()).arg("-B").arg(new.prefix().bin_dir());
    upgrade.arg("-d").arg(old.data()).arg("-D").arg(new.data());
    output_of(upgrade.current_dir(new.dir()))?;
    new.start()?;

    let mut session = new.connect("postgres")?;
    let version: String = session.one("SHOW server_version", &[])?;
    ensure!(version.starts_with("18"), "{version}");
    let status =
        "SELECT timeline = 1 AND jumps = 0 AND system_identifier <> $1 FROM fence_status()";
    ensure!(session.one::<bool>(status, &[&identity])?);
    ensure!(session.one::<i64>("SELECT last_token FROM fence_status()", &[])? == history.seen);
    history.goes_on(&mut session)?;
    ensure!(jumps(&mut session)? == 1);
    ensure!(session.rows("SELECT * FROM fence_audit()")?.len() <= 1);
    // What was granted to a role went with it.
    let mut app = new.conninfo("postgres").user("app").connect()?;
    app.run("SELECT lease_acquire('app')")?;
    app.refused("SELECT fence_new_epoch()", "42501").map(drop)
}
