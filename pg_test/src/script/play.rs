//! Runs a test of a scenario file.

use super::bless::{Blessings, Part, Site, meets, proposal_of, proposals};
use super::bypass::{self, AuditedDatabase, BOUND, LANDS, TABLE};
use super::open_session::OpenSession;
use super::shell::Shell;
use super::shown::{are, fault_shown, shown};
use super::{Action, Bypass, Condition, Finding, Place, Server, Step, StepKind, Test, Wanted};
use crate::background::{Background, Outcome};
use crate::cluster::Cluster;
use crate::database::Database;
use crate::edition;
use crate::fault::Fault;
use crate::harness::Harness;
use crate::pooler::Pooler;
use crate::process::{self, PATIENCE, wait_until};
use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

pub(super) struct Player<'a> {
    pub(super) database: &'a Database,
    patience: Duration,
    pub(super) sessions: BTreeMap<String, OpenSession>,
    /// The servers and databases that steps have made, by name.
    pub(super) others: BTreeMap<String, Cluster>,
    pub(super) databases: BTreeMap<String, Database>,
    /// The value of `$name`, and whether it was written in the file: such a value may contain others.
    values: BTreeMap<String, (String, bool)>,
    /// The session of steps that name none.
    by: Place,
    /// The steps with a name.
    named: BTreeMap<String, &'a [Step]>,
    pub(super) roles: BTreeSet<String>,
    pub(super) lite: bool,
    /// The test's own server. Its frozen processes are in `frozen`.
    pub(super) server: Option<&'a Server>,
    pub(super) frozen: Vec<i32>,
    /// The frozen processes of its sessions.
    stopped: BTreeSet<i32>,
    audited: Option<AuditedDatabase>,
    /// The file and the line of the step that runs.
    at: (String, usize),
    /// For each value of a row of `each`, the row's first line, the cell's index and the number of cells.
    cells: BTreeMap<String, (usize, usize, usize)>,
    blessings: Option<&'a Blessings>,
    pub(super) harness: &'a Harness,
    with_command: bool,
    shell: Option<Shell<'a>>,
    pub(super) pooler: Option<Pooler>,
}

/// Runs a test in a fresh database, on its own server if it needs one. Each outcome must come within `patience`; waits
/// have [`PATIENCE`]. With `blessings`, expectations that are not met are noted there and count as met.
///
/// [`PATIENCE`]: crate::process::PATIENCE
pub fn play(
    harness: &Harness,
    test: &Test,
    database: &Database,
    server: Option<&Server>,
    patience: Duration,
    blessings: Option<&Blessings>,
) -> Result<()> {
    let cluster = server.map_or(harness.cluster(), |server| &server.cluster);
    let mut player = Player {
        database,
        patience,
        sessions: BTreeMap::new(),
        others: BTreeMap::new(),
        databases: BTreeMap::new(),
        values: BTreeMap::new(),
        by: Place::default(),
        named: BTreeMap::new(),
        roles: BTreeSet::new(),
        lite: test.lite,
        server,
        frozen: Vec::new(),
        stopped: BTreeSet::new(),
        audited: None,
        at: Default::default(),
        cells: BTreeMap::new(),
        blessings,
        harness,
        with_command: test.command,
        shell: None,
        pooler: match &test.pooled {
            Some((count, mode)) if test.takes_options => {
                Some(Pooler::start_in(harness, cluster, *count, mode)?)
            }
            Some((count, mode)) => {
                Some(Pooler::start_with(harness, cluster, *count, mode, "extra_float_digits")?)
            }
            None => None,
        },
    };
    player.remember("db", database.name());
    player.remember("log", &cluster.log_file().display().to_string());
    if test.lite {
        player.prepare_for_lite()?;
    }
    player.steps(&test.path, &test.setup)?;
    player.steps(&test.path, &test.steps)?;
    for (name, opened) in &player.sessions {
        if let Some(sql) = opened.session.pending() {
            bail!("{}: nobody has asked what became of {name}: {sql}", test.path);
        }
    }
    Ok(())
}

impl<'a> Player<'a> {
    fn steps(&mut self, path: &str, steps: &'a [Step]) -> Result<()> {
        for step in steps {
            let is_for_us = match step.condition {
                Condition::Everywhere => true,
                Condition::In(edition) => edition == edition::chosen(),
                Condition::From(first) => self.major()? >= first,
                Condition::Until(last) => self.major()? <= last,
            };
            if !is_for_us {
                continue;
            }
            let at = || format!("{path}:{}", step.line);
            self.at = (path.to_owned(), step.line);
            match &step.kind {
                StepKind::Each { names, rows, steps } => {
                    for (line, row) in rows {
                        for (index, (name, cell)) in names.iter().zip(row).enumerate() {
                            self.values.insert(name.clone(), (cell.clone(), true));
                            self.cells.insert(name.clone(), (*line, index, names.len()));
                        }
                        self.steps(path, steps)
                            .with_context(|| format!("{path}:{}: with {row:?}", step.line))?;
                    }
                }
                StepKind::Within(name, steps) => {
                    self.unblessed(|own| own.within(path, name, steps))?
                }
                StepKind::Steps(name, steps) => drop(self.named.insert(name.clone(), steps)),
                StepKind::Play(place, name) => {
                    let at = || format!("{path}:{}: {name}", step.line);
                    let steps = *self.named.get(name).with_context(at)?;
                    let before = self.by.clone();
                    if !place.session.is_empty() {
                        self.by = place.clone();
                    }
                    let played = self.steps(path, steps);
                    // The session is restored after a failure, too: the steps may be run again.
                    self.by = before;
                    played.with_context(at)?;
                }
                StepKind::Define(name, text) => {
                    let setting = std::env::var("PG_FENCE_RACE_ROUNDS").ok();
                    let text = setting.filter(|_| name == "rounds").unwrap_or(text.clone());
                    self.values.insert(name.clone(), (text, true));
                    self.cells.remove(name);
                }
                StepKind::AtOnce(rows) => self.at_once(rows).with_context(at)?,
                StepKind::Shell(place, text, wanted) => {
                    self.shell(place, text, wanted).with_context(at)?
                }
                StepKind::Roles(names) => names.iter().try_for_each(|name| self.role(name))?,
                StepKind::FencedTable(bypass) => {
                    self.fenced_table(bypass.as_ref()).with_context(at)?
                }
                StepKind::Server(what) => self.serve(what).with_context(at)?,
                StepKind::Database(name, options) => {
                    self.database(name, options).with_context(at)?
                }
                StepKind::Do { place, action, wanted } => {
                    self.act(place, action, wanted).with_context(at)?
                }
            }
        }
        Ok(())
    }

    /// Runs the steps repeatedly, with more time each, until none fails. A failure counts once the steps have had 64
    /// seconds and `patience` is over: nothing delays them for that long.
    fn within(&mut self, path: &str, name: &str, steps: &'a [Step]) -> Result<()> {
        let (mut seconds, since) = (1, Instant::now());
        loop {
            self.remember(name, &seconds.to_string());
            let played = self.steps(path, steps);
            if played.is_ok() || (seconds == 64 && since.elapsed() > self.patience) {
                return played;
            }
            std::mem::take(&mut self.stopped).into_iter().try_for_each(process::resume)?;
            self.end_sessions_of(steps)?;
            seconds = 64.min(2 * seconds);
        }
    }

    /// Runs something that is repeated until it succeeds: its first outcomes are not meant to meet the expectation.
    fn unblessed<T>(&mut self, run: impl FnOnce(&mut Self) -> T) -> T {
        let blessings = self.blessings.take();
        let result = run(self);
        self.blessings = blessings;
        result
    }

    /// Returns true if an outcome meets the expectation, or if one of the proposals that it meets replaces it. An
    /// expectation that is only the name of a value in a row of `each` is replaced in that row.
    fn met(
        &self,
        part: Part,
        expected: &str,
        is_met: impl Fn(&str) -> bool,
        proposals: impl FnOnce(&str) -> Vec<String>,
    ) -> bool {
        let Some(blessings) = self.blessings else { return is_met(expected) };
        let (path, line) = self.at.clone();
        let name = expected.strip_prefix('$').unwrap_or_default();
        let (site, old) = match (self.cells.get(name), self.values.get(name)) {
            (Some((line, index, count)), Some((old, true))) => {
                (Site { path, line: *line, part: Part::Cell(*index, *count) }, &**old)
            }
            _ => (Site { path, line, part }, expected),
        };
        blessings.settle(&site, old, is_met, proposals(old))
    }

    fn end_sessions_of(&mut self, steps: &'a [Step]) -> Result<()> {
        for step in steps {
            match &step.kind {
                StepKind::Do { place, .. } => {
                    drop(self.sessions.remove(&self.filled_in(&place.session)?))
                }
                StepKind::Each { steps, .. } => self.end_sessions_of(steps)?,
                StepKind::Play(place, name) => {
                    self.sessions.remove(&self.filled_in(&place.session)?);
                    self.end_sessions_of(self.named.get(name).copied().unwrap_or(&[]))?
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the server's major version.
    fn major(&self) -> Result<i32> {
        let number = "SELECT current_setting('server_version_num')::int / 10000";
        self.database.connect()?.one(number, &[])
    }

    fn prepare_for_lite(&mut self) -> Result<()> {
        self.role("owner")?;
        let owned = self.filled_in("ALTER DATABASE $db OWNER TO $owner")?;
        self.database.connect()?.run(&owned)?;
        self.values.insert("install".to_owned(), (edition::lite_script()?, false));
        self.values.insert("move_up".to_owned(), (edition::move_up_script()?, false));
        Ok(())
    }

    fn role(&mut self, name: &str) -> Result<()> {
        let role = self.database.role(name)?;
        self.pooler.iter().try_for_each(|pooler| pooler.admit(&role))?;
        self.remember(name, &role);
        self.roles.insert(name.to_owned());
        Ok(())
    }

    /// Sets `$name` to this text.
    pub(super) fn remember(&mut self, name: &str, text: &str) {
        self.values.insert(name.to_owned(), (text.to_owned(), false));
    }

    /// Makes the table with its fence. With a bypass, also builds it, closes it, and drops the table.
    fn fenced_table(&mut self, bypass: Option<&Bypass>) -> Result<()> {
        let mut audited = match self.audited.take() {
            Some(audited) => audited,
            None => {
                let audited = AuditedDatabase::new(self.database)?;
                for (name, role) in ["owner", "writer"].into_iter().zip(&audited.roles) {
                    self.remember(name, role);
                    self.roles.insert(name.to_owned());
                }
                audited
            }
        };
        let before = self.values.clone();
        for (name, text) in bypass.into_iter().flat_map(|bypass| &bypass.values) {
            self.values.insert(name.clone(), (text.clone(), true));
        }
        let fence = self.value_or("fence", BOUND)?;
        let tokens = audited.build(&self.value_or("table", TABLE)?, &fence)?;
        for (name, token) in ["old", "new"].into_iter().zip(tokens) {
            self.remember(name, &token.to_string());
        }
        if let Some(bypass) = bypass {
            let found = |of: fn(&Finding) -> bool| -> Result<Vec<String>> {
                bypass.found.iter().filter(|f| of(f)).map(|f| self.filled_in(&f.text)).collect()
            };
            let bypass = bypass::Bypass {
                by_admin: bypass.by_admin,
                built: self.filled_in(&bypass.built)?,
                found: found(|finding| finding.in_one)?,
                found_in_all: found(|finding| finding.in_all)?,
                write: self.value_or("write", "UPDATE orders SET v = 33, fence = $old")?,
                before: self.value_or("before", LANDS)?,
                after: self.value_or("after", "PF001")?,
            };
            audited
                .close(&fence, &bypass)
                .with_context(|| format!("fence_protect('orders'{fence}); {}", bypass.built))?;
            self.values = before;
        }
        self.audited = Some(audited);
        Ok(())
    }

    /// Returns the value of that name, or this text if there is none.
    fn value_or(&self, name: &str, text: &str) -> Result<String> {
        let text =
            if self.values.contains_key(name) { format!("${name}") } else { text.to_owned() };
        self.filled_in(&text)
    }

    /// Runs these statements concurrently, each in its session.
    fn at_once(&mut self, rows: &[(String, String)]) -> Result<()> {
        let mut racers = Vec::new();
        for (count, sql) in rows {
            let count = self.filled_in(count)?;
            let (count, role) = count.split_once(" as ").map_or((&*count, ""), |of_role| of_role);
            let place = Place { session: role.to_owned(), ..Place::default() };
            let (conninfo, _) = self.conninfo(&place)?;
            for _ in 0..count.parse()? {
                self.remember("n", &(racers.len() + 1).to_string());
                let session = Background::connect_once(&conninfo)?;
                racers.push((session, self.filled_in(sql)?));
            }
        }
        racers.iter_mut().try_for_each(|(session, sql)| session.send(sql))?;
        racers.iter_mut().try_for_each(|(session, _)| session.rows().map(drop))
    }

    fn shell(&mut self, place: &Place, text: &str, wanted: &Wanted) -> Result<()> {
        let place = self.place(place)?;
        let ((conninfo, server), text) = (self.conninfo(&place)?, self.filled_in(text)?);
        let data = self.cluster(&server).ok().map(Cluster::data);
        let shell = match &mut self.shell {
            Some(shell) => shell,
            None => self.shell.insert(Shell::new(self.harness, self.with_command)?),
        };
        let ended = shell.run(&conninfo, data, &text, self.patience)?;
        match wanted {
            Wanted::Outcome(wanted) => {
                let is_met = |text: &str| self.filled_in(text).is_ok_and(|text| ended.is(&text));
                if self.met(Part::OfShell, wanted, is_met, |old| ended.proposals(old)) {
                    return Ok(());
                }
                return ended.check(&text, &self.filled_in(wanted)?);
            }
            Wanted::Values(names) => self.remember(&names[0], &ended.out),
            _ => {}
        }
        ended.check(&text, "0")
    }

    /// Returns where a step runs: without a session's name in `self.by`. The name may contain variables.
    fn place(&self, place: &Place) -> Result<Place> {
        let place = if place.session.is_empty() { &self.by } else { place };
        Ok(Place { session: self.filled_in(&place.session)?, ..place.clone() })
    }

    fn act(&mut self, place: &Place, action: &Action, wanted: &Wanted) -> Result<()> {
        let place = &self.place(place)?;
        let (patience, since) = (self.patience, Instant::now());
        let sql = match action {
            Action::Run(sql) | Action::Until(sql) | Action::Try(sql, _) => self.filled_in(sql)?,
            Action::Race(count, sql) => {
                let sql = self.filled_in(sql)?;
                let outcome = self.race(place, *count, &sql)?;
                return self.check(&sql, outcome, wanted);
            }
            _ => String::new(),
        };
        let probe = match action {
            Action::Try(_, Some(probe)) => Some(self.filled_in(probe)?),
            _ => None,
        };
        let may_open = matches!(action, Action::Run(_) | Action::Try(..) | Action::Until(_));
        if !may_open {
            self.opened(&place.session)?;
        }
        let session = self.session(place)?;
        match action {
            Action::Run(_) => match wanted {
                Wanted::Waits(whom) => self.waits(place, &sql, whom.as_deref()),
                Wanted::Runs => session.send(&sql),
                _ => {
                    let outcome = outcome(session, &sql, patience)?;
                    self.check(&sql, outcome, wanted)
                }
            },
            Action::Try(..) => {
                outcome(session, "BEGIN", patience)??;
                ensure!(session.notices().is_empty(), "a try within a transaction would undo it");
                let mut tried = outcome(session, &sql, patience)?;
                if let (true, Some(probe)) = (tried.is_ok(), probe) {
                    // The probe must not fail.
                    tried = Ok(outcome(session, &probe, patience)?.context(probe)?);
                }
                outcome(session, "ROLLBACK", patience)??;
                self.check(&sql, tried, wanted)
            }
            Action::Until(_) => loop {
                let outcome = outcome(self.session(place)?, &sql, patience)?;
                let checked = self.unblessed(|own| own.check(&sql, outcome, wanted));
                if checked.is_ok() || since.elapsed() > patience {
                    return checked;
                }
                std::thread::sleep(Duration::from_millis(5));
            },
            Action::Race(..) => unreachable!("it is over"),
            Action::StillWaits => {
                let sql = session.pending().context("it has nothing to wait for")?.to_owned();
                session.wait_until_blocked().context(sql)
            }
            Action::Woken => {
                let sql = session.pending().unwrap_or_default().to_owned();
                let outcome = session.outcome(patience)?;
                self.check(&sql, outcome, wanted)
            }
            Action::Notices(wanted) => {
                let notices = session.notices();
                let is_met =
                    |text: &str| self.filled_in(text).is_ok_and(|text| are(&notices, &text));
                let is_met = self.met(Part::OfSql, wanted, is_met, |_| proposal_of(&notices));
                let wanted = self.filled_in(wanted)?;
                let said: Vec<String> = notices.iter().map(fault_shown).collect();
                ensure!(is_met, "notices\n  wanted: {wanted}\n  got: {said:?}");
                Ok(())
            }
            Action::Cancel => {
                session.cancel()?;
                session.refused("57014").map(drop)
            }
            Action::Terminate => {
                session.terminate()?;
                let pid = session.pid();
                wait_until("it is gone", PATIENCE, || !process::is_alive(pid))?;
                if session.pending().is_some() {
                    let outcome = session.outcome(patience)?;
                    ensure!(outcome.as_ref().is_err_and(Fault::is_disconnect), "{outcome:?}");
                }
                self.sessions.remove(&place.session);
                Ok(())
            }
            Action::Freeze => {
                let pid = session.pid();
                self.stopped.insert(pid);
                process::freeze_living(pid)
            }
            Action::Thaw => {
                let pid = session.pid();
                self.stopped.remove(&pid);
                process::resume(pid)
            }
            Action::Disconnect => {
                ensure!(session.pending().is_none(), "it is at work: {:?}", session.pending());
                self.sessions.remove(&place.session);
                Ok(())
            }
        }
    }

    fn waits(&mut self, place: &Place, sql: &str, whom: Option<&str>) -> Result<()> {
        let session = self.session(place)?;
        session.notices();
        session.send(sql)?;
        session.wait_until_blocked()?;
        let Some(whom) = whom else { return Ok(()) };
        let whom = self.opened(whom)?.pid();
        let patience = self.patience;
        let session = self.session(place)?;
        // A statement with several waits may first wait for another process: CREATE INDEX CONCURRENTLY waits for each
        // transaction in turn, also for the server's own.
        let mut by = Vec::new();
        let meets = || {
            by = session.blocked_by().unwrap_or_default();
            by == [whom] || session.is_finished()
        };
        let met = wait_until("the session is blocked by whom it should", patience, meets);
        ensure!(by == [whom], "it waits for {by:?}, not for {whom}: {sql}");
        met
    }

    /// Checks the outcome against the expected one and stores the values that it names.
    fn check(&mut self, sql: &str, outcome: Outcome, wanted: &Wanted) -> Result<()> {
        let (fits, expected) = match (wanted, &outcome) {
            (Wanted::Success, _) => (outcome.is_ok(), "no error".to_owned()),
            (Wanted::Outcome(wanted), _) => {
                let is_met = |text: &str| meets(&outcome, self.filled_in(text));
                let proposals = |old: &str| proposals(&outcome, old, |text| self.filled_in(text));
                let is_met = self.met(Part::OfSql, wanted, is_met, proposals);
                (is_met, self.filled_in(wanted)?.replace('\n', " "))
            }
            (Wanted::Values(names), Ok(rows)) => {
                let row: Option<Vec<String>> = match rows.as_slice() {
                    [row] if row.len() == names.len() => row.iter().cloned().collect(),
                    _ => None,
                };
                for (name, value) in names.iter().zip(row.iter().flatten()) {
                    self.values.insert(name.clone(), (value.clone(), false));
                }
                (row.is_some(), format!("a row of {} values", names.len()))
            }
            (Wanted::Values(_) | Wanted::Waits(_) | Wanted::Runs, _) => {
                (false, "values".to_owned())
            }
        };
        ensure!(fits, "{sql}\n  wanted: {expected}\n  got: {}", shown(&outcome));
        Ok(())
    }

    /// Returns the text with all `$name` replaced.
    pub(super) fn filled_in(&self, text: &str) -> Result<String> {
        self.filled_in_down_to(text, 9)
    }

    fn filled_in_down_to(&self, text: &str, depth: u32) -> Result<String> {
        let (mut filled, mut rest) = (String::new(), text);
        while let Some((before, after)) = rest.split_once('$') {
            filled += before;
            let (name, behind) = match after.strip_prefix('{').and_then(|t| t.split_once('}')) {
                Some(braced) => braced,
                None => after.split_at(after.find(|c| !is_word(c)).unwrap_or(after.len())),
            };
            // A dollar quote, or a parameter.
            if !name.starts_with(|c: char| c.is_ascii_lowercase()) {
                let quote = if after.starts_with('$') { "$$" } else { "$" };
                filled += quote;
                rest = &after[quote.len() - 1..];
                continue;
            }
            let value = self.values.get(name);
            let (value, is_ours) = value.with_context(|| format!("there is no ${name}: {text}"))?;
            if *is_ours {
                ensure!(depth > 0, "${name} is a value of itself");
                filled += &self.filled_in_down_to(value, depth - 1)?;
            } else {
                filled += value;
            }
            rest = behind;
        }
        Ok(filled + rest)
    }
}

impl Drop for Player<'_> {
    fn drop(&mut self) {
        for pid in self.stopped.iter().chain(&self.frozen) {
            let _ = process::resume(*pid);
        }
    }
}

fn outcome(session: &mut Background, sql: &str, patience: Duration) -> Result<Outcome> {
    session.notices();
    session.send(sql)?;
    session.outcome(patience)
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}
