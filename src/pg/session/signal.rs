//! Noting SIGINT, the signal of every cancel and timeout of a statement, before its handler runs.
//!
//! The arguments of a handler differ between versions of Postgres: from 19 on, its handlers also need to know the
//! sender. So this module names none of Postgres's handlers, and saves the previous action as a whole.

use libc::{SA_SIGINFO, SIGINT, c_int, c_void, sigaction};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

/// A handler of the signal's number, its sender and the interrupted context (`SA_SIGINFO`).
type Handler = unsafe extern "C" fn(c_int, *mut c_void, *mut c_void);

/// True if a SIGINT has come.
static NOTED: AtomicBool = AtomicBool::new(false);
/// The previous handler, of Postgres or of another extension.
static NEXT: AtomicUsize = AtomicUsize::new(0);
static NEXT_TAKES_ALL: AtomicBool = AtomicBool::new(false);

/// Notes SIGINT while this value lives. Only one may live at a time.
pub struct SigintNoted {
    /// The previous action; `None` if the signal was not handled, so that it ends no statement.
    before: Option<sigaction>,
}

impl SigintNoted {
    pub fn begin() -> Self {
        NOTED.store(false, SeqCst);
        // SAFETY: zeros are an action; only reads the present one.
        let before = unsafe {
            let mut before = std::mem::zeroed::<sigaction>();
            sigaction(SIGINT, null(), &mut before);
            before
        };
        if [libc::SIG_DFL, libc::SIG_IGN].contains(&before.sa_sigaction) {
            return SigintNoted { before: None };
        }
        NEXT.store(before.sa_sigaction, SeqCst);
        NEXT_TAKES_ALL.store(before.sa_flags & SA_SIGINFO != 0, SeqCst);
        let (note, flags): (Handler, _) = (note, before.sa_flags | SA_SIGINFO);
        let noting = sigaction { sa_sigaction: note as usize, sa_flags: flags, ..before };
        // SAFETY: the handler lives as long as the process, and needs no other mask than the previous one.
        unsafe { sigaction(SIGINT, &noting, null_mut()) };
        SigintNoted { before: Some(before) }
    }
}

/// Returns true if a SIGINT has come since `SigintNoted::begin`; also for the handler of another signal.
pub fn has_come() -> bool {
    NOTED.load(SeqCst)
}

impl Drop for SigintNoted {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // SAFETY: restores the previous action.
            unsafe { sigaction(SIGINT, before, null_mut()) };
        }
    }
}

unsafe extern "C" fn note(number: c_int, sender: *mut c_void, interrupted: *mut c_void) {
    NOTED.store(true, SeqCst);
    let next = NEXT.load(SeqCst);
    // SAFETY: calls the handler as the system would.
    unsafe {
        if NEXT_TAKES_ALL.load(SeqCst) {
            std::mem::transmute::<usize, Handler>(next)(number, sender, interrupted);
        } else {
            std::mem::transmute::<usize, unsafe extern "C" fn(c_int)>(next)(number);
        }
    }
}
