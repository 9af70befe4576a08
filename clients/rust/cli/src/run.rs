//! `pg_fence run`: a command under a lease.
//!
//! Two processes look after it, each of which ends it where the other one cannot:
//!
//! - the [`supervisor`], which was started: the command's parent, with its terminal and its signals;
//! - the [`keeper`], its child: holds the lease and the connection, and knows no terminal.
//!
//! They tell each other [`messages`] through two pipes. Either one knows the deadline of the lease: when no renewal
//! comes, the supervisor ends the command before it, and the keeper does where the supervisor is frozen or dead. One
//! that is killed is noticed at once by the end of its pipe. The command itself is [`started`](start) by a third run
//! of this program, which becomes the command.

mod adopted;
mod cgroup;
mod ending;
mod keeper;
mod messages;
mod processes;
pub mod start;
mod supervisor;
mod terminal;
mod times;

use crate::connection;
use crate::failure::{Failure, Result, status};
use clap::Args;
use humantime::parse_duration;
use std::ffi::OsString;
use std::time::Duration;
use times::Times;

/// The variable by which all that a run has started is found.
const MARK: &str = "PG_FENCE_RUN";

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// The lease to take; several are taken at once, all or none
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
    /// How long the lease lives without a renewal; it is renewed every third of that
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "30s")]
    ttl: Duration,
    /// How long to wait in line for the lease; by default not at all
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "0s")]
    wait: Duration,
    /// Share the lease with others that ask for it so
    #[arg(long, conflicts_with = "slots")]
    shared: bool,
    /// So many may have the lease at the same time
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    slots: Option<i32>,
    /// The lease ends with its connection, too: the next one need not wait for the ttl. Not through a pooler
    #[arg(long)]
    session: bool,
    /// The holder of the lease, as others see it [default: host/process/number]
    #[arg(long, value_name = "TEXT")]
    holder: Option<String>,
    /// Keep the lease for at least so long, also when the command takes less
    #[arg(long, value_name = "TIME", value_parser = parse_duration, conflicts_with = "session")]
    at_least: Option<Duration>,
    /// End the command, with status 124, when it takes longer
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    at_most: Option<Duration>,
    /// The lease is somebody else's to grant (etcd, ZooKeeper, another database), under this token of theirs
    #[arg(
        long,
        value_name = "TOKEN",
        value_parser = clap::value_parser!(i64).range(1..),
        conflicts_with_all = ["shared", "slots", "session", "at_least"]
    )]
    adopt: Option<i64>,
    /// Hand the token on in PG_FENCE_TOKEN alone, and leave PGOPTIONS as it is: for poolers that refuse it. The command
    /// sets pg_fence.token by itself
    #[arg(long)]
    no_pgoptions: bool,
    /// How long after TERM the command is killed; by default a sixth of the ttl, at most 5s
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    grace: Option<Duration>,
    /// Make no cgroup for the command, also where that can be
    #[arg(long)]
    no_cgroup: bool,
    /// The exit status where somebody else has the lease
    #[arg(long, value_name = "STATUS", default_value_t = status::TAKEN)]
    if_taken: u8,
    /// Say nothing of a lease that is taken, nor of waiting
    #[arg(short, long)]
    quiet: bool,
    /// The command and its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the command. The status is its own, or tells what happened to the lease.
pub fn run(options: Options, connection: &connection::Options) -> Result<u8> {
    let times = options.times()?;
    // A fault of the connection string is told before anything is started.
    connection.server()?;
    supervisor::Supervisor::start(options, times)?.run()
}

/// The other process of a run. It was started with the same arguments.
pub fn keep(options: Options, connection: &connection::Options) -> Result<u8> {
    let times = options.times()?;
    keeper::keep(options, times, connection.server()?)
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

    /// What PGOPTIONS is for the command: what it is here, and the token, which every program on libpq presents by that.
    fn pgoptions(&self, token: i64) -> Option<String> {
        let given = std::env::var("PGOPTIONS").unwrap_or_default();
        let options = format!("{given} -c pg_fence.token={token}");
        (!self.no_pgoptions).then(|| options.trim_start().to_owned())
    }

    /// As it is said to people.
    fn lease(&self) -> String {
        self.names.join(", ")
    }
}
