//! Noting SIGINT, the signal of every cancel and timeout of a statement, before its handler runs.
//!
//! The arguments of a handler differ between versions of Postgres: from 19 on, its handlers also need to know the
//! sender. So this module names none of Postgres's handlers, and saves the previous action as a whole.

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::SeqCst};

const SIGINT: c_int = 2;
/// The handler takes all three arguments of a [`Handler`] instead of the number alone.
const SA_SIGINFO: c_int = 4;

/// A handler of the signal's number, its sender and the interrupted context.
type Handler = unsafe extern "C" fn(c_int, *mut c_void, *mut c_void);

/// The action for a signal: `struct sigaction` of Linux. The test `project::prototypes` compares it with the header, by
/// a C compiler.
#[repr(C)]
#[derive(Clone, Copy)]
struct Action {
    handler: *mut c_void,
    mask: [usize; 128 / size_of::<usize>()],
    flags: c_int,
    restorer: *mut c_void,
}

unsafe extern "C" {
    fn sigaction(number: c_int, new: *const Action, old: *mut Action) -> c_int;
}

/// True if a SIGINT has come.
static NOTED: AtomicBool = AtomicBool::new(false);
/// The previous handler, of Postgres or of another extension.
static NEXT: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static NEXT_TAKES_ALL: AtomicBool = AtomicBool::new(false);

/// Notes SIGINT while this value lives. Only one may live at a time.
pub struct SigintNoted {
    /// The previous action; `None` if the signal was not handled, so that it ends no statement.
    before: Option<Action>,
}

impl SigintNoted {
    pub fn begin() -> Self {
        NOTED.store(false, SeqCst);
        let mut before =
            Action { handler: null_mut(), mask: [0; _], flags: 0, restorer: null_mut() };
        // SAFETY: only reads the action.
        unsafe { sigaction(SIGINT, null(), &mut before) };
        // Neither SIG_DFL nor SIG_IGN is a handler.
        if before.handler.addr() <= 1 {
            return SigintNoted { before: None };
        }
        NEXT.store(before.handler, SeqCst);
        NEXT_TAKES_ALL.store(before.flags & SA_SIGINFO != 0, SeqCst);
        let note: Handler = note;
        let (handler, flags) = (note as *mut c_void, before.flags | SA_SIGINFO);
        // SAFETY: the handler lives as long as the process, and needs no other mask than the previous one.
        unsafe { sigaction(SIGINT, &Action { handler, flags, ..before }, null_mut()) };
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
            std::mem::transmute::<*mut c_void, Handler>(next)(number, sender, interrupted);
        } else {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int)>(next)(number);
        }
    }
}
