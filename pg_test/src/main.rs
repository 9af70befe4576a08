//! The lab's program: the demonstration, the setup, the installation.

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use pg_test::extension::{self, Extension};
use pg_test::Lab;
use pg_test::{bench, chaos, demo, process, rundir, setup, soak, worker};
use std::path::PathBuf;
use std::process::Command as Program;
use std::time::Duration;

/// The laboratory of pg_fence. Without a command it plays the demonstration.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Play the demonstration on a private server
    Demo(demo::Options),
    /// Stop the servers that `demo --keep` left running
    Stop,
    /// Install the Debian packages that are missing for building and testing
    Setup,
    /// Build the extension and install it into a PostgreSQL
    Install {
        /// The pg_config of that PostgreSQL
        #[arg(long, value_name = "PATH")]
        pg_config: Option<PathBuf>,
    },
    /// Let many workers fight for leases while everything fails
    Chaos(chaos::Options),
    /// Measure leases and fences beside what else one could take
    Bench(bench::Options),
    #[command(hide = true)]
    ChaosHand(chaos::Identity),
    /// Let many sessions cross on a few leases, end and pause them, and measure the hand-over
    Soak {
        /// For how long they cross
        #[arg(long, default_value_t = 1.0)]
        minutes: f64,
        #[arg(long, default_value_t = 200)]
        sessions: usize,
        /// Where chance starts from; by default it is drawn
        #[arg(long)]
        seed: Option<u64>,
    },
    #[command(hide = true)]
    Worker { conninfo: String },
    #[command(hide = true)]
    Watchdog { rundir: PathBuf },
}

fn main() -> Result<()> {
    let program = std::env::current_exe()?;
    let command = Arguments::parse().command.unwrap_or(Command::Demo(demo::Options::default()));
    match command {
        Command::Demo(options) => demo::run(&program, options),
        Command::Stop => {
            let stopped = rundir::stop_kept();
            println!("{} stopped", stopped.len());
            Ok(())
        }
        Command::Setup => setup::ensure(&[setup::server(), setup::build()].concat()),
        Command::Install { pg_config } => install(pg_config),
        Command::Chaos(options) => chaos::run(&program, &options),
        Command::Bench(options) => {
            let lab = Lab::start(&program)?;
            let report = bench::run(&lab, &options);
            lab.close();
            print!("{}", report?);
            Ok(())
        }
        Command::ChaosHand(who) => chaos::work(who),
        Command::Soak { minutes, sessions, seed } => {
            let length = Duration::try_from_secs_f64(minutes * 60.0)?;
            let seed = seed.unwrap_or_else(|| rand::random::<u32>().into());
            soak::run(&program, &soak::Options { length, sessions, seed, handovers: 200 })
        }
        Command::Worker { conninfo } => worker::serve(&conninfo),
        Command::Watchdog { rundir } => rundir::watchdog(&rundir),
    }
}

fn install(pg_config: Option<PathBuf>) -> Result<()> {
    if pg_config.is_none() {
        setup::ensure(&[setup::server(), setup::build()].concat())?;
    }
    let pg_config = pg_config.unwrap_or_else(extension::default_pg_config);
    let extension = Extension::build(&pg_config, &[])?;
    let directory = |option: &str| -> Result<PathBuf> {
        let text = process::output_of(Program::new(&pg_config).arg(option))?;
        Ok(PathBuf::from(text.trim()))
    };
    let lib = directory("--pkglibdir")?;
    let share = directory("--sharedir")?.join("extension");
    let written = extension.install(&lib, &share).with_context(|| {
        let (lib, share) = (lib.display(), share.display());
        format!("the extension is built, but has to be installed by a user who may write to {lib} and {share}")
    })?;
    for path in written {
        println!("installed {}", path.display());
    }
    println!("Now, in a database: CREATE EXTENSION pg_fence");
    Ok(())
}
