//! The protections of leases and fences, one by one. A test can take one away.

use crate::search::protections;

protections! {
    /// An acquire locks the lease.
    grant_lock,
    /// A renewal or a release locks the grant.
    change_lock,
    /// A guard locks the grant.
    guard_lock,
    /// The rows are read again once the locks are held.
    reread,
    /// The token is drawn once the locks are held.
    draw_under_lock,
    /// The clock is read once the locks are held, not when the request arrives.
    clock_after_lock,
    /// A server that starts advances the sequence before any token is drawn.
    start_advance,
    /// Each advance is on disk before it is recorded as done.
    durable_advance,
    /// The start is recorded after the sequence was advanced, not before.
    start_last,
    /// A database that detects a new identity begins a new epoch.
    new_epoch,
    /// A server that was started from a base backup begins a new epoch, even on the same timeline.
    backup_label,
    /// An advance goes at least to the clock's seconds × 2^20.
    advance_by_clock,
    /// The new identity is recorded after the new epoch has begun, not before.
    identity_last,
    /// After a new epoch no earlier token is accepted until renewed.
    epoch_checked,
    /// A take-over of a guarded grant is reported as a violation. Without this the search continues to its
    /// consequences.
    report_take_over,
    /// The session's lock is checked once the grant's lock is held.
    session_after_lock,
    /// The session's lock is the grant's own, by its first token, not the lease's.
    session_lock_by_token,
    /// The session's lock is taken before the grant is visible to others.
    session_lock_first,
    /// A release gives back the session's lock at commit, not at once.
    session_lock_to_commit,
    /// A token smaller than that of a bound row must be the lease's current one.
    behind_must_speak,
    /// The row then keeps the greater token.
    keep_greater,
}

impl Protections {
    /// Returns true if a request reads something before it holds its locks.
    pub fn looks_early(&self) -> bool {
        let late =
            [self.reread, self.draw_under_lock, self.clock_after_lock, self.session_after_lock];
        late.contains(&false)
    }
}

/// The bounds of the model: how often each kind of event may happen. It may happen at any time.
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
    /// Promotions of a standby.
    pub promotions: u8,
    /// Starts of a base backup as it is.
    pub restores: u8,
    /// The number of standbys or base backups.
    pub standbys: usize,
    /// Times that a standby catches up.
    pub ships: u8,
    /// Times that the clock is set back by a second.
    pub steps_back: u8,
    /// Revocations.
    pub revocations: u8,
    /// Sessions killed: during a transaction, and at any time if a grant ends with the session.
    pub kills: u8,
    /// Times that a session releases all its locks (`DISCARD ALL`, or during a transaction `pg_advisory_unlock_all()`).
    pub unlocks: u8,
    /// Transactions that change a lease and are rolled back.
    pub rollbacks: u8,
    /// For each client, whether its grants end with its session. Missing entries mean no.
    pub sessions: &'static [bool],
    /// Acquires reclaim the caller's own grant.
    pub reclaim: bool,
    /// Commits wait until they are on disk.
    pub synchronous_commit: bool,
}

impl Bounds {
    /// Two clients, and no faults but their own delays.
    pub const NO_FAULTS: Bounds = Bounds {
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
