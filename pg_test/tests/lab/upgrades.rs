//! `pg_upgrade` to a newer major version.

use crate::epochs::jumps;
use crate::life::Life;
use pg_test::cluster::Builder;
use pg_test::process::output_of;
use pg_test::{ensure, newer, Lab, Result, Shutdown};
use std::sync::Arc;

pg_test::trials![; slow: an_upgraded_cluster_goes_on_above_all_that_was_seen];

fn an_upgraded_cluster_goes_on_above_all_that_was_seen(lab: &Lab) -> Result<()> {
    let old = lab.builder().own_identity().start()?;
    let mut session = old.connect("postgres")?;
    let mut life = Life::begin(&mut session)?;
    let identity: i64 = session.one("SELECT system_identifier FROM fence_status()", &[])?;
    life.draw_more(&mut session, 40)?;
    session.run("CREATE ROLE app LOGIN; SELECT fence_grant('app')")?;
    drop(session);
    old.stop(Shutdown::Fast)?;

    let prefix = Arc::new(newer::prefix(lab.rundir().clone())?);
    let new = Builder::new(prefix.clone()).create_by(|prefix, data| {
        let mut initdb = prefix.command("initdb")?;
        initdb.args(["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8"]);
        initdb.args(["--locale=C.UTF-8", "--no-instructions", "--no-data-checksums", "-D"]);
        output_of(initdb.arg(data)).map(drop)
    })?;
    let mut upgrade = prefix.command("pg_upgrade")?;
    upgrade.args(["--username=postgres", "--no-sync", "--socketdir"]).arg(old.dir());
    upgrade.arg("-b").arg(lab.prefix().bin_dir()).arg("-B").arg(prefix.bin_dir());
    upgrade.arg("-d").arg(old.data()).arg("-D").arg(new.data());
    output_of(upgrade.current_dir(new.dir()))?;
    new.start()?;

    let mut session = new.connect("postgres")?;
    let version: String = session.one("SHOW server_version", &[])?;
    ensure!(version.starts_with(newer::MAJOR), "{version}");
    let status =
        "SELECT timeline = 1 AND jumps = 0 AND system_identifier <> $1 FROM fence_status()";
    ensure!(session.one::<bool>(status, &[&identity])?);
    ensure!(session.one::<i64>("SELECT last_token FROM fence_status()", &[])? == life.seen);
    life.goes_on(&mut session)?;
    ensure!(jumps(&mut session)? == 1);
    let mut app = new.conninfo("postgres").user("app").connect()?;
    app.run("SELECT lease_acquire('app')")?;
    app.refused("SELECT fence_new_epoch()", "42501")?;
    // The library of the newer version goes on where the other one was.
    session.run(
        "DROP EXTENSION pg_fence CASCADE; CREATE EXTENSION pg_fence; SELECT lease_acquire('job')",
    )
}
