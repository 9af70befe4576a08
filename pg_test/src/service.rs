//! Other lock services, each as private processes on loopback: etcd, MariaDB, NATS, RabbitMQ, Redis, ZooKeeper, and
//! moto, which emulates cloud services.

use crate::cluster::free_port;
use crate::process::{ChildProcess, PATIENCE, output_of, wait_until};
use crate::rundir::RunDir;
use crate::setup::{self, Package};
use anyhow::{Context, Result};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

/// A server of another kind, with its files in the run directory. It is stopped when this value is dropped, at the
/// latest when the run ends.
pub struct Service {
    _child: ChildProcess,
    port: u16,
}

/// Returns the packages of etcd.
pub fn etcd_package() -> Package {
    Package::new("etcd-server", "/usr/bin/etcd").without_service("etcd")
}

/// Returns the packages of ZooKeeper: its library, which contains the server, and a Java runtime.
pub fn zookeeper_packages() -> [Package; 2] {
    [
        Package::new("libzookeeper-java", ZOOKEEPER),
        Package::new("default-jre-headless", "/usr/bin/java"),
    ]
}

const ZOOKEEPER: &str = "/usr/share/java/zookeeper.jar";

/// Starts an etcd with one member, which is the leader when this returns. `more` are further options.
pub fn etcd(rundir: &RunDir, more: &[&str]) -> Result<Service> {
    let other = free_port()?;
    let etcd = Service::start(rundir, &[etcd_package()], "/usr/bin/etcd", |dir, port| {
        let (clients, peers) =
            (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{other}"));
        let option = |name: &str, value: &str| format!("--{name}={value}");
        let mut options = vec![
            option("name", "alone"),
            option("data-dir", &dir.join("data").to_string_lossy()),
            option("listen-client-urls", &clients),
            option("advertise-client-urls", &clients),
            option("listen-peer-urls", &peers),
            option("initial-advertise-peer-urls", &peers),
            option("initial-cluster", &format!("alone={peers}")),
            option("log-level", "error"),
        ];
        options.extend(more.iter().map(|option| option.to_string()));
        Ok(options)
    })?;
    etcd.wait_until_it_says("GET /health HTTP/1.0\r\n\r\n", r#""health":"true""#)?;
    Ok(etcd)
}

/// Starts a Redis with its default settings, or one that flushes each write.
pub fn redis(rundir: &RunDir, durable: bool) -> Result<Service> {
    let package =
        Package::new("redis-server", "/usr/bin/redis-server").without_service("redis-server");
    Service::start(rundir, &[package], "/usr/bin/redis-server", |dir, port| {
        let (port, dir) = (port.to_string(), dir.to_string_lossy().into_owned());
        let mut options = vec!["--bind", "127.0.0.1", "--port", &port, "--dir", &dir];
        if durable {
            options.extend(["--appendonly", "yes", "--appendfsync", "always"]);
        }
        Ok(options.into_iter().map(str::to_owned).collect())
    })
}

/// Starts a MariaDB whose users need no password.
pub fn mariadb(rundir: &RunDir) -> Result<Service> {
    let packages = [
        Package::new("mariadb-server-core", "/usr/sbin/mariadbd"),
        // mariadb-install-db calls it, but its package does not depend on this one.
        Package::new("mariadb-client-core", "/usr/bin/my_print_defaults"),
    ];
    Service::start(rundir, &packages, "/usr/sbin/mariadbd", |dir, port| {
        let data = format!("--datadir={}", dir.join("data").display());
        // It is not a system service, so it runs as the user of the tests.
        let common = ["--no-defaults", "--user=root", &data];
        let mut install = rundir.command("/usr/bin/mariadb-install-db");
        output_of(install.args(common).arg("--auth-root-authentication-method=normal"))?;
        let mut options = common.map(str::to_owned).to_vec();
        options.extend([
            "--bind-address=127.0.0.1".to_owned(),
            "--skip-grant-tables".to_owned(),
            // `--skip-grant-tables` would otherwise refuse network connections.
            "--skip-networking=0".to_owned(),
            format!("--port={port}"),
            format!("--socket={}", dir.join("socket").display()),
            format!("--pid-file={}", dir.join("pid").display()),
        ]);
        Ok(options)
    })
}

/// Starts a NATS with JetStream, whose buckets are in files.
pub fn nats(rundir: &RunDir) -> Result<Service> {
    let package =
        Package::new("nats-server", "/usr/sbin/nats-server").without_service("nats-server");
    let nats = Service::start(rundir, &[package], "/usr/sbin/nats-server", |dir, port| {
        let (port, dir) = (port.to_string(), dir.to_string_lossy().into_owned());
        let options = ["--addr", "127.0.0.1", "--port", &port, "--jetstream", "--store_dir", &dir];
        Ok(options.map(str::to_owned).to_vec())
    })?;
    Ok(nats)
}

/// Starts moto, which emulates S3 and DynamoDB. It is among the Python packages in `home`.
pub fn moto(rundir: &RunDir, home: &Path) -> Result<Service> {
    let program = home.join("bin/moto_server");
    Service::start(rundir, &[], &program.to_string_lossy(), |_, port| {
        Ok(["-H", "127.0.0.1", "-p", &port.to_string()].map(str::to_owned).to_vec())
    })
}

/// Starts a RabbitMQ with one node, whose only user is guest. Its processes end with the run.
pub fn rabbitmq(rundir: &RunDir) -> Result<Service> {
    let server = "/usr/lib/rabbitmq/bin/rabbitmq-server";
    let package = Package::new("rabbitmq-server", server).without_service("rabbitmq-server");
    let (distribution, names) = (free_port()?, free_port()?);
    Service::start(rundir, &[package], "/usr/bin/env", |dir, port| {
        let dir = dir.display();
        Ok(vec![
            format!("HOME={dir}"),
            format!("ERL_EPMD_PORT={names}"),
            format!("RABBITMQ_NODENAME=of-{port}@localhost"),
            "RABBITMQ_NODE_IP_ADDRESS=127.0.0.1".to_owned(),
            format!("RABBITMQ_NODE_PORT={port}"),
            format!("RABBITMQ_DIST_PORT={distribution}"),
            format!("RABBITMQ_MNESIA_BASE={dir}/mnesia"),
            format!("RABBITMQ_LOG_BASE={dir}"),
            format!("RABBITMQ_ENABLED_PLUGINS_FILE={dir}/plugins"),
            format!("RABBITMQ_PID_FILE={dir}/pid"),
            server.to_owned(),
        ])
    })
}

/// Starts a ZooKeeper with one server. The shortest session timeout is two ticks.
pub fn zookeeper(rundir: &RunDir, tick: Duration) -> Result<Service> {
    let packages = zookeeper_packages();
    let zookeeper = Service::start(rundir, &packages, "/usr/bin/java", |dir, port| {
        let file = dir.join("zoo.cfg");
        let settings = format!(
            "tickTime={}\ndataDir={}\nclientPort={port}\nclientPortAddress=127.0.0.1\n\
             maxClientCnxns=0\nadmin.enableServer=false\n",
            tick.as_millis(),
            dir.join("data").display()
        );
        fs::write(&file, settings)?;
        let main = "org.apache.zookeeper.server.quorum.QuorumPeerMain";
        Ok(["-cp", ZOOKEEPER, main, &file.to_string_lossy()].map(str::to_owned).to_vec())
    })?;
    zookeeper.wait_until_it_says("srvr", "Mode: ")?;
    Ok(zookeeper)
}

impl Service {
    /// Returns the port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Installs missing packages and starts `program`. `arguments` returns its arguments for a directory and a port.
    fn start(
        rundir: &RunDir,
        packages: &[Package],
        program: &str,
        arguments: impl FnOnce(&Path, u16) -> Result<Vec<String>>,
    ) -> Result<Service> {
        setup::ensure(packages)?;
        let port = free_port()?;
        let dir = rundir.path().join(format!("service-{port}"));
        fs::create_dir(&dir)?;
        let log = File::create(dir.join("log"))?;
        let mut command = rundir.command(program);
        command.args(arguments(&dir, port)?).current_dir(&dir);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let service = Service { _child: ChildProcess::start(&mut command)?, port };
        wait_until(&format!("{program} listens"), PATIENCE, || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        })
        .with_context(|| fs::read_to_string(dir.join("log")).unwrap_or_default())?;
        Ok(service)
    }

    /// Sends `question` over a new connection each time, until the reply contains `answer`.
    fn wait_until_it_says(&self, question: &str, answer: &str) -> Result<()> {
        wait_until(&format!("the service says {answer:?}"), PATIENCE, || {
            self.says(question).is_ok_and(|said| said.contains(answer))
        })
    }

    fn says(&self, question: &str) -> Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
        // A client that connects during the start may never be answered: that must not use up the whole wait.
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(question.as_bytes())?;
        let mut said = String::new();
        stream.read_to_string(&mut said)?;
        Ok(said)
    }
}
