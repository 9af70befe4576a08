//! A test's servers, databases and sessions, and its shell commands.

use super::open_session::OpenSession;
use super::play::Player;
use super::{Place, Server, ServerStep, Verb};
use crate::background::{Background, Outcome};
use crate::client::Conninfo;
use crate::cluster::{Cluster, base_backup};
use crate::process::{self, PATIENCE, wait_until};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;

impl Verb {
    pub(super) fn of(word: &str) -> Option<Verb> {
        Some(match word {
            "start" => Verb::Start,
            "stop" => Verb::Stop,
            "kill" => Verb::Kill,
            "restart" => Verb::Restart,
            "crash" => Verb::Crash,
            "checkpoint" => Verb::Checkpoint,
            "freeze" => Verb::Freeze,
            "thaw" => Verb::Thaw,
            "backup" => Verb::Backup,
            "standby" => Verb::Standby,
            "replayed" => Verb::Replayed,
            "cut" => Verb::Cut,
            "promote" => Verb::Promote,
            _ => return None,
        })
    }
}

impl<'a> Player<'a> {
    fn own_server(&self) -> Result<&'a Server> {
        self.server.context("the test has no server of its own")
    }

    /// Returns the server of that name, or the test's own.
    pub(super) fn cluster(&self, name: &str) -> Result<&Cluster> {
        match self.others.get(name) {
            None if name.is_empty() => Ok(&self.own_server()?.cluster),
            other => other.with_context(|| format!("there is no server {name}")),
        }
    }

    /// Runs a step that acts on a server.
    pub(super) fn serve(&mut self, step: &ServerStep) -> Result<()> {
        let (verb, name) = match step {
            ServerStep::Clock(seconds) => {
                let clock = self.own_server()?.clock.as_ref();
                return clock.context("its clock cannot be stepped")?.step(*seconds);
            }
            ServerStep::Do(verb, name) => (*verb, name.as_str()),
        };
        match verb {
            Verb::Backup | Verb::Standby => {
                let (server, builder) = (self.cluster("")?, self.harness.builder());
                let made = if verb == Verb::Standby {
                    let standby = builder.standby_of(server)?;
                    standby.start()?;
                    standby
                } else {
                    builder.create_by(|install_dir, data| base_backup(install_dir, server, data))?
                };
                self.disconnect_all(name);
                self.others.insert(name.to_owned(), made);
            }
            Verb::Crash if !name.is_empty() && !self.others.contains_key(name) => {
                self.crash_process(name)?;
            }
            Verb::Checkpoint => {
                let frozen = std::mem::take(&mut self.frozen);
                let server = self.cluster(name)?;
                server.thaw(&frozen)?;
                server.connect("postgres")?.run("CHECKPOINT")?;
                let titles = ["walwriter", "background writer", "checkpointer"];
                let frozen = titles.map(|title| server.freeze(title));
                self.frozen = frozen.into_iter().collect::<Result<Vec<_>>>()?.concat();
            }
            Verb::Freeze => self.frozen = self.cluster(name)?.freeze_all()?,
            Verb::Thaw => {
                let frozen = std::mem::take(&mut self.frozen);
                self.cluster(name)?.thaw(&frozen)?;
            }
            Verb::Start => self.cluster(name)?.start()?,
            Verb::Replayed => self.cluster(name)?.wait_replayed_all()?,
            Verb::Cut => self.cluster(name)?.cut()?,
            Verb::Promote => self.cluster(name)?.promote()?,
            Verb::Stop | Verb::Kill | Verb::Restart | Verb::Crash => {
                let is_killed = matches!(verb, Verb::Kill | Verb::Crash);
                let frozen = std::mem::take(&mut self.frozen);
                let cluster = self.cluster(name)?;
                if is_killed {
                    cluster.kill9()?;
                } else {
                    cluster.thaw(&frozen)?;
                    cluster.stop()?;
                }
                if matches!(verb, Verb::Restart | Verb::Crash) {
                    cluster.start()?;
                }
                self.disconnect_all(name);
            }
        }
        Ok(())
    }

    /// Closes all sessions with a server, but for those with a pending statement: it is to report the broken
    /// connection.
    fn disconnect_all(&mut self, server: &str) {
        self.sessions
            .retain(|_, opened| opened.server != server || opened.session.pending().is_some());
    }

    fn crash_process(&mut self, whose: &str) -> Result<()> {
        let server = &self.own_server()?.cluster;
        let mut sessions = std::mem::take(&mut self.sessions);
        let missing = || format!("there is no session {whose}");
        let victim = sessions.get(whose).with_context(missing)?;
        process::signal(victim.session.pid(), Signal::SIGKILL)?;
        // Until the server has noticed the crash, it may still accept connections.
        let gone = |opened: &mut OpenSession| opened.session.run("SELECT 1").is_err();
        for opened in sessions.values_mut() {
            wait_until("all sessions are gone", PATIENCE, || gone(opened))?;
        }
        let ready = server.wait_ready(PATIENCE);
        if ready.is_err() && !server.is_running() {
            // With `restart_after_crash = off` the server stays down.
            let _ = server.kill9();
            server.start()?;
        } else {
            ready?;
        }
        self.frozen.clear();
        Ok(())
    }

    /// Creates a database without the extension, replacing one of the same name.
    pub(super) fn database(&mut self, name: &str, options: &str) -> Result<()> {
        let options = self.filled_in(options)?;
        if options.contains("TEMPLATE") {
            // A template must not have any connections.
            self.sessions.clear();
        }
        self.sessions.retain(|session, opened| opened.on.as_deref().unwrap_or(session) != name);
        let made = self.database.another(&options)?;
        self.remember(name, made.name());
        self.databases.insert(name.to_owned(), made);
        Ok(())
    }

    /// Returns how to connect to a place, and the name of its server.
    pub(super) fn conninfo(&self, place: &Place) -> Result<(Conninfo, String)> {
        let at = place.on.as_ref().unwrap_or(&place.session);
        let (conninfo, server) = match (self.others.get(at), self.databases.get(at)) {
            (Some(other), _) => (other.conninfo(self.database.name()), at.clone()),
            (_, Some(database)) => (database.conninfo(), String::new()),
            _ if place.on.is_some() => {
                (self.database.conninfo().dbname(&self.filled_in(at)?), String::new())
            }
            _ => match self.pooler.as_ref().filter(|_| !place.session.is_empty()) {
                Some(pooler) => (pooler.conninfo(self.database.name()), String::new()),
                None => (self.database.conninfo(), String::new()),
            },
        };
        Ok(match self.role_of(place) {
            Some(role) => (conninfo.user(&self.filled_in(&format!("${role}"))?), server),
            None => (conninfo, server),
        })
    }

    fn role_of<'p>(&'p self, place: &'p Place) -> Option<&'p str> {
        place.role.as_deref().or(self.roles.get(&place.session).map(String::as_str))
    }

    /// Returns the session of that name, opening it if necessary. Its role is the named one, else one with the
    /// session's own name, else a superuser. Its database or server is the named one, else one with the session's own
    /// name, else the test's.
    pub(super) fn session(&mut self, place: &Place) -> Result<&mut Background> {
        let (name, role) = (&place.session, self.role_of(place).map(str::to_owned));
        if !self.sessions.contains_key(name) {
            let (conninfo, server) = self.conninfo(place)?;
            let mut session = Background::connect_once(&conninfo)?;
            session.waits_asleep |= self.lite;
            if self.pooler.is_some() {
                session.look_from(self.database.conninfo());
            }
            let opened = OpenSession { role: role.clone(), on: place.on.clone(), server, session };
            self.sessions.insert(name.to_owned(), opened);
        }
        let OpenSession { role: was, on, session, .. } =
            self.sessions.get_mut(name).expect("it was opened");
        ensure!(
            role.is_none() || role == *was,
            "{name} was opened as {was:?}, and is not {role:?}"
        );
        ensure!(place.on.is_none() || place.on == *on, "{name} was opened on {on:?}");
        Ok(session)
    }

    /// Runs a statement in `count` sessions at once and returns their results.
    pub(super) fn race(&mut self, place: &Place, count: usize, sql: &str) -> Result<Outcome> {
        let role = self.role_of(place).map(str::to_owned);
        let has_place = |name| self.others.contains_key(name) || self.databases.contains_key(name);
        let own = has_place(&place.session).then(|| place.session.clone());
        let on = place.on.clone().or(own);
        let racer = |n| Place {
            session: format!("{} {n}", place.session),
            role: role.clone(),
            on: on.clone(),
        };
        let racers: Vec<Place> = (0..count).map(racer).collect();
        for racer in &racers {
            self.session(racer)?;
        }
        for racer in &racers {
            self.session(racer)?.send(sql)?;
        }
        let mut answers = Vec::new();
        for racer in &racers {
            match self.session(racer)?.outcome(PATIENCE)? {
                Ok(rows) => {
                    answers.extend(rows.into_iter().flatten().map(Option::unwrap_or_default))
                }
                Err(fault) => return Ok(Err(fault)),
            }
        }
        Ok(Ok(vec![vec![Some(answers.join(","))]]))
    }

    /// Returns the session of that name if it is open.
    pub(super) fn opened(&self, name: &str) -> Result<&Background> {
        let opened = self.sessions.get(name);
        Ok(&opened.with_context(|| format!("there is no session {name}"))?.session)
    }
}
