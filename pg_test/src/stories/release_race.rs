//! Releases that come late, and must not end what is no longer theirs.

use super::Story;
use crate::process::PATIENCE;
use crate::story_run::StoryRun;
use crate::timeline::Mark;
use crate::worker::Worker;
use anyhow::{ensure, Context, Result};
use std::time::Instant;

/// A release ends the grant that its token belongs to, and no other.
pub const RELEASE_RACE: Story = Story {
    title: "The release race",
    plot: "A releases just as its lease runs out and B is granted it; others release with older tokens.",
    without: ("the token", "a late release frees the lease under B, and C works beside B."),
    play,
};

const WORKERS: usize = 16;
/// How many of those who held the lease before release it again in each round.
const LATE: usize = 4;

fn play(story: &StoryRun) -> Result<String> {
    let workers: Result<Vec<Worker>> =
        (1..=WORKERS).map(|number| story.silent_worker(&format!("W{number}"))).collect();
    let mut workers = workers?;
    // Who held it with which token, the latest last.
    let mut past: Vec<(usize, i64)> = Vec::new();
    let first = workers[0].number("SELECT lease_acquire('nightly', 'W1', '1 min')")?;
    let mut current = (0, first.context("a new lease is taken")?);
    let (mut in_time, mut too_late) = (0, 0);

    let start = Instant::now();
    for round in 1..=story.rounds {
        let (a, token) = current;
        let b = (a + 1) % WORKERS;
        // Somewhere between "long expired" and "in time".
        let ttl_us = 1 + 700 * u64::from(round % 8);
        let renewal = format!("SELECT lease_renew('nightly', {token}, '{ttl_us} us')");
        workers[a].number(&renewal)?.context("the holder cannot renew")?;

        let name = workers[b].name.clone();
        let ttl = "'1 min', wait => '1 min'";
        workers[b].send(&format!("SELECT lease_acquire('nightly', '{name}', {ttl})"))?;
        workers[a].send(&release(token))?;
        let late: Vec<(usize, i64)> = past.iter().rev().take(LATE).copied().collect();
        for &(worker, token) in &late {
            workers[worker].send(&release(token))?;
        }

        let closing = answer(&mut workers[a])?;
        let granted = answer(&mut workers[b])?.context("B waited in vain")?;
        for &(worker, old) in &late {
            let ended = answer(&mut workers[worker])?;
            ensure!(ended.is_none(), "round {round}: {old} ended somebody's grant: {ended:?}");
        }
        match closing {
            Some(closing) => {
                ensure!(
                    token < closing && closing < granted,
                    "round {round}: {token} was closed by {closing}, and B got {granted}"
                );
                in_time += 1;
            }
            None => too_late += 1,
        }
        // All releases are over; once more for sure, after B's grant.
        let again = workers[a].number(&release(token))?;
        ensure!(again.is_none(), "round {round}: {token} was released after B's grant: {again:?}");
        let sql = format!("SELECT lease_check('nightly', {granted})::int");
        let alive = workers[b].number(&sql)?;
        ensure!(alive == Some(1), "round {round}: a late release ended B's grant {granted}");
        ensure!(granted > token, "round {round}: {granted} after {token}");
        past.push(current);
        current = (b, granted);
        // The first of each kind is told.
        if (closing.is_some() && in_time == 1) || (closing.is_none() && too_late == 1) {
            let shown = match closing {
                Some(closing) => format!("{closing}: in time"),
                None => "NULL: too late".to_owned(),
            };
            let a = &workers[a].name;
            story.tell(a, Mark::Ended, format!("lease_release('nightly', {token}) -> {shown}"));
            story.tell(&name, Mark::Holds, format!("is granted {granted}, and keeps it"));
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    story.note(format!("{} rounds in {seconds:.1} s by {WORKERS} processes", story.rounds));
    Ok(format!(
        "{in_time} releases came in time, {too_late} too late; no grant was ended by another's token."
    ))
}

fn release(token: i64) -> String {
    format!("SELECT lease_release('nightly', {token})")
}

fn answer(worker: &mut Worker) -> Result<Option<i64>> {
    let rows = worker.outcome(PATIENCE)??;
    match &rows[0][0] {
        Some(text) => Ok(Some(text.parse()?)),
        None => Ok(None),
    }
}
