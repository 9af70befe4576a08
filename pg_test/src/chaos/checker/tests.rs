//! Each rule of the checker finds its violations, and nothing else.

use super::{
    CLAIMS, Findings, LATE_WRITES, LOST_IN_FAILOVER, PASSED_ON, TAKE_OVERS, TOKENS, check,
};
use crate::chaos::history::{Change, Grant, History, Operation, Row, Run, Write};
use crate::chaos::nemesis::{Disturbance, Disturbed};
use crate::chaos::record::{Event, Outcome, Purpose, Record};
use crate::chaos::rows::Statement;

const SECOND: i64 = 1_000_000;

fn request(purpose: Purpose, lease: i32, first: Option<i64>) -> Event {
    Event::Request { purpose, lease, also: None, first, session: false }
}

/// The records of a transaction of the worker `id`, from `requested` to `ended`.
fn records(id: i64, purpose: Purpose, requested: i64, ended: i64, token: i64) -> Vec<Record> {
    let record = |at, event| Record { at, worker: id as u32, era: 0, id, event };
    vec![
        record(requested, request(purpose, 0, None)),
        record(ended, Event::Token(token)),
        record(ended, Event::End(Outcome::Committed)),
    ]
}

fn grant(n: i64, token: i64, id: i64) -> Grant {
    Grant { lease: 0, n, token, id: Some(id), lasts_us: Some(SECOND) }
}

fn write(version: i64, token: i64, id: i64) -> Write {
    let relation = "bound".to_owned();
    Write { relation, row: 0, lease: 0, version, token, first: token, id, current: Some(token) }
}

/// Two grants, one after the other, with a write under each.
fn good() -> History {
    let mut history = History {
        records: [
            records(1, Purpose::Acquire, 0, 10, 1),
            records(2, Purpose::Acquire, SECOND, SECOND + 20, 2),
        ]
        .concat(),
        grants: vec![grant(1, 1, 1), grant(2, 2, 2)],
        writes: vec![write(1, 1, 3), write(2, 2, 4)],
        ..History::default()
    };
    let relation = "bound".to_owned();
    history.rows.push(Row { relation, row: 0, version: 2, fence: Some(2) });
    history
}

fn finds(words: &str, spoil: fn(&mut History)) {
    let mut history = good();
    spoil(&mut history);
    history.records.sort_by_key(|record| record.at);
    let violations = check(&history).violations;
    assert!(violations.iter().any(|v| v.contains(words)), "{words}: {violations:?}");
}

#[test]
fn a_good_run_is_good() {
    assert_eq!(check(&good()).violations, Vec::<String>::new());
}

/// A deadlock of two transactions, one of which waits for a lease.
fn deadlock(other: &str) -> Event {
    Event::End(Outcome::Refused(format!(
        "40P01: Process 1 waits for RowExclusiveLock on advisory lock [5,1,3,20550]; blocked by process 2.\n\
         Process 2 waits for ShareLock on {other}; blocked by process 1."
    )))
}

#[test]
fn a_deadlock_over_a_row_is_no_harm() {
    let mut history = good();
    history.records[5].event = deadlock("transaction 7");
    let violations = check(&history).violations;
    assert!(!violations.iter().any(|what| what.contains("was refused")), "{violations:?}");
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
    finds("while others had it", too_soon);
    finds("XX000", |e| e.records[5].event = Event::End(Outcome::Refused("XX000".to_owned())));
    finds("advisory", |e| e.records[5].event = deadlock("advisory lock [5,1,2,20550]"));
    finds("missed writes", |e| e.upkeep.findings.push("a trigger missed writes".to_owned()));
    finds("signal 11", |e| e.crashes.push("terminated by signal 11".to_owned()));
}

/// Makes the second grant within the time of the first.
fn too_soon(history: &mut History) {
    for record in &mut history.records[3..] {
        record.at -= SECOND - 100;
    }
}

#[test]
fn a_grant_may_end_before_its_time_by_what_was_done_to_it() {
    let disturbance = |disturbance, lease| {
        let mut history = good();
        too_soon(&mut history);
        // The disturbance began before the grant, and its effect came after it.
        history.disturbances.push(Disturbed { kind: disturbance, at: -5, ended: 50, lease });
        !check(&history).violations.is_empty()
    };
    assert!(!disturbance(Disturbance::Revoke, Some(0)));
    assert!(disturbance(Disturbance::Revoke, Some(1)));
    assert!(!disturbance(Disturbance::StepClock, None));
    assert!(disturbance(Disturbance::FreezeBackend, None));
    // The worker's next incarnation has reclaimed the lease and released it.
    let mut history = good();
    too_soon(&mut history);
    history.records.extend(records(3, Purpose::Acquire, 20, 30, 2));
    history.records.extend(records(4, Purpose::Release, 40, 50, 3));
    for record in &mut history.records[6..] {
        record.worker = 1;
    }
    history.records[9].event = request(Purpose::Release, 0, Some(2));
    history.grants.insert(1, grant(2, 2, 3));
    history.grants[2] = grant(3, 3, 2);
    history.records[4].event = Event::Token(4);
    let violations = check(&history).violations;
    assert!(!violations.iter().any(|v| v.contains("had it")), "{violations:?}");
}

/// A new epoch, and then a write to a bound table under the second grant.
fn write_in_a_new_epoch(history: &mut History) {
    let (at, lease) = (2 * SECOND, None);
    history.disturbances.push(Disturbed { kind: Disturbance::NewEpoch, at, ended: at + 10, lease });
    let write =
        [request(Purpose::Bound, 0, Some(2)), Event::Guarded, Event::End(Outcome::Committed)];
    let record = |(n, event)| Record { at: 3 * SECOND + n, worker: 9, era: 0, id: 9, event };
    history.records.extend((0..).zip(write).map(record));
}

#[test]
fn a_new_epoch_invalidates_what_was_not_renewed() {
    finds("made its token invalid", write_in_a_new_epoch);
    let mut renewed = good();
    write_in_a_new_epoch(&mut renewed);
    let mut renewal = records(8, Purpose::Renew, 2 * SECOND + 20, 2 * SECOND + 30, 7);
    renewal[0].event = request(Purpose::Renew, 0, Some(2));
    renewed.records.extend(renewal);
    renewed.records.sort_by_key(|record| record.at);
    let violations = check(&renewed).violations;
    assert!(!violations.iter().any(|v| v.contains("its token invalid")), "{violations:?}");
}

#[test]
fn a_failover_may_lose_the_end_of_its_era_and_nothing_else() {
    let mut history = good();
    history.era = 1;
    history.grants.pop();
    let findings = check(&history);
    assert_eq!((findings.number(LOST_IN_FAILOVER), findings.violations.len()), (1, 0));
    let mut history = good();
    history.era = 1;
    history.grants.remove(0);
    assert!(check(&history).violations[0].contains("lost"));
}

/// The records of a transaction of the worker `id`.
fn records_of(id: i64, events: Vec<(i64, Event)>) -> Vec<Record> {
    let record = |(at, event)| Record { at, worker: id as u32, era: 0, id, event };
    events.into_iter().map(record).collect()
}

/// The worker `id` acquires a grant with the token `id`, from `requested` to `requested + 10`.
fn acquired(id: i64, purpose: Purpose, lease: i32, requested: i64) -> Vec<Record> {
    let end = Event::End(Outcome::Committed);
    records_of(
        id,
        vec![
            (requested, request(purpose, lease, None)),
            (requested + 9, Event::Token(id)),
            (requested + 10, end),
        ],
    )
}

#[test]
fn nothing_is_accepted_of_a_grant_that_is_over() {
    // By the grant with that first token, after that time; the other checks have other reasons to pass.
    let later = |records: &mut Vec<Record>, id, purpose, first, requested| {
        let end = Event::End(Outcome::Committed);
        let seen = if purpose == Purpose::Bound { Event::Guarded } else { Event::Token(id) };
        let request = request(purpose, 0, Some(first));
        records.extend(records_of(
            id,
            vec![(requested, request), (requested + 1, seen), (requested + 2, end)],
        ));
    };
    let found = |records: &[Record], crash: Option<i64>| {
        let kind = Disturbance::KillServer;
        let crash = crash.map(|at| Disturbed { kind, at, ended: at + 1, lease: None });
        let disturbances = crash.into_iter().collect();
        let violations =
            check(&History { records: records.to_vec(), disturbances, ..History::default() });
        violations.violations.iter().filter(|v| v.contains("accepted after")).count()
    };
    let two = good().records;
    for purpose in [Purpose::Renew, Purpose::Release, Purpose::Bound] {
        for (first, accepted) in [(1, 1), (2, 0)] {
            let mut records = two.clone();
            later(&mut records, 5, purpose, first, 3 * SECOND);
            assert_eq!(found(&records, None), accepted, "{purpose:?} by {first}");
        }
        let mut records = two.clone();
        later(&mut records, 4, Purpose::Release, 2, 2 * SECOND);
        later(&mut records, 5, purpose, 2, 3 * SECOND);
        assert_eq!(found(&records, None), 1, "{purpose:?} after a release");
        // A release does not wait for the disk.
        assert_eq!(found(&records, Some(2 * SECOND + 100)), 0, "{purpose:?} after a crash");
        for record in &mut records[9..] {
            record.era = 1;
        }
        assert_eq!(found(&records, None), 0, "{purpose:?} after a failover");
    }
}

/// A transaction guards the lease 0 under the grant `first` for three seconds.
fn guarded(id: i64, first: i64) -> Vec<(i64, Event)> {
    vec![
        (20, request(Purpose::Guarded, 0, Some(first))),
        (30, Event::Guarded),
        (3 * SECOND, Event::Commit),
        (3 * SECOND + id, Event::End(Outcome::Committed)),
    ]
}

/// The worker `id` adopts the number `id` of the lease 300, and guards it for three seconds.
fn adopted(id: i64, requested: i64) -> Vec<Record> {
    let mut records = acquired(id, Purpose::Adopt, 300, requested);
    records[1].event = Event::Adopted(id);
    records
}

fn guarded_adopted(id: i64, first: i64) -> Vec<Record> {
    let mut events = guarded(id, first);
    events[0].1 = request(Purpose::Guarded, 300, Some(first));
    records_of(id, events)
}

#[test]
fn adopted_numbers_rise_and_are_no_tokens() {
    let findings = |numbers: [(i64, i64); 3]| {
        let grant = |(n, token)| Grant { lease: 300, lasts_us: None, ..grant(n, token, 1) };
        let grants = numbers.map(grant).to_vec();
        let records = [adopted(1, 0), adopted(1, 20)].concat();
        check(&History { grants, records, ..History::default() })
    };
    // Adopted already, and then by two others.
    assert_eq!(findings([(0, 5), (1, 5), (2, 7)]).violations, Vec::<String>::new());
    assert!(findings([(0, 5), (1, 7), (2, 5)]).violations[0].contains("came"));
    assert_eq!(findings([(0, 5), (1, 5), (2, 7)]).number(TOKENS), 0);
}

/// Prepared after one second, and finished by another session after three.
fn prepared(id: i64, first: i64, outcome: Outcome) -> Vec<Record> {
    let commit = outcome == Outcome::Committed;
    let mut events = guarded(id, first);
    events.truncate(2);
    events.push((SECOND, Event::Prepare));
    events.push((SECOND + 10, Event::Prepared));
    events.push((SECOND + 20, Event::End(Outcome::Prepared)));
    events.push((3 * SECOND, Event::Finish { commit }));
    events.push((3 * SECOND + 10, Event::Finished(outcome)));
    records_of(id, events)
}

#[test]
fn no_more_have_a_lease_at_once_than_may() {
    let acquire = |id, requested| acquired(id, Purpose::Acquire, 0, requested);
    let three = |kinds: [Purpose; 3]| -> Vec<_> {
        let grant = |(i, purpose)| acquired(i as i64 + 1, purpose, 100, i as i64 * 20);
        kinds.into_iter().enumerate().map(grant).collect()
    };
    let of_slots = |lease, number: i64| -> Vec<_> {
        (1..=number).map(|id| acquired(id, Purpose::Acquire, lease, id * 20)).collect()
    };
    let mut both = vec![acquire(1, 0), acquired(2, Purpose::Acquire, 1, 20)];
    let of_two_leases = both.clone();
    let purpose = Purpose::AcquireAll;
    both[1][0].event =
        Event::Request { purpose, lease: 1, also: Some(0), first: None, session: false };
    let guards = |guard, requested| vec![acquire(1, 0), guard, acquire(2, requested)];
    let ends = |end: Outcome| {
        let mut events = guarded(11, 1);
        events[3].1 = Event::End(end);
        events
    };
    let refused = || ends(Outcome::Refused("PF004".to_owned()));
    let never_sent = refused().into_iter().filter(|(_, event)| *event != Event::Commit).collect();
    let adopts = |requested| vec![adopted(1, 0), guarded_adopted(11, 1), adopted(2, requested)];
    let fellow = vec![adopted(1, 0), guarded_adopted(11, 1), guarded_adopted(12, 1)];
    let other = vec![adopted(1, 0), adopted(2, 5), guarded_adopted(11, 1), guarded_adopted(12, 2)];
    let late_write = |sent| {
        let committed = Event::End(Outcome::Committed);
        let request = (50, request(Purpose::Bound, 300, Some(33)));
        records_of(
            11,
            vec![request, (60, Event::Guarded), (sent, Event::Commit), (sent + 1, committed)],
        )
    };
    let prepares = |outcome, requested| guards(prepared(11, 1, outcome), requested);
    let (none, at, ended) = (Vec::new, 2 * SECOND - 100, 2 * SECOND - 50);
    let disturbed = |kind| Disturbed { kind, at, ended, lease: Some(0) };
    let by_force = [Disturbance::Revoke, Disturbance::StepClock].map(disturbed).to_vec();
    let failover = || vec![disturbed(Disturbance::FailOver)];
    for (what, histories, disturbances, is_found) in [
        ("three readers", three([Purpose::Share; 3]), none(), false),
        (
            "a writer after two readers",
            three([Purpose::Share, Purpose::Share, Purpose::Acquire]),
            none(),
            true,
        ),
        (
            "a reader after a writer",
            three([Purpose::Acquire, Purpose::Share, Purpose::Renew]),
            none(),
            true,
        ),
        ("two slots", of_slots(202, 2), none(), false),
        ("three slots", of_slots(203, 3), none(), false),
        ("three of two slots", of_slots(202, 3), none(), true),
        ("four of three slots", of_slots(203, 4), none(), true),
        // By the times of the requests, neither grant was made within the other's time.
        ("two requests at once", vec![acquire(1, 0), acquire(2, 5)], none(), true),
        ("two leases", of_two_leases, none(), false),
        ("two leases at once, one of which another has", both, none(), true),
        (
            "a guard, long after its grant's time",
            guards(records_of(11, guarded(11, 1)), 2 * SECOND),
            none(),
            true,
        ),
        ("a guard that is over", guards(records_of(11, guarded(11, 1)), 4 * SECOND), none(), false),
        (
            "a guard, revoked or not",
            guards(records_of(11, guarded(11, 1)), 2 * SECOND),
            by_force,
            true,
        ),
        // The transaction was open until its commit was refused.
        (
            "a guard whose commit is refused",
            guards(records_of(11, refused()), 2 * SECOND),
            none(),
            true,
        ),
        ("one that sent no commit", guards(records_of(11, never_sent), 2 * SECOND), none(), false),
        (
            "one that may have ended before",
            guards(records_of(11, ends(Outcome::Broken)), 2 * SECOND),
            none(),
            false,
        ),
        ("an adoption over a guard", adopts(2 * SECOND), none(), true),
        // Its commit is sent when the adoption of a greater number is acknowledged.
        (
            "a write by an older number",
            vec![adopted(33, 0), adopted(34, 100), late_write(111)],
            none(),
            true,
        ),
        (
            "one that was sent before",
            vec![adopted(33, 0), adopted(34, 100), late_write(105)],
            none(),
            false,
        ),
        ("an adoption after a guard", adopts(4 * SECOND), none(), false),
        ("a fellow with the same number", fellow, none(), false),
        ("two numbers", other, none(), true),
        ("prepared", prepares(Outcome::Committed, 2 * SECOND), none(), true),
        ("prepared, to be rolled back", prepares(Outcome::RolledBack, 2 * SECOND), none(), true),
        ("prepared and committed", prepares(Outcome::Committed, 4 * SECOND), none(), false),
        ("prepared and rolled back", prepares(Outcome::RolledBack, 4 * SECOND), none(), false),
        ("prepared and lost", prepares(Outcome::Committed, 2 * SECOND), failover(), false),
        (
            "prepared, and lost all the same",
            prepares(Outcome::RolledBack, 2 * SECOND),
            failover(),
            false,
        ),
    ] {
        let mut records = histories.concat();
        records.sort_by_key(|record| record.at);
        let found = check(&History { records, disturbances, ..History::default() }).violations;
        let too_many = |what: &String| what.contains("had it") || what.contains("too many");
        assert_eq!(found.iter().any(too_many), is_found, "{what}: {found:?}");
    }
}

/// The checker's verdict on a prepared write, with or without its trace.
fn of_prepared(records: Vec<Record>, there: bool, era: u32) -> Vec<String> {
    let mut history = History { records, era, ..History::default() };
    if there {
        history.writes.push(write(1, 1, 11));
    }
    check(&history).violations
}

#[test]
fn what_is_prepared_is_there_when_it_is_committed_and_only_then() {
    let (yes, no) = (prepared(11, 1, Outcome::Committed), prepared(11, 1, Outcome::RolledBack));
    let none = Vec::<String>::new();
    assert_eq!(of_prepared(yes.clone(), true, 0), none);
    assert_eq!(of_prepared(no.clone(), false, 0), none);
    assert!(of_prepared(yes.clone(), false, 0)[0].contains("acknowledged, and lost"));
    assert!(of_prepared(no.clone(), true, 0)[0].contains("not committed, and there"));
    // The prepared transaction was not finished.
    let unfinished = yes[..5].to_vec();
    assert!(of_prepared(unfinished.clone(), false, 0)[0].contains("prepared, and gone"));
    assert!(of_prepared(unfinished.clone(), true, 0)[0].contains("not committed, and there"));
    assert_eq!(of_prepared(unfinished, false, 1), none);
    // The outcome is unknown.
    for outcome in [Some(Outcome::Unknown), None] {
        let mut vague = yes.clone();
        match outcome {
            Some(outcome) => vague[6].event = Event::Finished(outcome),
            None => vague.truncate(6),
        }
        assert_eq!(of_prepared(vague.clone(), true, 0), none);
        assert_eq!(of_prepared(vague, false, 0), none);
    }
}

#[test]
fn what_was_finished_before_a_failover_may_have_to_be_finished_again() {
    let again = |first: Outcome, second: Outcome, there| {
        let mut records = prepared(11, 1, first);
        let mut more = prepared(11, 1, second).split_off(5);
        for record in &mut more {
            (record.at, record.era) = (record.at + SECOND, 1);
        }
        records.extend(more);
        of_prepared(records, there, 1)
    };
    let none = Vec::<String>::new();
    assert_eq!(again(Outcome::Committed, Outcome::RolledBack, false), none);
    assert_eq!(again(Outcome::RolledBack, Outcome::Committed, true), none);
    assert!(again(Outcome::Committed, Outcome::RolledBack, true)[0].contains("and there"));
    assert!(again(Outcome::RolledBack, Outcome::Committed, false)[0].contains("and lost"));
}

#[test]
fn a_shared_grant_is_replaced_by_an_exclusive_one_only() {
    let findings = |current| {
        let (relation, first) = ("desk".to_owned(), 5);
        let (row, lease, version, token, id) = (10003, 100, 1, 5, 3);
        let fence = Some(token);
        let rows = vec![Row { relation: relation.clone(), row, version, fence }];
        let writes = vec![Write { relation, row, lease, version, token, first, id, current }];
        check(&History { rows, writes, ..History::default() }).violations
    };
    assert_eq!((findings(None).len(), findings(Some(4)).len()), (0, 0));
    assert!(findings(Some(6))[0].contains("replaced grant"));
}

/// Under a session lease whose end was noticed, the same worker makes this request later.
fn after_its_session(purpose: Purpose, then: Event, requested: i64) -> Findings {
    let mut first = acquired(1, Purpose::Acquire, 0, 0);
    if let Event::Request { session, .. } = &mut first[0].event {
        *session = true;
    }
    let ended = records_of(1, vec![(100, Event::Unlock), (110, Event::SessionEnded(vec![1]))]);
    let late =
        records_of(11, vec![(requested, request(purpose, 0, Some(1))), (requested + 1, then)]);
    let mut records = [first, ended, late, acquired(2, Purpose::Acquire, 0, 500)].concat();
    records.sort_by_key(|record| record.at);
    check(&History { records, ..History::default() })
}

#[test]
fn nothing_is_accepted_after_the_end_of_its_session() {
    let found = |purpose, then, requested| {
        let violations = after_its_session(purpose, then, requested).violations;
        violations.iter().any(|v| v.contains("after the end of its session"))
    };
    for purpose in [Purpose::Guarded, Purpose::Bound] {
        assert!(found(purpose, Event::Guarded, 200));
        assert!(!found(purpose, Event::Guarded, 105), "it began before");
        assert!(!found(purpose, Event::End(Outcome::Refused("PF004".to_owned())), 200));
    }
    for purpose in [Purpose::Renew, Purpose::Release] {
        assert!(found(purpose, Event::Token(3), 200));
        assert!(!found(purpose, Event::End(Outcome::Lost), 200));
    }
}

#[test]
fn a_lease_passes_on_when_its_session_has_ended() {
    let findings = after_its_session(Purpose::Renew, Event::End(Outcome::Lost), 200);
    assert_eq!(findings.number(PASSED_ON), 1, "{findings:?}");
    let mut kept =
        [acquired(1, Purpose::Acquire, 0, 0), acquired(2, Purpose::Acquire, 0, 500)].concat();
    let violated = |records: &Vec<Record>| {
        let findings = check(&History { records: records.clone(), ..History::default() });
        findings.violations.iter().any(|v| v.contains("others had it"))
    };
    assert!(violated(&kept));
    kept.extend(records_of(1, vec![(100, Event::Unlock)]));
    kept.sort_by_key(|record| record.at);
    assert!(violated(&kept), "it does not end with the session");
    if let Event::Request { session, .. } = &mut kept[0].event {
        *session = true;
    }
    assert!(!violated(&kept));
}

/// An UPDATE of a row lease: the fence before and after, and the remaining life of the claim.
fn change(
    worker: u32,
    statement: Statement,
    (was, now): (i64, i64),
    held_us: Option<i64>,
) -> Change {
    let fence = |number: i64| (number > 0).then_some(number);
    let (op, was, now) = (Operation::Update, fence(was), fence(now));
    Change { row: 1, op, was, now, held_us, worker, statement, id: 0 }
}

/// Worker 1 claims a row and renews; worker 2 takes it over, is late and finishes; worker 1 edits and deletes it.
fn row_history() -> Vec<Change> {
    use Statement::*;
    let mut changes = vec![
        change(1, Create, (0, 0), None),
        change(1, Claim, (0, 5), None),
        change(1, Renew, (5, 5), Some(20)),
        change(2, Claim, (5, 7), Some(-10)),
        change(2, Write, (7, 7), Some(-5)),
        change(2, Finish, (7, 7), Some(-9)),
        change(1, Edit, (7, 7), None),
        change(1, Drop, (7, 0), None),
    ];
    changes[0].op = Operation::Insert;
    changes[7].op = Operation::Delete;
    (1..).zip(&mut changes).for_each(|(id, change)| change.id = id);
    changes
}

fn checked_rows(changes: Vec<Change>, runs: Vec<Run>) -> Findings {
    check(&History { changes, runs, ..History::default() })
}

#[test]
fn a_good_history_of_a_row_is_good() {
    let found = checked_rows(row_history(), Vec::new());
    assert_eq!(found.violations, Vec::<String>::new());
    let numbers = [CLAIMS, TAKE_OVERS, LATE_WRITES].map(|what| found.number(what));
    assert_eq!(numbers, [2, 1, 2]);
}

#[test]
fn each_kind_of_harm_to_a_row_is_found() {
    let finds = |words: &str, spoil: fn(&mut Vec<Change>)| {
        let mut changes = row_history();
        spoil(&mut changes);
        let violations = checked_rows(changes, Vec::new()).violations;
        assert!(violations.iter().any(|v| v.contains(words)), "{words}: {violations:?}");
    };
    let held = "written while held by another";
    finds(held, |all| all[3].held_us = Some(10));
    finds(held, |all| {
        all[2].statement = Statement::Edit;
        all[2].worker = 2;
    });
    finds("by another's token", |all| all[2].worker = 2);
    finds("after somebody else", |all| {
        let edit = Change { id: 20, ..change(1, Statement::Edit, (7, 7), Some(-3)) };
        all.insert(4, edit);
    });
    finds("was given up", |all| {
        all[6].statement = Statement::Write;
        all[6].worker = 2;
    });
    finds("a holder's write has drawn", |all| all[2].now = Some(6));
    finds("drawn by no claim", |all| all[6].now = Some(8));
    finds("not greater", |all| all[3].now = Some(4));
    finds("the fence was lost", |all| all[6].now = None);
    finds("what was not there", |all| {
        all.remove(0);
    });
    finds("what was not there", |all| {
        all.remove(3);
    });
    finds("nobody has deleted it", |all| all.truncate(7));
}

#[test]
fn a_transaction_goes_on_writing_a_row_of_its_own() {
    let mut changes = row_history();
    // The worker gives the row up, and claims it again with its old token.
    changes[6] = Change { id: 6, ..change(2, Statement::Renew, (7, 9), None) };
    changes[7].was = Some(9);
    assert_eq!(checked_rows(changes.clone(), Vec::new()).violations, Vec::<String>::new());
    changes[6].id = 7;
    assert!(!checked_rows(changes, Vec::new()).violations.is_empty());
}

#[test]
fn what_a_row_has_in_the_end_was_written() {
    let mut changes = row_history();
    changes.truncate(7);
    let is_good = |fence| {
        let runs = vec![Run { row: 1, fence }];
        checked_rows(changes.clone(), runs).violations.is_empty()
    };
    assert!(is_good(Some(7)));
    assert!(!is_good(Some(8)) && !is_good(None));
    assert!(
        !checked_rows(row_history(), vec![Run { row: 1, fence: Some(7) }]).violations.is_empty()
    );
}
