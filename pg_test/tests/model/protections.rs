//! The protections of leases and fences, one by one, so that a test can take one away.

use crate::search::protections;

protections! {
    /// An acquire locks the grant's place.
    grant_lock,
    /// A renewal or a release locks the grant.
    change_lock,
    /// A guard locks the grant.
    guard_lock,
    /// The rows are read again once the locks are had.
    reread,
    /// The token is drawn once the locks are had.
    draw_under_lock,
    /// The clock is read once the locks are had, not when the request came.
    clock_after_lock,
    /// A server that starts moves the sequence on before anything is drawn.
    start_move,
    /// Each move is on disk before it is recorded as done.
    durable_move,
    /// That this life has begun is recorded when the sequence was moved on, not before.
    start_last,
    /// A database that finds itself to be another one jumps.
    jump,
    /// It does so, too, where the server was started from a base backup, on the same timeline.
    backup_label,
    /// A move goes at least to the clock's seconds × 2^20.
    move_by_clock,
    /// The new identity is recorded when the jump is done, not before.
    identity_last,
    /// After a jump no earlier token speaks until renewed.
    floor,
    /// A take-over of a guarded grant is reported as such (else the search goes on to what comes of it).
    report_take_over,
    /// The session's lock is looked at once the grant's lock is had.
    session_after_lock,
    /// The session's lock is the grant's own, by its first token, not the lease's.
    session_lock_by_token,
    /// The session's lock is taken before the grant is there for others to see.
    session_lock_first,
    /// A release gives the session's lock back when it commits, not at once.
    session_lock_to_commit,
    /// A token that is smaller than a bound row's must speak for the lease.
    behind_must_speak,
    /// The row then keeps the greater token.
    keep_greater,
}

impl Protections {
    /// Whether a request takes something along from before its locks.
    pub fn looks_early(&self) -> bool {
        let late =
            [self.reread, self.draw_under_lock, self.clock_after_lock, self.session_after_lock];
        late.contains(&false)
    }
}

/// How far the model goes. Whatever happens at most so often may happen at any time.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// Clients, all of which want the lease.
    pub clients: usize,
    /// Seconds that may pass.
    pub seconds: u8,
    /// Tokens that may be drawn.
    pub draws: u8,
    /// Kills of the server.
    pub crashes: u8,
    /// Standbys promoted.
    pub promotions: u8,
    /// Base backups started as they are.
    pub restores: u8,
    /// Standbys there are, or base backups.
    pub standbys: usize,
    /// Times that a standby catches up.
    pub ships: u8,
    /// Times that the clock is set back by a second.
    pub steps_back: u8,
    /// Revocations.
    pub revocations: u8,
    /// Sessions killed: in mid-transaction, and anywhere where a grant ends with them.
    pub kills: u8,
    /// Times that a session gives back all its locks (`DISCARD ALL`, or in mid-transaction
    /// `pg_advisory_unlock_all()`).
    pub unlocks: u8,
    /// Transactions that change a lease and are rolled back.
    pub rollbacks: u8,
    /// For each client, whether its grants end with its session; those left out: no.
    pub sessions: &'static [bool],
    /// Acquires take back the caller's own grant.
    pub reclaim: bool,
    /// Commits wait until they are on disk.
    pub synchronous_commit: bool,
}

impl Bounds {
    /// Two clients, and nothing that goes wrong but their own slowness.
    pub const CALM: Bounds = Bounds {
        clients: 2,
        seconds: 3,
        draws: 4,
        crashes: 0,
        promotions: 0,
        restores: 0,
        standbys: 0,
        ships: u8::MAX,
        steps_back: 0,
        revocations: 0,
        kills: 0,
        unlocks: 0,
        rollbacks: 0,
        sessions: &[],
        reclaim: false,
        synchronous_commit: true,
    };
}
