//! For programs that are not asynchronous: a fence with a runtime, which waits for the same verbs.

use crate::Error;
use std::ops::Deref;
use tokio::runtime::{Builder, Runtime};
use tokio::task::block_in_place;

/// A [`crate::Fence`], to which it dereferences, and a runtime that runs the verbs.
#[derive(Debug)]
pub struct Fence {
    fence: crate::Fence,
    runtime: Runtime,
}

impl Fence {
    /// A fence by a connection string or URL, as [`crate::Fence::new`].
    pub fn new(url: &str) -> Result<Fence, Error> {
        Fence::of(crate::Fence::new(url)?)
    }

    /// Adds a runtime to a fence that was made in another way.
    pub fn of(fence: crate::Fence) -> Result<Fence, Error> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        Ok(Fence { fence, runtime: runtime.map_err(Error::other)? })
    }

    /// Waits for a verb, or for a statement on a connection that this function has opened, and
    /// returns its result.
    pub fn wait<T>(&self, verb: impl Future<Output = T>) -> T {
        // `block_in_place` allows a wait within a wait, as in the work of `lead`.
        block_in_place(|| self.runtime.block_on(verb))
    }
}

impl Deref for Fence {
    type Target = crate::Fence;

    fn deref(&self) -> &crate::Fence {
        &self.fence
    }
}
