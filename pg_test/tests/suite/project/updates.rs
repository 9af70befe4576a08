//! `ALTER EXTENSION pg_fence UPDATE`: it leaves the same objects as a fresh installation, and existing leases and
//! fences continue.
//!
//! It is tested from each released version whose script is in `sql/`. Until there is one, from an invented version.

automod::dir!(pub "tests/suite/project/updates");

use super::install::{objects, same};
use crate::support::dumps::{dump, restore};
use crate::support::history::History;
use pg_test::cluster::Builder;
use pg_test::extension::{Extension, VERSION};
use pg_test::install_dir::InstallDir;
use pg_test::rundir::RunDir;
use pg_test::{Calls, Cluster, Database, Harness, Result, Session, ensure, harness_test, majors};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A version that is updated to the present one.
struct EarlierVersion {
    version: String,
    /// The scripts of the present version, with the earlier version's script and the update script.
    files: Extension,
}

impl EarlierVersion {
    fn all(harness: &Harness) -> Vec<EarlierVersion> {
        let files = harness.extension();
        let version = |name: &String| -> Option<String> {
            Some(name.strip_prefix("pg_fence--")?.strip_suffix(".sql")?.to_owned())
        };
        // An update script's name contains two versions.
        let released = |version: &String| version != VERSION && !version.contains("--");
        let all = files.scripts().keys().filter_map(version).filter(released);
        let all: Vec<_> =
            all.map(|version| EarlierVersion { version, files: files.clone() }).collect();
        match all.is_empty() {
            true => vec![EarlierVersion::made_up(harness)],
            false => all,
        }
    }

    /// Returns an invented version: the present one, which then gets more objects.
    fn made_up(harness: &Harness) -> EarlierVersion {
        let (version, files) = ("0.0.1".to_owned(), harness.extension().clone());
        let ours = format!("pg_fence--{VERSION}.sql");
        let then = files.scripts()[&ours].clone();
        let now = format!("{then}\n{ADDED}");
        let files = files
            .with_script(format!("pg_fence--{version}.sql"), then)
            .with_script(format!("pg_fence--{version}--{VERSION}.sql"), ADDED.to_owned())
            .with_script(ours, now);
        EarlierVersion { version, files }
    }

    /// Starts a server with all these files.
    fn server(&self, harness: &Harness) -> Result<Cluster> {
        let rundir = Arc::new(RunDir::create(harness.rundir().program())?);
        let install_dir = Arc::new(InstallDir::copy(rundir, &majors::chosen()?)?);
        install_dir.install(&self.files)?;
        Builder::new(install_dir).start()
    }

    /// Creates a database and returns it with a session.
    fn database(&self, server: &Cluster) -> Result<(Database, Session)> {
        let db = Database::create(server.conninfo("postgres"))?;
        let mut session = db.connect()?;
        session.run("SET client_min_messages = error")?;
        self.create(&mut session)?;
        Ok((db, session))
    }

    fn create(&self, session: &mut Session) -> Result<()> {
        session.run(&format!("CREATE EXTENSION pg_fence VERSION '{}'", self.version))
    }
}

/// The objects of the present version that the invented one lacks.
const ADDED: &str = "
    CREATE FUNCTION added() RETURNS int LANGUAGE sql RETURN 1;
    CREATE SEQUENCE fence.added_seq;
    CREATE VIEW fence.added AS SELECT 1 AS one;
    ALTER TABLE fence.lease ADD added text;
    COMMENT ON FUNCTION lease_check(text, bigint) IS 'changed';
    GRANT EXECUTE ON FUNCTION lease_check(text, bigint) TO PUBLIC;
    ALTER FUNCTION fence_status() COST 7;
";

#[harness_test]
fn updated_it_is_what_a_fresh_installation_is(harness: &Harness) -> Result<()> {
    for earlier in EarlierVersion::all(harness) {
        let server = earlier.server(harness)?;
        server.connect("postgres")?.run("CREATE ROLE guest")?;
        for schema in ["public", "\"My App\""] {
            let made = |update: bool| -> Result<BTreeSet<String>> {
                let db = Database::create(server.conninfo("postgres"))?;
                let mut session = db.connect()?;
                session.run(&format!(
                    "CREATE SCHEMA IF NOT EXISTS {schema}; SET search_path = {schema};
                     ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO guest;
                     ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO guest;
                     ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO guest"
                ))?;
                if update {
                    earlier.create(&mut session)?;
                    session.run("ALTER EXTENSION pg_fence UPDATE")?;
                } else {
                    session.run("CREATE EXTENSION pg_fence")?;
                }
                objects(harness, &db.conninfo())
            };
            let fresh = made(false)?;
            ensure!(fresh.len() > 100, "only {} objects", fresh.len());
            same(&fresh, &made(true)?)?;
        }
    }
    Ok(())
}

#[harness_test]
fn a_dump_of_an_earlier_version_goes_on_in_this_one(harness: &Harness) -> Result<()> {
    for earlier in EarlierVersion::all(harness) {
        let server = earlier.server(harness)?;
        let (db, mut session) = earlier.database(&server)?;
        let mut history = History::begin(&mut session)?;
        let file = dump(harness, &server, db.name())?;
        history.draw_more(&mut session, 50)?;
        let other = Database::create(server.conninfo("postgres"))?;
        restore(harness, &server, other.name(), &file, &[])?;
        let mut session = other.connect()?;
        versions(&mut session, VERSION)?;
        history.goes_on(&mut session)?;
    }
    Ok(())
}

/// Checks statements with the present library and the objects of the other version.
fn versions(session: &mut Session, sql: &str) -> Result<()> {
    let versions = "SELECT library_version || ' ' || sql_version FROM fence_status()";
    let found = session.text(versions)?;
    ensure!(found == Some(format!("{VERSION} {sql}")), "{found:?}, not {VERSION} {sql}");
    Ok(())
}

#[harness_test]
fn an_update_changes_nothing_of_what_is_held_fenced_and_granted(harness: &Harness) -> Result<()> {
    for earlier in EarlierVersion::all(harness) {
        let server = earlier.server(harness)?;
        let (db, mut session) = earlier.database(&server)?;
        let (app, admin) = (db.role("app")?, db.role("admin")?);
        let history = History::begin(&mut session)?;
        session.run(&format!(
            "CREATE TABLE saved (id int PRIMARY KEY, v int); INSERT INTO saved VALUES (7, 0);
             SELECT fence_protect('saved', mode => 'managed', lease => 'saved:{{id}}');
             SELECT lease_acquire('config', 'r1', '1 h', shared => true), lease_acquire('config', 'r2', '1 h', shared => true),
                    lease_acquire('gpu', 'j1', '1 h', slots => 2), lease_acquire('own', 's', '1 h', session => true);
             SELECT fence_grant('{app}'), fence_grant('{admin}', 'admin')"
        ))?;
        let mut owner = db.connect()?;
        versions(&mut owner, &earlier.version)?;
        owner.run("SELECT lease_acquire('first')")?;
        let notices = owner.notices();
        ensure!(
            notices.iter().any(|n| n.message.contains(VERSION)),
            "no notice names the version: {notices:?}"
        );
        let shown = "SELECT name, mode, state, holder, role, token, first_token, expires_at, renewals FROM fence.leases ORDER BY 1, 4";
        let tables = "SELECT tgrelid::regclass, tgname, tgenabled, pg_get_triggerdef(oid) FROM pg_trigger WHERE tgfoid = 'fenced'::regproc ORDER BY 1, 2";
        let mut facts = || -> Result<_> { Ok((session.rows(shown)?, session.rows(tables)?)) };
        let before = facts()?;
        // Another session has an open transaction that guards a lease and has written. The update does not wait for it.
        let mut guard = db.connect()?;
        guard.run("BEGIN")?;
        guard.run(&format!("UPDATE orders SET total = 2, fence = {}", history.token))?;
        owner.run("SET lock_timeout = '20 s'; ALTER EXTENSION pg_fence UPDATE")?;
        versions(&mut owner, VERSION)?;
        ensure!(facts()? == before, "leases or fences are others than before");
        owner.run("SELECT lease_revoke('order:7')")?;
        owner.nothing("SELECT lease_acquire('order:7')")?;
        guard.run("COMMIT")?;
        ensure!(owner.one::<i32>("SELECT total FROM orders", &[])? == 2);
        let next = owner.acquire("order:7", "1 h")?;
        ensure!(next > history.seen);
        guard
            .refused(&format!("UPDATE orders SET total = 3, fence = {}", history.token), "PF004")?;
        ensure!(owner.rows("SELECT * FROM fence_audit() WHERE severity = 'hole'")?.is_empty());

        // Roles have the rights that they had before, also after a dump and restore.
        let other = Database::create(server.conninfo("postgres"))?;
        restore(harness, &server, other.name(), &dump(harness, &server, db.name())?, &[])?;
        for db in [&db, &other] {
            let mut user = db.connect_as(&app)?;
            user.acquire("job", "1 h")?;
            user.refused("SELECT lease_prune()", "42501")?;
            db.connect_as(&admin)?.run("SELECT lease_prune(), fence_new_epoch()")?;
        }
    }
    Ok(())
}
