//! A second judge, by other means than the first: stateright's tester of linearizability. It knows nothing of the server's
//! times, tables and orders, only when each call was asked for and answered; it looks for an order of the calls on a lease
//! that explains every answer. It tries one order after the other, so it is given a few calls at a time: where too many
//! overlap, those of two grants. The other rules, which have the server's own order, need not guess, and stay.

use super::transaction::Transaction;
use super::Findings;
use crate::chaos::evidence::Evidence;
use crate::chaos::kind::Kind;
use crate::chaos::record::{Outcome, What};
use stateright::semantics::{ConsistencyTester, LinearizabilityTester, SequentialSpec};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Where more calls than these that make, renew or end a grant overlap, there are too many orders to try.
const MOST: usize = 14;

/// A call on a lease that one alone may have. A grant goes by its first token.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Call {
    Grant { first: i64 },
    Renew { first: i64, token: i64 },
    Release { first: i64, token: i64 },
    Write { first: i64 },
}

/// Whose the lease is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Holder {
    /// It may be anybody's: what was before is not known.
    Unknown,
    Grant(i64),
    Nobody,
}

/// The lease, as one call after the other leaves it. That time ends grants does not matter here: a grant that is over is
/// harmless until the next one.
#[derive(Debug, Clone)]
struct Lease {
    holder: Holder,
    /// The greatest token so far.
    greatest: i64,
    /// A lock service grants it, and the same number may be adopted again.
    is_adopted: bool,
}

impl Lease {
    /// Whether that grant is the one that counts.
    fn is_held_by(&self, first: i64) -> bool {
        matches!(self.holder, Holder::Unknown) || self.holder == Holder::Grant(first)
    }
}

impl SequentialSpec for Lease {
    type Op = Call;
    type Ret = bool;

    /// Whether the call can be answered as it was.
    fn invoke(&mut self, call: &Call) -> bool {
        let (may_be, holder, token) = match *call {
            Call::Grant { first } => {
                let again = self.is_adopted && self.is_held_by(first);
                (first > self.greatest || again, Holder::Grant(first), first)
            }
            Call::Renew { first, token } => {
                (self.is_held_by(first) && token > self.greatest, Holder::Grant(first), token)
            }
            Call::Release { first, token } if self.is_adopted => {
                (self.is_held_by(first), Holder::Nobody, token)
            }
            Call::Release { first, token } => {
                (self.is_held_by(first) && token > self.greatest, Holder::Nobody, token)
            }
            Call::Write { first } => (self.is_held_by(first), Holder::Grant(first), first),
        };
        if may_be {
            self.holder = holder;
            self.greatest = self.greatest.max(token);
        }
        may_be
    }
}

/// A call with its times; without an answer it may have been carried out at any time since, or never.
#[derive(Debug, Clone, Copy)]
struct Timed {
    call: Call,
    asked: i64,
    answered: Option<i64>,
}

impl Timed {
    /// The grant that it makes or relies on.
    fn first(&self) -> i64 {
        match self.call {
            Call::Grant { first } | Call::Write { first } => first,
            Call::Renew { first, .. } | Call::Release { first, .. } => first,
        }
    }
}

fn is_write(timed: &Timed) -> bool {
    matches!(timed.call, Call::Write { .. })
}

/// Some order of the calls on each lease explains all answers, between any two failovers.
pub fn some_order_explains_all(
    evidence: &Evidence,
    transactions: &HashMap<i64, Transaction>,
    findings: &mut Findings,
) {
    let mut histories: BTreeMap<(i32, u32), Vec<Timed>> = BTreeMap::new();
    for transaction in transactions.values() {
        for lease in transaction.leases() {
            if !matches!(Kind::of(lease), Kind::Exclusive | Kind::Adopted) {
                continue;
            }
            for (era, timed) in calls(transaction, evidence.era) {
                histories.entry((lease, era)).or_default().push(timed);
            }
        }
    }
    for ((lease, era), mut history) in histories {
        history.sort_by_key(|timed| timed.asked);
        let is_adopted = Kind::of(lease) == Kind::Adopted;
        if let Some(calls) = unexplained(is_adopted, &history, findings) {
            findings.unexplained += 1;
            findings.violated(format!(
                "lease {lease}, era {era}: no order explains all answers: {calls:?}"
            ));
        }
    }
}

/// What a transaction has done to its lease, and in which eras.
fn calls(transaction: &Transaction, last_era: u32) -> Vec<(u32, Timed)> {
    let token = transaction.token.map(|(token, _)| token);
    let call = match (transaction.what, token, transaction.first) {
        (What::Acquire | What::AcquireAll | What::Adopt, Some(first), _) => Call::Grant { first },
        (What::Renew, Some(token), Some(first)) => Call::Renew { first, token },
        (What::Release, Some(token), Some(first)) => Call::Release { first, token },
        (What::Guarded | What::Bound, _, Some(first)) => Call::Write { first },
        _ => return Vec::new(),
    };
    let (asked, era) = (transaction.asked, transaction.era);
    let timed = |answered| Timed { call, asked, answered };
    match (transaction.acknowledged, &transaction.outcome) {
        (Some((answered, of_era)), _) if of_era == era => vec![(era, timed(Some(answered)))],
        // A grant of which nobody knows may be relied on; of a failover's other side, too. All else that is not known
        // only makes more possible.
        (Some(_), _) | (None, Some(Outcome::Unknown | Outcome::Prepared) | None)
            if matches!(call, Call::Grant { .. }) =>
        {
            (era..=last_era).map(|era| (era, timed(None))).collect()
        }
        _ => Vec::new(),
    }
}

/// The calls that no order explains, if there are any.
fn unexplained(is_adopted: bool, history: &[Timed], findings: &mut Findings) -> Option<Vec<Timed>> {
    let (pending, answered): (Vec<Timed>, Vec<Timed>) =
        history.iter().partition(|timed| timed.answered.is_none());
    let mut lease = Lease { holder: Holder::Unknown, greatest: 0, is_adopted };
    for calls in overlapping(&answered) {
        let until = calls.iter().filter_map(|timed| timed.answered).max().unwrap_or_default();
        let perhaps = pending
            .iter()
            .filter(|timed| timed.asked <= until)
            .filter(|timed| matches!(timed.call, Call::Grant { first } if first > lease.greatest));
        let all: Vec<Timed> = calls.iter().chain(perhaps).copied().collect();
        let mut too_many = false;
        for some in few_grants(all) {
            let (writes, others): (Vec<Timed>, Vec<Timed>) = some.into_iter().partition(is_write);
            if others.len() > MOST {
                too_many = true;
                continue;
            }
            let mut parts = with_writes(&others, &writes).into_iter();
            if let Some(part) = parts.find(|part| !is_explained(&lease, part)) {
                return Some(part);
            }
        }
        *(if too_many { &mut findings.too_many } else { &mut findings.explained }) += calls.len();
        lease = after(lease, calls);
    }
    None
}

/// All of the calls; or those of each two grants, where all are too many. An order that explains all explains these, too: of
/// two grants the latest one counts, whatever others there are.
fn few_grants(all: Vec<Timed>) -> Vec<Vec<Timed>> {
    if all.iter().filter(|timed| !is_write(timed)).count() <= MOST {
        return vec![all];
    }
    let firsts: Vec<i64> =
        all.iter().map(Timed::first).collect::<BTreeSet<_>>().into_iter().collect();
    let pairs =
        firsts.iter().enumerate().flat_map(|(n, a)| firsts[..n].iter().map(move |b| [*a, *b]));
    let of = |pair: [i64; 2]| all.iter().filter(|t| pair.contains(&t.first())).copied().collect();
    pairs.map(of).collect()
}

/// The other calls, with each write and with each two of different grants. That is enough: a write leaves the lease as it
/// is, so it only says which grant came before its answer, and which one after it was asked for.
fn with_writes(others: &[Timed], writes: &[Timed]) -> Vec<Vec<Timed>> {
    let with = |some: &[Timed]| [others, some].concat();
    let mut parts: Vec<Vec<Timed>> = vec![others.to_vec()];
    for (n, one) in writes.iter().enumerate() {
        parts.push(with(&[*one]));
        let different = writes[..n].iter().filter(|other| other.call != one.call);
        parts.extend(different.map(|other| with(&[*other, *one])));
    }
    parts
}

/// The history in pieces, between which no call was under way.
fn overlapping(history: &[Timed]) -> Vec<&[Timed]> {
    let mut until = i64::MIN;
    let mut starts: Vec<usize> = Vec::new();
    for (n, timed) in history.iter().enumerate() {
        if timed.asked > until {
            starts.push(n);
        }
        until = until.max(timed.answered.unwrap_or(i64::MAX));
    }
    let ends = starts.iter().skip(1).copied().chain([history.len()]);
    starts.iter().zip(ends).map(|(start, end)| &history[*start..end]).collect()
}

fn is_explained(lease: &Lease, calls: &[Timed]) -> bool {
    let mut moments: Vec<(i64, bool, usize)> = Vec::new();
    for (n, timed) in calls.iter().enumerate() {
        moments.push((timed.asked, false, n));
        moments.extend(timed.answered.map(|at| (at, true, n)));
    }
    moments.sort_unstable();
    let mut tester = LinearizabilityTester::new(lease.clone());
    for (_, is_answer, n) in moments {
        // Each call is a thread of its own, for a worker does not wait for what it has prepared.
        let told = if is_answer {
            tester.on_return(n, true).map(drop)
        } else {
            tester.on_invoke(n, calls[n].call).map(drop)
        };
        told.expect("a call is asked for once, and then answered once");
    }
    tester.is_consistent()
}

/// What is sure of the lease after these calls: the latest grant that was answered is the one that counts, unless it was
/// released, or one of which nobody knows has followed it.
fn after(before: Lease, calls: &[Timed]) -> Lease {
    let (mut latest, mut greatest) = (None, before.greatest);
    for timed in calls {
        latest = latest.max(Some(timed.first()));
        greatest = greatest.max(match timed.call {
            Call::Grant { first } | Call::Write { first } => first,
            Call::Renew { token, .. } | Call::Release { token, .. } => token,
        });
    }
    let holder = latest.map_or(before.holder, Holder::Grant);
    Lease { holder, greatest, ..before }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed(call: Call, asked: i64, answered: i64) -> Timed {
        Timed { call, asked, answered: Some(answered) }
    }

    fn is_good(history: &[Timed]) -> bool {
        unexplained(false, history, &mut Findings::default()).is_none()
    }

    #[test]
    fn calls_that_overlap_may_have_come_in_any_order() {
        let grant = |first| Call::Grant { first };
        let write = Call::Write { first: 1 };
        assert!(is_good(&[timed(grant(1), 0, 5), timed(write, 6, 20), timed(grant(2), 10, 30)]));
        assert!(is_good(&[timed(grant(2), 0, 20), timed(grant(1), 10, 30)]));
        let release = Call::Release { first: 1, token: 2 };
        assert!(is_good(&[timed(grant(1), 0, 1), timed(release, 2, 3), timed(grant(3), 4, 5)]));
    }

    #[test]
    fn what_no_order_explains_is_found() {
        let grant = |first| Call::Grant { first };
        let write = |first| Call::Write { first };
        // A write that was asked for when the next grant had been answered.
        assert!(!is_good(&[timed(grant(1), 0, 5), timed(grant(2), 6, 9), timed(write(1), 10, 20)]));
        // Two that overlap, each of which has seen the other's end.
        let both = [timed(grant(1), 0, 1), timed(write(1), 10, 40), timed(grant(2), 5, 12)];
        assert!(is_good(&both));
        assert!(!is_good(&[both[0], both[2], timed(write(2), 13, 20), timed(write(1), 21, 40)]));
        // Tokens that fall, though one call had been answered before the other was asked for.
        assert!(!is_good(&[timed(grant(2), 0, 1), timed(grant(1), 2, 3)]));
        let renew = Call::Renew { first: 1, token: 3 };
        assert!(!is_good(&[timed(grant(1), 0, 1), timed(grant(2), 2, 3), timed(renew, 4, 5)]));
    }

    #[test]
    fn a_grant_of_which_nobody_knows_may_be_there_or_not() {
        let perhaps = Timed { call: Call::Grant { first: 2 }, asked: 2, answered: None };
        let first = timed(Call::Grant { first: 1 }, 0, 1);
        let by = |first| timed(Call::Write { first }, 3, 4);
        assert!(is_good(&[first, perhaps, by(1)]) && is_good(&[first, perhaps, by(2)]));
        assert!(!is_good(&[first, by(2)]));
        assert!(!is_good(&[first, perhaps, by(2), timed(Call::Write { first: 1 }, 5, 6)]));
    }

    #[test]
    fn many_writes_at_once_are_judged_two_by_two() {
        let write = |first| timed(Call::Write { first }, 10, 90);
        let grants =
            [timed(Call::Grant { first: 1 }, 0, 5), timed(Call::Grant { first: 2 }, 8, 95)];
        let mut history: Vec<Timed> = grants.into_iter().chain((0..40).map(|_| write(1))).collect();
        assert!(is_good(&history));
        history.push(timed(Call::Write { first: 2 }, 20, 30));
        assert!(is_good(&history));
        history.push(timed(Call::Write { first: 1 }, 31, 40));
        assert!(!is_good(&history));
    }

    #[test]
    fn many_grants_at_once_are_judged_two_by_two() {
        // One transaction is open all the while.
        let open = timed(Call::Write { first: 1 }, 5, 1_000);
        let grants = (1..=40).map(|first| timed(Call::Grant { first }, first * 10, first * 10 + 5));
        let mut history: Vec<Timed> = [open].into_iter().chain(grants).collect();
        history.sort_by_key(|timed| timed.asked);
        let mut findings = Findings::default();
        assert!(unexplained(false, &history, &mut findings).is_none());
        assert_eq!((findings.explained, findings.too_many), (41, 0));
        history.push(timed(Call::Write { first: 39 }, 410, 420));
        assert!(!is_good(&history));
    }

    #[test]
    fn a_number_that_was_adopted_may_be_adopted_again() {
        let again = [timed(Call::Grant { first: 1 }, 0, 1), timed(Call::Grant { first: 1 }, 2, 3)];
        let adopted = unexplained(true, &again, &mut Findings::default());
        assert!(adopted.is_none() && !is_good(&again));
    }
}
