//! `pg_fence run`: a command under a lease.
//!
//! A run has two processes, each of which ends the command if the other one cannot:
//!
//! - the [`supervisor`] is the process that was started: the command's parent, with its terminal and its signals;
//! - the [`renewer`] is the supervisor's child: it holds and renews the lease, and has no terminal.
//!
//! They exchange [`messages`] through two pipes. Both know the deadline of the lease. If no renewal comes, the
//! supervisor ends the command before the deadline; if the supervisor is frozen or dead, the renewer does. If one of
//! them is killed, the other one notices at once by the end of the pipe. A third process of this program
//! [executes](exec) the command.

mod adopted_lease;
mod cgroup;
pub mod exec;
mod messages;
mod processes;
mod renewer;
mod supervisor;
mod terminal;
mod termination;
mod times;

use crate::connection;
use crate::failure::{Failure, Result, status};
use clap::Args;
use humantime::parse_duration;
use std::ffi::OsString;
use std::time::Duration;
use times::Times;

/// The environment variable with the run's id, by which the processes of the command are found.
const RUN_ID_VARIABLE: &str = "PG_FENCE_RUN";

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// The lease to take; several are taken at once, all or none
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// How long the lease lives without a renewal; it is renewed every third of that
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "30s")]
    ttl: Duration,
    /// How long to wait in the queue for the lease; by default not at all
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "0s")]
    wait: Duration,
    /// Share the lease with other shared holders
    #[arg(long, conflicts_with = "slots")]
    shared: bool,
    /// Up to N holders may have the lease at the same time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    slots: Option<i32>,
    /// The lease ends with its connection, too: the next holder need not wait for the ttl. Not through a pooler
    #[arg(long)]
    session: bool,
    /// The holder of the lease, as others see it [default: host/process/number]
    #[arg(long, value_name = "TEXT")]
    holder: Option<String>,
    /// Keep the lease for at least this time, even if the command takes less
    #[arg(long, value_name = "TIME", value_parser = parse_duration, conflicts_with = "session")]
    at_least: Option<Duration>,
    /// End the command, with status 124, if it takes longer
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    at_most: Option<Duration>,
    /// The token of a lease that another service grants (etcd, ZooKeeper, another database)
    #[arg(
        long,
        value_name = "TOKEN",
        value_parser = clap::value_parser!(i64).range(1..),
        conflicts_with_all = ["shared", "slots", "session", "at_least"]
    )]
    adopt: Option<i64>,
    /// Pass the token in PG_FENCE_TOKEN alone, and leave PGOPTIONS as it is: for poolers that refuse it. The command
    /// sets pg_fence.token itself
    #[arg(long)]
    no_pgoptions: bool,
    /// How long after TERM the command is killed; by default a sixth of the ttl, at most 5s
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    grace: Option<Duration>,
    /// Make no cgroup for the command, even if that is possible
    #[arg(long)]
    no_cgroup: bool,
    /// The exit status if another holder has the lease
    #[arg(long, value_name = "STATUS", default_value_t = status::TAKEN)]
    if_taken: u8,
    /// Print nothing about a lease that is taken, nor about waiting
    #[arg(short, long)]
    quiet: bool,
    /// The command and its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the command. Returns the command's exit status, or that of what happened to the lease.
pub fn run(options: Options, connection: &connection::Options) -> Result<u8> {
    let times = options.times()?;
    // An error in the connection string is reported before any process is started.
    connection.server()?;
    supervisor::Supervisor::start(options, times)?.run()
}

/// The main function of the renewer, which the supervisor starts with the arguments of the run.
pub fn renew(options: Options, connection: &connection::Options) -> Result<u8> {
    let times = options.times()?;
    renewer::renew(options, times, connection.server()?)
}

impl Options {
    fn times(&self) -> Result<Times> {
        if self.names.len() > 1 && (self.shared || self.slots.is_some()) {
            return Err(Failure::usage(
                "several names at once are exclusive: no --shared, --slots",
            ));
        }
        if self.names.len() > 1 && self.adopt.is_some() {
            return Err(Failure::usage("a token is adopted for one name"));
        }
        Times::new(self.ttl, self.grace)
    }

    /// Returns PGOPTIONS for the command: the present value, and the setting by which every program on libpq presents
    /// the token.
    fn pgoptions(&self, token: i64) -> Option<String> {
        let given = std::env::var("PGOPTIONS").unwrap_or_default();
        let options = format!("{given} -c pg_fence.token={token}");
        (!self.no_pgoptions).then(|| options.trim_start().to_owned())
    }

    /// Returns the names as messages show them.
    fn lease(&self) -> String {
        self.names.join(", ")
    }
}
