//! What a transaction is under: a lease or several, or an adopted one.

use crate::adopted::Adopted;
use crate::calls::call_on_names;
use crate::error::{Error, LeaseLost};
use crate::lease::Lease;
use crate::own::{Call, argument};
use crate::state::{Breaker, Entered, Shared};
use crate::telemetry;
use std::future::{Future, pending};
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio_postgres::types::Type;

#[derive(Clone)]
pub(crate) enum Holding {
    Lease(Lease),
    Adopted(Adopted),
}

impl Holding {
    pub fn shared(&self) -> &Arc<Shared> {
        match self {
            Holding::Lease(lease) => lease.shared(),
            Holding::Adopted(adopted) => adopted.shared(),
        }
    }

    /// Whether [`mend`](Under::mend) may help where a transaction could not begin because of that.
    fn can_mend(&self, error: &Error) -> bool {
        match self {
            Holding::Lease(_) => matches!(error, Error::NotSpeaking(_)),
            Holding::Adopted(adopted) => adopted.can_mend(error),
        }
    }

    async fn mend(&self) -> Result<bool, Error> {
        match self {
            Holding::Lease(lease) => Ok(lease.renew().await?.is_some()),
            Holding::Adopted(adopted) => adopted.mend().await.map(|()| true),
        }
    }
}

/// All that one transaction is under. The loss of any of them ends it.
pub(crate) struct Under {
    /// In the order of their names.
    pub holdings: Vec<Holding>,
    _entered: Vec<Entered>,
    breaker: Breaker,
}

impl Under {
    /// From here on a loss breaks that connection off.
    pub fn enter(mut holdings: Vec<Holding>, connection: Option<AbortHandle>) -> Under {
        holdings.sort_by(|a, b| a.shared().names.cmp(&b.shared().names));
        let breaker = Breaker { connection, loss: watch::Sender::new(None) };
        let entered = holdings.iter().map(|one| one.shared().enter(breaker.clone())).collect();
        Under { holdings, _entered: entered, breaker }
    }

    pub fn all_shared(&self) -> impl Iterator<Item = &Arc<Shared>> {
        self.holdings.iter().map(Holding::shared)
    }

    pub fn check(&self) -> Result<(), LeaseLost> {
        self.all_shared().try_for_each(|shared| shared.check())
    }

    /// Does not begin a call when a lease is lost.
    pub async fn or_loss<T, E>(&self, call: impl Future<Output = Result<T, E>>) -> Result<T, Error>
    where
        Error: From<Told<E>>,
    {
        self.check()?;
        self.unless_lost(call).await
    }

    /// What a call comes to, unless a lease is lost before: then the call is dropped where it waits. The server may
    /// have it all the same.
    pub async fn unless_lost<T, E>(
        &self,
        call: impl Future<Output = Result<T, E>>,
    ) -> Result<T, Error>
    where
        Error: From<Told<E>>,
    {
        let mut told = self.breaker.loss.subscribe();
        let lost = async {
            match told.wait_for(Option::is_some).await.ok().and_then(|loss| loss.clone()) {
                Some(loss) => loss,
                None => pending().await,
            }
        };
        tokio::select! {
            biased;
            done = call => done.map_err(|error| self.told(error)),
            loss = lost => Err(loss.into()),
        }
    }

    /// The typed error in one of a driver. One of a connection that was broken off because of a loss is the loss.
    pub fn told<E>(&self, error: E) -> Error
    where
        Error: From<Told<E>>,
    {
        let error = Error::from(Told(error));
        telemetry::refused(&self.holdings[0].shared().names, &error);
        let loss = self.all_shared().find_map(|shared| shared.loss());
        match (&error, loss) {
            (Error::TransactionLost(_), Some(loss)) => loss.shown_by(error).into(),
            (Error::StaleToken(_) | Error::NotSpeaking(_), _) => {
                self.all_shared().for_each(|shared| shared.refuse());
                error
            }
            _ => error,
        }
    }

    /// Before a transaction begins. An adopted lease has no heartbeat that would have mended it.
    pub async fn prepare(&self) -> Result<(), Error> {
        self.check()?;
        for holding in &self.holdings {
            if let Holding::Adopted(adopted) = holding
                && adopted.shared().was_refused()
                && adopted.shared().hooks.adopts_again()
            {
                adopted.mend().await?;
            }
        }
        Ok(())
    }

    /// What a transaction guards them by, in the order of names.
    pub fn guard_call(&self) -> Call {
        match self.holdings.as_slice() {
            [Holding::Adopted(adopted)] if adopted.shared().hooks.adopts_again() => {
                adopted.guard_call()
            }
            [one] => call_on_names(one.shared(), "lease_guard"),
            several => {
                let mut named: Vec<(String, i64)> = Vec::new();
                for shared in several.iter().map(Holding::shared) {
                    named.extend(shared.names.iter().map(|name| (name.clone(), shared.token())));
                }
                named.sort();
                let (names, tokens): (Vec<String>, Vec<i64>) = named.into_iter().unzip();
                let function = several.first().map(|one| one.shared().function("lease_guard"));
                Call {
                    sql: format!(
                        "SELECT {}(x.name, x.token) FROM unnest($1::text[], $2::bigint[]) AS x(name, token)",
                        function.unwrap_or_default()
                    ),
                    arguments: vec![
                        argument(names, Type::TEXT_ARRAY),
                        argument(tokens, Type::INT8_ARRAY),
                    ],
                }
            }
        }
    }

    /// The token that its writes present, where they are not to a table that is bound to a lease.
    pub fn token(&self) -> i64 {
        self.holdings.last().map_or(0, |one| one.shared().token())
    }

    /// Whether [`mend`](Under::mend) may help where a transaction could not begin because of that.
    pub fn can_mend(&self, error: &Error) -> bool {
        self.holdings.iter().any(|one| one.can_mend(error))
    }

    /// Makes the tokens speak again, as after a failover; whether they do.
    pub async fn mend(&self) -> Result<bool, Error> {
        for holding in &self.holdings {
            if !holding.mend().await? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub fn was_mended(&self) {
        self.all_shared().for_each(|shared| shared.was_mended());
    }
}

/// An error of a driver, on its way to become one of ours.
pub(crate) struct Told<E>(pub E);

impl From<Told<tokio_postgres::Error>> for Error {
    fn from(Told(error): Told<tokio_postgres::Error>) -> Error {
        error.into()
    }
}

#[cfg(feature = "sqlx")]
impl From<Told<sqlx::Error>> for Error {
    fn from(Told(error): Told<sqlx::Error>) -> Error {
        error.into()
    }
}
