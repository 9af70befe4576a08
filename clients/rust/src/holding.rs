//! What a transaction is under: a lease, or an adopted one.

use crate::adopted::Adopted;
use crate::error::Error;
use crate::lease::Lease;
use crate::own::{Call, argument};
use crate::state::Shared;
use std::sync::Arc;
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

    /// What a transaction guards it by: a call for each name, in their order.
    pub fn guard_calls(&self) -> Vec<Call> {
        if let Holding::Adopted(adopted) = self
            && self.shared().hooks.adopts_again()
        {
            return vec![adopted.guard_call()];
        }
        let shared = self.shared();
        let mut names = shared.names.to_vec();
        names.sort();
        let guard = |name: String| Call {
            sql: shared.select("lease_guard($1::text, $2::bigint)"),
            arguments: vec![argument(name, Type::TEXT), argument(shared.token(), Type::INT8)],
        };
        names.into_iter().map(guard).collect()
    }

    /// Before a transaction begins. An adopted lease has no heartbeat that would have mended it.
    pub async fn prepare(&self) -> Result<(), Error> {
        match self {
            Holding::Adopted(adopted)
                if self.shared().was_refused() && self.shared().hooks.adopts_again() =>
            {
                adopted.mend().await
            }
            _ => Ok(()),
        }
    }

    /// Whether [`mend`](Holding::mend) may help where a transaction could not begin because of that.
    pub fn can_mend(&self, error: &Error) -> bool {
        match self {
            Holding::Lease(_) => matches!(error, Error::NotSpeaking(_)),
            Holding::Adopted(adopted) => adopted.can_mend(error),
        }
    }

    /// Makes the token speak again, as after a failover; whether it does.
    pub async fn mend(&self) -> Result<bool, Error> {
        match self {
            Holding::Lease(lease) => Ok(lease.renew().await?.is_some()),
            Holding::Adopted(adopted) => adopted.mend().await.map(|()| true),
        }
    }
}
