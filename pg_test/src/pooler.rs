//! PgBouncer in front of a server.

use crate::client::Conninfo;
use crate::cluster::{Cluster, free_port};
use crate::harness::Harness;
use crate::process::{self, PATIENCE, wait_until};
use crate::setup::{self, Package};
use anyhow::{Result, bail};
use nix::sys::signal::Signal;
use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Stdio};

/// Returns the Debian package. Its service is left disabled.
pub fn package() -> Package {
    Package::new("pgbouncer", "/usr/sbin/pgbouncer").without_service("pgbouncer")
}

/// A running PgBouncer, killed when dropped.
pub struct Pooler {
    process: Child,
    port: u16,
    dir: PathBuf,
}

impl Pooler {
    /// Starts a PgBouncer in transaction mode with at most `connections` to the server for each database and role.
    pub fn start(harness: &Harness, cluster: &Cluster, connections: usize) -> Result<Pooler> {
        Pooler::start_in(harness, cluster, connections, "transaction")
    }

    /// Starts a PgBouncer in the mode `transaction`, `statement` or `session`.
    pub fn start_in(
        harness: &Harness,
        cluster: &Cluster,
        connections: usize,
        mode: &str,
    ) -> Result<Pooler> {
        Pooler::start_with(harness, cluster, connections, mode, "extra_float_digits,options")
    }

    /// Starts a PgBouncer that ignores these startup parameters. It rejects clients that send other unknown ones.
    pub fn start_with(
        harness: &Harness,
        cluster: &Cluster,
        connections: usize,
        mode: &str,
        ignored: &str,
    ) -> Result<Pooler> {
        let settings = format!(
            "pool_mode = {mode}\ndefault_pool_size = {connections}\n\
             ignore_startup_parameters = {ignored}\nserver_login_retry = 1\n"
        );
        Pooler::start_set(harness, cluster, &settings)
    }

    /// Starts one with those lines in its file, beside where it listens and whom it lets in.
    pub fn start_set(harness: &Harness, cluster: &Cluster, settings: &str) -> Result<Pooler> {
        setup::ensure(&[package()])?;
        let dir = harness.install_dir().new_dir("pooler")?;
        let port = free_port()?;
        let settings = format!(
            "[databases]\n* = host=127.0.0.1 port={}\n\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
             listen_port = {port}\nunix_socket_dir =\nauth_type = trust\nauth_file = {users}\n\
             max_client_conn = 500\n{settings}",
            cluster.port(),
            users = dir.join("users").display(),
        );
        fs::write(dir.join("ini"), settings)?;
        fs::write(dir.join("users"), "\"postgres\" \"\"\n")?;
        let log = fs::File::create(dir.join("log"))?;
        let mut command = harness.rundir().command("/usr/sbin/pgbouncer");
        process::as_server_user(&mut command)?;
        let process = command
            .arg(dir.join("ini"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let pooler = Pooler { process, port, dir };
        let ready = wait_until("the pooler listens", PATIENCE, || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        if ready.is_err() {
            bail!("the pooler does not start:\n{}", fs::read_to_string(pooler.dir.join("log"))?);
        }
        Ok(pooler)
    }

    /// Adds a role that may connect.
    pub fn admit(&self, role: &str) -> Result<()> {
        let mut users = fs::OpenOptions::new().append(true).open(self.dir.join("users"))?;
        writeln!(users, "\"{role}\" \"\"")?;
        // PgBouncer reloads its files on this signal.
        process::signal(self.process.id() as i32, Signal::SIGHUP)?;
        let conninfo = self.conninfo("postgres").user(role);
        let admitted = || conninfo.connect().is_ok();
        wait_until("the pooler lets the role in", PATIENCE, admitted)
    }

    /// Returns how to connect to `dbname` through the pooler.
    pub fn conninfo(&self, dbname: &str) -> Conninfo {
        Conninfo::new(self.port, dbname).application("pooled")
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_dir_all(&self.dir);
    }
}
