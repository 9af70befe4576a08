//! Random histories of two sessions at READ COMMITTED, run on both editions. The answers must be the same, except for
//! documented differences of lite: a history ends with the first of them, which is counted.
//!
//! `PG_FENCE_TEST_TIMEOUT=3600 PG_FENCE_HISTORIES=5000 PG_FENCE_SEED=7 cargo test --test suite -- lite::histories` runs
//! that many.

use pg_test::skipped::left_out;
use pg_test::{Context, Database, Harness, Result, Session, bail, edition, ensure, harness_test};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeMap;

/// The default seed: the same histories in each run. Another seed finds new ones.
const SEED: u64 = 1;
const FEW: u64 = 150;
const STEPS: usize = 18;

fn setting(name: &str, otherwise: u64) -> Result<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name} = {text}")),
        Err(_) => Ok(otherwise),
    }
}

/// Tables with each kind of fence, with a row for each lease of each history.
const TABLES: &str = "
    CREATE TABLE bound (id text PRIMARY KEY, v int DEFAULT 0, fence bigint);
    CREATE TABLE held (LIKE bound INCLUDING ALL); CREATE TABLE free (LIKE bound INCLUDING ALL);
    CREATE TABLE kept (LIKE bound INCLUDING ALL); CREATE TABLE loose (LIKE bound INCLUDING ALL);
    SELECT fence_protect('bound', lease => '{id}'), fence_protect('held', lease => '{id}', mode => 'strict'), fence_protect('free'),
        fence_protect('kept', lease => '{id}', mode => 'managed'), fence_protect('loose', mode => 'monotonic')";
const NAMES: [&str; 5] = ["bound", "held", "free", "kept", "loose"];

/// One edition: its sessions, and the value that each token has there.
struct Player {
    sessions: [Session; 2],
    tokens: Vec<i64>,
}

impl Player {
    fn new(db: &Database) -> Result<Player> {
        db.connect()?.run(TABLES)?;
        let session = || -> Result<Session> {
            let mut session = db.connect()?;
            session.run("SET lock_timeout = '40 ms'; SET client_min_messages = error")?;
            Ok(session)
        };
        Ok(Player { sessions: [session()?, session()?], tokens: Vec::new() })
    }

    /// Runs a statement. Returns its answer, in which tokens are numbered in the order of their appearance, and the new
    /// tokens. `$n` in a statement is the n-th token.
    fn play(&mut self, who: usize, sql: &str) -> (String, Vec<i64>) {
        let mut text = sql.to_owned();
        for (n, token) in self.tokens.iter().enumerate().rev() {
            text = text.replace(&format!("${n}"), &token.to_string());
        }
        let rows = match self.sessions[who].try_rows(&text) {
            Ok(rows) => rows,
            Err(fault) => {
                // The session's locks are released after the error is sent, and before the next answer.
                let _ = self.sessions[who].try_rows("SELECT");
                return (fault.sqlstate.clone(), Vec::new());
            }
        };
        let mut new = Vec::new();
        let mut said = |value: &Option<String>| match value {
            None => "NULL".to_owned(),
            Some(text) => match text.parse::<i64>() {
                Ok(token) if token > 1_000_000 => {
                    let known = self.tokens.iter().position(|t| *t == token).or_else(|| {
                        let place = new.iter().position(|t| *t == token).unwrap_or_else(|| {
                            new.push(token);
                            new.len() - 1
                        });
                        Some(self.tokens.len() + place)
                    });
                    format!("${}", known.unwrap_or_default())
                }
                _ => text.clone(),
            },
        };
        let rows: Vec<String> = rows
            .iter()
            .map(|row| row.iter().map(&mut said).collect::<Vec<_>>().join(" "))
            .collect();
        (rows.join(", "), new)
    }
}

/// The steps of a session's open transaction that allow the editions to differ.
#[derive(Default)]
struct Open {
    is_open: bool,
    /// The leases and tokens that it has relied on.
    relied: Vec<(usize, usize)>,
    wrote: bool,
    /// True if it has drawn a token, which no other session may know yet.
    has_drawn: bool,
    pruned: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum CallKind {
    Control,
    Call,
    Acquire,
    Prune,
    /// Guards, or writes a bound row.
    Rely,
    Write,
}

struct Request {
    who: usize,
    sql: String,
    kind: CallKind,
    lease: usize,
    token: usize,
}

fn request(rng: &mut StdRng, leases: &[String; 2], tokens: usize) -> Request {
    let (who, lease) = (rng.random_range(0..2), rng.random_range(0..2));
    // Usually one of the latest tokens.
    let token = match tokens {
        0 => 0,
        n if rng.random_bool(0.8) => n - 1 - rng.random_range(0..n.min(3)),
        n => rng.random_range(0..n),
    };
    let name = &leases[lease];
    let table = NAMES[rng.random_range(0..NAMES.len())];
    let bound = ["bound", "held", "kept"].contains(&table);
    let row = format!("UPDATE {table} SET v = v + 1");
    let write = if bound { CallKind::Rely } else { CallKind::Write };
    let (sql, kind) = match rng.random_range(0..if tokens == 0 { 12 } else { 34 }) {
        0..3 => ("BEGIN".to_owned(), CallKind::Control),
        3 => (["COMMIT", "ROLLBACK"][rng.random_range(0..2)].to_owned(), CallKind::Control),
        4..8 => (format!("SELECT lease_acquire('{name}', ttl => '1 h')"), CallKind::Acquire),
        8 => (format!("SELECT lease_acquire('{name}', ttl => '1 us')"), CallKind::Acquire),
        9..11 => (
            format!("SELECT lease_acquire('{name}', 'me', '1 h', reclaim => true)"),
            CallKind::Acquire,
        ),
        11 => (format!("SELECT lease_revoke('{name}')"), CallKind::Call),
        12..15 => (format!("SELECT lease_renew('{name}', ${token})"), CallKind::Call),
        15..17 => (format!("SELECT lease_release('{name}', ${token})"), CallKind::Call),
        17 => (format!("SELECT lease_check('{name}', ${token})"), CallKind::Call),
        18 => (
            format!(
                "SELECT outcome, renewed, code FROM lease_keep('{{{name},{name}}}', '{{${token},${}}}')",
                token / 2
            ),
            CallKind::Call,
        ),
        19 => (
            format!(
                "SELECT state, holder = 'me', token, first_token, renewals FROM lease_info('{name}')"
            ),
            CallKind::Call,
        ),
        20 => ("SELECT count(*) FROM (SELECT lease_prune('0')) AS x".to_owned(), CallKind::Prune),
        21..24 => (format!("SELECT lease_guard('{name}', ${token})"), CallKind::Rely),
        24..28 => (format!("{row}, fence = ${token} WHERE id = '{name}' RETURNING fence"), write),
        28 => (format!("{row} WHERE id = '{name}' RETURNING fence"), write),
        29 => (
            format!(
                "UPDATE {table} SET fence = lease_release('{name}', ${token}) WHERE id = '{name}' RETURNING fence"
            ),
            write,
        ),
        30 => (format!("DELETE FROM {table} WHERE id = '{name}'"), write),
        31 => (
            format!(
                "INSERT INTO {table} VALUES ('{name}', 0, ${token}) ON CONFLICT (id) DO UPDATE SET v = 9, fence = excluded.fence RETURNING fence"
            ),
            write,
        ),
        32 => (format!("SET pg_fence.token = ${token}"), CallKind::Control),
        _ => ("RESET pg_fence.token".to_owned(), CallKind::Control),
    };
    Request { who, sql, kind, lease, token }
}

/// Returns why the editions may differ here, or `None` if they may not.
fn reason(request: &Request, open: &[Open; 2], answers: [&str; 2]) -> Option<&'static str> {
    let (own, other) = (&open[request.who], &open[1 - request.who]);
    let relied_here = own.relied.iter().any(|(lease, _)| *lease == request.lease);
    let tokens: std::collections::BTreeSet<usize> = own.relied.iter().map(|(_, t)| *t).collect();
    let refused = answers[1].starts_with("PF00");
    match request.kind {
        CallKind::Rely if relied_here && refused => Some("the row of the lease is asked each time"),
        CallKind::Rely | CallKind::Write if own.wrote || tokens.len() > 1 => {
            Some("beside the column a transaction has one token")
        }
        CallKind::Acquire | CallKind::Prune if !own.relied.is_empty() => {
            Some("a transaction does not exclude itself")
        }
        // It has pruned the grant that it relies on, which the next call reports.
        CallKind::Call if own.pruned && relied_here => {
            Some("a transaction does not exclude itself")
        }
        CallKind::Call if other.pruned && answers[1] == "55P03" => {
            Some("a revocation waits for an open prune")
        }
        CallKind::Call | CallKind::Prune | CallKind::Rely | CallKind::Write if other.has_drawn => {
            Some("what is not committed is not seen")
        }
        _ => None,
    }
}

/// Returns how it ended, if it ended with a difference.
fn history(
    rng: &mut StdRng,
    players: &mut [Player; 2],
    number: u64,
) -> Result<Option<&'static str>> {
    let leases = [format!("a{number}"), format!("b{number}")];
    for player in &mut *players {
        player.tokens.clear();
        for session in &mut player.sessions {
            session.run("ROLLBACK; RESET pg_fence.token; SET lock_timeout = '40 ms'")?;
        }
        for table in NAMES {
            player.sessions[0].run(&format!(
                "SET session_replication_role = replica; INSERT INTO {table} VALUES ('{}'), ('{}'); RESET session_replication_role",
                leases[0], leases[1]
            ))?;
        }
    }
    let mut open = [Open::default(), Open::default()];
    let mut log = Vec::new();
    for _ in 0..STEPS {
        let request = request(rng, &leases, players[0].tokens.len());
        let (full, new) = players[0].play(request.who, &request.sql);
        let (lite, lites) = players[1].play(request.who, &request.sql);
        log.push(format!("{}: {} -> {full} | {lite}", request.who, request.sql));
        if full != lite {
            return match reason(&request, &open, [&full, &lite]) {
                Some(reason) => Ok(Some(reason)),
                None => bail!("history {number}\n{}", log.join("\n")),
            };
        }
        let has_drawn = !new.is_empty();
        players[0].tokens.extend(new);
        players[1].tokens.extend(lites);
        let own = &mut open[request.who];
        let failed = full.len() == 5 && full.starts_with(|c: char| c == 'P' || c.is_ascii_digit());
        match request.sql.as_str() {
            "BEGIN" => own.is_open = true,
            "COMMIT" | "ROLLBACK" => *own = Open::default(),
            _ if failed || !own.is_open => {}
            _ => {
                own.has_drawn |= has_drawn;
                own.pruned |= request.kind == CallKind::Prune;
                if request.kind == CallKind::Rely {
                    own.relied.push((request.lease, request.token));
                    own.wrote |= !request.sql.starts_with("SELECT");
                }
            }
        }
    }
    Ok(None)
}

#[harness_test]
fn both_editions_answer_alike(harness: &Harness) -> Result<()> {
    if edition::is_lite() {
        return left_out("it plays the other edition, too");
    }
    let (seed, count) = (setting("PG_FENCE_SEED", SEED)?, setting("PG_FENCE_HISTORIES", FEW)?);
    let (full, lite) =
        (harness.database()?, Database::with_lite(harness.cluster().conninfo("postgres"))?);
    let mut players = [Player::new(&full)?, Player::new(&lite)?];
    let mut ended: BTreeMap<&str, u64> = BTreeMap::new();
    for number in 0..count {
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(number));
        let reason = history(&mut rng, &mut players, number).with_context(|| {
            format!("PG_FENCE_SEED={} plays it first", seed.wrapping_add(number))
        })?;
        *ended.entry(reason.unwrap_or("alike to the end")).or_default() += 1;
    }
    println!("seed {seed}: {ended:?}");
    ensure!(ended.get("alike to the end").is_some_and(|alike| alike * 4 > count), "{ended:?}");
    Ok(())
}
