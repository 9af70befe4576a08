//! The messages between the two processes of a run, each a line of JSON.

use crate::clock::Moment;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write, stdin, stdout};
use std::sync::{Mutex, mpsc as std_mpsc};
use std::time::Duration;
use tokio::sync::mpsc;

/// What the renewer reports to the supervisor, on its standard output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The lease is held. An adopted lease has no deadline.
    Granted {
        token: i64,
        deadline: Option<Moment>,
    },
    Renewed {
        deadline: Moment,
    },
    /// The lease is lost.
    Lost,
    /// The lease could not be acquired. The supervisor shows the message and exits with the status.
    Failed {
        status: u8,
        message: String,
    },
}

/// What the supervisor sends to the renewer, on its standard input. If that input ends without `Release` or
/// `LetExpire`, the supervisor is dead.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// The command runs in this process group.
    Started { group: i32 },
    /// All processes of the command have ended: release the lease, or stop waiting for it. `has_failed` is true if the
    /// command ended by itself with a status other than 0.
    Release { has_failed: bool },
    /// A process of the command survives KILL: do not release the lease, so that it ends at its ttl.
    LetExpire,
}

/// Returns the channel of the supervisor's orders, which ends when the supervisor dies. A thread reads them, because a
/// read from a pipe may block.
pub fn receive_orders() -> mpsc::UnboundedReceiver<Order> {
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

/// Sends events to the supervisor. A thread writes them, because a supervisor that is stopped for hours reads nothing.
pub struct EventSender {
    queue: std_mpsc::Sender<Option<Event>>,
    all_written: Mutex<std_mpsc::Receiver<()>>,
}

impl EventSender {
    pub fn start() -> EventSender {
        let (queue, queued) = std_mpsc::channel::<Option<Event>>();
        let (end, all_written) = std_mpsc::channel();
        std::thread::spawn(move || {
            while let Ok(Some(event)) = queued.recv() {
                let Ok(line) = serde_json::to_string(&event) else { return };
                if writeln!(stdout(), "{line}").is_err() {
                    return;
                }
            }
            // `flush` may have given up.
            let _ = end.send(());
        });
        EventSender { queue, all_written: Mutex::new(all_written) }
    }

    pub fn send(&self, event: Event) {
        // This fails if the supervisor is dead.
        let _ = self.queue.send(Some(event));
    }

    /// Waits until all events are written, but no longer than `limit`: a frozen supervisor reads nothing.
    pub fn flush(&self, limit: Duration) {
        let _ = self.queue.send(None);
        if let Ok(all_written) = self.all_written.lock() {
            let _ = all_written.recv_timeout(limit);
        }
    }
}
