//! One holder, one row, many writes.

use super::Story;
use crate::story_run::StoryRun;
use anyhow::{ensure, Result};

/// What `strict` asks of the honest, and how `monotonic` differs.
pub const STRICT_ROW: Story = Story {
    title: "A strict row, many writes",
    plot: "One holder writes the same row again and again; its last write is the release too.",
    without: (
        "strict mode",
        "a retried or delayed statement of the same holder could undo its later one.",
    ),
    play,
};

fn play(story: &StoryRun) -> Result<String> {
    let columns = "id int PRIMARY KEY, state text";
    story.fenced_table("parcels", columns, "")?;
    story.fenced_table("letters", columns, ", mode => 'monotonic'")?;
    story.run("INSERT INTO parcels VALUES (7); INSERT INTO letters VALUES (7)")?;
    let mut a = story.worker("A")?;

    let first = a.acquires("parcel:7")?;
    a.writes(&set("parcels", "packed", first))?;
    a.is_refused(&set("parcels", "weighed", first), "PF001")?;
    story.note("strict: a token writes a row once; each further write renews");
    let renew = |state| {
        let value = format!("lease_renew('parcel:7', {first})");
        format!("UPDATE parcels SET state = '{state}', fence = {value} WHERE id = 7")
    };
    let mut seen = vec![first];
    for state in ["weighed", "labelled"] {
        a.writes(&renew(state))?;
        seen.push(fence_of(story)?);
    }
    a.is_refused(&set("parcels", "packed", first), "PF001")?;
    let last = format!(
        "UPDATE parcels SET state = 'sent', fence = lease_release('parcel:7', {first}) WHERE id = 7"
    );
    a.writes(&last)?;
    seen.push(fence_of(story)?);
    ensure!(seen.is_sorted_by(|a, b| a < b), "tokens must ascend: {seen:?}");
    a.is_refused(&renew("lost"), "PF002")?;
    story.note("released: lease_renew returned NULL, and NULL is no token");
    let rows = story.table("the parcel and its lease", PARCEL)?;
    let closing = seen[3].to_string();
    let expected = ["sent", &closing, "free", &closing].map(|text| Some(text.to_owned()));
    ensure!(rows == [expected], "{rows:?} after {seen:?}");

    let token = a.acquires("letter:7")?;
    for state in ["written", "folded", "sent"] {
        a.writes(&set("letters", state, token))?;
    }
    a.is_refused(&set("letters", "burnt", first), "PF001")?;
    story.note("monotonic: one token writes a row as often as it likes, an older one never");
    let rows = story.table("the letter", "SELECT state, fence FROM letters")?;
    let expected = ["sent", &token.to_string()].map(|text| Some(text.to_owned()));
    ensure!(rows == [expected], "{rows:?}");
    let tokens = seen.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    Ok(format!("4 writes with {tokens} in strict mode, 3 with {token} in monotonic mode."))
}

const PARCEL: &str = "SELECT p.state, p.fence, l.state AS lease, l.token AS \"lease's token\" \
                      FROM parcels p, fence.leases l WHERE p.id = 7 AND l.name = 'parcel:7'";

fn set(table: &str, state: &str, token: i64) -> String {
    format!("UPDATE {table} SET state = '{state}', fence = {token} WHERE id = 7")
}

fn fence_of(story: &StoryRun) -> Result<i64> {
    story.session()?.one("SELECT fence FROM parcels WHERE id = 7", &[])
}
