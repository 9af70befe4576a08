//! Plays the vectors of `clients/spec/vectors`, whose format is in `clients/spec/README.md`.

use super::*;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

#[test]
fn the_vectors_hold() {
    let beside = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec/vectors");
    let files = std::env::var_os("VECTORS").map_or(beside, PathBuf::from);
    let mut count = 0;
    let mut wrong = Vec::new();
    for file in std::fs::read_dir(files).expect("the vectors are there") {
        let path = file.expect("it is listed").path();
        let text = std::fs::read_to_string(&path).expect("it is read");
        let vectors: Vec<Value> = serde_json::from_str(&text).expect("it is JSON");
        for vector in vectors {
            count += 1;
            if let Err(what) = Player::new(&vector).play(&vector) {
                wrong.push(format!("{}, {}: {what}", path.display(), vector["name"]));
            }
        }
    }
    assert!(count > 200, "only {count} vectors were found");
    assert!(wrong.is_empty(), "{} of {count}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn a_program_gives_renewals_less_time() {
    let mut states = LeaseStates::new(0, 3_000);
    let ask = Ask { names: vec!["a".to_owned()], ttl: 15_000, ..Ask::default() };
    states.step(0, 0, |states| states.acquire(1, ask.into()));
    states.step(0, 1, |states| states.sent(1));
    states.step(10, 1, |states| states.answered(1, Answer::Granted(7)));
    let effects = states.step(5_000, 0, |_| {});
    assert!(matches!(&effects[..], [Effect::Call(call)] if call.limit == 3_000));
}

/// A machine, and a leader, with the numbers of the keys that the vector names.
struct Player {
    states: LeaseStates,
    lead: LeadState,
    ids: HashMap<String, Id>,
}

impl Player {
    fn new(vector: &Value) -> Player {
        let spread = vector["jitter"].as_i64().unwrap_or(0);
        let (states, lead) = (LeaseStates::new(spread, LONGEST_CALL), LeadState::new(0, spread));
        Player { states, lead, ids: HashMap::new() }
    }

    fn play(mut self, vector: &Value) -> Result<(), String> {
        for step in list(&vector["steps"]) {
            let now = int(&step["at"]);
            let is = self.effects(now, &step["in"]);
            let expected = list(&step["out"]);
            let is_like = |(is, expected): (&Value, &Value)| is_like(is, expected);
            if is.len() != expected.len() || !is.iter().zip(expected).all(is_like) {
                let (is, expected) = (json!(is).to_string(), step["out"].to_string());
                return Err(format!("at {now}: {is:.500} instead of {expected:.500}"));
            }
            for (what, of) in ["held", "deadline", "next_beat"].map(|what| (what, &step[what])) {
                for (key, expected) in of.as_object().into_iter().flatten() {
                    let id = self.ids[key];
                    let lease = self.states.leases.get(&id);
                    let is = match what {
                        "held" => json!(self.states.remaining(now, id) > 0),
                        "deadline" => json!(lease.map(|lease| lease.deadline)),
                        _ => json!(lease.map(|lease| lease.beat_at)),
                    };
                    if is != *expected {
                        return Err(format!("at {now}: {what} of {key} is {is}, not {expected}"));
                    }
                }
            }
            let wake = json!(self.states.wake(now));
            if step.get("wake").is_some_and(|expected| *expected != wake) {
                return Err(format!("at {now}: wake is {wake}, not {}", step["wake"]));
            }
        }
        Ok(())
    }

    /// The effects of an input, as the vectors write them.
    fn effects(&mut self, now: i64, input: &Value) -> Vec<Value> {
        let (what, of) = input.as_object().expect("an input").iter().next().expect("one input");
        match what.as_str() {
            "nothing" => return Vec::new(),
            "lead" => return self.leads(now, of),
            _ => {}
        }
        let (call, mut replied) = (of["call"].as_u64().unwrap_or(0), None);
        let input = self.input(what, of, call);
        let effects = self.states.step(now, call, |states| {
            input(states);
            if what == "check" {
                replied = Some((states.effects.len(), states.over(self.ids[&text(&of["key"])])));
            }
        });
        let mut written: Vec<_> = effects.iter().map(|effect| self.written(effect)).collect();
        if let Some((at, over)) = replied {
            let reply = json!({
                "reply": of["key"], "error": over.map(|_| "LeaseLost"),
                "reason": over.map(|(reason, _)| reason.to_string()),
                "advice": over.and_then(|(_, is)| is.then_some("other role")),
            });
            written.insert(at, reply);
        }
        written
    }

    fn input(&mut self, what: &str, of: &Value, call: u64) -> Box<dyn FnOnce(&mut LeaseStates)> {
        assert!(call <= self.states.last_call, "call {call} was never sent: {of}");
        let mut id = |key: &Value| {
            let next = self.ids.len() as Id + 1;
            *self.ids.entry(text(key)).or_insert(next)
        };
        let (acquire, key) = (id(&of["id"]), id(&of["key"]));
        let keys: Vec<_> = list(&of["keys"]).iter().map(id).collect();
        match what {
            "acquire" | "keep_row" => {
                let is_row = what == "keep_row";
                let names = if is_row { vec![of["key"].clone()] } else { all(&of["names"]) };
                let table = RowTable { name: text(&of["table"]), ..RowTable::default() };
                let ask = Ask {
                    names: names.iter().map(text).collect(),
                    ttl: int(&of["ttl"]),
                    wait: int(&of["wait"]),
                    holder: text(&of["holder"]),
                    is_named: of["named"] == true,
                    reclaims: of["reclaim"] == true,
                    is_session: of["session"] == true,
                    is_shared: of["shared"] == true,
                    at_most: of["at_most"].as_i64(),
                    table: is_row.then_some(table),
                    token: int(&of["token"]),
                    ..Ask::default()
                };
                Box::new(move |states| states.acquire(acquire, ask.into()))
            }
            "give_up" => Box::new(move |states| states.give_up(acquire)),
            "release" => Box::new(move |states| states.release(key)),
            "last_transaction" => {
                let stage = match of["stage"].as_str().expect("a stage") {
                    "begins" => Stage::Begins,
                    "committed" => Stage::Committed,
                    "rolled back" => Stage::RolledBack,
                    "in doubt" => Stage::InDoubt,
                    "inner" => Stage::Inner,
                    other => panic!("there is no stage {other}"),
                };
                Box::new(move |states| states.last(&keys, stage))
            }
            "row_locked" => Box::new(move |states| states.touches(key)),
            "row_unlocked" => Box::new(move |states| states.ended(key)),
            "suspect" => Box::new(move |states| states.suspect(&keys)),
            "close" => Box::new(LeaseStates::close),
            "heartbeat_died" => Box::new(LeaseStates::died),
            "tick" | "check" => Box::new(|_| {}),
            "sent" => Box::new(move |states| states.sent(call)),
            "answer" => {
                let answer = self.answer(call, of);
                Box::new(move |states| states.answered(call, answer))
            }
            "failed" => {
                let (code, is_broken) = (text(&of["code"]), of["broken"] == true);
                Box::new(move |states| states.failed(call, &code, is_broken))
            }
            "disconnected" => {
                let on = of["connection"].as_u64().expect("a connection");
                Box::new(move |states| states.disconnected(on))
            }
            other => panic!("there is no input {other}"),
        }
    }

    /// The rows as those of the statement that the call has sent.
    fn answer(&self, call: u64, of: &Value) -> Answer {
        let rows = all(&of["rows"]);
        let Some(pending) = self.states.calls.get(&call) else { return Answer::Undone(0) };
        match pending.call.about {
            About::Acquire { .. } if of["taken"].is_object() => Answer::Taken {
                holder: text(&of["taken"]["holder"]),
                remaining: int(&of["taken"]["remaining"]),
                state: text(&of["taken"]["state"]),
            },
            About::Acquire { .. } => Answer::Granted(int(&rows[0][1])),
            About::Leases(_) => {
                let outcome = |row: &Value| Outcome {
                    is: text(&row[0]),
                    remaining: row[1].as_i64(),
                    again_in: row[2].as_i64(),
                    code: text(&row[3]),
                };
                Answer::Kept(rows.iter().map(outcome).collect())
            }
            About::Release(_) => Answer::Released(rows.iter().map(|row| !row.is_null()).collect()),
            About::Undo { .. } => Answer::Undone(int(&rows[0])),
        }
    }

    fn key(&self, id: Id) -> &str {
        self.ids.iter().find(|(_, of)| **of == id).map(|(key, _)| key.as_str()).expect("a key")
    }

    fn written(&self, effect: &Effect) -> Value {
        match effect {
            Effect::Call(call) => {
                let (what, more) = match &call.about {
                    About::Acquire { id, ask, reclaims, wait } => {
                        let (of, holder) = (self.key(*id), &ask.holder);
                        let more = json!({ "holder": holder, "reclaim": reclaims, "wait": wait, "for": of });
                        ("acquire", more)
                    }
                    About::Leases(_) if call.pairs.table.is_some() => ("keep_row", json!({})),
                    About::Leases(_) => ("keep", json!({})),
                    About::Release(_) => ("release", json!({})),
                    About::Undo { ask, .. } => ("undo", json!({ "holder": ask.holder })),
                };
                let Pairs { names, tokens, table, .. } = &call.pairs;
                let mut written = json!({
                    "call": call.number, "connection": call.connection, "open": call.opens, "names": names,
                    "tokens": tokens, "limit": call.limit, "do": what,
                    "table": table.as_ref().map(|table| &table.name),
                });
                let fields = more.as_object().into_iter().flatten();
                fields.for_each(|(field, of)| written[field] = of.clone());
                written
            }
            Effect::Cut(on) => json!({ "cut": on }),
            Effect::HangUp(on) => json!({ "hang_up": on }),
            Effect::Event { kind, id, token, remaining, is_other_role } => {
                let (event, reason) = match kind {
                    EventKind::Acquired => ("acquired", None),
                    EventKind::Renewed => ("renewed", None),
                    EventKind::Lost(reason) => ("lost", Some(reason.to_string())),
                    EventKind::Released { confirmed: true } => ("released", None),
                    EventKind::Released { .. } => ("released", Some("unconfirmed".to_owned())),
                    EventKind::Interrupted => ("interrupted", None),
                };
                json!({
                    "event": event, "key": self.key(*id), "token": token, "remaining": remaining,
                    "reason": reason, "advice": is_other_role.then_some("other role"),
                })
            }
            Effect::Reply { id, denial, sqlstate, in_doubt } => {
                let name = format!("{denial:?}");
                let name = name.trim_start_matches("Some(").split([' ', '(', ')']).next();
                let mut reply = json!({
                    "reply": self.key(*id), "sqlstate": sqlstate, "in_doubt": in_doubt,
                    "error": denial.as_ref().and(name),
                });
                match denial {
                    None => reply["leases"] = json!([self.key(*id)]),
                    Some(Denial::LeaseLost { reason, is_other_role }) => {
                        reply["reason"] = json!(reason.to_string());
                        reply["advice"] = json!(is_other_role.then_some("other role"));
                    }
                    Some(Denial::LeaseTaken { holder, remaining, waits_for }) => {
                        let waits_for = waits_for.map(|one| format!("{one:?}").to_lowercase());
                        reply["holder"] = json!(holder);
                        reply["remaining"] = json!(remaining);
                        reply["waits_for"] = json!(waits_for);
                    }
                    Some(_) => {}
                }
                reply
            }
            Effect::NotRenewed(code) => json!({ "log": "not renewed", "code": code }),
            Effect::NotAcquired(id, code) => {
                json!({ "log": "not acquired", "key": self.key(*id), "code": code })
            }
            Effect::Ended(Some(reason), count) => {
                json!({ "log": "lost", "reason": reason.to_string(), "count": count })
            }
            Effect::Ended(None, count) => json!({ "log": "not released", "count": count }),
            Effect::Closed => json!({ "closed": true }),
        }
    }

    fn leads(&mut self, now: i64, of: &Value) -> Vec<Value> {
        let (lead, cause) = (&mut self.lead, text(&of["cause"]));
        let what = text(&of["what"]);
        let step = match &*what {
            "start" => {
                lead.ttl = int(&of["ttl"]);
                Some(lead.start())
            }
            "granted" => Some(lead.granted(now)),
            "work done" => Some(lead.work_done()),
            "work failed" => Some(lead.work_failed(now, &cause, of["lost"] == true)),
            "not granted" => Some(lead.not_granted(now, &cause)),
            "stop" => lead.stop(),
            "tick" => lead.tick(now),
            other => panic!("a leader does not {other}"),
        };
        match step {
            None => Vec::new(),
            Some(Lead::Acquire) => vec![json!({ "lead": "acquire" })],
            Some(Lead::Work) => vec![json!({ "lead": "work" })],
            Some(Lead::Pause { pause, begins, has_led }) => {
                let log = begins.then(|| json!({ "log": "leads no more", "code": cause }));
                let event = json!({ "event": "interrupted", "code": cause });
                let event = Some(event).filter(|_| begins && has_led);
                let pause = json!({ "lead": "pause", "pause": pause });
                log.into_iter().chain(event).chain([pause]).collect()
            }
            Some(Lead::End) => vec![json!({ "lead": "end" })],
            Some(Lead::Fail) => {
                let code = if what == "work failed" { what } else { cause };
                vec![json!({ "lead": "end", "code": code })]
            }
        }
    }
}

/// True if all that is expected is there, in full. What is missing is 0, false or empty.
fn is_like(is: &Value, expected: &Value) -> bool {
    let nothing = [json!(0), json!(false), json!(""), json!([])];
    expected.as_object().into_iter().flatten().all(|(key, expected)| {
        let is = &is[key];
        match expected.get("length") {
            Some(length) => json!(is.as_array().map_or(0, Vec::len)) == *length,
            None if is.is_null() => nothing.contains(expected),
            None if expected.is_array() => *is == Value::Array(all(expected)),
            None => is == expected,
        }
    })
}

/// Writes out the shorthands of a list: names with a prefix, and rows that are alike.
fn all(of: &Value) -> Vec<Value> {
    let mut written = Vec::new();
    for one in list(of) {
        match (one["count"].as_u64(), one["prefix"].as_str()) {
            (Some(count), Some(prefix)) => {
                written.extend((0..count).map(|at| json!(format!("{prefix}{at}"))));
            }
            (Some(count), None) => written.extend((0..count).map(|_| one["each"].clone())),
            _ => written.push(one.clone()),
        }
    }
    written
}

fn list(of: &Value) -> &[Value] {
    of.as_array().map_or(&[], Vec::as_slice)
}

fn int(of: &Value) -> i64 {
    of.as_i64().unwrap_or(0)
}

fn text(of: &Value) -> String {
    of.as_str().unwrap_or_default().to_owned()
}
