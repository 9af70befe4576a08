//! The same verbs for programs that are not asynchronous: a shell that owns a runtime.

use crate::asked::{Asked, Names};
use crate::{Adopted, BoxError, Connected, Error, Guard, Guardable, Guarded, LeaseRequest, Tls};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::task::block_in_place;
use tokio_postgres::types::ToSql;
use tokio_postgres::{Row, ToStatement};
use tokio_util::sync::CancellationToken;

/// As [`crate::Fence`]; its calls block.
pub type Fence = Blocking<crate::Fence>;
/// As [`crate::Lease`]; its calls block.
pub type Lease = Blocking<crate::Lease>;

/// Something of the asynchronous client, and the runtime that it is waited for on. What does not wait is reached by
/// dereferencing.
#[derive(Debug, Clone)]
pub struct Blocking<T> {
    of: T,
    runtime: Arc<Runtime>,
}

impl<T> Blocking<T> {
    fn with<O>(&self, of: O) -> Blocking<O> {
        Blocking { of, runtime: self.runtime.clone() }
    }
}

impl<T> Deref for Blocking<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.of
    }
}

impl Fence {
    /// As [`crate::Fence::new`].
    pub fn new(url: &str) -> Result<Fence, Error> {
        Fence::of(crate::Fence::new(url)?)
    }

    /// Of one that was made in another way.
    pub fn of(fence: crate::Fence) -> Result<Fence, Error> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        Ok(Blocking { of: fence, runtime: Arc::new(runtime.map_err(Error::other)?) })
    }

    /// As [`crate::connect`].
    pub fn connect(&self, url: &str, tls: impl Tls) -> Result<Blocking<Connected>, Error> {
        Ok(self.with(self.runtime.block_on(crate::connect(url, tls))?))
    }

    /// As [`crate::Fence::lease`].
    pub fn lease(&self, names: impl Into<Names>) -> LeaseRequest<Fence> {
        LeaseRequest { fence: self.clone(), asked: Asked::new(names.into()) }
    }

    /// As [`crate::Fence::claim`].
    pub fn claim(
        &self,
        names: impl Into<Names>,
        n: u32,
        ttl: Duration,
    ) -> Result<Vec<Lease>, Error> {
        let leases = self.runtime.block_on(self.of.claim(names, n, ttl))?;
        Ok(leases.into_iter().map(|lease| self.with(lease)).collect())
    }

    /// As [`crate::Fence::lead`]; after a loss the next step of the work fails.
    pub fn lead<T>(
        &self,
        name: &str,
        ttl: Duration,
        stop: &CancellationToken,
        mut work: impl FnMut(Lease) -> Result<T, BoxError>,
    ) -> Result<Option<T>, BoxError> {
        self.runtime.block_on(self.of.lead(name, ttl, stop, |lease| {
            // It waits on the same runtime.
            std::future::ready(block_in_place(|| work(self.with(lease))))
        }))
    }

    /// As [`crate::Fence::adopted`].
    pub fn adopted(&self, name: impl Into<String>, token: i64) -> Blocking<Adopted> {
        self.with(self.of.adopted(name, token))
    }

    /// As [`crate::Fence::guard`].
    pub fn guard<'c, 'l, C: Guardable>(
        &self,
        connection: &'c mut Blocking<C>,
        leases: impl IntoIterator<Item = &'l Lease>,
    ) -> Result<Blocking<Guarded<<C as Guardable>::Begun<'c>>>, Error> {
        let leases = leases.into_iter().map(|lease| &lease.of);
        Ok(self.with(self.runtime.block_on(self.of.guard(&mut connection.of, leases))?))
    }

    /// As [`crate::Fence::close`].
    pub fn close(&self) {
        self.runtime.block_on(self.of.close());
    }
}

impl LeaseRequest<Fence> {
    /// As [`LeaseRequest::acquire`].
    pub fn acquire(self) -> Result<Lease, Error> {
        let LeaseRequest { fence, asked } = self;
        let request = LeaseRequest { fence: fence.of.clone(), asked };
        Ok(fence.with(fence.runtime.block_on(request.acquire())?))
    }
}

macro_rules! guards {
    ($($of:ty)*) => {$(
        impl Blocking<$of> {
            /// As [`crate::Lease::guard`].
            pub fn guard<'c, C: Guardable>(
                &self,
                connection: &'c mut Blocking<C>,
            ) -> Result<Blocking<Guarded<<C as Guardable>::Begun<'c>>>, Error> {
                Ok(self.with(self.runtime.block_on(self.of.guard(&mut connection.of))?))
            }
        }
    )*};
}

guards! { crate::Lease Adopted }

impl Lease {
    /// As [`crate::Lease::release`].
    pub fn release(&self) -> Result<(), Error> {
        self.runtime.block_on(self.of.release())
    }
}

macro_rules! calls {
    ($of:ty: $($name:ident($($argument:ident: $kind:ty),*) -> $answer:ty;)*) => {
        #[allow(clippy::needless_question_mark)]
        impl $of {$(
            /// As that of [`tokio_postgres::Client`].
            pub fn $name(&self, $($argument: $kind),*) -> Result<$answer, Error> {
                Ok(self.runtime.block_on(self.of.$name($($argument),*))?)
            }
        )*}
    };
    ($($of:ty)*) => {$(calls! { $of:
        batch_execute(sql: &str) -> ();
        execute(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> u64;
        query(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> Vec<Row>;
        query_one(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> Row;
        query_opt(statement: &(impl ?Sized + ToStatement), params: &[&(dyn ToSql + Sync)]) -> Option<Row>;
    })*};
}

calls! { Blocking<Connected> Blocking<Guard<'_>> }

impl Blocking<Guard<'_>> {
    /// As [`Guarded::commit`].
    pub fn commit(self) -> Result<(), Error> {
        self.runtime.block_on(self.of.commit())
    }

    /// As [`Guarded::commit_and_release`].
    pub fn commit_and_release(self) -> Result<(), Error> {
        self.runtime.block_on(self.of.commit_and_release())
    }

    /// As [`Guarded::rollback`].
    pub fn rollback(self) -> Result<(), Error> {
        self.runtime.block_on(self.of.rollback())
    }
}
