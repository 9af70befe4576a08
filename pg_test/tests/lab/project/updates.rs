//! `ALTER EXTENSION pg_fence UPDATE`: what it leaves behind is what a fresh installation makes, and what was there
//! before goes on.
//!
//! From each version that was released, whose script lies in `sql/`. Until there is one, from one that is made up.

automod::dir!(pub "tests/lab/project/updates");

use crate::failover::restores::{dump, restore};
use crate::support::history::History;
use pg_test::cluster::Builder;
use pg_test::extension::{Extension, VERSION};
use pg_test::prefix::Prefix;
use pg_test::rundir::RunDir;
use pg_test::{ensure, lab_test, majors, Calls, Cluster, Database, Lab, Result, Session};
use std::collections::BTreeSet;
use std::sync::Arc;

/// A version that is updated to this one.
struct Earlier {
    version: String,
    /// The scripts of this version, with the script of the earlier one and the update among them.
    files: Extension,
}

impl Earlier {
    fn all(lab: &Lab) -> Vec<Earlier> {
        let files = lab.extension();
        let version = |name: &String| -> Option<String> {
            Some(name.strip_prefix("pg_fence--")?.strip_suffix(".sql")?.to_owned())
        };
        // An update's script has two versions in its name.
        let released = |version: &String| version != VERSION && !version.contains("--");
        let all = files.scripts().keys().filter_map(version).filter(released);
        let all: Vec<_> = all.map(|version| Earlier { version, files: files.clone() }).collect();
        match all.is_empty() {
            true => vec![Earlier::made_up(lab, &ADDED)],
            false => all,
        }
    }

    /// One that is what this version is now, while this one has more; the update is these statements.
    fn made_up(lab: &Lab, update: &[&str]) -> Earlier {
        let (version, files) = ("0.0.1".to_owned(), lab.extension().clone());
        let ours = format!("pg_fence--{VERSION}.sql");
        let then = files.scripts()[&ours].clone();
        let now = format!("{then}\n{};\n", ADDED.join(";\n"));
        let files = files
            .with_script(format!("pg_fence--{version}.sql"), then)
            .with_script(
                format!("pg_fence--{version}--{VERSION}.sql"),
                format!("{};\n", update.join(";\n")),
            )
            .with_script(ours, now);
        Earlier { version, files }
    }

    /// A server that has all of its files.
    fn server(&self, lab: &Lab) -> Result<Cluster> {
        let rundir = Arc::new(RunDir::create(lab.rundir().program())?);
        let prefix = Arc::new(Prefix::copy(rundir, &majors::chosen()?)?);
        prefix.install(&self.files)?;
        Builder::new(prefix).start()
    }

    /// A session of a new database, and that.
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

/// The objects of this version that the made-up one lacks. Each is for itself, so that each can be left out.
const ADDED: [&str; 7] = [
    "CREATE FUNCTION added() RETURNS int LANGUAGE sql RETURN 1",
    "CREATE SEQUENCE fence.added_seq",
    "CREATE VIEW fence.added AS SELECT 1 AS one",
    "ALTER TABLE fence.lease ADD added text",
    "COMMENT ON FUNCTION lease_check(text, bigint) IS 'changed'",
    "GRANT EXECUTE ON FUNCTION lease_check(text, bigint) TO PUBLIC",
    "ALTER FUNCTION fence_status() COST 7",
];

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

/// The objects of a fresh installation, and those that an update leaves behind, in that schema of new databases.
fn made(earlier: &Earlier, server: &Cluster, schema: &str) -> Result<[BTreeSet<String>; 2]> {
    let prepare = format!(
        "CREATE SCHEMA IF NOT EXISTS {schema}; SET search_path = {schema};
         ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO guest;
         ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO guest;
         ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO guest"
    );
    let fresh = Database::create(server.conninfo("postgres"))?;
    let mut session = fresh.connect()?;
    session.run(&format!("{prepare}; CREATE EXTENSION pg_fence"))?;
    let fresh = objects(&mut session)?;
    ensure!(fresh.len() > 200, "only {} facts", fresh.len());
    let updated = Database::create(server.conninfo("postgres"))?;
    let mut session = updated.connect()?;
    session.run(&prepare)?;
    earlier.create(&mut session)?;
    session.run("ALTER EXTENSION pg_fence UPDATE")?;
    Ok([fresh, objects(&mut session)?])
}

#[lab_test]
fn updated_it_is_what_a_fresh_installation_is(lab: &Lab) -> Result<()> {
    for earlier in Earlier::all(lab) {
        let server = earlier.server(lab)?;
        server.connect("postgres")?.run("CREATE ROLE guest")?;
        for schema in ["public", "\"My App\""] {
            let [fresh, updated] = made(&earlier, &server, schema)?;
            same(&fresh, &updated)?;
        }
    }
    Ok(())
}

#[lab_test]
fn whatever_an_update_leaves_out_is_found(lab: &Lab) -> Result<()> {
    let server = Earlier::made_up(lab, &ADDED).server(lab)?;
    server.connect("postgres")?.run("CREATE ROLE guest")?;
    for left_out in ADDED {
        let rest: Vec<&str> = ADDED.into_iter().filter(|part| *part != left_out).collect();
        let earlier = Earlier::made_up(lab, &rest);
        server.prefix().install(&earlier.files)?;
        let [fresh, updated] = made(&earlier, &server, "public")?;
        ensure!(same(&fresh, &updated).is_err(), "not missed: {left_out}");
    }
    Ok(())
}

#[lab_test]
fn a_dump_of_an_earlier_version_goes_on_in_this_one(lab: &Lab) -> Result<()> {
    for earlier in Earlier::all(lab) {
        let server = earlier.server(lab)?;
        let (db, mut session) = earlier.database(&server)?;
        let mut history = History::begin(&mut session)?;
        let file = dump(lab, &server, db.name())?;
        history.draw_more(&mut session, 50)?;
        let other = Database::create(server.conninfo("postgres"))?;
        restore(lab, &server, other.name(), &file, &[])?;
        let mut session = other.connect()?;
        versions(&mut session, VERSION)?;
        history.goes_on(&mut session)?;
    }
    Ok(())
}

/// The library is of this version, the objects are of another.
fn versions(session: &mut Session, sql: &str) -> Result<()> {
    let versions = "SELECT library_version || ' ' || sql_version FROM fence_status()";
    let found = session.text(versions)?;
    ensure!(found == Some(format!("{VERSION} {sql}")), "{found:?}, not {VERSION} {sql}");
    Ok(())
}

#[lab_test]
fn an_update_changes_nothing_of_what_is_held_fenced_and_granted(lab: &Lab) -> Result<()> {
    for earlier in Earlier::all(lab) {
        let server = earlier.server(lab)?;
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
        let told = owner.notices();
        ensure!(told.iter().any(|n| n.message.contains(VERSION)), "nobody is told: {told:?}");
        let shown = "SELECT name, mode, state, holder, role, token, first_token, expires_at, renewals FROM fence.leases ORDER BY 1, 4";
        let tables = "SELECT tgrelid::regclass, tgname, tgenabled, pg_get_triggerdef(oid) FROM pg_trigger WHERE tgfoid = 'fenced'::regproc ORDER BY 1, 2";
        let mut facts = || -> Result<_> { Ok((session.rows(shown)?, session.rows(tables)?)) };
        let before = facts()?;
        // Another session's transaction is open, guards a lease and has written; it is not waited for.
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

        // Roles may do what they might before, also in a dump's next life.
        let other = Database::create(server.conninfo("postgres"))?;
        restore(lab, &server, other.name(), &dump(lab, &server, db.name())?, &[])?;
        for db in [&db, &other] {
            let mut user = db.connect_as(&app)?;
            user.acquire("job", "1 h")?;
            user.refused("SELECT lease_prune()", "42501")?;
            db.connect_as(&admin)?.run("SELECT lease_prune(), fence_new_epoch()")?;
        }
    }
    Ok(())
}
