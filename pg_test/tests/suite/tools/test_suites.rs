//! Test suites, fixtures and migrations of fenced tables, as `docs/recipes/testing-and-migrations.md` describes them.

use crate::project::pages::page;
use pg_test::process::output_of;
use pg_test::runtime::{self, PYTHON};
use pg_test::source_tree::source_root;
use pg_test::{Context, Harness, Result, ensure, harness_test};
use std::process::Command;

/// Django's own test runner, as a role that is no superuser, with a database made from a template.
#[harness_test(slow)]
fn a_django_suite_flushes_loads_fixtures_and_migrates(harness: &Harness) -> Result<()> {
    let cluster = harness.builder().start()?;
    let mut admin = cluster.connect("postgres")?;
    admin.run("CREATE ROLE tester LOGIN CREATEDB")?;
    admin.run("CREATE DATABASE with_pg_fence IS_TEMPLATE true")?;
    cluster.connect("with_pg_fence")?.run(
        "CREATE EXTENSION pg_fence; SELECT fence_grant('tester'); GRANT CREATE ON SCHEMA public TO tester",
    )?;
    let mut command = Command::new(runtime::fetch(PYTHON)?.join("bin/python"));
    let django = "-W error::RuntimeWarning -m django test --verbosity 2 shop.tests";
    command.args(django.split(' ')).current_dir(source_root().join("pg_test/orm/django_suite"));
    command
        .env("PYTHONPATH", format!("{}:.", source_root().join("clients/python/src").display()))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("DJANGO_SETTINGS_MODULE", "settings")
        .env("PORT", cluster.port().to_string());
    output_of(&mut command).map(drop)
}

/// Indentation is ignored.
#[harness_test]
fn the_page_shows_what_the_suite_runs(_: &Harness) -> Result<()> {
    let lines = |text: &str| -> String {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        lines.map(|line| format!("\n{line}")).collect()
    };
    let page = lines(&page("docs/recipes/testing-and-migrations.md")?);
    for (file, from, to) in [
        ("django_suite/shop/testcases.py", "", "\n\n\n\n"),
        ("django_suite/shop/tests.py", "    @classmethod", "\n\n"),
        ("django_suite/shop/migrations/0001_initial.py", "        migrations.RunSQL(", "\n    ]"),
        ("alembic_autogenerate.py", "def include_name", "\n\n"),
    ] {
        let text = std::fs::read_to_string(source_root().join("pg_test/orm").join(file))?;
        let (_, part) = text.split_once(from).with_context(|| format!("{file} has no {from}"))?;
        let part = lines(&format!("{from}{}", part.split(to).next().unwrap_or_default()));
        ensure!(part.len() > 20 && page.contains(&part), "another\n{part}");
    }
    Ok(())
}
