//! A long run with a heartbeat, and the two ways in which it ends early.

use super::Story;
use crate::client::Session;
use crate::process::{wait_until, PATIENCE};
use crate::story_run::{StoryRun, ToldWorker};
use crate::timeline::Mark;
use crate::worker::{Beat, LEASE_LOST};
use anyhow::{ensure, Context, Result};
use std::time::{Duration, Instant};

pub const INVOICE_RUN: Story = Story {
    title: "The invoice run",
    plot: "A heartbeat keeps the lease for three ttls of work; after kill -9 another has it within one.",
    without: ("the lease", "two runs would send the same invoices, or a crashed one would block them for ever."),
    play,
};

/// How many invoices are written in three ttls.
const SENT_BY_A: i32 = 12;

fn play(story: &StoryRun) -> Result<String> {
    story.fenced_table("invoices", "id int PRIMARY KEY, sent_by text", "")?;
    story.run("INSERT INTO invoices SELECT n FROM generate_series(1, 18) AS n")?;
    let (mut a, mut b, mut c) = (story.worker("A")?, story.worker("B")?, story.worker("C")?);

    let token_a = a.acquires("invoices")?;
    a.starts_heartbeat("invoices", token_a)?;
    let beats = work_for_three_ttls(story, &mut a, &mut b, token_a)?;

    b.waits_for("invoices")?;
    a.is_killed()?;
    let killed = story.session()?.text("SELECT clock_timestamp()")?.context("no time")?;
    let token_b = b.is_granted()?;
    let waited = milliseconds_until_granted(story, &killed)?;
    story.note(format!("that was {waited} ms after the kill"));
    // The deadline came at most one ttl after the kill; the rest is what a busy machine adds.
    let limit = story.ttl + Duration::from_secs(2);
    ensure!(waited <= limit.as_millis() as i64, "nobody was granted it for {waited} ms");

    b.starts_heartbeat("invoices", token_b)?;
    send(&mut b, SENT_BY_A + 1, 15, token_b)?;
    b.freezes()?;
    story.wait_until_expired("invoices")?;
    let token_c = c.acquires("invoices")?;
    send(&mut c, 16, 18, token_c)?;
    b.wakes()?;
    let code = b.worker().exit_code(PATIENCE)?;
    let mut last = None;
    wait_until("the heartbeat's last word", PATIENCE, || {
        last = b.worker().beats().pop().or(last.take());
        last == Some(Beat::Lost)
    })
    .with_context(|| format!("{last:?}"))?;
    ensure!(code == Some(LEASE_LOST), "it should stop because the lease is lost: {code:?}");
    b.tell(Mark::Ended, format!("lease_renew('invoices', {token_b}) -> NULL: B stops by itself"));

    let rows = story.table("invoices, after", SUMMARY)?;
    let expected = [
        ["A", "1 - 12", &token_a.to_string()],
        ["B", "13 - 15", &token_b.to_string()],
        ["C", "16 - 18", &token_c.to_string()],
    ];
    let expected = expected.map(|row| row.map(|text| Some(text.to_owned())));
    ensure!(rows == expected, "{rows:?}");
    Ok(format!(
        "18 invoices, each sent once; {beats} renewals kept the lease; {waited} ms without a holder."
    ))
}

const SUMMARY: &str = "SELECT sent_by, concat(min(id), ' - ', max(id)) AS invoices, fence \
                       FROM invoices GROUP BY sent_by, fence ORDER BY fence";

/// Longer than three ttls, while another keeps asking for the lease. The number of renewals.
fn work_for_three_ttls(
    story: &StoryRun,
    a: &mut ToldWorker,
    b: &mut ToldWorker,
    token: i64,
) -> Result<usize> {
    let start = Instant::now();
    for id in 1..=SENT_BY_A {
        if id % 4 == 1 {
            b.finds_taken("invoices")?;
        }
        let sql = sending(id, "A", token);
        a.worker().rows(&sql)?;
        if id == 1 {
            a.tell(Mark::Writes, &sql);
        }
        // The work on an invoice: what takes the time.
        std::thread::sleep(
            (3 * story.ttl / SENT_BY_A as u32).saturating_sub(Duration::from_millis(5)),
        );
    }
    std::thread::sleep((3 * story.ttl).saturating_sub(start.elapsed()));
    b.finds_taken("invoices")?;
    let beats = a.renewals()?;
    ensure!(beats.len() >= 4 && beats.is_sorted_by(|a, b| a < b), "renewals: {beats:?}");
    let seconds = start.elapsed().as_secs_f64();
    let (count, last) = (beats.len(), beats[beats.len() - 1]);
    a.tell(
        Mark::Holds,
        format!("12 invoices in {seconds:.1} s; {count} renewals, the latest token is {last}"),
    );
    Ok(count)
}

fn send(worker: &mut ToldWorker, from: i32, to: i32, token: i64) -> Result<()> {
    let name = worker.worker().name.clone();
    for id in from..=to {
        worker.worker().rows(&sending(id, &name, token))?;
    }
    worker.tell(Mark::Writes, format!("invoices {from} to {to}, with fence = {token}"));
    Ok(())
}

fn sending(id: i32, name: &str, token: i64) -> String {
    format!("UPDATE invoices SET sent_by = '{name}', fence = {token} WHERE id = {id}")
}

fn milliseconds_until_granted(story: &StoryRun, killed: &str) -> Result<i64> {
    let mut session: Session = story.session()?;
    let sql = "SELECT (1000 * extract(epoch FROM acquired_at - $1::text::timestamptz))::bigint \
               FROM lease_info('invoices')";
    session.one(sql, &[&killed])
}
