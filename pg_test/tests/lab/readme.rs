//! The README: its examples are run, and what it lists is compared with what there is.

#[path = "readme/example.rs"]
mod example;

use example::{Step, Then};
use pg_test::{bail, ensure, Background, Conninfo, Context, Lab, Result, Rows, Session};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pg_test::trials![
    a_wrong_result_in_an_example_is_seen,
    every_example_does_what_it_says,
    every_function_is_listed_as_it_is,
    every_column_that_is_shown_is_named,
    every_error_and_every_setting_is_listed,
    the_locks_have_the_numbers_that_are_listed,
    every_link_has_a_target,
    every_room_of_the_source_is_on_the_map,
];

const README: &str = include_str!("../../../README.md");

/// How long an example may take.
const LIMIT: Duration = Duration::from_secs(60);

/// The sessions of the workers in the examples, and what they have kept.
struct Stage {
    conninfo: Conninfo,
    sessions: BTreeMap<String, Background>,
    waiting: BTreeMap<String, Step>,
    kept: BTreeMap<String, String>,
}

impl Stage {
    fn new(conninfo: Conninfo) -> Stage {
        let (sessions, waiting, kept) = Default::default();
        Stage { conninfo, sessions, waiting, kept }
    }

    fn session(&mut self, worker: &str) -> Result<&mut Background> {
        if !self.sessions.contains_key(worker) {
            let session = Background::connect(&self.conninfo)?;
            self.sessions.insert(worker.to_owned(), session);
        }
        self.sessions.get_mut(worker).context("just connected")
    }

    fn block(&mut self, steps: &[Step]) -> Result<()> {
        for step in steps {
            self.arrive(&step.worker)?;
            self.play(step).with_context(|| format!("README.md:{}: {}", step.line, step.sql))?;
        }
        let waiting: Vec<String> = self.waiting.keys().cloned().collect();
        waiting.iter().try_for_each(|worker| self.arrive(worker))
    }

    fn play(&mut self, step: &Step) -> Result<()> {
        let sql = example::filled(&step.sql, |name| self.kept.get(name).cloned())?;
        let session = self.session(&step.worker)?;
        session.send(&sql)?;
        if step.waits {
            session.wait_until_blocked()?;
            self.waiting.insert(step.worker.clone(), step.clone());
            return Ok(());
        }
        let mut outcome = session.outcome(LIMIT)?;
        if outcome.as_ref().is_err_and(|fault| fault.is_disconnect()) {
            // Another worker has ended the session: its client connects anew.
            self.sessions.remove(&step.worker);
            let session = self.session(&step.worker)?;
            session.send(&sql)?;
            outcome = session.outcome(LIMIT)?;
        }
        example::check(step, &outcome)?;
        self.then(step, outcome.unwrap_or_default())
    }

    /// What the worker waited for must have come.
    fn arrive(&mut self, worker: &str) -> Result<()> {
        let Some(step) = self.waiting.remove(worker) else { return Ok(()) };
        let outcome = self.session(worker)?.outcome(LIMIT)?;
        let place = || format!("README.md:{}: {}", step.line, step.sql);
        example::check(&step, &outcome).with_context(place)?;
        self.then(&step, outcome.unwrap_or_default())
    }

    fn then(&mut self, step: &Step, rows: Rows) -> Result<()> {
        match &step.then {
            Then::Show => {}
            Then::Keep(name) => {
                let [row] = &rows[..] else { bail!("\\gset: not one row: {rows:?}") };
                let [Some(value)] = &row[..] else { bail!("\\gset: not one value: {row:?}") };
                self.kept.insert(name.clone(), value.clone());
            }
            Then::Run => {
                for sql in rows.into_iter().flatten().flatten() {
                    self.session(&step.worker)?.run(&sql)?;
                }
            }
        }
        Ok(())
    }
}

fn every_example_does_what_it_says(lab: &Lab) -> Result<()> {
    // A server of its own: the examples make roles.
    let cluster = lab.builder().start()?;
    let mut stage = Stage::new(cluster.conninfo("postgres"));
    let blocks = example::blocks(README)?;
    ensure!(blocks.len() > 20, "only {} blocks were found", blocks.len());
    blocks.iter().try_for_each(|block| stage.block(block))
}

fn a_wrong_result_in_an_example_is_seen(lab: &Lab) -> Result<()> {
    let db = lab.bare_database()?;
    let passes = |sql: &str| -> Result<bool> {
        let blocks = example::blocks(&format!("```sql\n{sql}\n```\n"))?;
        let mut stage = Stage::new(db.conninfo());
        Ok(blocks.iter().all(|block| stage.block(block).is_ok()))
    };
    for good in [
        "SELECT 1, NULL, ';';\n-- 1 | NULL | ;",
        "SELECT 34 AS a \\gset\n\nSELECT :a::text || ':a';\n-- 34:a",
        "SELECT 1 WHERE false;\n-- (0 rows)",
        "SELECT 1/0;\n-- ERROR:  22012: division…",
        "SELECT 'SELECT 1' \\gexec",
        "SELECT 1;\n\n-- prose",
        "SELECT pg_advisory_lock(7);\n\n-- worker B\nSELECT pg_advisory_lock(7)::text || 'mine';\n-- waits\n-- mine\n\n\
         -- worker A\nSELECT pg_advisory_unlock(7);\n-- t",
    ] {
        ensure!(passes(good)?, "refused: {good}");
    }
    for bad in [
        "SELECT 1;\n-- 2",
        "SELECT 1;\n-- 1\n-- 1",
        "SELECT 1;\n-- (0 rows)",
        "SELECT 1;\n-- ERROR:  22012: division by zero",
        "SELECT 1/0;",
        "SELECT 1/0;\n-- ERROR:  22003: …",
        "SELECT 1/0;\n-- ERROR:  22012: …\n-- HINT:  …",
        "SELECT 1;\n-- waits",
        "SELECT 'SELECT 1/0' \\gexec",
    ] {
        ensure!(!passes(bad)?, "accepted: {bad}");
    }
    Ok(())
}

fn every_function_is_listed_as_it_is(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let mut listed = BTreeMap::new();
    for line in README.lines() {
        let Some(signature) = line.strip_prefix("**`").and_then(|l| l.split("`**").next()) else {
            continue;
        };
        let Some((call, result)) = signature.rsplit_once(") → ") else { continue };
        let (name, arguments) = call.split_once('(').context(signature)?;
        listed.insert(name.to_owned(), (arguments.to_owned(), result.to_owned()));
    }
    let public = session.rows(
        "SELECT p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid), p.oid
           FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
           JOIN pg_extension e ON d.refobjid = e.oid AND d.deptype = 'e'
          WHERE e.extname = 'pg_fence' AND p.pronamespace <> 'fence'::regnamespace",
    )?;
    for row in &public {
        let [Some(name), Some(arguments), Some(result), _] = &row[..] else { bail!("{row:?}") };
        let (shown, shown_result) = listed.remove(name).with_context(|| format!("no {name}"))?;
        ensure!(*result == shown_result, "{name} → {result}, not {shown_result}");
        let inputs: Vec<&str> =
            arguments.split(", ").filter(|a| !a.is_empty() && !a.starts_with("OUT ")).collect();
        let shown: Vec<&str> = shown.split(", ").filter(|a| !a.is_empty()).collect();
        ensure!(inputs.len() == shown.len(), "{name}({arguments}), not ({shown:?})");
        for (is, said) in inputs.iter().zip(&shown) {
            same_argument(&mut session, is, said).with_context(|| format!("{name}: {is}"))?;
        }
    }
    ensure!(public.len() > 10 && listed.is_empty(), "there is no {listed:?}");
    Ok(())
}

fn same_argument(session: &mut Session, is: &str, said: &str) -> Result<()> {
    let (is, value) = is.split_once(" DEFAULT ").unzip_or(is);
    let (said, said_value) = said.split_once(" DEFAULT ").unzip_or(said);
    ensure!(is == said, "not {said}");
    ensure!(value.is_some() == said_value.is_some(), "not {said_value:?}");
    if let (Some(value), Some(said_value)) = (value, said_value) {
        let kind = is.split_once(' ').context("no type")?.1;
        let sql = format!("SELECT ({value}) IS NOT DISTINCT FROM ({said_value})::{kind}");
        ensure!(session.one::<bool>(&sql, &[])?, "not {said_value}");
    }
    Ok(())
}

/// `(head, Some(tail))`, or the whole and `None`.
trait UnzipOr<'a> {
    fn unzip_or(self, whole: &'a str) -> (&'a str, Option<&'a str>);
}

impl<'a> UnzipOr<'a> for Option<(&'a str, &'a str)> {
    fn unzip_or(self, whole: &'a str) -> (&'a str, Option<&'a str>) {
        self.map_or((whole, None), |(head, tail)| (head, Some(tail)))
    }
}

fn every_column_that_is_shown_is_named(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    let names = session.rows(
        "SELECT attname FROM pg_attribute WHERE attnum > 0
            AND attrelid IN ('fence.leases'::regclass, (SELECT typrelid FROM pg_type
                              WHERE typname = 'finding' AND typnamespace = 'fence'::regnamespace))
         UNION SELECT unnest(proargnames) FROM pg_proc WHERE proname = 'fence_status'",
    )?;
    ensure!(names.len() > 20, "{names:?}");
    for name in names.into_iter().flatten().flatten() {
        ensure!(README.contains(&format!("`{name}`")), "{name} is not named");
    }
    Ok(())
}

fn every_error_and_every_setting_is_listed(lab: &Lab) -> Result<()> {
    let table = README.split("\n## Errors\n").nth(1).and_then(|rest| rest.split("\n## ").next());
    let table = table.context("no section on errors")?;
    let codes = |text: &str| -> BTreeSet<String> {
        text.split(|c: char| !c.is_ascii_alphanumeric())
            .filter(|word| word.len() == 5 && word.chars().all(|c| !c.is_ascii_lowercase()))
            .filter(|word| {
                word.starts_with("PF")
                    || word.chars().all(|c| c.is_ascii_digit() || c == 'P' || c == 'A')
            })
            .map(str::to_owned)
            .collect()
    };
    let listed = codes(table);
    let root = pg_test::extension::source_root();
    let mut raised = BTreeSet::new();
    let mut sources = vec![root.join("src/errors.rs")];
    for entry in std::fs::read_dir(root.join("sql"))? {
        sources.push(entry?.path());
    }
    for source in sources {
        let text = std::fs::read_to_string(&source)?;
        // Only what is quoted is a code.
        let quoted = text.split(['"', '\'']).filter(|word| word.len() == 5);
        raised.extend(quoted.flat_map(codes));
    }
    let missing: Vec<_> = raised.difference(&listed).collect();
    ensure!(missing.is_empty(), "not listed: {missing:?}");
    for code in listed.iter().filter(|code| code.starts_with("PF")) {
        ensure!(raised.contains(code), "nothing raises {code}");
    }
    let text = std::fs::read_to_string(root.join("src/errors.rs"))?;
    let detail = text.split("pub struct Detail {").nth(1).and_then(|rest| rest.split("\n}").next());
    let keys = detail.context("no struct Detail")?.lines().filter_map(|line| {
        line.trim().strip_prefix("pub ").and_then(|field| field.split(':').next())
    });
    for key in keys {
        ensure!(table.contains(&format!("`{key}`")), "key {key} of DETAIL is not listed");
    }
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run("SELECT fence_status()")?;
    let settings = session.rows("SELECT name FROM pg_settings WHERE name LIKE 'pg\\_fence.%'")?;
    let named = README.lines().filter(|line| line.starts_with("| `pg_fence.")).count();
    ensure!(settings.len() == named && named > 0, "{settings:?}, but {named} are listed");
    for name in settings.into_iter().flatten().flatten() {
        ensure!(README.contains(&format!("\n| `{name}` | ")), "{name} is not listed");
    }
    Ok(())
}

fn the_locks_have_the_numbers_that_are_listed(_: &Lab) -> Result<()> {
    let source = pg_test::extension::source_root().join("src/pg/lock.rs");
    let text = std::fs::read_to_string(source)?;
    let numbers = text.lines().filter_map(|line| line.trim().split_once(" = 0x"));
    let mut found = 0;
    for (name, hex) in numbers {
        let hex = hex.trim_end_matches(',');
        let number = u16::from_str_radix(hex, 16)?;
        ensure!(README.contains(&format!("| {number} (0x{hex}) |")), "{name} = {number}");
        found += 1;
    }
    ensure!(found == 6, "{found} kinds of locks");
    Ok(())
}

fn every_link_has_a_target(_: &Lab) -> Result<()> {
    let anchor = |title: &str| -> String {
        let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.collect::<String>().to_lowercase().replace(' ', "-")
    };
    let titles: BTreeSet<String> = README
        .lines()
        .filter(|line| line.starts_with('#'))
        .map(|line| anchor(line.trim_start_matches('#').trim()))
        .collect();
    let links: Vec<&str> =
        README.split("](").skip(1).filter_map(|rest| rest.split(')').next()).collect();
    ensure!(links.len() > 10, "{links:?}");
    for link in links {
        match link.strip_prefix('#') {
            Some(target) => ensure!(titles.contains(target), "no section #{target}"),
            None if link.starts_with("http") => {}
            None => {
                let path = pg_test::extension::source_root().join(link);
                ensure!(path.exists(), "{} is missing", path.display());
            }
        }
    }
    Ok(())
}

fn every_room_of_the_source_is_on_the_map(_: &Lab) -> Result<()> {
    let map = README.split("\n## Architecture\n").nth(1).context("no section on it")?;
    for entry in std::fs::read_dir(pg_test::extension::source_root().join("src"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        ensure!(map.contains(&name), "{name} is not on the map");
    }
    Ok(())
}
