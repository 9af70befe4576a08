//! Test suites, fixtures and migrations of fenced tables: `docs/recipes/testing-and-migrations.md` says what to do.

use pg_test::orm::{self, PYTHON};
use pg_test::process::output_of;
use pg_test::source_tree::source_root;
use pg_test::{ensure, lab_test, Lab, Result};
use std::process::Command;

/// Django's own test runner, as a role that is no superuser, with a database made from a template.
#[lab_test(slow)]
fn a_django_suite_flushes_loads_fixtures_and_migrates(lab: &Lab) -> Result<()> {
    let cluster = lab.builder().start()?;
    let mut admin = cluster.connect("postgres")?;
    admin.run("CREATE ROLE tester LOGIN CREATEDB")?;
    admin.run("CREATE DATABASE with_pg_fence IS_TEMPLATE true")?;
    cluster.connect("with_pg_fence")?.run(
        "CREATE EXTENSION pg_fence; SELECT fence_grant('tester'); GRANT CREATE ON SCHEMA public TO tester",
    )?;
    let mut command = Command::new(orm::fetch(PYTHON)?.join("bin/python"));
    command
        .args([
            "-W",
            "error::RuntimeWarning",
            "-m",
            "django",
            "test",
            "--verbosity",
            "2",
            "shop.tests",
        ])
        .current_dir(source_root().join("pg_test/orm/django_suite"))
        .env("PYTHONPATH", format!("{}:.", source_root().join("clients/python/src").display()))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("DJANGO_SETTINGS_MODULE", "settings")
        .env("PORT", cluster.port().to_string());
    output_of(&mut command).map(drop)
}

/// The lines of a file stand on the page, however far they are indented there.
fn shows(page: &str, file: &str) -> Result<bool> {
    let lines = |text: &str| -> Vec<String> {
        text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect()
    };
    let (page, file) = (lines(page), lines(file));
    ensure!(!file.is_empty(), "there is nothing to be shown");
    Ok(page.windows(file.len()).any(|part| part == file))
}

#[lab_test]
fn the_page_shows_what_the_suite_runs(_: &Lab) -> Result<()> {
    let read = |path: &str| std::fs::read_to_string(source_root().join(path));
    let page = read("docs/recipes/testing-and-migrations.md")?;
    let cases = read("pg_test/orm/django_suite/shop/testcases.py")?;
    ensure!(shows(&page, &cases)?, "another test case");
    let fixture = read("pg_test/orm/django_suite/shop/tests.py")?;
    let migration = read("pg_test/orm/django_suite/shop/migrations/0001_initial.py")?;
    let alembic = read("pg_test/orm/alembic_autogenerate.py")?;
    for (file, from, to) in [
        (&fixture, "    @classmethod", "\n\n"),
        (&migration, "        migrations.RunSQL(", "\n    ]"),
        (&alembic, "def include_name", "\n\n"),
    ] {
        let part = file.split_once(from).and_then(|(_, rest)| rest.split_once(to));
        let part = part.map(|(part, _)| format!("{from}{part}")).unwrap_or_default();
        ensure!(shows(&page, &part)?, "another\n{part}");
    }
    Ok(())
}
