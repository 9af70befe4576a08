//! A cluster's files under another system identifier: what `pg_upgrade` makes of them.
//!
//! It is no upgrade: there is no newer PostgreSQL to be had that can read what this one writes. The
//! files are the same, with every oid, and a new control file gives them another identity, as an
//! upgrade does (by the same program, `pg_resetwal`).

use crate::epochs::jumps;
use crate::life::Life;
use pg_test::process::{as_server_user, output_of};
use pg_test::{ensure, Cluster, Context, Lab, Result, Shutdown};
use std::fs;
use std::process::Command;

pg_test::trials![a_cluster_under_another_identity_goes_on_above_all_that_was_seen];

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

fn a_cluster_under_another_identity_goes_on_above_all_that_was_seen(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().own_identity().start()?;
    let mut session = cluster.connect("postgres")?;
    let mut life = Life::begin(&mut session)?;
    life.draw_more(&mut session, 40)?;
    let identity = "SELECT system_identifier FROM fence_status()";
    let before: i64 = session.one(identity, &[])?;
    drop(session);
    cluster.stop(Shutdown::Fast)?;
    change_identity(lab, &cluster)?;
    cluster.start()?;
    let mut session = cluster.connect("postgres")?;
    ensure!(session.one::<i64>(identity, &[])? != before, "it is the same cluster still");
    ensure!(session.one::<bool>("SELECT timeline = 1 AND jumps = 0 FROM fence_status()", &[])?);
    ensure!(session.one::<i64>("SELECT last_token FROM fence_status()", &[])? == life.seen);
    life.goes_on(&mut session)?;
    ensure!(jumps(&mut session)? == 1);
    Ok(())
}
