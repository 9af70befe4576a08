//! Dumps that are loaded over a running database, or by a server whose clock is behind: what they carry can only move
//! the tokens on.

use crate::failover::restores::{dump, restore};
use crate::support::history::History;
use crate::tokens::jumps::{by_clock, floor, jumps};
use pg_test::clock::Clocked;
use pg_test::{ensure, lab_test, Calls, Cluster, Lab, Result, Session};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Each way in which a dump reaches a database that has its objects already.
const WAYS: [&[&str]; 7] = [
    &[],
    &["-j", "3"],
    &["--data-only"],
    &["--data-only", "--disable-triggers"],
    &["--data-only", "-j", "3"],
    &["--data-only", "-n", "fence"],
    &["-t", "orders", "-t", "parcels"],
];

/// The next token. (A try is NULL while the load locks the table.)
fn draw(session: &mut Session) -> Result<i64> {
    loop {
        if let Some(token) = session.one("SELECT lease_acquire(gen_random_uuid()::text)", &[])? {
            return Ok(token);
        }
    }
}

/// Loads what can be loaded: what is there already is in the way of the rest.
fn load(lab: &Lab, cluster: &Cluster, dbname: &str, file: &str, way: &[&str]) {
    let conninfo = cluster.conninfo(dbname).to_string();
    let _ = lab.run("pg_restore", &[&["-d", &conninfo], way, &[file]].concat());
}

#[lab_test]
fn a_dump_loaded_over_the_running_database_gives_no_token_twice(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut known = db.connect()?;
    let mut history = History::begin(&mut known)?;
    let file = dump(lab, lab.cluster(), db.name())?;
    history.draw_more(&mut known, 60)?;
    for way in WAYS {
        let stop = AtomicBool::new(false);
        // Sessions that draw meanwhile: one that stays, and one after the other.
        let drawn = std::thread::scope(|scope| -> Result<Vec<i64>> {
            let workers = [true, false].map(|stays| {
                let (stop, db) = (&stop, &db);
                scope.spawn(move || -> Result<Vec<i64>> {
                    let mut session = db.connect()?;
                    let mut drawn = Vec::new();
                    while !stop.load(Relaxed) || drawn.len() < 10 {
                        drawn.push(draw(&mut session)?);
                        if !stays {
                            session = db.connect()?;
                        }
                    }
                    Ok(drawn)
                })
            });
            load(lab, lab.cluster(), db.name(), &file, way);
            stop.store(true, Relaxed);
            let all = workers.into_iter().map(|worker| worker.join().expect("no panic"));
            Ok(all.collect::<Result<Vec<_>>>()?.concat())
        })?;
        let different: BTreeSet<i64> = drawn.iter().copied().collect();
        ensure!(different.len() == drawn.len(), "{way:?}: a token was drawn twice");
        ensure!(different.first() > Some(&history.seen), "{way:?}: a token recurs");
        history.see(different.last().copied().unwrap_or_default());
        for session in [&mut db.connect()?, &mut known] {
            let next = draw(session)?;
            ensure!(next > history.seen, "{way:?}: {next} after {}", history.seen);
            history.see(next);
        }
    }
    ensure!(jumps(&mut known)? == 0, "nobody has to renew for it");
    Ok(())
}

#[lab_test]
fn a_dump_from_before_a_jump_makes_no_silenced_token_speak(lab: &Lab) -> Result<()> {
    let primary = lab.builder().start()?;
    let standby = lab.builder().standby_of(&primary)?;
    standby.start()?;
    let mut session = primary.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    let token = session.acquire("job", "1 hour")?;
    let file = dump(lab, &primary, "postgres")?;
    session.run("SELECT fence_new_epoch()")?;
    let silenced = floor(&mut session)?;
    for way in WAYS {
        load(lab, &primary, "postgres", &file, way);
        standby.wait_replayed(&primary)?;
        for cluster in [&standby, &primary] {
            ensure!(!cluster.connect("postgres")?.speaks("job", token)?, "{way:?}: it speaks");
        }
        primary
            .connect("postgres")?
            .refused(&format!("SELECT lease_guard('job', {token})"), "PF004")?;
        ensure!(floor(&mut session)? >= silenced && jumps(&mut session)? >= 1, "{way:?}");
    }
    Ok(())
}

/// A dump of a database with a history, and a server whose clock is a minute behind.
struct Behind {
    history: History,
    file: String,
    clocked: Clocked,
    admin: Session,
}

impl Behind {
    fn begin(lab: &Lab) -> Result<Self> {
        let db = lab.database()?;
        let mut session = db.connect()?;
        let mut history = History::begin(&mut session)?;
        history.draw_more(&mut session, 100)?;
        let file = dump(lab, lab.cluster(), db.name())?;
        let clocked = Clocked::start(lab.builder(), &lab.prefix().new_dir("clock")?)?;
        clocked.step(-60)?;
        let admin = clocked.cluster().connect("postgres")?;
        Ok(Behind { history, file, clocked, admin })
    }

    /// Restores the dump there, as far as the options say, and drops the database after the work.
    fn restored(
        &mut self,
        lab: &Lab,
        options: &[&str],
        work: impl FnOnce(&mut Self) -> Result<Session>,
    ) -> Result<()> {
        self.admin.run("CREATE DATABASE restored")?;
        restore(lab, self.clocked.cluster(), "restored", &self.file, options)?;
        let mut session = work(self)?;
        ensure!(jumps(&mut session)? == 1);
        drop(session);
        self.admin.run("DROP DATABASE restored WITH (FORCE)")
    }

    fn connect(&self) -> Result<Session> {
        self.clocked.cluster().connect("restored")
    }
}

#[lab_test]
fn a_dump_goes_on_where_the_clock_is_a_minute_behind(lab: &Lab) -> Result<()> {
    let mut behind = Behind::begin(lab)?;
    let both: [(&[&str], bool); 3] = [(&[], false), (&["-j", "3"], false), (&[], true)];
    for (options, restarts) in both {
        behind.restored(lab, options, |behind| {
            if restarts {
                behind.clocked.cluster().restart()?;
                behind.admin = behind.clocked.cluster().connect("postgres")?;
            }
            let (mut session, history) = (behind.connect()?, &behind.history);
            ensure!(by_clock(&mut session)? < history.token, "the clock is not behind");
            // Both were issued where the rows come from: none is PF003.
            session.refused("UPDATE parcels SET total = 2, fence = fence - 1", "PF001")?;
            session.run(&format!("UPDATE parcels SET total = 2, fence = {}", history.seen))?;
            history.goes_on(&mut session)?;
            Ok(session)
        })?;
    }
    Ok(())
}

#[lab_test]
fn a_session_that_was_there_before_the_dump_goes_on_above_it(lab: &Lab) -> Result<()> {
    let mut behind = Behind::begin(lab)?;
    // The first call of the session that was there.
    for first in ["draw", "judge", "guard", "check"] {
        for way in &WAYS[2..6] {
            behind.restored(lab, &["--section=pre-data"], |behind| {
                let (mut early, history) = (behind.connect()?, &behind.history);
                let before = draw(&mut early)?;
                ensure!(before < history.token, "{before}: the clock is not behind");
                load(lab, behind.clocked.cluster(), "restored", &behind.file, way);
                match first {
                    "judge" => early.run(&format!(
                        "CREATE TABLE t (id int, fence bigint); SELECT fence_protect('t', events => 'insert');
                         INSERT INTO t VALUES (1, {})",
                        history.seen
                    ))?,
                    "guard" => {
                        let guard = format!("SELECT lease_guard('order:7', {})", history.token);
                        early.refused(&guard, "PF004").map(drop)?;
                    }
                    "check" => {
                        ensure!(!early.speaks("order:7", history.token)?, "{way:?}: it speaks");
                    }
                    _ => {}
                }
                for session in [&mut early, &mut behind.connect()?] {
                    let next = draw(session)?;
                    ensure!(next > history.seen, "{first}, {way:?}: {next} after {}", history.seen);
                }
                Ok(early)
            })?;
        }
    }
    Ok(())
}

#[lab_test]
fn what_a_dump_carries_follows_the_tokens(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut session, mut other) = (db.connect()?, db.connect()?);
    draw(&mut other)?;
    let seen = draw(&mut session)?;
    // As after so many draws.
    session.run(&format!("SELECT setval('fence.token_seq', {seen} + 3600 * 1048576::bigint)"))?;
    let token = session.acquire("job", "1 hour")?;
    let carried = "SELECT last_value FROM fence.dumped_token_seq";
    ensure!(session.one::<i64>(carried, &[])? == token);
    ensure!(draw(&mut other)? == token + 1 && session.one::<i64>(carried, &[])? == token);
    let file = dump(lab, lab.cluster(), db.name())?;
    let restored = lab.bare_database()?;
    restore(lab, lab.cluster(), restored.name(), &file, &[])?;
    let mut session = restored.connect()?;
    ensure!(!session.speaks("job", token)? && draw(&mut session)? > token + 1);
    // An older dump takes it back for a moment only.
    session.run("SELECT setval('fence.dumped_token_seq', 7)")?;
    let next = draw(&mut session)?;
    ensure!(session.one::<i64>(carried, &[])? == next);
    // One of this very database when it was ahead (its volume was rolled back since) moves the tokens on.
    let ahead = next + 3 * 1_048_576;
    session.run(&format!("SELECT setval('fence.dumped_token_seq', {ahead})"))?;
    ensure!(draw(&mut session)? > ahead && draw(&mut restored.connect()?)? > ahead);
    Ok(())
}
