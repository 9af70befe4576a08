//! The measured server, and the peers beside it.

use crate::Options;
use anyhow::Result;
use pg_test::cluster::Builder;
use pg_test::{Cluster, Conninfo, Database, Harness, Session};
use std::sync::Mutex;
use std::time::Instant;

/// The number of names used by the uncontended races. The tables of `peers::sql` have a row for each.
pub const NAMES: usize = 10_000;

/// Changes of PostgreSQL's defaults: room for 200 clients, and no checkpoint in the middle of a slice.
const SETTINGS: &[(&str, &str)] =
    &[("max_connections", "300"), ("max_wal_size", "8GB"), ("checkpoint_timeout", "1h")];

fn server(harness: &Harness) -> Result<Cluster> {
    let set = |builder: Builder, (name, value): &(&str, &str)| builder.set(name, value);
    SETTINGS.iter().fold(harness.builder(), set).start()
}

/// A durable PostgreSQL server for the bench, with its files on the disk.
pub struct Workbench<'a> {
    /// The test environment of the run.
    pub harness: &'a Harness,
    /// The sections to measure, and their length.
    pub options: Options,
    cluster: Cluster,
    skipped: Mutex<Vec<String>>,
    started: Instant,
}

impl<'a> Workbench<'a> {
    pub fn make(harness: &'a Harness, options: Options) -> Result<Workbench<'a>> {
        let cluster = server(harness)?;
        cluster.connect("postgres")?.run("CREATE EXTENSION pg_fence")?;
        let skipped = Mutex::new(Vec::new());
        Ok(Workbench { harness, options, cluster, skipped, started: Instant::now() })
    }

    /// Reports progress to whoever waits for the run.
    pub fn progress(&self, what: &str) {
        let seconds = self.started.elapsed().as_secs();
        eprintln!("{:>3}:{:02}  {what}", seconds / 60, seconds % 60);
    }

    /// Another server with the same settings.
    pub fn another_server(&self) -> Result<Cluster> {
        server(self.harness)
    }

    /// A new database on the server, with the extension.
    pub fn database(&self) -> Result<Database> {
        Database::with_extension(self.conninfo())
    }

    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The address for clients: TCP on loopback, as for all peers.
    pub fn conninfo(&self) -> Conninfo {
        self.cluster.conninfo("postgres")
    }

    /// A session on the server.
    pub fn connect(&self) -> Result<Session> {
        self.conninfo().connect()
    }

    /// Notes that something cannot be measured here, with the reason.
    pub fn skip(&self, what: &str, why: &anyhow::Error) {
        let line = format!("{what}: {why:#}");
        eprintln!("skipped: {line}");
        let mut skipped = self.skipped.lock().unwrap_or_else(|e| e.into_inner());
        if !skipped.contains(&line) {
            skipped.push(line);
        }
    }

    /// The peers that could not be measured.
    pub fn skipped(&self) -> Vec<String> {
        self.skipped.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// The machine and the versions, for the head of the report.
    pub fn description(&self) -> Result<Vec<String>> {
        let mut session = self.connect()?;
        let version: String = session.one("SELECT current_setting('server_version')", &[])?;
        let durable: String = session.one(
            "SELECT format('fsync = %s, synchronous_commit = %s', current_setting('fsync'),
                           current_setting('synchronous_commit'))",
            &[],
        )?;
        let cores = std::thread::available_parallelism().map_or(0, |n| n.get());
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().unwrap_or_default().to_owned();
        let changed: Vec<String> = SETTINGS.iter().map(|(n, v)| format!("{n} = {v}")).collect();
        Ok(vec![
            format!("pg_fence {} on PostgreSQL {version}", pg_test::extension::VERSION),
            format!("{durable}; beside the defaults: {}, jit = off", changed.join(", ")),
            format!("{cores} cores, load at the start {load}; clients on the same machine"),
            format!(
                "{} rounds, slices of {} ms; ratios are medians of those within a round (p25–p75)",
                self.options.rounds(),
                self.options.slice().as_millis()
            ),
        ])
    }
}
