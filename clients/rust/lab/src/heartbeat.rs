//! `lease_keep`, made to fail, or its answers changed: known faults.

use crate::lock;
use pg_fence_client::{Answer, Error, Guard, Lab};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokio::sync::{mpsc, oneshot};

/// The calls that are to run within the transaction of the work.
pub type Kept = mpsc::UnboundedReceiver<Renewal>;

type Answers = Result<Vec<Answer>, Error>;

/// One of them, and who waits for it.
pub struct Renewal {
    pairs: Vec<(String, i64)>,
    answer: oneshot::Sender<Answers>,
}

impl Renewal {
    pub async fn within(self, guard: &Guard<'_>) {
        let sql = "SELECT outcome, extract(epoch FROM remaining)::float8, extract(epoch FROM again_in)::float8 \
                   FROM lease_keep($1, $2)";
        let (names, tokens): (Vec<String>, Vec<i64>) = self.pairs.into_iter().unzip();
        let rows = guard.query(sql, &[&names, &tokens]).await;
        let answer = |row: &tokio_postgres::Row| (row.get(0), row.get(1), row.get(2));
        let _ = self.answer.send(rows.map(|rows| rows.iter().map(answer).collect()));
    }
}

#[derive(Default)]
pub struct Heartbeat {
    plant: Option<String>,
    starved: AtomicBool,
    broken: AtomicBool,
    /// The transaction that is open.
    work: Mutex<Option<mpsc::UnboundedSender<Renewal>>>,
}

impl Heartbeat {
    pub fn new(plant: Option<String>) -> Heartbeat {
        Heartbeat { plant, ..Heartbeat::default() }
    }

    /// From now on it sends nothing.
    pub fn starve(&self) {
        self.starved.store(true, Ordering::Relaxed);
    }

    /// None but a lease's own renewals have been starved.
    pub fn feed(&self) {
        self.starved.store(false, Ordering::Relaxed);
    }

    /// The next one dies of something that is no error.
    pub fn break_once(&self) {
        self.broken.store(true, Ordering::Relaxed);
    }

    pub fn transaction_is_open(&self) -> Kept {
        let (work, renewals) = mpsc::unbounded_channel();
        *lock(&self.work) = Some(work);
        renewals
    }

    pub fn transaction_has_ended(&self) {
        *lock(&self.work) = None;
    }

    fn has(&self, plant: &str) -> bool {
        self.plant.as_deref() == Some(plant)
    }

    pub fn lab(self: Arc<Self>) -> Lab {
        Arc::new(move |pairs, ask| {
            let heartbeat = self.clone();
            Box::pin(async move {
                if heartbeat.starved.load(Ordering::Relaxed) {
                    return Err(Error::other("starved"));
                }
                assert!(!heartbeat.broken.swap(false, Ordering::Relaxed), "broken");
                let (count, begun) = (pairs.len(), Instant::now());
                let work = lock(&heartbeat.work).clone().filter(|_| heartbeat.has("renew-in-work"));
                let answers = match work {
                    None => ask.await,
                    Some(work) => {
                        let (answer, answered) = oneshot::channel();
                        let _ = work.send(Renewal { pairs, answer });
                        answered.await.unwrap_or_else(|gone| Err(Error::other(gone)))
                    }
                };
                heartbeat.changed(answers, count, begun)
            })
        })
    }

    fn changed(&self, answers: Answers, count: usize, begun: Instant) -> Answers {
        let all = |outcome: &str| vec![(outcome.to_owned(), None, None); count];
        let mut answers = match answers {
            Err(_) if self.has("error-is-loss") => return Ok(all("lost")),
            answers => answers?,
        };
        let any = |outcome: &str| answers.iter().any(|(is, ..)| is == outcome);
        if self.has("one-lost-loses-all") && any("lost") {
            return Ok(all("lost"));
        }
        if self.has("one-lock-stops-all") && any("later") {
            return Ok(all("later"));
        }
        if self.has("deadline-from-answer") {
            for (_, left, _) in &mut answers {
                *left = left.map(|left| left + begun.elapsed().as_secs_f64());
            }
        }
        Ok(answers)
    }
}
