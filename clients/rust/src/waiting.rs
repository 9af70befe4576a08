//! What has a connection of its own: an acquire that waits in line, the session of a lease, a token handed over.

use crate::calls::{call_on_names, interval, release};
use crate::clock::{self, Moment};
use crate::error::{Error, Reason};
use crate::keeping::Keeping;
use crate::own::{Call, Limits, OwnConnection, argument, only_value};
use crate::state::Shared;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio_postgres::types::Type;

/// There is no line to wait in for several names at once: they are tried again after this.
const TRY_AGAIN: Duration = Duration::from_millis(250);
/// How long one statement waits.
const PORTION: Duration = Duration::from_secs(2);

pub(crate) struct Waiting {
    pub keeping: Arc<Keeping>,
    pub shared: Arc<Shared>,
    pub call: Call,
    pub wait: Duration,
    /// Which of the call's arguments says how long to wait.
    pub wait_argument: Option<usize>,
}

impl Waiting {
    pub async fn wait(mut self, answer: oneshot::Sender<Result<bool, Error>>) {
        let mut own = OwnConnection::new(self.keeping.open.clone());
        let granted =
            self.take(&mut own).await.map_err(|error| error.of_acquire(&self.shared.names));
        if self.shared.is_held() {
            let spare = if self.shared.terms.session { None } else { own.hand_over() };
            self.keeping.keep(self.shared.clone(), spare);
        } else {
            self.shared.finish();
        }
        // Nobody hears it who has given up; then the lease is ending.
        let _ = answer.send(granted);
        if self.shared.terms.session {
            self.keep_session(&mut own).await;
        }
        own.close().await;
    }

    /// Until the lease is over. It is renewed as all others are, and released by its own session.
    async fn keep_session(&self, own: &mut OwnConnection) {
        let shared = &self.shared;
        tokio::select! {
            biased;
            () = shared.until_over() => return,
            () = own.until_ended() => {
                own.break_off();
                return shared.lose(Reason::Session, None);
            }
            () = shared.until_ending() => {}
        }
        let limits = Limits { call: self.limit(), lock: self.limit() };
        // A renewal that is under way is waited for.
        let _renewing = shared.rest().await;
        if shared.is_held() {
            release(own, shared, limits, false).await;
            // What it could not give back ends with its session.
            shared.released();
        }
    }

    async fn take(&mut self, own: &mut OwnConnection) -> Result<bool, Error> {
        let Some((token, mut before)) = self.ask(own).await? else { return Ok(false) };
        let shared = &self.shared;
        shared.granted(token, shared.hooks.counts_from(before));
        // After a wait in line the server counts from a later moment than we do: a renewal mends that.
        while (before + shared.third()).has_passed() && !shared.is_ending() {
            before = Moment::now();
            let limits = Limits { call: self.limit(), lock: self.limit() };
            let renewed = own.call_within(limits, &call_on_names(shared, "lease_renew")).await;
            match renewed.and_then(|rows| only_value(&rows).map_err(Error::unclassified)) {
                Ok(Some(_)) => shared.granted(token, shared.hooks.counts_from(before)),
                Ok(None) => {
                    shared.released();
                    return Ok(false);
                }
                Err(error) => {
                    shared.end();
                    return Err(error);
                }
            }
        }
        Ok(true)
    }

    /// In portions: while a statement waits, its snapshot holds up others, as a CREATE INDEX CONCURRENTLY of the holder.
    /// The token, and when the call was begun that brought it.
    async fn ask(&mut self, own: &mut OwnConnection) -> Result<Option<(i64, Moment)>, Error> {
        let until = Moment::now() + self.wait;
        let has_line = self.shared.names.len() == 1;
        own.connect(self.limit()).await?;
        loop {
            let portion = PORTION.min(until.remaining());
            if let Some(wait) = self.wait_argument {
                self.call.arguments[wait] = argument(interval(portion), Type::TEXT);
            }
            let limit =
                self.limit().saturating_add(if has_line { portion } else { Duration::ZERO });
            let before = Moment::now();
            let rows = own.call(limit, &self.call, self.shared.until_ending()).await?;
            let token = only_value(&rows).map_err(Error::unclassified)?;
            let token = token.map(|token| (token, before));
            if token.is_some() || until.has_passed() || self.shared.is_ending() {
                return Ok(token);
            }
            if !has_line {
                let pause = TRY_AGAIN.min(until.remaining());
                let _ = clock::within(pause, self.shared.until_ending()).await;
            }
        }
    }

    fn limit(&self) -> Duration {
        if self.shared.hooks.watches() { self.shared.third() } else { Duration::MAX }
    }
}
