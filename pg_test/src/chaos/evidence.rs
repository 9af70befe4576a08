//! The evidence of a run: workers' records, and the traces in the database.

use super::maintenance::Upkeep;
use super::nemesis::{Disturbed, Nemesis};
use super::record::{self, Record};
use super::worker::DATABASE;
use crate::client::Session;
use crate::source_tree;
use anyhow::Result;
use std::collections::HashSet;
use std::fs::File;
use std::io::{BufWriter, Write as _};

/// A trace of a grant's token, in the order (`n`) in which the lease was locked.
#[derive(Debug, Clone)]
pub struct Grant {
    pub lease: i32,
    /// Its place in the order.
    pub n: i64,
    pub token: i64,
    /// The transaction; None for a revocation.
    pub id: Option<i64>,
    /// How long it was to last when it was made, in microseconds; None where that means nothing.
    pub lasts_us: Option<i64>,
}

/// A trace of a write.
#[derive(Debug, Clone)]
pub struct Write {
    pub relation: String,
    pub row: i32,
    pub lease: i32,
    /// The version that it made.
    pub version: i64,
    /// The token that it left in the row.
    pub token: i64,
    /// The first token of the writer's grant.
    pub first: i64,
    pub id: i64,
    /// The first token of the latest grant that could have replaced the writer's, when the transaction was
    /// about to commit.
    pub current: Option<i64>,
}

/// A row as it is at the end.
#[derive(Debug, Clone)]
pub struct Row {
    pub relation: String,
    pub row: i32,
    pub version: i64,
    pub fence: Option<i64>,
}

/// All that is known of a run.
#[derive(Debug, Clone, Default)]
pub struct Evidence {
    /// The workers' records, by time.
    pub records: Vec<Record>,
    /// The disturbances of the run.
    pub disturbances: Vec<Disturbed>,
    /// The maintenance that was done, and its findings.
    pub upkeep: Upkeep,
    /// Server processes that died of themselves, as the servers' logs tell.
    pub crashes: Vec<String>,
    /// By lease and order.
    pub grants: Vec<Grant>,
    /// By table, row and version.
    pub writes: Vec<Write>,
    pub rows: Vec<Row>,
    /// How many failovers there were.
    pub era: u32,
}

impl Evidence {
    /// All that is known of what has happened, but for the maintenance.
    pub fn of(nemesis: &Nemesis) -> Result<Evidence> {
        let mut evidence = Evidence {
            records: record::read_all(&nemesis.dir.join("log"))?,
            disturbances: nemesis.done.clone(),
            era: nemesis.instructions.era,
            crashes: nemesis.servers.crashes(),
            ..Evidence::default()
        };
        evidence.read(&mut nemesis.servers.primary().connect(DATABASE)?)?;
        Ok(evidence)
    }

    /// Reads the traces that the transactions have left in the database.
    fn read(&mut self, session: &mut Session) -> Result<()> {
        let number = |text: &Option<String>| text.as_deref().and_then(|t| t.parse::<i64>().ok());
        let sure = |text: &Option<String>| number(text).unwrap_or(-1);
        let rows = session.rows(
            "SELECT lease, n, token, uid, CASE WHEN what IN ('acquire', 'renew')
                    THEN (extract(epoch FROM expires - asked) * 1000000)::bigint END
               FROM grants ORDER BY lease, n, token",
        )?;
        self.grants = rows
            .iter()
            .map(|r| Grant {
                lease: sure(&r[0]) as i32,
                n: sure(&r[1]),
                token: sure(&r[2]),
                id: number(&r[3]),
                lasts_us: number(&r[4]),
            })
            .collect();
        let rows = session.rows(
            "SELECT relation, id, lease, version, token, first, uid, current FROM writes
              ORDER BY relation, id, version, token",
        )?;
        self.writes = rows
            .iter()
            .map(|r| Write {
                relation: r[0].clone().unwrap_or_default(),
                row: sure(&r[1]) as i32,
                lease: sure(&r[2]) as i32,
                version: sure(&r[3]),
                token: sure(&r[4]),
                first: sure(&r[5]),
                id: sure(&r[6]),
                current: number(&r[7]),
            })
            .collect();
        let rows = session.rows(
            "SELECT 'bound', id, version, fence FROM bound
             UNION ALL SELECT 'free', id, version, fence FROM free
             UNION ALL SELECT 'desk', id, version, fence FROM desk",
        )?;
        self.rows = rows
            .iter()
            .map(|r| Row {
                relation: r[0].clone().unwrap_or_default(),
                row: sure(&r[1]) as i32,
                version: sure(&r[2]),
                fence: number(&r[3]),
            })
            .collect();
        Ok(())
    }

    /// Where there are violations, writes all of it down, a line each, for those who want to see what led to them.
    pub fn keep_where(&self, name: &str, violations: &[String]) -> Result<()> {
        if violations.is_empty() {
            return Ok(());
        }
        let path = source_tree::target_dir().join(format!("{name}.txt"));
        let mut file = BufWriter::new(File::create(&path)?);
        for violation in violations {
            writeln!(file, "{violation}")?;
        }
        for disturbance in &self.disturbances {
            writeln!(file, "{} {disturbance:?}", disturbance.at)?;
        }
        for done in &self.upkeep.done {
            writeln!(
                file,
                "{} maintenance, until {}: {} {:?}",
                done.at, done.ended, done.text, done.failure
            )?;
        }
        for Record { at, worker, era, id, event } in &self.records {
            writeln!(file, "{at} worker {worker}, era {era}, transaction {id}: {event:?}")?;
        }
        for grant in &self.grants {
            writeln!(file, "{grant:?}")?;
        }
        for write in &self.writes {
            writeln!(file, "{write:?}")?;
        }
        for row in &self.rows {
            writeln!(file, "{row:?}")?;
        }
        file.flush()?;
        eprintln!("The evidence is in {}.", path.display());
        Ok(())
    }

    /// The transactions that have left a trace.
    pub fn survivors(&self) -> HashSet<i64> {
        let grants = self.grants.iter().filter_map(|grant| grant.id);
        grants.chain(self.writes.iter().map(|write| write.id)).collect()
    }
}
