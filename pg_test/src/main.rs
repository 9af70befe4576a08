//! The test program: the demonstration, the setup, the installation.

use anyhow::Result;
use clap::{Parser, Subcommand};
use pg_test::extension::{Extension, NAME};
use pg_test::installation::Installation;
use pg_test::majors;
use pg_test::source_tree;
use pg_test::{
    book, cassert, chaos, clients, demo, matrix, package, process, promises, rundir, script_rules,
    worker,
};
use std::path::{Path, PathBuf};
use std::process::Command as Program;

/// The test program of pg_fence. Without a command it plays the demonstration.
#[derive(Parser)]
#[command(version, bin_name = "cargo run --")]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Play the demonstration on a private server
    Demo(demo::Options),
    /// Stop the servers that `demo --keep` left running, of every checkout
    Stop,
    /// Install the Debian packages that are missing for building and testing
    Setup,
    /// Build the extension and install it into a PostgreSQL
    Install {
        /// The pg_config of that PostgreSQL
        #[arg(long, value_name = "PATH")]
        pg_config: Option<PathBuf>,
        /// A directory to stand for `/`: what is installed goes below it
        #[arg(long, value_name = "DIRECTORY")]
        destdir: Option<PathBuf>,
    },
    /// Print what is promised, and the tests that show it
    Promises,
    /// Look over the install and upgrade scripts with pgspot
    Pgspot,
    /// Build the pages as a book, with mdBook
    Book,
    /// Build packages: for Debian, .tar.gz, for PGXN
    Package(package::Options),
    /// Let many workers fight for leases while everything fails
    Chaos(chaos::Options),
    /// Play the scenarios of clients/scenarios.md with the clients in other languages
    Clients(clients::Options),
    /// Run the tests on a PostgreSQL built with assertions (--enable-cassert)
    Cassert(cassert::Options),
    /// Run the whole suite on each major version of PostgreSQL
    Matrix(matrix::Options),
    /// Benchmark pg_fence against its alternatives
    #[command(disable_help_flag = true)]
    Bench {
        /// The arguments of the bench's own program; `bench --help` shows them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    #[command(hide = true)]
    ChaosWorker(chaos::Identity),
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
            stopped.iter().for_each(|dir| println!("stopped the servers in {}", dir.display()));
            println!("{} stopped", stopped.len());
            Ok(())
        }
        Command::Setup => majors::chosen().map(drop),
        Command::Install { pg_config, destdir } => install(pg_config, destdir.as_deref()),
        Command::Promises => promises::run(),
        Command::Pgspot => script_rules::run(),
        Command::Book => {
            println!("{}", book::build()?.display());
            Ok(())
        }
        Command::Package(options) => package::run(&options),
        Command::Chaos(options) => chaos::run(&program, &options),
        Command::Clients(options) => clients::run(&program, &options),
        Command::Cassert(options) => cassert::run(&options),
        Command::Matrix(options) => matrix::run(&options),
        Command::Bench { arguments } => bench(&arguments),
        Command::ChaosWorker(who) => chaos::work(who),
        Command::Worker { conninfo } => worker::serve(&conninfo),
        Command::Watchdog { rundir } => rundir::watchdog(&rundir),
    }
}

/// Builds and starts the benchmark. Its many dependencies keep it out of this program.
fn bench(arguments: &[String]) -> Result<()> {
    let mut cargo = source_tree::cargo();
    let manifest = source_tree::source_root().join("pg_test/bench/Cargo.toml");
    cargo.args(["run", "--manifest-path"]).arg(manifest);
    if !cfg!(debug_assertions) {
        cargo.arg("--release");
    }
    // A file in an argument is relative to the caller's directory, not to the source tree.
    let status = cargo.current_dir(std::env::current_dir()?).arg("--").args(arguments).status()?;
    std::process::exit(status.code().unwrap_or(1))
}

fn install(pg_config: Option<PathBuf>, destdir: Option<&Path>) -> Result<()> {
    let installation = match pg_config {
        None => majors::chosen()?,
        Some(pg_config) => Installation::named(pg_config),
    };
    let extension = Extension::build(&installation)?;
    let directory = |option: &str| -> Result<PathBuf> {
        let text = process::output_of(Program::new(&installation.pg_config).arg(option))?;
        let path = Path::new(text.trim());
        Ok(destdir.unwrap_or(Path::new("/")).join(path.strip_prefix("/")?))
    };
    let lib = directory("--pkglibdir")?;
    let share = directory("--sharedir")?.join("extension");
    if destdir.is_some() {
        std::fs::create_dir_all(&lib)?;
        std::fs::create_dir_all(&share)?;
    }
    match extension.install(&lib, &share) {
        Ok(written) => {
            for path in written {
                println!("installed {}", path.display());
            }
            println!("Now, in a database: CREATE EXTENSION pg_fence");
            Ok(())
        }
        Err(error) => Err(error.context(by_hand(&extension, &lib, &share)?)),
    }
}

/// Leaves the built files in the target directory and returns the commands that install them.
fn by_hand(extension: &Extension, lib: &Path, share: &Path) -> Result<String> {
    let ready = source_tree::target_dir().join("install");
    let _ = std::fs::remove_dir_all(&ready);
    let (library, others) = (ready.join("lib"), ready.join("extension"));
    std::fs::create_dir_all(&library)?;
    std::fs::create_dir_all(&others)?;
    extension.install(&library, &others)?;
    let commands = package::commands(
        &format!("\"{}/{NAME}.so\"", library.display()),
        &lib.display().to_string(),
        &format!("\"{}/\"*", others.display()),
        &share.display().to_string(),
    );
    let commands = commands.map(|command| format!("    sudo {command}\n"));
    Ok(format!(
        "the extension is built, but could not be installed; by hand:\n\n{}",
        commands.concat()
    ))
}
