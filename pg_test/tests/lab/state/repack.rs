//! Tools that copy a table while it is written to lose no write of a lease: pg_repack, which records by a row trigger
//! what changes meanwhile, and REPACK (CONCURRENTLY), which reads that from the log.

use pg_test::test_case::left_out;
use pg_test::{ensure, lab_test, process, Calls, Context, Database, Lab, Result, Session};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Rows of the lease table, so that the copy takes a while.
const LEASES: i32 = 42_000;
/// How many leases each session that hands over has.
const OWN: i32 = 400;

fn with_leases(lab: &Lab) -> Result<Database> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.run("CREATE TABLE orders (id int PRIMARY KEY, total int DEFAULT 0)")?;
    session.run(&format!("INSERT INTO orders SELECT n FROM generate_series(1, {LEASES}) n"))?;
    session.run("SELECT fence_protect('orders', lease => '{id}')")?;
    // Each grant is a lock until its transaction ends, so not all at once.
    for first in (1..=LEASES).step_by(1_000) {
        session.granted(&format!(
            "SELECT count(lease_acquire(n::text, 'A', '1 h'))
               FROM generate_series({first}, {first} + 999) n"
        ))?;
    }
    Ok(db)
}

/// A lease, A's token of it that was released, and B's that was granted.
struct HandOver {
    id: i32,
    released: i64,
    granted: i64,
}

/// Hands leases over from A to B, one after the other, until told to stop.
fn hand_over(
    db: &Database,
    first: i32,
    done: &AtomicUsize,
    stop: &AtomicBool,
) -> Result<Vec<HandOver>> {
    let mut session = db.connect()?;
    let mut all = Vec::new();
    for id in first..first + OWN {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let name = id.to_string();
        let held = format!("SELECT max(first_token) FROM lease_info('{name}')");
        // To a statement that began before REPACK (CONCURRENTLY) ended, the table is empty.
        let released = match session.token(&held)? {
            Some(token) => token,
            None => session.granted(&held)?,
        };
        session.release(&name, released)?.context("A's lease is lost")?;
        // A try is answered with NULL for as long as pg_repack itself waits for the table.
        let granted =
            session.granted(&format!("SELECT lease_acquire('{name}', 'B', '1 h', '10 min')"))?;
        done.fetch_add(1, Ordering::Relaxed);
        all.push(HandOver { id, released, granted });
    }
    Ok(all)
}

fn with_pg_repack(lab: &Lab) -> Result<Database> {
    if !lab.prefix().has_repack() {
        return left_out("pg_repack does not build for a candidate");
    }
    lab.prefix().bring_repack()?;
    let db = with_leases(lab)?;
    db.connect()?.run("CREATE EXTENSION pg_repack")?;
    Ok(db)
}

fn pg_repack(lab: &Lab, db: &Database, arguments: &[&str]) -> Result<()> {
    let port = lab.cluster().port().to_string();
    let mut command: Command = lab.prefix().command("pg_repack")?;
    command.args(["-h", "127.0.0.1", "-U", "postgres", "-p", &port, "-d", db.name()]);
    process::output_of(command.args(arguments)).map(drop)
}

fn every_hand_over_stands(session: &mut Session, all: &[HandOver]) -> Result<()> {
    for HandOver { id, released, granted } in all {
        let name = id.to_string();
        ensure!(session.speaks(&name, *granted)?, "B has lost lease {id}");
        ensure!(!session.speaks(&name, *released)?, "A's released token of lease {id} speaks");
        session.refused(
            &format!("UPDATE orders SET total = 1, fence = {released} WHERE id = {id}"),
            "PF004",
        )?;
    }
    ensure!(session.truth(&format!("SELECT count(*) = {LEASES} FROM fence.lease"))?);
    // Rows that nobody touched stand, too.
    ensure!(session.truth(&format!(
        "SELECT count(*) = {} FROM fence.lease WHERE holder = 'A' AND closing_token IS NULL",
        LEASES - all.len() as i32
    ))?);
    let granted = &all[0];
    session.run(&format!(
        "UPDATE orders SET total = 2, fence = {} WHERE id = {}",
        granted.granted, granted.id
    ))
}

/// While the table is repacked, hands leases over; then each stands as its sessions saw it.
fn repacked(db: &Database, repack: impl Fn() -> Result<()>) -> Result<()> {
    let file = "SELECT pg_relation_filenode('fence.lease')::text";
    let mut session = db.connect()?;
    let before = session.text(file)?;
    let (done, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let all = std::thread::scope(|scope| -> Result<Vec<HandOver>> {
        let sessions: Vec<_> = (0..2)
            .map(|n| {
                let (done, stop) = (&done, &stop);
                scope.spawn(move || hand_over(db, 1 + n * OWN, done, stop))
            })
            .collect();
        let mut outcome = Ok(());
        // At least one of them must have met hand-overs, of which a slow disk lets few be made at a time.
        let start = Instant::now();
        while outcome.is_ok() && start.elapsed() < Duration::from_secs(300) {
            let met = done.load(Ordering::Relaxed);
            outcome = repack();
            let done = done.load(Ordering::Relaxed);
            if done > met + 20 || done == 2 * OWN as usize {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        let mut all = Vec::new();
        for session in sessions {
            all.extend(session.join().expect("no panic")?);
        }
        outcome.map(|()| all)
    })?;
    ensure!(session.text(file)? != before, "the table was not repacked");
    ensure!(all.len() > 20, "only {} hand-overs", all.len());
    every_hand_over_stands(&mut session, &all)
}

#[lab_test]
fn pg_repack_of_one_table_keeps_every_hand_over(lab: &Lab) -> Result<()> {
    let db = with_pg_repack(lab)?;
    repacked(&db, || pg_repack(lab, &db, &["-t", "fence.lease"]))
}

#[lab_test]
fn pg_repack_of_the_whole_database_keeps_every_hand_over(lab: &Lab) -> Result<()> {
    let db = with_pg_repack(lab)?;
    repacked(&db, || pg_repack(lab, &db, &[]))
}

#[lab_test(from = 19)]
fn repack_concurrently_keeps_every_hand_over(lab: &Lab) -> Result<()> {
    let db = with_leases(lab)?;
    repacked(&db, || db.connect()?.run("REPACK (CONCURRENTLY) fence.lease"))
}
