//! The rules of leases and fences as a state machine, searched to its end within small bounds.
//!
//! Clients that freeze wherever they are or whose sessions end, a server that crashes with an unwritten log,
//! standbys that are behind when they are promoted, a clock that steps back. The decisions are not a copy: the machine
//! calls the extension's own code (`pg_test::rules`). Each protection is then taken away, and the search
//! must find what goes wrong without it; the path there is printed.
//!
//! In this machine a call has all its locks at once; `locking` is another one, in which they are taken one by one, and
//! `snapshots` a third, whose transactions read the world of their snapshots; `durability` is about grants that a crash may
//! lose, `keep` about many leases renewed in one call. Real sessions try the rest (`lab`:
//! `mixed_modes`, `session_races`, `snapshots`, the scripts): the order of those who wait, how rows are seen in a table that
//! is rewritten, and leases that somebody else grants.

mod durability;
mod keep;
mod locking;
mod protections;
mod requests;
mod search;
mod server;
mod snapshots;
mod state;
mod system;

use protections::{Bounds, Protections};
use system::{
    System, GUARD_EXCLUDES, NEVER_BACK, NEVER_REISSUED, NOBODY_KEPT_OUT, NOT_ABANDONED,
    NOT_EXPIRED, NO_STALE_BOUND, NO_STALE_UNBOUND, ONE_HOLDER,
};

fn holds(bounds: Bounds) {
    search::holds(System { bounds, protections: Protections::ALL });
}

/// Without this protection the property is broken.
fn breaks(bounds: Bounds, property: &'static str, take_away: fn(&mut Protections)) {
    search::breaks(System { bounds, protections: Protections::without(take_away) }, property);
}

const CALM: Bounds = Bounds::CALM;
/// The server is killed, its log not yet written.
const CRASHES: Bounds = Bounds { crashes: 1, kills: 1, seconds: 2, draws: 3, ..CALM };
/// The same, where commits do not wait for the disk.
const LAZY: Bounds = Bounds { synchronous_commit: false, kills: 0, ..CRASHES };
/// The server is killed again while it starts, within a second. Tokens alone matter here.
const CRASH_LOOP: Bounds =
    Bounds { crashes: 2, seconds: 0, draws: 4, bound: false, unbound: false, ..LAZY };
/// A standby that is behind takes over.
const FAILOVER: Bounds = Bounds {
    promotions: 1,
    standbys: 1,
    revocations: 1,
    seconds: 1,
    draws: 4,
    unbound: false,
    ..CALM
};
/// An older standby takes over from the first. Tokens alone matter here.
const TWO_FAILOVERS: Bounds = Bounds {
    promotions: 2,
    standbys: 2,
    exclusive: &[true],
    // A promotion takes a second of its own.
    seconds: 0,
    draws: 3,
    ships: 2,
    bound: false,
    unbound: false,
    ..CALM
};
/// Sessions end, and with them the grants of one client or of both.
const SESSIONS: Bounds = Bounds {
    sessions: &[true, true],
    kills: 1,
    unlocks: 1,
    rollbacks: 1,
    revocations: 1,
    seconds: 1,
    unbound: false,
    ..CALM
};
/// Readers and a writer.
const SHARED: Bounds = Bounds { exclusive: &[true, false, false], unbound: false, ..CALM };
/// The clock steps back.
const CLOCK: Bounds = Bounds { steps_back: 1, revocations: 1, seconds: 4, ..CALM };

#[test]
fn frozen_clients_and_a_clock_that_steps_back_break_nothing() {
    holds(CLOCK);
}

#[test]
fn readers_and_writers_exclude_each_other() {
    holds(SHARED);
}

#[test]
fn sessions_that_end_with_their_grants_break_nothing() {
    holds(SESSIONS);
    holds(Bounds { sessions: &[true], seconds: 3, unlocks: 0, ..SESSIONS });
    holds(Bounds {
        sessions: &[true, true],
        reclaim: true,
        rollbacks: 0,
        revocations: 0,
        ..SESSIONS
    });
}

#[test]
fn readers_whose_sessions_end_break_nothing() {
    let sessions: &[bool] = &[true, true, true];
    holds(Bounds { sessions, kills: 1, seconds: 1, draws: 3, ..SHARED });
}

#[test]
fn sessions_that_end_with_the_server_break_nothing() {
    holds(Bounds { sessions: &[true, true], kills: 0, seconds: 1, ..CRASHES });
    holds(Bounds { sessions: &[true, true], revocations: 0, draws: 3, ..FAILOVER });
}

#[test]
fn reclaiming_breaks_nothing() {
    holds(Bounds { reclaim: true, kills: 1, ..CALM });
}

#[test]
fn crashes_with_an_unwritten_log_break_nothing() {
    holds(CRASHES);
}

#[test]
fn a_crash_while_the_server_starts_breaks_nothing() {
    holds(CRASH_LOOP);
    holds(Bounds { synchronous_commit: true, seconds: 2, ..CRASH_LOOP });
}

#[test]
fn crashes_without_synchronous_commit_break_nothing() {
    holds(LAZY);
}

#[test]
fn a_promoted_standby_that_is_behind_breaks_nothing() {
    holds(FAILOVER);
    holds(Bounds { bound: false, unbound: true, draws: 3, kills: 1, ..FAILOVER });
}

#[test]
fn an_older_standby_promoted_after_it_breaks_nothing() {
    holds(TWO_FAILOVERS);
}

#[test]
fn without_the_grant_s_lock_two_hold_it() {
    breaks(CALM, ONE_HOLDER, |p| p.grant_lock = false);
    breaks(SHARED, ONE_HOLDER, |p| p.grant_lock = false);
}

#[test]
fn without_a_second_look_under_the_lock_two_hold_it() {
    breaks(CALM, ONE_HOLDER, |p| p.reread = false);
}

#[test]
fn a_token_drawn_before_the_lock_is_out_of_order() {
    breaks(CALM, NEVER_REISSUED, |p| p.draw_under_lock = false);
}

#[test]
fn a_clock_read_before_the_wait_lets_the_dead_speak() {
    breaks(CALM, NOT_EXPIRED, |p| p.clock_after_lock = false);
}

#[test]
fn a_session_looked_at_before_the_wait_lets_the_dead_speak() {
    breaks(SESSIONS, NOT_ABANDONED, |p| p.session_after_lock = false);
}

#[test]
fn a_session_lock_of_the_lease_keeps_the_next_grant_alive() {
    breaks(SESSIONS, NOT_ABANDONED, |p| p.session_lock_by_token = false);
    breaks(SESSIONS, NOBODY_KEPT_OUT, |p| p.session_lock_by_token = false);
}

#[test]
fn a_session_lock_taken_after_the_commit_lets_two_hold_it() {
    breaks(SESSIONS, ONE_HOLDER, |p| p.session_lock_first = false);
}

#[test]
fn a_session_lock_given_back_before_the_commit_lets_two_hold_it() {
    breaks(SESSIONS, ONE_HOLDER, |p| p.session_lock_to_commit = false);
}

#[test]
fn a_guard_without_a_lock_is_taken_over_and_its_write_is_stale() {
    breaks(CALM, GUARD_EXCLUDES, |p| p.guard_lock = false);
    // Go on where the first is no news.
    breaks(CALM, NO_STALE_BOUND, |p| (p.guard_lock, p.report_take_over) = (false, false));
}

#[test]
fn a_smaller_token_that_need_not_speak_lets_a_stale_write_land() {
    breaks(CALM, NO_STALE_BOUND, |p| p.behind_must_speak = false);
    breaks(SHARED, NO_STALE_BOUND, |p| p.behind_must_speak = false);
}

#[test]
fn a_bound_row_that_takes_a_smaller_token_forgets_what_it_has_seen() {
    breaks(CALM, NEVER_BACK, |p| p.keep_greater = false);
    breaks(SHARED, NEVER_BACK, |p| p.keep_greater = false);
}

#[test]
fn a_row_that_takes_an_equal_token_is_written_twice_by_it() {
    breaks(CALM, NO_STALE_UNBOUND, |p| p.strict_order = false);
}

#[test]
fn a_server_that_starts_without_moving_on_reissues_tokens() {
    breaks(CRASHES, NEVER_REISSUED, |p| p.start_move = false);
    breaks(LAZY, NEVER_REISSUED, |p| p.start_move = false);
}

#[test]
fn a_move_that_a_second_crash_undoes_reissues_tokens() {
    breaks(CRASH_LOOP, NEVER_REISSUED, |p| p.durable_move = false);
}

#[test]
fn a_life_recorded_as_begun_before_the_move_reissues_tokens() {
    breaks(LAZY, NEVER_REISSUED, |p| p.start_last = false);
}

#[test]
fn without_a_jump_a_promoted_standby_reissues_tokens() {
    breaks(FAILOVER, NEVER_REISSUED, |p| p.jump = false);
}

#[test]
fn an_identity_recorded_before_the_jump_is_lost_to_a_crash() {
    let bounds = Bounds { crashes: 1, ..FAILOVER };
    // The start moves the sequence on; but what is silent no longer is.
    breaks(bounds, NO_STALE_BOUND, |p| p.identity_last = false);
}

#[test]
fn a_jump_that_ignores_the_clock_does_not_outrun_the_one_before() {
    breaks(TWO_FAILOVERS, NEVER_REISSUED, |p| p.move_by_clock = false);
}

#[test]
fn a_grant_from_before_the_failover_must_not_speak() {
    breaks(FAILOVER, NO_STALE_BOUND, |p| p.floor = false);
}
