//! `ALTER EXTENSION pg_fence UPDATE`: what it leaves behind is what a fresh installation makes, and what was there
//! before goes on.
//!
//! Quick tests have the library of now under the SQL objects of an earlier version; slow ones also that version's own
//! library, in sessions that have loaded it before the files were replaced.

mod old_library;
mod under_load;

use crate::restores::{dump, restore};
use crate::support::history::History;
use pg_test::extension::VERSION;
use pg_test::{ensure, lab_test, released, Calls, Lab, Result, Session};
use std::collections::BTreeSet;

/// All that the catalogs say of what belongs to the extension, but for oids.
const OBJECTS: &str = r#"
    WITH member AS (
        SELECT d.classid, d.objid FROM pg_depend d JOIN pg_extension e ON d.refobjid = e.oid
         WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e' AND e.extname = 'pg_fence'),
    relation AS (SELECT c.* FROM pg_class c JOIN member ON classid = 'pg_class'::regclass AND objid = c.oid),
    function AS (SELECT p.* FROM pg_proc p JOIN member ON classid = 'pg_proc'::regclass AND objid = p.oid),
    open AS (
        SELECT oid::regclass::text AS what, coalesce(relacl, acldefault(CASE relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", relowner)) AS acl
          FROM relation
        UNION ALL SELECT oid::regprocedure::text, coalesce(proacl, acldefault('f', proowner)) FROM function
        UNION ALL SELECT nspname, nspacl FROM pg_namespace WHERE nspname = 'fence')
    SELECT concat_ws(' ', 'member', o.type, o.identity) FROM member, pg_identify_object(classid, objid, 0) o
    UNION ALL
    SELECT concat_ws(' ', 'comment', pg_describe_object(m.classid, m.objid, d.objsubid), d.description)
      FROM member m JOIN pg_description d ON d.classoid = m.classid AND d.objoid = m.objid
    UNION ALL
    SELECT concat_ws(' ', 'function', pg_get_functiondef(oid), proparallel, provolatile, procost, prorows, prosecdef, probin, prosrc)
      FROM function
    UNION ALL
    SELECT concat_ws(' ', 'view', oid::regclass, pg_get_viewdef(oid)) FROM relation WHERE relkind = 'v'
    UNION ALL
    SELECT concat_ws(' ', 'relation', oid::regclass, relkind, relpersistence, reloptions) FROM relation
    UNION ALL
    SELECT concat_ws(' ', 'column', r.oid::regclass, attnum, attname, format_type(atttypid, atttypmod), attnotnull, attstorage,
                     pg_get_expr(d.adbin, d.adrelid))
      FROM relation r JOIN pg_attribute a ON a.attrelid = r.oid AND a.attnum > 0
      LEFT JOIN pg_attrdef d ON d.adrelid = r.oid AND d.adnum = a.attnum
    UNION ALL
    SELECT concat_ws(' ', 'constraint', conrelid::regclass, pg_get_constraintdef(k.oid)) FROM pg_constraint k JOIN relation r ON r.oid = conrelid
    UNION ALL
    SELECT concat_ws(' ', 'index', pg_get_indexdef(indexrelid)) FROM pg_index JOIN relation r ON r.oid = indrelid
    UNION ALL
    SELECT concat_ws(' ', 'sequence', seqrelid::regclass, seqtypid::regtype, seqstart, seqincrement, seqmax, seqmin, seqcache, seqcycle)
      FROM pg_sequence JOIN relation r ON r.oid = seqrelid
    UNION ALL
    SELECT concat_ws(' ', 'right', what, grantee, privilege_type, is_grantable) FROM open CROSS JOIN aclexplode(acl)
    UNION ALL
    SELECT concat_ws(' ', 'at first', pg_describe_object(i.classoid, i.objoid, i.objsubid), i.privtype, a.grantee, a.privilege_type)
      FROM member m JOIN pg_init_privs i ON i.classoid = m.classid AND i.objoid = m.objid CROSS JOIN aclexplode(i.initprivs) a
    UNION ALL
    SELECT concat_ws(' ', 'depends', pg_describe_object(d.classid, d.objid, d.objsubid), 'on',
                     pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid), d.deptype)
      FROM member m JOIN pg_depend d ON d.classid = m.classid AND d.objid = m.objid
    UNION ALL
    SELECT concat_ws(' ', 'dumped', c::regclass, w) FROM pg_extension e, unnest(extconfig, extcondition) AS u (c, w)
     WHERE extname = 'pg_fence'
    UNION ALL
    SELECT concat_ws(' ', 'extension', extversion, extrelocatable, n.nspname) FROM pg_extension JOIN pg_namespace n ON n.oid = extnamespace
     WHERE extname = 'pg_fence'"#;

fn objects(session: &mut Session) -> Result<BTreeSet<String>> {
    Ok(session.rows(OBJECTS)?.into_iter().flatten().flatten().collect())
}

fn same(fresh: &BTreeSet<String>, updated: &BTreeSet<String>) -> Result<()> {
    let missing: Vec<_> = fresh.difference(updated).collect();
    let besides: Vec<_> = updated.difference(fresh).collect();
    ensure!(
        missing.is_empty() && besides.is_empty(),
        "missing: {missing:#?}\nbesides: {besides:#?}"
    );
    Ok(())
}

/// The extension as of an earlier version, in the schema where it is created by default.
fn create(session: &mut Session, version: &str) -> Result<()> {
    session.run(&format!("CREATE EXTENSION pg_fence VERSION '{version}'"))
}

#[lab_test]
fn every_released_version_has_a_way_to_this_one(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let paths = db.connect()?.rows(
        "SELECT source FROM pg_extension_update_paths('pg_fence')
          WHERE path IS NOT NULL AND target = (SELECT default_version FROM pg_available_extensions WHERE name = 'pg_fence')",
    )?;
    let from: BTreeSet<String> = paths.into_iter().flatten().flatten().collect();
    let wanted: BTreeSet<String> = released::ALL.iter().map(|old| old.version.to_owned()).collect();
    ensure!(from == wanted, "ways from {from:?}");
    Ok(())
}

#[lab_test]
fn updated_it_is_what_a_fresh_installation_is(lab: &Lab) -> Result<()> {
    for schema in ["public", "\"My App\""] {
        let prepare = format!("CREATE SCHEMA IF NOT EXISTS {schema}; SET search_path = {schema}");
        let db = lab.bare_database()?;
        let mut fresh = db.connect()?;
        fresh.run(&format!("{prepare}; CREATE EXTENSION pg_fence"))?;
        let fresh = objects(&mut fresh)?;
        ensure!(fresh.len() > 200, "only {} facts", fresh.len());
        for old in released::ALL {
            let db = lab.bare_database()?;
            let mut session = db.connect()?;
            session.run(&prepare)?;
            create(&mut session, old.version)?;
            let before = objects(&mut session)?;
            ensure!(before != fresh, "there is nothing to update");
            session.run("ALTER EXTENSION pg_fence UPDATE")?;
            same(&fresh, &objects(&mut session)?)?;
        }
    }
    Ok(())
}

#[lab_test]
fn default_privileges_do_not_reach_what_an_update_makes(lab: &Lab) -> Result<()> {
    for old in released::ALL {
        let db = lab.bare_database()?;
        let (role, mut session) = (db.role("guest")?, db.connect()?);
        session.run(&format!(
            "ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO {role};
             ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO {role};
             ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO {role}"
        ))?;
        create(&mut session, old.version)?;
        session.run("ALTER EXTENSION pg_fence UPDATE")?;
        let holes = format!(
            "SELECT d.objid FROM pg_depend d, pg_extension e WHERE d.refobjid = e.oid AND d.deptype = 'e' AND extname = 'pg_fence'
               AND CASE d.classid WHEN 'pg_proc'::regclass THEN has_function_privilege('{role}', objid, 'EXECUTE')
                        WHEN 'pg_class'::regclass THEN has_table_privilege('{role}', objid, 'SELECT, UPDATE, INSERT') END"
        );
        let open = session.rows(&holes)?.len();
        ensure!(open == 4, "{open} objects are open to {role}, not the four for PUBLIC");
    }
    Ok(())
}

#[lab_test]
fn roles_keep_what_they_were_granted_and_a_dump_carries_it(lab: &Lab) -> Result<()> {
    for old in released::ALL {
        let db = lab.bare_database()?;
        let (app, admin, mut session) = (db.role("app")?, db.role("admin")?, db.connect()?);
        create(&mut session, old.version)?;
        session.run(&format!("SELECT fence_grant('{app}'), fence_grant('{admin}', true)"))?;
        session.run("ALTER EXTENSION pg_fence UPDATE")?;
        let told: Vec<String> = session.notices().iter().map(ToString::to_string).collect();
        ensure!(
            told.iter().any(|notice| notice.contains(&app)),
            "nobody is told of {app}: {told:?}"
        );
        let mut user = db.connect_as(&app)?;
        user.acquire("job", "1 h")?;
        user.refused("SELECT lease_prune()", "42501")?;
        db.connect_as(&admin)?.run("SELECT lease_prune(), fence_new_epoch()")?;
        // The new views are theirs once it is said again; then a dump has that, too.
        user.refused("SELECT * FROM fence.stats", "42501")?;
        session.run(&format!("SELECT fence_grant('{app}'), fence_grant('{admin}', true)"))?;
        user.run("SELECT * FROM fence.stats")?;
        let other = lab.bare_database()?;
        restore(lab, lab.cluster(), other.name(), &dump(lab, lab.cluster(), db.name())?, &[])?;
        other.connect_as(&app)?.run("SELECT * FROM fence.stats")?;
        other.connect_as(&admin)?.run("SELECT * FROM fence.refusals")?;
        session.run(&format!("SELECT fence_revoke('{app}')"))?;
        user.refused("SELECT * FROM fence.stats", "42501")?;
    }
    Ok(())
}

#[lab_test]
fn a_dump_of_an_earlier_version_goes_on_in_this_one(lab: &Lab) -> Result<()> {
    for old in released::ALL {
        let db = lab.bare_database()?;
        let mut session = db.connect()?;
        session.run("SET client_min_messages = error")?;
        create(&mut session, old.version)?;
        let mut history = History::begin(&mut session)?;
        let file = dump(lab, lab.cluster(), db.name())?;
        history.draw_more(&mut session, 50)?;
        let other = lab.bare_database()?;
        restore(lab, lab.cluster(), other.name(), &file, &[])?;
        let mut session = other.connect()?;
        let versions = "SELECT library_version || ' ' || sql_version FROM fence_status()";
        ensure!(session.text(versions)? == Some(format!("{VERSION} {VERSION}")));
        history.goes_on(&mut session)?;
    }
    Ok(())
}

#[lab_test]
fn an_update_changes_nothing_of_what_is_held_and_fenced(lab: &Lab) -> Result<()> {
    for old in released::ALL {
        let db = lab.bare_database()?;
        let mut session = db.connect()?;
        session.run("SET client_min_messages = error")?;
        create(&mut session, old.version)?;
        let history = History::begin(&mut session)?;
        session.run(
            "CREATE TABLE saved (id int PRIMARY KEY, v int); INSERT INTO saved VALUES (7, 0);
             SELECT fence_protect('saved', mode => 'managed', lease => 'saved:{id}');
             SELECT lease_acquire('config', 'r1', '1 h', shared => true), lease_acquire('config', 'r2', '1 h', shared => true),
                    lease_acquire('gpu', 'j1', '1 h', slots => 2), lease_acquire('own', 's', '1 h', session => true)",
        )?;
        let shown = "SELECT name, mode, state, holder, role, token, first_token, expires_at, renewals FROM fence.leases ORDER BY 1, 4";
        let tables = "SELECT tgrelid::regclass, tgname, tgenabled, pg_get_triggerdef(oid) FROM pg_trigger WHERE tgfoid = 'fenced'::regproc ORDER BY 1, 2";
        let mut facts = || -> Result<_> { Ok((session.rows(shown)?, session.rows(tables)?)) };
        let before = facts()?;
        // Another session's transaction is open, guards a lease and has written; it is not waited for.
        let mut guard = db.connect()?;
        guard.run("BEGIN")?;
        guard.run(&format!("UPDATE orders SET total = 2, fence = {}", history.token))?;
        let mut admin = db.connect()?;
        admin.run("SET lock_timeout = '20 s'; ALTER EXTENSION pg_fence UPDATE")?;
        ensure!(facts()? == before, "leases or fences are others than before");
        admin.run("SELECT lease_revoke('order:7')")?;
        ensure!(
            admin.token("SELECT lease_acquire('order:7')")?.is_none(),
            "taken over under a guard"
        );
        guard.run("COMMIT")?;
        ensure!(admin.one::<i32>("SELECT total FROM orders", &[])? == 2);
        let next = admin.acquire("order:7", "1 h")?;
        ensure!(next > history.seen);
        guard
            .refused(&format!("UPDATE orders SET total = 3, fence = {}", history.token), "PF004")?;
        ensure!(admin.rows("SELECT * FROM fence_audit() WHERE severity = 'hole'")?.is_empty());
    }
    Ok(())
}
