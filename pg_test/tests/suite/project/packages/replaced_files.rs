//! The files are replaced as the pages say, while sessions have the library loaded: no session is disturbed.

use super::{bare_install_dir, directory, packed, unpacked};
use pg_test::cluster::Builder;
use pg_test::install_dir::InstallDir;
use pg_test::process::output_of;
use pg_test::setup::{self, Package};
use pg_test::source_tree::source_root;
use pg_test::{Calls, Conninfo, Context, Harness, Result, Session, ensure, harness_test};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// How often the files are replaced: only sometimes does a new session begin during a replacement.
const TIMES: usize = 20;

/// Opens a session and loads the present library.
fn session(conninfo: &Conninfo) -> Result<Session> {
    let mut session = conninfo.connect()?;
    session.run("LOAD 'pg_fence'")?;
    Ok(session)
}

/// Takes a lease, writes the row that it guards, and releases the lease.
fn use_it(session: &mut Session, row: usize) -> Result<()> {
    let token = session.acquire(&format!("order:{row}"), "1 h")?;
    session.run(&format!(
        "UPDATE orders SET n = n + 1, fence = lease_release('order:{row}', {token}) WHERE id = {row}"
    ))
}

/// Uses the library until stopped, in a permanent session or in a new one each time. Returns the number of uses.
fn work(conninfo: &Conninfo, row: usize, stop: &AtomicBool) -> Result<usize> {
    let mut same = session(conninfo)?;
    let mut turns = 0;
    while !stop.load(Ordering::Relaxed) {
        match row.is_multiple_of(2) {
            true => use_it(&mut same, row)?,
            false => use_it(&mut session(conninfo)?, row)?,
        }
        turns += 1;
    }
    Ok(turns)
}

/// Replaces the files while sessions use the library, are idle, or are in a transaction.
fn goes_on_while(harness: &Harness, replace: impl Fn(&InstallDir) -> Result<()>) -> Result<()> {
    let install_dir = bare_install_dir(harness)?;
    install_dir.install(harness.extension())?;
    let cluster = Builder::new(Arc::new(install_dir)).start()?;
    let conninfo = cluster.conninfo("postgres");
    let mut idle = conninfo.connect()?;
    idle.run(
        "CREATE EXTENSION pg_fence; CREATE TABLE orders (id int PRIMARY KEY, n int);
         INSERT INTO orders SELECT g, 0 FROM generate_series(0, 9) g;
         SELECT fence_protect('orders', lease => 'order:{id}')",
    )?;
    use_it(&mut idle, 8)?;
    let mut writer = session(&conninfo)?;
    let token = writer.acquire("order:9", "1 h")?;
    let write = format!("UPDATE orders SET n = n + 1, fence = {token} WHERE id = 9");
    writer.run("BEGIN")?;
    writer.run(&write)?;

    let stop = AtomicBool::new(false);
    let turns: Vec<usize> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|row| {
                scope.spawn({
                    let (c, s) = (&conninfo, &stop);
                    move || work(c, row, s)
                })
            })
            .collect();
        let replaced = (0..TIMES).try_for_each(|_| replace(cluster.install_dir()));
        stop.store(true, Ordering::Relaxed);
        let worked = workers.into_iter().map(|worker| worker.join().expect("it does not panic"));
        let worked = worked.collect::<Result<Vec<usize>>>();
        replaced.and(worked)
    })
    .with_context(|| cluster.log_end(20))?;
    ensure!(turns.iter().all(|&turns| turns > 1), "{turns:?} turns");

    writer.run(&write).with_context(|| cluster.log_end(20))?;
    writer.run("COMMIT")?;
    use_it(&mut idle, 8).with_context(|| cluster.log_end(20))?;
    use_it(&mut session(&conninfo)?, 8)?;
    let died = cluster.log()?.lines().any(|line| line.contains("was terminated by signal"));
    ensure!(!died, "{}", cluster.log_end(20));
    idle.one::<i32>("SELECT n FROM orders WHERE id = 9", &[]).map(drop)
}

/// Returns the commands of INSTALL: its first indented lines.
fn commands(install: &str) -> Vec<&str> {
    let lines = install.lines().map(|line| line.strip_prefix("    "));
    lines.skip_while(Option::is_none).map_while(|line| line).collect()
}

#[harness_test]
fn the_tarball_s_own_commands_update_it_under_sessions_that_use_it(
    harness: &Harness,
) -> Result<()> {
    let dir = directory(harness, "update")?;
    let (_, tarball) = packed(harness, &dir)?;
    let unpacked = unpacked(&tarball, dir.join("tar"))?;
    let top = fs::read_dir(&unpacked)?.next().context("an empty tarball")??.path();
    let install = fs::read_to_string(top.join("INSTALL"))?;
    let commands = commands(&install);
    ensure!(commands.len() == 3, "{install}");
    let page = fs::read_to_string(source_root().join("docs/operations/installing.md"))?;
    ensure!(page.contains(&commands.join("\n")), "the page says something else than {install}");

    goes_on_while(harness, |install_dir| {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut shell = Command::new("sh");
        shell.args(["-euc", &commands.join("\n")]).current_dir(&top);
        shell.env("PATH", format!("{}:{path}", install_dir.bin_dir().display()));
        output_of(&mut shell).map(drop)
    })
}

#[harness_test]
fn make_install_updates_it_under_sessions_that_use_it(harness: &Harness) -> Result<()> {
    setup::ensure(&[Package::new("make", "/usr/bin/make")])?;
    let ready = directory(harness, "make")?;
    goes_on_while(harness, |install_dir| {
        let below = |place: &Path| ready.join(place.strip_prefix("/").unwrap_or(place));
        let (library, others) =
            (below(&install_dir.lib_dir()), below(&install_dir.extension_dir()));
        fs::create_dir_all(&library)?;
        fs::create_dir_all(&others)?;
        harness.extension().install(&library, &others)?;
        let mut make = Command::new("make");
        make.arg("install").arg(format!("READY={}", ready.display())).arg("DESTDIR=/");
        output_of(make.current_dir(source_root())).map(drop)
    })
}
