//! Connection parameters, and a session over the `postgres` crate.

use crate::edition;
use crate::fault::{self, Fault};
use anyhow::{Context, Result, ensure};
use postgres::types::{FromSql, ToSql};
use postgres::{Client, Config, NoTls, SimpleQueryMessage};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex};

/// Rows as text: NULL is `None`.
pub type Rows = Vec<Vec<Option<String>>>;
/// Parameters of a statement.
pub type Params<'a> = &'a [&'a (dyn ToSql + Sync)];

/// The address (mostly on loopback) and the role to connect with. Its text form is a connection string.
#[derive(Debug, Clone)]
pub struct Conninfo {
    host: String,
    port: u16,
    user: String,
    dbname: String,
    options: String,
    application: String,
}

impl Conninfo {
    /// The superuser's connection to a server on loopback.
    pub fn new(port: u16, dbname: &str) -> Conninfo {
        Conninfo {
            host: "127.0.0.1".to_owned(),
            port,
            user: "postgres".to_owned(),
            dbname: dbname.to_owned(),
            options: String::new(),
            application: "pg_test".to_owned(),
        }
    }

    /// With another address of the server.
    pub fn host(mut self, host: &str) -> Conninfo {
        self.host = host.to_owned();
        self
    }

    /// With another port, for example a pooler's.
    pub fn port(mut self, port: u16) -> Conninfo {
        self.port = port;
        self
    }

    pub fn user(mut self, user: &str) -> Conninfo {
        self.user = user.to_owned();
        self
    }

    /// The role that connects.
    pub fn role(&self) -> &str {
        &self.user
    }

    pub fn dbname(mut self, dbname: &str) -> Conninfo {
        self.dbname = dbname.to_owned();
        self
    }

    /// With one more setting for the session.
    pub fn set(mut self, name: &str, value: &str) -> Conninfo {
        let value = value.replace('\\', "\\\\").replace(' ', "\\ ");
        self.options.push_str(&format!(" -c {name}={value}"));
        self
    }

    /// With a name that `pg_stat_activity` shows.
    pub fn application(mut self, name: &str) -> Conninfo {
        self.application = name.to_owned();
        self
    }

    /// The port and the database, for programs that build their own connection string.
    pub fn place(&self) -> (u16, &str) {
        (self.port, &self.dbname)
    }

    pub fn connect(&self) -> Result<Session> {
        Session::connect(&self.to_string()).map_err(|fault| {
            anyhow::Error::from(fault).context(format!("cannot connect to {self}"))
        })
    }
}

impl fmt::Display for Conninfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let quote = |text: &str| format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"));
        write!(f, "host={} port={}", self.host, self.port)?;
        write!(f, " user={} dbname={}", quote(&self.user), quote(&self.dbname))?;
        write!(f, " application_name={} connect_timeout=20", quote(&self.application))?;
        if !self.options.is_empty() {
            write!(f, " options={}", quote(self.options.trim()))?;
        }
        Ok(())
    }
}

/// The notices and warnings of a session that were not read yet.
pub(crate) type Notices = Arc<Mutex<Vec<Fault>>>;

/// Takes the notices.
pub(crate) fn notices_in(notices: &Notices) -> Vec<Fault> {
    std::mem::take(&mut *notices.lock().unwrap_or_else(|e| e.into_inner()))
}

/// A connection: a [`postgres::Client`] with a few short methods.
pub struct Session {
    client: Client,
    pub(crate) notices: Notices,
    pid: i32,
}

impl Session {
    /// Connects by a connection string.
    pub fn connect(conninfo: &str) -> Result<Session, Fault> {
        let mut config: Config = conninfo.parse()?;
        let notices = Notices::default();
        let sink = notices.clone();
        config.notice_callback(move |notice| {
            let mut sink = sink.lock().unwrap_or_else(|e| e.into_inner());
            sink.push(Fault::from(&notice));
        });
        let mut client = config.connect(NoTls)?;
        // A pooler has no backend for the session; then this is just a number.
        let pid = match client.simple_query("SELECT pg_backend_pid()")?.iter().find_map(row_of) {
            Some(row) => row.get(0).and_then(|text| text.parse().ok()).unwrap_or(0),
            None => 0,
        };
        Ok(Session { client, notices, pid })
    }

    /// The pid of the session's backend.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The notices and warnings received since the last call.
    pub fn notices(&mut self) -> Vec<Fault> {
        notices_in(&self.notices)
    }

    /// Runs statements (several, separated by `;`, are one transaction) and ignores their rows.
    pub fn run(&mut self, sql: &str) -> Result<()> {
        self.try_rows(sql).map(drop).with_context(|| sql.to_owned())
    }

    /// Runs statements and returns all their rows as text.
    pub fn rows(&mut self, sql: &str) -> Result<Rows> {
        self.try_rows(sql).with_context(|| sql.to_owned())
    }

    /// As [`Session::rows`], but returns the server's error unchanged.
    pub fn try_rows(&mut self, sql: &str) -> Result<Rows, Fault> {
        let answer = self.client.simple_query(&edition::statements(sql));
        let messages = answer.map_err(|error| self.refused_by(error))?;
        Ok(messages.iter().filter_map(row_of).map(texts).collect())
    }

    /// The single value of a statement, as text.
    pub fn text(&mut self, sql: &str) -> Result<Option<String>> {
        let mut rows = self.rows(sql)?;
        ensure!(rows.len() == 1, "{} rows, not one: {sql}", rows.len());
        ensure!(rows[0].len() == 1, "{} columns, not one: {sql}", rows[0].len());
        Ok(rows.remove(0).remove(0))
    }

    /// The single value of a statement with parameters.
    pub fn one<T>(&mut self, sql: &str, params: Params) -> Result<T>
    where
        T: for<'a> FromSql<'a>,
    {
        self.try_one(sql, params).with_context(|| sql.to_owned())
    }

    /// As [`Session::one`], but returns the server's error unchanged.
    pub fn try_one<T>(&mut self, sql: &str, params: Params) -> Result<T, Fault>
    where
        T: for<'a> FromSql<'a>,
    {
        let answer = self.client.query_one(sql, params);
        Ok(answer.map_err(|error| self.refused_by(error))?.try_get(0)?)
    }

    /// The fault of an error, once the server has rolled back: the driver returns an error as soon as it comes, while
    /// its transaction still has its locks.
    fn refused_by(&mut self, error: postgres::Error) -> Fault {
        if error.as_db_error().is_some() {
            let _ = self.client.simple_query("");
        }
        Fault::from(error)
    }

    /// Runs statements that must fail with that SQLSTATE, and returns the error.
    pub fn refused(&mut self, sql: &str, sqlstate: &str) -> Result<Fault> {
        fault::expect_err(self.try_rows(sql), sqlstate).with_context(|| sql.to_owned())
    }
}

impl Deref for Session {
    type Target = Client;
    fn deref(&self) -> &Client {
        &self.client
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}

fn row_of(message: &SimpleQueryMessage) -> Option<&postgres::SimpleQueryRow> {
    match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    }
}

fn texts(row: &postgres::SimpleQueryRow) -> Vec<Option<String>> {
    (0..row.len()).map(|column| row.get(column).map(str::to_owned)).collect()
}

/// SQL for a server time as a number: microseconds since 1970.
pub fn microseconds(time: &str) -> String {
    format!("(extract(epoch FROM {time}) * 1000000)::bigint")
}

/// Quotes a text as an SQL literal.
pub fn literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if text.contains('\\') {
        format!("E'{}'", quoted.replace('\\', "\\\\"))
    } else {
        format!("'{quoted}'")
    }
}

/// A statement that sets a setting only if the version of PostgreSQL still has it.
pub fn set_if_known(setting: &str) -> String {
    format!(
        "DO $$ BEGIN SET {setting}; EXCEPTION WHEN feature_not_supported OR undefined_object THEN NULL; END $$"
    )
}
