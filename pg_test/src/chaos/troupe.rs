//! The worker processes of a run.

use crate::process;
use crate::rundir::RunDir;
use anyhow::{Context, Result};
use rand::rngs::StdRng;
use rand::RngExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Them.
pub struct Troupe {
    rundir: Arc<RunDir>,
    dir: PathBuf,
    seed: u64,
    number: u32,
    hands: Vec<Hand>,
}

struct Hand {
    life: u32,
    child: Child,
}

impl Troupe {
    /// So many workers, which do not work yet.
    pub fn new(rundir: Arc<RunDir>, dir: PathBuf, seed: u64, number: u32) -> Troupe {
        Troupe { rundir, dir, seed, number, hands: Vec::new() }
    }

    /// Starts them.
    pub fn start(&mut self) -> Result<()> {
        for worker in 0..self.number {
            let child = self.spawn(worker, 0)?;
            self.hands.push(Hand { life: 0, child });
        }
        Ok(())
    }

    fn spawn(&self, worker: u32, life: u32) -> Result<Child> {
        let numbers = [u64::from(worker), u64::from(life), self.seed].map(|n| n.to_string());
        let mut command = self.rundir.command(self.rundir.program());
        command.arg("chaos-hand").args(numbers).arg(&self.dir).stdin(Stdio::null());
        command.stdout(Stdio::null()).process_group(0).spawn().context("cannot start a worker")
    }

    /// Some worker's pid.
    pub fn any(&self, rng: &mut StdRng) -> i32 {
        self.hands[rng.random_range(0..self.hands.len())].child.id() as i32
    }

    /// All pids.
    pub fn pids(&self) -> Vec<i32> {
        self.hands.iter().map(|hand| hand.child.id() as i32).collect()
    }

    /// Kills one, wherever it is. [`Troupe::revive`] gives it another life.
    pub fn kill_any(&mut self, rng: &mut StdRng) -> Result<()> {
        let index = rng.random_range(0..self.hands.len());
        let child = &mut self.hands[index].child;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Gives those that died another life.
    pub fn revive(&mut self) -> Result<()> {
        for worker in 0..self.hands.len() {
            if matches!(self.hands[worker].child.try_wait(), Ok(Some(_))) {
                let life = self.hands[worker].life + 1;
                let child = self.spawn(worker as u32, life)?;
                self.hands[worker] = Hand { life, child };
            }
        }
        Ok(())
    }

    /// Waits until they have stopped by themselves; kills those that do not.
    pub fn dismiss(&mut self, limit: Duration) {
        let stopped = |hand: &mut Hand| !process::is_alive(hand.child.id() as i32);
        let _ =
            process::wait_until("the workers stop", limit, || self.hands.iter_mut().all(stopped));
        for hand in &mut self.hands {
            let _ = hand.child.kill();
            let _ = hand.child.wait();
        }
        self.hands.clear();
    }
}

impl Drop for Troupe {
    fn drop(&mut self) {
        self.dismiss(Duration::ZERO);
    }
}
