//! The promises of the command's pages: their command lines run, and what they say of migrations and of a second
//! database is so.

use pg_test::clients::command::stage::{freeze, is_gone, program, thaw, Stage};
use pg_test::process::{output_of, wait_until, PATIENCE};
use pg_test::source_tree::source_root;
use pg_test::{ensure, lab_test, Context, Database, Lab, Result};
use std::fs;
use std::os::unix::fs::PermissionsExt;

const PAGES: &[&str] =
    &["docs/reference/command.md", "docs/recipes/from/flock.md", "clients/rust/cli/README.md"];

/// The command lines of a page's shell examples.
fn command_lines(page: &str) -> Result<Vec<String>> {
    let text = fs::read_to_string(source_root().join(page))?;
    let blocks = text.split("```sh\n").skip(1).filter_map(|block| block.split("```").next());
    let lines = blocks.flat_map(str::lines).filter(|line| line.starts_with("pg_fence "));
    // Its certificate is tried where connections are.
    Ok(lines.filter(|line| !line.contains("verify-full")).map(str::to_owned).collect())
}

#[lab_test]
fn every_command_line_of_the_pages_runs(lab: &Lab) -> Result<()> {
    let database = lab.database()?;
    // An audit that finds nothing to look at ends with a status of its own.
    database.connect()?.run("CREATE TABLE orders (id bigint PRIMARY KEY); SELECT fence_protect('orders', lease => 'orders')")?;
    let dir = lab.prefix().new_dir("pages")?;
    for script in ["job.sh", "migrate.sh"] {
        fs::write(dir.join(script), "#!/bin/sh\npsql -qXc 'SELECT 1' > /dev/null\n")?;
        fs::set_permissions(dir.join(script), fs::Permissions::from_mode(0o755))?;
    }
    let program = program()?;
    let bin = program.parent().context("it lies somewhere")?.display().to_string();
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{bin}:{}:{path}", lab.prefix().bin_dir().display());
    let conninfo = database.conninfo();
    let (port, dbname) = conninfo.place();
    let mut run = 0;
    for page in PAGES {
        for line in command_lines(page)? {
            let mut shell = lab.rundir().command("sh");
            shell.args(["-c", &line]).current_dir(&dir).env("PATH", &path);
            shell.envs([("PGHOST", "127.0.0.1"), ("PGUSER", "postgres"), ("PGDATABASE", dbname)]);
            output_of(shell.env("PGPORT", port.to_string()))
                .with_context(|| format!("{page}: {line}"))?;
            run += 1;
        }
    }
    ensure!(run > 10 && dir.join("shop.dump").exists(), "only {run} command lines were found");
    Ok(())
}

/// The DDL of a migrator that was frozen goes with the row that says it was done.
#[lab_test]
fn a_frozen_migrator_is_refused_with_its_ddl(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    let mut admin = stage.admin()?;
    let role = stage.role();
    admin.run(&format!(
        "CREATE TABLE schema_version (version int PRIMARY KEY, by text);
         SELECT fence_protect('schema_version', lease => 'job');
         CREATE TABLE customers (id bigint PRIMARY KEY);
         ALTER TABLE customers OWNER TO {role};
         GRANT SELECT, INSERT ON schema_version TO {role}"
    ))?;
    let migration = |by: &str, column: &str| {
        format!("ALTER TABLE customers ADD COLUMN {column} text; INSERT INTO schema_version VALUES (2, '{by}');\n")
    };
    let script =
        "mkfifo $DIR/script; echo $$ > $DIR/pid; exec psql -1 -qXv ON_ERROR_STOP=1 -f $DIR/script";
    let run = stage.run("job --ttl 2s", script)?;
    let (keeper, pid) = (run.keeper()?, stage.pid("pid")?);
    wait_until("it is psql", PATIENCE, || pg_test::process::title(pid).starts_with("psql"))?;
    for frozen in [run.supervisor(), keeper, pid] {
        freeze(frozen)?;
    }
    let next = migration("next", "name");
    stage
        .run("job --wait 2m", &format!("psql -1 -qXv ON_ERROR_STOP=1 -c \"{}\"", next.trim()))?
        .ends_with(0)?;
    thaw(pid)?;
    fs::write(stage.dir().join("script"), migration("frozen", "late"))?;
    is_gone(pid)?;
    thaw(keeper)?;
    thaw(run.supervisor())?;
    let ended = run.ended()?;
    ensure!(ended.stderr.contains("PF00") || ended.stderr.contains("does not speak"), "{ended:?}");
    let columns = "SELECT string_agg(attname, ' ' ORDER BY attnum) FROM pg_attribute \
                   WHERE attrelid = 'customers'::regclass AND attnum > 0";
    ensure!(admin.text(columns)?.as_deref() == Some("id name"));
    ensure!(admin.text("SELECT by FROM schema_version")?.as_deref() == Some("next"));
    Ok(())
}

/// The token means nothing in another database: a bound table refuses it, another one may take it.
#[lab_test]
fn in_a_second_database_the_token_is_not_its_own(lab: &Lab) -> Result<()> {
    let stage = Stage::new(lab)?;
    let second = Database::with_extension(lab.cluster().conninfo("postgres"))?;
    let mut there = second.connect()?;
    there.run(&format!(
        "CREATE TABLE bound (id int, value text); CREATE TABLE other (id int, value text);
         INSERT INTO bound VALUES (1); INSERT INTO other VALUES (1);
         SELECT fence_protect('bound', lease => 'job'), fence_protect('other');
         GRANT SELECT, UPDATE ON bound, other TO {}",
        stage.role()
    ))?;
    let update = |table: &str| {
        format!(
            "psql -qXv VERBOSITY=sqlstate -d {} -c \"UPDATE {table} SET value = 'x'\"",
            second.name()
        )
    };
    let ended = stage.run("job", &update("bound"))?.ends_with(1)?;
    ensure!(ended.stderr.contains("PF003") || ended.stderr.contains("PF004"), "{ended:?}");
    // Once more tokens were drawn there than here.
    there.run("SELECT fence_new_epoch(); SELECT lease_acquire('any')")?;
    stage.run("job", &update("other"))?.ends_with(0)?;
    let ended = stage.run("job", &update("bound"))?.ends_with(1)?;
    ensure!(ended.stderr.contains("PF004"), "{ended:?}");
    Ok(())
}
