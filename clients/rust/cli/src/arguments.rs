//! The command line.

use crate::{connection, run, views};
use clap::{ArgAction, Parser, Subcommand};
use clap_complete::Shell;
use std::path::PathBuf;

/// Run a command under a lease of PostgreSQL, whose writes are then fenced; and look at leases.
#[derive(Debug, Parser)]
#[command(name = "pg_fence", version, max_term_width = 100, disable_help_flag = true)]
pub struct Arguments {
    #[command(flatten)]
    pub connection: connection::Options,
    /// Print help
    #[arg(long, action = ArgAction::Help, global = true)]
    help: Option<bool>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command while holding a lease; it is ended before the lease is somebody else's
    #[command(after_long_help = RUN_HELP, after_help = RUN_HELP)]
    Run(run::Options),
    /// Show who has which lease
    Leases(views::leases::Options),
    /// Show all that is known of one lease
    Show(views::leases::OneOptions),
    /// Release a lease, by its token
    Release(views::leases::ReleaseOptions),
    /// Take a lease from its holder (for administrators)
    Revoke(views::leases::OneOptions),
    /// Show the latest refused writes (for administrators)
    Refusals(views::refusals::Options),
    /// Look for ways around the fence; exit with 1 if there is one
    Audit(views::audit::Options),
    /// Show versions, tokens and counters
    Status(views::status::Options),
    /// Print the completions for a shell
    Completions {
        #[arg(value_name = "SHELL")]
        shell: Shell,
    },
    /// Write the manual pages, one for each command, into a directory
    #[command(hide = true)]
    Man {
        #[arg(long)]
        directory: PathBuf,
    },
    #[command(hide = true)]
    Exec(run::exec::Options),
}

const RUN_HELP: &str = "\
The command finds the token in PG_FENCE_TOKEN and the lease in PG_FENCE_LEASE. PGOPTIONS has every
program on libpq (psql, pg_restore, most drivers) present the token with its writes.

Exit status: the command's own, or 128 plus the number of the signal that ended it; 75 if the lease
is taken (--if-taken); 70 if it was lost, and the command ended; 124 after --at-most; 69 if the
database is not available; 78 if it refuses; 64 for a wrong command line; 126 and 127 if the command
cannot be run.";

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}
