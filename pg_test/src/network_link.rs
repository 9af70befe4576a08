//! A client in another network namespace than the server's, and the network link between them, which can be cut. After
//! that, packages are lost and neither side is notified. (Loopback cannot show that: its sockets always notice that the
//! other end is gone.)

use crate::client::Conninfo;
use crate::process::{ChildProcess, output_of};
use crate::rundir::RunDir;
use crate::setup::{self, Package};
use crate::worker::Worker;
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

/// A network namespace, which ends with its last process.
pub struct NetworkLink {
    /// A process that only keeps the namespace alive.
    keeper: ChildProcess,
}

/// The name of the link's end in the namespace.
const FAR: &str = "far";

impl NetworkLink {
    /// Makes the link. That needs the right to make networks, which usually only root has.
    pub fn create(rundir: &RunDir) -> Result<NetworkLink> {
        setup::ensure(&[
            Package::new("iproute2", "/usr/sbin/ip"),
            Package::new("util-linux", "/usr/bin/nsenter"),
        ])?;
        let mut unshare = rundir.command("unshare");
        unshare.args(["--net", "sh", "-c", "echo ready; exec cat"]);
        unshare.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut keeper = ChildProcess::start(&mut unshare)?;
        let mut said = String::new();
        BufReader::new(keeper.stdout.take().context("no pipe")?).read_line(&mut said)?;
        let link = NetworkLink { keeper };
        ensure!(said.trim() == "ready", "unshare --net is refused");
        let (near, pid) = (link.near_end(), link.keeper.id().to_string());
        let ip = |arguments: &str| output_of(Command::new("ip").args(arguments.split(' ')));
        ip(&format!("link add {near} type veth peer name {FAR} netns {pid}"))?;
        ip(&format!("address add {}/30 dev {near}", link.near()))?;
        ip(&format!("link set {near} up"))?;
        link.there(&format!("address add {}/30 dev {FAR}", link.far()))?;
        link.there(&format!("link set {FAR} up"))?;
        Ok(link)
    }

    /// The name of the link's end on this side.
    fn near_end(&self) -> String {
        format!("fence{}", self.keeper.id())
    }

    /// An address of 10.0.0.0/8 that differs from those of concurrent runs, by the pid.
    fn address(&self, host: u32) -> String {
        let net = (self.keeper.id() & 0x3f_ffff) << 2 | host;
        format!("10.{}.{}.{}", net >> 16 & 0xff, net >> 8 & 0xff, net & 0xff)
    }

    /// The address of the server's end.
    pub fn near(&self) -> String {
        self.address(1)
    }

    /// The address of the client's end.
    pub fn far(&self) -> String {
        self.address(2)
    }

    /// A command in the client's namespace.
    fn command(&self, rundir: Option<&RunDir>) -> Command {
        let mut command = rundir.map_or_else(|| Command::new("nsenter"), |r| r.command("nsenter"));
        command.args(["--net", "--target", &self.keeper.id().to_string()]);
        command
    }

    /// Runs `ip` in the client's namespace.
    fn there(&self, arguments: &str) -> Result<String> {
        output_of(self.command(None).arg("ip").args(arguments.split(' ')))
    }

    /// A worker process in the client's namespace.
    pub fn worker(&self, rundir: &RunDir, name: &str, conninfo: &Conninfo) -> Result<Worker> {
        let mut command = self.command(Some(rundir));
        command.arg(rundir.program());
        Worker::start_by(command, name, conninfo)
    }

    /// Cuts the link at the client's end.
    pub fn cut(&self) -> Result<()> {
        self.there(&format!("link set {FAR} down")).map(drop)
    }
}
