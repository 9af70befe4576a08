//! Seven of the drivers of `docs/tutorial/drivers.md`: how they report a failed attempt, a refused write, and a COMMIT
//! after an error that the program ignored. The programs are in `pg_test/drivers`.

use pg_test::orm;
use pg_test::process::output_of;
use pg_test::runtime::Runtime;
use pg_test::setup::{self, Package};
use pg_test::source_tree::source_root;
use pg_test::{Calls, Cluster, Context, Harness, Result, ensure, harness_test};
use std::path::PathBuf;
use std::process::Command;

const PYTHON: Runtime = Runtime::Python(&["psycopg2-binary==2.9.13", "pg8000==1.31.6"]);

fn file(name: &str) -> PathBuf {
    source_root().join("pg_test/drivers").join(name)
}

/// Starts a server on which another client holds the lease of the only order, with a note that anyone may write.
fn server(harness: &Harness) -> Result<Cluster> {
    let cluster = harness.builder().start()?;
    let mut session = cluster.connect("postgres")?;
    session.run(
        "CREATE EXTENSION pg_fence; CREATE TABLE orders (id bigint PRIMARY KEY, status text);
         INSERT INTO orders VALUES (7, 'new'); SELECT fence_protect('orders', lease => 'order:{id}');
         CREATE TABLE notes (text text); INSERT INTO notes VALUES ('new');
         CREATE ROLE app LOGIN; SELECT fence_grant('app'); GRANT SELECT, UPDATE ON orders, notes TO app",
    )?;
    session.acquire("order:7", "1 h")?;
    Ok(cluster)
}

/// Checks that the program prints these lines, and has written nothing, whatever its COMMIT reported.
fn says(cluster: &Cluster, mut command: Command, lines: &[&str]) -> Result<()> {
    let port = cluster.port();
    command
        .env("PGPORT", port.to_string())
        .env("DATABASE_URL", format!("postgresql://app@127.0.0.1:{port}/postgres"))
        .env("PDO_DSN", format!("pgsql:host=127.0.0.1;port={port};dbname=postgres;user=app"))
        .env("DBI_DSN", format!("dbi:Pg:dbname=postgres;host=127.0.0.1;port={port}"))
        .env("ECPG_PLACE", format!("tcp:postgresql://127.0.0.1:{port}/postgres"));
    let said = output_of(&mut command)?;
    ensure!(said.lines().eq(lines.iter().copied()), "not {lines:?}, but {said}");
    let rows = cluster.connect("postgres")?.text("SELECT status || text FROM orders, notes")?;
    ensure!(rows.as_deref() == Some("newnew"), "{rows:?}");
    Ok(())
}

const REFUSED: &str = "refused PF002 detail";
const SILENT: &str = "commit is silent";

#[harness_test(slow)]
fn drivers_show_a_lost_try_a_refusal_and_a_commit_as_their_page_says(
    harness: &Harness,
) -> Result<()> {
    setup::ensure(&[
        Package::new("libdbd-pg-perl", "/usr/lib/*/perl5/5*/DBD/Pg.pm"),
        Package::new("php-cli", "/usr/bin/php"),
        Package::new("php-pgsql", "/usr/share/doc/php-pgsql"),
        Package::new("ruby-pg", "/usr/lib/ruby/vendor_ruby/pg.rb"),
        Package::new("tcl8.6-tdbc-postgres", "/usr/share/doc/tcl8.6-tdbc-postgres"),
    ])?;
    let cluster = server(harness)?;
    let program = |name: &str, in_file: &str| {
        let mut command = harness.rundir().command(name);
        command.arg(file(in_file));
        command
    };
    says(&cluster, program("perl", "perl.pl"), &["lost is undef", REFUSED, SILENT])
        .context("Perl")?;
    says(&cluster, program("php", "php.php"), &["lost is NULL", REFUSED, SILENT]).context("PHP")?;
    says(&cluster, program("ruby", "ruby.rb"), &["lost is nil", REFUSED, SILENT])
        .context("Ruby")?;
    let no_detail = "refused PF002 no detail";
    says(&cluster, program("tclsh8.6", "tcl.tcl"), &["lost is ''", no_detail, SILENT])
        .context("Tcl")?;
    let begins = "begins by itself: True";
    for (driver, commit) in [("psycopg2", SILENT), ("pg8000", "commit tells")] {
        let source = std::fs::read_to_string(file(&format!("{driver}_driver.py")))?;
        let python = orm::command(harness.rundir(), PYTHON, &source)?;
        says(&cluster, python, &["lost is None", begins, REFUSED, commit]).context(driver)?;
    }
    Ok(())
}

#[harness_test(slow)]
fn ecpg_shows_no_detail_and_a_lost_try_by_its_indicator(harness: &Harness) -> Result<()> {
    setup::ensure(&[Package::new("libecpg-dev", "/usr/bin/ecpg")])?;
    let dir = harness.install_dir().new_dir("ecpg")?;
    let (c, program) = (dir.join("ecpg.c"), dir.join("ecpg"));
    output_of(harness.rundir().command("ecpg").arg("-o").arg(&c).arg(file("ecpg.pgc")))?;
    let mut cc = harness.rundir().command("cc");
    output_of(cc.arg("-I/usr/include/postgresql").arg(&c).arg("-o").arg(&program).arg("-lecpg"))?;
    let lines =
        ["lost is indicator -1", "without one it is 22002", "refused PF002 no detail", SILENT];
    says(&server(harness)?, harness.rundir().command(&program), &lines)
}
