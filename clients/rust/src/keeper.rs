//! The task that keeps a lease: acquires, renews and releases it, on a connection of its own.

use crate::clock::{self, Moment};
use crate::error::{Error, Reason};
use crate::lease::Renewal;
use crate::own::{Call, Opener, OwnConnection, argument, is_timeout};
use crate::request::LeaseRequest;
use crate::state::Shared;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio_postgres::types::Type;

/// There is no line to wait in for several names at once: they are tried again after this.
const TRY_AGAIN: Duration = Duration::from_millis(250);

pub(crate) struct Keeper {
    shared: Arc<Shared>,
    own: OwnConnection,
    /// Who waits for a renewal.
    asked: mpsc::UnboundedReceiver<Renewal>,
    acquire: Call,
    wait: Duration,
    session: bool,
    next_beat: Moment,
}

/// What a renewal came to: a new token, or none where it failed or the lease is lost.
type Renewed = Option<i64>;

impl Keeper {
    pub fn new(
        request: &LeaseRequest,
        shared: Arc<Shared>,
        open: Opener,
        asked: mpsc::UnboundedReceiver<Renewal>,
    ) -> Keeper {
        // The plant of a heartbeat that hangs has calls without a limit.
        let open_limit = if shared.hooks.watches() { shared.third() } else { Duration::MAX };
        Keeper {
            own: OwnConnection::new(open, open_limit),
            asked,
            acquire: request.call(&shared),
            wait: request.wait,
            session: request.session,
            next_beat: Moment::now(),
            shared,
        }
    }

    pub async fn keep(mut self, answer: oneshot::Sender<Result<bool, Error>>) {
        let granted = self.take().await;
        let is_granted = matches!(granted, Ok(true));
        if is_granted && self.shared.hooks.watches() {
            // A task of its own: it does not matter where this one hangs, or whether it has died.
            let shared = self.shared.clone();
            tokio::spawn(async move { shared.watch().await });
        }
        // Nobody hears it who has given up; then the lease is ending.
        let _ = answer.send(granted);
        if is_granted {
            self.renew_until_the_end().await;
            self.give_back().await;
        }
        self.own.close().await;
    }

    // Acquire

    async fn take(&mut self) -> Result<bool, Error> {
        let mut before = Moment::now();
        let Some(token) = self.ask().await? else { return Ok(false) };
        self.shared.granted(token, self.shared.hooks.counts_from(before));
        self.next_beat = before + self.shared.third();
        // After a wait in line the server counts from a later moment than we do: a renewal mends that.
        while self.next_beat.has_passed() && !self.shared.is_ending() {
            before = Moment::now();
            match self.call_renew().await {
                Ok(Some(_)) => self.shared.granted(token, self.shared.hooks.counts_from(before)),
                Ok(None) => {
                    self.shared.released();
                    return Ok(false);
                }
                Err(error) => {
                    self.give_back().await;
                    return Err(error);
                }
            }
            self.next_beat = before + self.shared.third();
        }
        Ok(true)
    }

    async fn ask(&mut self) -> Result<Option<i64>, Error> {
        let until = Moment::now() + self.wait;
        let has_line = self.shared.names.len() == 1;
        let limit = self.limit().saturating_add(if has_line { self.wait } else { Duration::ZERO });
        loop {
            let given_up = self.shared.until_ending();
            let token = self.own.call(limit, &self.acquire, given_up).await?;
            if token.is_some() || has_line || until.has_passed() || self.shared.is_ending() {
                return Ok(token);
            }
            let _ =
                clock::within(TRY_AGAIN.min(until.remaining()), self.shared.until_ending()).await;
        }
    }

    // Renew

    async fn renew_until_the_end(&mut self) {
        let mut waiting: Vec<Renewal> = Vec::new();
        loop {
            let session_ended = async {
                match self.session {
                    true => self.own.until_ended().await,
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = self.shared.until_over() => return,
                () = session_ended => {
                    self.own.break_off();
                    return self.shared.lose(Reason::Session, None);
                }
                asked = self.asked.recv() => waiting.extend(asked),
                () = self.shared.hurry.notified() => {}
                () = clock::sleep_until(self.next_beat) => {}
            }
            let shared = self.shared.clone();
            // A transaction that releases is waited for.
            let _renewing = tokio::select! {
                biased;
                () = shared.until_over() => return,
                renewing = shared.renewing.lock() => renewing,
            };
            while shared.hooks.starves() {
                if clock::within(Duration::from_millis(20), shared.until_over()).await.is_some() {
                    return;
                }
            }
            let renewed = tokio::select! {
                biased;
                renewed = self.beat() => renewed,
                // Its caller need not wait for an answer that nobody wants any more.
                () = shared.until_not_held(), if shared.hooks.watches() => None,
            };
            for asked in waiting.drain(..) {
                // Who has given up waiting hears nothing.
                let _ = asked.send(renewed);
            }
        }
    }

    async fn beat(&mut self) -> Renewed {
        let reuses_connection = self.own.is_open();
        let mut outcome = self.renew().await;
        // The connection had ended unseen since the last time: a new one may do at once.
        let is_stale = |error: &Error| error.is_end_of_session() && !is_timeout(error);
        if reuses_connection && !self.session && outcome.as_ref().is_err_and(is_stale) {
            outcome = self.renew().await;
        }
        match outcome {
            Ok(Some(token)) => return Some(token),
            Ok(None) => self.shared.lose(Reason::Gone, None),
            Err(error) => self.has_failed(error),
        }
        None
    }

    async fn renew(&mut self) -> Result<Renewed, Error> {
        let before = Moment::now();
        let outcome = self.call_renew().await;
        match &outcome {
            Ok(Some(token)) => {
                self.next_beat = before + self.shared.third();
                self.shared.renewed(*token, self.shared.hooks.counts_from(before));
            }
            Err(error) if self.shared.hooks.takes_failure_for_loss() => {
                self.shared.lose(Reason::Denied, Some(error.clone()));
            }
            _ => {}
        }
        outcome
    }

    /// No loss yet where trying again can help: the deadline tells.
    fn has_failed(&mut self, error: Error) {
        log::warn!("the lease {} was not renewed: {error}", self.shared.names[0]);
        if error.is_permanent() {
            self.shared.lose(Reason::Denied, Some(error));
        } else if self.session && !self.own.is_open() {
            self.shared.lose(Reason::Session, Some(error));
        }
        self.next_beat = Moment::now() + self.shared.third() / 4;
    }

    async fn call_renew(&mut self) -> Result<Renewed, Error> {
        if let Some(otherwise) =
            self.shared.hooks.renews(&self.shared.names[0], self.shared.token())
        {
            return otherwise.await;
        }
        self.call_on_names("lease_renew").await
    }

    async fn call_on_names(&mut self, function: &str) -> Result<Option<i64>, Error> {
        let limit = self.limit();
        self.own.call_within(limit, &call_on_names(&self.shared, function)).await
    }

    fn limit(&self) -> Duration {
        if self.shared.hooks.watches() { self.shared.third() } else { Duration::MAX }
    }

    // Release

    async fn give_back(&mut self) {
        // There is no second try.
        self.own.leave_ended();
        let limit = self.limit();
        give_back(&self.shared, &mut self.own, limit).await;
    }
}

/// Releases what is held still.
pub(crate) async fn give_back(shared: &Shared, own: &mut OwnConnection, limit: Duration) {
    if !shared.is_held() {
        return;
    }
    match own.call_within(limit, &call_on_names(shared, "lease_release")).await {
        Ok(Some(_)) => shared.released(),
        Ok(None) => shared.lose(Reason::Gone, None),
        Err(error) => {
            log::warn!("the lease {} was not released: {error}", shared.names[0]);
            shared.released();
        }
    }
}

impl Drop for Keeper {
    /// At its end, or because its runtime is gone: then nobody renews any more, and nobody watches the deadline.
    fn drop(&mut self) {
        self.shared.lose(Reason::Deadline, None);
        self.shared.finish();
    }
}

/// A function of the lease's names and its token.
pub(crate) fn call_on_names(shared: &Shared, function: &str) -> Call {
    let token = argument(shared.token(), Type::INT8);
    match &*shared.names {
        [name] => Call {
            sql: shared.select(&format!("{function}($1::text, $2::bigint)")),
            arguments: vec![argument(name.clone(), Type::TEXT), token],
        },
        names => Call {
            sql: shared.select(&format!("{function}_all($1::text[], $2::bigint)")),
            arguments: vec![argument(names.to_vec(), Type::TEXT_ARRAY), token],
        },
    }
}
