//! Where leases come from.

use crate::adopted::AdoptRequest;
use crate::calls::interval;
use crate::claim::ClaimRequest;
use crate::connected::{Connected, Tls};
use crate::error::{Error, LeaseLost, Reason};
use crate::hooks::{Hooks, NoHooks};
use crate::keeping::Keeping;
use crate::lease::Lease;
use crate::names::Names;
use crate::observe::Observer;
use crate::open::open;
use crate::own::{Call, Opener, argument};
use crate::request::{LeaseRequest, checked_ttl};
use crate::state::{Shared, Terms};
use crate::waiting::Waiting;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio_postgres::types::Type;
use tokio_postgres::{Config, NoTls};

/// Where leases come from. It and its clones share one connection, and two tasks, for all leases that are held: they
/// are there from the first lease to the last.
#[derive(Clone)]
pub struct Fence {
    pub(crate) keeping: Arc<Keeping>,
    pub(crate) schema: String,
}

impl Fence {
    /// By a connection string, without encryption.
    pub fn new(url: &str) -> Result<Fence, Error> {
        Ok(Fence::with_tls(url.parse().map_err(Error::unclassified)?, NoTls))
    }

    /// By whatever encrypts connections.
    pub fn with_tls(config: Config, tls: impl Tls) -> Fence {
        Fence::at(vec![config], tls)
    }

    /// At the first of these that takes us.
    #[doc(hidden)]
    pub fn at(configs: Vec<Config>, tls: impl Tls) -> Fence {
        Fence::opening(Arc::new(move |limit| {
            let (configs, tls) = (configs.clone(), tls.clone());
            Box::pin(async move { open(&configs, tls, limit).await })
        }))
    }

    /// By whatever opens connections: a password that changes, a proxy. Not a pool's: they are kept for long.
    pub fn with_opener<F, O>(opener: F) -> Fence
    where
        F: Fn() -> O + Send + Sync + 'static,
        O: Future<Output = Result<Connected, Error>> + Send + 'static,
    {
        Fence::opening(Arc::new(move |_| Box::pin(opener())))
    }

    fn opening(opener: Opener) -> Fence {
        let keeping = Keeping::new(opener, None, Arc::new(NoHooks));
        Fence { keeping: Arc::new(keeping), schema: String::new() }
    }

    /// Another one, for an extension in a schema that is not in the search path.
    pub fn in_schema(self, schema: &str) -> Fence {
        let (runtime, hooks) = (self.keeping.runtime.clone(), self.keeping.hooks.clone());
        let schema = format!("\"{}\".", schema.replace('"', "\"\""));
        Fence { schema, ..self.of(runtime, hooks) }
    }

    /// Another one, whose heartbeat and timers run on that runtime, and not on the one that acquires first: so work
    /// that blocks its own runtime does not lose its leases.
    pub fn on(self, runtime: Handle) -> Fence {
        let hooks = self.keeping.hooks.clone();
        self.of(Some(runtime), hooks)
    }

    #[doc(hidden)]
    pub fn with_hooks(self, hooks: Arc<dyn Hooks>) -> Fence {
        let runtime = self.keeping.runtime.clone();
        self.of(runtime, hooks)
    }

    /// It has a heartbeat of its own.
    fn of(self, runtime: Option<Handle>, hooks: Arc<dyn Hooks>) -> Fence {
        let keeping = Keeping::new(self.keeping.open.clone(), runtime, hooks);
        Fence { keeping: Arc::new(keeping), schema: self.schema }
    }

    /// A lease of a name; or of several names (`["order:7", "order:8"]`, a slice, a `Vec`) at once, all or none.
    pub fn lease(&self, names: impl Into<Names>) -> LeaseRequest {
        LeaseRequest::new(self.clone(), names.into())
    }

    /// Goes on with a lease that another process has acquired and [detached](Lease::detach), or handed over otherwise:
    /// `token` is one of its tokens. It is renewed at once; [`LeaseLost`] where it is held no more.
    pub async fn resume(
        &self,
        names: impl Into<Names>,
        token: i64,
        ttl: Duration,
    ) -> Result<Lease, Error> {
        let names = names.into().0;
        checked_ttl(ttl)?;
        let shared = self.shared(names.clone(), Terms::of(ttl));
        let (answer, resumed) = oneshot::channel();
        let call = resumes(&shared, token)?;
        let keeping = self.keeping.clone();
        let (wait, wait_argument) = (Duration::ZERO, None);
        let waiting = Waiting { keeping, shared: shared.clone(), call, wait, wait_argument };
        self.keeping.spawn(waiting.wait(answer));
        let lease = Lease::new(shared);
        match resumed.await.unwrap_or_else(|gone| Err(Error::other(gone)))? {
            true => Ok(lease),
            false => Err(LeaseLost::new(Reason::Gone, &names, None).into()),
        }
    }

    /// The first of a query's rows whose leases are free, by one statement. The query's first column is the lease's
    /// name.
    pub fn claim(&self, query: &str, limit: u32) -> ClaimRequest {
        ClaimRequest::new(self.clone(), query, limit)
    }

    /// Who has the lease of that name, now and after each change, by looking each second.
    pub fn observe(&self, name: impl Into<String>) -> Observer {
        Observer::new(self, name.into())
    }

    /// A lease that somebody else has granted (etcd, ZooKeeper, Redis, another database), under the number that it has
    /// there.
    pub fn adopt(&self, name: impl Into<String>, token: i64) -> AdoptRequest {
        AdoptRequest::new(self.clone(), name.into(), token)
    }
    pub(crate) fn shared(&self, names: Arc<[String]>, terms: Terms) -> Arc<Shared> {
        let keeping = Arc::downgrade(&self.keeping);
        let hooks = self.keeping.hooks.clone();
        Arc::new(Shared::new(names, terms, self.schema.clone(), hooks, keeping))
    }
}

/// A renewal, which answers the token of the acquire: that serves for as long as the lease is held.
fn resumes(shared: &Shared, token: i64) -> Result<Call, Error> {
    let (renew, name) = match shared.names.len() {
        0 => return Err(Error::other("a lease needs a name")),
        1 => ("lease_renew($1[1], $2::bigint, $3::text::interval)", "$1[1]"),
        _ => ("lease_renew_all($1::text[], $2::bigint, $3::text::interval)", "$1[1]"),
    };
    let (renew, info) = (shared.function(renew), shared.function("lease_info"));
    let sql = format!(
        "SELECT CASE WHEN t IS NOT NULL THEN \
             coalesce((SELECT i.first_token FROM {info}({name}, t) AS i WHERE i.token = t), t) END \
         FROM {renew} AS t"
    );
    let arguments = vec![
        argument(shared.names.to_vec(), Type::TEXT_ARRAY),
        argument(token, Type::INT8),
        argument(interval(shared.terms.ttl), Type::TEXT),
    ];
    Ok(Call { sql, arguments })
}
