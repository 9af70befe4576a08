//! Plays a test of a script.

use super::shown::{are, fault_shown, is, shown};
use super::{Action, Step, Test, Wanted, What};
use crate::background::{Background, Outcome};
use crate::database::Database;
use crate::edition;
use anyhow::{bail, ensure, Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

struct Player<'a> {
    database: &'a Database,
    patience: Duration,
    /// With the role that each was opened as, if one was named.
    sessions: BTreeMap<String, (Option<String>, Background)>,
    /// The value of `$name`, and whether it was written in the script: in that other values may stand.
    values: BTreeMap<String, (String, bool)>,
    roles: BTreeSet<String>,
    lite: bool,
}

/// Plays a test in a fresh database. Each outcome comes within `patience`, but for a wait, which has [`PATIENCE`].
///
/// [`PATIENCE`]: crate::process::PATIENCE
pub fn play(test: &Test, database: &Database, patience: Duration) -> Result<()> {
    let values = BTreeMap::from([("db".to_owned(), (database.name().to_owned(), false))]);
    let (sessions, roles) = Default::default();
    let mut player = Player { database, patience, sessions, values, roles, lite: test.lite };
    if test.lite {
        player.prepare_for_lite()?;
    }
    player.steps(&test.path, &test.setup)?;
    player.steps(&test.path, &test.steps)?;
    for (name, (_, session)) in &player.sessions {
        if let Some(sql) = session.pending() {
            bail!("{}: nobody has asked what became of {name}: {sql}", test.path);
        }
    }
    Ok(())
}

impl Player<'_> {
    fn steps(&mut self, path: &str, steps: &[Step]) -> Result<()> {
        for step in steps {
            if step.edition.is_some_and(|edition| edition != edition::chosen()) {
                continue;
            }
            match &step.what {
                What::Each { names, rows, steps } => {
                    for row in rows {
                        for (name, cell) in names.iter().zip(row) {
                            self.values.insert(name.clone(), (cell.clone(), true));
                        }
                        self.steps(path, steps)
                            .with_context(|| format!("{path}:{}: with {row:?}", step.line))?;
                    }
                }
                What::Define(name, text) => {
                    self.values.insert(name.clone(), (text.clone(), true));
                }
                What::Roles(names) => names.iter().try_for_each(|name| self.role(name))?,
                What::Do { session, role, action, wanted } => {
                    self.act(session, role.as_deref(), action, wanted)
                        .with_context(|| format!("{path}:{}", step.line))?;
                }
            }
        }
        Ok(())
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
        self.values.insert(name.to_owned(), (role, false));
        self.roles.insert(name.to_owned());
        Ok(())
    }

    /// The session of that name. It is opened as the role that is named, as the role of its own name, or as a superuser.
    fn session(&mut self, name: &str, role: Option<&str>) -> Result<&mut Background> {
        let role = role.or(self.roles.get(name).map(String::as_str));
        if !self.sessions.contains_key(name) {
            let conninfo = self.database.conninfo();
            let conninfo = match role {
                Some(role) => conninfo.user(&self.filled_in(&format!("${role}"))?),
                None => conninfo,
            };
            let mut session = Background::connect_once(&conninfo)?;
            session.waits_asleep |= self.lite;
            self.sessions.insert(name.to_owned(), (role.map(str::to_owned), session));
        }
        let (opened_as, session) = self.sessions.get_mut(name).expect("it was opened");
        let fits = role.is_none() || role == opened_as.as_deref();
        ensure!(fits, "{name} was opened as {opened_as:?}, and is not {role:?}");
        Ok(session)
    }

    fn act(
        &mut self,
        name: &str,
        role: Option<&str>,
        action: &Action,
        wanted: &Wanted,
    ) -> Result<()> {
        let (patience, since) = (self.patience, Instant::now());
        let sql = match action {
            Action::Run(sql) | Action::Until(sql) | Action::Try(sql, _) => self.filled_in(sql)?,
            _ => String::new(),
        };
        let probe = match action {
            Action::Try(_, Some(probe)) => Some(self.filled_in(probe)?),
            _ => None,
        };
        if matches!(action, Action::Notices(_) | Action::Disconnect) {
            ensure!(self.sessions.contains_key(name), "there is no session {name}");
        }
        let session = self.session(name, role)?;
        match action {
            Action::Run(_) => match wanted {
                Wanted::Waits(whom) => self.waits(name, &sql, whom.as_deref()),
                _ => {
                    let outcome = outcome(session, &sql, patience)?;
                    self.judge(&sql, outcome, wanted)
                }
            },
            Action::Try(..) => {
                outcome(session, "BEGIN", patience)??;
                ensure!(session.notices().is_empty(), "a try within a transaction would undo it");
                let mut tried = outcome(session, &sql, patience)?;
                if let (true, Some(probe)) = (tried.is_ok(), probe) {
                    // That one may not fail.
                    tried = Ok(outcome(session, &probe, patience)?.context(probe)?);
                }
                outcome(session, "ROLLBACK", patience)??;
                self.judge(&sql, tried, wanted)
            }
            Action::Until(_) => loop {
                let outcome = outcome(self.session(name, role)?, &sql, patience)?;
                let judged = self.judge(&sql, outcome, wanted);
                if judged.is_ok() || since.elapsed() > patience {
                    return judged;
                }
                std::thread::sleep(Duration::from_millis(5));
            },
            Action::StillWaits => {
                let sql = session.pending().context("it has nothing to wait for")?.to_owned();
                session.wait_until_blocked().context(sql)
            }
            Action::Woken => {
                let sql = session.pending().unwrap_or_default().to_owned();
                let outcome = session.outcome(patience)?;
                self.judge(&sql, outcome, wanted)
            }
            Action::Notices(wanted) => {
                let notices = session.notices();
                let wanted = self.filled_in(wanted)?;
                let said: Vec<String> = notices.iter().map(fault_shown).collect();
                ensure!(are(&notices, &wanted), "notices\n  wanted: {wanted}\n  got: {said:?}");
                Ok(())
            }
            Action::Disconnect => {
                ensure!(session.pending().is_none(), "it is at work: {:?}", session.pending());
                self.sessions.remove(name);
                Ok(())
            }
        }
    }

    fn waits(&mut self, name: &str, sql: &str, whom: Option<&str>) -> Result<()> {
        let session = self.session(name, None)?;
        session.notices();
        session.send(sql)?;
        session.wait_until_blocked()?;
        if let Some(whom) = whom {
            let by = session.blocked_by()?;
            let missing = || format!("there is no session {whom}");
            let (_, whom) = self.sessions.get(whom).with_context(missing)?;
            ensure!(by == [whom.pid()], "it waits for {by:?}, not for {}: {sql}", whom.pid());
        }
        Ok(())
    }

    /// Whether the outcome is what is wanted; values are remembered.
    fn judge(&mut self, sql: &str, outcome: Outcome, wanted: &Wanted) -> Result<()> {
        let (fits, told) = match (wanted, &outcome) {
            (Wanted::Success, _) => (outcome.is_ok(), "no error".to_owned()),
            (Wanted::Outcome(wanted), _) => {
                let wanted = self.filled_in(wanted)?;
                (is(&outcome, &wanted), wanted)
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
            (Wanted::Values(_) | Wanted::Waits(_), _) => (false, "values".to_owned()),
        };
        ensure!(fits, "{sql}\n  wanted: {told}\n  got: {}", shown(&outcome));
        Ok(())
    }

    /// The text with its values.
    fn filled_in(&self, text: &str) -> Result<String> {
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
            // A quote, or a parameter.
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

fn outcome(session: &mut Background, sql: &str, patience: Duration) -> Result<Outcome> {
    session.notices();
    session.send(sql)?;
    session.outcome(patience)
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}
