//! The reference agrees with the catalogs: names, signatures, columns, settings, and the COMMENT of each.

use super::{page, section};
use pg_test::client::literal;
use pg_test::{Calls, Context, Harness, Result, Session, ensure, harness_test};
use std::collections::BTreeSet;

const PAGE: &str = "docs/reference/sql.md";

/// Types that no caller sees. The page only names them; their COMMENTs say the rest.
const INTERNAL: [&str; 3] = ["fence.trigger_arguments", "fence.lease_template", "fence.table_rule"];

/// Returns the headings of the level below.
fn headings(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.strip_prefix("### "))
}

/// Returns the COMMENT that a text quotes first.
fn quoted(text: &str) -> String {
    let lines = text.lines().skip_while(|line| !line.starts_with("> "));
    lines.map_while(|line| line.strip_prefix("> ")).collect::<Vec<_>>().join(" ")
}

/// Checks that the page lists everything, and nothing else.
fn same(said: &BTreeSet<String>, session: &mut Session, sql: &str) -> Result<()> {
    let is: BTreeSet<String> = session.rows(sql)?.into_iter().flatten().flatten().collect();
    let differs: Vec<_> = is.symmetric_difference(said).collect();
    ensure!(
        differs.is_empty() && is.len() > 3,
        "{PAGE} is not what the catalog says: {differs:#?}"
    );
    Ok(())
}

/// Returns a query of the functions in a schema, as `\df+` shows them.
fn functions(of: &str) -> String {
    format!(
        "SELECT concat(proname, '(', regexp_replace(pg_get_function_arguments(p.oid), '(, )?OUT .*', ''), ') → ',
                       pg_get_function_result(p.oid), ' > ', obj_description(p.oid, 'pg_proc'))
           FROM pg_proc p WHERE {of}"
    )
}

/// The server itself parses the signatures: functions are created with them.
#[harness_test]
fn every_function_is_there_as_it_is(harness: &Harness) -> Result<()> {
    let db = harness.database()?;
    let mut session = db.connect()?;
    let text = page(PAGE)?;
    session.run("CREATE SCHEMA page; SET check_function_bodies = off")?;
    let (mut named, table) = (BTreeSet::new(), section(&text, "## All functions")?);
    for part in text.split("\n```text\n").skip(1) {
        let (signature, below) = part.split_once("\n```").context("a block without an end")?;
        let (call, result) = signature.rsplit_once(" → ").context("no →")?;
        let (name, arguments) = call.split_once('(').context("no (")?;
        session
            .run(&format!(
                "CREATE FUNCTION page.{name}({arguments} RETURNS {result} LANGUAGE plpgsql AS '';
                 COMMENT ON FUNCTION page.{name} IS {}",
                literal(&quoted(below))
            ))
            .context(signature.to_owned())?;
        ensure!(table.contains(&format!("[`{name}`](#{name})")), "no {name} in the first table");
        named.insert(name);
    }
    let headings: BTreeSet<&str> = headings(&text).filter(|name| !name.contains('.')).collect();
    ensure!(headings == named, "{headings:?}, but signatures of {named:?}");
    let said = session.rows(&functions("pronamespace = 'page'::regnamespace"))?;
    let said = said.into_iter().flatten().flatten().collect();
    let ours = "pronamespace = (SELECT extnamespace FROM pg_extension WHERE extname = 'pg_fence')";
    let member = "EXISTS (SELECT FROM pg_depend WHERE objid = p.oid AND deptype = 'e')";
    same(&said, &mut session, &functions(&format!("{ours} AND {member}")))?;
    let columns = "SELECT proname, unnest(proargnames) FROM pg_proc p
                    WHERE proname LIKE 'fence%' AND 'o' = ALL (proargmodes)";
    for row in session.rows(columns)? {
        let [Some(name), Some(column)] = &row[..] else { pg_test::bail!("{row:?}") };
        let part = section(&text, &format!("### {name}"))?;
        ensure!(part.contains(&format!("`{column}`")), "{name}: `{column}` is not named");
    }
    Ok(())
}

#[harness_test]
fn every_relation_and_setting_is_there_as_it_is(harness: &Harness) -> Result<()> {
    let db = harness.database()?;
    let mut session = db.connect()?;
    let (text, mut said) = (page(PAGE)?, BTreeSet::new());
    for part in ["## Views and types", "## Settings"] {
        for name in headings(section(&text, part)?) {
            let part = section(&text, &format!("### {name}"))?;
            said.insert(format!("{name} > {}", quoted(part)));
            let columns = part.lines().filter(|line| line.starts_with("| `"));
            said.extend((1..).zip(columns).map(|(n, line)| format!("{name} {n} {line}")));
        }
    }
    for name in INTERNAL {
        ensure!(text.contains(&format!("`{name}`")), "{PAGE} does not name {name}");
    }
    // The settings are defined once the library is loaded.
    session.granted("SELECT last_token FROM fence_status() WHERE lease_acquire('job') > 0")?;
    let internal = format!("'{}'", INTERNAL.join("', '"));
    same(
        &said,
        &mut session,
        &format!(
            "WITH relation AS (SELECT *, 'fence.' || relname AS name FROM pg_class
                                WHERE relnamespace = 'fence'::regnamespace AND relkind IN ('v', 'c'))
             SELECT concat(name, ' > ', obj_description(oid, 'pg_class'), obj_description(reltype, 'pg_type'))
               FROM relation WHERE name NOT IN ({internal})
             UNION ALL
             SELECT format('%s %s | `%s` | %s |', name, attnum, attname, col_description(attrelid, attnum))
               FROM relation JOIN pg_attribute ON attrelid = relation.oid AND attnum > 0 WHERE name NOT IN ({internal})
             UNION ALL
             SELECT name || ' > ' || short_desc FROM pg_settings WHERE name LIKE 'pg\\_fence.%'"
        ),
    )
}
