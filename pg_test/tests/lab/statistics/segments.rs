//! Each life of an extension in a database counts for itself: databases, copies, standbys, and the memory of what is gone.
//! The rest is in segments.script.

use super::{counted, expect, shown};
use pg_test::process::{wait_until, PATIENCE};
use pg_test::{ensure, lab_test, Calls, Cluster, Context, Lab, Result, Session};

fn refuse(session: &mut Session, n: i64) -> Result<()> {
    session.refused(&format!("SELECT lease_guard('x', {n})"), "PF004").map(drop)
}

const PRESENTED: &str = "SELECT coalesce(string_agg(presented::text, ' '), '') FROM fence.refusals";

#[lab_test]
fn databases_count_apart(lab: &Lab) -> Result<()> {
    let (one, other) = (lab.database()?, lab.database()?);
    let (mut one, mut other) = (one.connect()?, other.connect()?);
    one.acquire("a", "1 h")?;
    refuse(&mut one, 1)?;
    other.acquire("a", "1 h")?;
    other.acquire("b", "1 h")?;
    refuse(&mut other, 2)?;
    ensure!(shown(&mut one)? == "grants 1, refused_pf004 1");
    ensure!(shown(&mut other)? == "grants 2, refused_pf004 1");
    ensure!(one.text(PRESENTED)?.as_deref() == Some("1"));
    ensure!(other.text(PRESENTED)?.as_deref() == Some("2"));
    counted(&mut one)?;
    ensure!(shown(&mut other)? == "grants 2, refused_pf004 1");
    Ok(())
}

#[lab_test]
fn a_copy_of_a_database_begins_anew(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let mut session = db.connect()?;
    session.acquire("a", "1 h")?;
    drop(session);
    let mut copy = None;
    pg_test::process::wait_until("nobody is connected", PATIENCE, || {
        copy = db.copy().ok();
        copy.is_some()
    })?;
    let copy = copy.expect("made");
    let (mut old, mut new) = (db.connect()?, copy.connect()?);
    ensure!(shown(&mut new)?.is_empty() && shown(&mut old)? == "grants 1");
    new.acquire("b", "1 h")?;
    ensure!(shown(&mut new)? == "grants 1, jumps 1");
    expect(&mut old, "the template", "grants 1")
}

#[lab_test]
fn a_standby_shows_nothing_and_counts_once_it_is_promoted(lab: &Lab) -> Result<()> {
    let primary = lab.builder().without_fsync().start()?;
    let standby = lab.builder().without_fsync().standby_of(&primary)?;
    standby.start()?;
    let mut session = primary.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    session.acquire("a", "1 h")?;
    refuse(&mut session, 1)?;
    standby.wait_replayed(&primary)?;
    let mut reader = standby.connect("postgres")?;
    let nothing = "SELECT stats_reset IS NULL AND grants = 0 AND jumps = 0 FROM fence.stats";
    ensure!(reader.truth(nothing)? && reader.text(PRESENTED)?.as_deref() == Some(""));
    reader.refused("SELECT fence_stats_reset()", "25006")?;
    primary.kill9()?;
    standby.promote()?;
    // Also the session that was there before.
    let mut fresh = standby.connect("postgres")?;
    fresh.acquire("b", "1 h")?;
    reader.acquire("c", "1 h")?;
    ensure!(shown(&mut reader)? == "grants 2, jumps 1", "{}", shown(&mut reader)?);
    Ok(())
}

#[lab_test]
fn the_handle_of_somebody_elses_memory_is_left_alone(lab: &Lab) -> Result<()> {
    let (one, other) = (lab.database()?, lab.database()?);
    let mut session = one.connect()?;
    session.acquire("a", "1 h")?;
    let handle = session.granted("SELECT last_value FROM fence.stats_memory_seq")?;
    // As if the server had started again, and given the number to another database.
    other.connect()?.run(&format!("SELECT setval('fence.stats_memory_seq', {handle})"))?;
    let mut stranger = other.connect()?;
    ensure!(stranger.truth("SELECT stats_reset IS NULL FROM fence.stats")?);
    stranger.acquire("b", "1 h")?;
    refuse(&mut stranger, 1)?;
    ensure!(shown(&mut stranger)? == "grants 1, refused_pf004 1");
    ensure!(shown(&mut session)? == "grants 1");
    // And a number that nobody has.
    other.connect()?.run("SELECT setval('fence.stats_memory_seq', 424242)")?;
    let mut late = other.connect()?;
    late.acquire("c", "1 h")?;
    ensure!(shown(&mut late)? == "grants 1");
    Ok(())
}

/// A server whose segments are files.
fn with_files(lab: &Lab) -> Result<Cluster> {
    lab.builder().without_fsync().set("dynamic_shared_memory_type", "mmap").start()
}

/// How many segments of ours it has; the server's own are smaller. The size is what docs/operations/monitoring.md says.
fn segments(cluster: &Cluster) -> Result<usize> {
    let files = std::fs::read_dir(cluster.data().join("pg_dynshmem"))?;
    // One may be given back just now.
    let sizes = files.filter_map(|file| Some(file.ok()?.metadata().ok()?.len()));
    Ok(sizes.filter(|size| *size == 512 + 256 * 1024).count())
}

fn at_most(cluster: &Cluster, most: usize) -> Result<()> {
    // The last session that uses one may still be leaving.
    wait_until("the segments are given back", PATIENCE, || {
        segments(cluster).is_ok_and(|left| left <= most)
    })
    .with_context(|| format!("{:?} segments, not {most}", segments(cluster)))
}

#[lab_test]
fn who_goes_on_counting_gives_back_the_memory_of_dropped_databases(lab: &Lab) -> Result<()> {
    let cluster = with_files(lab)?;
    let mut admin = cluster.connect("template1")?;
    let mut session = cluster.connect("postgres")?;
    session.run("CREATE EXTENSION pg_fence")?;
    let token = session.acquire("job", "1 h")?;
    let mut drop_another = |round: &str| -> Result<()> {
        admin.run("CREATE DATABASE d")?;
        let mut other = cluster.connect("d")?;
        other.run("CREATE EXTENSION pg_fence")?;
        other.acquire(round, "1 h")?;
        drop(other);
        ensure!(segments(&cluster)? == 2, "{round}: {}", segments(&cluster)?);
        admin.run("DROP DATABASE d WITH (FORCE)")
    };
    drop_another("a session that was there before counts")?;
    session.renew("job", token)?;
    at_most(&cluster, 1)?;
    drop_another("it resets")?;
    session.run("SELECT fence_stats_reset()")?;
    at_most(&cluster, 1)?;
    drop_another("a session that has come since counts")?;
    cluster.connect("postgres")?.acquire("other", "1 h")?;
    at_most(&cluster, 1)?;
    ensure!(shown(&mut session)? == "grants 1", "{}", shown(&mut session)?);
    Ok(())
}

#[lab_test]
fn the_memory_of_what_was_dropped_is_given_back(lab: &Lab) -> Result<()> {
    let cluster = with_files(lab)?;
    let segments = || segments(&cluster);
    let at_most = |most: usize| at_most(&cluster, most);
    let mut admin = cluster.connect("postgres")?;
    admin.run("CREATE DATABASE d")?;
    admin.run("CREATE EXTENSION pg_fence")?;
    admin.run("SELECT lease_acquire('a')")?;
    cluster.connect("d")?.run("CREATE EXTENSION pg_fence")?;
    let before = segments()?;
    ensure!(before >= 1, "{before} segments");
    for n in 0..5 {
        admin.run(&format!("CREATE DATABASE d{n} TEMPLATE d"))?;
        cluster.connect(&format!("d{n}"))?.run("SELECT lease_acquire('a')")?;
        admin.run(&format!("DROP DATABASE d{n} WITH (FORCE)"))?;
    }
    at_most(before + 1)?;
    for _ in 0..5 {
        let mut session = cluster.connect("d")?;
        session.run("DROP EXTENSION pg_fence")?;
        session.run("CREATE EXTENSION pg_fence")?;
        session.run("SELECT lease_acquire('a')")?;
        ensure!(shown(&mut session)? == "grants 1");
    }
    at_most(before + 1)?;
    // Nobody else's is gone.
    ensure!(shown(&mut admin)? == "grants 1");
    ensure!(shown(&mut cluster.connect("postgres")?)? == "grants 1");
    Ok(())
}
