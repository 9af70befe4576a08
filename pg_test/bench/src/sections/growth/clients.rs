//! From one client to two hundred.

use crate::peers::{ours, two_updates, update_first};
use crate::plot::{Better, Plot};
use crate::race::{self, Contender, Op, Rules};
use crate::report::{Cell, Section, Table};
use crate::sections::uncontended::pairs;
use crate::spread::Spread;
use crate::workbench::Workbench;
use anyhow::{ensure, Result};

const HELD: &str = "held for long";

/// Pairs beside two updates, losing tries beside a SELECT.
pub fn measure(bench: &Workbench, section: &mut Section) -> Result<()> {
    section.note(
        "Clients: acquire + release of 10,000 leases that no other client wants, and losing tries for one \
         that is held throughout.",
    );
    let (limit, own) = (two_updates::prepare(bench)?, ours::prepare(bench)?);
    update_first::prepare(bench)?;
    let mut holder = bench.connect()?;
    let token: i64 = holder.one("SELECT lease_acquire($1, 'bench', ttl => '1 day')", &[&HELD])?;
    let head = [
        "clients",
        "pairs/s",
        "over two updates",
        "p50 ms",
        "p99 ms",
        "losing tries/s",
        "over a SELECT",
    ];
    let mut table = Table::new("calls by the number of clients", &head);
    let mut bars: Vec<(String, Spread)> = Vec::new();
    for clients in bench.options.pick(vec![1, 8, 50], vec![1, 8, 32, 200]) {
        bench.progress(&format!("growth: {}", race::at_once(clients)));
        let contenders = [
            pairs(&*limit, clients),
            pairs(&*own, clients),
            looking(
                bench,
                "SELECT",
                "SELECT token FROM update_first WHERE name = $1",
                "held",
                false,
            ),
            looking(bench, "losing tries", "SELECT lease_acquire($1, 'other')", HELD, true),
        ];
        let rules = Rules {
            rounds: bench.options.rounds().div_ceil(2),
            // Of many clients each needs time for more than a call or two.
            slice: bench.options.slice() * if clients > 50 { 2 } else { 1 },
            ..bench.options.rules(clients)
        };
        let tracks = race::run(&contenders, rules)?;
        let over = [tracks[1].ratio_to(&tracks[0]), tracks[3].ratio_to(&tracks[2])];
        table.rows.push(vec![
            Cell::Number(clients as f64, 0),
            Cell::Spread(tracks[1].rate(), 0),
            Cell::Spread(over[0], 2),
            Cell::Number(tracks[1].latencies.percentile_ms(0.5), 2),
            Cell::Number(tracks[1].latencies.percentile_ms(0.99), 2),
            Cell::Spread(tracks[3].rate(), 0),
            Cell::Spread(over[1], 2),
        ]);
        if clients > 8 {
            let aim = |what: &str, least| format!("{what}, {clients} clients: at least {least}");
            section.at_least(&aim("pairs over two updates", 1.0), over[0], 1.0);
            section.at_least(&aim("losing tries over a SELECT", 0.8), over[1], 0.8);
        }
        bars.push((format!("pg_fence, pairs over two updates, {clients}"), over[0]));
        bars.push((format!("pg_fence, tries over a SELECT, {clients}"), over[1]));
    }
    let closing: Option<i64> = holder.one("SELECT lease_release($1, $2)", &[&HELD, &token])?;
    ensure!(closing.is_some(), "the lease was lost");
    section.tables.push(table);
    section.plots.push(Plot {
        better: Better::Higher,
        file: "clients".to_owned(),
        title: "calls a second over the limit's, by the number of clients".to_owned(),
        bars,
    });
    Ok(())
}

/// Asks for one row: a token, or nothing where all tries must lose.
fn looking<'a>(
    bench: &'a Workbench,
    title: &str,
    sql: &'static str,
    name: &'static str,
    loses: bool,
) -> Contender<'a> {
    let conninfo = bench.conninfo();
    Contender::new(title, move |_| {
        let mut session = conninfo.connect()?;
        let statement = session.prepare(sql)?;
        Ok(Box::new(move || {
            let token: Option<i64> = session.query_one(&statement, &[&name])?.get(0);
            ensure!(token.is_none() == loses, "{name}: {token:?}");
            Ok(())
        }) as Op)
    })
}
