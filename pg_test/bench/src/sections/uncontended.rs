//! Acquiring and releasing a lease that nobody else wants, and renewing it.

use crate::peer::{Held, Peer};
use crate::peers::sql::*;
use crate::peers::{self, etcd, redis, zookeeper};
use crate::plot::Better::Higher;
use crate::race::{self, Contender, at_once, ratio};
use crate::report::{Section, row};
use crate::workbench::{NAMES, Workbench};
use anyhow::{Context, Result};

const PEERS: &[&str] = &[
    TWO_UPDATES.name,
    OURS.name,
    SESSION.name,
    UPDATE_FIRST.name,
    INSERT_FIRST.name,
    PLPGSQL.name,
    ADVISORY.name,
    redis::NAME,
    redis::NAME_DURABLE,
    etcd::NAME,
    zookeeper::NAME,
];

/// The least ratio of pairs to another peer's rate, with one client and, if compared, with eight.
const GOALS: [(Sql, &str, f64, Option<f64>); 6] = [
    (OURS, TWO_UPDATES.name, 1.05, Some(1.2)),
    (SESSION, OURS.name, 1.8, Some(2.3)),
    (SESSION, redis::NAME, 0.6, None),
    (OURS, redis::NAME_DURABLE, 1.0, Some(1.0)),
    (OURS, etcd::NAME, 3.0, Some(3.0)),
    (OURS, zookeeper::NAME, 2.0, Some(2.0)),
];

pub fn measure(bench: &Workbench) -> Result<Section> {
    let note = format!(
        "Each client takes and gives back one of {NAMES} leases at a time, which no other client wants. \
         The two updates are prepared statements that exclude nobody, each committed by itself."
    );
    let mut section = Section::new("Leases, uncontended", note);
    let peers = peers::all(bench, PEERS);
    for clients in [1, 8] {
        let contenders: Vec<Contender> =
            peers.iter().map(|peer| Contender::of_pairs(&**peer, clients)).collect();
        let at_once = at_once(clients);
        let tracks = section.race(
            bench,
            (&format!("acquire + release, {at_once}"), "pairs/s"),
            &contenders,
            bench.options.rules(clients),
            (TWO_UPDATES.name, "over two updates"),
        )?;
        for (own, other, alone, many) in GOALS {
            let goal = if clients == 1 { Some(alone) } else { many };
            // The other peers may be missing.
            if let (Some(goal), Ok(ratio)) = (goal, ratio(&tracks, own.name, other)) {
                section.at_least(
                    format!("pairs, {}, over {other}, {at_once}", own.name),
                    ratio,
                    goal,
                );
            }
        }
        let title = format!("acquire + release, pairs a second, {at_once}");
        section.bars_of(Higher, format!("pairs_{clients}"), title, &tracks);
    }
    renewals(bench, &mut section)?;
    Ok(section)
}

fn renewals(bench: &Workbench, section: &mut Section) -> Result<()> {
    let peers = [TWO_UPDATES, OURS].map(|sql| sql.at(bench.conninfo()));
    let mut rows = Vec::new();
    for clients in [1, 8] {
        bench.progress(&format!("uncontended: renewals, {}", at_once(clients)));
        let contenders = [renewing(&*peers[0]), renewing(&*peers[1])];
        let [limit, ours] = &race::run(&contenders, bench.options.rules(clients))?[..] else {
            continue;
        };
        let ratio = ours.ratio_to(limit);
        let number = clients as f64;
        rows.push(row![(number, 0), (ours.spread(), 0), (limit.spread(), 0), (ratio, 2)]);
        section.at_least(format!("renew over one update, {}", at_once(clients)), ratio, 0.95);
    }
    let title = "lease_renew beside one update by a prepared statement";
    section.table(title, &["clients", "renewals/s", "updates/s", "renewal over update"], rows);
    Ok(())
}

fn renewing(peer: &dyn Peer) -> Contender<'_> {
    Contender::new(peer.name(), move |client| {
        let (mut locker, name) = (peer.join(client)?, format!("name{client}"));
        let token = locker.acquire(&name)?.context("it should be free")?;
        let mut held = Held { locker, name, token };
        Ok(move || held.renew())
    })
}
