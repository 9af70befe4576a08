//! Checks that no token of a grant is accepted after its release or after a newer grant, whatever the clock says.

use super::Findings;
use super::sessions::is_accepted;
use super::transaction::Transaction;
use crate::chaos::history::History;
use crate::chaos::lease_kind::LeaseKind;
use crate::chaos::nemesis::Disturbance;
use crate::chaos::record::Purpose;
use std::collections::HashMap;

/// The first token of a grant with the time and era of an acknowledgement, since a failover may lose it.
type Acknowledged = (i64, (i64, u32));

/// Checks each request that was made after the answer to a release, or to a newer grant that excludes the older one.
pub fn nothing_is_accepted(
    history: &History,
    transactions: &HashMap<i64, Transaction>,
    findings: &mut Findings,
) {
    let mut grants: HashMap<i32, Vec<Acknowledged>> = HashMap::new();
    let mut releases = grants.clone();
    for transaction in transactions.values() {
        let Some(acknowledged) = transaction.acknowledged else { continue };
        let token = transaction.token.map(|(token, _)| token);
        let (ends, first) = match transaction.purpose {
            Purpose::Release => (&mut releases, transaction.first),
            purpose if purpose.acquires() => (&mut grants, token),
            _ => continue,
        };
        for (lease, first) in transaction.leases().filter_map(|lease| Some((lease, first?))) {
            ends.entry(lease).or_default().push((first, acknowledged));
        }
    }
    let crashes = |kind| matches!(kind, Disturbance::KillBackend | Disturbance::KillServer);
    for transaction in transactions.values().filter(|transaction| is_accepted(transaction)) {
        let Some(own) = transaction.first else { continue };
        let knew = |(at, era): (i64, u32)| at < transaction.requested && era == transaction.era;
        // A release does not wait for the disk.
        let stays = |at| {
            let mut all = history.disturbances.iter().filter(|d| crashes(d.kind));
            !all.any(|d| d.ended >= at && d.at <= transaction.ended)
        };
        for lease in transaction.leases() {
            let one_by_one =
                matches!(LeaseKind::of(lease), LeaseKind::Exclusive | LeaseKind::Adopted);
            let mut grants = grants.get(&lease).into_iter().flatten();
            let newer = grants.find(|(first, when)| one_by_one && *first > own && knew(*when));
            let mut releases = releases.get(&lease).into_iter().flatten();
            let released =
                releases.find(|(first, when)| *first == own && knew(*when) && stays(when.0));
            if let Some((first, (at, _))) = newer.or(released) {
                findings.violated(format!(
                    "lease {lease}: accepted after {first} was granted or released at {at}: {transaction:?}"
                ));
            }
        }
    }
}
