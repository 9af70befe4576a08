//! Pgpool-II, from Debian's package: statements that read are sent to a standby.

use pg_test::cluster::{Builder, free_port};
use pg_test::process::{self, PATIENCE, wait_until};
use pg_test::setup::{self, Package};
use pg_test::{Calls, Cluster, Conninfo, Harness, Result, Session, ensure, harness_test};
use std::fs::{self, File};
use std::process::{Child, Stdio};

/// A running Pgpool, killed when dropped.
struct Pgpool {
    process: Child,
    port: u16,
}

impl Pgpool {
    /// Starts a Pgpool in front of both servers that sends all reading statements to the standby.
    fn start(primary: &Cluster, standby: &Cluster) -> Result<Pgpool> {
        let package = Package::new("pgpool2", "/usr/sbin/pgpool").without_service("pgpool2");
        setup::ensure(&[package])?;
        let install_dir = primary.install_dir();
        let dir = install_dir.new_dir("pgpool")?;
        let (port, control) = (free_port()?, free_port()?);
        let backend = |number: usize, cluster: &Cluster, weight: u32| {
            format!(
                "backend_hostname{number} = '127.0.0.1'\nbackend_port{number} = {}\n\
                 backend_weight{number} = {weight}\nbackend_flag{number} = 'ALLOW_TO_FAILOVER'\n",
                cluster.port()
            )
        };
        let settings = format!(
            "listen_addresses = '127.0.0.1'\nport = {port}\npcp_port = {control}\n\
             socket_dir = '{dir}'\nunix_socket_directories = '{dir}'\npcp_socket_dir = '{dir}'\npid_file_name = '{dir}/pid'\n\
             logdir = '{dir}'\nwork_dir = '{dir}'\nbackend_clustering_mode = 'streaming_replication'\n\
             {}{}load_balance_mode = on\nenable_pool_hba = off\nsr_check_user = 'postgres'\n\
             sr_check_database = 'postgres'\nsr_check_period = 1\nhealth_check_period = 0\nnum_init_children = 4\n\
             connection_cache = off\nuse_watchdog = off\n",
            backend(0, primary, 0),
            backend(1, standby, 1),
            dir = dir.display(),
        );
        fs::write(dir.join("pgpool.conf"), settings)?;
        fs::write(dir.join("pcp.conf"), "")?;
        fs::write(dir.join("pool_hba.conf"), "")?;
        let log = File::create(dir.join("log"))?;
        let mut command = install_dir.rundir().command("/usr/sbin/pgpool");
        process::as_server_user(&mut command)?;
        command.args(["-n", "-f", "pgpool.conf", "-F", "pcp.conf", "-a", "pool_hba.conf"]);
        command.current_dir(&dir);
        let process = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()?;
        let pgpool = Pgpool { process, port };
        let ready = wait_until("pgpool sends readers to the standby", PATIENCE, || {
            pgpool.connect().is_ok_and(|mut session| {
                let query = "SELECT inet_server_port() = $1 FROM orders LIMIT 1";
                session.one(query, &[&i32::from(standby.port())]).unwrap_or(false)
            })
        });
        ready.map_err(|error| {
            error.context(fs::read_to_string(dir.join("log")).unwrap_or_default())
        })?;
        Ok(pgpool)
    }

    fn connect(&self) -> Result<Session> {
        Conninfo::new(self.port, "postgres").connect()
    }
}

impl Drop for Pgpool {
    fn drop(&mut self) {
        // Its children end when it is told to stop.
        let _ = process::signal(self.process.id() as i32, nix::sys::signal::Signal::SIGINT);
        let _ = self.process.wait();
    }
}

#[harness_test(slow)]
fn functions_go_to_the_primary_and_the_view_to_a_standby(harness: &Harness) -> Result<()> {
    let install_dir = harness.debians(None)?;
    let primary = Builder::new(install_dir.clone()).start()?;
    let mut session = primary.connect("postgres")?;
    session.run(
        "CREATE EXTENSION pg_fence; CREATE TABLE orders (id int PRIMARY KEY, total int NOT NULL);
         INSERT INTO orders VALUES (7, 0); SELECT fence_protect('orders', lease => 'order:{id}')",
    )?;
    let token = session.acquire("order:7", "1 h")?;
    let standby = Builder::new(install_dir).standby_of(&primary)?;
    standby.start()?;
    standby.wait_replayed(&primary)?;
    let pgpool = Pgpool::start(&primary, &standby)?;
    let mut client = pgpool.connect()?;
    // From here on the standby shows an earlier state.
    standby.connect("postgres")?.run("SELECT pg_wal_replay_pause()")?;

    let mine = client.acquire("through pgpool", "1 h")?;
    ensure!(client.renew("through pgpool", mine)?.is_some());
    let state = |sql: &str| -> Result<Option<String>> {
        Ok(pgpool.connect()?.rows(sql)?.into_iter().flatten().flatten().next())
    };
    let call = state("SELECT state FROM lease_info('through pgpool')")?;
    ensure!(call.as_deref() == Some("held"), "lease_info: {call:?}");
    ensure!(
        state(&format!("SELECT lease_check('through pgpool', {mine})"))?.as_deref() == Some("t")
    );
    ensure!(state("SELECT in_recovery FROM fence_status()")?.as_deref() == Some("f"));
    // For Pgpool the view is an ordinary relation, so it is read on the standby.
    let view = state("SELECT state FROM fence.leases WHERE name = 'through pgpool'")?;
    ensure!(view.is_none(), "the view: {view:?}");
    // Unless the client asks for the primary: by a comment, or in a transaction that has written.
    let shown =
        state("/*NO LOAD BALANCE*/ SELECT state FROM fence.leases WHERE name = 'through pgpool'")?;
    ensure!(shown.as_deref() == Some("held"), "shown instead: {shown:?}");

    client.run(&format!("UPDATE orders SET total = 1, fence = {token}"))?;
    client.refused("UPDATE orders SET total = 2, fence = 1", "PF001")?;
    client.run("BEGIN")?;
    client.run(&format!("SELECT lease_guard('order:7', {token})"))?;
    let guarded: i32 = client.one("SELECT total FROM orders", &[])?;
    ensure!(guarded == 1, "read under the guard: {guarded}");
    client.run("COMMIT")
}
