//! That the extension goes without a trace, and that its parts belong together. Where it goes: install.script.

use pg_test::{ensure, lab_test, Lab, Result, Session};
use std::collections::BTreeSet;
use std::path::Path;

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
fn cargo_pgrx_has_every_part_of_the_script(_: &Lab) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let library = std::fs::read_to_string(root.join("src/lib.rs"))?;
    for part in std::fs::read_dir(root.join("sql"))? {
        let part = part?.file_name().into_string().expect("a name");
        // The scripts that install or update a released version are no part of this one's.
        // Nor is the edition without a library.
        if part.starts_with("pg_fence--") || part.starts_with("pg_fence_lite") {
            continue;
        }
        let line = format!("\n::pgrx::extension_sql_file!(\"../sql/{part}\"");
        ensure!(library.contains(&line), "src/lib.rs leaves out {part}");
    }
    Ok(())
}
