//! Backups, dumps and copies that are put in the place of what went on without them.

use crate::support::history::History;
use crate::tokens::jumps::jumps;
use pg_test::cluster::base_backup;
use pg_test::process::PATIENCE;
use pg_test::{ensure, lab_test, process, Cluster, Database, Lab, Result, Session, Shutdown};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Copies a directory as the server's user.
pub fn copy_dir(from: &Path, to: &Path) -> Result<()> {
    let mut command = Command::new("cp");
    process::as_server_user(&mut command)?;
    process::output_of(command.arg("-a").arg(from).arg(to))?;
    Ok(())
}

#[lab_test]
fn recovery_to_a_point_in_time_goes_on_above_all_that_was_seen(lab: &Lab) -> Result<()> {
    let archive = lab.prefix().new_dir("archive")?;
    let copy = format!("cp %p {}/%f", archive.display());
    let builder = lab.builder().set("archive_mode", "on").set("archive_command", &copy);
    let primary = builder.start()?;
    let backup = lab.prefix().new_dir("backup")?.join("data");
    base_backup(lab.prefix(), &primary, &backup)?;
    let mut session = primary.connect("postgres")?;
    let mut history = History::begin(&mut session)?;
    session.run("SELECT pg_create_restore_point('here')")?;
    history.draw_more(&mut session, 100)?;
    session.run("SELECT pg_switch_wal(); CHECKPOINT")?;
    primary.stop(Shutdown::Fast)?;

    // Twice from the same backup: the second recovery finds the first one's history, or does not.
    for forgetful in [false, true] {
        if forgetful {
            for entry in fs::read_dir(&archive)? {
                let path = entry?.path();
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                if !name.starts_with("00000001") {
                    fs::remove_file(path)?;
                }
            }
        }
        let restored = lab.builder().create_by(|_, data| copy_dir(&backup, data))?;
        restored.configure(&[
            ("archive_mode", "on"),
            ("archive_command", &copy),
            ("restore_command", &format!("cp {}/%f %p", archive.display())),
            ("recovery_target_name", "here"),
            ("recovery_target_action", "promote"),
        ])?;
        fs::write(restored.data().join("recovery.signal"), "")?;
        restored.start()?;
        let mut session = restored.connect("postgres")?;
        process::wait_until("recovery is over", PATIENCE, || {
            session.one("SELECT NOT pg_is_in_recovery()", &[]).unwrap_or(false)
        })?;
        restored.make_unlogged_sequences_anew()?;
        ensure!(session.one::<i32>("SELECT timeline FROM fence_status()", &[])? == 2);
        history.see(history.goes_on(&mut session)?);
        ensure!(jumps(&mut session)? == 1);
        history.draw_more(&mut session, 40)?;
        restored.stop(Shutdown::Fast)?;
    }
    Ok(())
}

/// Dumps a database in the custom format.
pub fn dump(lab: &Lab, cluster: &Cluster, dbname: &str) -> Result<String> {
    let file = lab.prefix().new_dir("dump")?.join("db.dump").to_string_lossy().into_owned();
    lab.run("pg_dump", &["-Fc", "-f", &file, "-d", &cluster.conninfo(dbname).to_string()])?;
    Ok(file)
}

/// Restores it; with `options`, for example `--no-owner`.
pub fn restore(
    lab: &Lab,
    cluster: &Cluster,
    dbname: &str,
    file: &str,
    options: &[&str],
) -> Result<()> {
    let conninfo = cluster.conninfo(dbname).to_string();
    let args = [&["--exit-on-error", "-d", &conninfo], options, &[file]].concat();
    lab.run("pg_restore", &args).map(drop)
}

#[lab_test]
fn a_dump_goes_on_in_another_database(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let mut history = History::begin(&mut session)?;
    let file = dump(lab, lab.cluster(), db.name())?;
    history.draw_more(&mut session, 100)?;
    for jobs in ["1", "3"] {
        let other = lab.bare_database()?;
        restore(lab, lab.cluster(), other.name(), &file, &["-j", jobs])?;
        let mut session = other.connect()?;
        ensure!(
            session.one::<i64>("SELECT last_token FROM fence_status()", &[])? >= history.written
        );
        history.goes_on(&mut session)?;
        ensure!(jumps(&mut session)? == 1);
    }
    Ok(())
}

#[lab_test]
fn a_dump_goes_on_in_another_cluster_without_its_roles(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let role = db.role("gone")?;
    let mut owner = db.connect()?;
    let mut history = History::begin(&mut owner)?;
    owner.run(&format!("SELECT fence_grant('{role}')"))?;
    let mut app = db.connect_as(&role)?;
    let theirs: i64 = app.one("SELECT lease_acquire('theirs', 'app', ttl => '1 hour')", &[])?;
    history.see(theirs);
    let file = dump(lab, lab.cluster(), db.name())?;
    history.draw_more(&mut owner, 40)?;

    let other = lab.builder().own_identity().start()?;
    restore(lab, &other, "postgres", &file, &["--no-owner", "--no-acl"])?;
    let mut session = other.connect("postgres")?;
    let shown = "SELECT role::text || ' ' || state FROM lease_info('theirs')";
    ensure!(session.text(shown)? == Some(format!("{role} held")));
    history.see(history.goes_on(&mut session)?);
    ensure!(jumps(&mut session)? == 1);
    // It stays taken by the role that is not there; a superuser may act for it.
    ensure!(session.one::<Option<i64>>("SELECT lease_acquire('theirs')", &[])?.is_none());
    session.run("CREATE ROLE other LOGIN; SELECT fence_grant('other')")?;
    let mut stranger = other.conninfo("postgres").user("other").connect()?;
    stranger.refused(&format!("SELECT lease_renew('theirs', {theirs})"), "42501")?;
    ensure!(session.one::<i64>("SELECT lease_renew('theirs', $1)", &[&theirs])? > history.seen);
    // Once the role is there, it has its lease again.
    session.run(&format!("CREATE ROLE {role} LOGIN; SELECT fence_grant('{role}')"))?;
    let mut app = other.conninfo("postgres").user(&role).connect()?;
    ensure!(app
        .one::<Option<i64>>(
            "SELECT lease_release('theirs', lease_renew('theirs', $1))",
            &[&theirs]
        )?
        .is_some());
    Ok(())
}

#[lab_test]
fn a_dump_restored_in_place_goes_on(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let mut history = History::begin(&mut session)?;
    let file = dump(lab, lab.cluster(), db.name())?;
    history.draw_more(&mut session, 60)?;
    // Sessions stay connected while everything is dropped and made again under them.
    restore(lab, lab.cluster(), db.name(), &file, &["--clean", "--if-exists"])?;
    history.goes_on(&mut session)?;
    ensure!(jumps(&mut db.connect()?)? == 1);
    Ok(())
}

#[lab_test]
fn a_dump_carries_the_grants(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (user, admin) = (db.role("user")?, db.role("admin")?);
    db.connect()?.run(&format!("SELECT fence_grant('{user}'), fence_grant('{admin}', 'admin')"))?;
    let file = dump(lab, lab.cluster(), db.name())?;
    let other = lab.bare_database()?;
    restore(lab, lab.cluster(), other.name(), &file, &[])?;
    let mut user = other.connect_as(&user)?;
    user.run("SELECT lease_acquire('job'), lease_info('job'), fence_status(); SELECT * FROM fence.leases")?;
    user.refused("SELECT lease_revoke('job')", "42501")?;
    user.refused("SELECT setval('fence.token_seq', 1)", "42501")?;
    let mut admin = other.connect_as(&admin)?;
    admin.run("SELECT lease_revoke('job'), lease_prune(), fence_new_epoch()")?;
    let rights = crate::roles::public_rights(&other)?;
    ensure!(rights == crate::roles::PUBLIC, "{rights:?}");
    Ok(())
}

#[lab_test]
fn a_dump_taken_before_the_first_draw_gives_no_token_twice(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let file = dump(lab, lab.cluster(), db.name())?;
    let seen: i64 = db.connect()?.one("SELECT lease_acquire('job')", &[])?;
    let other = lab.bare_database()?;
    restore(lab, lab.cluster(), other.name(), &file, &[])?;
    let next: i64 = other.connect()?.one("SELECT lease_acquire('job')", &[])?;
    ensure!(next > seen, "{next} was seen before");
    Ok(())
}

/// Has a role dump a database; `options` as for `pg_dump`.
fn dump_as(lab: &Lab, db: &Database, role: &str, options: &[&str]) -> Result<String> {
    let file = lab.prefix().new_dir("dump")?.join("db.dump").to_string_lossy().into_owned();
    let conninfo = db.conninfo().user(role).to_string();
    lab.run("pg_dump", &[&["-Fc", "-f", &file, "-d", &conninfo], options].concat())?;
    Ok(file)
}

/// A database that a role owns, with a fenced table of its own that its superuser has written.
fn owned(lab: &Lab) -> Result<(Database, String, i64)> {
    let db = lab.database()?;
    let owner = db.role("owner")?;
    db.connect()?.run(&format!(
        "ALTER DATABASE {} OWNER TO {owner}; GRANT CREATE ON SCHEMA public TO {owner}",
        db.name()
    ))?;
    db.connect_as(&owner)?.run(
        "CREATE TABLE orders (id int PRIMARY KEY, total int, fence bigint);
         INSERT INTO orders VALUES (7, 0); SELECT fence_protect('orders')",
    )?;
    let mut session = db.connect()?;
    let token = session.one("SELECT lease_acquire('order:7', ttl => '1 hour')", &[])?;
    session.run(&format!("UPDATE orders SET total = 1, fence = {token}"))?;
    Ok((db, owner, token))
}

/// In a database with the rows but not the state: the old worker is refused, a new one is not.
fn is_fenced_on(session: &mut Session, old: i64) -> Result<()> {
    ensure!(session.one::<i64>("SELECT fence FROM orders", &[])? == old, "the row is another");
    session.refused(&format!("UPDATE orders SET total = 2, fence = {old}"), "PF001")?;
    let new: i64 = session.one("SELECT lease_acquire('order:7')", &[])?;
    ensure!(new > old, "{new} after {old}");
    session.run(&format!("UPDATE orders SET total = 3, fence = {new}"))?;
    session.refused(&format!("UPDATE orders SET total = 4, fence = {old}"), "PF001")?;
    Ok(())
}

#[lab_test]
fn a_role_that_may_administer_leases_may_dump_them(lab: &Lab) -> Result<()> {
    let (db, owner, token) = owned(lab)?;
    let denied = |outcome: Result<String>| -> Result<()> {
        let error = outcome.err().map(|error| format!("{error:?}")).unwrap_or_default();
        // Of a sequence pg_dump itself says so from 18 on, in its own words.
        let words = ["permission denied", "user may lack SELECT privilege"];
        ensure!(words.iter().any(|said| error.contains(said)), "{error:?}");
        Ok(())
    };
    denied(dump_as(lab, &db, &owner, &[]))?;
    for level in ["monitor", "worker"] {
        db.connect()?.run(&format!("SELECT fence_grant('{owner}', '{level}')"))?;
        denied(dump_as(lab, &db, &owner, &[]))?;
    }
    db.connect()?.run(&format!("SELECT fence_grant('{owner}', 'admin')"))?;
    let file = dump_as(lab, &db, &owner, &[])?;
    let other = lab.bare_database()?;
    restore(lab, lab.cluster(), other.name(), &file, &[])?;
    let mut session = other.connect()?;
    let shown = "SELECT state || ' ' || first_token FROM lease_info('order:7')";
    ensure!(session.text(shown)? == Some(format!("held {token}")), "the state is not there");
    ensure!(jumps(&mut session)? == 0);
    ensure!(session.one::<i64>("SELECT lease_renew('order:7', $1)", &[&token])? > token);
    ensure!(jumps(&mut session)? == 1);
    // It may read that, and not write it.
    let mut owner_session = db.connect_as(&owner)?;
    for write in [
        "UPDATE fence.lease SET closing_token = 1",
        "SELECT setval('fence.token_seq', 1)",
        "SELECT nextval('fence.token_seq')",
        "SELECT * FROM fence.lease FOR UPDATE",
        "BEGIN; LOCK TABLE fence.lease IN ROW SHARE MODE",
    ] {
        owner_session.refused(write, "42501")?;
        owner_session.run("ROLLBACK")?;
    }
    db.connect()?.run(&format!("SELECT fence_revoke('{owner}')"))?;
    denied(dump_as(lab, &db, &owner, &[]))
}

#[lab_test]
fn a_dump_by_an_owner_who_may_not_read_the_state_gives_no_token_twice(lab: &Lab) -> Result<()> {
    let (db, owner, token) = owned(lab)?;
    let file = dump_as(lab, &db, &owner, &["--exclude-schema=fence"])?;
    // A superuser makes the extension, and the owner loads the rest.
    let other = lab.database()?;
    other.connect()?.run(&format!("GRANT CREATE ON SCHEMA public TO {owner}"))?;
    let conninfo = other.conninfo().user(&owner).to_string();
    lab.run("pg_restore", &["--exit-on-error", "--no-comments", "-d", &conninfo, &file])?;
    is_fenced_on(&mut other.connect()?, token)
}

#[lab_test]
fn a_dump_of_the_tables_alone_gives_no_token_twice(lab: &Lab) -> Result<()> {
    let (db, owner, token) = owned(lab)?;
    let file = dump_as(lab, &db, &owner, &["-t", "orders"])?;
    let other = lab.database()?;
    restore(lab, lab.cluster(), other.name(), &file, &[])?;
    is_fenced_on(&mut other.connect()?, token)
}
