//! From one holder's release to the next holder's answer.

use crate::peer::{self, Peer, Prepare};
use crate::peers::*;
use crate::plot::{Better, Plot};
use crate::race;
use crate::report::{Section, Table};
use crate::spread::{Latencies, Spread};
use crate::workbench::Workbench;
use anyhow::Result;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const PEERS: &[(&str, Prepare)] = &[
    (ours::NAME, ours::prepare),
    (ours::NAME_SESSION, ours::prepare_session),
    (advisory::NAME, advisory::prepare),
    (notify::NAME_ALONE, notify::prepare_alone),
    (notify::NAME, notify::prepare),
    (etcd::NAME_WATCH, etcd::prepare_watch),
    (update_first::NAME, update_first::prepare),
];

/// Two clients hand a lease to and fro.
pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new("Hand-over");
    section.note(
        "Two clients hand one lease to and fro, each in its natural way to wait: in the queue, for a lock, for a \
         notification or an event of a watch that is open already (and then a try), or by asking again every \
         10 ms. The time is from just before the release is sent to the next holder's answer. A turn takes 8 to 16 ms.",
    );
    let peers = peer::prepare(bench, PEERS);
    let mut tracks: Vec<(String, Latencies, Vec<f64>)> =
        peers.iter().map(|peer| (peer.name(), Latencies::default(), Vec::new())).collect();
    bench.progress("handover: to and fro");
    for _ in 0..bench.options.pick(1, bench.options.rounds()) {
        for (peer, (_, latencies, medians)) in peers.iter().zip(&mut tracks) {
            let some = to_and_fro(&**peer, bench.options.pick(10, 60))?;
            medians.push(some.percentile_ms(0.5));
            latencies.extend(some);
        }
    }
    let all = tracks.iter().map(|(name, latencies, medians)| (&**name, latencies, &**medians));
    section.tables.push(Table::of_answers("release to the next answer", "hand-overs", all));
    let median = |wanted: &str| {
        tracks.iter().find(|(name, ..)| name == wanted).map(|(.., medians)| medians.as_slice())
    };
    if let Some(ours) = median(ours::NAME) {
        section.at_most("hand-over, p50 in ms: below 1", Spread::of(ours), 1.0);
        for other in [notify::NAME_ALONE, notify::NAME, etcd::NAME_WATCH] {
            if let Some(other_median) = median(other) {
                let ratio = Spread::of_ratios(ours, other_median);
                section.at_most(&format!("hand-over, p50 over {other}: below 1"), ratio, 1.0);
            }
        }
    }
    if let (Some(ours), Some(bare)) = (median(ours::NAME_SESSION), median(notify::NAME_ALONE)) {
        let ratio = Spread::of_ratios(ours, bare);
        let aim =
            format!("hand-over of a session's lease, p50 over {}: at most 1.2", notify::NAME_ALONE);
        section.at_most(&aim, ratio, 1.2);
    }
    section.plots.push(Plot {
        better: Better::Lower,
        file: "handover".to_owned(),
        title: "hand-over, p50 in ms".to_owned(),
        bars: tracks.iter().map(|(name, _, p50)| (name.clone(), Spread::of(p50))).collect(),
    });
    Ok(section)
}

/// The holder, and when the last one sent the release.
struct Turn {
    holder: Option<usize>,
    released: Option<Instant>,
}

fn to_and_fro(peer: &dyn Peer, times: usize) -> Result<Latencies> {
    let turn = Mutex::new(Turn { holder: None, released: None });
    let halves = race::side_by_side(2, |client| half(peer, client, times, &turn))?;
    let mut all = Latencies::default();
    halves.into_iter().for_each(|half| all.extend(half));
    Ok(all)
}

fn half(peer: &dyn Peer, client: usize, times: usize, turn: &Mutex<Turn>) -> Result<Latencies> {
    let lock = || turn.lock().unwrap_or_else(|e| e.into_inner());
    let mut locker = peer.join(client)?;
    let mut latencies = Latencies::default();
    for round in 0..times {
        let token = locker.wait("handover")?;
        let answered = Instant::now();
        {
            let mut turn = lock();
            if let (Some(released), true) = (turn.released, turn.holder != Some(client)) {
                latencies.push(answered - released);
            }
            turn.holder = Some(client);
        }
        // Long enough for the other one to ask and to wait.
        std::thread::sleep(Duration::from_millis(rand::random_range(8..16)));
        lock().released = Some(Instant::now());
        locker.release("handover", token)?;
        // The other one's turn, unless it has had all of its own.
        let patience = Instant::now() + Duration::from_millis(300);
        while round + 1 < times && lock().holder == Some(client) && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(latencies)
}
