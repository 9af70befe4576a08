//! Memory that is freed before the call ends, and the owner of what the call opens.

use pgrx::{PgMemoryContexts, pg_sys};

/// Memory for work that is repeated within a call: a child of the current memory context.
pub struct Scratch(PgMemoryContexts);

impl Scratch {
    pub fn new() -> Self {
        Scratch(PgMemoryContexts::new("pg_fence"))
    }

    /// Runs `work` once. Memory that Postgres allocates meanwhile must not be used afterwards.
    pub fn run<R>(&mut self, work: impl FnOnce() -> R) -> R {
        // SAFETY: the context lives as long as this value; nothing in it is used afterwards.
        unsafe {
            let result = self.0.switch_to(|_| work());
            self.0.reset();
            result
        }
    }
}

/// While this value lives, what is opened or locked belongs to this resource owner. The value is the owner before.
pub(in crate::pg) struct Owner(pg_sys::ResourceOwner);

impl Owner {
    pub(in crate::pg) fn is(owner: pg_sys::ResourceOwner) -> Self {
        // SAFETY: a global of this thread; restored on drop.
        unsafe { Owner((&raw mut pg_sys::CurrentResourceOwner).replace(owner)) }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { pg_sys::CurrentResourceOwner = self.0 };
    }
}
