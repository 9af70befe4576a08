//! What keeps the protocol safe, piece by piece, so that a test can take one away.

/// When a drawn token is made durable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flush {
    /// Before it is returned, whoever has logged it; an earlier record that covers it will do.
    Covered,
    /// Before it is returned, but only what the drawing transaction has logged itself.
    OwnRecord,
    /// At some time.
    Never,
}

/// The protections, all of which the extension has.
#[derive(Clone, Copy, Debug)]
pub struct Protections {
    /// An acquire locks the grant's place.
    pub grant_lock: bool,
    /// A guard locks the grant.
    pub guard_lock: bool,
    /// The rows are read again once the locks are had.
    pub reread: bool,
    /// The token is drawn once the locks are had.
    pub draw_under_lock: bool,
    /// The clock is read once the locks are had, not when the request came.
    pub clock_after_lock: bool,
    /// The token is durable before anyone sees it.
    pub flush: Flush,
    /// A record that recovery does not read covers nothing.
    pub redo: bool,
    /// A database that finds itself to be another one jumps.
    pub jump: bool,
    /// A jump goes at least to the clock's seconds × 2^20.
    pub jump_by_clock: bool,
    /// The new identity is recorded when the jump is done, not before.
    pub identity_last: bool,
    /// After a jump no earlier token speaks until renewed.
    pub floor: bool,
    /// A take-over of a guarded grant is reported as such (else the search goes on to what comes of it).
    pub report_take_over: bool,
    /// A strict row wants a greater token, not an equal one.
    pub strict_order: bool,
}

impl Protections {
    /// As the extension is.
    pub const ALL: Protections = Protections {
        grant_lock: true,
        guard_lock: true,
        reread: true,
        draw_under_lock: true,
        clock_after_lock: true,
        flush: Flush::Covered,
        redo: true,
        jump: true,
        jump_by_clock: true,
        identity_last: true,
        floor: true,
        report_take_over: true,
        strict_order: true,
    };

    /// Whether a request takes something along from before its locks.
    pub fn looks_early(&self) -> bool {
        !(self.reread && self.draw_under_lock && self.clock_after_lock)
    }
}

/// How far the model goes. Whatever happens at most so often may happen at any time.
#[derive(Clone, Debug)]
pub struct Bounds {
    /// A client each: whether it asks for the lease alone (else shared).
    pub exclusive: &'static [bool],
    /// Seconds that may pass.
    pub seconds: u8,
    /// Tokens that may be drawn.
    pub draws: u8,
    /// Kills of the server.
    pub crashes: u8,
    /// Checkpoints.
    pub checkpoints: u8,
    /// Standbys promoted.
    pub promotions: u8,
    /// Standbys there are.
    pub standbys: usize,
    /// Times that a standby catches up.
    pub ships: u8,
    /// Times that the clock is set back by a second.
    pub steps_back: u8,
    /// Revocations.
    pub revocations: u8,
    /// Sessions killed in mid-transaction.
    pub kills: u8,
    /// Acquires take back the caller's own grant.
    pub reclaim: bool,
    /// Commits wait until they are on disk.
    pub synchronous_commit: bool,
    /// Clients write the row that is bound to the lease.
    pub bound: bool,
    /// Clients write the row that is not.
    pub unbound: bool,
}

impl Bounds {
    /// Two clients that want the lease alone, and nothing that goes wrong but their own slowness.
    pub const CALM: Bounds = Bounds {
        exclusive: &[true, true],
        seconds: 3,
        draws: 4,
        crashes: 0,
        checkpoints: 0,
        promotions: 0,
        standbys: 0,
        ships: u8::MAX,
        steps_back: 0,
        revocations: 0,
        kills: 0,
        reclaim: false,
        synchronous_commit: true,
        bound: true,
        unbound: true,
    };
}
