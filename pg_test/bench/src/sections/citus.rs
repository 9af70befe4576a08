//! Citus: what a call costs that the coordinator sends on to the node of the name, what the adoption of a lease of the
//! coordinator costs, and the rate of one, two and three nodes.

use super::uncontended::find;
use crate::peers::ours;
use crate::plot::Plot;
use crate::race::{self, Contender, Op, Rules, Track, WARM_UP};
use crate::report::{Cell, Section, Table};
use crate::workbench::Workbench;
use anyhow::{ensure, Context, Result};
use pg_test::citus::Citus;
use pg_test::Conninfo;

const NODES: usize = 3;
/// As many names on each node.
const NAMES: usize = 64;

const PLAIN: &str = "a server without Citus";
const DIRECT: &str = "on the node itself";
const SENT_ON: &str = "by the coordinator, on the node";
const ADOPTED: &str = "on the coordinator, adopted on 3 nodes";

/// The servers, and names that Citus has sent to each node.
struct Nodes {
    citus: Citus,
    names: Vec<Vec<String>>,
}

pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Citus");
    section.note(
        "Leases on the node of a distributed table's row, taken there and by way of the coordinator; and leases of the \
         coordinator that each node adopts. All nodes, and the clients, share the machine: what two and three nodes \
         reach together is bounded by its cores and its disk.",
    );
    let nodes = match Nodes::start(bench) {
        Ok(nodes) => nodes,
        Err(error) => {
            bench.skip("citus", &error);
            return Ok(section);
        }
    };
    bench.progress("citus: pairs");
    let plain = bench.conninfo();
    let node = nodes.citus.worker(0).conninfo("postgres");
    let coordinator = nodes.citus.coordinator().conninfo("postgres");
    let names = &nodes.names[..1];
    let pairs_of = |name, conninfo: &Conninfo| pairs(name, vec![conninfo.clone()], names);
    let one = rules(bench, 1);
    let contenders = [
        pairs_of(PLAIN, &plain),
        pairs_of(DIRECT, &node),
        pairs_of(SENT_ON, &coordinator),
        adopted(&coordinator),
    ];
    let tracks = race::run(&contenders, one)?;
    section.tables.push(table("acquire + release, 1 client", &tracks)?);
    let ratio = find(&tracks, SENT_ON)?.ratio_to(find(&tracks, DIRECT)?);
    section.at_least(
        "pairs by the coordinator over those on the node itself: at least 0.3",
        ratio,
        0.3,
    );

    bench.progress("citus: guarded writes");
    let contenders = [
        writes(DIRECT, &node, &nodes.names[0][0]),
        writes(SENT_ON, &coordinator, &nodes.names[0][1]),
    ];
    let tracks = race::run(&contenders, one)?;
    section.tables.push(table("a guard and a write in a transaction, 1 client", &tracks)?);
    let ratio = find(&tracks, SENT_ON)?.ratio_to(find(&tracks, DIRECT)?);
    section.at_least(
        "guarded writes by the coordinator over those on the node itself: at least 0.2",
        ratio,
        0.2,
    );

    let clients = bench.options.pick(3, 12);
    bench.progress("citus: nodes");
    let all: Vec<Conninfo> =
        (0..NODES).map(|n| nodes.citus.worker(n).conninfo("postgres")).collect();
    let spread =
        |name: &str, count: usize| pairs(name, all[..count].to_vec(), &nodes.names[..count]);
    let contenders =
        [spread(DIRECT, 1), spread("on two nodes", 2), spread("on three nodes", NODES)];
    let tracks = race::run(&contenders, rules(bench, clients))?;
    section.tables.push(table(&format!("acquire + release, {}", race::at_once(clients)), &tracks)?);
    section.plots.push(Plot {
        file: "citus".to_owned(),
        title: format!("acquire + release on one to three nodes, {}", race::at_once(clients)),
        bars: tracks.iter().map(|track| (track.name.clone(), track.rate())).collect(),
    });
    Ok(section)
}

impl Nodes {
    fn start(bench: &Workbench) -> Result<Nodes> {
        let citus = Citus::start(bench.lab.prefix(), NODES)?;
        let mut session = citus.connect()?;
        session.run("CREATE TABLE docs (id text PRIMARY KEY, n int)")?;
        session.run("SELECT create_distributed_table('docs', 'id', shard_count => 12)")?;
        session.run("INSERT INTO docs SELECT 'key' || n, 0 FROM generate_series(0, 999) AS n")?;
        session.run("SELECT fence_protect('docs', lease => '{id}')")?;
        citus.distribute_calls("docs")?;
        let names = (0..NODES).map(|worker| citus.keys_on("docs", worker, NAMES));
        let names = names.collect::<Result<_>>()?;
        Ok(Nodes { citus, names })
    }
}

fn rules(bench: &Workbench, clients: usize) -> Rules {
    Rules {
        clients,
        rounds: bench.options.rounds(),
        slice: bench.options.slice(),
        warm_up: WARM_UP,
    }
}

/// Takes and gives back names that are this client's alone, on the servers in turn, each with names of its own.
fn pairs<'a>(name: &str, servers: Vec<Conninfo>, names: &'a [Vec<String>]) -> Contender<'a> {
    Contender::new(name, move |client| {
        let server = client % servers.len();
        let session = servers[server].connect()?;
        let mut locker = ours::client(session, format!("client {client}"), "")?;
        // Clients of one server are as many numbers apart as there are servers.
        let name = names[server][client / servers.len() % NAMES].clone();
        Ok(Box::new(move || {
            let token = locker.acquire(&name)?.context("it should be free")?;
            locker.release(&name, token)
        }) as Op)
    })
}

/// Takes a lease of the coordinator, has every node adopt it, and gives it back.
fn adopted(coordinator: &Conninfo) -> Contender<'_> {
    Contender::new(ADOPTED, move |_| {
        let mut session = coordinator.connect()?;
        // In an expression the calls stay where they are.
        let acquire = session.prepare("SELECT coalesce(lease_acquire($1), 0)")?;
        let release = session.prepare("SELECT coalesce(lease_release($1, $2), 0)")?;
        let adopt = session.prepare(
            "SELECT string_agg(coalesce(result, 'NULL'), ', ')
               FROM run_command_on_workers(format('SELECT lease_adopt(%L, %s)', $1::text, $2::bigint))
              WHERE NOT success OR result IS DISTINCT FROM $2::text",
        )?;
        Ok(Box::new(move || {
            let token: i64 = session.query_one(&acquire, &[&"everywhere"])?.get(0);
            let others: Option<String> =
                session.query_one(&adopt, &[&"everywhere", &token])?.get(0);
            ensure!(others.is_none(), "a node has not adopted {token}: {others:?}");
            let closing: i64 = session.query_one(&release, &[&"everywhere", &token])?.get(0);
            ensure!(closing > token, "the lease was lost");
            Ok(())
        }) as Op)
    })
}

/// Transactions that guard a lease and write its row.
fn writes<'a>(name: &str, server: &'a Conninfo, key: &'a str) -> Contender<'a> {
    Contender::new(name, move |_| {
        let (mut session, key) = (server.connect()?, key.to_owned());
        let acquire = "SELECT lease_acquire($1, 'bench', '1 h', reclaim => true)";
        let token: Option<i64> = session.one(acquire, &[&key])?;
        let token = token.context("it should be free, or its own")?;
        let guard = session.prepare("SELECT lease_guard($1, $2)")?;
        let write = session.prepare("UPDATE docs SET n = n + 1 WHERE id = $1")?;
        Ok(Box::new(move || {
            session.run("BEGIN")?;
            session.query_one(&guard, &[&key, &token])?;
            ensure!(session.execute(&write, &[&key])? == 1);
            session.run("COMMIT")?;
            Ok(())
        }) as Op)
    })
}

fn table(title: &str, tracks: &[Track]) -> Result<Table> {
    let first = tracks.first().context("nobody took part")?;
    let head = ["", "a second", "over the first", "p50 ms", "p99 ms"];
    let mut table = Table::new(title, &head);
    for track in tracks {
        table.rows.push(vec![
            track.name.as_str().into(),
            Cell::Spread(track.rate(), 0),
            Cell::Spread(track.ratio_to(first), 2),
            Cell::Number(track.latencies.percentile_ms(0.5), 2),
            Cell::Number(track.latencies.percentile_ms(0.99), 2),
        ]);
    }
    Ok(table)
}
