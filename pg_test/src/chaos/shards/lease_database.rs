//! The lease database, to whom works on the shards: a lock service that happens to be a pg_fence.

use crate::chaos::instructions::{Activity, Instructions};
use crate::chaos::lock_service::LockService;
use crate::chaos::record::{now_us, Event, Log, Outcome, Record, What, TTL_MS};
use crate::chaos::worker::{instructions_file, Identity, DATABASE};
use crate::client::{Conninfo, Session};
use crate::fault::Fault;
use anyhow::Result;
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;

/// The lease database, as one worker uses it for all shards.
pub struct LeaseDatabase(RefCell<Client>);

struct Client {
    who: Identity,
    instructions: PathBuf,
    log: Log,
    session: Option<Session>,
    era: u32,
    count: i64,
    /// The first and the latest token of each grant that it believes in.
    granted: HashMap<i32, (i64, i64)>,
}

impl LeaseDatabase {
    /// That of the run whose lease database has its files in `who.dir`.
    pub fn new(who: Identity) -> Result<LeaseDatabase> {
        let (log, instructions) = (who.log()?, instructions_file(&who.dir));
        let (session, era, count, granted) = (None, 0, 0, HashMap::new());
        let client = Client { who, instructions, log, session, era, count, granted };
        Ok(LeaseDatabase(RefCell::new(client)))
    }

    /// Whether the instructions say to work.
    pub fn goes_on(&self) -> Result<bool> {
        let instructions = Instructions::read(&self.0.borrow().instructions)?;
        Ok(instructions.activity != Activity::Stop)
    }
}

impl LockService for LeaseDatabase {
    fn grant(&self, lease: i32) -> Result<Option<i64>> {
        let mut client = self.0.borrow_mut();
        if let Some((first, latest)) = client.granted.get(&lease).copied() {
            let renew = format!("SELECT lease_renew('job:{lease}', {latest})");
            match client.token(lease, &renew)? {
                Answer::Token(token) => {
                    client.granted.insert(lease, (first, token));
                    return Ok(Some(first));
                }
                // Whether it is renewed, nobody knows.
                Answer::Silence => return Ok(None),
                Answer::Null => drop(client.granted.remove(&lease)),
            }
        }
        let holder = format!("worker {}", client.who.worker);
        let acquire =
            format!("SELECT lease_acquire('job:{lease}', '{holder}', ttl => '{TTL_MS} ms')");
        let Answer::Token(token) = client.token(lease, &acquire)? else { return Ok(None) };
        client.granted.insert(lease, (token, token));
        Ok(Some(token))
    }

    fn release(&self, lease: i32) -> Result<()> {
        let mut client = self.0.borrow_mut();
        let Some((_, latest)) = client.granted.remove(&lease) else { return Ok(()) };
        client.token(lease, &format!("SELECT lease_release('job:{lease}', {latest})"))?;
        Ok(())
    }
}

enum Answer {
    Token(i64),
    Null,
    /// There is no server, or it went down.
    Silence,
}

impl Client {
    /// Asks for a token, and writes down which.
    fn token(&mut self, lease: i32, sql: &str) -> Result<Answer> {
        let instructions = Instructions::read(&self.instructions)?;
        if self.session.is_none() || self.era != instructions.era {
            let name = format!("worker {}", self.who.worker);
            let conninfo = Conninfo::new(instructions.port, DATABASE)
                .application(&name)
                .set("statement_timeout", "8s");
            self.session = Session::connect(&conninfo.to_string()).ok();
            self.era = instructions.era;
        }
        let Some(session) = &mut self.session else { return Ok(Answer::Silence) };
        self.count += 1;
        let (worker, era, id) = (self.who.worker, self.era, self.who.id(self.count));
        let mut write = |event| self.log.write(&Record { at: now_us(), worker, era, id, event });
        // To the judge a draw: what a grant is worth is judged where the rows are.
        let (what, also, first, session_bound) = (What::Lazy, None, None, false);
        write(Event::Ask { what, lease, also, first, session: session_bound })?;
        let answer: Result<Option<i64>, Fault> = session.try_one(sql, &[]);
        let (answer, outcome) = match answer {
            Ok(Some(token)) => {
                write(Event::Token(token))?;
                (Answer::Token(token), Outcome::Committed)
            }
            Ok(None) => (Answer::Null, Outcome::Lost),
            Err(fault) if fault.is_disconnect() => (Answer::Silence, Outcome::Unknown),
            Err(fault) => (Answer::Silence, Outcome::Refused(fault.sqlstate.clone())),
        };
        write(Event::End(outcome))?;
        if matches!(answer, Answer::Silence) {
            self.session = None;
        }
        Ok(answer)
    }
}
