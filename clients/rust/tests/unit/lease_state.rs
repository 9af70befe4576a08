//! Plays the vectors of `clients/spec/vectors`, whose format is in `clients/spec/README.md`.

use super::*;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};

#[test]
fn the_vectors_hold() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../spec/vectors");
    let directory = std::env::var_os("VECTORS").map_or(own, PathBuf::from);
    let mut count = 0;
    let mut failures = Vec::new();
    for file in std::fs::read_dir(directory).expect("a directory of vectors") {
        let path = file.expect("a directory entry").path();
        let text = std::fs::read_to_string(&path).expect("a readable file");
        let vectors: Vec<Value> = serde_json::from_str(&text).expect("a list in JSON");
        for vector in vectors {
            count += 1;
            if let Err(difference) = Player::new(&vector).play(&vector) {
                failures.push(format!("{}, {}: {difference}", path.display(), vector["name"]));
            }
        }
    }
    assert!(count > 200, "only {count} vectors were found");
    assert!(failures.is_empty(), "{} of {count}:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn a_program_gives_renewals_less_time() {
    let mut states = LeaseStates::new(0, 3_000);
    let options = Options { names: vec!["a".to_owned()], ttl: 15_000, ..Options::default() };
    states.step(0, 0, |states| states.acquire(1, options.into()));
    states.step(0, 1, |states| states.sent(1));
    states.step(10, 1, |states| states.answered(1, Answer::Granted(7)));
    let effects = states.step(5_000, 0, |_| {});
    assert!(matches!(&effects[..], [Effect::Call(call)] if call.limit == 3_000));
}

/// Plays one vector with the two machines. `ids` are the numbers of the vector's keys.
struct Player {
    states: LeaseStates,
    lead: LeadState,
    ids: HashMap<String, Id>,
}

impl Player {
    fn new(vector: &Value) -> Player {
        let jitter = vector["jitter"].as_i64().unwrap_or(0);
        let (states, lead) = (LeaseStates::new(jitter, LONGEST_CALL), LeadState::new(0, jitter));
        Player { states, lead, ids: HashMap::new() }
    }

    fn play(mut self, vector: &Value) -> Result<(), String> {
        for step in list(&vector["steps"]) {
            let now = int(&step["at"]);
            let effects = self.effects(now, &step["in"]);
            let expected = list(&step["out"]);
            let is_like = |(effect, expected): (&Value, &Value)| is_like(effect, expected);
            if effects.len() != expected.len() || !effects.iter().zip(expected).all(is_like) {
                let (effects, expected) = (json!(effects).to_string(), step["out"].to_string());
                return Err(format!("at {now}: {effects:.500} instead of {expected:.500}"));
            }
            for field in ["held", "deadline", "next_beat"] {
                for (key, expected) in step[field].as_object().into_iter().flatten() {
                    let id = self.ids[key];
                    let lease = self.states.leases.get(&id);
                    let value = match field {
                        "held" => json!(self.states.remaining(now, id) > 0),
                        "deadline" => json!(lease.map(|lease| lease.deadline)),
                        _ => json!(lease.map(|lease| lease.beat_at)),
                    };
                    if value != *expected {
                        return Err(format!(
                            "at {now}: {field} of {key} is {value}, not {expected}"
                        ));
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

    /// Gives an input to its machine, and returns the effects as the vectors write them.
    fn effects(&mut self, now: i64, input: &Value) -> Vec<Value> {
        let (what, arguments) = input.as_object().expect("an input").iter().next().expect("one");
        match what.as_str() {
            "nothing" => return Vec::new(),
            "lead" => return self.lead_effects(now, arguments),
            "guard_failed" => return vec![failure_of(arguments)],
            _ => {}
        }
        let (call, mut checked) = (arguments["call"].as_u64().unwrap_or(0), None);
        let input = self.input(what, arguments, call);
        let effects = self.states.step(now, call, |states| {
            input(states);
            if what == "check" {
                let id = self.ids[&text(&arguments["key"])];
                let lease = states.leases.get(&id);
                let end = match lease.map(|lease| (lease.state, lease.other_role)) {
                    Some((State::Held, _)) => {
                        states.is_over(now, id).then_some((Reason::Deadline, false))
                    }
                    Some((State::Lost(reason), other_role)) => Some((reason, other_role)),
                    _ => Some((Reason::Released, false)),
                };
                checked = Some((states.effects.len(), end));
            }
        });
        let mut effects: Vec<_> = effects.iter().map(|effect| self.as_json(effect)).collect();
        // `check` is no input of the machine. Its reply comes after the ends by the clock.
        if let Some((at, end)) = checked {
            let reply = json!({
                "reply": arguments["key"], "error": end.map(|_| "LeaseLost"),
                "reason": end.map(|(reason, _)| reason.to_string()),
                "advice": end.and_then(|(_, other_role)| other_role.then_some("other role")),
            });
            effects.insert(at, reply);
        }
        effects
    }

    fn input(
        &mut self,
        what: &str,
        arguments: &Value,
        call: u64,
    ) -> Box<dyn FnOnce(&mut LeaseStates)> {
        assert!(call <= self.states.last_call, "call {call} was never sent: {arguments}");
        let mut id = |key: &Value| {
            let next = self.ids.len() as Id + 1;
            *self.ids.entry(text(key)).or_insert(next)
        };
        let (acquire, key) = (id(&arguments["id"]), id(&arguments["key"]));
        let keys: Vec<_> = list(&arguments["keys"]).iter().map(id).collect();
        match what {
            "acquire" | "keep_row" => {
                let is_row = what == "keep_row";
                let names = if is_row {
                    vec![arguments["key"].clone()]
                } else {
                    expand(&arguments["names"])
                };
                let table = RowTable { name: text(&arguments["table"]), ..RowTable::default() };
                let options = Options {
                    names: names.iter().map(text).collect(),
                    ttl: int(&arguments["ttl"]),
                    wait: int(&arguments["wait"]),
                    holder: text(&arguments["holder"]),
                    is_named: arguments["named"] == true,
                    reclaim: arguments["reclaim"] == true,
                    is_session: arguments["session"] == true,
                    is_shared: arguments["shared"] == true,
                    at_most: arguments["at_most"].as_i64(),
                    table: is_row.then_some(table),
                    token: int(&arguments["token"]),
                    ..Options::default()
                };
                Box::new(move |states| states.acquire(acquire, options.into()))
            }
            "give_up" => Box::new(move |states| states.give_up(acquire)),
            "release" => Box::new(move |states| states.release(key)),
            "last_transaction" => {
                use Stage::{Begins, Committed, InDoubt, Inner, RolledBack};
                let stages = [Begins, Committed, RolledBack, InDoubt, Inner];
                let stage = named(&arguments["stage"], stages);
                Box::new(move |states| states.last_transaction(&keys, stage))
            }
            "row_locked" => Box::new(move |states| states.row_locked(key)),
            "row_unlocked" => Box::new(move |states| states.row_unlocked(key)),
            "suspect" => Box::new(move |states| states.suspect(&keys)),
            "close" => Box::new(LeaseStates::close),
            "heartbeat_died" => Box::new(LeaseStates::heartbeat_died),
            "tick" | "check" => Box::new(|_| {}),
            "sent" => Box::new(move |states| states.sent(call)),
            "answer" => {
                let answer = self.answer(call, arguments);
                Box::new(move |states| states.answered(call, answer))
            }
            "failed" => {
                let (code, is_broken) = (text(&arguments["code"]), arguments["broken"] == true);
                Box::new(move |states| states.failed(call, &code, is_broken))
            }
            "disconnected" => {
                let connection = arguments["connection"].as_u64().expect("a connection");
                Box::new(move |states| states.disconnected(connection))
            }
            other => panic!("there is no input {other}"),
        }
    }

    /// Returns the answer whose rows the vector gives, by what the call does.
    fn answer(&self, call: u64, arguments: &Value) -> Answer {
        let (rows, taken) = (expand(&arguments["rows"]), &arguments["taken"]);
        let Some(pending) = self.states.calls.get(&call) else { return Answer::Undone(0) };
        match pending.call.operation {
            Operation::Acquire { .. } if taken.is_object() => Answer::Taken {
                holder: text(&taken["holder"]),
                remaining: int(&taken["remaining"]),
                state: text(&taken["state"]),
            },
            Operation::Acquire { .. } => Answer::Granted(int(&rows[0][1])),
            Operation::Keep(_) => {
                let outcome = |row: &Value| Outcome {
                    kind: text(&row[0]),
                    remaining: row[1].as_i64(),
                    again_in: row[2].as_i64(),
                    code: text(&row[3]),
                };
                Answer::Kept(rows.iter().map(outcome).collect())
            }
            Operation::Release(_) => {
                Answer::Released(rows.iter().map(|row| !row.is_null()).collect())
            }
            Operation::Undo { .. } => Answer::Undone(int(&rows[0])),
        }
    }

    fn key(&self, id: Id) -> &str {
        let mut known = self.ids.iter();
        known.find(|(_, known)| **known == id).map(|(key, _)| key.as_str()).expect("a key")
    }

    /// Returns an effect as the vectors write it.
    fn as_json(&self, effect: &Effect) -> Value {
        match effect {
            Effect::Call(call) => {
                let (what, more) = match &call.operation {
                    Operation::Acquire { id, options, reclaim, wait } => {
                        let (key, holder) = (self.key(*id), &options.holder);
                        let more = json!({
                            "holder": holder, "reclaim": reclaim, "wait": wait, "for": key,
                        });
                        ("acquire", more)
                    }
                    Operation::Keep(_) if call.pairs.table.is_some() => ("keep_row", json!({})),
                    Operation::Keep(_) => ("keep", json!({})),
                    Operation::Release(_) => ("release", json!({})),
                    Operation::Undo { options, .. } => {
                        ("undo", json!({ "holder": options.holder }))
                    }
                };
                let Pairs { names, tokens, table, .. } = &call.pairs;
                let mut json = json!({
                    "call": call.number, "connection": call.connection, "open": call.opens,
                    "names": names, "tokens": tokens, "limit": call.limit, "do": what,
                    "table": table.as_ref().map(|table| &table.name),
                });
                let fields = more.as_object().into_iter().flatten();
                fields.for_each(|(field, value)| json[field] = value.clone());
                json
            }
            Effect::Cut(connection) => json!({ "cut": connection }),
            Effect::HangUp(connection) => json!({ "hang_up": connection }),
            Effect::Event { kind, id, token, remaining, other_role } => {
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
                    "reason": reason, "advice": other_role.then_some("other role"),
                })
            }
            Effect::Reply { id, denial, sqlstate, in_doubt } => {
                let name = format!("{denial:?}");
                let name = name.trim_start_matches("Some(").trim_start_matches("Failed(");
                let name = name.split([' ', ')']).next();
                let mut reply = json!({
                    "reply": self.key(*id), "sqlstate": sqlstate, "in_doubt": in_doubt,
                    "error": denial.as_ref().and(name),
                });
                match denial {
                    None => reply["leases"] = json!([self.key(*id)]),
                    Some(Denial::LeaseLost { reason, other_role }) => {
                        reply["reason"] = json!(reason.to_string());
                        reply["advice"] = json!(other_role.then_some("other role"));
                    }
                    Some(Denial::LeaseTaken { holder, remaining, waits_for }) => {
                        let waits_for = waits_for.map(|end| format!("{end:?}").to_lowercase());
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

    fn lead_effects(&mut self, now: i64, arguments: &Value) -> Vec<Value> {
        let (lead, what) = (&mut self.lead, text(&arguments["what"]));
        let (error, code) = (error_named(&arguments["error"]), text(&arguments["code"]));
        let cause = cause(error, &code, lead.leading_since.is_none());
        let pause = match &*what {
            "start" => {
                lead.ttl = int(&arguments["ttl"]);
                return Vec::new();
            }
            "granted" => {
                lead.granted(now);
                return Vec::new();
            }
            "failed" => {
                let [is_lost, is_stopped, is_closed] =
                    ["lost", "stopped", "closed"].map(|name| arguments[name] == true);
                lead.failed(now, (error, &code), is_lost, is_stopped, is_closed)
            }
            other => panic!("there is no {other} of a lead"),
        };
        let Pause { pause, begins_outage, has_led } = match pause {
            Ok(pause) => pause,
            Err(end) => {
                return vec![json!({ "lead": "end", "code": format!("{end:?}").to_lowercase() })];
            }
        };
        let log = begins_outage.then(|| json!({ "log": "leads no more", "code": cause }));
        let event = json!({ "event": "interrupted", "code": cause });
        let event = Some(event).filter(|_| begins_outage && has_led);
        let pause = json!({ "lead": "pause", "pause": pause });
        log.into_iter().chain(event).chain([pause]).collect()
    }
}

/// Returns what follows from an error in a guarded transaction.
fn failure_of(arguments: &Value) -> Value {
    use GuardStage::{Begin, Check, Commit, Open, Release, Work};
    let stage = named(&arguments["stage"], [Open, Begin, Work, Check, Release, Commit]);
    let sessions = [Session::Open, Session::Closed, Session::Unknown];
    let session = named(&arguments["session"], sessions);
    let of = named(&arguments["of"], [GuardedBy::Names, GuardedBy::Rows, GuardedBy::Adopted]);
    let (code, is) = (text(&arguments["code"]), |what: &str| arguments[what] == true);
    let (is_fatal, is_inner, is_lost) = (is("is_fatal"), is("is_inner"), is("is_lost"));
    let failure = guard_failed(stage, &code, is_fatal, session, of, is_inner, is_lost);
    let last = match failure.last {
        Stage::InDoubt => "in doubt",
        Stage::RolledBack => "rolled back",
        _ => panic!("a last transaction that has failed is one of both"),
    };
    json!({
        "error": failure.error.map(|error| format!("{error:?}")).unwrap_or_default(),
        "in_doubt": failure.in_doubt, "last": last, "suspect": failure.suspect,
        "again": failure.again,
    })
}

/// Returns the value that has this name here in one word, or the first one if no name is given.
fn named<T: Debug, const COUNT: usize>(name: &Value, values: [T; COUNT]) -> T {
    let word = text(name).replace(' ', "");
    let is_named = |one: &T| name.is_null() || format!("{one:?}").eq_ignore_ascii_case(&word);
    values.into_iter().find(is_named).unwrap_or_else(|| panic!("there is no {name}"))
}

/// Returns the type of this name, if `LeadState` distinguishes it.
fn error_named(name: &Value) -> Option<ErrorType> {
    use ErrorType::{LeaseLost, LeaseTaken, NoAnswer, NoConnection, TransactionLost};
    let types = [LeaseLost, LeaseTaken, NoAnswer, NoConnection, TransactionLost];
    types.into_iter().find(|one| format!("{one:?}") == text(name))
}

/// True if an effect has all expected fields, with equal values. A field that the effect does not
/// have is 0, false or empty.
fn is_like(effect: &Value, expected: &Value) -> bool {
    let nothing = [json!(0), json!(false), json!(""), json!([])];
    expected.as_object().into_iter().flatten().all(|(field, expected)| {
        let value = &effect[field];
        match expected.get("length") {
            Some(length) => json!(value.as_array().map_or(0, Vec::len)) == *length,
            None if value.is_null() => nothing.contains(expected),
            None if expected.is_array() => *value == Value::Array(expand(expected)),
            None => value == expected,
        }
    })
}

/// Expands the shorthands of a list: names with a prefix, and rows that are equal.
fn expand(shorthand: &Value) -> Vec<Value> {
    let mut expanded = Vec::new();
    for item in list(shorthand) {
        match (item["count"].as_u64(), item["prefix"].as_str()) {
            (Some(count), Some(prefix)) => {
                expanded.extend((0..count).map(|number| json!(format!("{prefix}{number}"))));
            }
            (Some(count), None) => expanded.extend((0..count).map(|_| item["each"].clone())),
            _ => expanded.push(item.clone()),
        }
    }
    expanded
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn int(value: &Value) -> i64 {
    value.as_i64().unwrap_or(0)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
