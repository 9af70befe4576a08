//! Real sessions at the same lease at the same time, for many rounds. `PG_FENCE_RACE_ROUNDS` sets
//! how many; by default few enough for every day.

use crate::support::concurrency::rounds;
use pg_test::{bail, ensure, lab_test, Calls, Database, Fault, Lab, Result, Session};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Barrier, Mutex};
use std::time::Duration;

/// The result of a racer's statement.
type Answer = Result<Option<i64>, Fault>;

/// Sessions that all run a statement at the same moment, again and again.
struct Race<'a> {
    db: &'a Database,
    racers: usize,
    rounds: usize,
    /// Racer `n` runs number `n % len`; `$1` is the round's lease.
    statements: &'a [&'a str],
}

impl Race<'_> {
    /// `before` prepares a round and names its lease, `after` judges the answers, in the order of
    /// the racers. A racer that fails keeps to the rounds, lest the others wait for it.
    fn run(
        &self,
        before: impl Fn(&mut Session, usize) -> Result<String>,
        after: impl Fn(&mut Session, &str, &[Option<i64>]) -> Result<()>,
    ) -> Result<()> {
        let (start, end) = (Barrier::new(self.racers + 1), Barrier::new(self.racers + 1));
        let lease = Mutex::new(None::<String>);
        let answers = Mutex::new(BTreeMap::<usize, Answer>::new());
        let mut judge = self.db.connect()?;
        let mut sessions = Vec::new();
        for _ in 0..self.racers {
            sessions.push(self.db.connect()?);
        }
        std::thread::scope(|scope| {
            for (n, session) in sessions.iter_mut().enumerate() {
                let (start, end, lease, answers) = (&start, &end, &lease, &answers);
                let sql = self.statements[n % self.statements.len()];
                scope.spawn(move || {
                    let mut prepared = None;
                    loop {
                        start.wait();
                        let Some(name) = unpoisoned(lease).clone() else { return };
                        let answer = answer(session, &mut prepared, sql, &name);
                        unpoisoned(answers).insert(n, answer);
                        end.wait();
                    }
                });
            }
            let round = |n: usize| -> Result<()> {
                let name = before(&mut judge, n)?;
                *unpoisoned(&lease) = Some(name.clone());
                start.wait();
                end.wait();
                let answers = std::mem::take(&mut *unpoisoned(&answers));
                let answers = answers.into_values().collect::<Result<Vec<_>, Fault>>()?;
                let judged = after(&mut judge, &name, &answers);
                judged.map_err(|error| error.context(format!("round {n}: {answers:?}")))
            };
            let outcome = (0..self.rounds).try_for_each(round);
            *unpoisoned(&lease) = None;
            start.wait();
            outcome
        })
    }
}

fn unpoisoned<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn answer(
    session: &mut Session,
    prepared: &mut Option<postgres::Statement>,
    sql: &str,
    name: &str,
) -> Answer {
    let statement = match prepared {
        Some(statement) => statement.clone(),
        None => prepared.insert(session.prepare(sql)?).clone(),
    };
    Ok(session.query_one(&statement, &[&name])?.try_get(0)?)
}

/// Runs `racer` in `count` threads, each with a session and its number.
fn together<T: Send>(
    db: &Database,
    count: usize,
    racer: impl Fn(usize, &mut Session) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let mut sessions: Vec<Session> = (0..count).map(|_| db.connect()).collect::<Result<_>>()?;
    let racer = &racer;
    std::thread::scope(|scope| {
        let threads: Vec<_> = sessions
            .iter_mut()
            .enumerate()
            .map(|(n, session)| scope.spawn(move || racer(n, session)))
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a racer panicked")).collect()
    })
}

/// Exactly one answer is a token, it speaks, and it is the last one drawn: losers draw none.
fn one_winner(judge: &mut Session, name: &str, answers: &[Option<i64>]) -> Result<()> {
    let winners: Vec<i64> = answers.iter().flatten().copied().collect();
    ensure!(winners.len() == 1, "{} winners", winners.len());
    ensure!(judge.speaks(name, winners[0])?, "the winner's token does not speak");
    ensure!(judge.last_token()? == winners[0], "a loser drew a token");
    let shown: Vec<i64> =
        judge.one("SELECT coalesce(array_agg(token), '{}') FROM lease_info($1)", &[&name])?;
    ensure!(shown == winners, "the lease shows {shown:?}");
    Ok(())
}

const ACQUIRE: &str = "SELECT lease_acquire($1, ttl => '1 h')";

#[lab_test]
fn of_64_sessions_exactly_one_takes_an_expired_lease(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let race = Race { db: &db, racers: 64, rounds: rounds(250), statements: &[ACQUIRE] };
    let expired = |judge: &mut Session, _| {
        judge.token("SELECT lease_revoke('job')")?;
        judge.acquire_expired("job")?;
        Ok("job".to_owned())
    };
    race.run(expired, one_winner)
}

#[lab_test]
fn of_many_sessions_exactly_one_takes_a_new_name(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let race = Race { db: &db, racers: 32, rounds: rounds(150), statements: &[ACQUIRE] };
    race.run(|_, n| Ok(format!("job {n}")), one_winner)
}

#[lab_test]
fn of_a_holder_s_many_restarts_the_last_has_the_lease(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    // All come as the holder, so several may win, one after the other.
    let reclaim = "SELECT lease_acquire($1, 'w1', '1 h', reclaim => true)";
    let race = Race { db: &db, racers: 16, rounds: rounds(100), statements: &[reclaim] };
    let held = |judge: &mut Session, _| {
        judge.token("SELECT lease_revoke('job')")?;
        judge.granted("SELECT lease_acquire('job', 'w1', '1 h')")?;
        Ok("job".to_owned())
    };
    race.run(held, |judge, name, answers| {
        let winners: BTreeSet<i64> = answers.iter().flatten().copied().collect();
        ensure!(winners.len() == answers.iter().flatten().count(), "one token for two");
        let Some(last) = winners.last() else { bail!("nobody got the lease back") };
        for token in &winners {
            ensure!(judge.speaks(name, *token)? == (token == last), "{token}");
        }
        Ok(())
    })
}

#[lab_test]
fn a_late_release_never_ends_the_grant_that_races_it(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    db.connect()?.run("CREATE TABLE late (token bigint); INSERT INTO late VALUES (0)")?;
    let statements = [ACQUIRE, "SELECT lease_release($1, (SELECT token FROM late))"];
    let race = Race { db: &db, racers: 8, rounds: rounds(250), statements: &statements };
    let about_to_expire = |judge: &mut Session, round: usize| {
        judge.token("SELECT lease_revoke('job')")?;
        let ttl = ["1 us", "1 ms", "3 ms", "1 h"][round % 4];
        judge.run(&format!("UPDATE late SET token = lease_acquire('job', ttl => '{ttl}')"))?;
        Ok("job".to_owned())
    };
    race.run(about_to_expire, |judge, name, answers| {
        let of = |which: usize| answers.iter().skip(which).step_by(2).flatten().copied();
        let (grants, closings): (Vec<i64>, Vec<i64>) = (of(0).collect(), of(1).collect());
        ensure!(grants.len() <= 1, "a late release let a second one in");
        ensure!(closings.len() <= 1, "released twice");
        for grant in &grants {
            ensure!(closings.iter().all(|closing| closing < grant), "released after the grant");
            ensure!(judge.speaks(name, *grant)?, "ended by a late release");
        }
        Ok(())
    })
}

#[lab_test]
fn callers_that_come_too_late_do_not_keep_a_free_lease_from_others(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    db.connect()?.run("CREATE TABLE late (token bigint); INSERT INTO late VALUES (0)")?;
    let statements = [
        ACQUIRE,
        "SELECT lease_renew($1, (SELECT token FROM late))",
        "SELECT lease_release($1, (SELECT token FROM late))",
        "SELECT lease_check($1, (SELECT token FROM late))::int::bigint",
    ];
    let race = Race { db: &db, racers: 4, rounds: rounds(250), statements: &statements };
    let over = |judge: &mut Session, round: usize| {
        judge.token("SELECT lease_revoke('job')")?;
        judge.run("UPDATE late SET token = lease_acquire('job', ttl => '1 us')")?;
        judge.wait_expired("job")?;
        if round % 2 == 1 {
            // Not expired but released.
            judge.run("UPDATE late SET token = lease_acquire('job')")?;
            judge.granted("SELECT lease_release('job', token) FROM late")?;
        }
        Ok("job".to_owned())
    };
    race.run(over, |judge, name, answers| {
        let Some(token) = answers[0] else { bail!("NULL, but nobody had the lease") };
        ensure!(answers[1..] == [None, None, Some(0)] && judge.speaks(name, token)?);
        Ok(())
    })
}

#[lab_test]
fn renew_and_acquire_at_the_deadline_never_both_succeed(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let (mut holder, mut rival) = (db.connect()?, db.connect()?);
    let (mut renewed, mut taken) = (0, 0);
    for round in 0..rounds(250).max(2) {
        // Some deadlines are far off and some have passed, so that each side wins now and then.
        let ttl = ["1 h", "1 us", "3 ms", "4 ms", "5 ms"][round % 5];
        let token = holder.acquire("job", ttl)?;
        let barrier = Barrier::new(2);
        let pause = || {
            barrier.wait();
            std::thread::sleep(Duration::from_micros(rand::random_range(0..5000)));
        };
        let (renewal, grant) = std::thread::scope(|scope| {
            let renewal = scope.spawn(|| {
                pause();
                holder.token(&format!("SELECT lease_renew('job', {token}, '1 h')"))
            });
            let grant = scope.spawn(|| {
                pause();
                rival.token("SELECT lease_acquire('job', ttl => '1 h')")
            });
            (renewal.join().expect("a thread panicked"), grant.join().expect("a thread panicked"))
        });
        let (renewal, grant) = (renewal?, grant?);
        let both = format!("round {round}: renewal {renewal:?}, grant to another {grant:?}");
        ensure!(renewal.is_none() || grant.is_none(), "{both}");
        for token in renewal.iter().chain(&grant) {
            ensure!(holder.speaks("job", *token)?, "{both}");
        }
        if grant.is_some() {
            ensure!(!holder.speaks("job", token)? && holder.renew("job", token)?.is_none());
        }
        renewed += usize::from(renewal.is_some());
        taken += usize::from(grant.is_some());
        holder.token("SELECT lease_revoke('job')")?;
        holder.wait_expired("job")?;
    }
    ensure!(renewed > 0 && taken > 0, "one side never won: {renewed} renewed, {taken} taken");
    Ok(())
}

/// A grant as its holder saw it, in microseconds.
struct Seen {
    token: i64,
    since: i64,
    /// Until when it was surely there.
    until: i64,
    /// The other tokens that it was given.
    more: Vec<i64>,
}

#[lab_test]
fn in_a_storm_grants_never_overlap_and_tokens_grow_in_their_order(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let before = db.connect()?.last_token()?;
    let wanted = rounds(400);
    let granted = Mutex::new(0);
    let storm = |_, session: &mut Session| -> Result<Vec<Seen>> {
        let mut seen = Vec::new();
        loop {
            let mut granted_so_far = unpoisoned(&granted);
            if *granted_so_far >= wanted {
                return Ok(seen);
            }
            drop(granted_so_far);
            let short = rand::random_bool(0.5);
            if let Some(grant) = if short { short_grant(session)? } else { long_grant(session)? } {
                granted_so_far = unpoisoned(&granted);
                *granted_so_far += 1;
                seen.push(grant);
            }
        }
    };
    let mut grants: Vec<Seen> = together(&db, 12, storm)?.into_iter().flatten().collect();
    grants.sort_by_key(|grant| grant.token);
    for pair in grants.windows(2) {
        let (one, next) = (&pair[0], &pair[1]);
        ensure!(next.since >= one.until, "{} began before {} ended", next.token, one.token);
        let greatest = one.more.iter().max().unwrap_or(&one.token);
        ensure!(next.token > *greatest, "{} was granted after {greatest}", next.token);
    }
    let tokens: Vec<i64> =
        grants.iter().flat_map(|g| std::iter::once(g.token).chain(g.more.clone())).collect();
    let distinct: BTreeSet<i64> = tokens.iter().copied().collect();
    ensure!(distinct.len() == tokens.len(), "a token was handed out twice");
    let drawn = db.connect()?.last_token()? - before;
    ensure!(drawn == tokens.len() as i64, "a token is not accounted for");
    Ok(())
}

/// A time in the view, in microseconds, in the transaction that set it.
fn micros(session: &mut Session, column: &str) -> Result<i64> {
    session.granted(&format!(
        "SELECT (extract(epoch FROM {column}) * 1000000)::bigint FROM lease_info('job')"
    ))
}

fn acquired(session: &mut Session, ttl: &str) -> Result<Option<(Seen, i64)>> {
    session.run("BEGIN")?;
    let token = session.token(&format!("SELECT lease_acquire('job', ttl => '{ttl}')"))?;
    let Some(token) = token else {
        session.run("COMMIT")?;
        return Ok(None);
    };
    let since = micros(session, "acquired_at")?;
    let deadline = micros(session, "expires_at")?;
    session.run("COMMIT")?;
    Ok(Some((Seen { token, since, until: since, more: Vec::new() }, deadline)))
}

/// A holder that is about too late with its release.
fn short_grant(session: &mut Session) -> Result<Option<Seen>> {
    let Some((mut seen, deadline)) = acquired(session, "1 ms")? else { return Ok(None) };
    std::thread::sleep(Duration::from_micros(rand::random_range(0..2000)));
    match session.release("job", seen.token)? {
        Some(closing) => seen.more.push(closing),
        None => seen.until = deadline,
    }
    ensure!(session.renew("job", seen.token)?.is_none(), "renewed after its end");
    Ok(Some(seen))
}

/// A holder in good time: whatever others do late, its lease is its own.
fn long_grant(session: &mut Session) -> Result<Option<Seen>> {
    let Some((mut seen, _)) = acquired(session, "1 h")? else { return Ok(None) };
    let token = seen.token;
    ensure!(session.speaks("job", token)?, "{token} does not speak");
    session.run("BEGIN")?;
    let Some(renewed) = session.renew("job", token)? else { bail!("{token} was ended") };
    seen.until = micros(session, "renewed_at")?;
    session.run("COMMIT")?;
    ensure!(session.speaks("job", token)? && session.speaks("job", renewed)?, "{token} is mute");
    let Some(closing) = session.release("job", renewed)? else { bail!("{renewed} was ended") };
    seen.more.extend([renewed, closing]);
    Ok(Some(seen))
}

#[lab_test]
fn tokens_of_many_leases_are_all_different(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let each = rounds(40);
    let tokens = together(&db, 16, |n, session| -> Result<Vec<i64>> {
        let mut tokens = Vec::new();
        for round in 0..each {
            let name = format!("lease {n} {}", round % 3);
            tokens.push(session.acquire(&name, "1 h")?);
            tokens.push(session.renew(&name, tokens[tokens.len() - 1])?.expect("held"));
            tokens.push(session.release(&name, tokens[tokens.len() - 1])?.expect("held"));
        }
        Ok(tokens)
    })?;
    ensure!(tokens.iter().all(|own| own.windows(2).all(|pair| pair[0] < pair[1])));
    let distinct: BTreeSet<i64> = tokens.iter().flatten().copied().collect();
    ensure!(distinct.len() == 16 * each * 3, "a token was handed out twice");
    Ok(())
}

#[lab_test]
fn renewals_by_many_sessions_all_count(lab: &Lab) -> Result<()> {
    let db = lab.database()?;
    let each = rounds(30);
    let mut judge = db.connect()?;
    let first = judge.acquire("job", "1 h")?;
    let tokens = together(&db, 16, |_, session| -> Result<Vec<i64>> {
        (0..each).map(|_| Ok(session.renew("job", first)?.expect("held"))).collect()
    })?;
    ensure!(tokens.iter().all(|own| own.windows(2).all(|pair| pair[0] < pair[1])));
    let distinct: BTreeSet<i64> = tokens.iter().flatten().copied().collect();
    ensure!(distinct.len() == 16 * each, "a token was handed out twice");
    let counted = judge.granted("SELECT renewals FROM lease_info('job')")?;
    ensure!(counted == 16 * each as i64, "{counted} of {} renewals counted", 16 * each);
    // The latest sixteen speak, whichever session drew them.
    let latest: Vec<i64> = distinct.iter().rev().copied().collect();
    for (n, token) in latest.iter().enumerate() {
        ensure!(judge.speaks("job", *token)? == (n < 16), "number {n} from the end");
    }
    Ok(())
}
