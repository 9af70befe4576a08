//! Leases in one database and rows in others: the cost of adoption, compared with a single database.

use crate::plot::Better::Higher;
use crate::race::{Contender, at_once, ratio};
use crate::report::Section;
use crate::workbench::{NAMES, Workbench};
use anyhow::{Context, Result, ensure};
use pg_test::{Conninfo, Database, Session};

/// The contender to which the others are compared.
const ALONE: &str = "one database alone";
const OVER: (&str, &str) = (ALONE, "over one database");
const ADOPTED: &str = "adopted, guard alone";
const BOTH: &str = "adopted, adopt + guard";
const ONE: &str = "adopted on one shard";
const FOUR: &str = "adopted on four shards";
/// The least share of the rate that a guarded transaction must keep if it adopts first.
const KEPT: f64 = 0.9;

pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new(
        "Databases",
        "Guarded transactions on a shard: the lease is granted there (one database alone), or adopted, with and without \
         the adoption that every transaction may begin with. Some write a row and wait for the disk, others only guard.",
    );
    section.note(
        "Pairs: a lease is acquired in one server's database and released there; in between it is adopted by databases of \
         another server, one after the other, each of which waits for the disk.",
    );
    let many = bench.options.pick(2, 8);
    let mut bars = Vec::new();
    let shard = shard(bench, many)?;
    for (what, clients, writes) in
        [("guards", 1, false), ("guarded writes", 1, true), ("guarded writes", many, true)]
    {
        let contenders = [(ALONE, "alone", false), (ADOPTED, "job", false), (BOTH, "job", true)];
        let contenders = contenders.map(|(name, lease, adopts)| {
            transactions(shard.conninfo(), name, writes, lease, adopts)
        });
        let what = format!("{what}, {}", at_once(clients));
        let rules = bench.options.rules(clients).in_short_turns();
        let tracks = section.race(bench, (&what, "transactions/s"), &contenders, rules, OVER)?;
        let both = ratio(&tracks, BOTH, ADOPTED)?;
        section.at_least(format!("{what}, adopt + guard over guard alone"), both, KEPT);
        bars.push((what, both));
    }
    let server = bench.another_server()?;
    let shards = (0..4).map(|_| Database::with_extension(server.conninfo("postgres")));
    let shards = shards.collect::<Result<Vec<_>>>()?;
    for clients in [1, many] {
        let contenders = [(ALONE, 0), (ONE, 1), (FOUR, 4)]
            .map(|(name, number)| pairs(bench, name, &shards[..number], clients));
        let (title, rules) =
            (format!("acquire + release, {}", at_once(clients)), bench.options.rules(clients));
        let tracks = section.race(bench, (&title, "pairs/s"), &contenders, rules, OVER)?;
        let one = ratio(&tracks, ONE, ALONE)?;
        bars.push((format!("pairs, one shard, {}", at_once(clients)), one));
    }
    let title = "adopt + guard over guard alone; pairs with an adoption over pairs";
    section.bars(Higher, "databases", title, bars);
    Ok(section)
}

/// A database with a fenced row for each client, under a lease granted there or under an adopted one.
fn shard(bench: &Workbench, clients: usize) -> Result<Database> {
    let shard = bench.database()?;
    let last = clients - 1;
    shard.connect()?.run(&format!(
        "CREATE TABLE own (lease text PRIMARY KEY, v bigint NOT NULL) WITH (fillfactor = 50);
         INSERT INTO own SELECT kind || ':' || client, 0
           FROM unnest('{{alone,job}}'::text[]) kind, generate_series(0, {last}) client;
         SELECT fence_protect('own', lease => '{{lease}}');
         SELECT lease_acquire('alone:' || client, ttl => '1 day'), lease_adopt('job:' || client, 34)
           FROM generate_series(0, {last}) client"
    ))?;
    Ok(shard)
}

/// Guards the client's own lease, adopted first or not, and writes the client's row or nothing.
fn transactions(
    conninfo: Conninfo,
    name: &'static str,
    writes: bool,
    lease: &'static str,
    adopts: bool,
) -> Contender<'static> {
    Contender::new(name, move |client| {
        let mut session = conninfo.connect()?;
        let lease = format!("{lease}:{client}");
        let token: i64 = session.one("SELECT token FROM lease_info($1)", &[&lease])?;
        let argument = if adopts { "lease_adopt($1, $2)" } else { "$2" };
        let guard = session.prepare(&format!("SELECT lease_guard($1, {argument})"))?;
        let update = session.prepare("UPDATE own SET v = v + 1 WHERE lease = $1")?;
        Ok(move || {
            session.run("BEGIN")?;
            session.query_one(&guard, &[&lease, &token])?;
            if writes {
                ensure!(session.execute(&update, &[&lease])? == 1, "there should be a row");
            }
            session.run("COMMIT")
        })
    })
}

/// Acquires and releases names that only this client uses, adopted in between by these shards.
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
        Ok(move || {
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
        })
    })
}
