//! Acquire and release where nobody else wants the lease; and renewing.

use crate::peer::{self, Peer, Prepare};
use crate::peers::*;
use crate::plot::Plot;
use crate::race::{self, Contender, Op, Track};
use crate::report::{Cell, Section, Table};
use crate::workbench::{Workbench, NAMES};
use anyhow::{Context, Result};

const PEERS: &[(&str, Prepare)] = &[
    (two_updates::NAME, two_updates::prepare),
    (ours::NAME, ours::prepare),
    (ours::NAME_SESSION, ours::prepare_session),
    (update_first::NAME, update_first::prepare),
    (insert_first::NAME, insert_first::prepare),
    (plpgsql::NAME, plpgsql::prepare),
    (advisory::NAME, advisory::prepare),
    (redis::NAME, redis::prepare),
    (redis::NAME_DURABLE, redis::prepare_durable),
    (etcd::NAME, etcd::prepare),
    (zookeeper::NAME, zookeeper::prepare),
];

pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Leases, uncontended");
    section.note(format!(
        "Each client takes and gives back one of {NAMES} leases at a time, which no other client wants. \
         The two updates are prepared statements that exclude nobody, each committed by itself."
    ));
    let peers = peer::prepare(bench, PEERS);
    for clients in [1, 8] {
        let at_once = race::at_once(clients);
        bench.progress(&format!("uncontended: pairs, {at_once}"));
        let contenders: Vec<Contender> = peers.iter().map(|peer| pairs(&**peer, clients)).collect();
        let tracks = race::run(&contenders, bench.options.rules(clients))?;
        let limit = find(&tracks, two_updates::NAME)?;
        let ours = find(&tracks, ours::NAME)?;
        let title = format!("acquire + release, {at_once}");
        section.tables.push(Table::of_rates(title, "pairs/s", &tracks, limit, "over two updates"));
        let goal = if clients == 1 { 1.05 } else { 1.2 };
        let aim = format!("pairs over two updates, {at_once}: at least {goal}");
        section.at_least(&aim, ours.ratio_to(limit), goal);
        let session = find(&tracks, ours::NAME_SESSION)?;
        let goal = if clients == 1 { 1.8 } else { 2.3 };
        let aim = format!(
            "pairs with a session's lease over a lasting one's, {at_once}: at least {goal}"
        );
        section.at_least(&aim, session.ratio_to(ours), goal);
        if let (Ok(default), 1) = (find(&tracks, redis::NAME), clients) {
            let aim = format!("pairs with a session's lease over Redis, {at_once}: at least 0.6");
            section.at_least(&aim, session.ratio_to(default), 0.6);
        }
        if let Ok(durable) = find(&tracks, redis::NAME_DURABLE) {
            let aim = format!("pairs over durable Redis, {at_once}: above 1");
            section.at_least(&aim, ours.ratio_to(durable), 1.0);
        }
        for (other, what, least) in
            [(etcd::NAME, "etcd with leases", 3.0), (zookeeper::NAME, "ZooKeeper", 2.0)]
        {
            if let Ok(other) = find(&tracks, other) {
                let aim = format!("pairs over {what}, {at_once}: at least {least}");
                section.at_least(&aim, ours.ratio_to(other), least);
            }
        }
        let title = format!("acquire + release, pairs a second, {at_once}");
        section.plots.push(Plot::of_rates(format!("pairs_{clients}"), title, &tracks));
    }
    renewals(bench, &peers, &mut section)?;
    Ok(section)
}

/// The track of that name.
pub fn find<'a>(tracks: &'a [Track], name: &str) -> Result<&'a Track> {
    tracks.iter().find(|track| track.name == name).with_context(|| format!("{name} did not run"))
}

/// Takes and gives back names that are this client's alone.
pub fn pairs(peer: &dyn Peer, clients: usize) -> Contender<'_> {
    Contender::new(peer.name(), move |client| {
        let mut locker = peer.join(client)?;
        Ok(Box::new(move || {
            let number = rand::random_range(0..NAMES / clients) * clients + client;
            let name = format!("name{number}");
            let token = locker.acquire(&name)?.context("it should be free")?;
            locker.release(&name, token)
        }) as Op)
    })
}

fn renewals(bench: &Workbench, peers: &[Box<dyn Peer>], section: &mut Section) -> Result<()> {
    let mut table = Table::new(
        "lease_renew beside one update by a prepared statement",
        &["clients", "renewals/s", "updates/s", "renewal over update"],
    );
    let taking_part = |name: &str| peers.iter().find(|peer| peer.name() == name);
    let (Some(ours), Some(limit)) = (taking_part(ours::NAME), taking_part(two_updates::NAME))
    else {
        return Ok(());
    };
    for clients in [1, 8] {
        let at_once = race::at_once(clients);
        bench.progress(&format!("uncontended: renewals, {at_once}"));
        let contenders = [renewing(&**limit), renewing(&**ours)];
        let tracks = race::run(&contenders, bench.options.rules(clients))?;
        let ratio = tracks[1].ratio_to(&tracks[0]);
        table.rows.push(vec![
            Cell::Number(clients as f64, 0),
            Cell::Spread(tracks[1].rate(), 0),
            Cell::Spread(tracks[0].rate(), 0),
            Cell::Spread(ratio, 2),
        ]);
        section.at_least(&format!("renew over one update, {at_once}: at least 0.95"), ratio, 0.95);
    }
    section.tables.push(table);
    Ok(())
}

fn renewing(peer: &dyn Peer) -> Contender<'_> {
    Contender::new(peer.name(), move |client| {
        let mut locker = peer.join(client)?;
        let name = format!("name{client}");
        let token = locker.acquire(&name)?.context("it should be free")?;
        let mut locker = Releasing { locker, name: name.clone(), token };
        Ok(Box::new(move || locker.renew()) as Op)
    })
}

/// Gives the lease back when the turn is over.
struct Releasing {
    locker: Box<dyn crate::peer::Locker>,
    name: String,
    token: i64,
}

impl Releasing {
    fn renew(&mut self) -> Result<()> {
        self.locker.renew(&self.name, self.token)
    }
}

impl Drop for Releasing {
    fn drop(&mut self) {
        let _ = self.locker.release(&self.name, self.token);
    }
}
