//! The programs of the pages for languages that have no client of ours, as they stand there.

use crate::project::pages::page;
use pg_test::markdown;
use pg_test::process::{wait_until, PATIENCE};
use pg_test::setup::{self, Package};
use pg_test::{ensure, lab_test, Calls, Cluster, Context, Lab, Result, Session};
use std::io::Write;
use std::process::{Child, Command, Output, Stdio};

/// The pages' name for the slow part of the work.
const SLOW: &str = "the slow work";

/// The program of a page, which waits for a line of its input where the slow work is.
fn program(page_of: &str, mark: &str, comment: &str, wait: &str) -> Result<String> {
    let text = page(&format!("docs/tutorial/languages/{page_of}.md"))?;
    let block = markdown::blocks(&text).into_iter().find(|block| block.mark == mark);
    let code = block.context("the page has no program")?.code;
    ensure!(code.matches(&format!("{comment} {SLOW}")).count() == 1, "{code}");
    Ok(code.replace(&format!("{comment} {SLOW}"), &format!("{wait}\n{comment} {SLOW}")))
}

/// Runs it up to where it waits: it has the lease, and no transaction is open.
fn begin(command: &mut Command, session: &mut Session) -> Result<Child> {
    let child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let held = "SELECT count(*) = 1 FROM fence.leases WHERE name = 'order:7' AND state = 'held'";
    wait_until("it has the lease", PATIENCE, || session.one::<bool>(held, &[]).unwrap_or(false))?;
    Ok(child)
}

fn finish(mut child: Child) -> Result<(Output, String)> {
    child.stdin.take().context("its input")?.write_all(b"\n")?;
    let output = child.wait_with_output()?;
    let said = [&*output.stdout, &*output.stderr].map(String::from_utf8_lossy).concat();
    Ok((output, said))
}

/// It writes under its lease, is told where the lease is taken, and is refused once it has lost it.
fn keeps_to_its_lease(cluster: &Cluster, command: impl Fn() -> Command) -> Result<()> {
    let mut session = cluster.connect("postgres")?;
    session.run(
        "CREATE EXTENSION pg_fence; CREATE TABLE orders (id bigint PRIMARY KEY, status text);
         INSERT INTO orders VALUES (7, 'new'); SELECT fence_protect('orders', lease => 'order:{id}');
         CREATE ROLE app LOGIN; SELECT fence_grant('app'); GRANT SELECT, UPDATE ON orders TO app",
    )?;
    let status = "SELECT status FROM orders";

    let lost = begin(&mut command(), &mut session)?;
    let taken = command().stdin(Stdio::null()).output()?;
    ensure!(String::from_utf8_lossy(&[taken.stdout, taken.stderr].concat()).contains("is taken"));
    session.run("SELECT lease_revoke('order:7')")?;
    let token = session.acquire("order:7", "1 h")?;
    let (output, said) = finish(lost)?;
    ensure!(!output.status.success() || said.contains("is lost"), "{said}");
    ensure!(said.contains("does not speak") || said.contains("is lost"), "{said}");
    ensure!(session.text(status)?.as_deref() == Some("new"), "{said}");
    session.release("order:7", token)?.context("held")?;

    let (output, said) = finish(begin(&mut command(), &mut session)?)?;
    ensure!(output.status.success(), "{said}");
    ensure!(session.text(status)?.as_deref() == Some("paid"), "{said}");
    ensure!(session.text("SELECT state FROM fence.leases")?.as_deref() == Some("free"), "{said}");
    Ok(())
}

#[lab_test(slow)]
fn the_page_s_program_in_ruby_keeps_to_its_lease(lab: &Lab) -> Result<()> {
    setup::ensure(&[Package::new("ruby-pg", "/usr/lib/ruby/vendor_ruby/pg.rb")])?;
    let code = program("ruby", "ruby", "#", "STDIN.gets")?;
    let cluster = lab.builder().start()?;
    let url = format!("postgresql://app@127.0.0.1:{}/postgres", cluster.port());
    keeps_to_its_lease(&cluster, || {
        let mut ruby = Command::new("ruby");
        ruby.args(["-e", &code]).env("DATABASE_URL", &url);
        ruby
    })
}

#[lab_test(slow)]
fn the_page_s_program_in_php_keeps_to_its_lease(lab: &Lab) -> Result<()> {
    setup::ensure(&[
        Package::new("php-cli", "/usr/bin/php"),
        Package::new("php-pgsql", "/usr/share/doc/php-pgsql"),
    ])?;
    let code = program("php", "php", "//", "fgets(STDIN);")?;
    let code = code.trim_start_matches("<?php").to_owned();
    let cluster = lab.builder().start()?;
    let dsn = format!("pgsql:host=127.0.0.1;port={};dbname=postgres;user=app", cluster.port());
    keeps_to_its_lease(&cluster, || {
        let mut php = Command::new("php");
        php.args(["-r", &code]).env("PDO_DSN", &dsn);
        php
    })
}
