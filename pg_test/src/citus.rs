//! Citus: a coordinator, and workers among which tables are distributed. It is in no package, so it is used only if it
//! was built and installed beside the PostgreSQL of the tests.

use crate::client::Session;
use crate::cluster::{Builder, Cluster};
use crate::install_dir::InstallDir;
use crate::skipped::left_out;
use anyhow::{Context, Result};
use std::sync::Arc;

/// A coordinator with its workers, whose database `postgres` has both extensions.
pub struct Citus {
    coordinator: Cluster,
    workers: Vec<Cluster>,
}

impl Citus {
    /// Starts this number of workers. Without Citus, the test is ignored.
    pub fn start(install_dir: &Arc<InstallDir>, workers: usize) -> Result<Citus> {
        if !install_dir.extension_dir().join("citus.control").exists() {
            return left_out("no Citus is installed beside this PostgreSQL");
        }
        let mut citus = Citus { coordinator: node(install_dir)?, workers: Vec::new() };
        let port = citus.coordinator.port();
        citus.connect()?.run(&format!("SELECT citus_set_coordinator_host('127.0.0.1', {port})"))?;
        for _ in 0..workers {
            citus.add_worker()?;
        }
        // Citus also creates it on the workers.
        citus.connect()?.run("CREATE EXTENSION pg_fence")?;
        Ok(citus)
    }

    /// Adds a worker, which has no shards at first, and returns its number.
    pub fn add_worker(&mut self) -> Result<usize> {
        let worker = node(self.coordinator.install_dir())?;
        self.connect()?.run(&format!("SELECT citus_add_node('127.0.0.1', {})", worker.port()))?;
        self.workers.push(worker);
        Ok(self.workers.len() - 1)
    }

    pub fn coordinator(&self) -> &Cluster {
        &self.coordinator
    }

    pub fn worker(&self, number: usize) -> &Cluster {
        &self.workers[number]
    }

    /// A session with the coordinator, which may create triggers on distributed tables.
    pub fn connect(&self) -> Result<Session> {
        let conninfo = self.coordinator.conninfo("postgres");
        conninfo.set("citus.enable_unsafe_triggers", "on").connect()
    }

    /// Makes Citus send calls on a lease to the node of the row whose key is the lease's name.
    pub fn distribute_calls(&self, table: &str) -> Result<()> {
        self.connect()?.run(&format!(
            "SELECT create_distributed_function(p.oid::regprocedure, 'name', colocate_with => '{table}', force_delegation => true)
               FROM pg_proc AS p JOIN pg_extension AS e ON e.extnamespace = p.pronamespace
              WHERE e.extname = 'pg_fence' AND p.proname LIKE 'lease\\_%' AND p.proargnames[1] = 'name'"
        ))
    }

    /// The worker that has the row with this key.
    pub fn home_of(&self, table: &str, key: &str) -> Result<usize> {
        let port: i32 = self.connect()?.one(
            "SELECT nodeport::integer FROM pg_dist_shard_placement
              WHERE shardid = get_shard_id_for_distribution_column($1::text::regclass, $2::text)",
            &[&table, &key],
        )?;
        let number = self.workers.iter().position(|worker| i32::from(worker.port()) == port);
        number.with_context(|| format!("{table} {key} is on port {port}, which is no worker's"))
    }

    /// A key of the table that is on that worker.
    pub fn key_on(&self, table: &str, worker: usize) -> Result<String> {
        self.connect()?.one(
            "SELECT 'key' || n FROM generate_series(0, 999) AS n JOIN pg_dist_shard_placement AS p
                 ON p.shardid = get_shard_id_for_distribution_column($1::text::regclass, 'key' || n)
              WHERE p.nodeport = $2 ORDER BY n LIMIT 1",
            &[&table, &i32::from(self.worker(worker).port())],
        )
    }

    /// Moves the shard of the row to a worker, together with its colocated shards.
    pub fn move_shard(&self, table: &str, key: &str, to: usize) -> Result<()> {
        let (from, to) = (self.worker(self.home_of(table, key)?).port(), self.worker(to).port());
        self.connect()?.run(&format!(
            "SELECT citus_move_shard_placement(get_shard_id_for_distribution_column('{table}', '{key}'::text),
                    '127.0.0.1', {from}, '127.0.0.1', {to}, 'block_writes')"
        ))
    }
}

fn node(install_dir: &Arc<InstallDir>) -> Result<Cluster> {
    let node = Builder::new(install_dir.clone())
        .own_identity()
        .set("shared_preload_libraries", "citus")
        // Nodes connect on loopback, where there are no certificates.
        .set("citus.node_conninfo", "sslmode=prefer")
        .set("citus.shard_count", "4")
        .set("wal_level", "logical")
        .start()?;
    node.connect("postgres")?.run("CREATE EXTENSION citus")?;
    Ok(node)
}
