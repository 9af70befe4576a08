//! A crowd: many sessions cross on a handful of leases while others cancel, end and pause them.
//!
//! It fails when anything that must hold does not: an increment under a lease is lost, grants live together
//! that exclude each other, a later waiter goes ahead of an earlier one, a call does not come back, an error
//! comes that nothing explains, or a lock is left behind.

mod disturbances;
mod session;

use super::length::Length;
use crate::client::Conninfo;
use crate::lab::Lab;
use crate::process::{wait_until, PATIENCE};
use anyhow::{bail, ensure, Context, Result};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    #[command(flatten)]
    length: Length,
    /// How many sessions cross
    #[arg(long, default_value_t = 200)]
    sessions: u64,
}

/// The exclusive leases, each with a counter; `read` is shared, and `three` has three slots.
const EXCLUSIVE: [&str; 3] = ["a", "b", "c"];

/// What all threads share.
struct Shared {
    conninfo: Conninfo,
    stop: AtomicBool,
    /// What was seen that must not be.
    wrong: Mutex<Vec<String>>,
    tally: Tally,
}

/// How often each thing happened to the sessions.
#[derive(Debug, Default)]
pub struct Tally {
    pub granted: AtomicU64,
    in_vain: AtomicU64,
    lost: AtomicU64,
    cancelled: AtomicU64,
    terminated: AtomicU64,
    paused: AtomicU64,
    looks: AtomicU64,
    longest_line: AtomicU64,
    /// Increments, by lease: those that were confirmed, and those of unknown outcome.
    confirmed: [AtomicU64; EXCLUSIVE.len()],
    unknown: [AtomicU64; EXCLUSIVE.len()],
}

/// What a thread does.
type Work = Box<dyn FnOnce(&Shared) -> Result<()> + Send>;

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Shared {
    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// Notes what must not be, and ends the run.
    fn wrong(&self, what: String) {
        self.wrong.lock().unwrap_or_else(|e| e.into_inner()).push(what);
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Runs in a lab of its own and prints what happened.
pub fn run(program: &Path, options: &Options) -> Result<()> {
    let (time, seed) = (options.length.time(), options.length.seed());
    println!("{} sessions for {time:?}, seed {seed}", options.sessions);
    println!("{:#?}", on(&Lab::start(program)?, time, options.sessions, seed)?);
    Ok(())
}

/// Runs on a server of its own.
pub fn on(lab: &Lab, time: Duration, sessions: u64, seed: u64) -> Result<Tally> {
    let connections = (sessions + 60).to_string();
    let cluster = lab.builder().set("max_connections", &connections).start()?;
    let conninfo = cluster.conninfo("postgres");
    let mut admin = conninfo.connect()?;
    admin.run(
        "CREATE EXTENSION pg_fence;
         CREATE TABLE counter (lease text PRIMARY KEY, n bigint NOT NULL, fence bigint);
         INSERT INTO counter SELECT name, 0 FROM unnest('{a, b, c}'::text[]) name;
         SELECT fence_protect('counter', lease => '{lease}')",
    )?;
    let shared = Arc::new(Shared {
        conninfo: conninfo.clone(),
        stop: AtomicBool::new(false),
        wrong: Mutex::default(),
        tally: Tally::default(),
    });
    let mut threads = Vec::new();
    let mut thread = |name: String, work: Work| {
        let shared = shared.clone();
        let spawned = std::thread::Builder::new().name(name.clone()).spawn(move || {
            if let Err(error) = work(&shared) {
                shared.wrong(format!("{name}: {error:#}"));
            }
        });
        spawned.map(|thread| threads.push(thread))
    };
    for i in 0..sessions {
        let seed = seed.wrapping_add(i);
        thread(format!("session {i}"), Box::new(move |shared| session::run(shared, seed)))?;
    }
    thread("disturbances".to_owned(), Box::new(move |shared| disturbances::disturb(shared, seed)))?;
    thread("watch".to_owned(), Box::new(disturbances::watch))?;

    let end = Instant::now() + time;
    while Instant::now() < end && shared.goes_on() {
        std::thread::sleep(Duration::from_millis(50));
    }
    shared.stop.store(true, Ordering::Relaxed);
    // Every wait is for seconds at most, so everybody is back soon.
    let back = wait_until("all sessions are back", PATIENCE, || {
        threads.iter().all(std::thread::JoinHandle::is_finished)
    });
    let wrong = std::mem::take(&mut *shared.wrong.lock().unwrap_or_else(|e| e.into_inner()));
    if !wrong.is_empty() {
        bail!("seed {seed}:\n{}", wrong.join("\n"));
    }
    back.with_context(|| {
        format!("stuck: {:?}", admin.rows(disturbances::WHO).unwrap_or_default())
    })?;
    threads.into_iter().for_each(|thread| drop(thread.join()));

    disturbances::nothing_is_left(&mut admin)?;
    for (i, lease) in EXCLUSIVE.iter().enumerate() {
        let n: i64 = admin.one("SELECT n FROM counter WHERE lease = $1", &[lease])?;
        let confirmed = shared.tally.confirmed[i].load(Ordering::Relaxed) as i64;
        let most = confirmed + shared.tally.unknown[i].load(Ordering::Relaxed) as i64;
        ensure!((confirmed..=most).contains(&n), "{lease}: {n}, not {confirmed} to {most}");
    }
    Ok(Arc::into_inner(shared).context("a thread is left")?.tally)
}
