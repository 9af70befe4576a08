//! Known bugs, planted by cargo features to show that the chaos run catches each of them. All are off in any
//! build that is meant to be used, and cost nothing there.

/// The token is drawn before the lease is locked.
pub const TOKEN_BEFORE_LOCK: bool = cfg!(feature = "plant_token_before_lock");
/// The time is that of the transaction's start.
pub const NOW: bool = cfg!(feature = "plant_now");
/// A server that starts draws on where the log ends.
pub const NO_START_MOVE: bool = cfg!(feature = "plant_no_start_move");
/// A copy of a database draws on where the copy was made.
pub const NO_JUMP: bool = cfg!(feature = "plant_no_jump");
/// A guard takes no lock.
pub const NO_GUARD_LOCK: bool = cfg!(feature = "plant_no_guard_lock");
