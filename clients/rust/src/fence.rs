//! Where leases come from.

use crate::adopted::AdoptRequest;
use crate::connected::{Connected, Tls, open};
use crate::error::Error;
use crate::hooks::{Hooks, NoHooks};
use crate::own::Opener;
use crate::request::LeaseRequest;
use std::future::Future;
use std::sync::Arc;
use tokio::runtime::Handle;
use tokio_postgres::{Config, NoTls};

/// Where leases come from. It holds no connection itself; each lease has one of its own while it is held.
#[derive(Clone)]
pub struct Fence {
    pub(crate) open: Opener,
    pub(crate) schema: String,
    runtime: Option<Handle>,
    pub(crate) hooks: Arc<dyn Hooks>,
}

impl Fence {
    /// By a connection string, without encryption.
    pub fn new(url: &str) -> Result<Fence, Error> {
        Ok(Fence::with_tls(url.parse().map_err(Error::unclassified)?, NoTls))
    }

    /// By whatever encrypts connections.
    pub fn with_tls(config: Config, tls: impl Tls) -> Fence {
        Fence::with_opener(move || {
            let (config, tls) = (config.clone(), tls.clone());
            async move { open(&config, tls).await }
        })
    }

    /// By whatever opens connections: a password that changes, a proxy. Not a pool's: they are kept for long.
    pub fn with_opener<F, O>(opener: F) -> Fence
    where
        F: Fn() -> O + Send + Sync + 'static,
        O: Future<Output = Result<Connected, Error>> + Send + 'static,
    {
        Fence {
            open: Arc::new(move || Box::pin(opener())),
            schema: String::new(),
            runtime: None,
            hooks: Arc::new(NoHooks),
        }
    }

    /// The same, for an extension in a schema that is not in the search path.
    pub fn in_schema(self, schema: &str) -> Fence {
        Fence { schema: format!("\"{}\".", schema.replace('"', "\"\"")), ..self }
    }

    /// The same, whose heartbeats and timers run on that runtime, and not on the one that acquires: so work that
    /// blocks its own runtime does not lose its leases.
    pub fn on(self, runtime: Handle) -> Fence {
        Fence { runtime: Some(runtime), ..self }
    }

    #[doc(hidden)]
    pub fn with_hooks(self, hooks: Arc<dyn Hooks>) -> Fence {
        Fence { hooks, ..self }
    }

    /// A lease of one name.
    pub fn lease(&self, name: impl Into<String>) -> LeaseRequest {
        LeaseRequest::new(self.clone(), vec![name.into()])
    }

    /// A lease of several names at once, all or none.
    pub fn lease_all<N: Into<String>>(&self, names: impl IntoIterator<Item = N>) -> LeaseRequest {
        LeaseRequest::new(self.clone(), names.into_iter().map(Into::into).collect())
    }

    /// A lease that somebody else has granted (etcd, ZooKeeper, Redis, another database), under the number that it has
    /// there.
    pub fn adopt(&self, name: impl Into<String>, token: i64) -> AdoptRequest {
        AdoptRequest::new(self.clone(), name.into(), token)
    }

    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        match &self.runtime {
            Some(runtime) => drop(runtime.spawn(task)),
            None => drop(tokio::spawn(task)),
        }
    }
}
