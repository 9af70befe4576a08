//! A long run with a heartbeat, and the two ways in which it ends early.

use super::Story;
use crate::client::microseconds;
use crate::process::{wait_until, PATIENCE};
use crate::story_run::{StoryRun, ToldWorker};
use crate::timeline::Mark;
use crate::worker::{Beat, Renewal, LEASE_LOST};
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
    let mut renewals = work_for_three_ttls(story, &mut a, &mut b, token_a)?;
    let beats = renewals.len();

    b.waits_for("invoices")?;
    a.is_killed()?;
    let killed = time(story, "clock_timestamp()")?;
    let token_b = b.is_granted("invoices")?;
    let granted = time(story, "acquired_at")?;
    let waited = (granted - killed) / 1000;
    story.note(format!("that was {waited} ms after the kill"));
    renewals.extend(a.renewals()?);
    let deadline = story.deadline_after(renewals[renewals.len() - 1]);
    ensure!(granted >= deadline, "granted {} us before A's deadline", deadline - granted);

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

/// Longer than three ttls, while another keeps asking for the lease. The renewals meanwhile.
fn work_for_three_ttls(
    story: &StoryRun,
    a: &mut ToldWorker,
    b: &mut ToldWorker,
    token: i64,
) -> Result<Vec<Renewal>> {
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
    let (first, last) = (beats.first().context("no renewal")?, beats[beats.len() - 1]);
    // Without the renewals in between the lease would have run out.
    ensure!(last.asked_at >= story.deadline_after(*first), "renewals: {beats:?}");
    ensure!(beats.is_sorted_by(|a, b| a.token < b.token), "renewals: {beats:?}");
    let seconds = start.elapsed().as_secs_f64();
    let (count, last) = (beats.len(), last.token);
    a.tell(
        Mark::Holds,
        format!("12 invoices in {seconds:.1} s; {count} renewals, the latest token is {last}"),
    );
    Ok(beats)
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

/// A time by the server, in microseconds since 1970.
fn time(story: &StoryRun, what: &str) -> Result<i64> {
    story.session()?.one(&format!("SELECT {} FROM lease_info('invoices')", microseconds(what)), &[])
}
