//! The Debian package on a Debian with PostgreSQL and without Rust.

use super::release::released_package;
use super::{directory, unpacked};
use pg_test::cluster::free_port;
use pg_test::process::{self, PATIENCE, output_of};
use pg_test::setup::{self, Package};
use pg_test::skipped::left_out;
use pg_test::{
    Conninfo, Context, Harness, Result, Session, ensure, extension, harness_test, majors,
};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Returns an archive of a Debian with its PostgreSQL, made once.
fn debian(major: &str) -> Result<PathBuf> {
    let archive = pg_test::package::directory().join(format!("debian-pg{major}.tar"));
    if archive.exists() {
        return Ok(archive);
    }
    setup::ensure(&[Package::new("mmdebstrap", "/usr/bin/mmdebstrap")])?;
    fs::create_dir_all(pg_test::package::directory())?;
    let codename =
        output_of(Command::new("sh").args(["-c", ". /etc/os-release; echo $VERSION_CODENAME"]))?;
    let fresh = archive.with_extension("new.tar");
    let mut command = Command::new("mmdebstrap");
    command.arg("--variant=apt").arg(format!("--include=postgresql-{major}"));
    output_of(command.arg(codename.trim()).arg(&fresh))?;
    fs::rename(fresh, &archive)?;
    Ok(archive)
}

#[harness_test(slow)]
fn a_fresh_debian_without_rust_installs_it_and_runs_the_readme(harness: &Harness) -> Result<()> {
    ensure!(process::server_user()?.is_some(), "only root may change to another root directory");
    let major = extension::major_of(&majors::chosen()?.pg_config)?;
    if !majors::is_known(&format!("postgresql-{major}"))? {
        return left_out("this Debian has no such version");
    }
    let root = unpacked(&debian(&major)?, directory(harness, "debian")?)?;
    let sh = |script: &str| {
        let mut command = harness.rundir().command("chroot");
        command.arg(&root).args(["/bin/sh", "-euc", script]).env_remove("PGHOST");
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C.UTF-8");
        output_of(&mut command)
    };
    let package = released_package(&directory(harness, "debian-package")?)?;
    fs::copy(&package, root.join("tmp/package.deb"))?;

    ensure!(
        sh("command -v cargo rustc gcc || echo none")?.trim() == "none",
        "that is no fresh root"
    );
    sh("dpkg --install /tmp/package.deb; dpkg --audit; dpkg --verify")?;
    let (port, name) = (free_port()?, format!("{major} main"));
    let hba = format!("/etc/postgresql/{major}/main/pg_hba.conf");
    sh(&format!(
        "mkdir -p -m 1777 /dev/shm; chmod 1777 /dev/shm
         test -d /etc/postgresql/{major}/main || pg_createcluster {name}
         pg_conftool {name} set port {port}
         sed -i 's/scram-sha-256/trust/' {hba}
         pg_ctlcluster {name} start"
    ))?;
    let conninfo = Conninfo::new(port, "postgres");
    let ready = || Session::connect(&conninfo.to_string()).is_ok();
    let log = format!("var/log/postgresql/postgresql-{major}-main.log");
    process::wait_until("the server in the other root answers", PATIENCE, ready)
        .with_context(|| fs::read_to_string(root.join(log)).unwrap_or_default())?;
    crate::project::pages::play("README.md", conninfo)?;

    // Removing the package leaves the database's objects. Calls then fail with an error that names the missing library;
    // after another installation they work.
    sh(&format!("dpkg --remove postgresql-{major}-pg-fence; dpkg --install /tmp/package.deb"))?;
    // pg_ctlcluster cannot be used: it reads /proc, which is missing in that root.
    sh(&format!(
        "su postgres -c '/usr/lib/postgresql/{major}/bin/pg_ctl -D /var/lib/postgresql/{major}/main -m fast stop'"
    ))?;
    // No file of the package remains after it is purged.
    sh("dpkg --purge $(dpkg-query -W -f '${Package}\n' | grep pg-fence)")?;
    let left = sh("find / -xdev -name '*pg_fence*' -o -xdev -name '*pg-fence*'")?;
    ensure!(left.trim().is_empty(), "left behind: {left:?}");
    Ok(())
}
