//! How a lease is asked for.

use crate::calls::interval;
use crate::error::{Error, LeaseTaken};
use crate::fence::Fence;
use crate::keeping::Try;
use crate::lead::OnLeader;
use crate::lease::Lease;
use crate::names::Names;
use crate::own::{Call, argument};
use crate::state::{Shared, Terms};
use crate::telemetry;
use crate::waiting::Waiting;
use serde_json::Value;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio_postgres::types::Type;

/// In the call of lease_acquire.
const WAIT_ARGUMENT: usize = 3;

/// A ttl that is shorter is refused: a renewal would hardly come in time.
const SHORTEST: Duration = Duration::from_millis(100);

/// How a lease is asked for: `fence.lease("order:7").ttl(Duration::from_secs(30)).acquire()`.
#[derive(Clone)]
#[must_use = "a lease is not acquired before `acquire`, `try_acquire`, `hold` or `lead`"]
pub struct LeaseRequest {
    pub(crate) fence: Fence,
    pub(crate) names: Arc<[String]>,
    pub(crate) terms: Terms,
    pub(crate) wait: Duration,
    pub(crate) holder: Option<String>,
    pub(crate) metadata: Option<Value>,
    pub(crate) shared: bool,
    pub(crate) slots: i32,
    pub(crate) reclaim: bool,
    pub(crate) on_leader: Option<OnLeader>,
}

impl LeaseRequest {
    pub(crate) fn new(fence: Fence, names: Names) -> LeaseRequest {
        LeaseRequest {
            fence,
            names: names.0,
            terms: Terms::of(Duration::from_secs(30)),
            wait: Duration::ZERO,
            holder: None,
            metadata: None,
            shared: false,
            slots: 1,
            reclaim: false,
            on_leader: None,
        }
    }

    /// How long it is held without a renewal: 30 s unless said otherwise, at least 100 ms.
    pub fn ttl(self, ttl: Duration) -> Self {
        LeaseRequest { terms: Terms { ttl, ..self.terms }, ..self }
    }

    /// After so long it is not renewed any more, and is lost at its deadline: for work that might go round for ever.
    pub fn hold_at_most(self, at_most: Duration) -> Self {
        LeaseRequest { terms: Terms { at_most: Some(at_most), ..self.terms }, ..self }
    }

    /// Nobody else is granted it before so long, also when it is released before: for schedulers whose clocks differ.
    /// It is then left to itself until that time, and not to be renewed or released any more.
    pub fn hold_at_least(self, at_least: Duration) -> Self {
        LeaseRequest { terms: Terms { at_least, ..self.terms }, ..self }
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
        LeaseRequest { terms: Terms { session: true, ..self.terms }, ..self }
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
        telemetry::acquire(&self.names, async { self.start()?.granted().await }).await
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

    /// Has it tried by the keeper, or waited for by a task of its own.
    pub(crate) fn start(&self) -> Result<Acquiring, Error> {
        self.check()?;
        let keeping = &self.fence.keeping;
        let shared = self.fence.shared(self.names.clone(), self.terms);
        let holder = self.holder.clone().unwrap_or_else(unique_holder);
        let call = self.call(&shared, &holder, self.reclaim);
        let (answer, granted) = oneshot::channel();
        if self.terms.session || !self.wait.is_zero() {
            let wait_argument = (self.names.len() == 1).then_some(WAIT_ARGUMENT);
            let (keeping, shared) = (keeping.clone(), shared.clone());
            let waiting = Waiting { keeping, shared, call, wait: self.wait, wait_argument };
            self.fence.keeping.spawn(waiting.wait(answer));
        } else {
            let is_own = self.reclaim || self.holder.is_none();
            let again =
                (is_own && self.names.len() == 1).then(|| self.call(&shared, &holder, true));
            keeping.queue(Try { shared: shared.clone(), call, again, answer });
        }
        Ok(Acquiring { lease: Lease::new(shared), granted })
    }

    fn check(&self) -> Result<(), Error> {
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
        if self.terms.session && !self.terms.at_least.is_zero() {
            return Err(Error::other("hold_at_least: a session lease ends with its session"));
        }
        checked_ttl(self.terms.ttl)
    }

    fn call(&self, shared: &Shared, holder: &str, reclaim: bool) -> Call {
        let metadata = self.metadata.as_ref().map(Value::to_string);
        if let [name] = &*self.names {
            // Where the role has a limit for statements or locks, the wait ends before that.
            let function = "lease_acquire($1::text, $2::text, $3::interval, \
                                least($4::interval, nullif(current_setting('statement_timeout')::interval, '0') / 2, \
                                      nullif(current_setting('lock_timeout')::interval, '0') / 2), \
                                $5::jsonb, $6::boolean, $7::integer, $8::boolean, $9::boolean)";
            return Call {
                sql: shared.select(function),
                arguments: vec![
                    argument(name.clone(), Type::TEXT),
                    argument(holder.to_owned(), Type::TEXT),
                    argument(interval(self.terms.ttl), Type::TEXT),
                    argument(interval(self.wait), Type::TEXT),
                    argument(metadata, Type::TEXT),
                    argument(self.shared, Type::BOOL),
                    argument(self.slots, Type::INT4),
                    argument(reclaim, Type::BOOL),
                    argument(self.terms.session, Type::BOOL),
                ],
            };
        }
        let function =
            "lease_acquire_all($1::text[], $2::text, $3::interval, $4::jsonb, $5::boolean)";
        Call {
            sql: shared.select(function),
            arguments: vec![
                argument(self.names.to_vec(), Type::TEXT_ARRAY),
                argument(holder.to_owned(), Type::TEXT),
                argument(interval(self.terms.ttl), Type::TEXT),
                argument(metadata, Type::TEXT),
                argument(self.terms.session, Type::BOOL),
            ],
        }
    }
}

/// A lease that has been asked for.
pub(crate) struct Acquiring {
    pub lease: Lease,
    granted: oneshot::Receiver<Result<bool, Error>>,
}

impl Acquiring {
    pub async fn granted(self) -> Result<Option<Lease>, Error> {
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

/// A heartbeat needs a little time.
pub(crate) fn checked_ttl(ttl: Duration) -> Result<(), Error> {
    match ttl < SHORTEST {
        true => Err(Error::other(format!("ttl: {ttl:?} is too short, at least {SHORTEST:?}"))),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_unique() {
        assert_ne!(unique_holder(), unique_holder());
    }
}
