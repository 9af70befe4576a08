//! Memory that is given back before the call ends.

use pgrx::PgMemoryContexts;

/// Memory for work that is done over and over within one call: a part of the current memory.
pub struct Scratch(PgMemoryContexts);

impl Scratch {
    pub fn new() -> Self {
        Scratch(PgMemoryContexts::new("pg_fence"))
    }

    /// Does one turn of the work; what Postgres allocates meanwhile must not be used after it.
    pub fn turn<R>(&mut self, work: impl FnOnce() -> R) -> R {
        // SAFETY: the context lives as long as this; nothing in it is used after the turn.
        unsafe {
            let result = self.0.switch_to(|_| work());
            self.0.reset();
            result
        }
    }
}
