//! One run of the tests.

use crate::client::Conninfo;
use crate::cluster::{Builder, Cluster};
use crate::database::Database;
use crate::extension::Extension;
use crate::install_dir::InstallDir;
use crate::rundir::RunDir;
use crate::setup::{self, Package};
use crate::worker::Worker;
use crate::{edition, majors, process};
use anyhow::Result;
use std::path::Path;
use std::sync::Arc;

/// A private PostgreSQL with the extension installed, and a server that the tests share.
pub struct Harness {
    rundir: Arc<RunDir>,
    install_dir: Arc<InstallDir>,
    extension: Option<Extension>,
    cluster: Cluster,
}

impl Harness {
    /// Installs missing packages, builds the extension and starts the shared server. `program` is this crate's binary
    /// (`env!("CARGO_BIN_EXE_pg_test")` in a test).
    pub fn start(program: &Path) -> Result<Harness> {
        let installation = majors::chosen()?;
        // The lite edition has no library, so its tests must pass on a server without one.
        let extension =
            if edition::is_lite() { None } else { Some(Extension::build(&installation)?) };
        let rundir = Arc::new(RunDir::create(program)?);
        let install_dir = Arc::new(InstallDir::copy(rundir.clone(), &installation)?);
        extension.iter().try_for_each(|extension| install_dir.install(extension))?;
        let cluster = Builder::new(install_dir.clone()).start()?;
        Ok(Harness { rundir, install_dir, extension, cluster })
    }

    /// Returns the server that the tests share. No test stops it or changes its settings.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// Returns a builder for a new cluster that only the caller uses.
    pub fn builder(&self) -> Builder {
        Builder::new(self.install_dir.clone())
    }

    /// Returns a private copy of Debian's PostgreSQL with the extension, in its own run directory. If `tool` is named,
    /// the copy gets the extension or the program of that Debian package.
    pub fn debians(&self, tool: Option<&str>) -> Result<Arc<InstallDir>> {
        let rundir = Arc::new(RunDir::create(self.rundir.program())?);
        let install_dir = InstallDir::of_major(rundir, setup::USUAL_MAJOR)?;
        // These packages are programs and add nothing to the server.
        if let Some(program @ ("barman" | "pgbackrest" | "pgcopydb" | "sanlock")) = tool {
            let package = match program {
                "sanlock" => Package::new(program, "/usr/sbin/sanlock").without_service("sanlock"),
                _ => Package::new(program, format!("/usr/bin/{program}")),
            };
            setup::ensure(&[package])?;
        } else if let Some(extension) = tool {
            let own = format!("{extension}.so");
            let (short, libraries): (_, &[&str]) = match extension {
                "pg_partman" => ("partman", &["pg_partman_bgw.so"]),
                "pglogical" => (extension, &[&own, "pglogical_output.so"]),
                _ => (extension, &[&own]),
            };
            let place = format!("/usr/lib/postgresql/{}/lib/{}", install_dir.major(), libraries[0]);
            let package =
                Package::new(format!("postgresql-{}-{short}", install_dir.major()), place);
            install_dir.bring_package(package, extension, libraries)?;
        }
        Ok(Arc::new(install_dir))
    }

    /// Creates a database on the shared server, with the extension.
    pub fn database(&self) -> Result<Database> {
        Database::with_extension(self.cluster.conninfo("postgres"))
    }

    /// Creates a database on the shared server, without the extension.
    pub fn bare_database(&self) -> Result<Database> {
        Database::create(self.cluster.conninfo("postgres"))
    }

    /// Starts a worker process with its own session.
    pub fn worker(&self, name: &str, conninfo: &Conninfo) -> Result<Worker> {
        Worker::start(&self.rundir, name, conninfo)
    }

    /// Runs a program of the private PostgreSQL (`"psql"`, `"pg_dump"`) and returns its output.
    pub fn run(&self, program: &str, args: &[&str]) -> Result<String> {
        process::output_of(self.install_dir.command(program)?.args(args))
    }

    pub fn install_dir(&self) -> &Arc<InstallDir> {
        &self.install_dir
    }

    /// The extension under test. Tests that call this cannot run on the lite edition.
    pub fn extension(&self) -> &Extension {
        self.extension.as_ref().expect("the lite edition has no library")
    }

    /// The directory of this run.
    pub fn rundir(&self) -> &Arc<RunDir> {
        &self.rundir
    }

    /// Ends the run: kills its processes and removes its directory, even if other owners still hold a reference.
    pub fn close(&self) {
        self.cluster.report_failed_assertions();
        self.rundir.close();
    }
}
