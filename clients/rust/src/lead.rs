//! Work that one process does at a time, and who does it.

use crate::clock;
use crate::error::Error;
use crate::lease::Lease;
use crate::observe::Leader;
use crate::request::{LeaseRequest, unique_holder};
use std::convert::Infallible;
use std::future::{Future, pending};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

pub(crate) type OnLeader = Arc<dyn Fn(Leader) + Send + Sync>;

impl LeaseRequest {
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

    /// While it waits or leads, that is told who leads, now and after each change.
    pub fn on_leader(self, told: impl Fn(Leader) + Send + Sync + 'static) -> Self {
        LeaseRequest { on_leader: Some(Arc::new(told)), ..self }
    }

    /// Never comes to an end.
    async fn tell_leaders(&self) -> Infallible {
        if let Some(told) = &self.on_leader {
            let mut observer = self.fence.observe(&self.names[0]);
            loop {
                match observer.changed().await {
                    Ok(leader) => told(leader),
                    Err(error) => {
                        break log::warn!("who leads {} cannot be seen: {error}", self.names[0]);
                    }
                }
            }
        }
        pending().await
    }

    async fn lead_or<T, E, S, W>(
        self,
        stop: impl Future<Output = S>,
        work: impl FnMut(Lease) -> W,
    ) -> Result<Led<T, S>, E>
    where
        W: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        if self.names.is_empty() {
            return Err(Error::other("a lease needs a name").into());
        }
        let told = self.clone();
        tokio::select! {
            led = self.lead_by_turns(stop, work) => led,
            never = told.tell_leaders() => match never {},
        }
    }

    async fn lead_by_turns<T, E, S, W>(
        mut self,
        stop: impl Future<Output = S>,
        mut work: impl FnMut(Lease) -> W,
    ) -> Result<Led<T, S>, E>
    where
        W: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        // If the answer to an acquire was lost, the unique name takes the grant over.
        self.holder.get_or_insert_with(unique_holder);
        self.reclaim = true;
        // In portions, so that a connection that hangs is noticed.
        self.wait = (self.terms.ttl / 3).clamp(Duration::from_secs(1), Duration::from_secs(10));
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
                () = clock::sleep(self.terms.ttl / 12) => {}
            }
        }
    }
}

enum Led<T, S> {
    Done(T),
    Stopped(S),
}
