//! Judges a run by its evidence.

use super::evidence::Evidence;
use super::nemesis::Fault;
use super::record::{Event, Outcome, What, TTL_MS};
use std::collections::{HashMap, HashSet};

/// What came of it.
#[derive(Debug, Clone, Default)]
pub struct Verdict {
    /// Promises that were broken.
    pub violations: Vec<String>,
    /// Acknowledged transactions that an asynchronous failover has lost.
    pub lost_in_failover: usize,
    /// Grants made and acknowledged.
    pub grants: usize,
    /// Writes made and acknowledged.
    pub writes: usize,
    /// Writes refused because their token was stale or did not speak.
    pub refused: usize,
    /// Transactions whose outcome nobody knows.
    pub unknown: usize,
    /// Tokens that some client has seen.
    pub tokens: usize,
}

/// A transaction, put together from its records.
#[derive(Debug, Clone)]
struct Transaction {
    worker: u32,
    era: u32,
    what: What,
    lease: i32,
    first: Option<i64>,
    asked: i64,
    ended: i64,
    outcome: Option<Outcome>,
}

/// Judges.
pub fn judge(evidence: &Evidence) -> Verdict {
    let transactions = transactions(evidence);
    let mut verdict = Verdict::default();
    count(&transactions, &mut verdict);
    tokens_rise(evidence, &mut verdict);
    grants_in_order(evidence, &mut verdict);
    writes_in_order(evidence, &mut verdict);
    nothing_lost(evidence, &transactions, &mut verdict);
    one_holder(evidence, &transactions, &mut verdict);
    verdict
}

fn transactions(evidence: &Evidence) -> HashMap<i64, Transaction> {
    let mut all = HashMap::new();
    for record in &evidence.records {
        match &record.event {
            Event::Ask { what, lease, first } => {
                let (worker, era, asked) = (record.worker, record.era, record.at);
                let (what, lease, first) = (*what, *lease, *first);
                let (ended, outcome) = (i64::MAX, None);
                let new = Transaction { worker, era, what, lease, first, asked, ended, outcome };
                all.insert(record.id, new);
            }
            Event::End(outcome) => {
                if let Some(transaction) = all.get_mut(&record.id) {
                    transaction.ended = record.at;
                    transaction.outcome = Some(outcome.clone());
                }
            }
            Event::Token(_) => {}
        }
    }
    all
}

fn is_write(what: What) -> bool {
    matches!(what, What::Guarded | What::Bound | What::Free)
}

fn count(transactions: &HashMap<i64, Transaction>, verdict: &mut Verdict) {
    for transaction in transactions.values() {
        match &transaction.outcome {
            Some(Outcome::Committed) if transaction.what == What::Acquire => verdict.grants += 1,
            Some(Outcome::Committed) if is_write(transaction.what) => verdict.writes += 1,
            Some(Outcome::Refused(state)) if state == "PF001" || state == "PF004" => {
                verdict.refused += 1;
            }
            Some(Outcome::Unknown) | None => verdict.unknown += 1,
            _ => {}
        }
    }
}

/// No token is seen twice, and each is greater than all that anyone had seen before it was asked for.
fn tokens_rise(evidence: &Evidence, verdict: &mut Verdict) {
    let mut seen = HashMap::new();
    let mut greatest = 0;
    let mut greatest_when_asked = HashMap::new();
    for record in &evidence.records {
        match record.event {
            Event::Ask { .. } => {
                greatest_when_asked.insert(record.id, greatest);
            }
            Event::Token(token) => {
                verdict.tokens += 1;
                if let Some(earlier) = seen.insert(token, record.id) {
                    // Releasing again within a transaction gives the same one; nobody here does.
                    let (a, b) = (earlier, record.id);
                    verdict.violations.push(format!("token {token} was seen twice: {a:x}, {b:x}"));
                }
                let before = greatest_when_asked.get(&record.id).copied().unwrap_or(0);
                if token <= before {
                    verdict.violations.push(format!(
                        "token {token} was drawn after {before} had been seen ({:x})",
                        record.id
                    ));
                }
                greatest = greatest.max(token);
            }
            Event::End(_) => {}
        }
    }
}

/// The tokens of a lease rise in the order in which it was locked, and each grant lasts its time.
fn grants_in_order(evidence: &Evidence, verdict: &mut Verdict) {
    for pair in evidence.grants.windows(2) {
        let [a, b] = pair else { continue };
        if a.lease == b.lease && (b.n != a.n + 1 || b.token <= a.token) {
            verdict.violations.push(format!("lease {}: after {a:?} came {b:?}", a.lease));
        }
    }
    let mut asked = HashMap::new();
    let mut ended = HashMap::new();
    for record in &evidence.records {
        match record.event {
            Event::Ask { .. } => drop(asked.insert(record.id, record.at)),
            Event::End(_) => drop(ended.insert(record.id, record.at)),
            Event::Token(_) => {}
        }
    }
    for grant in &evidence.grants {
        let (Some(id), Some(lasts_us)) = (grant.id, grant.lasts_us) else { continue };
        let from = asked.get(&id).copied().unwrap_or(0);
        let to = ended.get(&id).copied().unwrap_or(i64::MAX);
        if lasts_us < TTL_MS * 1000 && !stepped(evidence, from, to) {
            verdict.violations.push(format!("a grant lasted {lasts_us} us only: {grant:?}"));
        }
    }
}

/// Whether the server's clock was stepped between these times.
fn stepped(evidence: &Evidence, from: i64, to: i64) -> bool {
    let steps = |fault| matches!(fault, Fault::StepClock | Fault::FailOver);
    // A process that was frozen as it read the clock uses what it has read later.
    evidence.faults.iter().any(|f| steps(f.fault) && f.ended + 2_000_000 >= from && f.at <= to)
}

/// Each version of a row was made once; tokens rise with them; a bound row is written only under the grant
/// that is current; what is stored is what was written last.
fn writes_in_order(evidence: &Evidence, verdict: &mut Verdict) {
    for row in &evidence.rows {
        let mine =
            |w: &&super::evidence::Write| (&w.relation, w.lease) == (&row.relation, row.lease);
        let writes: Vec<_> = evidence.writes.iter().filter(mine).collect();
        let place = format!("{} {}", row.relation, row.lease);
        for (i, write) in writes.iter().enumerate() {
            if write.version != i as i64 + 1 {
                verdict.violations.push(format!(
                    "{place}: a write was overwritten unread, or lost: {write:?} is number {}",
                    i + 1
                ));
                break;
            }
        }
        for pair in writes.windows(2) {
            let (a, b) = (pair[0].token, pair[1].token);
            if b < a || row.relation == "free" && b == a {
                verdict.violations.push(format!("{place}: {:?} landed upon {a}", pair[1]));
            }
        }
        if row.relation == "bound" {
            for write in writes.iter().filter(|w| w.current != Some(w.first)) {
                verdict.violations.push(format!("{place}: written by a replaced grant: {write:?}"));
            }
        }
        let last = writes.last().map(|w| (w.version, Some(w.token)));
        if last.unwrap_or((0, None)) != (row.version, row.fence) {
            verdict.violations.push(format!("{place}: {row:?} is not what was written: {last:?}"));
        }
    }
}

/// What was acknowledged is there, but for the end of an era that a failover cut off; what was not
/// committed is not.
fn nothing_lost(
    evidence: &Evidence,
    transactions: &HashMap<i64, Transaction>,
    verdict: &mut Verdict,
) {
    let survivors: HashSet<i64> = evidence.survivors();
    // The latest time, by era, at which a transaction that survives was begun.
    let mut latest: HashMap<u32, i64> = HashMap::new();
    for id in &survivors {
        if let Some(transaction) = transactions.get(id) {
            let asked = latest.entry(transaction.era).or_default();
            *asked = (*asked).max(transaction.asked);
        }
    }
    for (id, transaction) in transactions {
        if transaction.what == What::Lazy {
            continue;
        }
        let survives = survivors.contains(id);
        match &transaction.outcome {
            Some(Outcome::Committed) if !survives => {
                let cut_off = latest.get(&transaction.era).is_none_or(|at| *at < transaction.ended);
                if transaction.era < evidence.era && cut_off {
                    verdict.lost_in_failover += 1;
                } else {
                    verdict.violations.push(format!("acknowledged, and lost: {transaction:?}"));
                }
            }
            Some(Outcome::Committed | Outcome::Unknown) | None => {}
            Some(_) if survives => {
                verdict.violations.push(format!("not committed, and there: {transaction:?}"));
            }
            Some(_) => {}
        }
    }
}

/// The time in which a worker may be sure of its lease.
struct Hold {
    worker: u32,
    from: i64,
    until: i64,
}

/// Nobody is granted a lease while another may be sure of it: it counts its time from before it asked.
fn one_holder(
    evidence: &Evidence,
    transactions: &HashMap<i64, Transaction>,
    verdict: &mut Verdict,
) {
    let first_of: HashMap<i64, i64> =
        evidence.grants.iter().filter_map(|g| Some((g.id?, g.token))).collect();
    let mut by_lease: HashMap<i32, Vec<(i64, &Transaction)>> = HashMap::new();
    for (id, transaction) in transactions {
        by_lease.entry(transaction.lease).or_default().push((*id, transaction));
    }
    let breaks = |fault| matches!(fault, Fault::StepClock | Fault::FailOver);
    for (lease, all) in by_lease {
        let committed = |t: &Transaction| t.outcome == Some(Outcome::Committed);
        let granted: Vec<_> = all
            .iter()
            .filter(|(id, t)| t.what == What::Acquire && committed(t) && first_of.contains_key(id))
            .collect();
        let mut holds = Vec::new();
        for (id, acquired) in &granted {
            if stepped(evidence, acquired.asked, acquired.ended) {
                continue;
            }
            let first = first_of.get(id).copied();
            let mut until = acquired.asked + TTL_MS * 1000;
            for (_, t) in all.iter().filter(|(_, t)| t.first == first) {
                match t.what {
                    What::Renew if committed(t) => until = until.max(t.asked + TTL_MS * 1000),
                    _ => {}
                }
            }
            // Whatever the outcome, a release may have been carried out.
            let releases = all.iter().filter(|(_, t)| t.what == What::Release && t.first == first);
            let ends = releases.map(|(_, t)| t.asked).min();
            until = until.min(ends.unwrap_or(i64::MAX));
            // A next life of the worker may have reclaimed it.
            let again = all.iter().map(|(_, t)| t).filter(|t| {
                t.what == What::Acquire && t.worker == acquired.worker && t.asked > acquired.asked
            });
            until = until.min(again.map(|t| t.asked).min().unwrap_or(i64::MAX));
            for f in evidence.faults.iter().filter(|f| f.ended >= acquired.asked) {
                if breaks(f.fault) || f.lease == Some(lease) {
                    until = until.min(f.at);
                }
            }
            holds.push(Hold { worker: acquired.worker, from: acquired.ended, until });
        }
        for (_, other) in &granted {
            let hold = holds.iter().find(|hold| {
                let between = hold.from <= other.asked && other.ended <= hold.until;
                hold.worker != other.worker && between
            });
            if let Some(hold) = hold {
                verdict.violations.push(format!(
                    "lease {lease} was granted to worker {} at {}, while worker {} had it until {}",
                    other.worker, other.asked, hold.worker, hold.until
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::evidence::{Grant, Row, Write};
    use super::super::nemesis::Done;
    use super::super::record::Record;
    use super::*;

    const SECOND: i64 = 1_000_000;

    /// A transaction of the worker `id`, from `asked` to `ended`.
    fn records(id: i64, what: What, asked: i64, ended: i64, token: i64) -> Vec<Record> {
        let record = |at, event| Record { at, worker: id as u32, era: 0, id, event };
        vec![
            record(asked, Event::Ask { what, lease: 0, first: None }),
            record(ended, Event::Token(token)),
            record(ended, Event::End(Outcome::Committed)),
        ]
    }

    fn grant(n: i64, token: i64, id: i64) -> Grant {
        Grant { lease: 0, n, token, id: Some(id), lasts_us: Some(SECOND) }
    }

    fn write(version: i64, token: i64, id: i64) -> Write {
        let relation = "bound".to_owned();
        Write { relation, lease: 0, version, token, first: token, id, current: Some(token) }
    }

    /// Two grants, one after the other, and a write under each.
    fn good() -> Evidence {
        let mut evidence = Evidence {
            records: [
                records(1, What::Acquire, 0, 10, 1),
                records(2, What::Acquire, SECOND, SECOND + 20, 2),
            ]
            .concat(),
            grants: vec![grant(1, 1, 1), grant(2, 2, 2)],
            writes: vec![write(1, 1, 3), write(2, 2, 4)],
            ..Evidence::default()
        };
        let relation = "bound".to_owned();
        evidence.rows.push(Row { relation, lease: 0, version: 2, fence: Some(2) });
        evidence
    }

    fn finds(words: &str, spoil: fn(&mut Evidence)) {
        let mut evidence = good();
        spoil(&mut evidence);
        evidence.records.sort_by_key(|record| record.at);
        let violations = judge(&evidence).violations;
        assert!(violations.iter().any(|v| v.contains(words)), "{words}: {violations:?}");
    }

    #[test]
    fn a_good_run_is_good() {
        assert_eq!(judge(&good()).violations, Vec::<String>::new());
    }

    #[test]
    fn each_kind_of_harm_is_found() {
        finds("seen twice", |e| e.records[4].event = Event::Token(1));
        finds("had been seen", |e| e.records[1].event = Event::Token(9));
        finds("came", |e| e.grants[1].token = 1);
        finds("lasted", |e| e.grants[1].lasts_us = Some(SECOND - 1));
        finds("overwritten", |e| e.writes[1].version = 1);
        finds("landed upon", |e| e.writes[0].token = 3);
        finds("replaced grant", |e| e.writes[0].current = Some(2));
        finds("not what was written", |e| e.rows[0].fence = Some(1));
        finds("acknowledged, and lost", |e| e.grants.truncate(1));
        finds("not committed, and there", |e| {
            e.records[5].event = Event::End(Outcome::RolledBack);
        });
        finds("while worker", too_soon);
    }

    /// Within the time of the first grant, the second one.
    fn too_soon(evidence: &mut Evidence) {
        for record in &mut evidence.records[3..] {
            record.at -= SECOND - 100;
        }
    }

    #[test]
    fn a_grant_may_end_before_its_time_by_what_was_done_to_it() {
        let fault = |fault, lease| {
            let mut evidence = good();
            too_soon(&mut evidence);
            // It began before the grant, and had its effect after it.
            evidence.faults.push(Done { fault, at: -5, ended: 50, lease });
            judge(&evidence).violations.len()
        };
        assert_eq!(fault(Fault::Revoke, Some(0)), 0);
        assert_eq!(fault(Fault::Revoke, Some(1)), 1);
        assert_eq!(fault(Fault::StepClock, None), 0);
        assert_eq!(fault(Fault::FreezeBackend, None), 1);
        // Its next life has reclaimed it, and released that.
        let mut evidence = good();
        too_soon(&mut evidence);
        evidence.records.extend(records(3, What::Acquire, 20, 30, 2));
        evidence.records.extend(records(4, What::Release, 40, 50, 3));
        for record in &mut evidence.records[6..] {
            record.worker = 1;
        }
        evidence.records[9].event = Event::Ask { what: What::Release, lease: 0, first: Some(2) };
        evidence.grants.insert(1, grant(2, 2, 3));
        evidence.grants[2] = grant(3, 3, 2);
        evidence.records[4].event = Event::Token(4);
        let violations = judge(&evidence).violations;
        assert!(!violations.iter().any(|v| v.contains("while worker")), "{violations:?}");
    }

    #[test]
    fn a_failover_may_lose_the_end_of_its_era_and_nothing_else() {
        let mut evidence = good();
        evidence.era = 1;
        evidence.grants.pop();
        let verdict = judge(&evidence);
        assert_eq!((verdict.lost_in_failover, verdict.violations.len()), (1, 0));
        let mut evidence = good();
        evidence.era = 1;
        evidence.grants.remove(0);
        assert!(judge(&evidence).violations[0].contains("lost"));
    }
}
