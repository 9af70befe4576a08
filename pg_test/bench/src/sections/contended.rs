//! Many clients for one lease: losing tries, and winning under churn.

use super::uncontended::find;
use crate::peer::{self, Peer, Prepare};
use crate::peers::*;
use crate::plot::Plot;
use crate::race::{self, Contender, Op, Rules, Track};
use crate::report::{Cell, Section, Table};
use crate::workbench::Workbench;
use anyhow::{ensure, Context, Result};

const CLIENTS: usize = 32;
const SELECT: &str = "limit: SELECT by key";
const CHURN: &str = "pg_fence, waiting in the queue";

pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Leases, contended");
    losing(bench, &mut section)?;
    churn(bench, &mut section)?;
    Ok(section)
}

fn losing(bench: &Workbench, section: &mut Section) -> Result<()> {
    const PEERS: &[(&str, Prepare)] = &[
        (ours::NAME, ours::prepare),
        (update_first::NAME, update_first::prepare),
        (insert_first::NAME, insert_first::prepare),
        (plpgsql::NAME, plpgsql::prepare),
        (advisory::NAME, advisory::prepare),
        (redis::NAME, redis::prepare),
        (etcd::NAME_WATCH, etcd::prepare_watch),
    ];
    section.note(format!(
        "{CLIENTS} clients try for one lease that somebody else holds throughout. WAL and dead rows are \
         those of the whole server during a turn, over its tries."
    ));
    let conninfo = bench.conninfo();
    let peers = peer::prepare(bench, PEERS);
    bench.progress(&format!("contended: {CLIENTS} clients losing tries"));
    update_first::prepare(bench)?;
    let select = Contender::new(SELECT, |_| {
        let mut session = conninfo.connect()?;
        let select = session.prepare("SELECT token FROM update_first WHERE name = $1")?;
        Ok(Box::new(move || {
            session.query_one(&select, &[&"held"])?;
            Ok(())
        }) as Op)
    });
    let mut contenders = vec![select];
    contenders.extend(peers.iter().map(|peer| trying(&**peer)));
    let rules = bench.options.rules(CLIENTS);
    let mut tracks: Vec<Track> = contenders
        .iter()
        .map(|contender| Track { name: contender.name.clone(), ..Track::default() })
        .collect();
    let mut written = vec![(0.0, 0.0); contenders.len()];
    for _ in 0..rules.rounds {
        for (index, contender) in contenders.iter().enumerate() {
            // Taken again each time: the ttl is 30 s.
            let mut held = None;
            if let Some(peer) = index.checked_sub(1).map(|index| &peers[index]) {
                let mut holder = peer.join(CLIENTS)?;
                let token = holder.acquire("held")?.context("it should be free")?;
                held = Some((holder, token));
            }
            let before = traces(bench)?;
            let (rate, latencies) = race::turn(contender, rules)?;
            let after = traces(bench)?;
            if let Some((mut holder, token)) = held {
                holder.release("held", token)?;
            }
            let tries = (latencies.len() + CLIENTS * rules.warm_up) as f64;
            written[index].0 += (after.0 - before.0) / tries;
            written[index].1 += (after.1 - before.1) / tries;
            tracks[index].rates.push(rate);
            tracks[index].latencies.extend(latencies);
        }
    }
    let head = ["", "tries/s", "over the SELECT", "p99 ms", "WAL bytes/try", "dead rows/try"];
    let mut table = Table::new(format!("{CLIENTS} clients losing tries for one lease"), &head);
    for (index, track) in tracks.iter().enumerate() {
        let in_postgres = index == 0 || peers[index - 1].is_postgres();
        let per_try = |sum: f64, digits| match in_postgres {
            true => Cell::Number(sum / rules.rounds as f64, digits),
            false => Cell::Nothing,
        };
        table.rows.push(vec![
            track.name.as_str().into(),
            Cell::Spread(track.rate(), 0),
            Cell::Spread(track.ratio_to(&tracks[0]), 2),
            Cell::Number(track.latencies.percentile_ms(0.99), 2),
            per_try(written[index].0, 1),
            per_try(written[index].1, 2),
        ]);
    }
    let ratio = find(&tracks, ours::NAME)?.ratio_to(&tracks[0]);
    section.at_least("losing tries over the SELECT: at least 0.8", ratio, 0.8);
    let title = format!("losing tries a second, {CLIENTS} clients, one lease");
    section.plots.push(Plot::of_rates("losing", title, &tracks));
    section.tables.push(table);
    Ok(())
}

fn trying(peer: &dyn Peer) -> Contender<'_> {
    Contender::new(peer.name(), move |client| {
        let mut locker = peer.join(client)?;
        Ok(Box::new(move || {
            ensure!(locker.acquire("held")?.is_none(), "the lease should be taken");
            Ok(())
        }) as Op)
    })
}

/// Bytes of WAL so far, and row versions that died.
fn traces(bench: &Workbench) -> Result<(f64, f64)> {
    let mut session = bench.connect()?;
    let wal: i64 = session.one("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint", &[])?;
    let dead: i64 = session.one(
        "SELECT coalesce(sum(n_tup_upd + n_tup_del), 0)::bigint FROM pg_stat_user_tables",
        &[],
    )?;
    Ok((wal as f64, dead as f64))
}

fn churn(bench: &Workbench, section: &mut Section) -> Result<()> {
    const PEERS: &[(&str, Prepare)] = &[
        (ours::NAME, ours::prepare),
        (notify::NAME, notify::prepare),
        (update_first::NAME, update_first::prepare),
        (insert_first::NAME, insert_first::prepare),
        (plpgsql::NAME, plpgsql::prepare),
        (advisory::NAME, advisory::prepare),
    ];
    let clients = bench.options.pick(8, CLIENTS);
    bench.progress(&format!("contended: churn of {clients} clients"));
    section.note(format!(
        "Churn: {clients} clients ask for one lease, update a row with it, release it, and ask again. The \
         time is from asking to having released. Those that cannot wait ask every 10 ms."
    ));
    let conninfo = bench.conninfo();
    let mut session = bench.connect()?;
    session.run(
        "CREATE TABLE IF NOT EXISTS churned (id int PRIMARY KEY, n bigint) WITH (fillfactor = 50);
         INSERT INTO churned VALUES (1, 0) ON CONFLICT DO NOTHING",
    )?;
    let peers = peer::prepare(bench, PEERS);
    let contenders: Vec<Contender> = peers
        .iter()
        .map(|peer| {
            let conninfo = &conninfo;
            let name = if peer.name() == ours::NAME { CHURN.to_owned() } else { peer.name() };
            Contender::new(name, move |client| {
                let mut locker = peer.join(client)?;
                let mut session = conninfo.connect()?;
                let update = session.prepare("UPDATE churned SET n = n + 1 WHERE id = 1")?;
                Ok(Box::new(move || {
                    let token = locker.wait("churn")?;
                    session.execute(&update, &[])?;
                    locker.release("churn", token)
                }) as Op)
            })
        })
        .collect();
    let slice = bench.options.slice() * 3;
    let rules = Rules { clients, rounds: bench.options.rounds().div_ceil(2), slice, warm_up: 0 };
    let tracks = race::run(&contenders, rules)?;
    let head = ["", "turns/s", "p50 ms", "p99 ms"];
    let mut table = Table::new(format!("{clients} clients, one lease: ask, write, release"), &head);
    for track in &tracks {
        table.rows.push(vec![
            track.name.as_str().into(),
            Cell::Spread(track.rate(), 0),
            Cell::Number(track.latencies.percentile_ms(0.5), 1),
            Cell::Number(track.latencies.percentile_ms(0.99), 1),
        ]);
    }
    section.tables.push(table);
    let ours = find(&tracks, CHURN)?.latencies.percentile_ms(0.99);
    let leases = tracks.iter().filter(|track| track.name != CHURN && track.name != advisory::NAME);
    let best =
        leases.map(|track| track.latencies.percentile_ms(0.99)).fold(f64::INFINITY, f64::min);
    let ratio = crate::spread::Spread::of(&[ours / best]);
    section.at_most("churn: p99 over the best other lease in Postgres: below 1", ratio, 1.0);
    Ok(())
}
