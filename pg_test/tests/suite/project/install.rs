//! The extension can be dropped without leaving anything, and its parts belong together. Where it can be installed is
//! tested in install.script.

use pg_test::{Conninfo, Harness, Result, ensure, harness_test};
use std::collections::BTreeSet;
use std::path::Path;

/// Returns all objects of a database as pg_upgrade would create them, those of extensions one by one: without comments,
/// psql commands, and numbers that differ between databases.
pub fn objects(harness: &Harness, of: &Conninfo) -> Result<BTreeSet<String>> {
    let dump =
        harness.run("pg_dump", &["--schema-only", "--binary-upgrade", "-d", &of.to_string()])?;
    let own =
        ["--", "\\", "SELECT pg_catalog.binary_upgrade_set_next_", "SELECT pg_catalog.setval"];
    let lines = dump.lines().filter(|line| !own.iter().any(|start| line.starts_with(start)));
    let without_numbers = |part: &str| {
        // Numbers of objects, and lists of them.
        let is_number =
            |word: &str| word.len() > 4 && word.chars().all(|c| "0123456789,{}".contains(c));
        let words =
            part.trim().split('\'').map(|word| if is_number(word) { "a number" } else { word });
        words.collect::<Vec<_>>().join("'")
    };
    let parts = lines.collect::<Vec<_>>().join("\n");
    let parts = parts.split("\n\n").map(without_numbers);
    Ok(parts.filter(|part| !part.starts_with("UPDATE pg_catalog.pg_class")).collect())
}

/// Checks that the two agree, apart from the comment on the fence column.
pub fn same(one: &BTreeSet<String>, other: &BTreeSet<String>) -> Result<()> {
    let apart = one.symmetric_difference(other);
    let apart: Vec<_> =
        apart.filter(|part| !part.starts_with("COMMENT ON COLUMN public.")).collect();
    ensure!(apart.is_empty(), "{apart:#?}");
    Ok(())
}

#[harness_test]
fn dropping_it_leaves_nothing_behind(harness: &Harness) -> Result<()> {
    let db = harness.bare_database()?;
    let (user, admin) = (db.role("user")?, db.role("admin")?);
    let mut session = db.connect()?;
    session.run("CREATE TABLE orders (id int PRIMARY KEY, total int, fence bigint)")?;
    let catalog = || -> Result<_> {
        let counts = "SELECT (SELECT count(*) FROM pg_depend), (SELECT count(*) FROM pg_init_privs),
            (SELECT count(*) FROM pg_shdepend WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database()))";
        Ok((objects(harness, &db.conninfo())?, db.connect()?.rows(counts)?))
    };
    let (before, counts) = catalog()?;
    session.run(&format!(
        "CREATE EXTENSION pg_fence; SELECT fence_grant('{user}'); SELECT fence_grant('{admin}', 'admin');
         SELECT lease_acquire('job'); SELECT fence_protect('orders'); SELECT fence_unprotect('orders')"
    ))?;
    ensure!(catalog()?.0.len() > before.len() + 50, "nothing was ever there");
    // The second round has a fenced table, and drops with CASCADE.
    for drop in [
        "DROP EXTENSION pg_fence",
        "CREATE EXTENSION pg_fence; SELECT fence_protect('orders'); DROP EXTENSION pg_fence CASCADE",
    ] {
        session.run(drop)?;
        let (after, left) = catalog()?;
        same(&before, &after)?;
        ensure!(left == counts, "{left:?}, not {counts:?}");
    }
    session.run("CREATE EXTENSION pg_fence; SELECT lease_acquire('job')")
}

#[harness_test]
fn cargo_pgrx_has_every_part_of_the_script(_: &Harness) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let library = std::fs::read_to_string(root.join("src/lib.rs"))?;
    for part in std::fs::read_dir(root.join("sql"))? {
        let part = part?.file_name().into_string().expect("a name");
        // The scripts that install or update released versions are no part of this version's script. Nor is the lite
        // edition.
        if part.starts_with("pg_fence--") || part.starts_with("pg_fence_lite") {
            continue;
        }
        let line = format!("\n::pgrx::extension_sql_file!(\"../sql/{part}\"");
        ensure!(library.contains(&line), "src/lib.rs leaves out {part}");
    }
    Ok(())
}
