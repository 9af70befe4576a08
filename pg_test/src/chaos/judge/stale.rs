//! Writes by an older number once a newer one was adopted.

use super::transaction::Transaction;
use super::{Findings, LET_PASS};
use crate::chaos::evidence::Evidence;
use crate::chaos::kind::Kind;
use crate::chaos::record::What;
use std::collections::HashMap;

/// An adoption whose commit was acknowledged.
#[derive(Debug, Clone, Copy)]
struct Adoption {
    /// When, and after how many failovers.
    at: i64,
    era: u32,
    number: i64,
}

/// By lease, those that were acknowledged.
fn adoptions(transactions: &HashMap<i64, Transaction>) -> HashMap<i32, Vec<Adoption>> {
    let mut all: HashMap<i32, Vec<Adoption>> = HashMap::new();
    // A lazy worker draws for a lease of its own, whatever it was to be about.
    let adopts = |t: &&Transaction| Kind::of(t.lease) == Kind::Adopted && t.what != What::Lazy;
    for transaction in transactions.values().filter(adopts) {
        if let (Some((number, _)), Some((at, era))) = (transaction.token, transaction.acknowledged)
        {
            all.entry(transaction.lease).or_default().push(Adoption { at, era, number });
        }
    }
    all
}

/// By lease, the writes under adopted numbers that have landed: the number, when the commit was sent, and the transaction.
fn writes<'a>(
    evidence: &Evidence,
    transactions: &'a HashMap<i64, Transaction>,
) -> Vec<(i64, i64, &'a Transaction)> {
    let survivors = evidence.survivors();
    let landed = |id: &i64, transaction: &Transaction| {
        Kind::of(transaction.lease) == Kind::Adopted
            && transaction.what.writes()
            && (survivors.contains(id) || transaction.acknowledged.is_some())
    };
    let all = transactions.iter().filter(|(id, transaction)| landed(id, transaction));
    all.filter_map(|(_, t)| Some((t.first?, t.committing?, t))).collect()
}

/// Once the adoption of a greater number was acknowledged, nobody commits a write by an older one; unless a failover
/// has lost that adoption.
pub fn none_commits(
    evidence: &Evidence,
    transactions: &HashMap<i64, Transaction>,
    findings: &mut Findings,
) {
    let adoptions = adoptions(transactions);
    for (number, sent, write) in writes(evidence, transactions) {
        let of_lease = adoptions.get(&write.lease).map_or(&[][..], Vec::as_slice);
        let mut newer = of_lease.iter().filter(|a| a.number > number && a.at < sent).peekable();
        if newer.peek().is_none() {
            continue;
        }
        match newer.find(|adoption| adoption.era == write.era) {
            Some(adoption) => {
                findings.violated(format!("a stale write, after {adoption:?}: {write:?}"));
            }
            None => findings.count(LET_PASS),
        }
    }
}
