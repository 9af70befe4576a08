//! The command lines on the command's pages run. What else the pages say is tested in pages.script.

use pg_test::clients::command::fixture::program;
use pg_test::process::output_of;
use pg_test::source_tree::source_root;
use pg_test::{Context, Harness, Result, ensure, harness_test};
use std::fs;
use std::os::unix::fs::PermissionsExt;

const PAGES: &[&str] =
    &["docs/reference/command.md", "docs/recipes/from/flock.md", "clients/rust/cli/README.md"];

/// Returns the command lines of a page's shell examples.
fn command_lines(page: &str) -> Result<Vec<String>> {
    let text = fs::read_to_string(source_root().join(page))?;
    let blocks = text.split("```sh\n").skip(1).filter_map(|block| block.split("```").next());
    let lines = blocks.flat_map(str::lines).filter(|line| line.starts_with("pg_fence "));
    // Certificates are tested with the connections.
    Ok(lines.filter(|line| !line.contains("verify-full")).map(str::to_owned).collect())
}

#[harness_test]
fn every_command_line_of_the_pages_runs(harness: &Harness) -> Result<()> {
    let database = harness.database()?;
    // An audit without any fenced table has an exit status of its own, so one is made.
    database.connect()?.run("CREATE TABLE orders (id bigint PRIMARY KEY); SELECT fence_protect('orders', lease => 'orders')")?;
    let dir = harness.install_dir().new_dir("pages")?;
    for script in ["job.sh", "migrate.sh"] {
        fs::write(dir.join(script), "#!/bin/sh\npsql -qXc 'SELECT 1' > /dev/null\n")?;
        fs::set_permissions(dir.join(script), fs::Permissions::from_mode(0o755))?;
    }
    fs::write(dir.join("job.sql"), "SELECT 1;\n")?;
    let path = harness.install_dir().path(program()?.parent());
    let conninfo = database.conninfo();
    let (port, dbname) = conninfo.place();
    let mut run = 0;
    for page in PAGES {
        for line in command_lines(page)? {
            let mut shell = harness.rundir().command("sh");
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
