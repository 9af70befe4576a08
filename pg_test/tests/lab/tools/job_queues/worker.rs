//! A queue's worker as a process, to be frozen, thawed and listened to.

use super::queue::Queue;
use nix::sys::signal::Signal;
use pg_test::clients::languages::typescript;
use pg_test::extension::source_root;
use pg_test::orm::{self, Runtime};
use pg_test::process::{self, wait_until, PATIENCE};
use pg_test::{ensure, Context, Database, Lab, Result};
use std::ffi::OsString;
use std::fs;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

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
        let mut source = queue.source()?;
        for (what, instead) in changes {
            ensure!(source.contains(what), "{} does not say {what}", queue.program);
            source = source.replace(what, instead);
        }
        // Of this run alone: another may change the same program otherwise.
        let dir = home.join("programs").join(format!("{:016x}", rand::random::<u64>()));
        fs::create_dir_all(&dir)?;
        let script = dir.join(queue.program);
        fs::write(&script, source)?;
        Ok(Programs { program, script, environment })
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

/// It is killed at the end at the latest.
pub struct Worker {
    child: Child,
    said: Arc<Mutex<String>>,
}

impl Worker {
    pub fn start(
        lab: &Lab,
        programs: &Programs,
        database: &Database,
        arguments: &[&str],
    ) -> Result<Worker> {
        let conninfo = database.conninfo();
        let (port, name) = conninfo.place();
        let mut command = lab.rundir().command(&programs.program);
        command
            .arg(&programs.script)
            .arg(format!("postgresql://postgres@127.0.0.1:{port}/{name}"))
            .args(arguments)
            .envs(programs.environment.iter().cloned())
            .env("LEASE_SECONDS", LEASE_SECONDS)
            .env("EXPIRE_SECONDS", EXPIRE_SECONDS);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let said: Arc<Mutex<String>> = Arc::default();
        keep(child.stdout.take(), &said)?;
        keep(child.stderr.take(), &said)?;
        Ok(Worker { child, said })
    }

    /// Everything that it has printed.
    pub fn said(&self) -> String {
        self.said.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_some())
    }

    pub fn freeze(&mut self) -> Result<()> {
        let pid = self.child.id() as i32;
        process::signal(pid, Signal::SIGSTOP)?;
        wait_until("it is frozen", PATIENCE, || process::is_stopped(pid))
    }

    pub fn thaw(&mut self) -> Result<()> {
        process::resume(self.child.id() as i32)
    }

    /// It ends by itself, and nothing failed.
    pub fn ends_well(mut self) -> Result<()> {
        self.end(super::PATIENCE, true).map(drop)
    }

    /// It ends by itself with a failure; returns what it said.
    pub fn leaves_with_failure(&mut self, limit: Duration) -> Result<String> {
        self.end(limit, false)
    }

    fn end(&mut self, limit: Duration, well: bool) -> Result<String> {
        let ended = wait_until("the worker leaves", limit, || self.has_ended());
        ended.with_context(|| self.said())?;
        let status = self.child.wait()?;
        // What it printed last may still be on its way here.
        wait_until("its pipes are read", limit, || Arc::strong_count(&self.said) == 1)?;
        let said = self.said();
        ensure!(status.success() == well, "{status}: {said}");
        Ok(said)
    }
}

fn keep(pipe: Option<impl Read + Send + 'static>, said: &Arc<Mutex<String>>) -> Result<()> {
    let (mut pipe, said) = (pipe.context("no pipe")?, said.clone());
    std::thread::Builder::new().name("listener".to_owned()).spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = pipe.read(&mut bytes) {
            let text = String::from_utf8_lossy(&bytes[..count]);
            said.lock().unwrap_or_else(|e| e.into_inner()).push_str(&text);
        }
    })?;
    Ok(())
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
