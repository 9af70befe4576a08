//! Known bugs, planted to show that the chaos run catches each of them: a build with `--cfg planted="<name>"`
//! has one, any other has none and pays nothing for it. (`Cargo.toml` lists the names, too.)

use pg_fence_rules::Token;

/// The time is that of the transaction's start.
pub const NOW: bool = cfg!(planted = "now");
/// A server that starts draws on where the log ends.
pub const NO_START_MOVE: bool = cfg!(planted = "no-start-move");
/// A copy of a database draws on where the copy was made.
pub const NO_JUMP: bool = cfg!(planted = "no-jump");
/// A session keeps the floor that it has read, whatever comes after.
pub const OLD_FLOOR: bool = cfg!(planted = "old-floor");
/// The version of a row that a session has once seen is taken for the present one.
pub const UNCHECKED_PLACE: bool = cfg!(planted = "unchecked-place");
/// A guard takes no lock.
pub const NO_GUARD_LOCK: bool = cfg!(planted = "no-guard-lock");
/// Relations of the state are read without their locks.
pub const NO_TABLE_LOCK: bool = cfg!(planted = "no-table-lock");
/// A session is believed to live for ever.
pub const SESSION_OUTLIVED: bool = cfg!(planted = "session-outlived");
/// An adoption does not take the lease alone.
pub const NO_ADOPT_LOCK: bool = cfg!(planted = "no-adopt-lock");
/// The token is drawn before the lease is locked.
pub const TOKEN_BEFORE_LOCK: bool = cfg!(planted = "token-before-lock");
/// Each version of a row that is a lease is taken for the transaction's own.
pub const OWN_IS_EVERYBODYS: bool = cfg!(planted = "own-is-everybodys");

thread_local! {
    /// The token that was drawn before the lock.
    static EARLY: std::cell::Cell<Option<Token>> = const { std::cell::Cell::new(None) };
}

/// With `TOKEN_BEFORE_LOCK`, draws the token of an acquire that has not locked anything yet.
pub fn draw_early<E>(draw: impl FnOnce() -> Result<Token, E>) -> Result<(), E> {
    if TOKEN_BEFORE_LOCK {
        EARLY.set(Some(draw()?));
    }
    Ok(())
}

/// The token that `draw_early` drew, or else the one that is drawn now, under the lock.
pub fn early_or<E>(draw: impl FnOnce() -> Result<Token, E>) -> Result<Token, E> {
    let early = if TOKEN_BEFORE_LOCK { EARLY.take() } else { None };
    early.map_or_else(draw, Ok)
}
