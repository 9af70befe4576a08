//! Making clusters.

use super::{Cluster, free_port};
use crate::install_dir::InstallDir;
use crate::process;
use anyhow::Result;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU16};
use std::sync::{Arc, Mutex};

/// The name under which a primary waits for its standby.
pub const STANDBY: &str = "standby";

/// Settings for a new cluster, which is durable by default, as for users.
pub struct Builder {
    install_dir: Arc<InstallDir>,
    settings: Vec<(String, String)>,
    environment: Vec<(String, String)>,
    own_identity: bool,
}

impl Builder {
    /// A cluster that runs the programs of `install_dir`.
    pub fn new(install_dir: Arc<InstallDir>) -> Builder {
        let settings = [
            ("listen_addresses", "127.0.0.1"),
            ("max_connections", "300"),
            ("max_prepared_transactions", "64"),
            ("jit", "off"),
            ("log_line_prefix", "%m [%p] %u@%d "),
            ("timezone", "UTC"),
            ("log_timezone", "UTC"),
        ];
        let own = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        let settings = settings.into_iter().map(own).collect();
        Builder { install_dir, settings, environment: Vec::new(), own_identity: false }
    }

    pub fn set(mut self, name: &str, value: &str) -> Builder {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Adds a variable to the environment of its processes.
    pub fn env(mut self, name: &str, value: &str) -> Builder {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Without fsync, for tests of pure logic only.
    pub fn without_fsync(self) -> Builder {
        self.set("fsync", "off")
    }

    /// With a system identifier of its own; otherwise the clusters of a run have the same.
    pub fn own_identity(mut self) -> Builder {
        self.own_identity = true;
        self
    }

    /// Makes the cluster and starts it.
    pub fn start(self) -> Result<Cluster> {
        let cluster = self.create()?;
        cluster.start()?;
        Ok(cluster)
    }

    /// Makes the cluster without starting it.
    pub fn create(self) -> Result<Cluster> {
        let own_identity = self.own_identity;
        self.create_by(|install_dir, data| {
            if own_identity { install_dir.initdb(data) } else { install_dir.clone_template(data) }
        })
    }

    /// Makes a cluster whose data directory is filled by `fill`, for example from a base backup or a snapshot. The path
    /// does not exist before.
    pub fn create_by(self, fill: impl FnOnce(&InstallDir, &Path) -> Result<()>) -> Result<Cluster> {
        let dir = self.install_dir.new_dir("cluster")?;
        let port = free_port()?;
        let cluster = Cluster {
            install_dir: self.install_dir.clone(),
            dir,
            environment: self.environment,
            port: AtomicU16::new(port),
            was_ready: AtomicBool::new(false),
            process: Mutex::new(None),
        };
        fill(&self.install_dir, &cluster.data())?;
        let mut settings = self.settings;
        settings.push(("port".to_owned(), port.to_string()));
        let socket_dir = cluster.dir().to_string_lossy().into_owned();
        settings.push(("unix_socket_directories".to_owned(), socket_dir));
        // A killed server leaves its shared memory, which ends with the data directory if it lies there.
        settings.push(("dynamic_shared_memory_type".to_owned(), "mmap".to_owned()));
        let settings: Vec<(&str, &str)> =
            settings.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        cluster.configure(&settings)?;
        Ok(cluster)
    }

    /// Makes a streaming standby of `primary`, without starting it.
    pub fn standby_of(self, primary: &Cluster) -> Result<Cluster> {
        let from = primary.conninfo("postgres").application(STANDBY).to_string();
        let standby =
            self.create_by(|install_dir, data| base_backup(install_dir, primary, data))?;
        standby
            .configure(&[("primary_conninfo", &from), ("recovery_target_timeline", "latest")])?;
        fs::write(standby.data().join("standby.signal"), "")?;
        Ok(standby)
    }
}

/// Takes a base backup of a running cluster into `data`.
pub fn base_backup(install_dir: &InstallDir, primary: &Cluster, data: &Path) -> Result<()> {
    let mut command = install_dir.command("pg_basebackup")?;
    command
        .args(["--checkpoint=fast", "--wal-method=stream", "--no-sync", "--dbname"])
        .arg(primary.conninfo("postgres").to_string())
        .arg("-D")
        .arg(data);
    process::output_of(&mut command)?;
    Ok(())
}
