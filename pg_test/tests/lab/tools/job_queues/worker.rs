//! How a queue's worker is started.

use super::queue::Queue;
use crate::support::program::{self, Program};
use pg_test::clients::languages::typescript;
use pg_test::orm::{self, Runtime};
use pg_test::source_tree::source_root;
use pg_test::{Context, Database, Lab, Result};
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// A lease that a test can outlive; a queue that gives up a job later than its lease ends.
const LEASE_SECONDS: &str = "9";
const EXPIRE_SECONDS: &str = "20";

/// How a queue's worker is started.
pub struct Programs {
    program: OsString,
    script: PathBuf,
    environment: Vec<(&'static str, OsString)>,
}

impl Programs {
    /// Fetches the queue and writes the program, with those changes, to where it finds its libraries.
    pub fn bring(queue: &Queue, changes: &[(&str, &str)]) -> Result<Programs> {
        let home = orm::fetch(queue.runtime)?;
        let (program, environment) = match queue.runtime {
            Runtime::Python(_) => {
                let client = source_root().join("clients/python/src");
                (home.join("bin/python").into(), vec![("PYTHONPATH", client.into())])
            }
            Runtime::Node(_) => {
                link(&typescript::build()?, &home.join("node_modules/pg_fence"))?;
                ("node".into(), vec![])
            }
        };
        let source = program::changed(queue.source()?, changes).context(queue.program)?;
        // Of this run alone: another may change the same program otherwise.
        let dir = home.join("programs").join(format!("{:016x}", rand::random::<u64>()));
        fs::create_dir_all(&dir)?;
        let script = dir.join(queue.program);
        fs::write(&script, source)?;
        Ok(Programs { program, script, environment })
    }

    /// Starts it for that database.
    pub fn start(&self, lab: &Lab, database: &Database, arguments: &[&str]) -> Result<Program> {
        let conninfo = database.conninfo();
        let (port, name) = conninfo.place();
        let mut command = lab.rundir().command(&self.program);
        command
            .arg(&self.script)
            .arg(format!("postgresql://postgres@127.0.0.1:{port}/{name}"))
            .args(arguments)
            .envs(self.environment.iter().cloned())
            .env("LEASE_SECONDS", LEASE_SECONDS)
            .env("EXPIRE_SECONDS", EXPIRE_SECONDS);
        Program::start(command)
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        let _ = self.script.parent().map(fs::remove_dir_all);
    }
}

fn link(to: &Path, at: &Path) -> Result<()> {
    match fs::remove_file(at) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
        _ => match symlink(to, at) {
            // Another test made the same link meanwhile.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            made => Ok(made?),
        },
    }
}
