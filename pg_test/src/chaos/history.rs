//! The history of a run: workers' records, and traces in the database.

use super::maintenance::{FinishedJob, MaintenanceReport};
use super::nemesis::{Disturbed, Nemesis};
use super::record::{self, Record};
use super::rows::Statement;
use super::worker::DATABASE;
use crate::client::Session;
use crate::source_tree;
use anyhow::Result;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::collections::HashSet;
use std::fs;

/// The trace of a token of a grant, in the order (`n`) in which the lease was locked.
#[derive(Debug, Clone, Deserialize)]
pub struct Grant {
    pub lease: i32,
    /// The position in that order.
    pub n: i64,
    pub token: i64,
    /// The transaction; `None` for a revocation.
    pub id: Option<i64>,
    /// The intended life of the grant in microseconds; `None` if that is meaningless.
    pub lasts_us: Option<i64>,
}

/// The trace of a write.
#[derive(Debug, Clone, Deserialize)]
pub struct Write {
    pub relation: String,
    pub row: i32,
    pub lease: i32,
    /// The version of the row that the write made.
    pub version: i64,
    /// The token that the write left in the row.
    pub token: i64,
    /// The first token of the writer's grant.
    pub first: i64,
    pub id: i64,
    /// The first token of the latest grant that could have replaced the writer's, right before the commit.
    pub current: Option<i64>,
}

/// The kind of statement that changed a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Operation {
    Insert,
    Update,
    Delete,
}

/// A change of a row lease, as logged by a trigger.
#[derive(Debug, Clone, Deserialize)]
pub struct Change {
    pub row: i32,
    pub op: Operation,
    /// The fence before the change; the next field is the one after it.
    pub was: Option<i64>,
    pub now: Option<i64>,
    /// The remaining life of the row's claim in microseconds: negative once it is over, `None` if it had no deadline.
    pub held_us: Option<i64>,
    pub worker: u32,
    pub statement: Statement,
    pub id: i64,
}

/// A row lease at the end of the run.
#[derive(Debug, Clone, Deserialize)]
pub struct Run {
    pub row: i32,
    pub fence: Option<i64>,
}

/// A row at the end of the run.
#[derive(Debug, Clone, Deserialize)]
pub struct Row {
    pub relation: String,
    pub row: i32,
    pub version: i64,
    pub fence: Option<i64>,
}

/// All that is known of a run.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// The workers' records, sorted by time.
    pub records: Vec<Record>,
    /// The disturbances of the run.
    pub disturbances: Vec<Disturbed>,
    /// The maintenance that was done, with its findings.
    pub upkeep: MaintenanceReport,
    /// Server processes that crashed by themselves, according to the servers' logs.
    pub crashes: Vec<String>,
    /// Sorted by lease and order.
    pub grants: Vec<Grant>,
    /// Sorted by table, row and version.
    pub writes: Vec<Write>,
    pub rows: Vec<Row>,
    /// Sorted by row and the order of its locks.
    pub changes: Vec<Change>,
    pub runs: Vec<Run>,
    /// The number of failovers.
    pub era: u32,
}

impl History {
    /// Collects all of the history except for the maintenance.
    pub fn of(nemesis: &Nemesis) -> Result<History> {
        let mut history = History {
            records: record::read_all(&nemesis.dir.join("log"))?,
            disturbances: nemesis.done.clone(),
            era: nemesis.instructions.era,
            crashes: nemesis.servers.crashes(),
            ..History::default()
        };
        history.read(&mut nemesis.servers.primary().connect(DATABASE)?)?;
        Ok(history)
    }

    /// Reads the traces that transactions have left in the database.
    fn read(&mut self, session: &mut Session) -> Result<()> {
        self.grants = all(
            session,
            "SELECT lease, n, token, uid AS id, CASE WHEN what IN ('acquire', 'renew')
                    THEN (extract(epoch FROM expires - requested) * 1000000)::bigint END AS lasts_us
               FROM grants ORDER BY lease, n, token",
        )?;
        self.writes = all(
            session,
            "SELECT relation, id AS row, lease, version, token, first, uid AS id, current FROM writes
              ORDER BY relation, writes.id, version, token",
        )?;
        self.rows = all(
            session,
            "SELECT 'bound' AS relation, id AS row, version, fence FROM bound
             UNION ALL SELECT 'free', id, version, fence FROM free
             UNION ALL SELECT 'desk', id, version, fence FROM desk",
        )?;
        self.changes = all(
            session,
            "SELECT id AS row, op, was, now, held_us, worker, statement, uid AS id FROM changes
              ORDER BY changes.id, n",
        )?;
        self.runs = all(session, "SELECT id AS row, fence FROM runs")?;
        Ok(())
    }

    /// If there are violations, writes the whole history to a file, a line for each entry, to see what led to them.
    pub fn keep_where(&self, name: &str, violations: &[String]) -> Result<()> {
        if violations.is_empty() {
            return Ok(());
        }
        let lines = violations.iter().cloned();
        let lines = lines.chain(self.disturbances.iter().map(|one| format!("{} {one:?}", one.at)));
        let upkeep = self.upkeep.done.iter().map(|done| {
            let FinishedJob { at, ended, text, failure, .. } = done;
            format!("{at} maintenance, until {ended}: {text} {failure:?}")
        });
        let lines = lines.chain(upkeep);
        let lines = lines.chain(self.records.iter().map(|one| format!("{} {one:?}", one.at)));
        let lines = lines.chain(self.grants.iter().map(|grant| format!("{grant:?}")));
        let lines = lines.chain(self.writes.iter().map(|write| format!("{write:?}")));
        let lines = lines.chain(self.rows.iter().map(|row| format!("{row:?}")));
        let lines = lines.chain(self.changes.iter().map(|change| format!("{change:?}")));
        let lines = lines.chain(self.runs.iter().map(|run| format!("{run:?}")));
        let path = source_tree::target_dir().join(format!("{name}.txt"));
        fs::write(&path, lines.map(|line| line + "\n").collect::<String>())?;
        eprintln!("The history is in {}.", path.display());
        Ok(())
    }

    /// The transactions that have left a trace.
    pub fn survivors(&self) -> HashSet<i64> {
        let grants = self.grants.iter().filter_map(|grant| grant.id);
        let writes = self.writes.iter().map(|write| write.id);
        grants.chain(writes).chain(self.changes.iter().map(|change| change.id)).collect()
    }
}

/// The rows of a query whose columns are the fields.
fn all<T: DeserializeOwned>(session: &mut Session, sql: &str) -> Result<Vec<T>> {
    let rows = session.query(&format!("SELECT to_jsonb(t) FROM ({sql}) AS t"), &[])?;
    rows.iter().map(|row| Ok(serde_json::from_value(row.try_get(0)?)?)).collect()
}
