//! From one client to two hundred.

use crate::peers::sql::{OURS, TWO_UPDATES, UPDATE_FIRST};
use crate::plot::Better::Higher;
use crate::race::{self, Contender, Rules, at_once};
use crate::report::{Section, row};
use crate::workbench::Workbench;
use anyhow::Result;

/// Compares pairs with two updates, and losing tries with a SELECT.
pub fn measure(bench: &Workbench, section: &mut Section) -> Result<()> {
    section.note(
        "Clients: acquire + release of 10,000 leases that no other client wants, and losing tries for one \
         that is held throughout.",
    );
    let [limit, own, _] = [TWO_UPDATES, OURS, UPDATE_FIRST].map(|sql| sql.prepare(bench));
    let (limit, own) = (limit?, own?);
    let (mut rows, mut bars) = (Vec::new(), Vec::new());
    for clients in bench.options.pick(vec![1, 8, 50], vec![1, 8, 32, 200]) {
        bench.progress(&format!("growth: {}", at_once(clients)));
        let contenders = [
            Contender::of_pairs(&*limit, clients),
            Contender::of_pairs(&*own, clients),
            Contender::of_selects(bench),
            Contender::of_losing_tries(&*own, "held"),
        ];
        let rules = Rules {
            rounds: bench.options.rounds().div_ceil(2),
            // Each of many clients needs time for more than a call or two.
            slice: bench.options.slice() * if clients > 50 { 2 } else { 1 },
            ..bench.options.rules(clients)
        };
        let tracks = race::run(&contenders, rules)?;
        let [pairs, tries] =
            [(1, 0), (3, 2)].map(|(own, limit)| tracks[own].ratio_to(&tracks[limit]));
        let [p50, p99] = [0.5, 0.99].map(|share| tracks[1].percentile_ms(share));
        let (own, losing) = (tracks[1].spread(), tracks[3].spread());
        let number = clients as f64;
        rows.push(row![
            (number, 0),
            (own, 0),
            (pairs, 2),
            (p50, 2),
            (p99, 2),
            (losing, 0),
            (tries, 2)
        ]);
        for (what, ratio, least) in
            [("pairs over two updates", pairs, 1.0), ("tries over a SELECT", tries, 0.8)]
        {
            if clients > 8 {
                section.at_least(format!("{what}, {clients} clients"), ratio, least);
            }
            bars.push((format!("pg_fence, {what}, {clients}"), ratio));
        }
    }
    let pairs = ["clients", "pairs/s", "over two updates", "p50 ms", "p99 ms"];
    let head = [&pairs[..], &["losing tries/s", "over a SELECT"]].concat();
    section.table("calls by the number of clients", &head, rows);
    let title = "calls a second over the limit's, by the number of clients";
    section.bars(Higher, "clients", title, bars);
    Ok(())
}
