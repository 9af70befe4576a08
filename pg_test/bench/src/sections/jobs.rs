//! Claiming a job from a table of work and finishing it, beside the same written by hand.

use crate::plot::Better::Higher;
use crate::race::{self, at_once, find, Contender};
use crate::report::{row, Cell, Section};
use crate::spread::Spread;
use crate::workbench::Workbench;
use anyhow::{Context, Result};
use pg_test::{Database, Session};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Instant;

const OURS: &str = "pg_fence";
const BY_HAND: &str = "by hand: FOR UPDATE SKIP LOCKED";

/// A table, how a job in it is claimed (of a worker: its number and a token) and how it is finished (of both).
struct Queue {
    name: &'static str,
    tables: &'static str,
    claim: &'static str,
    finish: &'static str,
}

/// The partial index leaves out what is claimed and what is done.
const QUEUES: [Queue; 2] = [
    Queue {
        name: OURS,
        tables: "
            CREATE TABLE runs (id bigint PRIMARY KEY, input text, state text NOT NULL DEFAULT 'ready',
                               attempts int NOT NULL DEFAULT 0, result text);
            CREATE INDEX ON runs (id) WHERE state = 'ready';
            SELECT fence_protect('runs', lease => 'run:{id}', events => 'update,delete,truncate')",
        claim: "
            WITH claimed AS (SELECT substr(name, 5)::bigint AS run, token FROM lease_acquire_any(
                     ARRAY(SELECT 'run:' || id FROM runs WHERE state = 'ready' ORDER BY id LIMIT 100), holder => $1))
            UPDATE runs SET state = 'running', attempts = attempts + 1, fence = token FROM claimed
             WHERE id = run AND state = 'ready' RETURNING id, token",
        finish: "
            UPDATE runs SET state = 'done', result = 'r', fence = lease_release('run:' || id, $2)
             WHERE id = $1 AND state = 'running'",
    },
    Queue {
        name: BY_HAND,
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

pub fn measure(bench: &Workbench) -> Result<Section> {
    let rows = bench.options.pick(5_000, 200_000);
    let note = format!(
        "A worker claims the first job of a table of {rows} rows that is ready, commits, marks it as done and commits. \
         By hand nothing refuses a late write, and a job is taken for finished by its worker's word."
    );
    let mut section = Section::new("Jobs", note);
    let database = bench.database()?;
    let mut admin = database.connect()?;
    for (queue, name) in QUEUES.iter().zip(["runs", "by_hand"]) {
        admin.run(queue.tables)?;
        admin.run(&format!(
            "INSERT INTO {name} SELECT n, 'input' FROM generate_series(1, {rows}) n"
        ))?;
        admin.run(&format!("VACUUM ANALYZE {name}"))?;
    }
    let mut rows = Vec::new();
    for clients in [1, 8, 32] {
        let at_once = at_once(clients);
        bench.progress(&format!("jobs: {at_once}"));
        let counts = [Counts::default(), Counts::default()];
        let contenders: Vec<Contender> = QUEUES
            .iter()
            .zip(&counts)
            .map(|(queue, counts)| worker(queue, &database, counts))
            .collect();
        let tracks = race::run(&contenders, bench.options.rules(clients))?;
        let (ours, by_hand) = (find(&tracks, OURS)?, find(&tracks, BY_HAND)?);
        let title = format!("jobs claimed and finished a second, {at_once}");
        section.bars_of(Higher, format!("jobs_{clients}"), title, &tracks);
        let (wasted, over) = (counts[0].share_wasted() * 100.0, ours.ratio_to(by_hand));
        let rates = (ours.spread(), by_hand.spread());
        rows.push(row![(clients as f64, 0), (rates.0, 0), (rates.1, 0), (over, 2), (wasted, 2)]);
        section.at_least(format!("jobs over those by hand, {at_once}"), over, 0.85);
        let aim = format!("claims that brought nothing, %, {at_once}");
        section.at_most(aim, Spread::of(&[wasted]), 1.0);
    }
    let head = ["clients", "jobs/s", "by hand", "over by hand", "wasted claims, %"];
    section.table("claim and finish", &head, rows);
    in_flight(bench, &mut admin, &mut section)?;
    Ok(section)
}

/// How often a queue was asked, and how often that brought no job.
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

/// Claims a job and finishes it; counts the claims, and those that brought none.
fn worker<'a>(queue: &'a Queue, database: &'a Database, counts: &'a Counts) -> Contender<'a> {
    Contender::new(queue.name, move |client| {
        let mut session = database.connect()?;
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

/// How long a claim takes beside so many jobs that others are at, in milliseconds.
fn in_flight(bench: &Workbench, admin: &mut Session, section: &mut Section) -> Result<()> {
    let (mut rows, mut alone) = (Vec::new(), None);
    for in_flight in [0, 1_000, bench.options.pick(2_000, 9_900)] {
        bench.progress(&format!("jobs: {in_flight} in flight"));
        admin.run("TRUNCATE fence.lease; DROP TABLE runs")?;
        admin.run(QUEUES[0].tables)?;
        admin.run(&format!(
            "INSERT INTO runs SELECT n, 'input' FROM generate_series(1, {in_flight} + 1000) n"
        ))?;
        admin.run(&format!(
            "DO $$ BEGIN FOR n IN 0..{in_flight} / 100 - 1 LOOP
                 PERFORM lease_acquire_any(ARRAY(SELECT 'run:' || n * 100 + i FROM generate_series(1, 100) i), 100, ttl => '1 day');
                 COMMIT;
             END LOOP; END $$"
        ))?;
        admin.run("VACUUM ANALYZE runs; ")?;
        let unmarked = claims(admin, in_flight + 100)?;
        let alone = *alone.get_or_insert(unmarked.median);
        let number = in_flight as f64;
        let each = (in_flight > 0).then(|| (unmarked.median - alone) * 1e3 / number);
        admin.run(&format!(
            "ALTER TABLE runs DISABLE TRIGGER USER; UPDATE runs SET state = 'running' WHERE id <= {in_flight};
             ALTER TABLE runs ENABLE TRIGGER USER"
        ))?;
        admin.run("VACUUM ANALYZE runs")?;
        let marked = claims(admin, 100)?;
        let shown = each.map_or(Cell::Nothing, |each| Cell::Number(each, 2));
        rows.push(row![(number, 0), (unmarked, 2), shown, (marked, 2)]);
        if let Some(each) = each {
            section.at_most(
                format!("µs for each of {in_flight} in flight"),
                Spread::of(&[each]),
                3.0,
            );
        }
        section.at_most(format!("a claim beside {in_flight} that are marked, ms"), marked, 5.0);
    }
    let title = "a claim beside jobs in flight, which are first in their order";
    section.table(title, &["in flight", "not marked, ms", "µs each", "marked, ms"], rows);
    Ok(())
}

/// Claims that look at so many rows, each rolled back.
fn claims(session: &mut Session, limit: usize) -> Result<Spread> {
    let statement = QUEUES[0].claim.replace("LIMIT 100", &format!("LIMIT {limit}"));
    let statement = session.prepare(&statement)?;
    let mut ms = Vec::new();
    for turn in 0..race::WARM_UP + 30 {
        session.run("BEGIN")?;
        let start = Instant::now();
        session.query_opt(&statement, &[&"me"])?.context("there is one that is free")?;
        if turn >= race::WARM_UP {
            ms.push(start.elapsed().as_secs_f64() * 1e3);
        }
        session.run("ROLLBACK")?;
    }
    Ok(Spread::of(&ms))
}
