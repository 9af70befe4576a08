//! The messages between the two processes of a run: JSON, a line each.

use crate::clock::Moment;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write, stdin, stdout};
use std::sync::{Mutex, mpsc as std_mpsc};
use std::time::Duration;
use tokio::sync::mpsc;

/// The keeper, on its standard output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Told {
    /// The lease is held. An adopted lease has no deadline.
    Granted {
        token: i64,
        deadline: Option<Moment>,
    },
    Renewed {
        deadline: Moment,
    },
    /// The lease is not held any more.
    Lost,
    /// The lease could not be acquired, for this reason.
    Failed {
        status: u8,
        message: String,
    },
}

/// The supervisor, on the keeper's standard input. The end of that input, without a word, says that the supervisor
/// is dead.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// The command runs in this process group.
    Started { group: i32 },
    /// The command has ended, with all that it started: release the lease, or stop waiting for it. `has_failed` is true
    /// if the command ended by itself with a status other than 0.
    Release { has_failed: bool },
    /// Something could not be ended: leave the lease to its ttl.
    Leave,
}

/// The supervisor's orders, until it is dead. A thread, since a pipe may block.
pub fn listen() -> mpsc::UnboundedReceiver<Order> {
    let (send, orders) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in stdin().lock().lines().map_while(std::io::Result::ok) {
            let Ok(order) = serde_json::from_str(&line) else { return };
            if send.send(order).is_err() {
                return;
            }
        }
    });
    orders
}

/// Tells the supervisor, by a thread: it may be stopped for hours, and then reads nothing.
pub struct Said {
    words: std_mpsc::Sender<Option<Told>>,
    written: Mutex<std_mpsc::Receiver<()>>,
}

impl Said {
    pub fn start() -> Said {
        let (words, heard) = std_mpsc::channel::<Option<Told>>();
        let (end, written) = std_mpsc::channel();
        std::thread::spawn(move || {
            while let Ok(Some(told)) = heard.recv() {
                let Ok(line) = serde_json::to_string(&told) else { return };
                if writeln!(stdout(), "{line}").is_err() {
                    return;
                }
            }
            // Nobody waits any more where it took too long.
            let _ = end.send(());
        });
        Said { words, written: Mutex::new(written) }
    }

    pub fn say(&self, told: Told) {
        // Nobody hears it where the supervisor is dead.
        let _ = self.words.send(Some(told));
    }

    /// Waits until all has been written, unless the supervisor is frozen and reads nothing.
    pub fn finish(&self, limit: Duration) {
        let _ = self.words.send(None);
        if let Ok(written) = self.written.lock() {
            let _ = written.recv_timeout(limit);
        }
    }
}
