//! Where the extension goes, that it goes without a trace, and a sequence that somebody altered.

use pg_test::{ensure, lab_test, Calls, Database, Lab, Result, Session};
use std::collections::BTreeSet;
use std::path::Path;

#[lab_test]
fn only_a_superuser_installs_it(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let role = db.role("dba")?;
    db.connect()?.run(&format!("ALTER DATABASE {} OWNER TO {role}", db.name()))?;
    db.connect_as(&role)?.refused("CREATE EXTENSION pg_fence", "42501")?;
    Ok(())
}

#[lab_test]
fn by_default_it_goes_to_the_first_schema_of_the_path(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let mut session = db.connect()?;
    session.run("CREATE SCHEMA app; SET search_path = app, public; CREATE EXTENSION pg_fence")?;
    let homes = session.rows(
        "SELECT n.nspname, count(*) FROM pg_depend d JOIN pg_proc p ON p.oid = d.objid
           JOIN pg_namespace n ON n.oid = p.pronamespace JOIN pg_extension e ON e.oid = d.refobjid
          WHERE d.deptype = 'e' AND d.classid = 'pg_proc'::regclass AND e.extname = 'pg_fence'
          GROUP BY 1 ORDER BY 1",
    )?;
    let schemas: Vec<_> = homes.iter().filter_map(|row| row[0].as_deref()).collect();
    ensure!(schemas == ["app", "fence"], "{homes:?}");
    session.run("SELECT lease_acquire('job')")
}

#[lab_test]
fn it_works_in_a_schema_of_any_name(lab: &Lab) -> Result<()> {
    for schema in ["app", "\"My App\"", "fence_app"] {
        let db = lab.bare_database()?;
        let (role, mut owner) = (db.role("app")?, db.connect()?);
        owner.run(&format!(
            "CREATE SCHEMA {schema};
             CREATE EXTENSION pg_fence SCHEMA {schema};
             GRANT USAGE ON SCHEMA {schema} TO {role};
             CREATE TABLE orders (id int PRIMARY KEY, total int);
             INSERT INTO orders VALUES (7, 0);
             SELECT {schema}.fence_protect('orders', lease => 'order:{{id}}');
             SELECT {schema}.fence_audit('orders');
             SELECT {schema}.fence_grant('{role}', 'admin');
             GRANT ALL ON orders TO {role}"
        ))?;
        let mut app = db.connect_as(&role)?;
        let token: i64 = app.one(&format!("SELECT {schema}.lease_acquire('order:7')"), &[])?;
        app.run(&format!("UPDATE orders SET total = 1, fence = {token}"))?;
        app.run(&format!(
            "SELECT {schema}.lease_info('order:7'), {schema}.lease_revoke('order:7')"
        ))?;
        app.refused(&format!("UPDATE orders SET total = 2, fence = {token}"), "PF004")?;
        owner.run(&format!(
            "SELECT {schema}.fence_revoke('{role}'); SELECT {schema}.fence_unprotect('orders');
             DROP EXTENSION pg_fence; DROP SCHEMA {schema}"
        ))?;
    }
    Ok(())
}

#[lab_test]
fn it_does_not_move_to_another_schema(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run("CREATE SCHEMA app")?;
    session.refused("ALTER EXTENSION pg_fence SET SCHEMA app", "0A000")?;
    Ok(())
}

#[lab_test]
fn everything_in_it_has_a_comment(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    // The extension's objects; the columns of its relations and composite types; the indexes of its tables.
    session.run(
        "CREATE VIEW pg_temp.member AS
         SELECT classid, objid, objsubid FROM pg_depend d, pg_extension e
          WHERE d.deptype = 'e' AND d.refobjid = e.oid AND e.extname = 'pg_fence'
            AND d.refclassid = 'pg_extension'::regclass;
         CREATE VIEW pg_temp.relation AS
         SELECT c.oid, c.relkind FROM pg_class c, pg_temp.member m
          WHERE m.classid = 'pg_class'::regclass AND m.objid = c.oid
         UNION
         SELECT c.oid, c.relkind FROM pg_class c, pg_type t, pg_temp.member m
          WHERE m.classid = 'pg_type'::regclass AND m.objid = t.oid AND t.typrelid = c.oid;
         CREATE VIEW pg_temp.part AS
         SELECT classid, objid, objsubid FROM pg_temp.member
         UNION
         SELECT 'pg_class'::regclass, attrelid, attnum FROM pg_attribute, pg_temp.relation r
          WHERE attrelid = r.oid AND r.relkind IN ('r', 'v', 'c') AND attnum > 0 AND NOT attisdropped
         UNION
         SELECT 'pg_class'::regclass, indexrelid, 0 FROM pg_index, pg_temp.relation r
          WHERE indrelid = r.oid",
    )?;
    let kinds = "SELECT string_agg(kind, ' ' ORDER BY kind) FROM (SELECT DISTINCT i.type AS kind
                   FROM pg_temp.part, pg_identify_object(classid, objid, objsubid) i) k";
    let kinds = session.text(kinds)?.unwrap_or_default();
    for kind in ["composite type", "function", "index", "schema", "sequence", "table", "view"] {
        ensure!(kinds.contains(kind), "nothing of kind {kind} is looked at, but {kinds}");
    }
    let bare = session.rows(
        "SELECT pg_describe_object(classid, objid, objsubid) FROM pg_temp.part p
          WHERE NOT EXISTS (SELECT FROM pg_description d WHERE (d.classoid, d.objoid, d.objsubid) = (p.classid, p.objid, p.objsubid))
            -- The row type and the array type that a relation or a type has by itself.
            AND NOT (classid = 'pg_type'::regclass AND EXISTS (SELECT FROM pg_type t WHERE t.oid = objid
                AND (t.typelem <> 0 OR EXISTS (SELECT FROM pg_class c WHERE c.oid = t.typrelid AND c.relkind <> 'c'))))
          ORDER BY 1",
    )?;
    let bare: Vec<String> = bare.into_iter().flatten().flatten().collect();
    ensure!(bare.is_empty(), "without a COMMENT: {}", bare.join("; "));
    Ok(())
}

/// Everything that the catalogs of the database name, and the rights on it.
fn catalog(session: &mut Session) -> Result<BTreeSet<String>> {
    let rows = session.rows(
        "SELECT 'relation ' || c.oid::regclass::text || coalesce(c.relacl::text, '') FROM pg_class c
          WHERE c.relnamespace NOT IN ('pg_toast'::regnamespace)
         UNION ALL SELECT 'function ' || oid::regprocedure || coalesce(proacl::text, '') FROM pg_proc
         UNION ALL SELECT 'type ' || format_type(oid, NULL) FROM pg_type
         UNION ALL SELECT 'schema ' || nspname || coalesce(nspacl::text, '') FROM pg_namespace
         UNION ALL SELECT 'operator ' || oid::regoperator FROM pg_operator
         UNION ALL SELECT 'cast ' || castsource::regtype || ' ' || casttarget::regtype FROM pg_cast
         UNION ALL SELECT 'trigger ' || tgrelid::regclass || tgname FROM pg_trigger
         UNION ALL SELECT 'event trigger ' || evtname FROM pg_event_trigger
         UNION ALL SELECT 'constraint ' || conrelid::regclass || conname FROM pg_constraint
         UNION ALL SELECT 'rule ' || ev_class::regclass || rulename FROM pg_rewrite
         UNION ALL SELECT 'extension ' || extname FROM pg_extension
         UNION ALL SELECT 'column ' || attrelid::regclass || attname FROM pg_attribute
          WHERE attnum > 0 AND NOT attisdropped AND attrelid >= 16384
         UNION ALL SELECT 'default privileges ' || defaclacl::text FROM pg_default_acl
         UNION ALL SELECT 'comment ' || count(*)::text FROM pg_description
         UNION ALL SELECT 'dependency ' || count(*)::text FROM pg_depend
         UNION ALL SELECT 'initial rights ' || count(*)::text FROM pg_init_privs
         UNION ALL SELECT 'rights ' || count(*)::text FROM pg_shdepend
          WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())",
    )?;
    Ok(rows.into_iter().filter_map(|mut row| row.remove(0)).collect())
}

#[lab_test]
fn dropping_it_leaves_nothing_behind(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let (user, admin) = (db.role("user")?, db.role("admin")?);
    let mut session = db.connect()?;
    session.run("CREATE TABLE orders (id int PRIMARY KEY, total int, fence bigint)")?;
    let before = catalog(&mut session)?;
    session.run(&format!(
        "CREATE EXTENSION pg_fence; SELECT fence_grant('{user}'); SELECT fence_grant('{admin}', 'admin');
         SELECT lease_acquire('job'); SELECT fence_protect('orders'); SELECT fence_unprotect('orders')"
    ))?;
    ensure!(catalog(&mut session)? != before, "nothing was ever there");
    session.run("DROP EXTENSION pg_fence")?;
    same(&before, &catalog(&mut session)?)?;
    // Once more with a fenced table, forced.
    session.run("CREATE EXTENSION pg_fence; SELECT fence_protect('orders'); DROP EXTENSION pg_fence CASCADE")?;
    same(&before, &catalog(&mut session)?)?;
    session.run("CREATE EXTENSION pg_fence; SELECT lease_acquire('job')")
}

/// The two agree, but for what the fence column was told of itself.
fn same(before: &BTreeSet<String>, after: &BTreeSet<String>) -> Result<()> {
    let apart: Vec<_> =
        before.symmetric_difference(after).filter(|line| !line.starts_with("comment")).collect();
    ensure!(apart.is_empty(), "{apart:?}");
    Ok(())
}

#[lab_test]
fn dropping_it_is_refused_while_a_table_is_fenced(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run(
        "CREATE TABLE by_call (id int PRIMARY KEY);
         CREATE TABLE by_hand (id int PRIMARY KEY, fence bigint);
         SELECT fence_protect('by_call');
         CREATE TRIGGER fenced BEFORE UPDATE ON by_hand FOR EACH ROW EXECUTE FUNCTION fenced()",
    )?;
    let fault = session.refused("DROP EXTENSION pg_fence", "2BP01")?;
    let detail = fault.detail.as_deref().unwrap_or_default();
    ensure!(detail.contains("by_call") && detail.contains("by_hand"), "{fault}");
    session.run("SELECT fence_unprotect('by_call')")?;
    session.refused("DROP EXTENSION pg_fence", "2BP01")?;
    session.run("INSERT INTO by_hand VALUES (1); DROP EXTENSION pg_fence CASCADE; UPDATE by_hand SET id = 2")?;
    ensure!(
        session.one::<i64>("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal", &[])? == 0
    );
    Ok(())
}

/// What must not change when a call is refused.
fn state(session: &mut Session) -> Result<Option<String>> {
    session.text(
        "SELECT (SELECT last_value FROM fence.token_seq) || ' ' || (SELECT last_value FROM fence.jump_count_seq) \
         || ' ' || (SELECT jsonb_agg(l ORDER BY name) FROM fence.lease l)",
    )
}

#[lab_test]
fn an_altered_sequence_is_refused_before_it_does_harm(lab: &Lab) -> Result<()> {
    for (alter, mend) in [
        ("CACHE 10", "CACHE 1"),
        ("CYCLE", "NO CYCLE"),
        ("INCREMENT BY -1", "INCREMENT BY 1"),
        ("INCREMENT BY -1 CYCLE CACHE 5", "INCREMENT BY 1 NO CYCLE CACHE 1"),
        ("SET UNLOGGED", "SET LOGGED"),
    ] {
        let db: Database = lab.database()?;
        let mut session = db.connect()?;
        let token: i64 = session.one("SELECT lease_acquire('job')", &[])?;
        session.run(&format!("ALTER SEQUENCE fence.token_seq {alter}"))?;
        let before = state(&mut session)?;
        // Seen by a session that knew the good one, and by a new one.
        for session in [&mut session, &mut db.connect()?] {
            for call in [
                "SELECT lease_acquire('other')".to_owned(),
                "SELECT lease_acquire_all('{x,y}')".to_owned(),
                "SELECT lease_acquire('other', wait => '1 s')".to_owned(),
                format!("SELECT lease_renew('job', {token})"),
                format!("SELECT lease_release('job', {token})"),
                format!("SELECT lease_renew_all('{{job}}', {token})"),
                format!("SELECT lease_release_all('{{job}}', {token})"),
                "SELECT lease_revoke('job')".to_owned(),
                "SELECT fence_new_epoch()".to_owned(),
            ] {
                let fault = session.refused(&call, "55000")?;
                ensure!(
                    fault.hint.as_deref().is_some_and(|h| h.contains("ALTER SEQUENCE")),
                    "{fault}"
                );
            }
            let after = state(session)?;
            ensure!(after == before, "{alter}: {before:?} became {after:?}");
        }
        session.run(&format!("ALTER SEQUENCE fence.token_seq {mend}"))?;
        ensure!(session.one::<i64>("SELECT lease_renew('job', $1)", &[&token])? > token);
    }
    Ok(())
}

#[lab_test]
fn a_library_without_its_sql_objects_says_how_to_mend_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let versions = "SELECT library_version || ' ' || sql_version FROM fence_status()";
    let version = pg_test::extension::VERSION;
    ensure!(session.text(versions)? == Some(format!("{version} {version}")));
    // As if these were the objects of an earlier version that had no jumps.
    session.run(
        "UPDATE pg_extension SET extversion = '0.0.9' WHERE extname = 'pg_fence';
         ALTER EXTENSION pg_fence DROP SEQUENCE fence.jump_token_seq; DROP SEQUENCE fence.jump_token_seq",
    )?;
    ensure!(session.text(versions)? == Some(format!("{version} 0.0.9")));
    let fault = session.refused("SELECT fence_new_epoch()", "55000")?;
    ensure!(
        fault.hint.as_deref().is_some_and(|h| h.contains("ALTER EXTENSION pg_fence UPDATE")),
        "{fault}"
    );
    Ok(())
}

#[lab_test]
fn columns_of_a_later_version_are_kept(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut admin) = (db.connect()?, db.connect()?);
    let token = session.acquire("job", "1 h")?;
    admin.run(
        "ALTER TABLE fence.lease ADD COLUMN more text; UPDATE fence.lease SET more = 'kept';
         ALTER TABLE fence.lease ADD COLUMN gone int DEFAULT 7; ALTER TABLE fence.lease DROP COLUMN gone",
    )?;
    const MORE: &str = "SELECT more FROM fence.lease WHERE name = 'job'";
    ensure!(session.renew("job", token)?.is_some() && session.speaks("job", token)?);
    session.run("BEGIN")?;
    session.run(&format!("SELECT lease_renew('job', {token})"))?;
    session.run("COMMIT")?;
    admin.expire_now("job", token)?;
    ensure!(session.text(MORE)?.as_deref() == Some("kept"));
    session.granted("SELECT lease_acquire('job')")?;
    ensure!(session.text(MORE)?.as_deref() == Some("kept"), "a new grant updates the row");
    session.granted("SELECT lease_acquire('new')")?;
    // Where there are too many, or too few, the library says so.
    for change in [
        "ADD c1 int, ADD c2 int, ADD c3 int, ADD c4 int, ADD c5 int, ADD c6 int",
        "DROP c1, DROP c2",
    ] {
        admin.run(&format!("ALTER TABLE fence.lease {change}"))?;
        let fault = session.refused("SELECT lease_acquire('other')", "55000")?;
        ensure!(fault.hint.is_some(), "{fault}");
    }
    Ok(())
}

#[lab_test]
fn cargo_pgrx_has_every_part_of_the_script(_: &Lab) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let library = std::fs::read_to_string(root.join("src/lib.rs"))?;
    for part in std::fs::read_dir(root.join("sql"))? {
        let part = part?.file_name().into_string().expect("a name");
        // What a released version was installed by, or is updated by, is no part of this one's.
        // Nor is the edition without a library.
        if part.starts_with("pg_fence--") || part.starts_with("pg_fence_lite") {
            continue;
        }
        let line = format!("\n::pgrx::extension_sql_file!(\"../sql/{part}\"");
        ensure!(library.contains(&line), "src/lib.rs leaves out {part}");
    }
    Ok(())
}
