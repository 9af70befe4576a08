//! The worker processes of a run.

use crate::process;
use crate::rundir::RunDir;
use anyhow::{Context, Result};
use rand::RngExt;
use rand::rngs::StdRng;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// The processes; killed ones are restarted by [`WorkerPool::revive`].
pub struct WorkerPool {
    rundir: Arc<RunDir>,
    dir: PathBuf,
    seed: u64,
    number: u32,
    processes: Vec<WorkerProcess>,
}

struct WorkerProcess {
    incarnation: u32,
    child: Child,
}

impl WorkerPool {
    /// Starts this number of workers, which do not work yet.
    pub fn new(rundir: Arc<RunDir>, dir: PathBuf, seed: u64, number: u32) -> WorkerPool {
        WorkerPool { rundir, dir, seed, number, processes: Vec::new() }
    }

    pub fn start(&mut self) -> Result<()> {
        for worker in 0..self.number {
            let child = self.spawn(worker, 0)?;
            self.processes.push(WorkerProcess { incarnation: 0, child });
        }
        Ok(())
    }

    fn spawn(&self, worker: u32, incarnation: u32) -> Result<Child> {
        let numbers = [u64::from(worker), u64::from(incarnation), self.seed].map(|n| n.to_string());
        let mut command = self.rundir.command(self.rundir.program());
        command.arg("chaos-worker").args(numbers).arg(&self.dir).stdin(Stdio::null());
        command.stdout(Stdio::null()).process_group(0).spawn().context("cannot start a worker")
    }

    /// The pid of a worker chosen at random.
    pub fn any(&self, rng: &mut StdRng) -> i32 {
        self.processes[rng.random_range(0..self.processes.len())].child.id() as i32
    }

    pub fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|process| process.child.id() as i32).collect()
    }

    /// Kills a random worker, wherever it is. [`WorkerPool::revive`] restarts it.
    pub fn kill_any(&mut self, rng: &mut StdRng) -> Result<()> {
        let index = rng.random_range(0..self.processes.len());
        let child = &mut self.processes[index].child;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Restarts workers that died.
    pub fn revive(&mut self) -> Result<()> {
        for worker in 0..self.processes.len() {
            if matches!(self.processes[worker].child.try_wait(), Ok(Some(_))) {
                let incarnation = self.processes[worker].incarnation + 1;
                let child = self.spawn(worker as u32, incarnation)?;
                self.processes[worker] = WorkerProcess { incarnation, child };
            }
        }
        Ok(())
    }

    /// Waits until the workers have stopped by themselves, and kills the others.
    pub fn dismiss(&mut self, limit: Duration) {
        let stopped = |process: &mut WorkerProcess| !process::is_alive(process.child.id() as i32);
        let _ = process::wait_until("the workers stop", limit, || {
            self.processes.iter_mut().all(stopped)
        });
        for process in &mut self.processes {
            let _ = process.child.kill();
            let _ = process.child.wait();
        }
        self.processes.clear();
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.dismiss(Duration::ZERO);
    }
}
