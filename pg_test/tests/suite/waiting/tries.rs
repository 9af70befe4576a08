//! The WAL of an attempt that fails (wait = 0). The rest is in tries.script.

use pg_test::cluster::Builder;
use pg_test::{Calls, Cluster, Context, Harness, Result, ensure, harness_test};

#[harness_test]
fn a_losing_try_writes_no_wal(harness: &Harness) -> Result<()> {
    let cluster = quiet(harness.builder()).start()?;
    let (mut holder, mut other) = (cluster.connect("postgres")?, cluster.connect("postgres")?);
    holder.run("CREATE EXTENSION pg_fence; SELECT lease_acquire('held', 'me', '1 h')")?;
    holder.run("BEGIN; SELECT lease_acquire('new')")?;
    let calls = ["'held'", "'held', 'you', reclaim => true", "'new'"]
        .map(|arguments| format!("SELECT lease_acquire({arguments})"));
    for call in &calls {
        other.nothing(call)?;
    }
    // The server's own records (running transactions, every 15 s) are rare, so one round is without.
    let mut written = Vec::new();
    for _ in 0..5 {
        let before = wal(&cluster)?;
        for call in calls.iter().cycle().take(150) {
            other.nothing(call)?;
        }
        written.push(wal(&cluster)? - before);
        if written.last() == Some(&0) {
            return holder.run("ROLLBACK");
        }
    }
    pg_test::bail!("150 losing tries wrote so many bytes of WAL, five times: {written:?}")
}

#[harness_test]
fn under_checksums_a_losing_try_writes_no_more_than_a_select_would(
    harness: &Harness,
) -> Result<()> {
    // With checksums, the first session that reads a row after its commit and is the first to touch its page since a
    // checkpoint writes an image of that page. From PostgreSQL 18 on checksums are the default of a new cluster.
    let cluster = quiet(harness.builder())
        .create_by(|install_dir, data| install_dir.initdb_with(data, &["--data-checksums"]))?;
    cluster.start()?;
    let (mut holder, mut other) = (cluster.connect("postgres")?, cluster.connect("postgres")?);
    ensure!(other.text("SHOW data_checksums")?.as_deref() == Some("on"));
    holder.run("CREATE EXTENSION pg_fence")?;
    let mut token = holder.acquire("held", "1 h")?;
    other.run("SET enable_seqscan = off")?;
    let (select, lost) =
        ("SELECT name FROM fence.lease WHERE name = 'held'", "SELECT lease_acquire('held')");
    for warm in [select, lost] {
        other.run(warm)?;
    }
    let mut seen = Vec::new();
    // The server's own records are rare, so one round is without.
    for _ in 0..8 {
        let mut written = [select, lost, select].into_iter().map(|first| -> Result<(i64, i64)> {
            token = holder.renew("held", token)?.context("not renewed")?;
            holder.run("CHECKPOINT")?;
            let before = wal(&cluster)?;
            other.run(first)?;
            let after_one = wal(&cluster)?;
            for _ in 0..50 {
                other.nothing(lost)?;
            }
            Ok((after_one - before, wal(&cluster)? - after_one))
        });
        let mut next = || written.next().context("three")?;
        let (selecting, trying, selecting_again) = (next()?, next()?, next()?);
        drop(written);
        seen.push((selecting, trying, selecting_again));
        let ((by_select, after_select), (by_try, after_try)) = (selecting, trying);
        // Each renewal leaves a row version on the page, which is in the image, too. So the attempt is compared with
        // the mean of the two selects.
        let is_no_more = 2 * by_try <= by_select + selecting_again.0;
        if by_select > 0 && is_no_more && after_select == 0 && after_try == 0 {
            return Ok(());
        }
    }
    pg_test::bail!(
        "bytes of WAL, by one SELECT and 50 tries after it, by one try and 50 after it, by a SELECT again: {seen:?}"
    )
}

/// Starts a server on which only the sessions of the test write.
fn quiet(builder: Builder) -> Builder {
    builder
        .set("autovacuum", "off")
        .set("bgwriter_lru_maxpages", "0")
        .set("checkpoint_timeout", "1d")
}

fn wal(cluster: &Cluster) -> Result<i64> {
    let mut session = cluster.connect("postgres")?;
    session.granted("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")
}
