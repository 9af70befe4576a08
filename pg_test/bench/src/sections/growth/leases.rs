//! From a thousand leases to a million, with a database for each number.

use crate::plot::Better::Lower;
use crate::race::{self, Contender, Rules, Track};
use crate::report::{Section, row};
use crate::spread::{Spread, grouped};
use crate::workbench::Workbench;
use anyhow::{Context, Result, ensure};
use pg_test::{Conninfo, Database};
use std::sync::Arc;
use std::time::Duration;

/// The number of leases acquired per transaction during setup: each one locks an entry until the commit.
const AT_ONCE: usize = 5_000;

/// The call, on a random lease.
#[derive(Clone, Copy, PartialEq)]
enum Call {
    Pair,
    Renew,
    Try,
    Update,
    Select,
}

const CALLS: [(Call, &str); 5] = [
    (Call::Pair, "acquire + release"),
    (Call::Renew, "lease_renew"),
    (Call::Try, "losing try"),
    (Call::Update, "plain table: update"),
    (Call::Select, "plain table: select"),
];

/// A database with this number of leases. Even ones are free, odd ones are held.
struct LeaseDatabase {
    size: usize,
    database: Database,
    /// The tokens of the held leases.
    tokens: Arc<Vec<i64>>,
}

/// Runs all calls in all databases in turns.
pub fn measure(bench: &Workbench, section: &mut Section) -> Result<()> {
    let sizes = bench.options.pick(vec![1_000, 10_000], vec![1_000, 10_000, 100_000, 1_000_000]);
    // The checkpoint comes first, so that the pages of the calls are in the WAL since then.
    bench.connect()?.run("CHECKPOINT")?;
    let databases = sizes
        .iter()
        .map(|&size| {
            bench.progress(&format!("growth: making {size} leases"));
            LeaseDatabase::make(bench, size)
        })
        .collect::<Result<Vec<_>>>()?;
    let contenders: Vec<Contender> = CALLS
        .iter()
        .flat_map(|(call, name)| databases.iter().map(|database| contender(database, *call, name)))
        .collect();
    bench.progress("growth: calls among them");
    let slice = bench.options.pick(Duration::from_millis(20), Duration::from_millis(300));
    let rules = Rules { slice, ..bench.options.rules(1) };
    let tracks = race::run(&contenders, rules)?;
    drop(contenders);
    costs(section, &sizes, &tracks);
    room(section, &databases)
}

impl LeaseDatabase {
    fn make(bench: &Workbench, size: usize) -> Result<LeaseDatabase> {
        let database = bench.database()?;
        let conninfo = database.conninfo();
        let mut session = conninfo.connect()?;
        session.run(&format!(
            "CREATE TABLE plain (name text COLLATE \"C\" PRIMARY KEY, n bigint NOT NULL, pad text) WITH (fillfactor = 50);
             INSERT INTO plain SELECT 'lease' || i, 0, repeat('.', 130) FROM generate_series(0, {size} - 1) i"
        ))?;
        let halves = [0..size / 2, size / 2..size];
        let tokens =
            race::side_by_side(2, |half| acquire(&conninfo, halves[half].clone()))?.concat();
        for table in ["fence.lease", "plain"] {
            session.run(&format!("VACUUM ANALYZE {table}"))?;
        }
        Ok(LeaseDatabase { size, database, tokens: Arc::new(tokens) })
    }
}

/// Makes the leases with these numbers, and returns the tokens of the held ones.
fn acquire(conninfo: &Conninfo, numbers: std::ops::Range<usize>) -> Result<Vec<i64>> {
    let mut session = conninfo.connect()?;
    let acquire = session.prepare(
        "SELECT array_agg(token ORDER BY i) FILTER (WHERE i % 2 = 1), count(token) FROM (
             SELECT i, lease_acquire('lease' || i, 'bench',
                 CASE WHEN i % 2 = 1 THEN interval '300 days' ELSE interval '1 us' END) AS token
               FROM generate_series($1::bigint, $2::bigint - 1) i) made",
    )?;
    let mut tokens = Vec::with_capacity(numbers.len() / 2);
    for first in numbers.clone().step_by(AT_ONCE) {
        let end = (first + AT_ONCE).min(numbers.end);
        let row = session.query_one(&acquire, &[&(first as i64), &(end as i64)])?;
        ensure!(row.get::<_, i64>(1) as usize == end - first, "some leases were not granted");
        tokens.extend(row.get::<_, Vec<i64>>(0));
    }
    Ok(tokens)
}

fn contender<'a>(database: &'a LeaseDatabase, call: Call, name: &str) -> Contender<'a> {
    let conninfo = database.database.conninfo();
    Contender::new(format!("{name} of {}", database.size), move |_| {
        let mut session = conninfo.connect()?;
        let first = session.prepare(match call {
            Call::Pair | Call::Try => "SELECT lease_acquire($1, 'other')",
            Call::Renew => "SELECT lease_renew($1, $2)",
            Call::Update => "UPDATE plain SET n = n + 1 WHERE name = $1 RETURNING n",
            Call::Select => "SELECT n FROM plain WHERE name = $1",
        })?;
        let release = session.prepare("SELECT lease_release($1, $2)")?;
        // The held leases have odd numbers.
        let (half, held) =
            (database.size / 2, usize::from(matches!(call, Call::Renew | Call::Try)));
        let tokens = database.tokens.clone();
        Ok(move || {
            let place = rand::random_range(0..half);
            let name = format!("lease{}", 2 * place + held);
            let answer: Option<i64> = match call {
                Call::Renew => session.query_one(&first, &[&name, &tokens[place]])?.get(0),
                _ => session.query_one(&first, &[&name])?.get(0),
            };
            ensure!(answer.is_some() != (call == Call::Try), "{name}: {answer:?}");
            if let (Call::Pair, Some(token)) = (call, answer) {
                let closing: Option<i64> = session.query_one(&release, &[&name, &token])?.get(0);
                closing.context("the lease was lost")?;
            }
            Ok(())
        })
    })
}

fn costs(section: &mut Section, sizes: &[usize], tracks: &[Track]) {
    let size = |at: usize| grouped(sizes[at] as f64, 0);
    let (least, last) = (size(0), sizes.len() - 1);
    let of_call = |index: usize| &tracks[index * sizes.len()..(index + 1) * sizes.len()];
    let cost = |track: &Track| track.rounds.iter().map(|rate| 1e6 / rate).collect::<Vec<f64>>();
    let rows = CALLS.iter().enumerate().map(|(index, (_, name))| {
        let tracks = of_call(index);
        let mut row = row![*name, (&cost(&tracks[0]), 0)];
        // Twice the cost is half the rate.
        row.extend(tracks[1..].iter().map(|track| (tracks[0].ratio_to(track), 2).into()));
        row
    });
    let mut head = vec![String::new(), format!("µs a call, {least}")];
    head.extend((1..=last).map(|at| format!("{} over {least}", size(at))));
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    section.table("cost of a call, by the number of leases", &head, rows.collect::<Vec<_>>());
    let growth = |index: usize| -> Vec<f64> {
        let (few, many) = (&of_call(index)[0].rounds, &of_call(index)[last].rounds);
        few.iter().zip(many).map(|(few, many)| few / many).collect()
    };
    for (ours, plain) in [(0, 3), (1, 3), (2, 4)] {
        let (own, other) = (CALLS[ours].1, CALLS[plain].1);
        let aim = format!("{own}, {} over {least} leases, beside the {other}", size(last));
        section.at_most(aim, Spread::of_ratios(&growth(ours), &growth(plain)), 1.1);
    }
    let bars = CALLS.iter().enumerate().flat_map(|(index, (_, name))| {
        let own = if index < 3 { "pg_fence, " } else { "" };
        let bar =
            move |(at, track)| (format!("{own}{name}, {}", size(at)), Spread::of(&cost(track)));
        of_call(index).iter().enumerate().map(bar)
    });
    let title = "µs a call, one client, by the number of leases (rows)";
    section.bars(Lower, "growth", title, bars.collect::<Vec<_>>());
}

fn room(section: &mut Section, databases: &[LeaseDatabase]) -> Result<()> {
    let mut rows = Vec::new();
    for database in databases {
        let [heap, index] = ["pg_table_size", "pg_indexes_size"].map(|function| {
            let sql = format!("SELECT {function}('fence.lease')::float8");
            database.database.connect()?.one::<f64>(&sql, &[])
        });
        let (heap, index, size) = (heap?, index?, database.size as f64);
        rows.push(row![
            (size, 0),
            (heap / 1e6, 1),
            (index / 1e6, 1),
            (heap / size, 0),
            (index / size, 0)
        ]);
    }
    let head = ["leases", "table MB", "index MB", "table bytes a lease", "index bytes a lease"];
    section.table("room that fence.lease takes, after these calls", &head, rows);
    Ok(())
}
