//! Patroni fails over under load, twice, each time to a standby that has missed some of it.

use crate::support::history::{History, epochs_begun};
use pg_test::patroni::{self, Patroni, leader_of};
use pg_test::process::{PATIENCE, resume, wait_until};
use pg_test::{Conninfo, Context, Harness, Result, ensure, harness_test, setup};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Every token that a client has seen, by the timeline of the server that drew it.
#[derive(Default)]
struct Seen {
    tokens: BTreeMap<i32, Vec<i64>>,
}

/// Clients that take, renew and release leases on the current leader.
struct Load {
    seen: Arc<Mutex<Seen>>,
    over: Arc<AtomicBool>,
    workers: Vec<JoinHandle<()>>,
}

impl Load {
    fn start(conninfos: Vec<Conninfo>, workers: usize) -> Load {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let over = Arc::new(AtomicBool::new(false));
        let work = |number: usize| {
            let (seen, over, conninfos) = (seen.clone(), over.clone(), conninfos.clone());
            std::thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    // An error means a failover. The outcome of the call is unknown, and no client has seen a token
                    // from it.
                    let _ = work_until_lost(number, &conninfos, &seen, &over);
                    std::thread::sleep(Duration::from_millis(20));
                }
            })
        };
        let workers = (0..workers).map(work).collect();
        Load { seen, over, workers }
    }

    fn count(&self) -> usize {
        self.seen.lock().expect("no panic").tokens.values().map(Vec::len).sum()
    }

    fn greatest(&self) -> i64 {
        let seen = self.seen.lock().expect("no panic");
        seen.tokens.values().flatten().copied().max().unwrap_or(0)
    }

    fn timelines(&self) -> usize {
        self.seen.lock().expect("no panic").tokens.len()
    }

    /// Waits until clients have seen `more` further tokens.
    fn go_on(&self, more: usize) -> Result<()> {
        let enough = self.count() + more;
        wait_until("tokens are drawn", PATIENCE, || self.count() >= enough)
    }

    fn end(self) -> Result<Seen> {
        self.over.store(true, Ordering::Relaxed);
        for worker in self.workers {
            ensure!(worker.join().is_ok(), "a client panicked");
        }
        Ok(std::mem::take(&mut *self.seen.lock().expect("no panic")))
    }
}

fn work_until_lost(
    number: usize,
    conninfos: &[Conninfo],
    seen: &Mutex<Seen>,
    over: &AtomicBool,
) -> Result<()> {
    let mut session = leader_of(conninfos).context("nobody leads")?;
    session.run("SET statement_timeout = '5s'")?;
    let timeline: i32 = session.one("SELECT timeline FROM fence_status()", &[])?;
    let name = format!("lease {number}");
    while !over.load(Ordering::Relaxed) {
        let acquire = "SELECT lease_acquire($1, 'w', ttl => '1 s', reclaim => true)";
        let Some(mut token) = session.one::<Option<i64>>(acquire, &[&name])? else { continue };
        let mut tokens = vec![token];
        if let Some(renewed) = session.one("SELECT lease_renew($1, $2)", &[&name, &token])? {
            token = renewed;
            tokens.push(token);
        }
        tokens
            .extend(session.one::<Option<i64>>("SELECT lease_release($1, $2)", &[&name, &token])?);
        seen.lock().expect("no panic").tokens.entry(timeline).or_default().extend(tokens);
    }
    Ok(())
}

#[harness_test(slow)]
fn patroni_fails_over_under_load(harness: &Harness) -> Result<()> {
    setup::ensure(&patroni::packages())?;
    let mut patroni = Patroni::start(harness.install_dir().clone(), 3)?;
    let mut history = History::begin(&mut patroni.leader().context("nobody leads")?)?;
    let load = Load::start(patroni.conninfos(), 6);
    load.go_on(200)?;
    for failover in 1..=2 {
        // From here on the standbys receive nothing of what clients see.
        let frozen = patroni.freeze_replication()?;
        load.go_on(200)?;
        patroni.kill_leader()?;
        for pid in frozen {
            resume(pid)?;
        }
        wait_until("another leads", PATIENCE, || load.timelines() > failover)
            .with_context(|| patroni.logs())?;
        history.see(load.greatest());
        let mut session = patroni.leader().context("nobody leads")?;
        if failover == 1 {
            // After the renewal the holder continues. The next failover invalidates its token again.
            history.token = session.one("SELECT lease_renew('order:7', $1)", &[&history.token])?;
            session.run(&format!("UPDATE orders SET total = 1, fence = {}", history.token))?;
            wait_until("a standby follows", PATIENCE, || {
                let replayed = "SELECT count(*) > 0 FROM pg_stat_replication \
                                WHERE replay_lsn >= pg_current_wal_lsn() - 100000";
                session.one(replayed, &[]).unwrap_or(false)
            })
            .with_context(|| patroni.logs())?;
        }
        load.go_on(200)?;
    }
    let seen = load.end()?;
    let mut session = patroni.leader().context("nobody leads")?;
    ensure!(epochs_begun(&mut session)? == 2, "{} epochs", epochs_begun(&mut session)?);
    let mut last = 0;
    for (timeline, tokens) in &seen.tokens {
        let (least, greatest) = (tokens.iter().min(), tokens.iter().max());
        ensure!(
            least > Some(&last),
            "timeline {timeline} began with {least:?}, and {last} was seen"
        );
        last = *greatest.context("it has tokens")?;
    }
    let mut all: Vec<i64> = seen.tokens.into_values().flatten().collect();
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    ensure!(all.len() == count, "{} tokens were given out twice", count - all.len());
    history.see(last);
    history.goes_on(&mut session)?;
    Ok(())
}
