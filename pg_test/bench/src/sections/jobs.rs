//! Claiming and finishing a job in a table of row leases, compared with the same written by hand.

use super::capacity::work_of;
use crate::plot::Better::Higher;
use crate::race::{self, Contender, at_once, find, in_turns};
use crate::report::{Section, row};
use crate::spread::Spread;
use crate::workbench::Workbench;
use anyhow::{Context, Result, ensure};
use pg_test::{Database, Session};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const OURS: &str = "pg_fence";
const BY_HAND: &str = "by hand: FOR UPDATE SKIP LOCKED";

/// A table, with the statements that claim a job (for a worker's number and a token) and that finish it.
struct Queue {
    name: &'static str,
    table: &'static str,
    /// Creates the table.
    tables: &'static str,
    claim: &'static str,
    finish: &'static str,
}

/// The partial index excludes claimed and finished jobs.
const QUEUES: [Queue; 2] = [
    Queue {
        name: OURS,
        table: "runs",
        tables: "
            CREATE TABLE runs (id bigint PRIMARY KEY, input text, state text NOT NULL DEFAULT 'ready',
                               attempts int NOT NULL DEFAULT 0, result text, worker text, held_until timestamptz);
            CREATE INDEX ON runs (id) WHERE state = 'ready';
            SELECT fence_protect('runs', deadline => 'held_until')",
        claim: "
            UPDATE runs SET state = 'running', attempts = attempts + 1, worker = $1,
                   held_until = clock_timestamp() + '30 s'
             WHERE id = (SELECT id FROM runs WHERE state = 'ready' AND (held_until IS NULL OR held_until < now())
                          ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
            RETURNING id, fence",
        finish: "UPDATE runs SET state = 'done', result = 'r', held_until = NULL, fence = $2 WHERE id = $1",
    },
    Queue {
        name: BY_HAND,
        table: "by_hand",
        tables: "
            CREATE TABLE by_hand (id bigint PRIMARY KEY, input text, state text NOT NULL DEFAULT 'ready',
                                  attempts int NOT NULL DEFAULT 0, result text, worker text, lease_until timestamptz);
            CREATE INDEX ON by_hand (id) WHERE state = 'ready'",
        claim: "
            UPDATE by_hand SET state = 'running', attempts = attempts + 1, worker = $1, lease_until = now() + '30 s'
             WHERE id = (SELECT id FROM by_hand WHERE state = 'ready' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
            RETURNING id, attempts::bigint",
        finish: "
            UPDATE by_hand SET state = 'done', result = 'r'
             WHERE id = $1 AND state = 'running' AND attempts = $2::bigint AND lease_until > now()",
    },
];

/// A heartbeat of many rows, given their numbers and tokens. The last one is for the hand-written table, with attempts.
const BEATS: [(&str, &str); 3] = [
    (
        "pg_fence, rows that are locked left out",
        "WITH mine AS (SELECT r.id, m.token FROM runs AS r
                         JOIN unnest($1::bigint[], $2::bigint[]) AS m (id, token) ON r.id = m.id AND r.fence = m.token
                          FOR NO KEY UPDATE OF r SKIP LOCKED)
         UPDATE runs SET held_until = clock_timestamp() + '1 day', fence = mine.token FROM mine
          WHERE runs.id = mine.id RETURNING runs.id",
    ),
    (
        "pg_fence, UPDATE … FROM unnest",
        "UPDATE runs SET held_until = clock_timestamp() + '1 day', fence = m.token
           FROM unnest($1::bigint[], $2::bigint[]) AS m (id, token)
          WHERE runs.id = m.id AND runs.fence = m.token RETURNING runs.id",
    ),
    (
        "by hand, UPDATE … FROM unnest",
        "UPDATE by_hand SET lease_until = now() + '1 day' FROM unnest($1::bigint[], $2::bigint[]) AS m (id, attempts)
          WHERE by_hand.id = m.id AND by_hand.attempts = m.attempts RETURNING by_hand.id",
    ),
];

/// The number of rows per heartbeat.
const BEAT: i64 = 1_000;

pub fn measure(bench: &Workbench) -> Result<Section> {
    let rows = bench.options.pick(5_000, 200_000);
    let note = format!(
        "A worker claims the first job of a table of {rows} rows that is ready, commits, marks it as done and commits. \
         Here each row is its own lease. By hand nothing refuses a late write, and a job is taken for finished by its \
         worker's word."
    );
    let mut section = Section::new("Jobs", note);
    let database = bench.database()?;
    let mut admin = database.connect()?;
    claim_and_finish(bench, &database, rows, &mut section)?;
    beside_held_rows(bench, &mut admin, &mut section)?;
    beat(bench, &mut admin, &mut section)?;
    Ok(section)
}

impl Queue {
    /// Recreates the table with this number of jobs that are ready.
    fn fill(&self, admin: &mut Session, rows: i64) -> Result<()> {
        let table = self.table;
        admin.run(&format!("DROP TABLE IF EXISTS {table}"))?;
        admin.run(self.tables)?;
        admin.run(&format!(
            "INSERT INTO {table} SELECT n, 'input' FROM generate_series(1, {rows}) AS n"
        ))?;
        admin.run(&format!("VACUUM ANALYZE {table}"))
    }
}

fn claim_and_finish(
    bench: &Workbench,
    database: &Database,
    jobs: i64,
    section: &mut Section,
) -> Result<()> {
    let mut admin = database.connect()?;
    let mut rows = Vec::new();
    for (commit, goals) in [("on", [0.92, 0.9, 0.9]), ("off", [0.88; 3])] {
        for (clients, goal) in [1, 8, 32].into_iter().zip(goals) {
            let at_once = match commit {
                "on" => at_once(clients),
                _ => format!("{}, synchronous_commit off", at_once(clients)),
            };
            bench.progress(&format!("jobs: {at_once}"));
            QUEUES.iter().try_for_each(|queue| queue.fill(&mut admin, jobs))?;
            let counts = [Counts::default(), Counts::default()];
            let contenders: Vec<Contender> = QUEUES
                .iter()
                .zip(&counts)
                .map(|(queue, counts)| worker(queue, database, commit, counts))
                .collect();
            let tracks = race::run(&contenders, bench.options.rules(clients))?;
            let (ours, by_hand) = (find(&tracks, OURS)?, find(&tracks, BY_HAND)?);
            if commit == "on" {
                let title = format!("jobs claimed and finished a second, {at_once}");
                section.bars_of(Higher, format!("jobs_{clients}"), title, &tracks);
            }
            let (wasted, over) = (counts[0].share_wasted() * 100.0, ours.ratio_to(by_hand));
            let rates = (ours.spread(), by_hand.spread());
            rows.push(row![
                commit,
                (clients as f64, 0),
                (rates.0, 0),
                (rates.1, 0),
                (over, 2),
                (wasted, 2)
            ]);
            section.at_least(format!("jobs over those by hand, {at_once}"), over, goal);
            let aim = format!("claims that brought nothing, %, {at_once}");
            section.at_most(aim, Spread::of(&[wasted]), 1.0);
        }
    }
    let head =
        ["synchronous_commit", "clients", "jobs/s", "by hand", "over by hand", "wasted claims, %"];
    section.table("claim and finish", &head, rows);
    Ok(())
}

/// The number of claims, and of those that found no job.
#[derive(Clone, Default)]
struct Counts {
    claims: Arc<AtomicUsize>,
    wasted: Arc<AtomicUsize>,
}

impl Counts {
    fn share_wasted(&self) -> f64 {
        self.wasted.load(Ordering::Relaxed) as f64 / self.claims.load(Ordering::Relaxed) as f64
    }
}

/// Claims and finishes a job, and counts the claims and those that found none.
fn worker<'a>(
    queue: &'a Queue,
    database: &'a Database,
    commit: &'a str,
    counts: &'a Counts,
) -> Contender<'a> {
    Contender::new(queue.name, move |client| {
        let mut session = database.connect()?;
        session.run(&format!("SET synchronous_commit = {commit}"))?;
        let claim = session.prepare(queue.claim)?;
        let finish = session.prepare(queue.finish)?;
        let name = format!("worker {client}");
        let Counts { claims, wasted } = counts.clone();
        Ok(move || {
            claims.fetch_add(1, Ordering::Relaxed);
            let row = session.query_opt(&claim, &[&name])?;
            let done = match row {
                Some(row) => {
                    session.execute(&finish, &[&row.get::<_, i64>(0), &row.get::<_, i64>(1)])?
                }
                None => 0,
            };
            wasted.fetch_add(usize::from(done == 0), Ordering::Relaxed);
            Ok(())
        })
    })
}

/// The duration of a claim beside rows that others hold and that come first in their order.
fn beside_held_rows(bench: &Workbench, admin: &mut Session, section: &mut Section) -> Result<()> {
    let [ours, by_hand] = &QUEUES;
    let held = bench.options.pick(2_000, 10_000);
    bench.progress(&format!("jobs: {held} held"));
    let (mut rows, mut work) = (Vec::new(), Vec::new());
    for held in [0, held] {
        for queue in [ours, by_hand] {
            queue.fill(admin, held + 1_000)?;
            let deadline = if queue.name == OURS { "held_until" } else { "lease_until" };
            admin.run(&format!(
                "UPDATE {} SET state = 'running', attempts = 1, {deadline} = now() + '1 day' WHERE id <= {held}",
                queue.table
            ))?;
            admin.run(&format!("VACUUM ANALYZE {}", queue.table))?;
        }
        let claims = [ours, by_hand].map(|queue| admin.prepare(queue.claim));
        let claims = claims.into_iter().collect::<Result<Vec<_>, _>>()?;
        let turns = bench.options.pick(30, 200);
        let taken = in_turns(2, (race::WARM_UP, turns), |index| {
            admin.run("BEGIN")?;
            let (worked, start) = (work_of(admin.pid())?, Instant::now());
            admin.query_opt(&claims[index], &[&"me"])?.context("there is one that is free")?;
            let ms = start.elapsed().as_secs_f64() * 1e3;
            let cpu_us = (work_of(admin.pid())? - worked) / 1e3;
            admin.run("ROLLBACK")?;
            Ok([ms, cpu_us])
        })?;
        rows.push(row![
            (held as f64, 0),
            (&taken[0][0], 3),
            (&taken[0][1], 0),
            (&taken[1][0], 3),
            (&taken[1][1], 0)
        ]);
        work.push(Spread::of(&taken[0][1]).median);
    }
    let head =
        ["held", "pg_fence, ms", "the server's CPU, µs", "by hand, ms", "the server's CPU, µs"];
    section.table("a claim beside held rows", &head, rows);
    let over = work[1] / work[0];
    section.at_most(
        format!("the work of a claim beside {held} held rows over one beside none"),
        Spread::of(&[over]),
        1.1,
    );
    Ok(())
}

/// A heartbeat of many rows in one statement and one commit.
fn beat(bench: &Workbench, admin: &mut Session, section: &mut Section) -> Result<()> {
    bench.progress(&format!("jobs: a beat of {BEAT} rows"));
    let mut held: Vec<(Vec<i64>, Vec<i64>)> = Vec::new();
    for (queue, deadline, number) in
        [(&QUEUES[0], "held_until", "fence"), (&QUEUES[1], "lease_until", "attempts::bigint")]
    {
        queue.fill(admin, bench.options.pick(5_000, 200_000))?;
        let claims = format!(
            "UPDATE {} SET state = 'running', attempts = attempts + 1, {deadline} = clock_timestamp() + '1 day'
              WHERE id <= {BEAT} RETURNING id, {number}",
            queue.table
        );
        let claimed = admin.query(&claims, &[])?;
        held.push(claimed.iter().map(|row| (row.get::<_, i64>(0), row.get::<_, i64>(1))).unzip());
        admin.run(&format!("VACUUM ANALYZE {}", queue.table))?;
    }
    let statements = BEATS.map(|(_, sql)| admin.prepare(sql));
    let statements = statements.into_iter().collect::<Result<Vec<_>, _>>()?;
    let turns = bench.options.rounds() * bench.options.pick(1, 5);
    let taken = in_turns(BEATS.len(), (race::WARM_UP, turns), |index| {
        let (ids, numbers) = &held[usize::from(index == 2)];
        let (worked, start) = (work_of(admin.pid())?, Instant::now());
        let kept = admin.query(&statements[index], &[ids, numbers])?.len() as i64;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        ensure!(kept == BEAT, "{kept} were kept");
        Ok([ms, (work_of(admin.pid())? - worked) / 1e6])
    })?;
    let rows =
        BEATS.iter().zip(&taken).map(|((name, _), [ms, cpu_ms])| row![*name, (ms, 2), (cpu_ms, 2)]);
    let head = ["", "ms", "the server's CPU, ms"];
    section.table(format!("a heartbeat of {BEAT} rows"), &head, rows);
    // Compared by the server's CPU time, because the elapsed time is the disk's.
    let over = Spread::of_ratios(&taken[0][1], &taken[2][1]);
    section.at_most("a heartbeat's work over that by hand", over, 1.1);
    let over = Spread::of_ratios(&taken[1][1], &taken[2][1]);
    section.at_most("… written as that by hand is", over, 1.1);
    Ok(())
}
