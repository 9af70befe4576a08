//! Cancels, terminates and pauses sessions of the crowd; and watches that none overtakes another in the queue.

use super::{count, Shared};
use crate::client::Session;
use crate::process::{self, wait_until, PATIENCE};
use anyhow::Result;
use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The sessions and what they do.
pub const WHO: &str = "SELECT pid, state, wait_event_type, wait_event, query \
    FROM pg_stat_activity WHERE application_name = 'crowd' AND state <> 'idle' LIMIT 20";

/// Cancels, ends and pauses sessions, most of them while they wait.
pub fn disturb(shared: &Shared, seed: u64) -> Result<()> {
    let mut session = shared.conninfo.connect()?;
    let mut chance = StdRng::seed_from_u64(seed ^ 0x5708);
    while shared.goes_on() {
        std::thread::sleep(Duration::from_millis(chance.random_range(5..60)));
        let rows = session.rows(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'crowd' \
             AND (wait_event_type IN ('Lock', 'Extension') OR random() < 0.1)",
        )?;
        if rows.is_empty() {
            continue;
        }
        let row = &rows[chance.random_range(0..rows.len())];
        let pid: i32 = row[0].as_deref().unwrap_or_default().parse()?;
        match chance.random_range(0..10) {
            0..6 => {
                session.run(&format!("SELECT pg_cancel_backend({pid})"))?;
                count(&shared.tally.cancelled);
            }
            6..8 => {
                session.run(&format!("SELECT pg_terminate_backend({pid})"))?;
                count(&shared.tally.terminated);
            }
            _ => {
                // It may have gone meanwhile.
                if process::signal(pid, Signal::SIGSTOP).is_ok() {
                    std::thread::sleep(Duration::from_millis(chance.random_range(10..200)));
                    process::signal(pid, Signal::SIGCONT)?;
                    count(&shared.tally.paused);
                }
            }
        }
    }
    Ok(())
}

/// A wait in a queue that a look has shown.
struct Seen {
    /// The look that showed it first. The server's own time of it may be later than its place in the line, by as
    /// long as its process is held up. None: that time was not known yet, so this look may have shown another wait.
    first: Option<u64>,
    /// The server's time of it, which tells it from another wait of the same session.
    began: Option<i64>,
}

/// Looks at the queues again and again: who becomes the head must have come before all who still wait.
pub fn watch(shared: &Shared) -> Result<()> {
    let mut session = shared.conninfo.connect()?;
    let mut waiting: HashMap<(String, i32), Seen> = HashMap::new();
    let mut heads: Vec<(String, i32)> = Vec::new();
    for look in 0.. {
        if !shared.goes_on() {
            break;
        }
        let rows = session.rows(
            "SELECT concat_ws(':', l.classid, l.objid, l.objsubid), l.pid, l.granted, \
               (extract(epoch FROM l.waitstart) * 1000000)::bigint \
             FROM pg_locks l JOIN pg_database d ON d.oid = l.database \
             WHERE d.datname = current_database() AND l.locktype = 'advisory' \
             AND l.mode = 'AccessExclusiveLock' AND (NOT l.granted OR EXISTS ( \
               SELECT FROM pg_locks w WHERE NOT w.granted AND w.locktype = 'advisory' \
               AND (w.classid, w.objid, w.objsubid) = (l.classid, l.objid, l.objsubid)))",
        )?;
        count(&shared.tally.looks);
        let (mut now, mut heads_now) = (HashMap::new(), Vec::new());
        for row in &rows {
            let text = |i: usize| row[i].clone().unwrap_or_default();
            let key = (text(0), text(1).parse::<i32>()?);
            if row[2].as_deref() == Some("t") {
                heads_now.push(key);
                continue;
            }
            let began = row[3].as_deref().map(str::parse).transpose()?;
            let before = waiting.get(&key);
            let goes_on = before.is_some_and(|seen| seen.began.is_none_or(|b| began == Some(b)));
            let first = before.filter(|_| goes_on).map_or(began.map(|_| look), |seen| seen.first);
            now.insert(key, Seen { first, began });
        }
        for head in heads_now.iter().filter(|head| !heads.contains(head)) {
            // One that has not been seen waiting came after the last look.
            let came = waiting.get(head).map_or(Some(look), |seen| seen.first);
            let Some(came) = came else { continue };
            let has_waited = |seen: &Seen| seen.first.is_some_and(|first| first < came);
            let overtaken =
                now.iter().find(|((line, _), seen)| *line == head.0 && has_waited(seen));
            if let Some(((_, pid), seen)) = overtaken {
                let looks = came - seen.first.unwrap_or(came);
                shared.wrong(format!("{} overtook {pid}, seen {looks} looks before it", head.1));
            }
        }
        shared.tally.longest_line.fetch_max(longest(&now), Ordering::Relaxed);
        (waiting, heads) = (now, heads_now);
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn longest(waiting: &HashMap<(String, i32), Seen>) -> u64 {
    let mut lines: HashMap<&str, u64> = HashMap::new();
    for (line, _) in waiting.keys() {
        *lines.entry(line).or_default() += 1;
    }
    lines.into_values().max().unwrap_or(0)
}

/// Waits until no session of the crowd is left, nor a lock of any; every lease can then be had.
pub fn nothing_is_left(admin: &mut Session) -> Result<()> {
    let left = "SELECT l.pid, l.mode, l.granted FROM pg_locks l JOIN pg_database d \
                ON d.oid = l.database WHERE d.datname = current_database() \
                AND l.locktype IN ('advisory', 'tuple')";
    let mut rows = Vec::new();
    wait_until("no lock is left", PATIENCE, || {
        rows = admin.rows(left).unwrap_or_default();
        rows.is_empty()
    })
    .map_err(|error| error.context(format!("{rows:?}")))?;
    for name in ["a", "b", "c", "read", "three"] {
        let sql =
            format!("SELECT lease_acquire('{name}', ttl => '1 us', wait => '30 s') IS NOT NULL");
        // An abandoned grant of three slots refuses one, until it has run out.
        wait_until(
            &format!("{name} can be had"),
            PATIENCE,
            || matches!(admin.text(&sql), Ok(Some(had)) if had == "t"),
        )?;
    }
    Ok(())
}
