//! Memory that is given back before the call ends.

use pgrx::pg_sys;

/// Memory for work that is done over and over within one call.
pub struct Scratch(pg_sys::MemoryContext);

impl Scratch {
    /// A part of the current memory; an error gives it back with that.
    pub fn new() -> Self {
        // SAFETY: a context below the current one.
        Scratch(unsafe {
            pg_sys::AllocSetContextCreateExtended(
                pg_sys::CurrentMemoryContext,
                c"pg_fence".as_ptr(),
                pg_sys::ALLOCSET_DEFAULT_MINSIZE as usize,
                pg_sys::ALLOCSET_DEFAULT_INITSIZE as usize,
                pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
            )
        })
    }

    /// Does one turn of the work; what Postgres allocates meanwhile must not be used after it.
    pub fn turn<R>(&self, work: impl FnOnce() -> R) -> R {
        // SAFETY: the context lives as long as this; the caller's is put back.
        unsafe {
            let before = pg_sys::MemoryContextSwitchTo(self.0);
            let result = work();
            pg_sys::MemoryContextSwitchTo(before);
            pg_sys::MemoryContextReset(self.0);
            result
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: made by `new`, and not the current one.
            unsafe { pg_sys::MemoryContextDelete(self.0) };
        }
    }
}
