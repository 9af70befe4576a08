//! How a lease is asked for.

use crate::clock;
use crate::error::{Error, LeaseTaken};
use crate::fence::Fence;
use crate::keeper::Keeper;
use crate::lease::Lease;
use crate::own::{Call, argument};
use crate::state::Shared;
use serde_json::Value;
use std::convert::Infallible;
use std::future::{Future, pending};
use std::hash::{BuildHasher, RandomState};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio_postgres::types::Type;

/// How a lease is asked for: `fence.lease("order:7").ttl(Duration::from_secs(30)).acquire()`.
#[derive(Clone)]
#[must_use = "a lease is not acquired before `acquire`, `try_acquire`, `hold` or `lead`"]
pub struct LeaseRequest {
    fence: Fence,
    pub(crate) names: Arc<[String]>,
    pub(crate) ttl: Duration,
    pub(crate) wait: Duration,
    holder: Option<String>,
    metadata: Option<Value>,
    shared: bool,
    slots: i32,
    reclaim: bool,
    pub(crate) session: bool,
}

impl LeaseRequest {
    pub(crate) fn new(fence: Fence, names: Vec<String>) -> LeaseRequest {
        LeaseRequest {
            fence,
            names: names.into(),
            ttl: Duration::from_secs(30),
            wait: Duration::ZERO,
            holder: None,
            metadata: None,
            shared: false,
            slots: 1,
            reclaim: false,
            session: false,
        }
    }

    /// How long it is held without a renewal: 30 s unless said otherwise.
    pub fn ttl(self, ttl: Duration) -> Self {
        LeaseRequest { ttl, ..self }
    }

    /// How long to wait in line for it: not at all unless said otherwise.
    pub fn wait(self, wait: Duration) -> Self {
        LeaseRequest { wait, ..self }
    }

    /// Who has it, for the view of all leases; by default a text that is unique for each acquire.
    pub fn holder(self, holder: impl Into<String>) -> Self {
        LeaseRequest { holder: Some(holder.into()), ..self }
    }

    /// For the view of all leases.
    pub fn metadata(self, metadata: Value) -> Self {
        LeaseRequest { metadata: Some(metadata), ..self }
    }

    /// Others may have it shared at the same time.
    pub fn shared(self) -> Self {
        LeaseRequest { shared: true, ..self }
    }

    /// So many may have it at the same time.
    pub fn slots(self, slots: i32) -> Self {
        LeaseRequest { slots, ..self }
    }

    /// It ends with its session, too. Not through a pooler.
    pub fn session(self) -> Self {
        LeaseRequest { session: true, ..self }
    }

    /// Where that holder has it already, it gets a new grant at once.
    pub fn reclaim(self, holder: impl Into<String>) -> Self {
        LeaseRequest { reclaim: true, ..self.holder(holder) }
    }

    /// Acquires it; [`LeaseTaken`] where it is taken, and stayed so for as long as we waited.
    ///
    /// Dropped while it waits in line, it leaves the line; a grant that comes all the same is given back.
    pub async fn acquire(self) -> Result<Lease, Error> {
        let names = self.names.clone();
        self.try_acquire().await?.ok_or_else(|| LeaseTaken(names).into())
    }

    /// As [`acquire`](LeaseRequest::acquire); None where it is taken.
    pub async fn try_acquire(self) -> Result<Option<Lease>, Error> {
        self.start()?.granted().await
    }

    /// Does `work` under the lease, and releases it. On a loss the work is dropped where it waits, and the answer is
    /// [`LeaseLost`](crate::LeaseLost); so it is after a loss that the work did not notice. An error of the work
    /// comes out unchanged.
    pub async fn hold<T, E, W>(self, work: impl FnOnce(Lease) -> W) -> Result<T, E>
    where
        W: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        let lease = self.acquire().await?;
        let outcome = lease.run(work(lease.clone())).await;
        let released = lease.release().await;
        let done = outcome.map_err(Error::from)??;
        released.map_err(Error::from)?;
        Ok(done)
    }

    /// Does `work` while leading, again after each loss, and returns what it comes to.
    ///
    /// On a loss the work is dropped where it waits. An error of the work that is no loss ends it, and so does an
    /// error of the server that will not go away. Dropped, it ends, and gives the lease back in the background; to
    /// have it end in good order, [`lead_until`](LeaseRequest::lead_until).
    pub async fn lead<T, E, W>(self, work: impl FnMut(Lease) -> W) -> Result<T, E>
    where
        W: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        match self.lead_or(pending::<Infallible>(), work).await? {
            Led::Done(done) => Ok(done),
            Led::Stopped(never) => match never {},
        }
    }

    /// As [`lead`](LeaseRequest::lead), until `stop` resolves: then the work is dropped where it waits, the lease is
    /// given back, and the answer is None.
    pub async fn lead_until<T, E, W>(
        self,
        stop: impl Future<Output = ()>,
        work: impl FnMut(Lease) -> W,
    ) -> Result<Option<T>, E>
    where
        W: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        match self.lead_or(stop, work).await? {
            Led::Done(done) => Ok(Some(done)),
            Led::Stopped(()) => Ok(None),
        }
    }

    async fn lead_or<T, E, S, W>(
        mut self,
        stop: impl Future<Output = S>,
        mut work: impl FnMut(Lease) -> W,
    ) -> Result<Led<T, S>, E>
    where
        W: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        // Whoever never saw the answer to an acquire takes the grant over by its own name.
        self.holder.get_or_insert_with(unique_holder);
        self.reclaim = true;
        // In portions, so that a connection that hangs is noticed.
        self.wait = (self.ttl / 3).clamp(Duration::from_secs(1), Duration::from_secs(10));
        let mut stop = pin!(stop);
        loop {
            let acquiring = self.start()?;
            let lease = acquiring.lease.clone();
            let granted = tokio::select! {
                biased;
                stopped = &mut stop => {
                    let _ = lease.release().await;
                    return Ok(Led::Stopped(stopped));
                }
                granted = acquiring.granted() => granted,
            };
            match granted {
                Ok(None) => continue,
                Ok(Some(_)) => {
                    let outcome = tokio::select! {
                        biased;
                        stopped = &mut stop => Ok(Ok(Led::Stopped(stopped))),
                        outcome = lease.run(work(lease.clone())) => outcome.map(|done| done.map(Led::Done)),
                    };
                    let is_doubtful = lease.is_doubtful();
                    let _ = lease.release().await;
                    match outcome {
                        Ok(Ok(led)) => return Ok(led),
                        Ok(Err(error)) if !is_doubtful => return Err(error),
                        Ok(Err(_)) | Err(_) => log::info!("leading {} again", self.names[0]),
                    }
                }
                Err(error) if error.is_permanent() => return Err(error.into()),
                Err(error) => log::warn!("leading {} is tried again: {error}", self.names[0]),
            }
            tokio::select! {
                biased;
                stopped = &mut stop => return Ok(Led::Stopped(stopped)),
                () = clock::sleep(self.ttl / 12) => {}
            }
        }
    }

    /// Has a task acquire it.
    fn start(&self) -> Result<Acquiring, Error> {
        let is_plain = !self.shared && self.slots == 1 && !self.reclaim;
        match self.names.len() {
            0 => return Err(Error::other("a lease needs a name")),
            1 => {}
            _ if is_plain => {}
            _ => {
                return Err(Error::other(
                    "several names at once are exclusive: no shared, slots or reclaim",
                ));
            }
        }
        let fence = &self.fence;
        let shared =
            Shared::new(self.names.clone(), self.ttl, fence.schema.clone(), fence.hooks.clone());
        let shared = Arc::new(shared);
        let (renewals, asked) = mpsc::unbounded_channel();
        let (answer, granted) = oneshot::channel();
        let keeper = Keeper::new(self, shared.clone(), fence.open.clone(), asked);
        fence.spawn(keeper.keep(answer));
        Ok(Acquiring { lease: Lease::new(shared, renewals), granted })
    }

    pub(crate) fn call(&self, shared: &Shared) -> Call {
        let holder = self.holder.clone().unwrap_or_else(unique_holder);
        let metadata = self.metadata.as_ref().map(Value::to_string);
        if let [name] = &*self.names {
            let function = "lease_acquire($1::text, $2::text, $3::interval, $4::interval, $5::jsonb, \
                            $6::boolean, $7::integer, $8::boolean, $9::boolean)";
            return Call {
                sql: shared.select(function),
                arguments: vec![
                    argument(name.clone(), Type::TEXT),
                    argument(holder, Type::TEXT),
                    argument(interval(self.ttl), Type::TEXT),
                    argument(interval(self.wait), Type::TEXT),
                    argument(metadata, Type::TEXT),
                    argument(self.shared, Type::BOOL),
                    argument(self.slots, Type::INT4),
                    argument(self.reclaim, Type::BOOL),
                    argument(self.session, Type::BOOL),
                ],
            };
        }
        let function =
            "lease_acquire_all($1::text[], $2::text, $3::interval, $4::jsonb, $5::boolean)";
        Call {
            sql: shared.select(function),
            arguments: vec![
                argument(self.names.to_vec(), Type::TEXT_ARRAY),
                argument(holder, Type::TEXT),
                argument(interval(self.ttl), Type::TEXT),
                argument(metadata, Type::TEXT),
                argument(self.session, Type::BOOL),
            ],
        }
    }
}

enum Led<T, S> {
    Done(T),
    Stopped(S),
}

/// A lease that has been asked for.
struct Acquiring {
    lease: Lease,
    granted: oneshot::Receiver<Result<bool, Error>>,
}

impl Acquiring {
    async fn granted(self) -> Result<Option<Lease>, Error> {
        // A keeper that is gone without an answer went with its runtime.
        let granted = self.granted.await.unwrap_or_else(|gone| Err(Error::other(gone)))?;
        Ok(granted.then_some(self.lease))
    }
}

/// What the view of all leases shows as the holder, unless one is named.
pub(crate) fn unique_holder() -> String {
    let host = rustix::system::uname();
    let random = RandomState::new().hash_one(()) as u32;
    format!("{}/{}/{random:08x}", host.nodename().to_string_lossy(), std::process::id())
}

/// As PostgreSQL reads it. A text: the driver has no type for it.
pub(crate) fn interval(span: Duration) -> String {
    format!("{} microseconds", span.as_micros())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_unique() {
        assert_ne!(unique_holder(), unique_holder());
    }
}
