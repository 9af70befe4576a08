//! Test suites, fixtures and migrations of fenced tables: `docs/testing-and-migrations.md` says what to do.

use pg_test::extension::source_root;
use pg_test::orm::{self, PYTHON};
use pg_test::process::output_of;
use pg_test::{lab_test, Lab, Result};
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
        .args(["-W", "error::RuntimeWarning", "-m", "django", "test", "--verbosity", "2", "shop.tests"])
        .current_dir(source_root().join("pg_test/orm/django_suite"))
        .env("PYTHONPATH", format!("{}:.", source_root().join("clients/python/src").display()))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env("DJANGO_SETTINGS_MODULE", "settings")
        .env("PORT", cluster.port().to_string());
    output_of(&mut command).map(drop)
}
