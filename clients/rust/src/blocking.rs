//! For programs that are not asynchronous: the same verbs, and what waits for them.

use crate::Error;
use std::ops::Deref;
use tokio::runtime::{Builder, Runtime};
use tokio::task::block_in_place;

/// A [`crate::Fence`], to which it dereferences, and a runtime on which its verbs are waited for.
#[derive(Debug)]
pub struct Fence {
    fence: crate::Fence,
    runtime: Runtime,
}

impl Fence {
    /// As [`crate::Fence::new`].
    pub fn new(url: &str) -> Result<Fence, Error> {
        Fence::of(crate::Fence::new(url)?)
    }

    /// Of one that was made in another way.
    pub fn of(fence: crate::Fence) -> Result<Fence, Error> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        Ok(Fence { fence, runtime: runtime.map_err(Error::other)? })
    }

    /// The result of a verb, or of a statement of a connection that was opened by this, too.
    pub fn wait<T>(&self, verb: impl Future<Output = T>) -> T {
        // The work of `lead` waits within a wait.
        block_in_place(|| self.runtime.block_on(verb))
    }
}

impl Deref for Fence {
    type Target = crate::Fence;

    fn deref(&self) -> &crate::Fence {
        &self.fence
    }
}
