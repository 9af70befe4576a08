//! A server: its data directory, and its process from the start to the kill.

use crate::cassert;
use crate::client::{Conninfo, Session};
use crate::install_dir::InstallDir;
use crate::killed_server;
use crate::process::{self, PATIENCE, wait_until};
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

mod builder;

pub use builder::{Builder, STANDBY, base_backup};

/// A PostgreSQL server with a data directory of its own. It is killed and removed when dropped.
///
/// All methods take `&self`, so several threads may share a cluster (through an [`Arc`]).
pub struct Cluster {
    install_dir: Arc<InstallDir>,
    dir: PathBuf,
    environment: Vec<(String, String)>,
    port: AtomicU16,
    /// True if it has ever accepted a client, so that others may know its port.
    was_ready: AtomicBool,
    process: Mutex<Option<Child>>,
}

/// The words of PostgreSQL and the operating system about a port in use.
const TAKEN: &str = "Address already in use";
/// The number of ports to try before giving up.
const PORTS_TRIED: usize = 5;

impl Cluster {
    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port.load(Ordering::Relaxed)
    }

    pub fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    /// The directory of the socket and the log.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The installation that the server runs.
    pub fn install_dir(&self) -> &Arc<InstallDir> {
        &self.install_dir
    }

    /// The superuser's connection.
    pub fn conninfo(&self, dbname: &str) -> Conninfo {
        Conninfo::new(self.port(), dbname)
    }

    /// Opens a superuser's session in a database.
    pub fn connect(&self, dbname: &str) -> Result<Session> {
        self.conninfo(dbname).connect()
    }

    /// The server's log so far.
    pub fn log(&self) -> Result<String> {
        Ok(String::from_utf8_lossy(&fs::read(self.log_file())?).into_owned())
    }

    pub fn log_file(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// Adds settings at the end of `postgresql.auto.conf`, where the last one counts. They take effect at the next
    /// start, or with [`Cluster::reload`].
    pub fn configure(&self, settings: &[(&str, &str)]) -> Result<()> {
        let mut file =
            OpenOptions::new().append(true).open(self.data().join("postgresql.auto.conf"))?;
        for (name, value) in settings {
            writeln!(file, "{name} = '{}'", value.replace('\'', "''"))?;
        }
        Ok(())
    }

    /// Makes the server read its settings again.
    pub fn reload(&self) -> Result<()> {
        process::signal(self.pid()?, Signal::SIGHUP)
    }

    /// Starts the server and waits until it accepts clients (a standby: readers). If nobody knows its port yet and
    /// another process has taken that, the server is started on another one.
    pub fn start(&self) -> Result<()> {
        for _ in 1..PORTS_TRIED {
            let logged = self.log().map_or(0, |log| log.len());
            self.start_without_waiting()?;
            let ready = self.wait_ready(PATIENCE);
            let is_taken = ready.is_err()
                && self.has_ended()
                && self.log()?.get(logged..).is_some_and(|log| log.contains(TAKEN));
            if !is_taken || self.was_ready.load(Ordering::Relaxed) {
                return ready;
            }
            *self.process() = None;
            self.take_another_port()?;
        }
        self.start_without_waiting()?;
        self.wait_ready(PATIENCE)
    }

    fn take_another_port(&self) -> Result<()> {
        let port = free_port()?;
        ports_given().remove(&self.port.swap(port, Ordering::Relaxed));
        self.configure(&[("port", &port.to_string())])
    }

    /// Starts the server's process without waiting.
    pub fn start_without_waiting(&self) -> Result<()> {
        let mut process = self.process();
        ensure!(process.is_none(), "the server has been started already");
        let log = File::options().create(true).append(true).open(self.log_file())?;
        let child = self
            .install_dir
            .command("postgres")?
            .envs(self.environment.iter().cloned())
            .arg("-D")
            .arg(self.data())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start postgres")?;
        *process = Some(child);
        Ok(())
    }

    /// Waits until the server accepts clients; fails at once if its process ends instead.
    pub fn wait_ready(&self, limit: Duration) -> Result<()> {
        let conninfo = self.conninfo("postgres").to_string();
        let mut ended = false;
        let ready = wait_until("the server accepts connections", limit, || {
            ended = self.has_ended();
            ended || self.listens() && Session::connect(&conninfo).is_ok()
        });
        if ended || ready.is_err() {
            bail!("the server does not start; its log ends:\n{}", self.log_end(40));
        }
        self.was_ready.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Returns true if the server listens. Another process may listen on its port, so this checks the socket in its
    /// directory, on which it listens together with the port.
    fn listens(&self) -> bool {
        UnixStream::connect(self.dir.join(format!(".s.PGSQL.{}", self.port()))).is_ok()
    }

    /// The last lines of the log.
    pub fn log_end(&self, lines: usize) -> String {
        let log = self.log().unwrap_or_default();
        let all: Vec<&str> = log.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    /// Copies failed assertions of this server to where a run on a PostgreSQL with assertions collects them: the log is
    /// removed with the cluster, and a background process that dies fails no test.
    pub fn report_failed_assertions(&self) {
        let Some(path) = std::env::var_os(cassert::FAILURES_VARIABLE) else { return };
        let failures = cassert::failures_in(&self.log().unwrap_or_default());
        let file = OpenOptions::new().create(true).append(true).open(path);
        if let Ok(mut file) = file {
            let _ = file.write_all(
                failures.iter().map(|text| format!("{text}\n")).collect::<String>().as_bytes(),
            );
        }
    }

    fn has_ended(&self) -> bool {
        match &mut *self.process() {
            Some(child) => !matches!(child.try_wait(), Ok(None)),
            None => true,
        }
    }

    /// Returns true if the server's process is running.
    pub fn is_running(&self) -> bool {
        !self.has_ended()
    }

    /// The pid of the postmaster.
    pub fn pid(&self) -> Result<i32> {
        let process = self.process();
        let child = process.as_ref().context("the server does not run")?;
        Ok(child.id() as i32)
    }

    /// Ends the sessions, and waits for a clean shutdown.
    pub fn stop(&self) -> Result<()> {
        process::signal(self.pid()?, Signal::SIGINT)?;
        wait_until("the server stops", PATIENCE, || self.has_ended())?;
        *self.process() = None;
        Ok(())
    }

    /// Kills the postmaster and all its children with SIGKILL, and waits until they are gone.
    pub fn kill9(&self) -> Result<()> {
        let Some(mut child) = self.process().take() else {
            bail!("the server does not run");
        };
        let postmaster = child.id() as i32;
        // The postmaster is stopped first, so that it cannot react to the end of its children. It may be forking, and
        // that child must not be missed.
        process::freeze(postmaster)?;
        let family = process::children_of(postmaster);
        // The postmaster is killed last: a backend that notices its end may still make other servers roll back, as
        // Citus does.
        for &pid in &family {
            let _ = process::signal(pid, Signal::SIGKILL);
        }
        let _ = process::signal(postmaster, Signal::SIGKILL);
        child.wait()?;
        // The next start fails while one of them is still attached to the shared memory.
        wait_until("all backends are gone", PATIENCE, || {
            !family.iter().any(|&pid| process::is_alive(pid))
        })
    }

    /// Stops the server in fast mode and starts it again.
    pub fn restart(&self) -> Result<()> {
        self.stop()?;
        self.start()
    }

    /// Runs statements, one per line, in single-user mode while the server is stopped; returns the output.
    pub fn single_user(&self, dbname: &str, script: &str) -> Result<String> {
        let mut child = self
            .install_dir
            .command("postgres")?
            .args(["--single", "-D"])
            .arg(self.data())
            .arg(dbname)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        child.stdin.take().context("no pipe")?.write_all(script.as_bytes())?;
        let output = child.wait_with_output()?;
        let (printed, said) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "{}: {said}\n{printed}", output.status);
        Ok(printed.into_owned())
    }

    /// The pids of the server's processes whose title contains `title` (`"walwriter"`).
    pub fn processes(&self, title: &str) -> Result<Vec<i32>> {
        let mut pids = process::children_of(self.pid()?);
        pids.retain(|&pid| process::title(pid).contains(title));
        Ok(pids)
    }

    /// Freezes those processes (SIGSTOP), and returns the pids of those that were not just ending.
    pub fn freeze(&self, title: &str) -> Result<Vec<i32>> {
        let pids = self.processes(title)?;
        ensure!(!pids.is_empty(), "no process of the server is called {title}");
        let mut frozen = Vec::new();
        for pid in pids {
            if process::freeze(pid)? {
                frozen.push(pid);
            }
        }
        Ok(frozen)
    }

    /// Freezes all its processes, beginning with the postmaster, which then neither starts nor reaps any.
    pub fn freeze_all(&self) -> Result<Vec<i32>> {
        let mut pids = vec![self.pid()?];
        process::freeze_living(pids[0])?;
        pids.extend(self.freeze("")?);
        Ok(pids)
    }

    /// Thaws frozen processes (SIGCONT).
    pub fn thaw(&self, pids: &[i32]) -> Result<()> {
        pids.iter().try_for_each(|&pid| process::signal(pid, Signal::SIGCONT))
    }

    /// Promotes a standby, and waits until it is the primary. Does nothing to one that was promoted before.
    pub fn promote(&self) -> Result<()> {
        let promote =
            "SELECT CASE WHEN pg_is_in_recovery() THEN pg_promote(true, 120) ELSE true END";
        let done: bool = self.connect("postgres")?.one(promote, &[])?;
        ensure!(done, "the standby was not promoted; its log ends:\n{}", self.log_end(20));
        self.make_unlogged_sequences_anew()
    }

    /// Runs the statements in the hint of XX001: up to 15.18 and 16.14 the end of a recovery that has replayed `CREATE
    /// EXTENSION` leaves zeroes in unlogged sequences. Does nothing on other releases.
    fn make_unlogged_sequences_anew(&self) -> Result<()> {
        let mut session = self.connect("postgres")?;
        let faulty = "SELECT v < 150019 OR v BETWEEN 160000 AND 160014 FROM (SELECT current_setting('server_version_num')::int) AS t (v)";
        if !session.one::<bool>(faulty, &[])? {
            return Ok(());
        }
        for name in session.rows("SELECT datname FROM pg_database WHERE datallowconn")? {
            let name = name.into_iter().flatten().next().context("a name")?;
            let mut session = self.connect(&name)?;
            let statements = session.rows(
                "SELECT format('ALTER EXTENSION pg_fence DROP SEQUENCE %1$s; DROP SEQUENCE %1$s;
                                CREATE UNLOGGED SEQUENCE %1$s CACHE 1; ALTER EXTENSION pg_fence ADD SEQUENCE %1$s', s.oid::regclass)
                   FROM pg_class AS s JOIN pg_extension ON extname = 'pg_fence'
                  WHERE s.relnamespace = to_regnamespace('fence') AND s.relkind = 'S' AND s.relpersistence = 'u'",
            )?;
            for statement in statements.into_iter().flatten().flatten() {
                session.run(&statement)?;
            }
        }
        Ok(())
    }

    /// Disconnects a standby from its primary, so that it receives nothing further.
    pub fn cut(&self) -> Result<()> {
        self.configure(&[("primary_conninfo", "")])?;
        self.reload()?;
        wait_until("the standby is cut off", PATIENCE, || {
            self.processes("walreceiver").is_ok_and(|found| found.is_empty())
        })
    }

    /// Waits until this standby has replayed everything that its primary has logged so far.
    pub fn wait_replayed_all(&self) -> Result<()> {
        let primary = self.connect("postgres")?.text("SHOW primary_conninfo")?;
        self.replayed_of(&mut Session::connect(&primary.context("it follows nobody")?)?)
    }

    /// Waits until this standby has replayed everything that `primary` has logged so far.
    pub fn wait_replayed(&self, primary: &Cluster) -> Result<()> {
        self.replayed_of(&mut primary.connect("postgres")?)
    }

    fn replayed_of(&self, primary: &mut Session) -> Result<()> {
        let written = primary.text("SELECT pg_current_wal_insert_lsn()")?;
        let target = written.context("no LSN")?;
        let mut session = self.connect("postgres")?;
        let query = format!("SELECT coalesce(pg_last_wal_replay_lsn() >= '{target}', false)");
        wait_until("the standby has replayed", PATIENCE, || {
            session.one(&query, &[]).unwrap_or(false)
        })
    }

    fn process(&self) -> MutexGuard<'_, Option<Child>> {
        self.process.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let keep = self.install_dir.rundir().path().join("kept").exists();
        if !keep {
            let _ = self.kill9();
            killed_server::remove_shared_memory(&self.data());
            self.report_failed_assertions();
            let _ = fs::remove_dir_all(&self.dir);
            ports_given().remove(&self.port());
        }
    }
}

/// Ports in use, including those of servers that are not started yet or are stopped for a while. Each is claimed by a
/// socket name that only one process of the machine can have, so that no other run uses it.
static PORTS_GIVEN: Mutex<BTreeMap<u16, UnixListener>> = Mutex::new(BTreeMap::new());

fn ports_given() -> MutexGuard<'static, BTreeMap<u16, UnixListener>> {
    PORTS_GIVEN.lock().unwrap_or_else(|e| e.into_inner())
}

/// Claims a port, if no other process has claimed it. The claim ends when the value is dropped.
fn claim(port: u16) -> Option<UnixListener> {
    let name = SocketAddr::from_abstract_name(format!("pg_fence port {port}")).ok()?;
    UnixListener::bind_addr(&name).ok()
}

/// A free port on loopback, outside the range of outgoing connections. No other run gets it before its cluster is
/// dropped.
pub fn free_port() -> Result<u16> {
    for _ in 0..10_000 {
        let port = rand::random_range(20_000..30_000);
        let Some(claim) = claim(port) else { continue };
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            ports_given().insert(port, claim);
            return Ok(port);
        }
    }
    bail!("no free port on 127.0.0.1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_given_away_is_no_other_process_s() -> Result<()> {
        let port = free_port()?;
        assert!(claim(port).is_none(), "the machine's only claim is the one that was given");
        ports_given().remove(&port);
        assert!(claim(port).is_some(), "it ended with that");
        Ok(())
    }
}
