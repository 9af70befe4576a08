//! Checks how many clients could be sure of a lease at the same time.

use super::sessions;
use super::transaction::Transaction;
use super::{Findings, stepped};
use crate::chaos::history::History;
use crate::chaos::lease_kind::LeaseKind;
use crate::chaos::nemesis::Disturbance;
use crate::chaos::record::{Outcome, Purpose, TTL_MS};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

/// The time in which the holder of a grant may be sure of it, including `from` and `until`.
#[derive(Clone, Copy)]
struct Hold {
    /// The first token of the grant.
    first: i64,
    shared: bool,
    worker: u32,
    from: i64,
    until: i64,
}

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Hold { first, worker, from, until, .. } = self;
        write!(f, "worker {worker} by {first} from {from} to {until}")
    }
}

fn listed(holds: &[&Hold]) -> String {
    holds.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// A grant, made at some time within this interval.
#[derive(Clone, Copy)]
struct Grant<'a> {
    by: &'a Transaction,
    first: i64,
    seen: i64,
}

/// Checks that never more clients are sure of a lease than may hold it, and that no grant is made while others may be
/// sure of one that excludes it.
pub fn no_more_than_may(
    history: &History,
    transactions: &HashMap<i64, Transaction>,
    findings: &mut Findings,
) {
    let mut by_lease: BTreeMap<i32, Vec<&Transaction>> = BTreeMap::new();
    for transaction in transactions.values() {
        for lease in transaction.leases() {
            by_lease.entry(lease).or_default().push(transaction);
        }
    }
    for (lease, mut all) in by_lease {
        all.sort_by_key(|transaction| transaction.requested);
        let grants: Vec<Grant> = all
            .iter()
            .filter(|transaction| transaction.purpose.acquires())
            .filter_map(|by| by.token.map(|(first, seen)| Grant { by, first, seen }))
            .collect();
        let mut holds = match LeaseKind::of(lease) {
            // The lock service decides about the time of its grants; here only guards exclude others.
            LeaseKind::Adopted => Vec::new(),
            _ => by_time(history, lease, &all, &grants),
        };
        holds.extend(by_guard(history, &all, &grants));
        holds.sort_by_key(|hold| hold.from);
        check_instants(lease, &holds, findings);
        check_grants(lease, &holds, &grants, findings);
    }
}

/// A hold lasts from the end of the acquire for the ttl, counted from before the request of the acquire or the last
/// renewal.
fn by_time(history: &History, lease: i32, all: &[&Transaction], grants: &[Grant]) -> Vec<Hold> {
    let committed = |t: &Transaction| t.outcome == Some(Outcome::Committed);
    let mut relying: HashMap<i64, Vec<&Transaction>> = HashMap::new();
    for transaction in all {
        relying.entry(transaction.first.unwrap_or_default()).or_default().push(transaction);
    }
    let mut holds = Vec::new();
    for grant in grants.iter().filter(|grant| committed(grant.by)) {
        let acquired = grant.by;
        if stepped(history, acquired.requested, acquired.ended) {
            continue;
        }
        let mut until = acquired.requested + TTL_MS * 1000;
        let relying = relying.get(&grant.first).map_or(&[][..], Vec::as_slice);
        // If the clock went back meanwhile, an expired grant may have been renewed, and the lease was free for a while.
        let without_gap = |t: &Transaction| !stepped(history, acquired.requested, t.ended);
        for renewed in relying.iter().filter(|t| t.purpose == Purpose::Renew && committed(t)) {
            if without_gap(renewed) {
                until = until.max(renewed.requested + TTL_MS * 1000);
            }
        }
        // Whatever its outcome, a release may have been executed.
        let releases =
            relying.iter().filter(|t| t.purpose == Purpose::Release).map(|t| t.requested);
        until = until.min(releases.min().unwrap_or(i64::MAX));
        // A later incarnation of the worker may have reclaimed the lease.
        let same = |t: &&&Transaction| t.worker == acquired.worker && t.purpose.acquires();
        let later = all.partition_point(|t| t.requested <= acquired.requested);
        let again = all[later..].iter().find(same).map(|t| t.requested);
        until = until.min(again.unwrap_or(i64::MAX));
        for disturbance in history
            .disturbances
            .iter()
            .filter(|disturbance| disturbance.ended >= acquired.requested)
        {
            let breaks = matches!(disturbance.kind, Disturbance::StepClock | Disturbance::FailOver);
            let ends_sessions = matches!(
                disturbance.kind,
                Disturbance::Terminate
                    | Disturbance::KillWorker
                    | Disturbance::KillBackend
                    | Disturbance::KillServer
            );
            if breaks || disturbance.lease == Some(lease) || acquired.session && ends_sessions {
                until = until.min(disturbance.at);
            }
        }
        if acquired.session {
            until = until.min(sessions::first_unlock(history, acquired));
            // A worker that stops at the end of the run ends its session.
            until = until.min(sessions::last_sign_of(history, acquired.worker));
        }
        holds.push(Hold { from: acquired.ended, until, ..grant.hold() });
    }
    holds
}

/// A hold by a guard lasts until the end of its transaction or prepared transaction, whatever happens to the grant.
fn by_guard(history: &History, all: &[&Transaction], grants: &[Grant]) -> Vec<Hold> {
    let by_first: HashMap<i64, &Grant> = grants.iter().map(|grant| (grant.first, grant)).collect();
    let mut holds = Vec::new();
    for transaction in all {
        let Some(from) = transaction.guarded else { continue };
        let Some(grant) = transaction.first.and_then(|first| by_first.get(&first)) else {
            continue;
        };
        let answered =
            matches!(transaction.outcome, Some(Outcome::Committed | Outcome::Refused(_)));
        let finishing = transaction.attempts.first().map(|attempt| attempt.requested);
        // If the commit was answered, even with an error, the transaction was open until it was requested.
        let until =
            finishing.or(transaction.prepared).or(transaction.committing.filter(|_| answered));
        let Some(mut until) = until else { continue };
        for disturbance in
            history.disturbances.iter().filter(|disturbance| disturbance.ended >= from)
        {
            // A prepared transaction may be lost with the old primary.
            if disturbance.kind == Disturbance::FailOver {
                until = until.min(disturbance.at);
            }
        }
        holds.push(Hold { from, until, worker: transaction.worker, ..grant.hold() });
    }
    holds
}

impl Grant<'_> {
    fn hold(&self) -> Hold {
        let shared = self.by.purpose == Purpose::Share;
        Hold { first: self.first, shared, worker: self.by.worker, from: 0, until: 0 }
    }
}

/// Returns true if such holds of different grants may overlap.
fn may_be(lease: i32, holds: &[&Hold]) -> bool {
    match LeaseKind::of(lease) {
        LeaseKind::Exclusive | LeaseKind::Adopted => holds.len() <= 1,
        LeaseKind::Shared => holds.len() <= 1 || holds.iter().all(|hold| hold.shared),
        LeaseKind::Slots(slots) => holds.len() <= slots,
    }
}

/// One hold for each grant.
fn distinct<'a>(holds: impl Iterator<Item = &'a Hold>) -> Vec<&'a Hold> {
    let mut seen = HashSet::new();
    holds.filter(|hold| seen.insert(hold.first)).collect()
}

fn check_instants(lease: i32, holds: &[Hold], findings: &mut Findings) {
    let mut current: Vec<&Hold> = Vec::new();
    for hold in holds.iter().filter(|hold| hold.from < hold.until) {
        current.retain(|other| other.until > hold.from);
        current.push(hold);
        let together = distinct(current.iter().copied());
        if !may_be(lease, &together) {
            findings.violated(format!("lease {lease} had too many holders: {}", listed(&together)));
        }
    }
}

fn check_grants(lease: i32, holds: &[Hold], grants: &[Grant], findings: &mut Findings) {
    let mut begun = holds.iter().peekable();
    let mut current: Vec<&Hold> = Vec::new();
    for grant in grants {
        while let Some(hold) = begun.next_if(|hold| hold.from <= grant.by.requested) {
            current.push(hold);
        }
        current.retain(|hold| hold.until >= grant.by.requested);
        let own = Hold { from: grant.by.requested, until: grant.seen, ..grant.hold() };
        let all_the_time = |hold: &&Hold| hold.first != grant.first && hold.until >= grant.seen;
        let mut together = distinct(current.iter().copied().filter(all_the_time));
        let others_may = may_be(lease, &together);
        together.push(&own);
        if others_may && !may_be(lease, &together) {
            findings.violated(format!(
                "lease {lease} was granted while others had it: {}",
                listed(&together)
            ));
        }
    }
}
