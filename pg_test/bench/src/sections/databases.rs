//! Leases in one database, rows in others: what adopting costs, beside one database that has both.

use super::uncontended::find;
use crate::plot::{Better, Plot};
use crate::race::{self, Contender, Op};
use crate::report::{Section, Table};
use crate::workbench::{Workbench, NAMES};
use anyhow::{ensure, Context, Result};
use pg_test::{Conninfo, Database, Session};

/// The measure of the others.
const ALONE: &str = "one database alone";
const OVER: &str = "over one database";
const ADOPTED: &str = "adopted, guard alone";
const BOTH: &str = "adopted, adopt + guard";
const ONE: &str = "adopted on one shard";
const FOUR: &str = "adopted on four shards";
/// The least share of its rate that a guarded transaction is to keep when it adopts first.
const KEPT: f64 = 0.9;
/// The client whose row and lease a transaction is about, where all are one holder's.
const POOL: usize = 0;

pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Databases");
    section.note(
        "Guarded transactions on a shard: the lease is granted there (one database alone), or adopted, with and without \
         the adoption that every transaction may begin with. Some write a row and wait for the disk, others only guard. \
         The pool: all clients are one holder's, with one lease, and write a row each.",
    );
    section.note(
        "Pairs: a lease is acquired in one server's database and released there; in between it is adopted by databases of \
         another server, one after the other, each of which waits for the disk.",
    );
    let many = bench.options.pick(2, 8);
    let mut plot = Vec::new();
    let shard = shard(bench, many)?;
    for (what, clients, kind) in [
        ("guards", 1, Kind::Guards),
        ("guarded writes", 1, Kind::Writes),
        ("guarded writes", many, Kind::Writes),
        ("guarded writes of a pool", many, Kind::Pool),
    ] {
        bench.progress(&format!("databases: {what}, {}", race::at_once(clients)));
        let contenders = [(ALONE, "alone", false), (ADOPTED, "job", false), (BOTH, "job", true)];
        let contenders = contenders
            .map(|(name, lease, adopts)| transactions(shard.conninfo(), name, kind, lease, adopts));
        let tracks = race::run(&contenders, bench.options.rules(clients).in_short_turns())?;
        section.tables.push(Table::of_rates(
            format!("{what}, {}", race::at_once(clients)),
            "transactions/s",
            &tracks,
            find(&tracks, ALONE)?,
            OVER,
        ));
        let both = find(&tracks, BOTH)?.ratio_to(find(&tracks, ADOPTED)?);
        let aim = format!("{what}, adopt + guard over guard alone, {}", race::at_once(clients));
        section.at_least(&format!("{aim}: at least {KEPT}"), both, KEPT);
        plot.push((format!("{what}, {}", race::at_once(clients)), both));
    }
    let server = bench.another_server()?;
    let shards = (0..4).map(|_| Database::with_extension(server.conninfo("postgres")));
    let shards = shards.collect::<Result<Vec<_>>>()?;
    for clients in [1, many] {
        bench.progress(&format!("databases: pairs, {}", race::at_once(clients)));
        let contenders = [(ALONE, 0), (ONE, 1), (FOUR, 4)]
            .map(|(name, number)| pairs(bench, name, &shards[..number], clients));
        let tracks = race::run(&contenders, bench.options.rules(clients))?;
        section.tables.push(Table::of_rates(
            format!("acquire + release, {}", race::at_once(clients)),
            "pairs/s",
            &tracks,
            find(&tracks, ALONE)?,
            OVER,
        ));
        let one = find(&tracks, ONE)?.ratio_to(find(&tracks, ALONE)?);
        plot.push((format!("pairs, one shard, {}", race::at_once(clients)), one));
    }
    section.plots.push(Plot {
        better: Better::Higher,
        file: "databases".to_owned(),
        title: "adopt + guard over guard alone; pairs with an adoption over pairs".to_owned(),
        bars: plot,
    });
    Ok(section)
}

/// A database with a fenced row for each client, under a lease that is granted there and under one that is adopted; and
/// rows for the clients of a pool.
fn shard(bench: &Workbench, clients: usize) -> Result<Database> {
    let shard = bench.database()?;
    let last = clients - 1;
    shard.connect()?.run(&format!(
        "CREATE TABLE own (lease text PRIMARY KEY, v bigint NOT NULL) WITH (fillfactor = 50);
         INSERT INTO own SELECT kind || ':' || client, 0
           FROM unnest('{{alone,job}}'::text[]) kind, generate_series(0, {last}) client;
         CREATE TABLE pool (id text PRIMARY KEY, lease text NOT NULL, v bigint NOT NULL) WITH (fillfactor = 50);
         INSERT INTO pool SELECT kind || ':' || client, kind || ':{POOL}', 0
           FROM unnest('{{alone,job}}'::text[]) kind, generate_series(0, {last}) client;
         SELECT fence_protect('own', lease => '{{lease}}'), fence_protect('pool', lease => '{{lease}}');
         SELECT lease_acquire('alone:' || client, ttl => '1 day'), lease_adopt('job:' || client, 34)
           FROM generate_series(0, {last}) client"
    ))?;
    Ok(shard)
}

/// The subject of a guarded transaction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// It writes nothing.
    Guards,
    /// It writes the client's own row, under the client's own lease.
    Writes,
    /// It writes the client's own row, under the lease that all have.
    Pool,
}

fn transactions(
    conninfo: Conninfo,
    name: &'static str,
    kind: Kind,
    lease: &'static str,
    adopts: bool,
) -> Contender<'static> {
    Contender::new(name, move |client| {
        let mut session = conninfo.connect()?;
        let row = format!("{lease}:{client}");
        let lease = format!("{lease}:{}", if kind == Kind::Pool { POOL } else { client });
        let token: i64 = session.one("SELECT token FROM lease_info($1)", &[&lease])?;
        let argument = if adopts { "lease_adopt($1, $2)" } else { "$2" };
        let guard = session.prepare(&format!("SELECT lease_guard($1, {argument})"))?;
        let update = match kind {
            Kind::Guards => None,
            Kind::Writes => Some("UPDATE own SET v = v + 1 WHERE lease = $1"),
            Kind::Pool => Some("UPDATE pool SET v = v + 1 WHERE id = $1"),
        };
        let update = update.map(|sql| session.prepare(sql)).transpose()?;
        Ok(Box::new(move || {
            session.run("BEGIN")?;
            session.query_one(&guard, &[&lease, &token])?;
            if let Some(update) = &update {
                ensure!(session.execute(update, &[&row])? == 1, "there should be a row");
            }
            session.run("COMMIT")
        }) as Op)
    })
}

/// Takes and gives back names that are this client's alone, adopted in between by these shards.
fn pairs<'a>(
    bench: &'a Workbench,
    name: &'static str,
    shards: &'a [Database],
    clients: usize,
) -> Contender<'a> {
    Contender::new(name, move |client| {
        let mut session = bench.connect()?;
        let acquire = session.prepare("SELECT lease_acquire($1)")?;
        let release = session.prepare("SELECT lease_release($1, $2)")?;
        let adopting = |shard: &Database| -> Result<_> {
            let mut session = shard.connect()?;
            let adopt = session.prepare("SELECT lease_adopt($1, $2)")?;
            Ok((session, adopt))
        };
        let mut shards = shards.iter().map(adopting).collect::<Result<Vec<(Session, _)>>>()?;
        Ok(Box::new(move || {
            let number = rand::random_range(0..NAMES / clients) * clients + client;
            let name = format!("shared{number}");
            let token: Option<i64> = session.query_one(&acquire, &[&name])?.get(0);
            let token = token.context("it should be free")?;
            for (shard, adopt) in &mut shards {
                let adopted: Option<i64> = shard.query_one(&*adopt, &[&name, &token])?.get(0);
                ensure!(adopted == Some(token), "nobody should guard it");
            }
            let closing: Option<i64> = session.query_one(&release, &[&name, &token])?.get(0);
            closing.map(drop).context("the lease was lost")
        }) as Op)
    })
}
