//! A week of renewals by a thousand holders, with and without an old snapshot held open.

use crate::plot::Better::Lower;
use crate::race;
use crate::report::{Cell, Section, row};
use crate::spread::Spread;
use crate::workbench::Workbench;
use anyhow::{Context, Result};
use pg_test::process::wait_until;
use pg_test::{Database, Session};
use std::time::{Duration, Instant};

const HOLDERS: usize = 1_000;
/// One renewal in ten minutes.
const RENEWALS_A_DAY: usize = 144;
/// The number of parts of a day, each measured by this number of concurrent sessions.
const PARTS: usize = 4;
const SESSIONS: usize = 2;

/// Renewals are committed one by one within the server, to measure the call without the network and the disk.
const SETUP: &str = "
CREATE TABLE plain (name text COLLATE \"C\" PRIMARY KEY, n bigint NOT NULL, pad text) WITH (fillfactor = 50);
INSERT INTO plain SELECT 'holder' || n, 0, repeat('.', 130) FROM generate_series(0, 999) n;
CREATE TABLE token AS
    SELECT n, lease_acquire('holder' || n, 'bench', ttl => '30 days') AS token FROM generate_series(0, 999) n;
VACUUM ANALYZE plain;
VACUUM ANALYZE fence.lease;
CREATE PROCEDURE renew(first integer, step integer, times integer) LANGUAGE plpgsql AS $$
DECLARE
    tokens bigint[] := (SELECT array_agg(token.token ORDER BY token.n) FROM token);
BEGIN
    COMMIT;
    FOR round IN 1..times LOOP
        FOR n IN first..999 BY step LOOP
            IF lease_renew('holder' || n, tokens[n + 1]) IS NULL THEN
                RAISE 'a lease was lost';
            END IF;
            COMMIT;
        END LOOP;
    END LOOP;
END$$;
CREATE PROCEDURE update(first integer, step integer, times integer) LANGUAGE plpgsql AS $$
BEGIN
    FOR round IN 1..times LOOP
        FOR nth IN first..999 BY step LOOP
            UPDATE plain SET n = n + 1 WHERE name = 'holder' || nth;
            COMMIT;
        END LOOP;
    END LOOP;
END$$;
";

/// The rows that are renewed, and the statement that renews them.
const KINDS: [(&str, &str, &str); 2] =
    [("pg_fence, lease_renew", "renew", "fence.lease"), ("plain table: update", "update", "plain")];

/// The figures of one day.
struct Day {
    /// Microseconds per call in each part of the day.
    costs: Vec<f64>,
    /// The share of updates that were HOT.
    hot: f64,
    table_mb: f64,
    index_mb: f64,
}

pub fn measure(bench: &Workbench, section: &mut Section) -> Result<()> {
    let days = bench.options.pick(2, 7);
    section.note(format!(
        "Renewals: {HOLDERS} holders, each renewing every ten minutes for a week ({} a day in this run, \
         {days} days), by {SESSIONS} sessions without a pause, each renewal committed by itself within the server, \
         synchronous_commit = off. Then, in another database, a day with a snapshot held open that was \
         taken before it, which keeps PostgreSQL from clearing any old row version; a day before; and a day \
         after the snapshot has gone and a vacuum has run. Beside it, the same for a plain table.",
        times_a_day(bench) * HOLDERS
    ));
    let mut bars = Vec::new();
    week(bench, days, section, &mut bars)?;
    snapshot(bench, section, &mut bars)?;
    let title = "1,000 holders renewing: µs a call, the commit included";
    section.bars(Lower, "renewals", title, bars);
    Ok(())
}

fn times_a_day(bench: &Workbench) -> usize {
    bench.options.pick(PARTS, RENEWALS_A_DAY)
}

type Bars = Vec<(String, Spread)>;

fn week(bench: &Workbench, days: usize, section: &mut Section, bars: &mut Bars) -> Result<()> {
    let database = bench.database()?;
    prepare(&database)?;
    let mut weeks: [Vec<Day>; 2] = Default::default();
    // Day by day in turns, so that both are disturbed alike.
    for n in 1..=days {
        bench.progress(&format!("growth: renewals, day {n} of {days}"));
        for (week, (_, procedure, relation)) in weeks.iter_mut().zip(KINDS) {
            week.push(day(bench, &database, procedure, relation)?);
        }
    }
    let grew = |week: &[Day]| Spread::of_ratios(&week[days - 1].costs, &week[0].costs);
    let hot = |week: &[Day]| week.iter().map(|day| day.hot).sum::<f64>() / days as f64;
    let mut rows = Vec::new();
    for (week, (name, ..)) in weeks.iter().zip(KINDS) {
        let (first, last) = (&week[0], &week[days - 1]);
        let mut row =
            row![name, (&first.costs, 1), (&last.costs, 1), (grew(week), 2), (hot(week), 3)];
        row.extend(sizes(&[first, last]));
        rows.push(row);
        bars.push((format!("{name}, day 1"), Spread::of(&first.costs)));
        bars.push((format!("{name}, day {days}"), Spread::of(&last.costs)));
    }
    let last = format!("day {days}, µs a call");
    let head =
        ["", "day 1, µs a call", &last, "last over first", "HOT share", "table MB", "index MB"];
    section.table(format!("{days} days of renewals"), &head, rows);
    let [ours, plain] = &weeks;
    let aim = "a week of renewals, last day over first, beside the plain table";
    section.at_most(aim, grew(ours).times(1.0 / grew(plain).median), 1.1);
    section.at_least("a week of renewals, HOT share", Spread::of(&[hot(ours)]), 0.95);
    Ok(())
}

fn snapshot(bench: &Workbench, section: &mut Section, bars: &mut Bars) -> Result<()> {
    let database = bench.database()?;
    prepare(&database)?;
    let (mut rows, mut grown, mut left) = (Vec::new(), Vec::new(), Vec::new());
    for (name, procedure, relation) in KINDS {
        bench.progress(&format!("growth: an old snapshot, {name}"));
        let mut session = database.connect()?;
        let before = day(bench, &database, procedure, relation)?;
        let mut old = database.connect()?;
        old.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM plain")?;
        let with = day(bench, &database, procedure, relation)?;
        old.run("COMMIT")?;
        session.run(&format!("VACUUM {relation}"))?;
        let after = day(bench, &database, procedure, relation)?;
        let ratio = Spread::of_ratios(&after.costs, &before.costs);
        let end = with.costs[PARTS - 1];
        grown.push(end / Spread::of(&before.costs).median);
        left.push(ratio.median);
        let costs = [&before.costs, &after.costs];
        let mut row = row![name, (costs[0], 1), (end, 1), (costs[1], 1), (ratio, 2), (with.hot, 3)];
        row.extend(sizes(&[&before, &with, &after]));
        rows.push(row);
        bars.push((format!("{name}, old snapshot"), Spread::of(&[end])));
        bars.push((format!("{name}, after it"), Spread::of(&after.costs)));
    }
    let head = [
        "",
        "before, µs a call",
        "last quarter with it",
        "after it",
        "after over before",
        "HOT share with it",
        "table MB: before, with it, after",
        "index MB: before, with it, after",
    ];
    section.table("a day with an old snapshot held open", &head, rows);
    for (what, of) in [("last quarter with", grown), ("day after", left)] {
        let aim =
            format!("renewals, {what} an old snapshot over the day before, beside the plain table");
        section.at_most(aim, Spread::of(&[of[0] / of[1]]), 1.1);
    }
    Ok(())
}

/// The sizes of the table and its index on these days.
fn sizes(days: &[&Day]) -> Vec<Cell> {
    let of = |size: fn(&Day) -> f64| {
        let sizes = days.iter().map(|day| format!("{:.2}", size(day)));
        Cell::Text(sizes.collect::<Vec<_>>().join(" → "))
    };
    vec![of(|day| day.table_mb), of(|day| day.index_mb)]
}

fn prepare(database: &Database) -> Result<()> {
    let mut session = database.connect()?;
    // A vacuum cannot be in a transaction, so the statements are sent one by one; only bodies contain a `;`.
    let (plain, procedures) = SETUP.split_at(SETUP.find("CREATE PROCEDURE").unwrap_or(0));
    for statement in plain.split(';').filter(|statement| !statement.trim().is_empty()) {
        session.run(statement)?;
    }
    session.run(procedures)
}

fn day(bench: &Workbench, database: &Database, procedure: &str, relation: &str) -> Result<Day> {
    let times = times_a_day(bench) / PARTS;
    let updates_before = updates(&mut database.connect()?, relation)?;
    let mut costs = Vec::with_capacity(PARTS);
    for _ in 0..PARTS {
        let start = Instant::now();
        race::side_by_side(SESSIONS, |first| {
            let conninfo = database.conninfo().set("synchronous_commit", "off");
            conninfo.connect()?.run(&format!("CALL {procedure}({first}, {SESSIONS}, {times})"))
        })?;
        let calls = (times * HOLDERS) as f64 / SESSIONS as f64;
        costs.push(start.elapsed().as_secs_f64() * 1e6 / calls);
    }
    let mut session = database.connect()?;
    let made = (times * PARTS * HOLDERS) as i64;
    let mut now = updates_before;
    // Sessions report their statistics when they end.
    wait_until("the updates are counted", Duration::from_secs(20), || {
        now = updates(&mut session, relation).unwrap_or(now);
        now.0 - updates_before.0 >= made
    })?;
    let row = session
        .query_one(
            "SELECT pg_table_size($1::text::regclass), pg_indexes_size($1::text::regclass)",
            &[&relation],
        )
        .context(relation.to_owned())?;
    Ok(Day {
        costs,
        hot: (now.1 - updates_before.1) as f64 / (now.0 - updates_before.0) as f64,
        table_mb: row.get::<_, i64>(0) as f64 / 1e6,
        index_mb: row.get::<_, i64>(1) as f64 / 1e6,
    })
}

/// The updates of a table so far, and the HOT ones among them.
fn updates(session: &mut Session, relation: &str) -> Result<(i64, i64)> {
    let row = session.query_one(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = $1::text::regclass",
        &[&relation],
    )?;
    Ok((row.get(0), row.get(1)))
}
