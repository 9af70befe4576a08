//! The bench's program, which `cargo run --release -- bench` builds and starts.

use clap::{Parser, Subcommand};
use pg_fence_bench::Options;
use pg_fence_bench::sections::death::Holder;
use pg_test::{Harness, Result, rundir};
use std::path::PathBuf;

/// Benchmark pg_fence against its alternatives
#[derive(Parser)]
#[command(version, bin_name = "cargo run --release -- bench")]
#[command(args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    options: Options,
}

#[derive(Subcommand)]
enum Command {
    /// How the run directory starts its watchdog: as another process of this program.
    #[command(hide = true)]
    Watchdog { rundir: PathBuf },
    /// A holder that is to be killed.
    #[command(hide = true)]
    BenchHolder(Holder),
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    match arguments.command {
        Some(Command::Watchdog { rundir }) => return rundir::watchdog(&rundir),
        Some(Command::BenchHolder(holder)) => return holder.hold(),
        None => {}
    }
    let harness = Harness::start(&std::env::current_exe()?)?;
    let report = pg_fence_bench::run(&harness, &arguments.options);
    harness.close();
    print!("{}", report?);
    Ok(())
}
