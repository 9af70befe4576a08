//! Many clients for one lease: losing tries, and winning under churn.

use crate::peers::sql::*;
use crate::peers::{self, etcd, notify, redis};
use crate::plot::Better::Higher;
use crate::race::{Contender, Rules, Track, find, ratio};
use crate::report::Section;
use crate::spread::Spread;
use crate::workbench::Workbench;
use anyhow::Result;

const CLIENTS: usize = 32;

pub fn measure(bench: &Workbench) -> Result<Section> {
    let note = format!("{CLIENTS} clients try for one lease that somebody else holds throughout.");
    let mut section = Section::new("Leases, contended", note);
    losing(bench, &mut section)?;
    churn(bench, &mut section)?;
    Ok(section)
}

fn losing(bench: &Workbench, section: &mut Section) -> Result<()> {
    let peers = peers::all(
        bench,
        &[
            OURS.name,
            UPDATE_FIRST.name,
            INSERT_FIRST.name,
            PLPGSQL.name,
            ADVISORY.name,
            redis::NAME,
            etcd::NAME_WATCH,
        ],
    );
    let select = Contender::of_selects(bench);
    let limit = select.name.clone();
    let tries = peers.iter().map(|peer| Contender::of_losing_tries(&**peer, "held"));
    let contenders: Vec<Contender> = [select].into_iter().chain(tries).collect();
    let tracks = section.race(
        bench,
        (&format!("{CLIENTS} clients losing tries for one lease"), "tries/s"),
        &contenders,
        bench.options.rules(CLIENTS),
        (&limit, "over the SELECT"),
    )?;
    section.at_least("losing tries over the SELECT", ratio(&tracks, OURS.name, &limit)?, 0.8);
    let title = format!("losing tries a second, {CLIENTS} clients, one lease");
    section.bars_of(Higher, "losing", title, &tracks);
    Ok(())
}

fn churn(bench: &Workbench, section: &mut Section) -> Result<()> {
    let clients = bench.options.pick(8, CLIENTS);
    section.note(format!(
        "Churn: {clients} clients ask for one lease, update a row with it, release it, and ask again. The \
         time is from asking to having released. Those that cannot wait ask every 10 ms."
    ));
    bench.connect()?.run(
        "CREATE TABLE IF NOT EXISTS churned (id int PRIMARY KEY, n bigint) WITH (fillfactor = 50);
         INSERT INTO churned VALUES (1, 0) ON CONFLICT DO NOTHING",
    )?;
    let (ours, advisory) = (OURS.name, ADVISORY.name);
    let names = [ours, notify::NAME, UPDATE_FIRST.name, INSERT_FIRST.name, PLPGSQL.name, advisory];
    let peers = peers::all(bench, &names);
    let asking = peers.iter().map(|peer| {
        Contender::new(peer.name(), move |client| {
            let (mut locker, mut session) = (peer.join(client)?, bench.connect()?);
            let update = session.prepare("UPDATE churned SET n = n + 1 WHERE id = 1")?;
            Ok(move || {
                let token = locker.wait("churn")?;
                session.execute(&update, &[])?;
                locker.release("churn", token)
            })
        })
    });
    let (rounds, slice) = (bench.options.rounds().div_ceil(2), bench.options.slice() * 3);
    let tracks = section.race(
        bench,
        (&format!("{clients} clients, one lease: ask, write, release"), "turns/s"),
        &asking.collect::<Vec<_>>(),
        Rules { clients, rounds, slice, warm_up: 0 },
        (ours, "over pg_fence, in the queue"),
    )?;
    let p99 = |track: &Track| track.percentile_ms(0.99);
    let others = tracks.iter().filter(|track| track.name != ours && track.name != advisory);
    let best = others.map(p99).fold(f64::INFINITY, f64::min);
    let ratio = Spread::of(&[p99(find(&tracks, ours)?) / best]);
    section.at_most("churn: p99 over the best other lease in Postgres", ratio, 1.0);
    Ok(())
}
