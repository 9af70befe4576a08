//! The command `pg_fence` among the clients: the same scenarios, in the form that they have for a program that cannot be
//! changed, with planted faults of its own.
//!
//! A scenario of `clients/scenarios.md` either has its form here, or cannot be asked of a command; clients/new-language.md says
//! why. Those that only a command can go through follow it.
//!
//! | module | its noun |
//! | --- | --- |
//! | [`stage`] | a database with a bound table, and runs of the command against it |
//! | [`terminal`] | a terminal for a run |
//! | [`plain`] | scenarios without trouble |
//! | [`lost`] | scenarios in which processes are frozen and killed, cables cut, servers restarted |

pub mod lost;
pub mod plain;
pub mod stage;
pub mod terminal;

use super::languages::rust;
use super::scenario::Way;
use super::stage::NotReady;
use crate::lab::Lab;
use crate::test_case::is_left_out;
use anyhow::{bail, Result};
use stage::Scene;
use std::path::Path;

/// As the command line calls it.
pub const NAME: &str = "command";

/// A scenario as the command goes through it.
pub struct Scenario {
    /// That of clients/scenarios.md, where it is there.
    pub name: &'static str,
    pub form: Form,
    /// The planted faults with which it must fail.
    pub catches: &'static [&'static str],
}

#[derive(Clone, Copy)]
pub enum Form {
    Played(fn(&Scene) -> Result<()>),
    /// It cannot be asked of a command, for this reason.
    LeftOut(&'static str),
}

const ONE_LEASE: &str = "a run holds one lease";

const fn played(name: &'static str, form: fn(&Scene) -> Result<()>) -> Scenario {
    Scenario { name, form: Form::Played(form), catches: &[] }
}

const fn left_out(name: &'static str, why: &'static str) -> Scenario {
    Scenario { name, form: Form::LeftOut(why), catches: &[] }
}

impl Scenario {
    const fn catches(mut self, faults: &'static [&'static str]) -> Scenario {
        self.catches = faults;
        self
    }
}

/// All of them: those of the page in its order, then those of a command alone.
pub const ALL: &[Scenario] = &[
    played("A day without trouble", plain::day),
    left_out("Refusals are types", "a program's own driver shows it the SQLSTATE"),
    left_out("Values of the wrong type are named", "a command line has texts only"),
    left_out("Whatever the role has set", "it asks as a client does"),
    left_out("The last write releases", "the lease is given back when the program has ended"),
    played("Several holders and several leases", plain::several_holders_and_leases),
    played("A wait in line uses up the deadline", plain::a_wait_in_line_uses_up_the_deadline),
    left_out("A wait is longer than the role's timeouts", "it asks as a client does"),
    left_out("A caller's own deadline", "a run has none; `timeout` ends it by a signal"),
    left_out("A read before the guard", "a run guards nothing"),
    left_out("A guard within a guard", "a run guards nothing"),
    left_out("The work commits by itself", "a run guards nothing"),
    left_out("A failed statement is swallowed", "a run guards nothing"),
    played("Frozen in the middle of a write", lost::all_of_it_is_frozen_and_writes_when_it_goes_on),
    left_out(
        "Frozen in a guarded transaction, under an adopted token",
        "a program that guards adopts by itself",
    ),
    played("Frozen in a guarded transaction", lost::frozen_in_a_guarded_transaction),
    played("The session ends under a transaction", lost::the_program_s_session_ends),
    left_out("Terminated in the middle of a statement", "the program's session is its own"),
    played("Killed", lost::both_are_killed_at_once_and_the_command_with_them),
    played("Killed, with a lease that ends with its session", lost::killed_with_a_session_lease),
    left_out("The process ends", "a run ends with its program"),
    played(
        "The session of a session lease ends",
        lost::a_session_lease_passes_on_when_its_connection_ends,
    ),
    played("The cable is cut", |scene| lost::cut(scene, Way::Both)),
    played("The cable swallows what is sent", |scene| lost::cut(scene, Way::Requests)),
    played("The cable swallows the answers", |scene| lost::cut(scene, Way::Answers)),
    left_out("Cut while it waits in line", "it asks as a client does"),
    left_out("Closed while the cable is cut", "a run ends with its program"),
    played("A cut that is mended in time", lost::a_cut_that_is_mended_in_time_ends_nothing),
    played("Slow answers", lost::slow_answers),
    played("Renewals are nobody else's business", lost::renewed_beside_an_open_transaction),
    played("The server is restarted", lost::the_server_is_restarted_and_the_command_goes_on),
    played("The server fails over", lost::the_server_fails_over_and_the_command_goes_on),
    played(
        "The server fails over, with an adopted token",
        lost::the_server_fails_over_with_an_adopted_token,
    ),
    played(
        "A pooler in between",
        lost::through_a_pooler_the_lease_is_kept_and_writes_need_the_token_set,
    ),
    played("The server's clock is set back", lost::the_server_s_clock_is_set_back),
    played("The heartbeat is starved while the work goes on", lost::frozen_keeper)
        .catches(&["no-deadline", "term-only"]),
    left_out("The heartbeat dies", "the keeper that is killed is a scenario of its own"),
    played(
        "The work is stuck while the heartbeat goes on",
        lost::a_frozen_command_that_ignores_term_ends_when_its_lease_is_revoked,
    ),
    played("A heartbeat that can never succeed", lost::denied),
    left_out("One of fifty is lost", ONE_LEASE),
    left_out("One of fifty is locked", ONE_LEASE),
    left_out("One of fifty is locked, and let go in time", ONE_LEASE),
    left_out("The cable is cut, with a hundred held", ONE_LEASE),
    left_out("A cut that is mended in time, with a hundred held", ONE_LEASE),
    left_out("A thousand leases on one connection", ONE_LEASE),
    left_out("One connection for all", ONE_LEASE),
    played(
        "The session of a session lease ends, long before a heartbeat",
        lost::a_session_lease_passes_on_when_its_connection_ends,
    ),
    left_out("Handed over by name", "a run holds its lease from its acquire to its end"),
    left_out("Two claim at once", ONE_LEASE),
    left_out("Guarded by several", ONE_LEASE),
    left_out("Leading", "a run does one thing once; what starts it again is cron or systemd"),
    left_out("What the work ends with", "a run does one thing once"),
    played("An unchanged psql presents the token", plain::presented_by_psql).catches(&["no-token"]),
    played("Only the program is frozen", lost::the_command_alone_is_frozen_and_keeps_its_lease),
    played(
        "All of it is frozen, and ends when it goes on",
        lost::all_of_it_is_frozen_and_ends_when_it_goes_on,
    ),
    played(
        "Only the supervisor is frozen",
        lost::the_supervisor_is_frozen_and_the_lease_is_kept_until_it_is_lost,
    ),
    played(
        "The supervisor is frozen, and the cable cut",
        lost::the_supervisor_is_frozen_and_the_cable_is_cut,
    ),
    played("The supervisor is killed", lost::killed_supervisor).catches(&["no-watchdog"]),
    played("The keeper is killed", lost::killed_keeper).catches(&["group-only"]),
    played("A process that hides from the keeper", lost::hidden_from_the_keeper)
        .catches(&["no-cgroup"]),
    played("The program is killed", lost::the_command_is_killed),
    played("What the program leaves behind", plain::left_behind).catches(&["release-first"]),
    played("A program that makes itself a daemon", plain::daemons).catches(&["one-look"]),
    played("The terminal is gone", plain::the_terminal_is_gone),
    played("Two hundred in line", plain::two_hundred_in_line),
];

/// The command, built, with a planted fault or without.
pub fn built(fault: Option<&str>) -> Result<std::path::PathBuf> {
    match fault {
        None => rust::build_command(),
        Some(fault) => rust::command_with(fault),
    }
}

/// All planted faults.
pub fn faults() -> impl Iterator<Item = &'static str> {
    ALL.iter().flat_map(|scenario| scenario.catches).copied()
}

/// Each scenario that catches this fault must fail with it.
pub fn catch(lab: &Lab, fault: &str, program: &Path) -> Result<()> {
    for scenario in ALL.iter().filter(|scenario| scenario.catches.contains(&fault)) {
        let Form::Played(form) = scenario.form else { continue };
        match stage::play(lab, program, form) {
            Err(error) if error.is::<NotReady>() || is_left_out(&error) => return Err(error),
            Err(caught) => eprintln!("{fault}: caught by \"{}\": {caught:#}", scenario.name),
            Ok(()) => bail!("{fault} is not caught by \"{}\"", scenario.name),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::scenario;
    use crate::extension::source_root;

    /// A new scenario needs a decision: what is it for a command?
    #[test]
    fn every_scenario_of_the_page_has_its_form_or_a_reason() {
        let page: Vec<String> = scenario::all().unwrap().into_iter().map(|one| one.name).collect();
        let ours: Vec<&str> = ALL.iter().map(|one| one.name).take(page.len()).collect();
        assert_eq!(ours, page);
    }

    #[test]
    fn the_clients_page_says_what_cannot_be_asked_of_a_command() {
        let page = std::fs::read_to_string(source_root().join("clients/new-language.md")).unwrap();
        for scenario in ALL {
            if let Form::LeftOut(why) = scenario.form {
                assert!(
                    page.contains(&format!("| {} | {why} |", scenario.name)),
                    "{}",
                    scenario.name
                );
            }
        }
    }
}
