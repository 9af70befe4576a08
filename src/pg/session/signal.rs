//! SIGINT, by which every cancel and timeout of a statement comes, noted on its way to whoever handles it.
//!
//! A handler takes what the system hands over, which not all versions of Postgres take alike: from 19 on its own want to
//! know the sender, too. So nothing here names one of Postgres's. The action before ours is kept whole.

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::SeqCst};

const SIGINT: c_int = 2;
/// The handler takes all three of a [`Handler`], not the number alone.
const SA_SIGINFO: c_int = 4;

/// The signal's number, who has sent it, what was interrupted.
type Handler = unsafe extern "C" fn(c_int, *mut c_void, *mut c_void);

/// The action at a signal: `struct sigaction` of Linux. The lab's test `project::prototypes` has a C compiler hold it
/// against the header.
#[repr(C)]
#[derive(Clone, Copy)]
struct Action {
    handler: *mut c_void,
    mask: [usize; 128 / size_of::<usize>()],
    flags: c_int,
    restorer: *mut c_void,
}

extern "C" {
    fn sigaction(number: c_int, new: *const Action, old: *mut Action) -> c_int;
}

/// One has come.
static NOTED: AtomicBool = AtomicBool::new(false);
/// The handler before this one, of Postgres or of another extension.
static NEXT: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static NEXT_TAKES_ALL: AtomicBool = AtomicBool::new(false);

/// SIGINT is noted as long as this lives. One of it at a time.
pub struct SigintNoted {
    /// None where nobody handles it: then it ends no statement.
    before: Option<Action>,
}

impl SigintNoted {
    pub fn begin() -> Self {
        NOTED.store(false, SeqCst);
        let mut before =
            Action { handler: null_mut(), mask: [0; _], flags: 0, restorer: null_mut() };
        // SAFETY: only asks.
        unsafe { sigaction(SIGINT, null(), &mut before) };
        // SIG_DFL and SIG_IGN.
        if before.handler.addr() <= 1 {
            return SigintNoted { before: None };
        }
        NEXT.store(before.handler, SeqCst);
        NEXT_TAKES_ALL.store(before.flags & SA_SIGINFO != 0, SeqCst);
        let note: Handler = note;
        let (handler, flags) = (note as *mut c_void, before.flags | SA_SIGINFO);
        // SAFETY: a handler that lives as long as the process, and needs no other mask than the one before.
        unsafe { sigaction(SIGINT, &Action { handler, flags, ..before }, null_mut()) };
        SigintNoted { before: Some(before) }
    }

    /// Has one come since?
    pub fn any(&self) -> bool {
        has_come()
    }
}

/// As `any`, for a handler of another signal.
pub fn has_come() -> bool {
    NOTED.load(SeqCst)
}

impl Drop for SigintNoted {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // SAFETY: what was done before.
            unsafe { sigaction(SIGINT, before, null_mut()) };
        }
    }
}

unsafe extern "C" fn note(number: c_int, sender: *mut c_void, interrupted: *mut c_void) {
    NOTED.store(true, SeqCst);
    let next = NEXT.load(SeqCst);
    // SAFETY: it is called as the system would.
    unsafe {
        if NEXT_TAKES_ALL.load(SeqCst) {
            std::mem::transmute::<*mut c_void, Handler>(next)(number, sender, interrupted);
        } else {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(c_int)>(next)(number);
        }
    }
}
