//! The reference says what the catalog says: names, signatures, columns, settings and the COMMENT of each.

use super::{page, section};
use pg_test::{bail, ensure, lab_test, Context, Lab, Result, Session};
use std::collections::BTreeSet;

const PAGE: &str = "docs/reference/sql.md";

/// Types that no caller sees: the page names them, and their COMMENTs say the rest.
const INTERNAL: [&str; 3] = ["fence.trigger_arguments", "fence.lease_template", "fence.table_rule"];

/// The texts that must be in a section; all that are missing are told at once.
#[derive(Default)]
struct Wanted(Vec<String>);

impl Wanted {
    fn check(&mut self, of: &str, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.0.push(format!("{of}: {error:#}"));
        }
    }

    /// `left`: headings of what the catalog does not know.
    fn all_found(mut self, left: &BTreeSet<String>) -> Result<()> {
        self.0.extend(left.iter().map(|name| format!("there is no {name}")));
        ensure!(self.0.is_empty(), "{PAGE} is not what the catalog says:\n{}", self.0.join("\n"));
        Ok(())
    }
}

/// The headings of a level below another one.
fn headings(text: &str) -> BTreeSet<String> {
    text.lines().filter_map(|line| line.strip_prefix("### ")).map(str::to_owned).collect()
}

/// The COMMENT that a section quotes.
fn quoted(text: &str) -> Result<String> {
    let lines = text.lines().skip_while(|line| !line.starts_with("> "));
    let quote: Vec<&str> = lines.map_while(|line| line.strip_prefix("> ")).collect();
    ensure!(!quote.is_empty(), "no line with > and the comment");
    Ok(quote.join(" "))
}

fn same_comment(text: &str, comment: &str) -> Result<()> {
    let said = quoted(text)?;
    ensure!(said == comment, "> {said}\nbut the comment is\n> {comment}");
    Ok(())
}

#[lab_test]
fn every_function_is_there_as_it_is(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let text = page(PAGE)?;
    let public = session.rows(
        "SELECT p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid),
                coalesce(obj_description(p.oid, 'pg_proc'), '')
           FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
           JOIN pg_extension e ON d.refobjid = e.oid AND d.deptype = 'e'
          WHERE e.extname = 'pg_fence' AND p.pronamespace <> 'fence'::regnamespace",
    )?;
    let mut listed = BTreeSet::new();
    for part in ["## Leases", "## Several leases", "## Fences", "## Administration"] {
        listed.extend(headings(section(&text, part)?));
    }
    let mut wanted = Wanted::default();
    for row in &public {
        let [Some(name), Some(arguments), Some(result), Some(comment)] = &row[..] else {
            bail!("{row:?}")
        };
        listed.remove(name);
        let outcome = section(&text, &format!("### {name}")).and_then(|part| {
            let part = overload(part, name, arguments);
            same_signature(&mut session, part, name, arguments, result)?;
            same_comment(part, comment)
        });
        wanted.check(name, outcome);
    }
    ensure!(public.len() > 10, "only {public:?}");
    wanted.all_found(&listed)
}

/// The part of a section on the function with these arguments: from its signature on, where there are several.
fn overload<'a>(part: &'a str, name: &str, arguments: &str) -> &'a str {
    let signature = format!("```text\n{name}({arguments})");
    part.find(&signature).map_or(part, |at| &part[at..])
}

fn same_signature(
    session: &mut Session,
    part: &str,
    name: &str,
    arguments: &str,
    result: &str,
) -> Result<()> {
    let block = part.split_once("```text\n").and_then(|(_, rest)| rest.split_once("\n```"));
    let (signature, _) = block.context("no block of text with the signature")?;
    let signature = signature.split_whitespace().collect::<Vec<_>>().join(" ");
    let is = format!("{name}({arguments}) → {result}");
    let (call, said_result) = signature.rsplit_once(") → ").context("no →")?;
    let (said_name, said) = call.split_once('(').context("no (")?;
    ensure!(said_name == name && said_result == result, "{signature}, but it is {is}");
    let inputs: Vec<&str> =
        arguments.split(", ").filter(|a| !a.is_empty() && !a.starts_with("OUT ")).collect();
    let said: Vec<&str> = said.split(", ").filter(|a| !a.is_empty()).collect();
    ensure!(inputs.len() == said.len(), "{signature}, but it is {is}");
    for (argument, said) in inputs.iter().zip(&said) {
        same_argument(session, argument, said).with_context(|| format!("it is {argument}"))?;
    }
    for out in arguments.split(", ").filter_map(|argument| argument.strip_prefix("OUT ")) {
        let (column, _) = out.split_once(' ').context("no type")?;
        ensure!(part.contains(&format!("`{column}`")), "`{column}` is not named");
    }
    Ok(())
}

fn same_argument(session: &mut Session, is: &str, said: &str) -> Result<()> {
    let halves = |text: &str| -> (String, Option<String>) {
        match text.split_once(" DEFAULT ") {
            Some((head, value)) => (head.to_owned(), Some(value.to_owned())),
            None => (text.to_owned(), None),
        }
    };
    let ((is, value), (said, said_value)) = (halves(is), halves(said));
    ensure!(is == said, "not {said}");
    ensure!(value.is_some() == said_value.is_some(), "not {said_value:?}");
    if let (Some(value), Some(said_value)) = (value, said_value) {
        let kind = is.split_once(' ').context("no type")?.1;
        let sql = format!("SELECT ({value}) IS NOT DISTINCT FROM ({said_value})::{kind}");
        ensure!(session.one::<bool>(&sql, &[])?, "not {said_value}");
    }
    Ok(())
}

#[lab_test]
fn every_column_is_there_as_it_is(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let text = page(PAGE)?;
    let mut listed = headings(section(&text, "## Views and types")?);
    let relations = session.rows(
        "SELECT 'fence.' || relname, oid::int8, coalesce(obj_description(oid, 'pg_class'),
                    obj_description(reltype, 'pg_type'), '')
           FROM pg_class WHERE relnamespace = 'fence'::regnamespace AND relkind IN ('v', 'c')",
    )?;
    let mut wanted = Wanted::default();
    for row in &relations {
        let [Some(name), Some(oid), Some(comment)] = &row[..] else { bail!("{row:?}") };
        if INTERNAL.contains(&name.as_str()) {
            ensure!(text.contains(&format!("`{name}`")), "{PAGE} does not name {name}");
            continue;
        }
        listed.remove(name);
        let columns = session.rows(&format!(
            "SELECT format('| `%s` | %s |', attname, col_description(attrelid, attnum))
               FROM pg_attribute WHERE attrelid = {oid} AND attnum > 0 ORDER BY attnum"
        ))?;
        let columns: Vec<String> = columns.into_iter().flatten().flatten().collect();
        let outcome = section(&text, &format!("### {name}")).and_then(|part| {
            let said: Vec<&str> = part.lines().filter(|line| line.starts_with("| `")).collect();
            ensure!(said == columns, "its columns are\n{}", columns.join("\n"));
            same_comment(part, comment)
        });
        wanted.check(name, outcome);
    }
    ensure!(relations.len() > 1, "only {relations:?}");
    wanted.all_found(&listed)
}

#[lab_test]
fn every_setting_is_there_as_it_is(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let text = page(PAGE)?;
    let mut listed = headings(section(&text, "## Settings")?);
    session.run("SELECT fence_status()")?;
    let settings = session.rows(
        "SELECT name, short_desc FROM pg_settings WHERE name LIKE 'pg\\_fence.%' ORDER BY name",
    )?;
    let mut wanted = Wanted::default();
    for row in &settings {
        let [Some(name), Some(comment)] = &row[..] else { bail!("{row:?}") };
        listed.remove(name);
        let part = section(&text, &format!("### {name}"));
        wanted.check(name, part.and_then(|part| same_comment(part, comment)));
    }
    ensure!(!settings.is_empty(), "no setting");
    wanted.all_found(&listed)
}

#[lab_test]
fn the_table_of_functions_names_each(_: &Lab) -> Result<()> {
    let text = page(PAGE)?;
    let table = section(&text, "## All functions")?;
    for name in headings(&text).iter().filter(|name| !name.contains('.')) {
        ensure!(table.contains(&format!("[`{name}`](#{name})")), "no {name}");
    }
    Ok(())
}
