//! Memory that is freed before the call ends.

use pgrx::PgMemoryContexts;

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
