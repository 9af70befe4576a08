//! `pg_upgrade` to a newer major version. A change of the system identifier alone is tested in upgrades.script.

use crate::support::history::{History, epochs_begun};
use pg_test::cluster::Builder;
use pg_test::install_dir::InstallDir;
use pg_test::process::output_of;
use pg_test::skipped::left_out;
use pg_test::{Calls, Cluster, Context, Harness, Result, Session, ensure, harness_test};
use std::process::Command;
use std::sync::Arc;

/// Returns a stopped cluster of another major version.
fn cluster_of(harness: &Harness, major: &str) -> Result<Cluster> {
    let install_dir = match harness.install_dir().major() == major {
        true => harness.install_dir().clone(),
        false => Arc::new(InstallDir::of_major(harness.rundir().clone(), major)?),
    };
    // From 18 on a cluster has checksums by default, and an upgrade cannot change that.
    let options: &[&str] =
        if install_dir.major_number() < 18 { &[] } else { &["--no-data-checksums"] };
    Builder::new(install_dir).create_by(|install_dir, data| install_dir.initdb_with(data, options))
}

/// Leases of every kind, and a table with a managed fence column.
struct Leases {
    shared: i64,
    slot: i64,
    draft: i64,
}

impl Leases {
    fn begin(session: &mut Session) -> Result<Leases> {
        session.run(
            "CREATE TABLE drafts (id int PRIMARY KEY, words int, fence bigint);
             INSERT INTO drafts VALUES (1, 0);
             SELECT fence_protect('drafts', lease => 'draft:{id}', mode => 'managed')",
        )?;
        let shared =
            session.granted("SELECT lease_acquire('readers', ttl => '1 h', shared => true)")?;
        let slot = session.granted("SELECT lease_acquire('desks', ttl => '1 h', slots => 2)")?;
        session.granted("SELECT lease_acquire('seat', ttl => '1 h', session => true)")?;
        let draft = session.acquire("draft:1", "1 h")?;
        session.run(&format!(
            "BEGIN; SELECT lease_guard('draft:1', {draft}); UPDATE drafts SET words = 1; COMMIT"
        ))?;
        Ok(Leases { shared, slot, draft })
    }

    fn go_on(&self, session: &mut Session) -> Result<()> {
        // They are held until their deadlines, except the one whose session has ended.
        session.nothing("SELECT lease_acquire('readers')")?;
        session.granted("SELECT lease_acquire('readers', shared => true)")?;
        session.granted("SELECT lease_acquire('desks', slots => 2)")?;
        session.nothing("SELECT lease_acquire('desks', slots => 2)")?;
        session.granted("SELECT lease_acquire('seat')")?;
        let guarded = |token: i64| {
            format!(
                "BEGIN; SELECT lease_guard('draft:1', {token}); UPDATE drafts SET words = 2; COMMIT"
            )
        };
        session.refused(&guarded(self.draft), "PF004")?;
        session.run("ROLLBACK")?;
        session.refused("UPDATE drafts SET words = 2", "PF002")?;
        for (name, token) in [("readers", self.shared), ("desks", self.slot)] {
            ensure!(!session.speaks(name, token)?, "{name}: an old token speaks");
            let renewed = session.renew(name, token)?;
            let renewed = renewed.with_context(|| format!("{name}: its holder could not renew"))?;
            ensure!(session.speaks(name, renewed)?);
        }
        let renewed = session.renew("draft:1", self.draft)?.context("draft:1 was not renewed")?;
        session.run(&guarded(renewed))?;
        ensure!(session.one::<i64>("SELECT fence FROM drafts", &[])? == renewed);
        Ok(())
    }
}

/// pg_upgrade also upgrades to the same version; all files and file numbers are then new, as in any upgrade.
#[harness_test]
fn a_cluster_goes_on_in_one_of_its_version_above_all_that_was_seen(
    harness: &Harness,
) -> Result<()> {
    goes_on_after_upgrade(harness, harness.install_dir().major(), harness.install_dir().major())
}

#[harness_test(slow)]
fn a_cluster_of_15_goes_on_in_18_above_all_that_was_seen(harness: &Harness) -> Result<()> {
    goes_on_after_upgrade(harness, "15", "18")
}

#[harness_test(slow)]
fn a_cluster_of_16_goes_on_in_17_above_all_that_was_seen(harness: &Harness) -> Result<()> {
    goes_on_after_upgrade(harness, "16", "17")
}

#[harness_test(slow)]
fn a_cluster_of_17_goes_on_in_18_above_all_that_was_seen(harness: &Harness) -> Result<()> {
    goes_on_after_upgrade(harness, "17", "18")
}

#[harness_test(slow, from = 19)]
fn a_cluster_of_18_goes_on_in_19_above_all_that_was_seen(harness: &Harness) -> Result<()> {
    goes_on_after_upgrade(harness, "18", "19")
}

fn goes_on_after_upgrade(harness: &Harness, from: &str, to: &str) -> Result<()> {
    let old = cluster_of(harness, from)?;
    old.start()?;
    let mut session = old.connect("postgres")?;
    let mut history = History::begin(&mut session)?;
    let leases = Leases::begin(&mut session)?;
    let identity: i64 = session.one("SELECT system_identifier FROM fence_status()", &[])?;
    history.draw_more(&mut session, 40)?;
    session.run("CREATE ROLE app LOGIN; SELECT fence_grant('app')")?;
    let audit = "SELECT relation::text, finding, remedy FROM fence_audit()";
    let found = session.rows(audit)?;
    drop(session);
    old.stop()?;

    let new = cluster_of(harness, to)?;
    upgrade(&old, &new)?;
    new.start()?;

    let mut session = new.connect("postgres")?;
    let version: String = session.one("SHOW server_version", &[])?;
    ensure!(version.starts_with(to), "{version}");
    let status =
        "SELECT timeline = 1 AND jumps = 0 AND system_identifier <> $1 FROM fence_status()";
    ensure!(session.one::<bool>(status, &[&identity])?);
    ensure!(session.one::<i64>("SELECT last_token FROM fence_status()", &[])? == history.seen);
    history.goes_on(&mut session)?;
    leases.go_on(&mut session)?;
    ensure!(epochs_begun(&mut session)? == 1);
    let finds = session.rows(audit)?;
    ensure!(finds == found, "{finds:?} after {found:?}");
    // The rights of a role were upgraded with it.
    let mut app = new.conninfo("postgres").user("app").connect()?;
    app.run("SELECT lease_acquire('app')")?;
    app.refused("SELECT fence_new_epoch()", "42501").map(drop)
}

fn upgrade(old: &Cluster, new: &Cluster) -> Result<()> {
    let mut upgrade = new.install_dir().command("pg_upgrade")?;
    upgrade.args(["--username=postgres", "--no-sync", "--socketdir"]).arg(old.dir());
    upgrade.arg("-b").arg(old.install_dir().bin_dir()).arg("-B").arg(new.install_dir().bin_dir());
    upgrade.arg("-d").arg(old.data()).arg("-D").arg(new.data());
    let Err(error) = output_of(upgrade.current_dir(new.dir())) else { return Ok(()) };
    // Its own output only names the file with the cause.
    let mut find = Command::new("grep");
    let logs = new.data().join("pg_upgrade_output.d");
    let why = output_of(find.args(["-rhiE", "error|fatal"]).arg(logs)).unwrap_or_default();
    if why.contains("unrecognized parameter \"pg_attver\"") {
        // 15.20 (November 2026) and the other minor releases of that date dump what earlier releases of any version
        // cannot read.
        return left_out("the newer version's minor release is older than the old one's");
    }
    Err(error.context(why))
}
