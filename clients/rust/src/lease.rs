//! A lease, as its holder sees it.

use crate::error::{Error, LeaseLost};
use crate::guarded::{Guardable, Guarded};
use crate::holding::Holding;
use crate::options::presenting;
use crate::state::Shared;
use crate::telemetry;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio_postgres::Config;

/// Who waits for a renewal.
pub(crate) type Renewal = oneshot::Sender<i64>;

/// A lease that is kept until it is released or lost, by the heartbeat that all leases of a [`Fence`](crate::Fence)
/// share.
///
/// Clones are the same lease, for other tasks. It ends with [`release`](Lease::release), which waits until it is
/// given back. Dropping the last clone does not wait: the heartbeat stops, and the lease is given back in the
/// background, as long as the runtime lives; at the latest it ends at its ttl.
#[derive(Clone)]
pub struct Lease {
    holder: Arc<Holder>,
}

struct Holder(Arc<Shared>);

impl Drop for Holder {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Lease {
    pub(crate) fn new(shared: Arc<Shared>) -> Lease {
        Lease { holder: Arc::new(Holder(shared)) }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.holder.0
    }

    /// What it is a lease of.
    pub fn names(&self) -> &[String] {
        &self.shared().names
    }

    /// The token that the acquire returned; it serves for as long as the lease is held.
    pub fn token(&self) -> i64 {
        self.shared().token()
    }

    /// Whether it is ours at this moment, by our own clock.
    pub fn held(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// How long it is ours if no renewal comes through any more.
    pub fn remaining(&self) -> Duration {
        self.shared().remaining()
    }

    /// Fails when it is ours no more. For long steps between transactions, and before each call to the outside.
    pub fn check(&self) -> Result<(), LeaseLost> {
        self.shared().check()
    }

    /// Why it was lost, once it was.
    pub fn loss(&self) -> Option<LeaseLost> {
        self.shared().loss()
    }

    /// Resolves as soon as the lease is lost, at the deadline at the latest; to None where it ends without a loss.
    ///
    /// It does not borrow the lease, and does not keep it. In `tokio::select!`: `Some(loss) = lease.lost() => …`.
    pub fn lost(&self) -> impl Future<Output = Option<LeaseLost>> + Send + use<> {
        self.shared().lost()
    }

    /// What `work` comes to, unless the lease is lost before: then the work is dropped where it waits.
    pub async fn run<T>(&self, work: impl Future<Output = T>) -> Result<T, LeaseLost> {
        self.shared().run(work).await
    }

    /// Has it renewed at once, and returns the new token, which a `strict` table asks for when a row is written again;
    /// None when the renewal failed, which is no loss yet, or when it is held for its [longest
    /// time](crate::LeaseRequest::hold_at_most).
    pub async fn renew(&self) -> Result<Option<i64>, LeaseLost> {
        self.check()?;
        if self.shared().is_left_to_its_deadline() {
            return Ok(None);
        }
        let (renewal, renewed) = oneshot::channel();
        // Of one that has failed it is dropped, which is an answer, too.
        self.shared().hurry(Some(renewal));
        let token = self.run(renewed).await?.ok();
        self.check()?;
        Ok(token)
    }

    /// A transaction during which nobody else is granted the lease, and whose writes present its token. It does not
    /// begin when the lease is lost.
    ///
    /// `connection` is a tokio-postgres `Client`, a [`Connected`](crate::Connected), or a `Transaction` that is open:
    /// that is guarded from here on by a savepoint, and the code that began it ends it.
    pub async fn guard<'c>(
        &self,
        connection: &'c mut impl Guardable,
    ) -> Result<Guarded<'c>, Error> {
        let begins = Guarded::begin(vec![Holding::Lease(self.clone())], connection, true);
        telemetry::guard(self.names(), begins).await
    }

    /// As [`guard`](Lease::guard), without a lock: its writes present the token, and somebody else may be granted the
    /// lease until one of them is to a table that is bound to it.
    pub async fn present<'c>(
        &self,
        connection: &'c mut impl Guardable,
    ) -> Result<Guarded<'c>, Error> {
        Guarded::begin(vec![Holding::Lease(self.clone())], connection, false).await
    }

    /// Gives it back, and waits for that. Fails only where the lease had been lost: when the server cannot be
    /// reached, the lease ends at its ttl. Dropped while it waits, it goes on in the background.
    pub async fn release(&self) -> Result<(), LeaseLost> {
        self.shared().end();
        self.shared().until_over().await;
        self.loss().map_or(Ok(()), Err)
    }

    /// Stops keeping it without giving it back, for another process that [resumes](crate::Fence::resume) it by the
    /// token that this answers, before the ttl is over. Clones answer as after a release.
    pub fn detach(self) -> Result<i64, Error> {
        self.check()?;
        if self.shared().terms.session {
            return Err(Error::other("detach: a session lease ends with its session"));
        }
        match self.shared().released() {
            true => Ok(self.token()),
            false => Err(self.check().err().map_or_else(|| Error::other("detach"), Error::from)),
        }
    }

    /// The same place to connect to, where every transaction presents the token: code that knows nothing of fences is
    /// fenced by its connection alone. Not through a pooler, which takes no options. On a loss such connections are not
    /// broken off; the server refuses what they write once somebody else has the lease.
    pub fn options(&self, config: &Config) -> Config {
        presenting(self.token(), config)
    }

    pub(crate) fn is_doubtful(&self) -> bool {
        self.shared().is_doubtful()
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("names", &self.names())
            .field("token", &self.token())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
