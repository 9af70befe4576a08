//! The time from one holder's release to the next holder's answer.

use crate::peer::Peer;
use crate::peers::sql::{ADVISORY, OURS, SESSION, UPDATE_FIRST};
use crate::peers::{self, etcd, notify};
use crate::plot::Better::Lower;
use crate::race::{self, Track, find, ratio};
use crate::report::Section;
use crate::workbench::Workbench;
use anyhow::Result;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const PEERS: &[&str] = &[
    OURS.name,
    SESSION.name,
    ADVISORY.name,
    notify::NAME_ALONE,
    notify::NAME,
    etcd::NAME_WATCH,
    UPDATE_FIRST.name,
];

/// Two clients hand a lease back and forth.
pub fn measure(bench: &Workbench) -> Result<Section> {
    let mut section = Section::new(
        "Hand-over",
        "Two clients hand one lease to and fro, each in its natural way to wait: in the queue, for a lock, for a \
         notification or an event of a watch that is open already (and then a try), or by asking again every \
         10 ms. The time is from just before the release is sent to the next holder's answer. A turn takes 8 to 16 ms.",
    );
    let peers = peers::all(bench, PEERS);
    let mut tracks: Vec<Track> = peers.iter().map(|peer| Track::new(peer.name())).collect();
    bench.progress("handover: to and fro");
    for _ in 0..bench.options.pick(1, bench.options.rounds()) {
        for (peer, track) in peers.iter().zip(&mut tracks) {
            track.add(to_and_fro(&**peer, bench.options.pick(10, 60))?);
        }
    }
    section.answers("release to the next answer", "hand-overs", &tracks);
    section.at_most("hand-over, p50 in ms", find(&tracks, OURS.name)?.spread(), 1.0);
    for (own, other, bound) in [
        (OURS, notify::NAME_ALONE, 1.0),
        (OURS, notify::NAME, 1.0),
        (OURS, etcd::NAME_WATCH, 1.0),
        (SESSION, notify::NAME_ALONE, 1.2),
    ] {
        // The other peer may be missing.
        if let Ok(ratio) = ratio(&tracks, own.name, other) {
            section.at_most(format!("hand-over, {}, p50 over {other}", own.name), ratio, bound);
        }
    }
    section.bars_of(Lower, "handover", "hand-over, p50 in ms", &tracks);
    Ok(section)
}

/// The current holder, and when the previous one sent the release.
struct Turn {
    holder: Option<usize>,
    released: Option<Instant>,
}

fn to_and_fro(peer: &dyn Peer, times: usize) -> Result<Vec<Duration>> {
    let turn = Mutex::new(Turn { holder: None, released: None });
    let halves = race::side_by_side(2, |client| half(peer, client, times, &turn))?;
    let mut all = Vec::new();
    halves.into_iter().for_each(|half| all.extend(half));
    Ok(all)
}

fn half(peer: &dyn Peer, client: usize, times: usize, turn: &Mutex<Turn>) -> Result<Vec<Duration>> {
    let lock = || turn.lock().unwrap_or_else(|e| e.into_inner());
    let mut locker = peer.join(client)?;
    let mut latencies = Vec::new();
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
        // Long enough for the other client to call and to wait.
        std::thread::sleep(Duration::from_millis(rand::random_range(8..16)));
        lock().released = Some(Instant::now());
        locker.release("handover", token)?;
        // The other client's turn, unless it has had all of its own.
        let patience = Instant::now() + Duration::from_millis(300);
        while round + 1 < times && lock().holder == Some(client) && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(latencies)
}
