//! The rules of leases and fences as a state machine, searched exhaustively within small bounds.
//!
//! Clients freeze anywhere, or their sessions end; a server crashes before its log is written; standbys lag when they
//! are promoted; a clock steps back. The decisions are not a copy: the machine calls the extension's own code
//! (`pg_test::rules`). Each protection is then taken away, and the search must find what goes wrong without it; it
//! prints the path to that state.
//!
//! In this machine a call takes all its locks at once, and the lease is exclusive. `locking` is a second model, in
//! which locks are taken one by one, also by shared and slot acquires. `snapshots` is a third, whose transactions read
//! from their snapshots. `rows` models leases in rows, which have only the row's lock. Real sessions and servers test
//! the rest (`suite`: `session_races`, `session_durability`, `leases::keep`, the scenarios): the order of waiters, how
//! rows are seen in a table that is rewritten, leases granted by other systems, grants that a crash may lose, many
//! leases renewed in one call.

mod locking;
mod protections;
mod requests;
mod rows;
mod search;
mod server;
mod snapshots;
mod state;
mod system;

use protections::{Bounds, Protections};
use search::searches;
use system::{
    GUARD_EXCLUDES, NEVER_BACK, NEVER_REISSUED, NO_STALE_BOUND, NOBODY_KEPT_OUT, NOT_ABANDONED,
    NOT_EXPIRED, NOT_REVIVED, ONE_HOLDER, System,
};

fn holds(bounds: Bounds) {
    search::holds(System { bounds, protections: Protections::ALL });
}

/// Checks that the property breaks without this protection.
fn breaks(bounds: Bounds, property: &'static str, take_away: fn(&mut Protections)) {
    search::breaks(System { bounds, protections: Protections::without(take_away) }, property);
}

const NO_FAULTS: Bounds = Bounds::NO_FAULTS;
/// The server is killed before its log is written.
const CRASHES: Bounds = Bounds { crashes: 1, kills: 1, seconds: 2, draws: 3, ..NO_FAULTS };
/// The server is killed, and commits do not wait for the disk.
const LAZY: Bounds = Bounds { synchronous_commit: false, kills: 0, ..CRASHES };
/// The server is killed again during its start, within a second.
const CRASH_LOOP: Bounds = Bounds { crashes: 2, seconds: 0, draws: 4, ..LAZY };
/// A lagging standby is promoted.
const FAILOVER: Bounds =
    Bounds { promotions: 1, standbys: 1, revocations: 1, seconds: 1, draws: 4, ..NO_FAULTS };
/// A standby that lags more is promoted after the first.
const TWO_FAILOVERS: Bounds = Bounds {
    promotions: 2,
    standbys: 2,
    clients: 1,
    // A promotion takes a second itself.
    seconds: 0,
    draws: 3,
    ships: 2,
    ..NO_FAULTS
};
/// A base backup is started as it is.
const RESTORE: Bounds = Bounds { promotions: 0, restores: 1, ..FAILOVER };
/// Sessions end, and with them the grants of one client or of both.
const SESSIONS: Bounds = Bounds {
    sessions: &[true, true],
    kills: 1,
    unlocks: 1,
    rollbacks: 1,
    revocations: 1,
    seconds: 1,
    ..NO_FAULTS
};
/// The clock steps back.
const CLOCK: Bounds = Bounds { steps_back: 1, revocations: 1, seconds: 4, ..NO_FAULTS };

searches! {
    frozen_clients_and_a_clock_that_steps_back_break_nothing => holds(CLOCK);
    sessions_that_end_with_their_grants_break_nothing =>
        holds(SESSIONS),
        holds(Bounds { sessions: &[true], seconds: 3, unlocks: 0, ..SESSIONS }),
        holds(Bounds { sessions: &[true, true], reclaim: true, rollbacks: 0, revocations: 0, ..SESSIONS });
    sessions_that_end_with_the_server_break_nothing =>
        holds(Bounds { sessions: &[true, true], kills: 0, seconds: 1, ..CRASHES }),
        holds(Bounds { sessions: &[true, true], revocations: 0, draws: 3, ..FAILOVER });
    reclaiming_breaks_nothing => holds(Bounds { reclaim: true, kills: 1, ..NO_FAULTS });
    crashes_with_an_unwritten_log_break_nothing => holds(CRASHES);
    a_crash_while_the_server_starts_breaks_nothing =>
        holds(CRASH_LOOP),
        holds(Bounds { synchronous_commit: true, seconds: 2, ..CRASH_LOOP });
    crashes_without_synchronous_commit_break_nothing => holds(LAZY);
    a_promoted_standby_that_is_behind_breaks_nothing =>
        holds(FAILOVER),
        holds(Bounds { draws: 3, kills: 1, ..FAILOVER });
    an_older_standby_promoted_after_it_breaks_nothing => holds(TWO_FAILOVERS);
    a_base_backup_started_as_it_is_breaks_nothing => holds(RESTORE);
    without_the_grant_s_lock_two_hold_it => breaks(NO_FAULTS, ONE_HOLDER, |p| p.grant_lock = false);
    without_a_second_look_under_the_lock_two_hold_it => breaks(NO_FAULTS, ONE_HOLDER, |p| p.reread = false);
    a_renewal_without_a_lock_is_written_over_a_revocation =>
        breaks(CLOCK, NOT_REVIVED, |p| p.change_lock = false);
    a_token_drawn_before_the_lock_is_out_of_order =>
        breaks(NO_FAULTS, NEVER_REISSUED, |p| p.draw_under_lock = false);
    a_clock_read_before_the_wait_lets_the_dead_speak =>
        breaks(NO_FAULTS, NOT_EXPIRED, |p| p.clock_after_lock = false);
    a_session_looked_at_before_the_wait_lets_the_dead_speak =>
        breaks(SESSIONS, NOT_ABANDONED, |p| p.session_after_lock = false);
    a_session_lock_of_the_lease_keeps_the_next_grant_alive =>
        breaks(SESSIONS, NOT_ABANDONED, |p| p.session_lock_by_token = false),
        breaks(SESSIONS, NOBODY_KEPT_OUT, |p| p.session_lock_by_token = false);
    a_session_lock_taken_after_the_commit_lets_two_hold_it =>
        breaks(SESSIONS, ONE_HOLDER, |p| p.session_lock_first = false);
    a_session_lock_given_back_before_the_commit_lets_two_hold_it =>
        breaks(SESSIONS, ONE_HOLDER, |p| p.session_lock_to_commit = false);
    // The second search continues past states in which a take-over is reported.
    a_guard_without_a_lock_is_taken_over_and_its_write_is_stale =>
        breaks(NO_FAULTS, GUARD_EXCLUDES, |p| p.guard_lock = false),
        breaks(NO_FAULTS, NO_STALE_BOUND, |p| (p.guard_lock, p.report_take_over) = (false, false));
    a_smaller_token_that_need_not_speak_lets_a_stale_write_land =>
        breaks(NO_FAULTS, NO_STALE_BOUND, |p| p.behind_must_speak = false);
    a_bound_row_that_takes_a_smaller_token_forgets_what_it_has_seen =>
        breaks(NO_FAULTS, NEVER_BACK, |p| p.keep_greater = false);
    a_server_that_starts_without_an_advance_reissues_tokens =>
        breaks(CRASHES, NEVER_REISSUED, |p| p.start_advance = false),
        breaks(LAZY, NEVER_REISSUED, |p| p.start_advance = false);
    an_advance_that_a_second_crash_undoes_reissues_tokens =>
        breaks(CRASH_LOOP, NEVER_REISSUED, |p| p.durable_advance = false);
    a_start_recorded_before_the_advance_reissues_tokens =>
        breaks(LAZY, NEVER_REISSUED, |p| p.start_last = false);
    without_a_new_epoch_a_promoted_standby_reissues_tokens => breaks(FAILOVER, NEVER_REISSUED, |p| p.new_epoch = false);
    a_base_backup_taken_for_a_crash_lets_a_stale_write_land =>
        breaks(RESTORE, NO_STALE_BOUND, |p| p.backup_label = false);
    // The start advances the sequence. But a token that was below the minimum is accepted again.
    an_identity_recorded_before_the_new_epoch_is_lost_to_a_crash =>
        breaks(Bounds { crashes: 1, ..FAILOVER }, NO_STALE_BOUND, |p| p.identity_last = false);
    an_advance_that_ignores_the_clock_does_not_outrun_the_one_before =>
        breaks(TWO_FAILOVERS, NEVER_REISSUED, |p| p.advance_by_clock = false);
    a_grant_from_before_the_failover_must_not_speak => breaks(FAILOVER, NO_STALE_BOUND, |p| p.epoch_checked = false);
}
