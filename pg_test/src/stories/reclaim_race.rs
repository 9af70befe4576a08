//! Many workers race for one expired lease.

use super::Story;
use crate::process::{wait_until, PATIENCE};
use crate::story_run::StoryRun;
use crate::timeline::Mark;
use crate::worker::Worker;
use anyhow::{ensure, Context, Result};
use std::time::Instant;

/// One winner, however many ask.
pub const RECLAIM_RACE: Story = Story {
    title: "The reclaim race",
    plot: "64 worker processes race for one expired lease, again and again.",
    without: (
        "the lock",
        "two that look at the same moment both find it expired, and both take it.",
    ),
    play,
};

const RACERS: usize = 64;
/// The advisory lock that all racers wait for, so as to start at once.
const START: i64 = 64;

fn play(story: &StoryRun) -> Result<String> {
    let racers: Result<Vec<Worker>> =
        (1..=RACERS).map(|number| story.silent_worker(&format!("R{number}"))).collect();
    let mut racers = racers?;
    let mut referee = story.session()?;
    let mut holder = 0;
    let mut token = racers[0].number(ACQUIRE)?.context("a new lease is taken")?;
    let mut won = vec![0; RACERS];
    story.note(format!("{RACERS} processes are ready; R1 holds the lease with token {token}"));

    let start = Instant::now();
    for round in 1..=story.rounds {
        let renewal = format!("SELECT lease_renew('race', {token}, '1 ms')");
        token = racers[holder].number(&renewal)?.context("the holder cannot renew")?;
        wait_until("the lease expires", PATIENCE, || {
            referee.one("SELECT state = 'expired' FROM lease_info('race')", &[]).unwrap_or(false)
        })?;

        referee.run(&format!("SELECT pg_advisory_lock({START})"))?;
        for racer in &mut racers {
            racer.send(&format!(
                "SELECT pg_advisory_lock_shared({START}); SELECT pg_advisory_unlock_shared({START})"
            ))?;
            racer.send(ACQUIRE)?;
        }
        wait_until("all are at the start", PATIENCE, || {
            let at_start = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' \
                            AND objid = $1::bigint AND objsubid = 1 AND NOT granted";
            referee.one::<i64>(at_start, &[&START]).is_ok_and(|count| count == RACERS as i64)
        })?;
        referee.run(&format!("SELECT pg_advisory_unlock({START})"))?;

        let mut winners = Vec::new();
        for (number, racer) in racers.iter_mut().enumerate() {
            racer.outcome(PATIENCE)??;
            let rows = racer.outcome(PATIENCE)??;
            if let Some(granted) = &rows[0][0] {
                winners.push((number, granted.parse::<i64>()?));
            }
        }
        ensure!(winners.len() == 1, "round {round} has {} winners: {winners:?}", winners.len());
        let (number, granted) = winners[0];
        ensure!(granted > token, "round {round} was won with {granted}, after {token}");
        if round <= 3 {
            let name = &racers[number].name;
            story.tell(
                name,
                Mark::Holds,
                format!("wins round {round} with {granted}; 63 get NULL"),
            );
        }
        (holder, token) = (number, granted);
        won[number] += 1;
    }
    let seconds = start.elapsed().as_secs_f64();
    let different = won.iter().filter(|&&count| count > 0).count();
    story.note(format!("{} rounds in {seconds:.1} s, won by {different} of them", story.rounds));
    Ok(format!("{} rounds of {RACERS}, exactly one winner each.", story.rounds))
}

const ACQUIRE: &str = "SELECT lease_acquire('race', ttl => '1 min')";
