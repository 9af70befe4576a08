//! A cluster with automatic failover: Patroni over etcd, as private processes on loopback.

use crate::client::{Conninfo, Session};
use crate::cluster::free_port;
use crate::install_dir::InstallDir;
use crate::process::{self, PATIENCE, wait_until};
use crate::service::{self, Service};
use crate::setup::Package;
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;

/// Returns the packages that Patroni needs.
pub fn packages() -> Vec<Package> {
    vec![
        Package::new("patroni", "/usr/bin/patroni").without_service("patroni"),
        service::etcd_package(),
    ]
}

/// The members of one cluster, one of which is the leader.
pub struct Patroni {
    install_dir: Arc<InstallDir>,
    dir: PathBuf,
    etcd: Service,
    members: Vec<Member>,
}

struct Member {
    name: String,
    dir: PathBuf,
    port: u16,
    agent: Option<Child>,
}

impl Patroni {
    /// Starts `count` members and waits until one leads and the others follow.
    pub fn start(install_dir: Arc<InstallDir>, count: usize) -> Result<Patroni> {
        let dir = install_dir.new_dir("patroni")?;
        let etcd = service::etcd(install_dir.rundir(), &["--unsafe-no-fsync"])?;
        let mut patroni = Patroni { install_dir, dir, etcd, members: Vec::new() };
        for number in 0..count {
            patroni.add(number)?;
            let seen = number + 1;
            wait_until("the members follow the leader", PATIENCE, || {
                patroni.standbys() + 1 == seen && patroni.leader().is_some()
            })
            .with_context(|| patroni.logs())?;
        }
        Ok(patroni)
    }

    fn add(&mut self, number: usize) -> Result<()> {
        let name = format!("member{number}");
        let dir = self.dir.join(&name);
        fs::create_dir(&dir)?;
        if let Some(user) = process::server_user()? {
            std::os::unix::fs::chown(&dir, Some(user.uid.as_raw()), Some(user.gid.as_raw()))?;
        }
        let port = free_port()?;
        let config = dir.join("patroni.yml");
        fs::write(&config, self.config(&name, &dir, port)?)?;
        let log = File::create(dir.join("log"))?;
        let mut command = self.install_dir.rundir().command("/usr/bin/patroni");
        command.env("LC_ALL", "C.UTF-8").env("TZ", "UTC").arg(&config);
        let agent = process::as_server_user(&mut command)?
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start patroni")?;
        self.members.push(Member { name, dir, port, agent: Some(agent) });
        Ok(())
    }

    /// Returns a member's configuration, with the smallest timeouts that Patroni accepts: failover takes seconds.
    fn config(&self, name: &str, dir: &Path, port: u16) -> Result<String> {
        let (rest, etcd, dir) = (free_port()?, self.etcd.port(), dir.display());
        let bin = self.install_dir.bin_dir();
        let bin = bin.display();
        Ok(format!(
            "scope: pg_test
name: {name}
restapi: {{listen: '127.0.0.1:{rest}', connect_address: '127.0.0.1:{rest}'}}
etcd3: {{host: '127.0.0.1:{etcd}'}}
bootstrap:
  dcs:
    ttl: 6
    loop_wait: 1
    retry_timeout: 2
    maximum_lag_on_failover: 1073741824
    postgresql: {{use_pg_rewind: false, use_slots: false}}
  initdb: [{{encoding: UTF8}}, {{locale: C.UTF-8}}, {{auth: trust}}]
postgresql:
  listen: '127.0.0.1:{port}'
  connect_address: '127.0.0.1:{port}'
  data_dir: '{dir}/data'
  bin_dir: '{bin}'
  pgpass: '{dir}/pgpass'
  pg_hba: ['local all all trust', 'host all all 127.0.0.1/32 trust', 'host replication all 127.0.0.1/32 trust']
  authentication: {{superuser: {{username: postgres}}, replication: {{username: postgres}}}}
  parameters: {{unix_socket_directories: '{dir}', timezone: UTC, log_timezone: UTC, jit: 'off',
    dynamic_shared_memory_type: mmap}}
"
        ))
    }

    /// Returns the addresses of the members that have not been killed.
    pub fn conninfos(&self) -> Vec<Conninfo> {
        let alive = self.members.iter().filter(|member| member.agent.is_some());
        alive.map(|member| Conninfo::new(member.port, "postgres")).collect()
    }

    /// Opens a session with the leader, if there is one.
    pub fn leader(&self) -> Option<Session> {
        leader_of(&self.conninfos())
    }

    fn standbys(&self) -> usize {
        let Some(mut leader) = self.leader() else {
            return 0;
        };
        // The stream of a base backup, which a new member begins with, is none of a standby.
        let query = "SELECT count(*) FROM pg_stat_replication \
                     WHERE state = 'streaming' AND application_name <> 'pg_basebackup'";
        leader.one::<i64>(query, &[]).unwrap_or(0) as usize
    }

    /// Freezes the WAL receivers of all standbys and returns their pids.
    pub fn freeze_replication(&self) -> Result<Vec<i32>> {
        let mut frozen = Vec::new();
        for member in self.members.iter().filter(|member| member.agent.is_some()) {
            let postmaster = member.postmaster()?;
            for pid in process::children_of(postmaster) {
                if process::title(pid).contains("walreceiver") {
                    process::freeze_living(pid)?;
                    frozen.push(pid);
                }
            }
        }
        ensure!(!frozen.is_empty(), "nothing is replicated");
        Ok(frozen)
    }

    /// Kills the leader's server and agent, as if its machine died.
    pub fn kill_leader(&mut self) -> Result<()> {
        let leads = |member: &&mut Member| {
            member.agent.is_some() && leader_of(&[Conninfo::new(member.port, "postgres")]).is_some()
        };
        let member = self.members.iter_mut().find(leads).context("nobody leads")?;
        let postmaster = member.postmaster()?;
        let mut agent = member.agent.take().context("it runs")?;
        agent.kill()?;
        agent.wait()?;
        kill_server(postmaster);
        Ok(())
    }

    /// Returns the last lines of the members' logs.
    pub fn logs(&self) -> String {
        let tail = |member: &Member| {
            let log = fs::read_to_string(member.dir.join("log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            format!("{}:\n{}", member.name, lines[lines.len().saturating_sub(15)..].join("\n"))
        };
        self.members.iter().map(tail).collect::<Vec<_>>().join("\n")
    }
}

impl Member {
    fn postmaster(&self) -> Result<i32> {
        let file = fs::read_to_string(self.dir.join("data/postmaster.pid"))?;
        Ok(file.lines().next().unwrap_or_default().trim().parse()?)
    }
}

impl Drop for Patroni {
    fn drop(&mut self) {
        for member in &mut self.members {
            if let Some(mut agent) = member.agent.take() {
                let _ = agent.kill();
                let _ = agent.wait();
                if let Ok(postmaster) = member.postmaster() {
                    kill_server(postmaster);
                }
            }
        }
    }
}

fn kill_server(postmaster: i32) {
    for pid in [postmaster].into_iter().chain(process::children_of(postmaster)) {
        let _ = process::signal(pid, Signal::SIGKILL);
    }
}

/// Opens a session with the member that is not a standby, if it is reachable.
pub fn leader_of(conninfos: &[Conninfo]) -> Option<Session> {
    conninfos.iter().find_map(|conninfo| {
        let mut session = Session::connect(&conninfo.to_string()).ok()?;
        let leads: bool = session.try_one("SELECT NOT pg_is_in_recovery()", &[]).ok()?;
        leads.then_some(session)
    })
}
